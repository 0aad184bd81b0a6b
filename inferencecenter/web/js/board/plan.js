// @ts-check
/** The model and its placement: per device, as bars, as a table for accessibility, and the reasons. */

import { html } from "../ui.js";
import { PART_NAMES, caveatOf, placesOf, processorInWords, settingsOf } from "./division.js";
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
  return html`<${Panel} title=${plan ? "Model and plan" : "Model"}>
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
    ${!plan.fits && html`<div><p class="problem">The plan does not fit.</p>${advice}</div>`}
    ${caveat && html`<p class="plan-note">${caveat}</p>`}
    ${processor && html`<p class="plan-note">${processor}</p>`}
    <div class="places" aria-hidden="true">
      ${places.map((place) => html`<${PlaceBar} key=${place.id} place=${place} />`)}
    </div>
    <div class="visually-hidden"><${PlaceTable} places=${places} /></div>
    <p class="hint">
      As planned when the engine was started, of what was free then. Layers count the output matrix as one.
    </p>
    <details class="plan-why">
      <summary>Why</summary>
      <ul>
        ${plan.reasons.map(
          ({ name, value, why, explicit }) => html`<li key=${name}>
            <code>${name}</code> <b>${value}</b>${" "}
            <span>${explicit && !why.startsWith("set") ? `${why} (set)` : why}</span>
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
            <i class="swatch part-${part.name}"></i>${PART_NAMES[part.name]} <b>${bytes(part.bytes)}</b>
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
    <caption>Memory by device</caption>
    <thead>
      <tr>
        <th scope="col">Device</th>
        <th scope="col">Plan</th>
        ${PARTS.map((name) => html`<th key=${name} scope="col">${PART_NAMES[name]}</th>`)}
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
