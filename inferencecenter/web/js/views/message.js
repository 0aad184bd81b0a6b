// @ts-check
import { rich, t } from "../i18n.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../ui.js";
import { full } from "../list.js";
import { copy } from "../text/blocks.js";
import { MarkdownView } from "../text/markdown.js";
import { messageOf, partsOf, textOf } from "../wire/transcript.js";
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
 * @property {() => boolean} [isIdle]  Whether they can be used now; a view that reads it is notified of changes.
 * @property {(message: ChatMessage) => void} [edit]  Replaces the message.
 * @property {() => void} [again]  Generates the answer again.
 * @property {() => void} [fork]
 * @property {{at: number, count: number, show: (at: number) => void}} [versions]  Of this turn, if there are several.
 * @property {{session: import("../wire/session.js").Session, isFresh: boolean, onSend: (messages: readonly ChatMessage[]) => void}} [results]
 *   Of its tool calls: what its form needs.
 */

const COPIED_MS = 1500;
/** A question from this length on is folded. */
const LONG_CHARS = 1200;
const LONG_LINES = 15;
const results = () => import("./results.js");
const fileViews = () => import("./files.js");

/**
 * A message with its answer, complete or in progress.
 *
 * @param {{turn?: Turn, live?: Live, isLast?: boolean, waiting: string, doing: Doing}} props
 */
export function TurnView({ turn, live, isLast = false, waiting, doing }) {
  live?.version.value;
  const asked = (live ?? turn)?.asked ?? [];
  const answer = live?.answer() ?? turn?.answer ?? null;
  const lastUser = asked.findLastIndex((message) => message.role === "user");
  return html`
    <div class="turn" data-turn=${turn?.turnId}>
      ${asked.map((message, index) => html`<${Asked} key=${index} message=${message} doing=${index === lastUser ? doing : NOTHING} />`)}
      ${(answer || turn?.ending) &&
      html`<${Reply} answer=${answer} live=${live} eager=${isLast} ending=${turn?.ending} turnId=${turn?.turnId ?? null} waiting=${waiting} doing=${doing} />`}
    </div>
  `;
}

/** @type {Doing} */
const NOTHING = {};

/** @param {{message: ChatMessage, doing: Doing}} props */
function Asked({ message, doing: { edit, isIdle } }) {
  const [editing, setEditing] = useState(false);
  const article = useRef(/** @type {HTMLElement | null} */ (null));
  const { files, text } = useMemo(() => partsOf(message), [message.content, message.images]);
  const cancel = () => {
    setEditing(false);
    setTimeout(() => /** @type {HTMLElement | null} */ (article.current?.querySelector("[data-act=edit]"))?.focus());
  };
  if (message.role === "assistant") {
    const { content, reasoning = "", tool_calls: toolCalls = [] } = message;
    return html`<${Reply} answer=${{ content, reasoning, toolCalls }} waiting="" doing=${NOTHING} />`;
  }
  if (message.role === "tool") {
    return html`<details class="tool"><summary><${Icon} name="tool" /> ${t("role.tool")}</summary><pre tabindex="0">${textOf(message)}</pre>
      ${message.images && html`<${Lazy} load=${fileViews} name="FileList" files=${files.filter(({ image }) => image)} />`}</details>`;
  }
  if (editing && edit && isIdle?.()) {
    const save = (/** @type {ChatMessage} */ changed) => {
      setEditing(false);
      edit(changed);
    };
    return html`<${Editor} text=${text} files=${files} onSave=${save} onCancel=${cancel} />`;
  }
  return html`
    <article class="message asked" ref=${article} data-role=${message.role} aria-label=${t(message.role === "user" ? "role.user" : "role.system")}>
      ${files.length > 0 && html`<${Lazy} load=${fileViews} name="FileList" files=${files} />`}
      ${(text || files.length === 0) && html`<${Bubble} text=${text} />`}
      <div class="actions">
        <${CopyButton} text=${textOf(message)} />
        ${edit && html`<${Action} whenIdle icon="edit" label=${t("message.edit")} onClick=${() => setEditing(true)} />`}
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
        ${t(whole ? "message.show_less" : "message.show_all")}
      </button>`}
    </div>
  `;
}

/** @param {{answer: Answer | null, live?: Live, eager?: boolean, ending?: Turn["ending"], turnId?: string | null, waiting: string, doing: Doing}} props */
function Reply({ answer, live, eager = false, ending, turnId = null, waiting, doing }) {
  const content = answer?.content ?? "";
  const shifted = live?.shifted ?? ending?.shifted ?? 0;
  const thinking = live?.phase === "thinking";
  return html`
    <article class="message answer" aria-label=${t("role.assistant")} aria-busy=${Boolean(live)}>
      ${answer?.reasoning && html`<${Reasoning} text=${answer.reasoning} open=${thinking} done=${!live} eager=${Boolean(live) || eager} />`}
      ${content && html`<${Markdown} text=${content} done=${!live} eager=${Boolean(live) || eager} />`}
      ${answer?.toolCalls.map((call) => html`<${Call} key=${call.call_id} call=${call} done=${!live} />`)}
      ${doing.results && html`<${Lazy} load=${results} name="ToolResults" calls=${answer?.toolCalls} ...${doing.results} />`}
      ${shifted > 0 && html`<p class="aside">${t("context.shifted", { n: shifted })}</p>`}
      ${live && html`<${Progress} live=${live} waiting=${waiting} />`}
      ${ending?.error && html`<${Problem} error=${ending.error} again=${doing.again} />`}
      ${!live &&
      html`<div class="answer-foot">
        <div class="actions">
          ${content && html`<${CopyButton} text=${content} />`}
          ${doing.again && !ending?.error && html`<${Action} whenIdle icon="again" label=${t("message.regenerate")} onClick=${doing.again} />`}
          ${doing.fork && html`<${Action} whenIdle icon="fork" label=${t("message.fork")} onClick=${doing.fork} />`}
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
    <div class="versions" data-when="idle" role="group" aria-label=${t("message.versions")}>
      <button type="button" class="icon-button" aria-label=${t("message.previous_version")} title=${t("message.previous_version")} disabled=${at === 0}
        onClick=${() => show(at - 1)}>‹</button>
      <span>${at + 1}/${count}</span>
      <button type="button" class="icon-button" aria-label=${t("message.next_version")} title=${t("message.next_version")} disabled=${at === count - 1}
        onClick=${() => show(at + 1)}>›</button>
    </div>
  `;
}

/** @param {{text: string, done: boolean, eager: boolean}} props */
function Markdown({ text, done, eager }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const view = useRef(/** @type {MarkdownView | null} */ (null));
  useLayoutEffect(() => {
    view.current ??= new MarkdownView(/** @type {HTMLElement} */ (ref.current));
    view.current.update(text, { done, eager });
  }, [text, done]);
  useEffect(() => () => view.current?.end(), []);
  return html`<div class="prose" ref=${ref}></div>`;
}

/** @param {{text: string, open: boolean, done: boolean, eager: boolean}} props */
function Reasoning({ text, open, done, eager }) {
  return html`
    <details class="reasoning">
      <summary>${t(open ? "message.thinking" : "message.thoughts")}</summary>
      <${Markdown} text=${text} done=${done} eager=${eager} />
    </details>
  `;
}

/** @param {{call: {call_id: string, name: string, arguments: string}, done: boolean}} props */
function Call({ call, done }) {
  return html`
    <details class="tool" open>
      <summary><${Icon} name="tool" /> ${rich(done ? "message.called" : "message.calling", { name: html`<code>${call.name}</code>` })}</summary>
      <pre tabindex="0">${done ? indented(call.arguments) : call.arguments}</pre>
    </details>
  `;
}

/** @param {{error: import("../wire/errors.js").WireError, again?: () => void}} props */
function Problem({ error, again }) {
  return html`
    <div class="notice" data-mood="bad" role="alert">
      <span><strong>${error.message}</strong> ${error.hint} ${error.field && html`<span class="notice-detail">${rich("message.field", { field: html`<code>${error.field}</code>` })}</span>`}</span>
      ${again && !(error.isStorageFull && full.value) && html`<button type="button" class="button small" data-when="idle" onClick=${again}>${t("message.retry")}</button>`}
    </div>
  `;
}

/**
 * @param {object} props
 * @param {string} props.text
 * @param {readonly import("../wire/transcript.js").AttachedFile[]} props.files
 * @param {(message: ChatMessage) => void} props.onSave
 * @param {() => void} props.onCancel
 */
function Editor({ text, files: attached, onSave, onCancel }) {
  const [value, setValue] = useState(text);
  const [files, setFiles] = useState(attached);
  const empty = !value.trim() && files.length === 0;
  const save = () => onSave(messageOf(files, value));
  const remove = (/** @type {number} */ at) => {
    setFiles(files.toSpliced(at, 1));
    ref.current?.focus();
  };
  const describe = (/** @type {number} */ at, /** @type {string} */ name) => setFiles(files.with(at, { ...files[at], name }));
  const ref = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => ref.current?.focus(), []);
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onCancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !empty) {
      event.preventDefault();
      save();
    }
  };
  return html`
    <div class="editor">
      ${files.length > 0 && html`<div class="attachments"><${Lazy} load=${fileViews} name="RemovableFiles" files=${files} onRemove=${remove} onDescribe=${describe} /></div>`}
      <textarea ref=${ref} aria-label=${t("message.edit_label")} rows=${Math.min(12, value.split("\n").length + 1)} value=${value}
        onInput=${(/** @type {any} */ event) => setValue(event.target.value)} onKeyDown=${keys}></textarea>
      <p class="hint">${t("message.edit_hint")}</p>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${onCancel}>${t("message.cancel")}</button>
        <button type="button" class="button primary" disabled=${empty} onClick=${save}>${t("message.send")}</button>
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
  return html`<${Action} icon=${copied ? "check" : "copy"} label=${t(copied ? "message.copied" : "message.copy")} onClick=${press} />`;
}

/** @param {{icon: string, label: string, whenIdle?: boolean, onClick: () => void}} props */
function Action({ icon, label, whenIdle = false, onClick }) {
  return html`
    <button type="button" class="icon-button" data-act=${icon} data-when=${whenIdle ? "idle" : undefined} aria-label=${label} title=${label} onClick=${onClick}><${Icon} name=${icon} /></button>
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
