// @ts-check
import { html, useEffect, useRef, useState } from "../ui.js";
import { ask, askAgain, askInVersion, fork, newChatInstead, openSession } from "../conversations.js";
import { modelOfSession, sessions, titleOfSession } from "../list.js";
import { attempt, hello, link } from "../state.js";
import { versionsAt } from "../versions.js";
import { beginLater } from "../text/slices.js";
import { Announcer } from "./announcer.js";
import { Chips } from "./chips.js";
import { Composer, focusComposer } from "./composer.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";
import { TurnView } from "./message.js";
import { Notices } from "./notices.js";
import { followEnd } from "./scrolling.js";

/** @typedef {import("../wire/session.js").Session} Session */

const settings = () => import("./settings.js");
/** Part of the context from which its meter warns. */
const NEARLY_FULL = 0.85;
const SUGGESTIONS = ["Explain how a hash table works.", "Write a haiku about rain.", "Count from 1 to 20."];

// The first call of a number format takes as long as a frame, so it is made in advance.
addEventListener("load", () => beginLater([1000].map((number) => void number.toLocaleString()).values()), { once: true });

/**
 * One conversation.
 *
 * @param {{session: Session, opener: any}} props  `opener` opens the list on narrow screens.
 */
export function Conversation({ session, opener }) {
  const [choosing, setChoosing] = useState(false);
  const [atEnd, setAtEnd] = useState(true);
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const gear = useRef(/** @type {HTMLElement | null} */ (null));
  const follower = useRef(/** @type {ReturnType<typeof followEnd> | null} */ (null));
  useEffect(() => {
    follower.current = followEnd(/** @type {HTMLElement} */ (scroller.current), setAtEnd);
    return () => follower.current?.end();
  }, [session]);
  const live = session.live.value;
  useEffect(() => {
    if (live) follower.current?.toEnd();
  }, [live]);
  const closeSettings = () => {
    setChoosing(false);
    gear.current?.focus();
  };
  const title = useRef("");
  // A deleted session is not in the list, but still has a title here.
  if (session.state.value !== "gone" || !title.current) title.current = titleOfSession(session.id.value);
  return html`
    <main class="conversation">
      <header class="conversation-head">
        ${opener}
        <div class="conversation-title">
          <h1 dir="auto">${title.current}</h1>
          <${Facts} session=${session} />
        </div>
        <button type="button" class="icon-button" ref=${gear} aria-label="Conversation settings" aria-expanded=${choosing}
          title="System prompt, parameters, response format" onClick=${() => setChoosing(!choosing)}>
          <${Icon} name="settings" />
        </button>
      </header>
      <${Notices} />
      <div class="scroller" ref=${scroller} tabindex="0" role="region" aria-label="Messages">
        <${Turns} session=${session} />
      </div>
      <div class="dock">
        ${!atEnd &&
        html`<button type="button" class="to-end" aria-label="Scroll to the end" onClick=${() => follower.current?.toEnd()}>
          <${Icon} name="down" />
        </button>`}
        <${Standing} session=${session} />
        <${Chips} id=${session.id.value} onOpen=${() => setChoosing(true)} />
        <${Composer} session=${session} />
      </div>
      ${choosing && html`<${Lazy} load=${settings} name="Settings" session=${session} onClose=${closeSettings} />`}
      <${Announcer} session=${session} />
    </main>
  `;
}

/** @param {{session: Session}} props */
function Facts({ session }) {
  const [tokens, limit, dropped] = [session.contextTokens.value, session.contextLimit.value, session.dropped.value];
  const model = session.model.value || modelOfSession(session.id.value) || hello.value?.model || "";
  const of = limit === null ? "" : ` / ${limit.toLocaleString()}`;
  return html`
    <p class="conversation-facts">
      ${model && html`<span class="fact-model">${model}</span>`}
      ${tokens !== null &&
      html`<span class="fact-context" title="Tokens in the context, and its size">
        ${limit !== null && html`<meter aria-hidden="true" max=${limit} high=${limit * NEARLY_FULL} optimum="0" value=${tokens}></meter>`}
        ${tokens.toLocaleString()}${of} tokens
      </span>`}
      ${dropped > 0 &&
      html`<span class="fact-dropped" title="The context was full. They stay in the conversation, but the model no longer reads them.">
        Oldest ${dropped === 1 ? "message" : `${dropped} messages`} no longer read
      </span>`}
    </p>
  `;
}

/** @param {{session: Session}} props */
function Turns({ session }) {
  const turns = session.turns.value;
  const live = session.live.value;
  const elsewhere = session.state.value === "detached" ? "Continues in another tab or on another device." : "";
  const waiting = link.value?.state.value === "open" ? elsewhere : "Waiting for the connection…";
  if (!session.known.value && session.state.value !== "gone") return html`<p class="empty hint">Loading…</p>`;
  if (turns.length === 0 && !live) return html`<${Empty} session=${session} />`;
  // One list: a running turn keeps its nodes when it ends.
  const shown = turns.map((turn, index) => ({ key: turn.key, turn, doing: doingWith(session, index) }));
  const all = live ? [...shown, { key: live.key, live, doing: {} }] : shown;
  return html`<div class="turns">
    ${all.map(({ key, ...props }) => html`<${TurnView} key=${key} waiting=${waiting} ...${props} />`)}
  </div>`;
}

/** @param {{session: Session}} props */
function Empty({ session }) {
  if (session.state.value === "gone") return null;
  return html`
    <div class="empty">
      <h2>What's on your mind?</h2>
      <div class="suggestions">
        ${SUGGESTIONS.map((text) => html`<button type="button" class="button" key=${text} onClick=${() => ask(text)}>${text}</button>`)}
      </div>
    </div>
  `;
}

/** @param {{session: Session}} props  Explains why input is disabled, and offers the remedy. */
function Standing({ session }) {
  const error = session.error.value;
  if (session.state.value === "detached") {
    return html`
      <div class="notice" role="status">
        <span>This conversation is open in another tab or on another device.</span>
        <button type="button" class="button small" onClick=${() => session.resume()}>Continue here</button>
      </div>
    `;
  }
  if (session.state.value === "gone") {
    return html`
      <div class="notice" data-mood="bad" role="status">
        <span>${session.farewell}</span>
        <button type="button" class="button small" onClick=${newChatInstead}>New chat</button>
      </div>
    `;
  }
  return error && html`<div class="notice" data-mood="bad" role="alert"><span>${error.message} ${error.hint}</span></div>`;
}

/**
 * Returns the actions available for a turn.
 *
 * @param {Session} session
 * @param {number} index
 * @returns {import("./message.js").Doing}
 */
function doingWith(session, index) {
  const turns = session.turns.value;
  const turn = turns[index];
  const failed = turn.ending?.reason === "error";
  if (!session.idle || turn.ending === null) return {};
  const reachable = failed || index === 0 || turns[index - 1].turnId !== null;
  // What was pressed disappears, so the focus has to move.
  const again = (/** @type {(asked: readonly any[]) => readonly any[]} */ change) => {
    focusComposer();
    attempt(() => askInVersion(session, index, change(turn.asked)));
  };
  const answerCalls = (/** @type {readonly string[]} */ contents) => {
    focusComposer();
    attempt(() => askAgain(session, resultsOf(calls, contents)));
  };
  const calls = index === turns.length - 1 && turn.ending.reason === "tool_calls" ? turn.answer?.toolCalls ?? [] : [];
  const id = session.id.value;
  return {
    versions: id === null ? undefined : versionsOfTurn(id, index),
    results: calls.length > 0 ? answerCalls : undefined,
    edit: reachable ? (text) => again((asked) => [...asked.slice(0, -1), { role: "user", content: text }]) : undefined,
    again: reachable && index === turns.length - 1 ? () => again((asked) => asked) : undefined,
    fork: turn.turnId !== null ? () => fork(session, /** @type {string} */ (turn.turnId)) : undefined,
  };
}

/**
 * @param {string} id
 * @param {number} index
 * @returns {import("./message.js").Doing["versions"]}
 */
function versionsOfTurn(id, index) {
  const { ids, at } = versionsAt(sessions.value, id, index);
  return ids.length > 1 && at >= 0 ? { at, count: ids.length, show: (which) => openSession(ids[which]) } : undefined;
}

/**
 * Returns the messages that carry tool results.
 *
 * @param {readonly import("../wire/transcript.js").ToolCall[]} calls
 * @param {readonly string[]} contents  One for each.
 * @returns {import("../wire/transcript.js").ChatMessage[]}
 */
function resultsOf(calls, contents) {
  return calls.map(({ call_id }, index) => ({ role: "tool", content: contents[index], tool_call_id: call_id }));
}
