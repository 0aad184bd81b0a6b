// @ts-check
/** The models that the client may use: their list, and which one a conversation has. */

import { signal } from "../vendor/signals-core.js";
import { choicesOf } from "./choices.js";
import { number, t } from "./i18n.js";
import { modelOfSession } from "./list.js";
import { hello, link } from "./state.js";
import { asWireError } from "./wire/errors.js";

/** @typedef {import("./wire/types.js").ModelSummary} ModelSummary */

/** As last read; null before that. */
export const models = signal(/** @type {readonly ModelSummary[] | null} */ (null));

const CHANGES = /** @type {const} */ (["engine", "model_changed", "model_unloaded"]);
const EVERY_WHILE_LOADING_MS = 1500;
/** @type {Readonly<Record<ModelSummary["state"], string>>} */
const MOODS = { loaded: "good", loading: "busy", asleep: "calm", unloaded: "calm", failed: "bad" };
let nextRead = 0;

link.subscribe((made) => {
  models.value = null;
  if (!made) return;
  for (const op of CHANGES) made.on(op, () => void readModels());
  made.state.subscribe((state) => {
    if (state === "open" && made === link.peek()) readModels();
  });
});

/** Reads the list again, repeatedly while a model is loading. */
export async function readModels() {
  const there = link.peek();
  clearTimeout(nextRead);
  try {
    const list = (await there?.request("list_models"))?.models;
    if (there !== link.peek() || !list) return;
    models.value = list;
    clearTimeout(nextRead);
    if (list.some((/** @type {ModelSummary} */ each) => each.state === "loading")) nextRead = setTimeout(readModels, EVERY_WHILE_LOADING_MS);
  } catch (error) {
    console.info("cannot read the models:", asWireError(error).message);
  }
}

/**
 * Returns a model's state in words, and its mood.
 *
 * @param {ModelSummary} model
 * @returns {[words: string, mood: string]}
 */
export function stateOf({ state, load_fraction: fraction }) {
  const words = t(`model_state.${state}`);
  return [state === "loading" && fraction ? `${words}, ${number(Math.floor(100 * fraction))} %` : words, MOODS[state]];
}

/** Models with fewer parameters know only the language they were trained on, and few facts. */
const TINY_PARAMETERS = 50e6;
const CODER = /cod(?:e|er|ing)(?![a-z])|coder|codestral|devstral/i;
/** What the bundled model was trained for, in its language. */
const TINY = ["What is the capital of Austria?", "Count from 1 to 20.", "My name is Ada. I have a cat."]; // no text
const BASE = ["Once upon a time, there was", "The three largest cities of the world are"]; // no text

/**
 * Returns first messages that a model can answer; none before the models are known.
 *
 * @param {string} name
 * @returns {readonly string[]}
 */
export function suggestionsFor(name) {
  if (models.value === null) return [];
  const model = models.value.find((each) => each.name === name);
  if (model?.parameters && model.parameters < TINY_PARAMETERS) return TINY;
  if (model?.has_chat_template === false) return BASE;
  if (CODER.test(name)) return [t("chat.suggestion_code_1"), t("chat.suggestion_code_2"), t("chat.suggestion_code_3")];
  return [t("chat.suggestion_1"), t("chat.suggestion_2"), t("chat.suggestion_3")];
}

/**
 * Returns the name of the model that answers next in a session; "" if unknown.
 *
 * @param {import("./wire/session.js").Session} session
 */
export function modelOf(session) {
  const id = session.id.value;
  const own = id === null ? choicesOf(null).model : session.model.value || modelOfSession(id);
  return own || models.value?.find((each) => each.default)?.name || hello.value?.model || "";
}
