// @ts-check
/**
 * Renders Markdown to nodes incrementally.
 *
 * Blocks that can no longer change are rendered once; only the last one is rendered again, or its part after the last
 * cut. Of lists and tables only the changed items and rows are rendered, and code is appended to.
 */

import { Marked, Parser } from "../../vendor/marked.js";
import { CodeBlock, dress } from "./blocks.js";
import { drawFormulas, formulaExtensions } from "./math.js";
import { checkboxText, headingLevel, isPlain, nodesOf } from "./nodes.js";
import { definedIn, Reader } from "./reader.js";
import { mayLink, sanitized, withBareTags } from "./sanitizer.js";
import { begin, beginFirst, beginIdle, beginLater, cancel } from "./slices.js";

const LONG = 2000;
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m;

/** A text that is about to scroll into view is rendered before those that wait for idle times. */
const AHEAD = "1000px";
/** @type {WeakMap<Element, () => void>}  What to do when an element comes near the view. */
const onNear = new WeakMap();
const near = new IntersectionObserver(
  (entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) onNear.get(target)?.();
  },
  { rootMargin: AHEAD, scrollMargin: AHEAD },
);

/** A text in an element, whose `aria-busy` is set while more of it is to be shown. */
export class MarkdownView {
  /** @param {HTMLElement} root  An empty element, owned by this object. */
  constructor(root) {
    this._root = root;
    this._place = root;
    this._shown = "";
    this._reader = new Reader(options);
    /** @type {Block[]} */
    this._open = [];
    this._wanted = { text: "", done: false };
    /** @type {Generator<void> | null} */
    this._work = null;
  }

  /**
   * Shows a text, at once or over the next frames; one that extends the previous text is appended.
   *
   * @param {string} text
   * @param {{done: boolean, eager: boolean}} options  Whether the text is complete, and whether it is rendered at once.
   *   One that waits until it is near the view, or the browser idle, is shown as it is: it can be found, selected and read out.
   */
  update(text, { done, eager }) {
    this._wanted = { text: text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text, done };
    if (this._work) return;
    this._work = this._working();
    const isNew = !this._root.hasChildNodes();
    if (isNew && !eager) {
      this._postpone(this._work);
      return;
    }
    if (isNew && done) {
      beginFirst(this._work); // the last answer of a conversation that is opened
      return;
    }
    // A long or final text usually coincides with a change of view, so rendering starts in the next frame.
    const isMuch = text.length - (done ? 0 : this._shown.length) > LONG;
    (isMuch ? beginLater : begin)(this._work);
  }

  /** Stops all updates. */
  end() {
    near.unobserve(this._root);
    if (this._work) cancel(this._work);
  }

  /** @param {Generator<void>} work */
  _postpone(work) {
    this._root.textContent = this._wanted.text;
    this._root.dataset.raw = "";
    this._place = document.createElement("div");
    onNear.set(this._root, () => {
      near.unobserve(this._root);
      cancel(work);
      beginLater(work);
    });
    near.observe(this._root);
    beginIdle(work);
  }

  /** @returns {Generator<void>} */
  *_working() {
    near.unobserve(this._root);
    this._root.ariaBusy = "true";
    for (let shown = null; shown !== this._wanted; ) {
      shown = this._wanted;
      yield* this.showing(shown.text, shown.done);
    }
    this._root.removeAttribute("aria-busy");
    this._work = null;
  }

  /**
   * Shows a text, a part per step.
   *
   * @param {string} text  With line feeds only.
   * @param {boolean} done
   * @returns {Generator<void>}
   */
  *showing(text, done) {
    // Link definitions at the end may be used at the start.
    const links = done && DEFINITION.test(text) ? yield* definedIn(options, text) : {};
    if (Object.keys(links).length > 0 || !text.startsWith(this._shown)) this._restart(links);
    this._shown = text;
    let open = 0;
    for (const piece of this._reader.read(text, done)) {
      if (piece && !piece.settled) yield* this._blockAt(open++, piece).showing(piece);
      else if (piece) yield* this._settle(piece);
      yield;
    }
    for (const block of this._open.splice(open)) block.element.remove();
    if (this._place === this._root) return;
    this._root.replaceChildren(...this._place.childNodes);
    delete this._root.dataset.raw;
    this._place = this._root;
    drawFormulas(this._root); // they are drawn in the page only
  }

  /**
   * @param {import("./reader.js").Piece} piece
   * @returns {Generator<void>}
   */
  *_settle(piece) {
    const block = this._blockAt(0, piece);
    yield* block.showing(piece);
    if (piece.cut) block.keep();
    else this._open.shift();
  }

  /**
   * @param {number} index
   * @param {import("./reader.js").Piece} piece
   */
  _blockAt(index, { continues }) {
    if (!continues && this._open[index]?.kept) this._open.splice(index, 1);
    this._open[index] ??= new Block(this._place);
    return this._open[index];
  }

  /**
   * The old content is kept until its replacement is complete.
   *
   * @param {Record<string, any>} links
   */
  _restart(links) {
    if (this._root.hasChildNodes()) this._place = document.createElement("div");
    this._reader = new Reader(options, links);
    this._open = [];
  }
}

/** Samples of all block types, rendered in advance to compile the code before the first answer. */
const SAMPLES = [
  "a\nb", "- a\n- b", "# a", "`a` **b** _c_ ~~d~~ <b>", "> a", "| a |\n| - |\n| b |", "```\na\n```",
  "[Go](https://example.org) **on** and `on`, ".repeat(80),
];

/** @returns {Generator<void>} */
function* warming() {
  for (const text of SAMPLES) yield* new MarkdownView(document.createElement("div")).showing(text, true);
}

addEventListener("load", () => beginLater(warming()), { once: true });

/** Items or rows rendered per step. */
const GROUP = 8;

/** A block that may still grow. */
class Block {
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

/**
 * Overrides of the renderer, for Markdown with HTML or entities: no images, links to other sites only, and no h1 or h2,
 * which belong to the page. `false` means the default.
 *
 * @type {import("../../vendor/marked.js").RendererObject}
 */
const renderer = {
  heading({ tokens, depth }) {
    const level = headingLevel(depth);
    return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
  },
  html({ text }) {
    return withBareTags(text);
  },
  image({ href, text }) {
    const words = escaped(text || href);
    return mayLink(href) ? `<a href="${escaped(href)}">${words}</a>` : words;
  },
  link({ href, tokens }) {
    return mayLink(href) ? false : this.parser.parseInline(tokens);
  },
  checkbox: checkboxText,
};
/** Options of the lexer. */
const options = /** @type {any} */ (new Marked({ gfm: true, renderer, extensions: formulaExtensions }).defaults);
const parser = new Parser(options);

/**
 * Renders blocks.
 *
 * @param {any[]} tokens
 */
function rendered(tokens) {
  const fragment = tokens.every(isPlain) ? nodesOf(tokens) : sanitized(parser.parse(tokens));
  dress(fragment);
  drawFormulas(fragment);
  return fragment;
}

/**
 * Renders inline content.
 *
 * @param {any[]} tokens
 */
function renderedInline(tokens) {
  const fragment = tokens.every(isPlain) ? nodesOf(tokens) : sanitized(parser.parseInline(tokens));
  drawFormulas(fragment);
  return fragment;
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}
