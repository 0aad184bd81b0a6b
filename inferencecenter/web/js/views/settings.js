// @ts-check
import { chosenLanguage, keepLanguage, languages, loadTexts, t } from "../i18n.js";
import { html, useEffect, useRef } from "../ui.js";
import { choicesOf, keepChoices } from "../choices.js";
import { effectiveParams } from "../conversations.js";
import { hello } from "../state.js";
import { canListen, preferences } from "../state.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";

await loadTexts("settings");

/** @typedef {import("../choices.js").Choices} Choices */

const share = () => import("./share.js");
const transfer = () => import("./transfer.js");
const parameters = () => import("./parameters.js");
const tools = () => import("./tools.js");
const presets = () => import("./presets.js");
const FORMS = /** @type {const} */ ([
  ["none", "form.none", ""],
  ["json_schema", "form.json_schema", '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}'],
  ["regex", "form.regex", "(yes|no)"],
  ["grammar", "form.grammar", 'root ::= "yes" | "no"'],
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
    <aside class="drawer" aria-label=${t("chat.settings")} onKeyDown=${keys}>
      <header class="drawer-head">
        <h2>${t("settings.title")}</h2>
        <button type="button" class="icon-button" ref=${close} aria-label=${t("settings.close")} onClick=${onClose}>
          <${Icon} name="close" />
        </button>
      </header>
      <div class="drawer-body">
        <${System} session=${session} chosen=${chosen} onChoose=${choose} />
        <${Lazy} load=${tools} name="Tools" chosen=${chosen} onChoose=${choose} />
        <${FormOfAnswers} form=${chosen.form} onChange=${(/** @type {Choices["form"]} */ form) => choose({ form })} />
        <${Lazy} load=${parameters} name="Parameters" params=${chosen.params}
          defaults=${effectiveParams(session, chosen.model)} error=${session.turns.value.at(-1)?.ending?.error}
          onChange=${(/** @type {Record<string, unknown>} */ params) => choose({ params })} />
        <${Lazy} load=${presets} name="Presets" session=${session} />
        <${Lazy} load=${transfer} name="Transfer" id=${id} />
        ${id !== null && (hello.value?.limits.max_share_links ?? 0) > 0 && html`<${Lazy} load=${share} name="ShareLinks" id=${id} />`}
        <${Language} />
        ${canListen && html`<${VoiceInput} />`}
      </div>
    </aside>
  `;
}

/** @param {{session: import("../wire/session.js").Session, chosen: Choices, onChoose: (some: Partial<Choices>) => void}} props */
function System({ session, chosen, onChoose }) {
  if (session.id.value !== null) {
    return html`
      <section class="setting">
        <h3>${t("settings.system")}</h3>
        <p class="system-text">${session.system.value || t("settings.none")}</p>
        <p class="hint">${t("settings.system_fixed")}</p>
      </section>
    `;
  }
  return html`
    <section class="setting">
      <label for="system">${t("settings.system")}</label>
      <textarea id="system" rows="4" placeholder=${t("settings.system_example")} value=${chosen.system}
        onInput=${(/** @type {any} */ event) => onChoose({ system: event.target.value })}></textarea>
    </section>
  `;
}

/** @param {{form: Choices["form"], onChange: (form: Choices["form"]) => void}} props */
function FormOfAnswers({ form, onChange }) {
  const problem = form.kind === "json_schema" && form.text.trim() ? jsonProblem(form.text) : "";
  const [, key, example] = FORMS.find(([kind]) => kind === form.kind) ?? FORMS[0];
  return html`
    <section class="setting">
      <label for="form">${t("settings.form")}</label>
      <select id="form" value=${form.kind} onChange=${(/** @type {any} */ event) => onChange({ ...form, kind: event.target.value })}>
        ${FORMS.map(([kind, key]) => html`<option key=${kind} value=${kind}>${t(key)}</option>`)}
      </select>
      ${form.kind !== "none" &&
      html`
        <textarea class="code" rows="6" spellcheck=${false} aria-label=${t(key)}
          aria-invalid=${Boolean(problem)} placeholder=${example} value=${form.text}
          onInput=${(/** @type {any} */ event) => onChange({ ...form, text: event.target.value })}></textarea>
        <p class="problem" role="status">${problem}</p>
      `}
    </section>
  `;
}

/** The language of the page, which is loaded again with another one. */
function Language() {
  const choose = (/** @type {any} */ event) => {
    keepLanguage(event.target.value);
    location.reload();
  };
  return html`
    <section class="setting">
      <label for="language">${t("settings.language")}</label>
      <select id="language" value=${chosenLanguage} onChange=${choose}>
        <option value="">${t("settings.language_auto")}</option>
        ${languages.map((tag) => html`<option key=${tag} value=${tag} lang=${tag}>${nameOf(tag)}</option>`)}
      </select>
    </section>
  `;
}

/** @param {string} tag  Of a language, which is named in itself. */
function nameOf(tag) {
  return new Intl.DisplayNames([tag], { type: "language" }).of(tag) ?? tag;
}

/** @param {string} text */
function jsonProblem(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return t("form.invalid", { why: /** @type {Error} */ (error).message });
  }
}

/** Voice input is off until the user allows it. */
function VoiceInput() {
  return html`
    <section class="setting">
      <label><input type="checkbox" checked=${preferences.value.voice ?? false} aria-describedby="voice-note"
        onChange=${(/** @type {any} */ event) => (preferences.value = { ...preferences.value, voice: event.target.checked })} /> ${t("voice.title")}</label>
      <p class="hint" id="voice-note">${t("voice.note")}</p>
    </section>
  `;
}
