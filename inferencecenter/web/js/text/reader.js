// @ts-check
/** Parses Markdown block by block while it grows. */

import { Lexer } from "../../vendor/marked.js";
import { INSIDE, cutOf } from "./cuts.js";

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
