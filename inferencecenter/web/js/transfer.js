// @ts-check
/** Conversations as text. Pure. */

import { t } from "./i18n.js";
import { WireError } from "./wire/errors.js";
import { textOf } from "./wire/transcript.js";

/**
 * @typedef {import("./wire/types.js").ChatMessage} ChatMessage
 * @typedef {{title: string, model?: string, messages: readonly ChatMessage[]}} Exported
 */

/** Stands for an image in an export. */
const NO_IMAGE = "[image]";
const ROLES = /** @type {const} */ ({ system: "role.system", user: "role.user", assistant: "role.assistant", tool: "role.tool" });

/** @param {Exported} conversation */
export function asMarkdown({ title, messages }) {
  const parts = messages.map((message) => {
    const { role, tool_calls: calls } = message;
    const content = textOf(message, NO_IMAGE);
    const called = (calls ?? []).map((call) => `${t("message.called", { name: `\`${call.name}\`` })}:\n\n${fenced(call.arguments, "json")}`);
    const text = role === "tool" ? fenced(content, "") : content;
    return [`## ${t(ROLES[role])}`, ...(text ? [text] : []), ...called].join("\n\n");
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n`;
}

/**
 * Returns a title as the name of a file.
 *
 * @param {string} title
 */
export function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation";
}

/**
 * Reads an export.
 *
 * @param {string} text
 * @returns {Exported[]}
 * @throws {WireError} It is none.
 */
export function conversationsIn(text) {
  /** @type {any} */
  let found;
  try {
    found = JSON.parse(text);
  } catch (error) {
    throw refused(t("form.invalid", { why: /** @type {Error} */ (error).message }));
  }
  const all = found?.conversations;
  if (!Array.isArray(all)) throw refused(t("transfer.no_list"));
  for (const [at, each] of all.entries()) {
    const isRight = typeof each?.title === "string" && Array.isArray(each.messages) && each.messages.every(isMessage);
    if (!isRight) throw refused(t("transfer.bad_entry", { at: at + 1 }));
  }
  return all.map((each) => ({ ...each, messages: each.messages.map(withoutImages) }));
}

/**
 * Returns a message without its images, whose files are not part of an export.
 *
 * @param {ChatMessage} message
 */
function withoutImages({ images, ...message }) {
  return { ...message, content: textOf({ ...message, images }, NO_IMAGE) };
}

/**
 * Returns the presets in an export; those of another version have none.
 *
 * @param {string} text
 * @returns {readonly import("./wire/types.js").Preset[]}
 */
export function presetsIn(text) {
  const found = JSON.parse(text).presets;
  return Array.isArray(found) ? found : [];
}

/**
 * Divides messages so that each request with some fits into a frame.
 *
 * @param {readonly ChatMessage[]} messages
 * @param {number} limit  In bytes.
 * @returns {ChatMessage[][]}
 */
export function batchesOf(messages, limit) {
  /** @type {ChatMessage[][]} */
  const batches = [];
  let room = 0;
  for (const message of messages) {
    const size = new TextEncoder().encode(JSON.stringify(message)).length;
    if (size > room || batches.length === 0) {
      batches.push([]);
      room = limit;
    }
    batches.at(-1)?.push(message);
    room -= size;
  }
  return batches;
}

/** @param {any} message */
function isMessage(message) {
  return Object.hasOwn(ROLES, message?.role) && typeof message.content === "string";
}

/**
 * @param {string} text
 * @param {string} language
 */
function fenced(text, language) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}

/** @param {string} message */
function refused(message) {
  return new WireError({ code: "invalid_request", message, hint: t("transfer.choose") });
}
