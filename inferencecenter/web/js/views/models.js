// @ts-check
/** The available models; operators choose the default and free memory. */

import { useActive } from "../board/feed.js";
import { magnitude, memory, percent } from "../board/format.js";
import { shelfOf } from "../board/shelf.js";
import { known, loadTexts, t } from "../i18n.js";
import { models, readModels, stateOf } from "../models.js";
import { account, link } from "../state.js";
import { html, useEffect, useMemo } from "../ui.js";

await loadTexts("models");

/** @typedef {import("../models.js").ModelSummary} ModelSummary */

const EVERY_MS = 10_000;
const MAY_SWAP = "operator";

/** The view of the models; empty without a connection. */
export function Models() {
  const there = link.value;
  const may = account.value?.scopes.includes(MAY_SWAP) ?? false;
  return there && html`<div class="board">
    <header class="board-head">
      <h1>${t("foot.models")}</h1>
      <p class="hint">
        ${t(may ? "models.hint" : "models.hint_operators")}
      </p>
    </header>
    <${ModelList} link=${there} />
  </div>`;
}

/**
 * The list of models.
 *
 * @param {{link: import("../wire/link.js").Link, onRemove?: (name: string) => void}} props  Without `onRemove` none is
 *   deleted.
 */
export function ModelList({ link: there, onRemove }) {
  const shelf = useMemo(() => shelfOf(there), [there]);
  const active = useActive(there);
  const list = models.value;
  useEffect(() => {
    if (!active) return undefined;
    readModels();
    const timer = setInterval(readModels, EVERY_MS);
    return () => clearInterval(timer);
  }, [there, active]);
  const may = account.value?.scopes.includes(MAY_SWAP) ?? false;
  const { words, hint, failed } = shelf.said.value;
  return html`
    <div class="board-said" role="status">
      ${words && html`<p class=${failed ? "problem" : "board-note"}>${words} ${hint}</p>`}
    </div>
    ${list === null && html`<p class="hint">${t("notice.loading")}</p>`}
    ${list?.length === 0 && html`<p class="hint">${t("models.none")}</p>`}
    <ul class="models">
      ${list?.map((model) => html`<${Model} key=${model.name} model=${model} shelf=${shelf} may=${may && active}
        onRemove=${onRemove} />`)}
    </ul>
  `;
}

/** @param {{model: ModelSummary, shelf: import("../board/shelf.js").Shelf, may: boolean, onRemove?: (name: string) => void}} props */
function Model({ model, shelf, may, onRemove }) {
  const swap = shelf.swap.value;
  const [state, mood] = stateOf(model);
  const inMemory = model.state === "loaded" || model.state === "loading";
  return html`<li class="model">
    <div class="model-head">
      <h2>${model.name}</h2>
      ${model.default && html`<span class="pill" data-mood="accent">${t("models.default")}</span>`}
      <span class="pill" data-mood=${mood}>${state}</span>
    </div>
    <p class="model-facts">${factsOf(model).map((fact) => html`<span key=${fact}>${fact}</span>`)}</p>
    ${model.detail && html`<p class="problem">${model.detail}</p>`}
    ${swap?.name === model.name && html`<${Progress} swap=${swap} />`}
    ${may &&
    html`<div class="model-acts">
      ${!(model.default && inMemory) &&
      html`<button type="button" class="button" disabled=${swap !== null}
        aria-label=${t(model.default ? "models.load_one" : "models.switch_one", { name: model.name })} onClick=${() => shelf.load(model.name)}>
        ${t(model.default ? "models.load" : "models.switch")}
      </button>`}
      ${model.state === "loaded" &&
      html`<button type="button" class="button" disabled=${swap !== null} aria-label=${t("models.unload_one", { name: model.name })}
        onClick=${() => shelf.unload(model.name)}>${t("models.unload")}</button>`}
      ${onRemove && !model.default &&
      html`<button type="button" class="button" disabled=${swap !== null} aria-label=${t("models.delete_one", { name: model.name })}
        onClick=${() => onRemove(model.name)}>${t("models.delete")}</button>`}
    </div>`}
  </li>`;
}

/** @param {{swap: import("../board/shelf.js").Swap}} props */
function Progress({ swap }) {
  const words = known("swap", swap.phase) ?? swap.phase;
  const isMeasured = swap.phase === "loading";
  return html`<div class="model-progress">
    <span role="status">${words}</span>
    ${isMeasured && html` <span>${percent(swap.done)}</span>`}
    <progress aria-label=${t("models.loading_one", { name: swap.name })} max="1" value=${isMeasured ? swap.done : undefined}></progress>
  </div>`;
}

/** @param {ModelSummary} model */
function factsOf(model) {
  return [
    model.parameters && t("models.parameters", { count: magnitude(model.parameters) }),
    model.size_mb && memory(model.size_mb),
    model.n_ctx && t("models.context", { count: model.n_ctx }),
    model.slots && t("models.slots", { n: model.slots }),
  ].filter(Boolean);
}
