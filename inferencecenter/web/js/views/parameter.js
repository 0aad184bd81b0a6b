// @ts-check
/** One parameter: field, validation message, description. */

import { labelOf } from "../choices.js";
import { rich, t } from "../i18n.js";
import { defaultText, readingOf, sliderOf, textOf } from "../params/fields.js";
import { html, useId, useState } from "../ui.js";

/** @typedef {import("../params/fields.js").Parameter} Parameter */

/**
 * @typedef {object} RowProps
 * @property {Parameter} parameter
 * @property {unknown} value  Undefined for the default.
 * @property {unknown} otherwise  The default.
 * @property {string} refusal  Why the daemon refused the value.
 * @property {(value: unknown) => void} onValue  Called with undefined for the default, and while the input is invalid.
 */

/** How characters are written in a line. */
const ESCAPES = { newline: html`<code>\\n</code>`, tab: html`<code>\\t</code>`, backslash: html`<code>\\\\</code>` };

/** @param {RowProps} props */
export function ParameterRow({ parameter, value, otherwise, refusal, onValue }) {
  const id = useId();
  // The input, while it does not follow from the value: "0.", or invalid text.
  const [draft, setDraft] = useState(/** @type {string | null} */ (null));
  const [told, setTold] = useState(false);
  const fault = draft === null ? undefined : readingOf(parameter, draft).fault;
  const label = labelOf(parameter);
  /** @param {unknown} next */
  const choose = (next) => {
    setDraft(null);
    onValue(next);
  };
  /** @param {string} text */
  const type = (text) => {
    setDraft(text);
    onValue(readingOf(parameter, text).value);
  };
  /** @param {any} event  Its button disappears, so the focus has to move. */
  const reset = (event) => {
    event.currentTarget.closest(".parameter").querySelector(':is(input, textarea):not([tabindex="-1"])')?.focus();
    choose(undefined);
  };
  const changed = value !== undefined || fault !== undefined;
  const message = fault ? t("params.not_sent", { fault }) : refusal;
  const describedBy = [message && `${id}-fault`, told && `${id}-about`].filter(Boolean).join(" ") || undefined;
  const field = {
    id, label, parameter, value, otherwise, describedBy, choose, type,
    text: draft ?? textOf(parameter, value), bad: Boolean(message), settle: () => fault === undefined && setDraft(null),
  };
  return html`<div class="parameter" data-changed=${changed} data-bad=${Boolean(message)}>
    <div class="parameter-head">
      ${parameter.kind === "choices"
        ? html`<span class="parameter-name" id=${id}>${label}</span>`
        : html`<label for=${id}>${label}</label>`}
      <button type="button" class="parameter-about" aria-expanded=${told} aria-controls=${`${id}-about`}
        aria-label=${t("params.about", { name: label })} onClick=${() => setTold(!told)}>?</button>
      ${changed &&
      html`<button type="button" class="parameter-reset" aria-label=${t("params.reset_one", { name: label })} onClick=${reset}>
        ${t("params.reset")}
      </button>`}
    </div>
    <div class="parameter-field"><${Field} ...${field} /></div>
    ${message && html`<p class="parameter-fault" id=${`${id}-fault`} role="alert">${message}</p>`}
    <div class="parameter-text" id=${`${id}-about`} hidden=${!told}>
      ${told && html`<${About} parameter=${parameter} otherwise=${otherwise} />`}
    </div>
  </div>`;
}

/** @param {{parameter: Parameter, otherwise: unknown}} props */
function About({ parameter, otherwise }) {
  const names = [parameter.name, ...parameter.aliases];
  return html`<p>${parameter.description}</p>
    <p>
      ${parameter.allowed.charAt(0).toUpperCase() + parameter.allowed.slice(1)}.
      ${rich("params.default", { value: html`<span class="parameter-default">${defaultText(parameter, otherwise)}</span>` })}
    </p>
    ${parameter.name === "stop_regex" && html`<p>${t("params.lines")}</p>`}
    ${parameter.kind === "texts" &&
    parameter.name !== "stop_regex" &&
    html`<p>${rich("params.lines_escaped", ESCAPES)}</p>`}
    <p>${rich("params.in_api", { names: names.map((name, at) => html`${at > 0 && t("params.or")}<code>${name}</code>`) })}</p>`;
}

/**
 * @typedef {object} FieldProps
 * @property {string} id
 * @property {string} label
 * @property {Parameter} parameter
 * @property {unknown} value
 * @property {unknown} otherwise
 * @property {string} text
 * @property {boolean} bad
 * @property {string | undefined} describedBy
 * @property {(value: unknown) => void} choose
 * @property {(text: string) => void} type
 * @property {() => void} settle
 */

/** @param {FieldProps} props */
function Field(props) {
  switch (props.parameter.kind) {
    case "boolean":
      return html`<${Switch} ...${props} />`;
    case "choices":
      return html`<${Order} ...${props} />`;
    case "number":
    case "integer":
      return html`<${NumberField} ...${props} />`;
    default:
      return html`<${Lines} ...${props} />`;
  }
}

/** @param {FieldProps} props */
function NumberField({ id, parameter, value, otherwise, text, bad, describedBy, choose, type, settle }) {
  const slider = sliderOf(parameter);
  return html`
    ${slider &&
    html`<input type="range" class="parameter-slider" ...${slider} tabindex="-1" aria-hidden="true"
      value=${Number(value ?? otherwise ?? slider.min)}
      onInput=${(/** @type {any} */ event) => choose(event.target.valueAsNumber)} />`}
    <input id=${id} class="parameter-number" inputmode=${(parameter.minimum ?? 0) < 0 ? "text" : "decimal"}
      autocomplete="off" spellcheck=${false} placeholder=${defaultText(parameter, otherwise)} value=${text}
      aria-invalid=${bad} aria-describedby=${describedBy} onBlur=${settle}
      onInput=${(/** @type {any} */ event) => type(event.target.value)} />`;
}

/** @param {FieldProps} props */
function Lines({ id, parameter, otherwise, text, bad, describedBy, type, settle }) {
  return html`<textarea id=${id} rows=${Math.min(text.split("\n").length, 6)} spellcheck=${false} value=${text}
    placeholder=${parameter.kind === "biases" ? t("params.biases") : defaultText(parameter, otherwise)}
    aria-invalid=${bad} aria-describedby=${describedBy} onBlur=${settle}
    onInput=${(/** @type {any} */ event) => type(event.target.value)}></textarea>`;
}

/** @param {FieldProps} props */
function Switch({ id, value, otherwise, describedBy, choose }) {
  return html`<input id=${id} type="checkbox" checked=${Boolean(value ?? otherwise)} aria-describedby=${describedBy}
    onChange=${(/** @type {any} */ event) => choose(event.target.checked)} />`;
}

/** @param {FieldProps} props */
function Order({ id, label, parameter, value, otherwise, choose }) {
  const on = /** @type {string[]} */ (value ?? otherwise ?? []);
  const off = (parameter.choices ?? []).filter((name) => !on.includes(name));
  /** @param {number} at @param {number} by */
  const move = (at, by) => {
    const next = [...on];
    next.splice(at + by, 0, ...next.splice(at, 1));
    choose(next);
  };
  return html`<ol class="order" aria-labelledby=${id}>
    ${[...on, ...off].map((name, at) => {
      const isOn = at < on.length;
      return html`<li key=${name} data-off=${!isOn}>
        <label>
          <input type="checkbox" checked=${isOn}
            onChange=${() => choose(isOn ? on.filter((each) => each !== name) : [...on, name])} />${name}
        </label>
        <button type="button" aria-label=${t("params.earlier", { label, name })} disabled=${!isOn || at === 0}
          onClick=${() => move(at, -1)}>↑</button>
        <button type="button" aria-label=${t("params.later", { label, name })} disabled=${!isOn || at === on.length - 1}
          onClick=${() => move(at, 1)}>↓</button>
      </li>`;
    })}
  </ol>`;
}
