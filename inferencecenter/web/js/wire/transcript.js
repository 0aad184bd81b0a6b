// @ts-check
/** A conversation as turns: messages, answer, end. Pure. */

import { t } from "../i18n.js";

/** @typedef {import("./types.js").ToolCall} ToolCall */
/** @typedef {import("./types.js").ChatMessage} ChatMessage */
/** @typedef {{content: string, reasoning: string, toolCalls: ToolCall[]}} Answer */
/** @typedef {import("./types.js").Usage} Usage */

/**
 * @typedef {object} Ending
 * @property {string} reason  `finish_reason`, or "error".
 * @property {Usage | null} usage
 * @property {import("./types.js").TurnStats | null} stats  Null if the turn ended while the page was disconnected.
 * @property {string} stop  The stop string that matched.
 * @property {readonly string[]} warnings
 * @property {import("./errors.js").WireError | null} error
 * @property {number} shifted  Old turns that left the context for it, as far as known.
 */

/**
 * @typedef {object} Turn
 * @property {string} key  Key in lists.
 * @property {string | null} turnId  Null for one unknown to the daemon.
 * @property {readonly ChatMessage[]} asked  All messages since the previous turn.
 * @property {Answer | null} answer
 * @property {Ending | null} ending  Null for messages without a requested answer.
 */

/**
 * @typedef {import("./types.js").MessageImage & {source?: string, shared?: string}} SeenImage  `source` is a data URL; the
 *   daemon has the others, those of a shared conversation at the address `shared`.
 * @typedef {{name: string, text: string, image?: SeenImage}} AttachedFile  The text of an image is empty.
 */

/** The position before the first turn. */
export const START = "start";
/** Stands for an image in the content of a message. */
export const IMAGE_MARK = "\ufffc";
const FILE_HEAD = /Attached file: (.+)\n(`{3,})\n/y;

/**
 * Returns the system prompt of a transcript.
 *
 * @param {readonly ChatMessage[]} transcript
 */
export function systemOf(transcript) {
  return transcript[0]?.role === "system" ? transcript[0].content : "";
}

/**
 * Divides a transcript into turns; the remaining messages belong to the running turn.
 *
 * @param {readonly ChatMessage[]} transcript
 * @param {readonly import("./types.js").TranscriptTurn[]} ended
 * @returns {{turns: Turn[], rest: readonly ChatMessage[]}}
 */
export function divide(transcript, ended) {
  let from = transcript[0]?.role === "system" ? 1 : 0;
  /** @type {Turn[]} */
  const turns = [];
  for (const turn of ended) {
    if (turn.messages <= from) continue; // it was discarded, and left nothing
    const messages = transcript.slice(from, turn.messages);
    from = turn.messages;
    const last = /** @type {ChatMessage} */ (messages.at(-1));
    const answered = last?.role === "assistant";
    turns.push({
      key: turn.turn_id,
      turnId: turn.turn_id,
      asked: answered ? messages.slice(0, -1) : messages,
      answer: answered ? answerOf(last) : null,
      ending: endingOf(turn),
    });
  }
  return { turns, rest: transcript.slice(from) };
}

/**
 * Returns how a turn ended, as far as known.
 *
 * @param {{finish_reason: string, usage?: Usage, stats?: import("./types.js").TurnStats, stop?: string,
 *   warnings?: string[]}} end  `end`, or a turn of a transcript.
 * @returns {Ending}
 */
export function endingOf({ finish_reason: reason, usage, stats, stop = "", warnings = [] }) {
  return { reason, usage: usage ?? null, stats: stats ?? null, stop, warnings, error: null, shifted: 0 };
}

/**
 * Returns the ending of a failed turn.
 *
 * @param {import("./errors.js").WireError} error
 * @returns {Ending}
 */
export function failureOf(error) {
  return { ...endingOf({ finish_reason: "error" }), error };
}

/**
 * Returns the turns with another one appended or replaced.
 *
 * @param {readonly Turn[]} turns
 * @param {Turn} turn
 */
export function withTurn(turns, turn) {
  return [...turns.filter((each) => each.turnId === null || each.turnId !== turn.turnId), turn];
}

/**
 * Returns the turns up to one of them, or none for `START`.
 *
 * @param {readonly Turn[]} turns
 * @param {string} turnId
 */
export function until(turns, turnId) {
  return turns.slice(0, turns.findIndex((turn) => turn.turnId === turnId) + 1);
}

/**
 * Returns the turns without failed ones, which the daemon does not keep.
 *
 * @param {readonly Turn[]} turns
 */
export function withoutFailed(turns) {
  return turns.filter((turn) => turn.ending?.reason !== "error");
}

/**
 * Returns the number of tokens in the context before the next message, as reported by the last answer.
 *
 * @param {readonly Turn[]} turns
 */
export function tokensOf(turns) {
  const usage = turns.at(-1)?.ending?.usage;
  return usage ? usage.prompt_tokens + usage.completion_tokens : null;
}

/**
 * Returns messages that belong to no turn as a turn.
 *
 * @param {readonly ChatMessage[]} messages
 * @param {string} key
 * @returns {Turn}
 */
export function loose(messages, key) {
  return { key, turnId: null, asked: messages, answer: null, ending: null };
}

/**
 * Returns the turn to rewind to so that the one at `index` is discarded, `null` if unknown.
 *
 * @param {readonly Turn[]} turns
 * @param {number} index
 * @returns {string | null}
 */
export function before(turns, index) {
  if (index === 0) return START;
  return turns[index - 1].turnId;
}

/**
 * Returns a message as an answer.
 *
 * @param {ChatMessage} message
 * @returns {Answer}
 */
export function answerOf(message) {
  return { content: message.content, reasoning: message.reasoning ?? "", toolCalls: message.tool_calls ?? [] };
}

/**
 * Returns the fields of `infer` for these messages; none if the history has them.
 *
 * @param {readonly ChatMessage[]} asked
 */
export function question(asked) {
  if (asked.length === 0) return {};
  const isPrompt = asked.length === 1 && asked[0].role === "user" && !asked[0].images;
  return isPrompt ? { prompt: asked[0].content } : { messages: asked.map(inParts) };
}

/**
 * Returns a message as it is sent: with its images as parts.
 *
 * @param {ChatMessage} message
 */
export function inParts(message) {
  const { role, content, images, tool_call_id } = message;
  if (!images) return message;
  const parts = content.split(IMAGE_MARK).flatMap((text, at) => [
    ...(at > 0 ? [imagePart(images[at - 1])] : []),
    ...(text ? [{ type: "text", text }] : []),
  ]);
  return { role, content: parts, ...(tool_call_id && { tool_call_id }) };
}

/** @param {SeenImage} image */
function imagePart({ source, digest, alt }) {
  return { type: "image", ...(source ? { data: source.slice(source.indexOf(",") + 1) } : { digest }), ...(alt && { alt }) };
}

/**
 * Returns the user's message of files and a text; images are before all else.
 *
 * @param {readonly AttachedFile[]} files
 * @param {string} text
 * @returns {ChatMessage}
 */
export function messageOf(files, text) {
  const images = files.flatMap(({ image, name }) => (image ? [{ ...image, alt: name || undefined }] : []));
  const content = withFiles(files.filter(({ image }) => !image), text);
  if (images.length === 0) return { role: "user", content };
  return { role: "user", content: IMAGE_MARK.repeat(images.length) + content.replaceAll(IMAGE_MARK, "\ufffd"), images };
}

/**
 * Returns the text of a message for where images cannot be shown.
 *
 * @param {ChatMessage} message
 * @param {() => string} [instead]  Returns what stands for the next image.
 */
export function textOf({ content, images }, instead = () => "") {
  return images ? content.replaceAll(IMAGE_MARK, instead) : content;
}

/**
 * Returns the files of a message, images among them, and its text.
 *
 * @param {ChatMessage} message
 * @returns {{files: readonly AttachedFile[], text: string}}
 */
export function partsOf({ content, images }) {
  if (!images) return filesIn(content);
  const { files, text } = filesIn(textOf({ role: "user", content, images }));
  return { files: [...images.map((image) => ({ name: image.alt ?? "", text: "", image })), ...files], text };
}

/**
 * Returns a message with files before its text.
 *
 * Each is a block of code, whose fence is longer than any run of backticks in the file, so that no file can end it.
 *
 * @param {readonly AttachedFile[]} files
 * @param {string} text
 */
export function withFiles(files, text) {
  const frames = files.map(({ name, text: content }) => {
    const longest = (content.match(/`+/g) ?? []).reduce((most, { length }) => Math.max(most, length), 2);
    const fence = "`".repeat(longest + 1);
    return `Attached file: ${name}\n${fence}\n${content}\n${fence}`; // no text
  });
  return [...frames, ...(text ? [text] : [])].join("\n\n");
}

/**
 * Returns the files of a message, and its text: the inverse of `withFiles`.
 *
 * @param {string} content
 * @returns {{files: readonly AttachedFile[], text: string}}
 */
export function filesIn(content) {
  const files = [];
  let at = 0;
  for (;;) {
    FILE_HEAD.lastIndex = at;
    const head = FILE_HEAD.exec(content);
    if (!head) break;
    const from = at + head[0].length;
    const to = content.indexOf(`\n${head[2]}`, from);
    if (to < 0) break;
    files.push({ name: head[1], text: content.slice(from, to) });
    at = Math.min(content.length, to + head[2].length + 3);
  }
  const text = content.slice(at);
  // A message of another origin may only look like one.
  return files.length > 0 && withFiles(files, text) === content ? { files, text } : { files: [], text: content };
}

/**
 * Returns a title from the first words of a message, or the names of its files.
 *
 * @param {string} content
 */
export function titleOf(content) {
  const { files, text } = filesIn(content.replaceAll(IMAGE_MARK, ""));
  const line = (text.trim() || files.map(({ name }) => name).join(", ")).replace(/\s+/g, " ");
  if (line.length <= 60) return line || t("chat.new");
  const cut = line.slice(0, 60);
  const space = cut.lastIndexOf(" ");
  return `${space > 30 ? cut.slice(0, space) : cut}…`;
}
