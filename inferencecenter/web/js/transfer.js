// @ts-check
/** Conversations as text. Pure. */

import { WireError } from "./wire/errors.js";

/**
 * @typedef {import("./wire/types.js").ChatMessage} ChatMessage
 * @typedef {{title: string, model?: string, messages: readonly ChatMessage[]}} Exported
 */

const NAMES = { system: "System", user: "You", assistant: "Answer", tool: "Tool output" };

/** @param {Exported} conversation */
export function asMarkdown({ title, messages }) {
  const parts = messages.map(({ role, content, tool_calls: calls }) => {
    const called = (calls ?? []).map((call) => `Called \`${call.name}\`:\n\n${fenced(call.arguments, "json")}`);
    const text = role === "tool" ? fenced(content, "") : content;
    return [`## ${NAMES[role]}`, ...(text ? [text] : []), ...called].join("\n\n");
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
    throw refused(`Not valid JSON: ${/** @type {Error} */ (error).message}`);
  }
  const all = found?.conversations;
  if (!Array.isArray(all)) throw refused("The file has no list named “conversations”.");
  for (const [at, each] of all.entries()) {
    const isRight = typeof each?.title === "string" && Array.isArray(each.messages) && each.messages.every(isMessage);
    if (!isRight) throw refused(`Conversation ${at + 1} of the file has no title, or messages without role and content.`);
  }
  return all;
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
  return Object.hasOwn(NAMES, message?.role) && typeof message.content === "string";
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
  return new WireError({ code: "invalid_request", message, hint: "Choose a file that this page exported as JSON." });
}
