// @ts-check
/** The available models; operators choose the default and free memory. */

import { useActive } from "../board/feed.js";
import { count, magnitude, memory, percent } from "../board/format.js";
import { shelfOf } from "../board/shelf.js";
import { account, link } from "../state.js";
import { html, useEffect, useMemo } from "../ui.js";

/** @typedef {import("../wire/types.js").ModelSummary} ModelSummary */

const EVERY_MS = 10_000;
const EVERY_WHILE_LOADING_MS = 1500;
const MAY_SWAP = "operator";
/** @type {Readonly<Record<string, [string, string]>>} */
const STATES = {
  loaded: ["In memory", "good"],
  loading: ["Loading", "busy"],
  asleep: ["Asleep", "calm"],
  unloaded: ["Not loaded", "calm"],
  failed: ["Failed", "bad"],
};
/** @type {Readonly<Record<string, string>>} */
const PHASES = {
  asked: "Requested…",
  draining: "Waiting for running turns of another model to free its memory",
  loading: "Loading",
};

/** The list of models; empty without a connection. */
export function Models() {
  const there = link.value;
  return there && html`<${List} link=${there} />`;
}

/** @param {{link: import("../wire/link.js").Link}} props */
function List({ link: there }) {
  const shelf = useMemo(() => shelfOf(there), [there]);
  const active = useActive(there);
  const models = shelf.models.value;
  const loading = models?.some((model) => model.state === "loading") ?? false;
  useEffect(() => {
    if (!active) return undefined;
    shelf.refresh();
    const timer = setInterval(() => shelf.refresh(), loading ? EVERY_WHILE_LOADING_MS : EVERY_MS);
    return () => clearInterval(timer);
  }, [shelf, active, loading]);
  const may = account.value?.scopes.includes(MAY_SWAP) ?? false;
  const { words, hint, failed } = shelf.said.value;
  return html`<div class="board">
    <header class="board-head">
      <h1>Models</h1>
      <p class="hint">
        Models load automatically when you use them.${may ? "" : " Operators choose the default model."}
      </p>
    </header>
    <div class="board-said" role="status">
      ${words && html`<p class=${failed ? "problem" : "board-note"}>${words} ${hint}</p>`}
    </div>
    ${models === null && html`<p class="hint">Loading…</p>`}
    ${models?.length === 0 && html`<p class="hint">No models are available to you.</p>`}
    <ul class="models">
      ${models?.map((model) => html`<${Model} key=${model.name} model=${model} shelf=${shelf} may=${may && active} />`)}
    </ul>
  </div>`;
}

/** @param {{model: ModelSummary, shelf: import("../board/shelf.js").Shelf, may: boolean}} props */
function Model({ model, shelf, may }) {
  const swap = shelf.swap.value;
  const [state, mood] = STATES[model.state] ?? [model.state, "calm"];
  const inMemory = model.state === "loaded" || model.state === "loading";
  return html`<li class="model">
    <div class="model-head">
      <h2>${model.name}</h2>
      ${model.default && html`<span class="pill" data-mood="accent">Default</span>`}
      <span class="pill" data-mood=${mood}>${state}</span>
    </div>
    <p class="model-facts">${factsOf(model).map((fact) => html`<span key=${fact}>${fact}</span>`)}</p>
    ${model.detail && html`<p class="problem">${model.detail}</p>`}
    ${swap?.name === model.name && html`<${Progress} swap=${swap} />`}
    ${may &&
    html`<div class="model-acts">
      ${!(model.default && inMemory) &&
      html`<button type="button" class="button" disabled=${swap !== null}
        aria-label=${`${model.default ? "Load" : "Switch to"} ${model.name}`} onClick=${() => shelf.load(model.name)}>
        ${model.default ? "Load" : "Switch"}
      </button>`}
      ${model.state === "loaded" &&
      html`<button type="button" class="button" disabled=${swap !== null} aria-label=${`Unload ${model.name}`}
        onClick=${() => shelf.unload(model.name)}>Unload</button>`}
    </div>`}
  </li>`;
}

/** @param {{swap: import("../board/shelf.js").Swap}} props */
function Progress({ swap }) {
  const words = PHASES[swap.phase] ?? swap.phase;
  const known = swap.phase === "loading";
  return html`<div class="model-progress">
    <span role="status">${words}</span>
    ${known && html` <span>${percent(swap.done)}</span>`}
    <progress aria-label=${`Loading ${swap.name}`} max="1" value=${known ? swap.done : undefined}></progress>
  </div>`;
}

/** @param {ModelSummary} model */
function factsOf(model) {
  return [
    model.parameters && `${magnitude(model.parameters)} parameters`,
    model.size_mb && memory(model.size_mb),
    model.n_ctx && `${count(model.n_ctx)} tokens of context`,
    model.slots && (model.slots === 1 ? "1 turn at once" : `${count(model.slots)} turns at once`),
  ].filter(Boolean);
}
