// @ts-check
/** Conversations as text. Pure. */

import { t } from "./i18n.js";
import { WireError } from "./wire/errors.js";
import { IMAGE_MARK, textOf } from "./wire/transcript.js";

/**
 * @typedef {import("./wire/types.js").ChatMessage} ChatMessage
 * @typedef {{title: string, model?: string, messages: readonly ChatMessage[]}} Exported
 * @typedef {Readonly<Record<string, {media_type: string, data: string}>>} Files  Of images by digest, in Base64.
 */

/** Stands for an image whose file is not in the export. */
const NO_IMAGE = "[image]";
const SHOWN_DIGITS = 16;
const ROLES = /** @type {const} */ ({ system: "role.system", user: "role.user", assistant: "role.assistant", tool: "role.tool" });

/**
 * Returns a conversation as Markdown; images are data URLs, defined at its end.
 *
 * @param {Exported} conversation
 * @param {Files} files
 */
export function asMarkdown({ title, messages }, files) {
  /** @type {Set<string>} */
  const shown = new Set();
  const parts = messages.map((message) => {
    const { role, tool_calls: calls } = message;
    const images = message.images ?? [];
    let at = 0;
    const content = textOf(message, () => {
      const { digest, alt } = images[at++];
      if (!files[digest]) return NO_IMAGE;
      shown.add(digest);
      return `![${(alt ?? "").replace(/[\\[\]\n]/g, " ")}][${digest.slice(0, SHOWN_DIGITS)}]\n\n`;
    });
    const called = (calls ?? []).map((call) => `${t("message.called", { name: `\`${call.name}\`` })}:\n\n${fenced(call.arguments, "json")}`);
    const text = role === "tool" ? fenced(content, "") : content;
    return [`## ${t(ROLES[role])}`, ...(text ? [text] : []), ...called].join("\n\n");
  });
  const definitions = [...shown].map((digest) => {
    const { media_type, data } = files[digest];
    return `[${digest.slice(0, SHOWN_DIGITS)}]: data:${media_type};base64,${data}\n`;
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n${definitions.length > 0 ? "\n" : ""}${definitions.join("")}`;
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
 * Returns the digests of all images in conversations.
 *
 * @param {readonly Exported[]} conversations
 */
export function imagesIn(conversations) {
  const images = conversations.flatMap(({ messages }) => messages).flatMap((message) => message.images ?? []);
  return [...new Set(images.map(({ digest }) => digest))];
}

/**
 * Reads an export; images whose files it lacks are replaced by a text.
 *
 *
 * @param {string} text
 * @returns {{conversations: Exported[], files: Files}}
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
  const files = Object.fromEntries(Object.entries(found.images ?? {}).filter(([, file]) => typeof (/** @type {any} */ (file)?.data) === "string"));
  return { conversations: all.map((each) => ({ ...each, messages: each.messages.map((/** @type {ChatMessage} */ message) => withImagesIn(files, message)) })), files };
}

/**
 * Returns a message with those of its images that have files.
 *
 * @param {Files} files
 * @param {ChatMessage} message
 */
function withImagesIn(files, { images, ...message }) {
  if (!Array.isArray(images)) return message;
  const present = images.filter((image) => Object.hasOwn(files, String(image?.digest)));
  let at = 0;
  const content = textOf({ ...message, images }, () => (present.includes(images[at++]) ? IMAGE_MARK : NO_IMAGE));
  return { ...message, content, ...(present.length > 0 && { images: present }) };
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
