// @ts-check
/** A growing block of an answer, updated by appending where possible. */

import { CodeBlock } from "./blocks.js";
import { rendered, renderedInline } from "./rendered.js";

/** Items or rows rendered per step. */
const GROUP = 8;

/** A block that may still grow. */
export class Block {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.element = document.createElement("div");
    this.element.className = "block";
    this.element.dir = "auto";
    place.append(this.element);
    this._form = "";
    /** @type {CodeBlock | null} */
    this._code = null;
    this._said = "";
    /** @type {string[]} */
    this._rows = [];
    /** @type {Node | null} */
    this._lastKept = null;
    this._keptRows = 0;
    /** Whether some content here will be removed. */
    this.kept = false;
  }

  /** Freezes the current content; later content is appended after it. */
  keep() {
    const within = this._within();
    this.kept = true;
    this._lastKept = within.lastChild;
    this._keptRows = within.children.length;
    this._rows = [];
    this._form = "";
    this._said = this._code ? `${this._code.text}\n` : "";
  }

  /**
   * @param {import("./reader.js").Piece} piece
   * @returns {Generator<void>}
   */
  *showing(piece) {
    const { token, inline, continues } = piece;
    const form = formOf(token);
    const again = this._form === form;
    this._form = form;
    if (token.type === "code") {
      yield* this._showCode(token, continues || again);
    } else if (!rowsOf(token).length || !(yield* this._showingRows(piece, again))) {
      inline(token);
      if (continues) this._showMore(token);
      else this.element.replaceChildren(rendered([token]));
      this._rows = [];
      this._form = "";
    }
  }

  /**
   * @param {any} token
   * @param {boolean} again
   * @returns {Generator<void>}
   */
  *_showCode(token, again) {
    if (!again || !this._code) {
      this._code = new CodeBlock(token.lang ?? "");
      this.element.replaceChildren(this._code.element);
    }
    this._code.say(this._said + token.text);
    yield* this._code.painting();
  }

  /**
   * Shows the new items of a list or rows of a table, a few per step. Returns whether that was possible.
   *
   * @param {import("./reader.js").Piece} piece
   * @param {boolean} again  Whether unchanged ones may be kept.
   * @returns {Generator<void, boolean>}
   */
  *_showingRows({ token, inline, continues }, again) {
    const rows = rowsOf(token);
    const keys = rows.map(keyOf);
    if (!again || keys.length < this._rows.length) {
      this._rows = [];
      if (continues) this._trim();
      else this._showFirst(token, inline);
    }
    const changed = keys.flatMap((key, index) => (key === this._rows[index] ? [] : [index]));
    for (const group of apart(changed, keys)) {
      const some = group.map((index) => rows[index]);
      inline(some);
      const made = [...(containerIn(rendered([withRows(token, some)]))?.children ?? [])];
      const within = this._within();
      if (made.length !== some.length || within.children.length - this._keptRows !== this._rows.length) return false;
      for (const [place, index] of group.entries()) {
        if (index < this._rows.length) within.children[this._keptRows + index].replaceWith(made[place]);
        else within.append(made[place]);
        this._rows[index] = keys[index];
      }
      yield;
    }
    return true;
  }

  /**
   * @param {any} token
   * @param {(token: any) => void} inline
   */
  _showFirst(token, inline) {
    const rows = rowsOf(token);
    inline([token.header ?? [], rows[0]]);
    const made = rendered([withRows(token, rows.slice(0, 1))]);
    this.element.replaceChildren(onlyIn(made) ?? made);
    this._rows = [keyOf(rows[0])];
  }

  /** @param {any} token  A continuation of the current content. */
  _showMore(token) {
    this._trim();
    const isText = token.type === "paragraph" || token.type === "heading";
    const made = isText ? renderedInline(token.tokens) : rendered([token]);
    this._within().append(...(isText ? made : (containerIn(made) ?? made)).childNodes);
  }

  /** Removes content that is not kept. */
  _trim() {
    const within = this._within();
    while (within.lastChild && within.lastChild !== this._lastKept) within.lastChild.remove();
  }

  /** Insertion point of new content. */
  _within() {
    return containerIn(this.element) ?? this.element;
  }
}

/**
 * Returns the container of the parts of a single-element block: a paragraph, a list, a quote, or the body of a table.
 *
 * @param {ParentNode} parent
 */
function containerIn(parent) {
  const only = onlyIn(parent);
  return only?.matches(".table-frame") ? only.querySelector("tbody") : only;
}

/**
 * Returns the first element, unless text follows it; the empty remainder of an unclosed tag is ignored.
 *
 * @param {ParentNode} parent
 */
function onlyIn(parent) {
  const others = [...parent.childNodes].filter((node) => node !== parent.firstElementChild);
  return others.some((node) => node.textContent?.trim()) ? null : parent.firstElementChild;
}

/**
 * Returns the key that must be unchanged for a block to be appended to.
 *
 * @param {any} token
 */
function formOf({ type, ordered, start, loose, lang, align, header }) {
  const heads = header?.map((/** @type {any} */ cell) => cell.text);
  return JSON.stringify([type, ordered, start, loose, (lang ?? "").trim().split(/\s+/)[0], align, heads]);
}

/**
 * @param {any} token
 * @returns {any[]}
 */
function rowsOf(token) {
  return token.items ?? token.rows ?? [];
}

/**
 * @param {any} token
 * @param {any[]} rows
 */
function withRows(token, rows) {
  return token.items ? { ...token, items: rows } : { ...token, rows };
}

/**
 * Returns the key that identifies unchanged list items and table rows.
 *
 * @param {any} row
 * @returns {string}
 */
function keyOf(row) {
  return row.raw ?? JSON.stringify(row.map((/** @type {any} */ cell) => cell.text));
}

/**
 * Returns groups of rows that are rendered together. A row with HTML tags is a group of its own.
 *
 * @param {number[]} indices
 * @param {string[]} keys
 * @returns {number[][]}
 */
function apart(indices, keys) {
  /** @type {number[][]} */
  const groups = [];
  let room = 0;
  for (const index of indices) {
    const isPlain = !keys[index].includes("<");
    if (isPlain && room > 0) groups.at(-1)?.push(index);
    else groups.push([index]);
    if (!isPlain) room = 0;
    else room = room > 0 ? room - 1 : GROUP - 1;
  }
  return groups;
}
