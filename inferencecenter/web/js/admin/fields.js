// @ts-check
/** Fields of the forms of administration. Values are checked by the daemon, which names the field it refuses. */

import { known, number, t } from "../i18n.js";
import { html, useId } from "../ui.js";

/** @typedef {import("../wire/types.js").AccessLimitChanges} Limits */
/** @typedef {import("./windows.js").Outcome} Outcome */

const SCOPES = /** @type {const} */ (["user", "priority", "operator", "admin"]);
const PRIORITIES = /** @type {const} */ (["interactive", "normal", "batch"]);
/** Limits, and whether each is a list. */
const LIMITS = /** @type {const} */ ([
  ["requests_per_minute", false],
  ["tokens_per_minute", false],
  ["tokens_per_day", false],
  ["concurrent_turns", false],
  ["max_tokens", false],
  ["models", true],
  ["addresses", true],
]);

/** Words for no limit, in the page's languages; each is taken in all of them. */
const NO_LIMIT = ["none", "unbegrenzt"]; // no text

/**
 * A labeled field with the daemon's refusal below it.
 *
 * @param {{label: string, name: string, said?: Outcome, hint?: string, kind?: string, [attribute: string]: any}} props
 */
export function Field({ label, name, said, hint = "", kind = "input", children, ...attributes }) {
  const id = useId();
  const problem = said?.failed && (said.field === name || said.field.startsWith(`${name}.`)) ? said.words : "";
  const note = problem || hint;
  return html`<div class="admin-field">
    <label for=${id}>${label}</label>
    <${kind} id=${id} name=${name} aria-invalid=${Boolean(problem)} aria-describedby=${note ? `${id}-note` : undefined}
      autocomplete="off" ...${attributes}>${children}<//>
    ${note && html`<p id=${`${id}-note`} class=${problem ? "problem" : "hint"}>${note}</p>`}
  </div>`;
}

/**
 * The scopes of an account.
 *
 * @param {{given: readonly string[], said?: Outcome}} props
 */
export function Scopes({ given, said }) {
  const problem = said?.failed && said.field.startsWith("scopes") ? said.words : "";
  return html`<fieldset class="admin-scopes">
    <legend>${t("accounts.scopes")}</legend>
    ${SCOPES.map(
      (scope) => html`<label key=${scope}>
        <input type="checkbox" name="scopes" value=${scope} defaultChecked=${given.includes(scope)} /> ${scope}
      </label>`,
    )}
    ${problem && html`<p class="problem">${problem}</p>`}
  </fieldset>`;
}

/** @param {{given?: string}} props */
export function PriorityField({ given = "normal" }) {
  return html`<${Field} label=${t("accounts.priority")} name="priority" kind="select">
    ${PRIORITIES.map((name) => html`<option key=${name} value=${name} selected=${name === given}>${known("priority", name)}</option>`)}
  <//>`;
}

/**
 * The limits of an account or a token.
 *
 * @param {{given: Record<string, unknown>, said?: Outcome}} props
 */
export function LimitFields({ given, said }) {
  return html`<fieldset class="admin-limits">
    <legend>${t("limits.title")}</legend>
    <p class="hint">${t("limits.hint", { none: t("limits.none") })}</p>
    <div class="admin-grid">
      ${LIMITS.map(
        ([name, isList]) => html`<${Field} key=${name} label=${t(`limit.${name}`)} name=${`access_limits.${name}`} said=${said}
          inputmode=${isList ? "text" : "numeric"} placeholder=${t("limits.inherited")} defaultValue=${textOf(given[name], name in given)} />`,
      )}
    </div>
  </fieldset>`;
}

/**
 * Returns the limits of a form as the protocol has them. What is not a number is left to the daemon to refuse. Pure.
 *
 * @param {FormData} form
 * @returns {Limits}
 */
export function limitsIn(form) {
  /** @type {Record<string, unknown>} */
  const limits = {};
  for (const [name, isList] of LIMITS) {
    const text = String(form.get(`access_limits.${name}`) ?? "").trim();
    if (!text) continue;
    if ([t("limits.none"), ...NO_LIMIT].includes(text.toLowerCase())) limits[name] = null;
    else if (isList) limits[name] = text.split(",").map((each) => each.trim()).filter(Boolean);
    else limits[name] = /^\d+$/.test(text) ? Number(text) : text;
  }
  return limits;
}

/**
 * Returns limits as text, such as "Tokens per day: 5,000". Pure.
 *
 * @param {Record<string, unknown>} given
 */
export function limitsInWords(given) {
  return LIMITS.filter(([name]) => name in given)
    .map(([name]) => {
      const value = given[name];
      const text = value === null ? t("limits.no_limit") : Array.isArray(value) ? value.join(", ") : number(Number(value));
      return `${t(`limit.${name}`)}: ${text}`;
    })
    .join("; ");
}

/**
 * @param {unknown} value
 * @param {boolean} isSet
 */
function textOf(value, isSet) {
  if (!isSet) return "";
  if (value === null) return t("limits.none");
  return Array.isArray(value) ? value.join(", ") : String(value);
}
