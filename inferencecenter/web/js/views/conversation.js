// @ts-check
import { ask, askAgain, askInVersion, fork, newChatInstead, newVersion, openSession, sought, undoVersion } from "../conversations.js";
import { number, t } from "../i18n.js";
import { sessions, titleOfSession } from "../list.js";
import { modelOf, models, stateOf, suggestionsFor } from "../models.js";
import { attempt, link } from "../state.js";
import { beginLater } from "../text/slices.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { versionsAt } from "../versions.js";
import { Chips } from "./chips.js";
import { Composer, dropFiles, focusComposer } from "./composer.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";
import { TurnView } from "./message.js";
import { Notices } from "./notices.js";
import { phaseWords } from "./outcome.js";

/** @typedef {import("../wire/session.js").Session} Session */

const settings = () => import("./settings.js");
const picker = () => import("./picker.js");
/** Part of the context from which its meter warns. */
const NEARLY_FULL = 0.85;

/** The first use of a number format takes as long as a frame, so those of an answer's outcome are used in advance. */
function* warming() {
  for (const decimals of [undefined, 0, 1]) {
    number(1000, decimals);
    yield;
  }
}

addEventListener("load", () => beginLater(warming()), { once: true });

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
  const [turns, at] = [session.turns.value, sought.value];
  useEffect(() => {
    if (at === null || at.id !== session.id.peek()) return;
    const turn = scroller.current?.querySelector(`[data-turn="${CSS.escape(at.turnId)}"]`);
    if (!turn) return;
    follower.current?.to(turn);
    sought.value = null;
  }, [session, turns, at]);
  const closeSettings = () => {
    setChoosing(false);
    gear.current?.focus();
  };
  const title = useRef("");
  // A deleted session is not in the list, but still has a title here.
  if (session.state.value !== "gone" || !title.current) title.current = titleOfSession(session.id.value);
  return html`
    <main class="conversation" onDrop=${(/** @type {DragEvent} */ event) => dropFiles(session, event)}>
      <header class="conversation-head">
        ${opener}
        <div class="conversation-title">
          <h1 dir="auto">${title.current}</h1>
          <${Facts} session=${session} />
        </div>
        <button type="button" class="icon-button" ref=${gear} aria-label=${t("chat.settings")} aria-expanded=${choosing}
          title=${t("chat.settings_title")} onClick=${() => setChoosing(!choosing)}>
          <${Icon} name="settings" />
        </button>
      </header>
      <${Notices} />
      <div class="scroller" ref=${scroller} tabindex="0" role="region" aria-label=${t("chat.messages")}>
        <${Turns} session=${session} />
      </div>
      <div class="dock">
        ${!atEnd &&
        html`<button type="button" class="to-end" aria-label=${t("chat.to_end")} onClick=${() => follower.current?.toEnd()}>
          <${Icon} name="down" />
        </button>`}
        <${Standing} session=${session} />
        ${newVersion.value?.session === session && html`<${NewVersion} />`}
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
  return html`
    <div class="conversation-facts">
      <${Model} session=${session} />
      ${tokens !== null &&
      html`<span class="fact-context" title=${t("context.title")}>
        ${limit !== null && html`<meter aria-hidden="true" max=${limit} high=${limit * NEARLY_FULL} optimum="0" value=${tokens}></meter>`}
        ${limit === null ? t("context.tokens", { tokens }) : t("context.of", { tokens, limit })}
      </span>`}
      ${dropped > 0 &&
      html`<span class="fact-dropped" title=${t("context.dropped_title")}>
        ${t("context.dropped", { n: dropped })}
      </span>`}
    </div>
  `;
}

/** @param {{session: Session}} props  The model, with its state where it is not loaded; opens the choice. */
function Model({ session }) {
  const [choosing, setChoosing] = useState(false);
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const name = modelOf(session);
  const model = models.value?.find((each) => each.name === name);
  const [words, mood] = model ? stateOf(model) : ["", ""];
  const close = (/** @type {boolean} */ focus) => {
    setChoosing(false);
    if (focus) ref.current?.focus();
  };
  if (!name) return null;
  return html`
    <button type="button" class="fact-model" ref=${ref} aria-haspopup="listbox" aria-expanded=${choosing} title=${t("settings.model")}
      onMouseDown=${(/** @type {Event} */ event) => event.preventDefault()} onClick=${() => (choosing ? close(true) : setChoosing(true))}>
      <span class="fact-model-name">${name}</span>
      ${model && model.state !== "loaded" && html`<span class="fact-state" data-mood=${mood}>${words}</span>`}
      <${Icon} name="unfold" />
    </button>
    ${choosing && html`<${Lazy} load=${picker} name="Picker" session=${session} onClose=${close} />`}
  `;
}

/** As many of the last turns are drawn first, so that the end of a long conversation does not wait for its beginning. */
const FIRST_TURNS = 8;

/** @param {() => void} then */
function afterPaint(then) {
  requestAnimationFrame(() => setTimeout(then));
}

/** @param {{session: Session}} props */
function Turns({ session }) {
  const turns = session.turns.value;
  const live = session.live.value;
  const elsewhere = session.state.value === "detached" ? t("chat.elsewhere") : "";
  const waiting = link.value?.state.value === "open" ? elsewhere : t("chat.waiting");
  const [whole, setWhole] = useState(() => sought.peek() !== null);
  const hasTurns = turns.length > 0;
  useEffect(() => {
    if (hasTurns) afterPaint(() => setWhole(true));
  }, [hasTurns]);
  if (!session.known.value && session.state.value !== "gone") return html`<p class="empty hint">${t("notice.loading")}</p>`;
  if (turns.length === 0 && !live) return html`<${Empty} session=${session} />`;
  // One list: a running turn keeps its nodes when it ends.
  const from = whole ? 0 : Math.max(0, turns.length - FIRST_TURNS);
  const shown = turns.map((_turn, index) => index >= from && endedTurn(session, index, live === null && index === turns.length - 1));
  const all = live ? [...shown, html`<${TurnView} key=${live.key} live=${live} waiting=${waiting} doing=${NOTHING} />`] : shown;
  return html`<div class="turns" data-idle=${session.idle}>${all}</div>`;
}

/** @type {WeakMap<import("../wire/transcript.js").Turn, {inputs: readonly unknown[], element: any}>} */
const elements = new WeakMap();
/** @type {import("./message.js").Doing} */
const NOTHING = {};

/**
 * Returns the element of an ended turn, which is the same one until something about the turn changes: the same element is
 * not rendered again, so in a long conversation the begin and the end of an answer render the turns at its end only.
 *
 * @param {Session} session
 * @param {number} index
 * @param {boolean} isLast  Whether nothing follows it.
 */
function endedTurn(session, index, isLast) {
  const turns = session.turns.value;
  const [turn, id] = [turns[index], session.id.value];
  const versions = id === null ? undefined : versionsAt(sessions.value, id, index);
  const inputs = [session, id, index, index === 0 || turns[index - 1].turnId !== null, isLast, versions?.at, versions?.ids.join(" ")];
  const known = elements.get(turn);
  if (known && known.inputs.every((input, at) => input === inputs[at])) return known.element;
  const element = html`<${TurnView} key=${turn.key} turn=${turn} isLast=${isLast} waiting="" doing=${doingWith(session, index, isLast, versions)} />`;
  elements.set(turn, { inputs, element });
  return element;
}

/** @param {{session: Session}} props */
function Empty({ session }) {
  if (session.state.value === "gone") return null;
  return html`
    <div class="empty">
      <h2>${t("chat.empty")}</h2>
      <div class="suggestions">
        ${suggestionsFor(modelOf(session)).map((text) => html`<button type="button" class="button" key=${text} onClick=${() => ask(text)}>${text}</button>`)}
      </div>
    </div>
  `;
}

/** Offers to undo an edit or a regeneration. */
function NewVersion() {
  // The button that was pressed disappears, so the focus has to move.
  const undo = () => {
    focusComposer();
    undoVersion();
  };
  const keep = () => {
    focusComposer();
    newVersion.value = null;
  };
  return html`
    <div class="notice" role="status">
      <span>${t("version.made")}</span>
      <button type="button" class="button small" onClick=${undo}>${t("version.undo")}</button>
      <button type="button" class="button quiet small" onClick=${keep}>${t("version.keep")}</button>
    </div>
  `;
}

/** @param {{session: Session}} props  Explains why input is disabled, and offers the remedy. */
function Standing({ session }) {
  const error = session.error.value;
  if (session.state.value === "detached") {
    return html`
      <div class="notice" role="status">
        <span>${t("chat.detached")}</span>
        <button type="button" class="button small" onClick=${() => session.resume()}>${t("chat.continue_here")}</button>
      </div>
    `;
  }
  if (session.state.value === "gone") {
    return html`
      <div class="notice" data-mood="bad" role="status">
        <span>${session.farewell}</span>
        <button type="button" class="button small" onClick=${newChatInstead}>${t("chat.new")}</button>
      </div>
    `;
  }
  return error && html`<div class="notice" data-mood="bad" role="alert"><span>${error.message} ${error.hint}</span></div>`;
}

/**
 * Returns the actions available for an ended turn; those that change the conversation are displayed while it is idle.
 *
 * @param {Session} session
 * @param {number} index
 * @param {boolean} isLast
 * @param {{ids: readonly string[], at: number}} [versions]
 * @returns {import("./message.js").Doing}
 */
function doingWith(session, index, isLast, versions) {
  const turns = session.turns.peek();
  const turn = turns[index];
  const failed = turn.ending?.reason === "error";
  const calls = isLast && turn.ending?.reason === "tool_calls" ? turn.answer?.toolCalls ?? [] : [];
  const answerCalls = (/** @type {readonly import("../wire/transcript.js").ChatMessage[]} */ messages) => {
    focusComposer();
    attempt(() => askAgain(session, [...session.results.peek(), ...messages]));
  };
  const isFresh = turn.ending?.stats !== null; // it ended before the user's eyes
  const results = calls.length > 0 ? { session, isFresh, onSend: answerCalls } : undefined;
  if (turn.ending === null) return { results };
  const reachable = failed || index === 0 || turns[index - 1].turnId !== null;
  // The button that was pressed disappears, so the focus has to move.
  const again = (/** @type {(asked: readonly any[]) => readonly any[]} */ change) => {
    focusComposer();
    attempt(() => askInVersion(session, index, change(turn.asked)));
  };
  return {
    isIdle: () => session.idle,
    versions: versions && versions.ids.length > 1 && versions.at >= 0
      ? { at: versions.at, count: versions.ids.length, show: (which) => openSession(versions.ids[which]) }
      : undefined,
    results,
    edit: reachable ? (message) => again((asked) => [...asked.slice(0, -1), message]) : undefined,
    again: reachable && isLast ? () => again((asked) => asked) : undefined,
    fork: turn.turnId !== null ? () => fork(session, /** @type {string} */ (turn.turnId)) : undefined,
  };
}

const EVERY_MS = 2500;

/**
 * Announces an answer to screen readers, in whole sentences and at a limited rate.
 *
 * @param {{session: import("../wire/session.js").Session}} props
 */
function Announcer({ session }) {
  const [said, setSaid] = useState("");
  const told = useRef(0);
  const live = session.live.value;
  useEffect(() => {
    if (!live) return undefined;
    told.current = 0;
    setSaid(phaseWords(live));
    const timer = setInterval(() => {
      const end = sentenceEnd(live.content, told.current);
      if (end === told.current) return;
      setSaid(live.content.slice(told.current, end));
      told.current = end;
    }, EVERY_MS);
    return () => {
      clearInterval(timer);
      const rest = live.content.slice(told.current);
      setSaid(live.stopping ? t("chat.stopped") : t("chat.end", { rest }));
    };
  }, [live]);
  return html`<div class="visually-hidden" role="log" aria-live="polite" aria-label=${t("chat.stream")}>${said}</div>`;
}

/**
 * Returns the end of the last whole sentence or line.
 *
 * @param {string} text
 * @param {number} from
 */
function sentenceEnd(text, from) {
  const part = text.slice(from);
  const ends = [...part.matchAll(/[.!?…:;]\s|\n/g)];
  const last = ends.at(-1);
  return last ? from + last.index + last[0].length : from;
}

/** Distance from the end that counts as being at the end. */
const NEAR_PX = 48;
const USER_SCROLLS = ["wheel", "touchmove", "pointerdown", "keydown"];

/**
 * Keeps an element scrolled to its end while its content grows, until the user scrolls up.
 *
 * @param {HTMLElement} scroller  Its only child is the growing content.
 * @param {(atEnd: boolean) => void} onChange
 */
function followEnd(scroller, onChange) {
  let following = true;
  let lastTop = 0;
  /** @type {Element | null} */
  let pinned = null;
  const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
  const set = (/** @type {boolean} */ value) => {
    if (following === value) return;
    following = value;
    // Content that is rendered above the view must not move it; its end moves while it is followed.
    scroller.style.overflowAnchor = value ? "none" : "auto";
    onChange(value);
  };
  const toEnd = () => {
    pinned = null;
    set(true);
    scroller.scrollTop = scroller.scrollHeight;
  };
  const unpin = () => (pinned = null);
  const to = (/** @type {Element} */ child) => {
    // Until the user scrolls: texts above and below are still drawn.
    pinned = child;
    set(false);
    child.scrollIntoView();
  };
  const scrolled = () => {
    // Resizing scrolls, too; only a user scrolls up while there is more below.
    const up = scroller.scrollTop < lastTop - 1;
    lastTop = scroller.scrollTop;
    if (pinned) return;
    if (atEnd()) set(true);
    else if (up) set(false);
  };
  const grown = new ResizeObserver(() => {
    if (following) toEnd();
    else if (pinned) pinned.scrollIntoView();
    else onChange(atEnd());
  });
  const watch = () => {
    grown.disconnect();
    grown.observe(scroller);
    for (const child of scroller.children) grown.observe(child);
  };
  const replaced = new MutationObserver(watch);
  watch();
  replaced.observe(scroller, { childList: true });
  scroller.addEventListener("scroll", scrolled, { passive: true });
  for (const event of USER_SCROLLS) scroller.addEventListener(event, unpin, { passive: true });
  const end = () => {
    grown.disconnect();
    replaced.disconnect();
    scroller.removeEventListener("scroll", scrolled);
    for (const event of USER_SCROLLS) scroller.removeEventListener(event, unpin);
  };
  return { toEnd, to, end };
}
