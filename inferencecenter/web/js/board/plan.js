// @ts-check
/** The model and its placement: per device, as bars, as a table for accessibility, and the reasons. */

import { t } from "../i18n.js";
import { html } from "../ui.js";
import { caveatOf, placesOf, processorInWords, settingsOf } from "./division.js";
import { factsOf } from "./facts.js";
import { bytes } from "./format.js";
import { FactList, Panel, Unanswered } from "./panels.js";

/** @typedef {import("../wire/types.js").EnginePlan} EnginePlan */
/** @typedef {import("./division.js").Place} Place */

/** @type {readonly import("./division.js").PartName[]} */
const PARTS = ["weights", "kv", "buffers", "driver", "others", "free"];

/**
 * The `status` of the model, for operators including its plan.
 *
 * @param {{told: import("./feed.js").Told}} props
 */
export function ModelPanel({ told }) {
  const values = told.answer?.values;
  /** @type {EnginePlan | undefined} */
  const plan = told.answer?.plan;
  const facts = factsOf(values);
  const settings = plan ? settingsOf(plan).map(([label, text]) => ({ name: label, label, text })) : [];
  return html`<${Panel} title=${t(plan ? "plan.title" : "plan.model")}>
    <${Unanswered} told=${told} nothing=${!facts.length} />
    <${FactList} facts=${[...facts, ...settings]} wide />
    ${plan && html`<${Division} plan=${plan} values=${values} />`}
  <//>`;
}

/** @param {{plan: EnginePlan, values: Record<string, any>}} props */
function Division({ plan, values }) {
  const places = placesOf(plan);
  const caveat = caveatOf(plan, values);
  const processor = processorInWords(plan);
  const advice = html`<ul class="plan-advice">${plan.advice.map((line) => html`<li>${line}</li>`)}</ul>`;
  return html`<div class="plan">
    ${!plan.fits && html`<div><p class="problem">${t("plan.does_not_fit")}</p>${advice}</div>`}
    ${caveat && html`<p class="plan-note">${caveat}</p>`}
    ${processor && html`<p class="plan-note">${processor}</p>`}
    <div class="places" aria-hidden="true">
      ${places.map((place) => html`<${PlaceBar} key=${place.id} place=${place} />`)}
    </div>
    <div class="visually-hidden"><${PlaceTable} places=${places} /></div>
    <p class="hint">
      ${t("plan.hint")}
    </p>
    <details class="plan-why">
      <summary>${t("plan.why")}</summary>
      <ul>
        ${plan.reasons.map(
          ({ name, value, why, explicit }) => html`<li key=${name}>
            <code>${name}</code> <b>${value}</b>${" "}
            <span>${explicit && !why.startsWith("set") ? t("plan.set", { why }) : why}</span>
          </li>`,
        )}
      </ul>
      ${plan.fits && advice}
    </details>
  </div>`;
}

/** @param {{place: Place}} props */
function PlaceBar({ place }) {
  return html`<div class="place" data-short=${place.short}>
    <div class="place-head">
      <b class="place-name" title=${place.name}>${place.name}</b>
      <span class="place-notes">${place.notes.map((note) => html`<span key=${note}>${note}</span>`)}</span>
    </div>
    <div class="place-bar">
      ${place.parts.map(
        (part) => part.bytes > 0 &&
          html`<i key=${part.name} class="part-${part.name}" style=${{ "--part": part.fraction }}></i>`,
      )}
    </div>
    <div class="place-legend">
      ${place.parts.map(
        (part) => (part.bytes > 0 || part.name === "free") &&
          html`<span key=${part.name}>
            <i class="swatch part-${part.name}"></i>${t(`part.${part.name}`)} <b>${bytes(part.bytes)}</b>
          </span>`,
      )}
    </div>
  </div>`;
}

/** @param {{places: readonly Place[]}} props */
function PlaceTable({ places }) {
  const sizeOf = (/** @type {Place} */ place, /** @type {string} */ name) =>
    bytes(place.parts.find((part) => part.name === name)?.bytes);
  return html`<table>
    <caption>${t("plan.table")}</caption>
    <thead>
      <tr>
        <th scope="col">${t("plan.device")}</th>
        <th scope="col">${t("plan.plan")}</th>
        ${PARTS.map((name) => html`<th key=${name} scope="col">${t(`part.${name}`)}</th>`)}
      </tr>
    </thead>
    <tbody>
      ${places.map(
        (place) => html`<tr key=${place.id}>
          <th scope="row">${place.name}</th>
          <td>${place.notes.join(", ")}</td>
          ${PARTS.map((name) => html`<td key=${name}>${sizeOf(place, name)}</td>`)}
        </tr>`,
      )}
    </tbody>
  </table>`;
}
