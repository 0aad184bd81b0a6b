// @ts-check
import { html, useEffect, useRef, useState } from "../ui.js";
import { choicesOf, keepChoices } from "../choices.js";
import { effectiveParams } from "../conversations.js";
import { link } from "../state.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";

/** @typedef {import("../choices.js").Choices} Choices */

const transfer = () => import("./transfer.js");
const parameters = () => import("./parameters.js");
const FORMS = /** @type {const} */ ([
  ["none", "Free text", ""],
  ["json_schema", "JSON schema", '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'],
  ["regex", "Regular expression", "(yes|no)"],
  ["grammar", "Grammar (GBNF or Lark)", 'root ::= "yes" | "no"'],
]);

/**
 * Settings of a conversation.
 *
 * @param {{session: import("../wire/session.js").Session, onClose: () => void}} props
 */
export function Settings({ session, onClose }) {
  const id = session.id.value;
  const chosen = choicesOf(id);
  const close = useRef(/** @type {HTMLButtonElement | null} */ (null));
  useEffect(() => close.current?.focus(), []);
  useEffect(() => {
    session.readFacts();
  }, [session]);
  const choose = (/** @type {Partial<Choices>} */ some) => keepChoices(id, { ...chosen, ...some });
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onClose();
  };
  return html`
    <aside class="drawer" aria-label="Conversation settings" onKeyDown=${keys}>
      <header class="drawer-head">
        <h2>Settings</h2>
        <button type="button" class="icon-button" ref=${close} aria-label="Close the settings" onClick=${onClose}>
          <${Icon} name="close" />
        </button>
      </header>
      <div class="drawer-body">
        <${System} session=${session} chosen=${chosen} onChoose=${choose} />
        <${FormOfAnswers} form=${chosen.form} onChange=${(/** @type {Choices["form"]} */ form) => choose({ form })} />
        <${Lazy} load=${parameters} name="Parameters" params=${chosen.params}
          defaults=${effectiveParams(session, chosen.model)} error=${session.turns.value.at(-1)?.ending?.error}
          onChange=${(/** @type {Record<string, unknown>} */ params) => choose({ params })} />
        <${Lazy} load=${transfer} name="Transfer" id=${id} />
      </div>
    </aside>
  `;
}

/** @param {{session: import("../wire/session.js").Session, chosen: Choices, onChoose: (some: Partial<Choices>) => void}} props */
function System({ session, chosen, onChoose }) {
  const [models, setModels] = useState(/** @type {{name: string, default: boolean}[]} */ ([]));
  const draft = session.id.value === null;
  useEffect(() => {
    if (draft) link.value?.request("list_models").then((event) => setModels(event.models), () => setModels([]));
  }, [draft]);
  if (!draft) {
    return html`
      <section class="setting">
        <h3>System prompt</h3>
        <p class="system-text">${session.system.value || "None"}</p>
        <p class="hint">Set when the conversation was started. To change it, start a new chat.</p>
      </section>
    `;
  }
  return html`
    <section class="setting">
      <label for="system">System prompt</label>
      <textarea id="system" rows="4" placeholder="You are a helpful assistant." value=${chosen.system}
        onInput=${(/** @type {any} */ event) => onChoose({ system: event.target.value })}></textarea>
    </section>
    ${models.length > 1 &&
    html`<section class="setting">
      <label for="model">Model</label>
      <select id="model" value=${chosen.model} onChange=${(/** @type {any} */ event) => onChoose({ model: event.target.value })}>
        <option value="">Default</option>
        ${models.map(({ name }) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
    </section>`}
  `;
}

/** @param {{form: Choices["form"], onChange: (form: Choices["form"]) => void}} props */
function FormOfAnswers({ form, onChange }) {
  const problem = form.kind === "json_schema" && form.text.trim() ? jsonProblem(form.text) : "";
  const example = FORMS.find(([kind]) => kind === form.kind)?.[2];
  return html`
    <section class="setting">
      <label for="form">Response format</label>
      <select id="form" value=${form.kind} onChange=${(/** @type {any} */ event) => onChange({ ...form, kind: event.target.value })}>
        ${FORMS.map(([kind, words]) => html`<option key=${kind} value=${kind}>${words}</option>`)}
      </select>
      ${form.kind !== "none" &&
      html`
        <textarea class="code" rows="6" spellcheck=${false} aria-label=${FORMS.find(([kind]) => kind === form.kind)?.[1]}
          aria-invalid=${Boolean(problem)} placeholder=${example} value=${form.text}
          onInput=${(/** @type {any} */ event) => onChange({ ...form, text: event.target.value })}></textarea>
        <p class="problem" role="status">${problem}</p>
      `}
    </section>
  `;
}

/** @param {string} text */
function jsonProblem(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `Not valid JSON: ${/** @type {Error} */ (error).message}`;
  }
}
