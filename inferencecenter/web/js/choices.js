// @ts-check
/** The user's choices for a conversation: system prompt, model, parameters, the form of answers. */

import { signal } from "../vendor/signals-core.js";
import { forgetAll, keep, kept } from "./storage.js";
import { WireError } from "./wire/errors.js";

/**
 * @typedef {{kind: "none" | "json_schema" | "regex" | "grammar", text: string}} Form
 * @typedef {{system: string, model: string, params: Record<string, unknown>, form: Form}} Choices
 */

const changes = signal(0);

/**
 * Returns the choices for a session, or for the next new one; views that read them follow them.
 *
 * @param {string | null} id
 * @returns {Choices}
 */
export function choicesOf(id) {
  changes.value;
  return { system: "", model: "", params: {}, form: { kind: "none", text: "" }, ...kept(choicesKey(id), {}) };
}

/**
 * @param {string | null} id
 * @param {Choices} chosen
 */
export function keepChoices(id, chosen) {
  keep(choicesKey(id), chosen);
  changes.value += 1;
}

/** @param {string} id */
export function dropChoices(id) {
  keep(choicesKey(id), undefined);
}

/** Deletes all choices, at sign-out. */
export function dropAllChoices() {
  forgetAll("choices");
}

/** @param {string | null} id */
function choicesKey(id) {
  return id === null ? "choices" : `choices.${id}`;
}

/**
 * Returns the fields of `infer` for these choices.
 *
 * @param {Choices} chosen
 * @returns {object}
 * @throws {WireError} The JSON schema is not valid JSON.
 */
export function turnFields({ params, form }) {
  const fields = Object.keys(params).length > 0 ? { params } : {};
  if (form.kind === "none" || !form.text.trim()) return fields;
  return { ...fields, [form.kind]: form.kind === "json_schema" ? schemaOf(form.text) : form.text };
}

/** @param {string} text */
function schemaOf(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const message = `The JSON schema is not valid JSON: ${/** @type {Error} */ (error).message}`;
    throw new WireError({ code: "invalid_request", message, hint: "Correct it in the conversation's settings." });
  }
}
