// @ts-check
/** All parameters of a turn: search, edit, reset. */

import { t } from "../i18n.js";
import { isFound, isMeant } from "../params/fields.js";
import { PRESETS, isPreset, withPreset } from "../params/presets.js";
import { Fragment, html, useState } from "../ui.js";
import { PARAMS } from "../wire/params.js";
import { ParameterRow } from "./parameter.js";

/** @typedef {Record<string, unknown>} Params */

const GROUPS = /** @type {const} */ (["stopping", "sampling", "memory"]);

/**
 * @param {object} props
 * @param {Params} props.params  The chosen ones. Use another `key` for another conversation.
 * @param {(params: Params) => void} props.onChange  Called with all valid chosen parameters.
 * @param {Params} [props.defaults]  Defaults that differ from llama.cpp's.
 * @param {{field?: string, message: string} | null} [props.error]  Refusal by the daemon.
 */
export function Parameters({ params, onChange, defaults = {}, error = null }) {
  const [search, setSearch] = useState("");
  // Rows hold their input; an external change resets them.
  const [round, setRound] = useState(0);
  const nChanged = Object.keys(params).length;
  const found = PARAMS.filter((parameter) => isFound(parameter, search));
  /** @param {Params} next */
  const replace = (next) => {
    setRound(round + 1);
    onChange(next);
  };
  return html`<div class="parameters">
    <${Presets} params=${params} onChoose=${replace} />
    <div class="parameters-bar">
      <input type="search" placeholder=${t("params.search")} aria-label=${t("params.search")} value=${search}
        onInput=${(/** @type {any} */ event) => setSearch(event.target.value.trim())} />
      <button type="button" class="button quiet" disabled=${nChanged === 0} onClick=${() => replace({})}>
        ${nChanged > 0 ? t("params.reset_all_n", { n: nChanged }) : t("params.reset_all")}
      </button>
    </div>
    ${!found.length && html`<p class="hint" role="status">${t("params.no_match", { search })}</p>`}
    <${Fragment} key=${round}>
      ${GROUPS.map((group) => {
        const rows = found.filter((parameter) => parameter.group === group);
        return rows.length > 0 && html`<fieldset key=${group} class="parameter-group">
          <legend>${t(`group.${group}`)}</legend>
          ${rows.map(
            (parameter) => html`<${ParameterRow} key=${parameter.name} parameter=${parameter}
              value=${params[parameter.name]} otherwise=${defaults[parameter.name] ?? parameter.default}
              refusal=${isMeant(parameter, error?.field) ? error?.message : ""}
              onValue=${(/** @type {unknown} */ value) => onChange(changed(params, parameter.name, value))} />`,
          )}
        </fieldset>`;
      })}
    <//>
  </div>`;
}

/** @param {{params: Params, onChoose: (params: Params) => void}} props */
function Presets({ params, onChoose }) {
  return html`<div class="segments parameters-presets" role="group" aria-label=${t("params.presets")}>
    ${PRESETS.map(
      ({ name, about, params: preset }) => html`<button type="button" key=${name} title=${about}
        aria-pressed=${isPreset(params, preset)} onClick=${() => onChoose(withPreset(params, preset))}>
        ${name}
      </button>`,
    )}
  </div>`;
}

/**
 * @param {Params} params
 * @param {string} name
 * @param {unknown} value
 * @returns {Params}
 */
function changed(params, name, value) {
  const { [name]: _before, ...others } = params;
  return value === undefined ? others : { ...others, [name]: value };
}
