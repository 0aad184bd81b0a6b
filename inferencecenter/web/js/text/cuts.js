// @ts-check
/**
 * Cut points of long blocks, so that their beginnings need not be parsed again while they grow. Pure.
 *
 * A cut depends only on the text before it and a little after it: the same text is cut at the same points regardless of
 * the pieces in which it arrived.
 */

/** Paragraphs are cut in the middle: from this length on where no inline element is open, ... */
const PARAGRAPH_LEAST = 1000;
/** ... and at this length if there is no such point. */
const PARAGRAPH_MOST = 2000;
const BLOCK_LEAST = 1500;

/** Precedes the rest of a paragraph, which may start like a list. It is not shown. */
export const INSIDE = "\u200b ";

/** Characters that may start or end inline elements; within words, `_` does not. */
const DELIMITER = /[*`[\]<~$]|\b_|_\b/;
const PAUSE = /[^\s] (?=[\p{L}\p{N}])|[。！？，、；：](?=[\p{L}\p{N}])/gu;
const FENCE = /^ {0,3}(?:`{3,}|~{3,})[^\n]*\n/;

/**
 * @typedef {object} Cut
 * @property {number} at  In the token's `raw`.
 * @property {string} prefix  Text to prepend to the rest, so that it is parsed as a continuation.
 */

/**
 * Returns a cut point of a block, null while it is short or has none.
 *
 * @param {any} token
 * @param {(text: string) => any[]} inline  Parses the inline content of a paragraph.
 * @returns {Cut | null}
 */
export function cutOf(token, inline) {
  if (token.raw.length < BLOCK_LEAST) return null;
  if (token.type === "paragraph" || (token.type === "heading" && !/^ {0,3}#/.test(token.raw))) return inParagraph(token, inline);
  if (token.type === "list") return betweenItems(token);
  if (token.type === "table") return betweenRows(token);
  if (token.type === "code") return betweenLines(token);
  if (token.type === "blockquote") return betweenBlocks(token);
  return null;
}

/**
 * @param {any} token
 * @param {(text: string) => any[]} inline
 * @returns {Cut | null}
 */
function inParagraph(token, inline) {
  if (token.text.length < PARAGRAPH_MOST || !token.raw.startsWith(token.text)) return null;
  const text = token.text.slice(0, PARAGRAPH_MOST);
  return { at: closedAt(inline(text)) || pauseAt(text), prefix: INSIDE };
}

/**
 * Returns a point between two words at which no inline element is open, 0 if there is none.
 *
 * @param {any[]} tokens
 */
function closedAt(tokens) {
  let at = 0;
  for (const token of tokens) {
    if (token.type === "text") {
      const open = token.raw.search(DELIMITER);
      const closed = open < 0 ? token.raw : token.raw.slice(0, open);
      for (const { index, 0: found } of closed.matchAll(PAUSE)) {
        if (at + index + found.length >= PARAGRAPH_LEAST) return at + index + found.length;
      }
      if (open >= 0) return 0;
    } else if (!isClosed(token)) {
      return 0;
    }
    at += token.raw.length;
  }
  return 0;
}

/** @param {any} token */
function isClosed(token) {
  if (token.type === "html" || (token.type === "escape" && /[([]/.test(token.text))) return false;
  if (token.type === "text" && !token.tokens) return !DELIMITER.test(token.raw);
  return (token.tokens ?? []).every(isClosed);
}

/** @param {string} text */
function pauseAt(text) {
  const space = text.lastIndexOf(" ");
  if (space >= PARAGRAPH_LEAST) return space + 1;
  return /[\ud800-\udbff]$/.test(text) ? text.length - 1 : text.length;
}

/**
 * The last two items may change: subsequent text may belong to them.
 *
 * @param {any} token
 * @returns {Cut | null}
 */
function betweenItems(token) {
  let at = 0;
  for (const item of token.items.slice(0, -2)) {
    if (!token.raw.startsWith(item.raw, at)) return null;
    at += item.raw.length;
    if (at >= BLOCK_LEAST) return { at, prefix: "" };
  }
  return null;
}

/**
 * @param {any} token
 * @returns {Cut | null}
 */
function betweenRows(token) {
  const head = lineAfter(token.raw, lineAfter(token.raw, 0));
  const at = lineAfter(token.raw, BLOCK_LEAST);
  if (linesIn(token.raw.slice(at).trimEnd()) < 2) return null;
  return { at, prefix: token.raw.slice(0, head) };
}

/**
 * @param {any} token
 * @returns {Cut | null}
 */
function betweenLines(token) {
  const fence = FENCE.exec(token.raw);
  const at = lineAfter(token.raw, BLOCK_LEAST);
  return fence && linesIn(token.raw.slice(at)) >= 2 ? { at, prefix: fence[0] } : null;
}

/**
 * @param {any} token
 * @returns {Cut | null}
 */
function betweenBlocks(token) {
  let read = 0;
  const last = token.tokens.findLastIndex((/** @type {any} */ each) => each.type !== "space");
  for (const within of token.tokens.slice(0, Math.max(0, last))) {
    if (read >= BLOCK_LEAST && within.type !== "space") {
      const at = afterLines(token.raw, linesIn(token.text.slice(0, read)));
      return /^ {0,3}>/.test(token.raw.slice(at)) ? { at, prefix: "" } : null;
    }
    if (!token.text.startsWith(within.raw, read)) return null;
    read += within.raw.length;
  }
  return null;
}

/**
 * Returns the start of the line after the one at `from`; the end if there is none.
 *
 * @param {string} text
 * @param {number} from
 */
function lineAfter(text, from) {
  const end = text.indexOf("\n", from);
  return end < 0 ? text.length : end + 1;
}

/**
 * @param {string} text
 * @param {number} lines
 */
function afterLines(text, lines) {
  let at = 0;
  for (let line = 0; line < lines; line += 1) at = lineAfter(text, at);
  return at;
}

/** @param {string} text */
function linesIn(text) {
  return text.split("\n").length - 1;
}
