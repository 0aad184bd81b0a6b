// @ts-check
/** The user's choices for a conversation: system prompt, model, parameters, the form of answers. */

import { signal } from "../vendor/signals-core.js";
import { known, t } from "./i18n.js";
import { forgetAll, keep, kept } from "./storage.js";
import { WireError } from "./wire/errors.js";

/**
 * @typedef {{kind: "none" | "json_schema" | "regex" | "grammar", text: string}} Form
 * @typedef {{name: string, description: string, parameters: Record<string, unknown> | null, allowed: boolean}} UserTool
 *   Its calls are answered by hand; `allowed` if the model may call it.
 * @typedef {object} Choices
 * @property {string} system
 * @property {string} model
 * @property {Record<string, unknown>} params
 * @property {Form} form
 * @property {readonly UserTool[]} tools  Those that the user defined.
 * @property {readonly string[]} servers  MCP servers whose tools the model may call.
 * @property {readonly string[]} approved  Tools that run without a question, as `server/tool`.
 */

/** @type {Choices} */
const NONE = { system: "", model: "", params: {}, form: { kind: "none", text: "" }, tools: [], servers: [], approved: [] };

const changes = signal(0);

/**
 * Returns the choices for a session, or for the next new one; views that read them follow them.
 *
 * @param {string | null} id
 * @returns {Choices}
 */
export function choicesOf(id) {
  changes.value;
  return { ...NONE, ...kept(choicesKey(id), {}) };
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
 * @returns {{tools?: import("./wire/types.js").Tool[]}}
 * @throws {WireError} The JSON schema is not valid JSON.
 */
export function turnFields({ params, form, tools }) {
  const offered = wireTools(tools);
  const fields = { ...(Object.keys(params).length > 0 && { params }), ...(offered.length > 0 && { tools: offered }) };
  if (form.kind === "none" || !form.text.trim()) return fields;
  return { ...fields, [form.kind]: form.kind === "json_schema" ? schemaOf(form.text) : form.text };
}

/**
 * Returns the allowed tools as the protocol has them.
 *
 * @param {readonly UserTool[]} tools
 * @returns {import("./wire/types.js").Tool[]}
 */
export function wireTools(tools) {
  return tools.filter(({ allowed }) => allowed).map(({ name, description, parameters }) => ({
    name, strict: false, ...(description && { description }), ...(parameters && { parameters }),
  }));
}

/**
 * Returns a parameter's display name.
 *
 * @param {{name: string}} parameter
 */
export function labelOf({ name }) {
  const text = known("param", name) ?? name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** @param {string} text */
function schemaOf(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    const message = t("form.invalid_schema", { why: /** @type {Error} */ (error).message });
    throw new WireError({ code: "invalid_request", message, hint: t("form.correct") });
  }
}
