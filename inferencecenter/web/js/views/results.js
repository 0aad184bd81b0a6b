// @ts-check
/** The results of tool calls: those that the daemon runs on MCP servers once the user allows it, and those entered by hand. */

import { choicesOf, keepChoices, wireTools } from "../choices.js";
import { loadTexts, rich, t } from "../i18n.js";
import { attempt } from "../state.js";
import { toolsOf } from "../tools.js";
import { html, useEffect, useId, useRef, useState } from "../ui.js";
import { focusComposer } from "./composer.js";

await loadTexts("tools");

/**
 * @typedef {import("../wire/transcript.js").ToolCall} ToolCall
 * @typedef {import("../wire/transcript.js").ChatMessage} ChatMessage
 * @typedef {import("../wire/session.js").Session} Session
 * @typedef {import("../tools.js").ServerTool} ServerTool
 */

/** The result of a denied call, for the model. */
const DENIED = t("results.denial");
/** The same for a call that may have run. */
const INTERRUPTED = t("results.interruption");

/**
 * @param {object} props
 * @param {Session} props.session
 * @param {readonly ToolCall[]} props.calls
 * @param {boolean} props.isFresh  Whether the answer was generated while this page showed it.
 * @param {(messages: readonly ChatMessage[]) => void} props.onSend  Continues, with the results that the history lacks.
 */
export function ToolResults({ session, calls, isFresh, onSend }) {
  const sessionId = session.id.value;
  const chosen = choicesOf(sessionId);
  const servers = chosen.servers.join(" ");
  const [tools, setTools] = useState(/** @type {ReadonlyMap<string, ServerTool> | null} */ (null));
  /** The results by hand, by call. */
  const [texts, setTexts] = useState(/** @type {Readonly<Record<string, string>>} */ ({}));
  /** Calls that are answered by hand although a server has their tool. */
  const [byHand, setByHand] = useState(/** @type {readonly string[]} */ ([]));
  const acted = useRef(false);
  const started = useRef(new Set());
  useEffect(() => {
    if (servers) toolsOf(servers.split(" "), wireTools(chosen.tools)).then(setTools, () => setTools(new Map()));
    else setTools(new Map());
  }, [servers]);

  const results = new Map(session.results.value.map((message) => [message.tool_call_id, message.content]));
  const statuses = session.calls.value;
  const open = calls.filter(({ call_id }) => !results.has(call_id));
  const toolOf = (/** @type {ToolCall} */ { name, call_id }) => (byHand.includes(call_id) ? undefined : tools?.get(name));
  const manual = open.filter((call) => tools && !toolOf(call) && statuses[call.call_id]?.call_state !== "running");
  const isReady = tools !== null && open.length === manual.length && manual.every(({ call_id }) => texts[call_id]?.trim());
  const isDecided = isReady && manual.every(({ call_id }) => isDecision(texts[call_id]));

  const run = (/** @type {ToolCall} */ { call_id }, /** @type {ServerTool} */ { server, tool }) => {
    acted.current = true;
    started.current.add(call_id);
    attempt(() => session.runCall(call_id, server, tool));
  };
  const allow = (/** @type {ToolCall} */ call, /** @type {ServerTool} */ tool, /** @type {boolean} */ always) => {
    focusComposer();
    if (always) keepChoices(sessionId, { ...chosen, approved: [...chosen.approved, idOf(tool)] });
    run(call, tool);
  };
  const answer = (/** @type {string} */ callId, /** @type {string} */ text) => setTexts({ ...texts, [callId]: text });
  const deny = (/** @type {ToolCall} */ { call_id }) => {
    focusComposer();
    acted.current = true;
    setByHand([...byHand, call_id]);
    answer(call_id, statuses[call_id]?.call_state === "unknown" ? INTERRUPTED : DENIED);
  };
  const send = () => onSend(manual.map(({ call_id }) => ({ role: "tool", content: texts[call_id], tool_call_id: call_id })));

  useEffect(() => {
    // What the user allowed before runs by itself, but not in a conversation that is only opened.
    if (!isFresh || !tools) return;
    for (const call of open) {
      const tool = toolOf(call);
      if (!tool || statuses[call.call_id] || started.current.has(call.call_id)) continue;
      if (tool.asks && !chosen.approved.includes(idOf(tool))) continue;
      run(call, tool);
    }
  });
  useEffect(() => {
    if (isDecided && acted.current && !session.running) send();
  }, [isDecided, session.running]);

  if (!tools) return null;
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (isReady) send();
  };
  return html`
    <form class="results" onSubmit=${submit}>
      ${calls.map((call, at) => {
        const { call_id: id, name } = call;
        const tool = toolOf(call);
        const status = statuses[id];
        if (results.has(id)) return html`<${Result} key=${id} name=${name} text=${results.get(id)} />`;
        if (status?.call_state === "running") return html`<${Running} key=${id} status=${status} />`;
        if (isDecision(texts[id])) {
          const words = texts[id] === DENIED ? rich("results.denied", { name: html`<code>${name}</code>` }) : INTERRUPTED;
          return html`<p class="aside" key=${id}>${words}</p>`;
        }
        if (!tool) {
          return html`<${Entry} key=${id} name=${name} at=${at + 1} count=${calls.length} text=${texts[id] ?? ""}
            onInput=${(/** @type {string} */ text) => answer(id, text)} />`;
        }
        return html`<${Approval} key=${id} tool=${tool} status=${status} onAllow=${(/** @type {boolean} */ always) => allow(call, tool, always)}
          onDeny=${() => deny(call)} onEnter=${() => setByHand([...byHand, id])} />`;
      })}
      ${(manual.some(({ call_id }) => !isDecision(texts[call_id])) || (isDecided && !acted.current)) &&
      html`<div class="results-foot">
        <button type="submit" class="button primary" disabled=${!isReady}>
          ${manual.length === 0 ? t("results.continue") : t("results.send", { n: manual.length })}
        </button>
        <span class="hint">${t("results.hint", { n: calls.length })}</span>
      </div>`}
    </form>
  `;
}

/** @param {{name: string, text: string}} props */
function Result({ name, text }) {
  return html`<details class="tool"><summary>${rich("results.output", { name: html`<code>${name}</code>` })}</summary><pre tabindex="0">${text}</pre></details>`;
}

/** @param {{status: import("../wire/talk.js").CallStatus}} props */
function Running({ status: { server, tool } }) {
  const words = rich("results.running", { tool: html`<code>${tool}</code>`, server });
  return html`<div class="progress-line" role="status"><span class="pulse" aria-hidden="true"></span><span>${words}</span></div>`;
}

/**
 * The question whether a call may run.
 *
 * @param {object} props
 * @param {ServerTool} props.tool
 * @param {import("../wire/talk.js").CallStatus} [props.status]  Of an earlier attempt.
 * @param {(always: boolean) => void} props.onAllow
 * @param {() => void} props.onDeny
 * @param {() => void} props.onEnter
 */
function Approval({ tool: { tool, server }, status, onAllow, onDeny, onEnter }) {
  const id = useId();
  return html`
    <div class="approval" role="group" aria-labelledby=${id}>
      ${status && html`<p class="problem">${attemptWords(status)}</p>`}
      <p id=${id}>${rich(status ? "results.again" : "results.allow", { tool: html`<code>${tool}</code>`, server })}</p>
      <div class="results-foot">
        <button type="button" class="button primary" onClick=${() => onAllow(false)}>${t(status ? "results.run_again" : "results.allow_once")}</button>
        ${!status && html`<button type="button" class="button" onClick=${() => onAllow(true)}>${t("results.allow_always")}</button>`}
        <button type="button" class="button" onClick=${onDeny}>
          ${t(status?.call_state === "unknown" ? "results.without" : "results.deny")}
        </button>
        ${status && html`<button type="button" class="button" onClick=${onEnter}>${t("results.enter")}</button>`}
      </div>
    </div>
  `;
}

/** @param {import("../wire/talk.js").CallStatus} status  Of a call without a result. */
function attemptWords({ call_state: state, detail = "" }) {
  if (state === "failed") return t("results.failed", { detail });
  return detail ? t("results.unknown_why", { detail }) : t("results.unknown");
}

/** @param {{name: string, at: number, count: number, text: string, onInput: (text: string) => void}} props  One that is entered by hand. */
function Entry({ name, at, count, text, onInput }) {
  const id = useId();
  const label = rich(count > 1 ? "results.output_of_many" : "results.output", { name: html`<code>${name}</code>`, at, count });
  return html`
    <div class="setting">
      <label for=${id}>${label}</label>
      <textarea id=${id} class="code" rows="2" spellcheck=${false} value=${text} placeholder=${t("results.placeholder")}
        onInput=${(/** @type {any} */ event) => onInput(event.target.value)}></textarea>
    </div>
  `;
}

/** @param {string | undefined} text  Whether it is the result of a call that the user does not let run. */
function isDecision(text) {
  return text === DENIED || text === INTERRUPTED;
}

/** @param {ServerTool} tool */
function idOf({ server, tool }) {
  return `${server}/${tool}`;
}
