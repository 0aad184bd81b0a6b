// @ts-check
/** Parses Markdown block by block while it grows. */

import { Lexer } from "../../vendor/marked.js";

/** Characters of an available text that are parsed at a time. */
const WINDOW = 4000;

/**
 * @typedef {object} Piece
 * @property {any} token  A block, or its part between two cuts; `inline` must parse it before rendering.
 * @property {(token: any) => void} inline
 * @property {boolean} settled  Whether it is final; otherwise it is yielded again.
 * @property {boolean} continues  Whether it continues the previous piece after a cut.
 * @property {boolean} cut  Whether its continuation follows.
 */

/** Parser state of one text. */
export class Reader {
  /**
   * @param {any} options  Of the lexer.
   * @param {Record<string, any>} links  Link definitions, if known.
   */
  constructor(options, links = {}) {
    this._options = options;
    this.links = links;
    this._settled = 0;
    this._prefix = "";
    /** @type {string | null} */
    this._within = null;
  }

  /**
   * Continues parsing, with little work between two pieces. Pieces that are not final come last.
   *
   * @param {string} text  Extends the previous text.
   * @param {boolean} done  Whether the text is complete.
   * @returns {Generator<Piece | null, void>}  Null for work without a result.
   */
  *read(text, done) {
    let window = WINDOW;
    for (;;) {
      const [from, end] = [this._settled, Math.min(text.length, this._settled + window)];
      const isEnd = end === text.length;
      const cut = yield* this._readPart(text.slice(from, end), isEnd, done && isEnd);
      if (isEnd && !cut) return;
      window = this._settled === from ? window * 2 : WINDOW;
      yield null;
    }
  }

  /**
   * @param {string} part
   * @param {boolean} isEnd
   * @param {boolean} done
   * @returns {Generator<Piece, boolean>}  Whether a block was cut: parsing continues there.
   */
  *_readPart(part, isEnd, done) {
    const source = this._prefix + part;
    const { tokens, inline, inlineOf } = this._lex(source);
    const start = this._settled - this._prefix.length;
    const within = this._within;
    const last = done ? tokens.length : Math.max(0, tokens.findLastIndex((token) => token.type !== "space"));
    let at = 0;
    for (const [index, token] of tokens.entries()) {
      const continues = index === 0 && isMore(within, token);
      // The position of a block in the text is not always known; then nothing is final.
      const known = at >= 0 && isAt(source, token.raw, at);
      const cut = known ? this._cut(token, inlineOf) : null;
      if (cut) {
        this._settle(start + at + cut.at, cut.token.type, cut.prefix);
        yield { token: cut.token, inline: cut.inline, settled: true, continues, cut: true };
        return true;
      }
      at = known ? at + token.raw.length : -1;
      const settled = at >= 0 && index < last;
      if (settled) this._settle(start + at, null, "");
      if (settled) for (const found of definitions(token)) this.links[found.tag] ??= { href: found.href, title: found.title };
      if (token.type === "space" || token.type === "def" || !(settled || isEnd)) continue;
      yield { token, inline, settled, continues, cut: false };
    }
    return false;
  }

  /**
   * @param {number} at
   * @param {string | null} within
   * @param {string} prefix
   */
  _settle(at, within, prefix) {
    this._settled = at;
    this._within = within;
    this._prefix = prefix;
  }

  /**
   * @param {any} token
   * @param {(text: string) => any[]} inlineOf
   */
  _cut(token, inlineOf) {
    const cut = cutOf(token, inlineOf);
    if (!cut) return null;
    const { tokens, inline } = this._lex(token.raw.slice(0, cut.at));
    return tokens[0].type === "def" ? null : { ...cut, token: tokens[0], inline };
  }

  /** @param {string} text */
  _lex(text) {
    const lexer = new Lexer(this._options);
    Object.assign(lexer.tokens.links, this.links);
    lexer.blockTokens(text, lexer.tokens);
    const waiting = new Map(lexer.inlineQueue.map(({ src, tokens }) => [tokens, src]));
    const inline = (/** @type {any} */ token) => {
      if (Array.isArray(token)) {
        for (const each of token) inline(each);
        return;
      }
      const { tokens } = token;
      const src = tokens && waiting.get(tokens);
      waiting.delete(tokens);
      if (src !== undefined) lexer.inlineTokens(src.startsWith(INSIDE) ? src.slice(INSIDE.length) : src, tokens);
      else for (const part of [tokens, token.items, token.header, token.rows]) if (part) inline(part);
    };
    return { tokens: /** @type {any[]} */ (lexer.tokens), inline, inlineOf: (/** @type {string} */ src) => lexer.inlineTokens(src, []) };
  }
}

/**
 * Parses a whole text for its link definitions.
 *
 * @param {any} options  Of the lexer.
 * @param {string} text
 * @returns {Generator<void, Record<string, any>>}
 */
export function* definedIn(options, text) {
  const reader = new Reader(options);
  for (const _ of reader.read(text, true)) yield;
  return reader.links;
}

/**
 * Returns whether the text matches, except for trailing space, which the lexer may have changed.
 *
 * @param {string} source
 * @param {string} raw
 * @param {number} at
 */
function isAt(source, raw, at) {
  return source.startsWith(raw.trimEnd(), at) && source.slice(at + raw.trimEnd().length, at + raw.length).trim() === "";
}

/**
 * @param {string | null} within
 * @param {any} token
 */
function isMore(within, token) {
  return within === token.type || (within === "paragraph" && token.type === "heading");
}

/**
 * @param {any} token
 * @returns {any[]}
 */
function definitions(token) {
  if (token.type === "def") return [token];
  return [...(token.tokens ?? []), ...(token.items ?? [])].flatMap(definitions);
}

/** Paragraphs are cut in the middle: from this length on where no inline element is open, ... */
const PARAGRAPH_LEAST = 1000;
/** ... and at this length if there is no such point. */
const PARAGRAPH_MOST = 2000;
const BLOCK_LEAST = 1500;

/** Precedes the rest of a paragraph, which may start like a list. It is not shown. */
const INSIDE = "\u200b ";

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
function cutOf(token, inline) {
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
