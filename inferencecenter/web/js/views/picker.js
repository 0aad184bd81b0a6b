// @ts-check
/** The choice of a conversation's model: a listbox below its button. */

import { choicesOf, keepChoices } from "../choices.js";
import { loadTexts, t } from "../i18n.js";
import { modelOf, models, readModels, stateOf } from "../models.js";
import { attempt } from "../state.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";

await loadTexts("models");

/** @typedef {import("../models.js").ModelSummary} ModelSummary */

const PREFIX_WITHIN_MS = 600;
/** @type {Readonly<Record<string, (at: number, last: number) => number>>} */
const MOVES = {
  ArrowDown: (at, last) => Math.min(at + 1, last),
  ArrowUp: (at) => Math.max(at - 1, 0),
  Home: () => 0,
  End: (_at, last) => last,
};

/** @param {{session: import("../wire/session.js").Session, onClose: (focus: boolean) => void}} props  `focus` goes back to the button. */
export function Picker({ session, onClose }) {
  const list = models.value?.filter((each) => each.kind === "chat") ?? null;
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const typed = useRef({ text: "", at: 0 });
  const [moved, setMoved] = useState(/** @type {string | null} */ (null));
  const current = modelOf(session);
  const mayChange = session.live.value === null && session.state.value !== "gone";
  const active = Math.max(0, (list ?? []).findIndex(({ name }) => name === (moved ?? current)));
  useLayoutEffect(() => {
    readModels();
    ref.current?.focus();
  }, []);
  useEffect(() => ref.current?.querySelector("[data-active=true]")?.scrollIntoView({ block: "nearest" }), [active]);
  const choose = (/** @type {ModelSummary} */ model) => {
    if (!mayChange) return;
    setModel(session, model);
    onClose(true);
  };
  const keys = (/** @type {KeyboardEvent} */ event) => {
    const next = list && list.length > 0 && MOVES[event.key]?.(active, list.length - 1);
    if (typeof next === "number") setMoved(/** @type {ModelSummary[]} */ (list)[next].name);
    else if (event.key === "Escape" || event.key === "Tab") onClose(true);
    else if ((event.key === "Enter" || event.key === " ") && list?.[active]) choose(list[active]);
    else if (event.key.length === 1 && !event.ctrlKey && !event.metaKey && !event.altKey) find(event.key);
    else return;
    event.stopPropagation();
    // From the button, where the focus is now, Tab goes on as usual.
    if (event.key !== "Tab") event.preventDefault();
  };
  const find = (/** @type {string} */ key) => {
    const now = performance.now();
    const text = (now - typed.current.at < PREFIX_WITHIN_MS ? typed.current.text : "") + key.toLowerCase();
    const starting = (/** @type {string} */ letters) => list?.find(({ name }) => name.toLowerCase().startsWith(letters));
    const found = starting(text) ?? starting(key.toLowerCase());
    typed.current = { text: starting(text) ? text : key.toLowerCase(), at: now };
    if (found) setMoved(found.name);
  };
  const left = (/** @type {any} */ event) => {
    if (event.relatedTarget && !event.currentTarget.contains(event.relatedTarget)) onClose(false);
  };
  return html`
    <div class="picker" onFocusOut=${left}>
      <div role="listbox" class="picker-list" ref=${ref} tabindex="0" aria-label=${t("settings.model")} aria-describedby="picker-hint"
        aria-disabled=${!mayChange} aria-activedescendant=${list?.length ? `model-${active}` : undefined} onKeyDown=${keys}>
        ${list?.map(
          (model, index) => html`<${Option} key=${model.name} id=${`model-${index}`} model=${model} selected=${model.name === current}
            active=${index === active} onChoose=${() => choose(model)} />`,
        )}
      </div>
      <p class="hint" id="picker-hint">${hintOf(list, mayChange, session.id.value === null)}</p>
    </div>
  `;
}

/** @param {{id: string, model: ModelSummary, selected: boolean, active: boolean, onChoose: () => void}} props */
function Option({ id, model, selected, active, onChoose }) {
  const [words, mood] = stateOf(model);
  const facts = [words, model.n_ctx && t("models.context", { count: model.n_ctx })].filter(Boolean);
  return html`
    <div role="option" class="picker-option" id=${id} aria-selected=${selected} data-active=${active} onClick=${onChoose}>
      <span class="picker-name"><bdi>${model.name}</bdi>${model.default && html` <span class="badge">${t("models.default")}</span>`}</span>
      <span class="picker-state" data-mood=${mood}>${facts.join(" · ")}</span>
      ${model.state === "failed" && model.detail && html`<span class="picker-detail">${model.detail}</span>`}
    </div>
  `;
}

/**
 * @param {readonly ModelSummary[] | null} list
 * @param {boolean} mayChange
 * @param {boolean} isNew
 */
function hintOf(list, mayChange, isNew) {
  if (list === null) return t("notice.loading");
  if (list.length === 0) return t("models.none");
  if (!mayChange) return t("models.busy");
  return t(isNew ? "models.hint" : "models.hint_anew");
}

/**
 * Chooses the model of a session's next turn; the default model is followed when that changes.
 *
 * @param {import("../wire/session.js").Session} session
 * @param {ModelSummary} model
 */
function setModel(session, model) {
  const id = session.id.peek();
  const name = model.default ? "" : model.name;
  if (id === null) keepChoices(null, { ...choicesOf(null), model: name });
  else if (model.name !== modelOf(session)) attempt((there) => there.request("set_model", { session_id: id, ...(name && { model: name }) }));
}
