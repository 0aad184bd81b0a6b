// @ts-check
/**
 * Renders Markdown to nodes incrementally.
 *
 * Blocks that can no longer change are rendered once; only the last one is rendered again, or its part after the last
 * cut. Of lists and tables only the changed items and rows are rendered, and code is appended to.
 */

import { Block } from "./growing.js";
import { Reader, definedIn } from "./reader.js";
import { options } from "./rendered.js";
import { begin, beginLater, cancel } from "./slices.js";

const LONG = 2000;
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m;

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
   * @param {{done: boolean}} options  Whether the text is complete.
   */
  update(text, { done }) {
    this._wanted = { text: text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text, done };
    if (this._work) return;
    this._work = this._working();
    this._root.ariaBusy = "true";
    // A long or final text usually coincides with a change of view, so rendering starts in the next frame.
    const isMuch = text.length - (done ? 0 : this._shown.length) > LONG;
    (isMuch ? beginLater : begin)(this._work);
  }

  /** Stops all updates. */
  end() {
    if (this._work) cancel(this._work);
  }

  /** @returns {Generator<void>} */
  *_working() {
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
    if (this._place !== this._root) this._root.replaceChildren(...this._place.childNodes);
    this._place = this._root;
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
