// @ts-check
/** A block of an answer, which is only added to where that will do. */

import { CodeBlock } from "./blocks.js";
import { rendered, renderedInline } from "./rendered.js";

/** A block that still grows. */
export class Block {
  /** @param {HTMLElement} place */
  constructor(place) {
    this.element = document.createElement("div");
    this.element.className = "block";
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
    /** Whether something here will not be shown again. */
    this.kept = false;
  }

  /** Leaves what is shown as it is; all else is added behind it. */
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
  *showing({ token, inline, continues }) {
    const form = formOf(token);
    const again = this._form === form;
    this._form = form;
    if (token.type === "code") {
      yield* this._showCode(token, continues || again);
    } else if (!rowsOf(token).length || !this._showRows(token, inline, continues, again)) {
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
   * Shows the items of a list or the rows of a table that are not shown yet, each by itself: tags in one of them that
   * are not closed go no further. Returns whether it could.
   *
   * @param {any} token
   * @param {(token: any) => void} inline
   * @param {boolean} continues
   * @param {boolean} again  Whether those that did not change may stay.
   */
  _showRows(token, inline, continues, again) {
    const rows = rowsOf(token);
    const keys = rows.map(keyOf);
    if (!again || keys.length < this._rows.length) {
      this._rows = [];
      if (continues) {
        this._trim();
      } else {
        inline([token.header ?? [], rows[0]]);
        this.element.replaceChildren(rendered([withRows(token, rows.slice(0, 1))]));
        this._rows = keys.slice(0, 1);
      }
    }
    const within = this._within();
    const changed = keys.flatMap((key, index) => (key === this._rows[index] ? [] : [index]));
    inline(changed.map((index) => rows[index]));
    const made = apart(changed.map((index) => rows[index])).flatMap((some) => [
      ...(containerIn(rendered([withRows(token, some)]))?.children ?? []),
    ]);
    const there = within.children.length - this._keptRows;
    if (made.length !== changed.length || there !== this._rows.length) return false;
    for (const [place, index] of changed.entries()) {
      if (index < there) within.children[this._keptRows + index].replaceWith(made[place]);
      else within.append(made[place]);
    }
    this._rows = keys;
    return true;
  }

  /** @param {any} token  More of what there is. */
  _showMore(token) {
    this._trim();
    const isText = token.type === "paragraph" || token.type === "heading";
    const made = isText ? renderedInline(token.tokens) : rendered([token]);
    this._within().append(...(isText ? made : (containerIn(made) ?? made)).childNodes);
  }

  /** Takes away what is not kept. */
  _trim() {
    const within = this._within();
    while (within.lastChild && within.lastChild !== this._lastKept) within.lastChild.remove();
  }

  /** Where things are added. */
  _within() {
    return containerIn(this.element) ?? this.element;
  }
}

/**
 * Returns what holds the parts of a block that is one element: a paragraph, a list, a quote, or the body of a table.
 *
 * @param {ParentNode} parent
 */
function containerIn(parent) {
  if (parent.childElementCount !== 1) return null;
  const only = /** @type {Element} */ (parent.firstElementChild);
  return only.matches(".table-frame") ? only.querySelector("tbody") : only;
}

/**
 * Returns what has to stay the same for a block to be only added to.
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
 * Returns rows in groups that may be rendered together: those with tags are by themselves.
 *
 * @param {any[]} rows
 * @returns {any[][]}
 */
function apart(rows) {
  /** @type {any[][]} */
  const groups = [];
  let plain = false;
  for (const row of rows) {
    const isPlain = !keyOf(row).includes("<");
    if (plain && isPlain) groups.at(-1)?.push(row);
    else groups.push([row]);
    plain = isPlain;
  }
  return groups;
}

/**
 * Returns what tells whether an item of a list or a row of a table is as it was.
 *
 * @param {any} row
 */
function keyOf(row) {
  return row.raw ?? JSON.stringify(row.map((/** @type {any} */ cell) => cell.text));
}
