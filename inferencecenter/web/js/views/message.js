// @ts-check
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { full } from "../list.js";
import { copy } from "../text/clipboard.js";
import { MarkdownView } from "../text/markdown.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";
import { Outcome, Progress } from "./outcome.js";

/**
 * @typedef {import("../wire/transcript.js").ChatMessage} ChatMessage
 * @typedef {import("../wire/transcript.js").Answer} Answer
 * @typedef {import("../wire/transcript.js").Turn} Turn
 * @typedef {import("../wire/live.js").Live} Live
 *
 * @typedef {object} Doing  Actions available for a turn; absent ones are not.
 * @property {(text: string) => void} [edit]  Replaces the message.
 * @property {() => void} [again]  Generates the answer again.
 * @property {() => void} [fork]
 * @property {{at: number, count: number, show: (at: number) => void}} [versions]  Of this turn, if there are several.
 * @property {(contents: readonly string[]) => void} [results]  Sends the results of its tool calls.
 */

const COPIED_MS = 1500;
/** A question from this length on is folded. */
const LONG_CHARS = 1200;
const LONG_LINES = 15;
const results = () => import("./results.js");

/**
 * A message with its answer, complete or in progress.
 *
 * @param {{turn?: Turn, live?: Live, waiting: string, doing: Doing}} props
 */
export function TurnView({ turn, live, waiting, doing }) {
  live?.version.value;
  const asked = (live ?? turn)?.asked ?? [];
  const answer = live?.answer() ?? turn?.answer ?? null;
  const lastUser = asked.findLastIndex((message) => message.role === "user");
  return html`
    <div class="turn">
      ${asked.map((message, index) => html`<${Asked} key=${index} message=${message} edit=${index === lastUser ? doing.edit : undefined} />`)}
      ${(answer || turn?.ending) &&
      html`<${Reply} answer=${answer} live=${live} ending=${turn?.ending} turnId=${turn?.turnId ?? null} waiting=${waiting} doing=${doing} />`}
    </div>
  `;
}

/** @param {{message: ChatMessage, edit?: (text: string) => void}} props */
function Asked({ message, edit }) {
  const [editing, setEditing] = useState(false);
  const article = useRef(/** @type {HTMLElement | null} */ (null));
  const cancel = () => {
    setEditing(false);
    setTimeout(() => /** @type {HTMLElement | null} */ (article.current?.querySelector("[aria-label=Edit]"))?.focus());
  };
  if (message.role === "assistant") {
    const { content, reasoning = "", tool_calls: toolCalls = [] } = message;
    return html`<${Reply} answer=${{ content, reasoning, toolCalls }} waiting="" doing=${{}} />`;
  }
  if (message.role === "tool") {
    return html`<details class="tool"><summary><${Icon} name="tool" /> Tool output</summary><pre tabindex="0">${message.content}</pre></details>`;
  }
  if (editing && edit) {
    const save = (/** @type {string} */ text) => {
      setEditing(false);
      edit(text);
    };
    return html`<${Editor} text=${message.content} onSave=${save} onCancel=${cancel} />`;
  }
  return html`
    <article class="message asked" ref=${article} data-role=${message.role} aria-label=${message.role === "user" ? "You" : "System"}>
      <${Bubble} text=${message.content} />
      <div class="actions">
        <${CopyButton} text=${message.content} />
        ${edit && html`<${Action} icon="edit" label="Edit" onClick=${() => setEditing(true)} />`}
      </div>
    </article>
  `;
}

/** @param {{text: string}} props  A long one shows its beginning. */
function Bubble({ text }) {
  const [whole, setWhole] = useState(false);
  const isLong = text.length > LONG_CHARS || text.split("\n", LONG_LINES + 1).length > LONG_LINES;
  return html`
    <div class="bubble" dir="auto" data-cut=${isLong && !whole}>
      <div class="bubble-text">${text}</div>
      ${isLong &&
      html`<button type="button" class="button quiet small" aria-expanded=${whole} onClick=${() => setWhole(!whole)}>
        ${whole ? "Show less" : "Show all"}
      </button>`}
    </div>
  `;
}

/** @param {{answer: Answer | null, live?: Live, ending?: Turn["ending"], turnId?: string | null, waiting: string, doing: Doing}} props */
function Reply({ answer, live, ending, turnId = null, waiting, doing }) {
  const content = answer?.content ?? "";
  const shifted = live?.shifted ?? ending?.shifted ?? 0;
  const thinking = live?.phase === "thinking";
  return html`
    <article class="message answer" aria-label="Answer" aria-busy=${Boolean(live)}>
      ${answer?.reasoning && html`<${Reasoning} text=${answer.reasoning} open=${thinking} done=${!live} />`}
      ${content && html`<${Markdown} text=${content} done=${!live} />`}
      ${answer?.toolCalls.map((call) => html`<${Call} key=${call.call_id} call=${call} done=${!live} />`)}
      ${doing.results && html`<${Lazy} load=${results} name="ToolResults" calls=${answer?.toolCalls} onSend=${doing.results} />`}
      ${shifted > 0 && html`<p class="aside">The context was full: the model no longer reads the oldest ${shifted === 1 ? "turn" : `${shifted} turns`}.</p>`}
      ${live && html`<${Progress} live=${live} waiting=${waiting} />`}
      ${ending?.error && html`<${Problem} error=${ending.error} again=${doing.again} />`}
      ${!live &&
      html`<div class="answer-foot">
        <div class="actions">
          ${content && html`<${CopyButton} text=${content} />`}
          ${doing.again && !ending?.error && html`<${Action} icon="again" label="Regenerate" onClick=${doing.again} />`}
          ${doing.fork && html`<${Action} icon="fork" label="Fork from here" onClick=${doing.fork} />`}
        </div>
        ${doing.versions && html`<${Versions} ...${doing.versions} />`}
        ${ending && html`<${Outcome} ending=${ending} turnId=${turnId} />`}
      </div>`}
    </article>
  `;
}

/** @param {{at: number, count: number, show: (at: number) => void}} props */
function Versions({ at, count, show }) {
  return html`
    <div class="versions" role="group" aria-label="Versions">
      <button type="button" class="icon-button" aria-label="Previous version" title="Previous version" disabled=${at === 0}
        onClick=${() => show(at - 1)}>‹</button>
      <span>${at + 1}/${count}</span>
      <button type="button" class="icon-button" aria-label="Next version" title="Next version" disabled=${at === count - 1}
        onClick=${() => show(at + 1)}>›</button>
    </div>
  `;
}

/** @param {{text: string, done: boolean}} props */
function Markdown({ text, done }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const view = useRef(/** @type {MarkdownView | null} */ (null));
  useLayoutEffect(() => {
    view.current ??= new MarkdownView(/** @type {HTMLElement} */ (ref.current));
    view.current.update(text, { done });
  }, [text, done]);
  useEffect(() => () => view.current?.end(), []);
  return html`<div class="prose" ref=${ref}></div>`;
}

/** @param {{text: string, open: boolean, done: boolean}} props */
function Reasoning({ text, open, done }) {
  return html`
    <details class="reasoning">
      <summary>${open ? "Thinking…" : "Thoughts"}</summary>
      <${Markdown} text=${text} done=${done} />
    </details>
  `;
}

/** @param {{call: {call_id: string, name: string, arguments: string}, done: boolean}} props */
function Call({ call, done }) {
  return html`
    <details class="tool" open>
      <summary><${Icon} name="tool" /> ${done ? "Called" : "Calling"} <code>${call.name}</code></summary>
      <pre tabindex="0">${done ? indented(call.arguments) : call.arguments}</pre>
    </details>
  `;
}

/** @param {{error: import("../wire/errors.js").WireError, again?: () => void}} props */
function Problem({ error, again }) {
  return html`
    <div class="notice" data-mood="bad" role="alert">
      <span><strong>${error.message}</strong> ${error.hint} ${error.field && html`<span class="notice-detail">Field: <code>${error.field}</code></span>`}</span>
      ${again && !(error.isStorageFull && full.value) && html`<button type="button" class="button small" onClick=${again}>Try again</button>`}
    </div>
  `;
}

/** @param {{text: string, onSave: (text: string) => void, onCancel: () => void}} props */
function Editor({ text, onSave, onCancel }) {
  const [value, setValue] = useState(text);
  const ref = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => ref.current?.focus(), []);
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && value.trim()) {
      event.preventDefault();
      onSave(value);
    }
  };
  return html`
    <div class="editor">
      <textarea ref=${ref} aria-label="Edit the message" rows=${Math.min(12, value.split("\n").length + 1)} value=${value}
        onInput=${(/** @type {any} */ event) => setValue(event.target.value)} onKeyDown=${keys}></textarea>
      <p class="hint">Sent as a new version; this one is kept, with the messages after it.</p>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${onCancel}>Cancel</button>
        <button type="button" class="button primary" disabled=${!value.trim()} onClick=${() => onSave(value)}>Send</button>
      </div>
    </div>
  `;
}

/** @param {{text: string}} props */
function CopyButton({ text }) {
  const [copied, setCopied] = useState(false);
  const press = async () => {
    if (!(await copy(text))) return;
    setCopied(true);
    setTimeout(() => setCopied(false), COPIED_MS);
  };
  return html`<${Action} icon=${copied ? "check" : "copy"} label=${copied ? "Copied" : "Copy"} onClick=${press} />`;
}

/** @param {{icon: string, label: string, onClick: () => void}} props */
function Action({ icon, label, onClick }) {
  return html`
    <button type="button" class="icon-button" aria-label=${label} title=${label} onClick=${onClick}><${Icon} name=${icon} /></button>
  `;
}

/** @param {string} json */
function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}
