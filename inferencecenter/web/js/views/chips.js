// @ts-check
import { choicesOf, keepChoices, labelOf, wireTools } from "../choices.js";
import { t } from "../i18n.js";
import { html } from "../ui.js";
import { Icon } from "./icons.js";

const MOST_SHOWN = 4;
const FORMS = /** @type {const} */ ({ json_schema: "form.json_schema", regex: "form.regex", grammar: "form.grammar" });

/**
 * What the next message is sent with beside its text; each can be cleared.
 *
 * @param {{id: string | null, onOpen: () => void}} props  `onOpen` opens the settings.
 */
export function Chips({ id, onOpen }) {
  const chosen = choicesOf(id);
  const chips = chipsOf(chosen, id === null);
  if (chips.length === 0) return null;
  const clear = (/** @type {any} */ event, /** @type {Partial<import("../choices.js").Choices>} */ cleared) => {
    const row = event.currentTarget.closest(".dock");
    keepChoices(id, { ...chosen, ...cleared });
    row?.querySelector("textarea")?.focus();
  };
  return html`
    <div class="chips" role="group" aria-label=${t("chips.title")}>
      ${chips.map(
        ({ label, detail, cleared }) => html`<span class="chip" key=${label}>
          <button type="button" class="chip-open" title=${detail || label} onClick=${onOpen}>${label}</button>
          <button type="button" class="chip-clear" aria-label=${t("chips.clear_one", { what: label })} title=${t("chips.clear")}
            onClick=${(/** @type {any} */ event) => clear(event, cleared)}><${Icon} name="close" /></button>
        </span>`,
      )}
    </div>
  `;
}

/**
 * @param {import("../choices.js").Choices} chosen
 * @param {boolean} isNew  Whether the conversation does not exist yet; later its system prompt and model are fixed.
 * @returns {{label: string, detail?: string, cleared: Partial<import("../choices.js").Choices>}[]}
 */
function chipsOf({ system, model, params, form, servers, tools }, isNew) {
  const chips = [];
  if (isNew && system.trim()) chips.push({ label: t("settings.system"), detail: system, cleared: { system: "" } });
  if (isNew && model) chips.push({ label: t("chips.model", { model }), cleared: { model: "" } });
  const values = Object.entries(params).map(([name, value]) => ({ name, words: wordsOf(name, value) }));
  if (values.length > MOST_SHOWN) {
    const detail = values.map(({ words }) => words).join("\n");
    chips.push({ label: t("chips.parameters", { n: values.length }), detail, cleared: { params: {} } });
  } else {
    for (const { name, words } of values) {
      const { [name]: _cleared, ...others } = params;
      chips.push({ label: words, cleared: { params: others } });
    }
  }
  const none = /** @type {const} */ ({ kind: "none", text: "" });
  const offered = [...servers, ...wireTools(tools).map(({ name }) => name)];
  if (offered.length > 0) {
    const shown = offered.length > MOST_SHOWN ? [...offered.slice(0, MOST_SHOWN), "…"] : offered;
    const label = t("chips.tools", { servers: shown.join(", ") });
    chips.push({ label, detail: offered.join("\n"), cleared: { servers: [], tools: tools.map((tool) => ({ ...tool, allowed: false })) } });
  }
  if (form.kind !== "none" && form.text.trim()) chips.push({ label: t(FORMS[form.kind]), detail: form.text, cleared: { form: none } });
  return chips;
}

/**
 * @param {string} name
 * @param {unknown} value
 */
function wordsOf(name, value) {
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return t("chips.value", { name: labelOf({ name }), value: text.length > 24 ? `${text.slice(0, 23)}…` : text });
}
