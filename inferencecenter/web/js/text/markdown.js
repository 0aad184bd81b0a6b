// @ts-check
/**
 * Markdown as nodes, also while it is being written.
 *
 * Blocks that can no longer change are rendered once and left alone; only the last one is rendered again. Where that is
 * a list, only its last item, and where it is code, only its text grows.
 */

import { Lexer, Marked, Parser } from "../../vendor/marked.js";
import { codeBlock, dress, growCode } from "./blocks.js";
import { mayLink, sanitized, withBareTags } from "./sanitizer.js";

/** After a change that took long, no other is made for so many times as long. */
const REST_FACTOR = 3;
const REST_FROM_MS = 4;
const DEFINITION = /^ {0,3}\[[^\]]+\]:/m;
/** No text begins with it. */
const UNSETTLED = "\r";

/**
 * Shows no images, leads nowhere but to other sites, and leaves the page its first headings. What is `false` is rendered
 * as usual.
 *
 * @type {import("../../vendor/marked.js").RendererObject}
 */
const renderer = {
  heading({ tokens, depth }) {
    const level = Math.min(6, depth + 1);
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
  checkbox({ checked }) {
    return checked ? "☑ " : "☐ ";
  },
};
const options = new Marked({ gfm: true, renderer }).defaults;
const parser = new Parser(/** @type {any} */ (options));

/** One text in one element. */
export class MarkdownView {
  /** @param {HTMLElement} root  An empty element, which is only changed here from now on. */
  constructor(root) {
    this._root = root;
    this._text = "";
    this._settled = 0;
    /** @type {Record<string, any>} */
    this._links = {};
    /** @type {OpenBlock | null} */
    this._open = null;
    this._busyUntil = 0;
    this._timer = 0;
  }

  /**
   * Shows a text; one that begins as the one before is only added to.
   *
   * @param {string} text
   * @param {{done: boolean}} options  Whether nothing will be added.
   */
  update(text, { done }) {
    clearTimeout(this._timer);
    const now = performance.now();
    if (!done && now < this._busyUntil) {
      this._timer = setTimeout(() => this.update(text, { done }), this._busyUntil - now);
      return;
    }
    this._show(text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text, done);
    const took = performance.now() - now;
    this._busyUntil = took > REST_FROM_MS ? now + took * (1 + REST_FACTOR) : 0;
  }

  /** Makes no change any more. */
  end() {
    clearTimeout(this._timer);
  }

  /**
   * @param {string} text
   * @param {boolean} done
   */
  _show(text, done) {
    // What is defined at the end may be meant at the beginning.
    const defines = done && DEFINITION.test(text);
    if (defines || !text.startsWith(this._text)) this._restart();
    this._text = text;
    let tokens = this._lex(text.slice(this._settled));
    const adds = lengthOf(tokens) === text.length - this._settled;
    if (!adds) {
      // Where a block begins in the text cannot be told: everything is rendered again, each time.
      this._restart();
      tokens = this._lex(text);
    }
    const last = done ? tokens.length : Math.max(0, tokens.findLastIndex((token) => token.type !== "space"));
    for (const [index, token] of tokens.entries()) {
      if (token.type === "def" && index < last) this._links[token.tag] ??= { href: token.href, title: token.title };
      if (token.type === "space" || token.type === "def") continue;
      this._open ??= new OpenBlock(this._root);
      this._open.show(token, index >= last);
      if (index < last) this._open = null;
    }
    if (adds) this._settled += lengthOf(tokens.slice(0, last));
    else this._text = UNSETTLED;
  }

  /**
   * @param {string} text
   * @returns {any[]}
   */
  _lex(text) {
    const lexer = new Lexer(/** @type {any} */ (options));
    Object.assign(lexer.tokens.links, this._links);
    return lexer.lex(text);
  }

  _restart() {
    this._root.replaceChildren();
    this._settled = 0;
    this._links = {};
    this._open = null;
  }
}

/** The block that still grows. */
class OpenBlock {
  /** @param {HTMLElement} root */
  constructor(root) {
    this._element = document.createElement("div");
    this._element.className = "block";
    root.append(this._element);
    this._type = "";
    /** @type {string[]} */
    this._items = [];
    this._form = "";
  }

  /**
   * @param {any} token
   * @param {boolean} open  Whether it may still grow.
   */
  show(token, open) {
    const type = this._type;
    this._type = token.type;
    if (token.type === "code") this._showCode(token, type === "code", open);
    else if (token.type === "list") this._showList(token);
    else this._element.replaceChildren(rendered([token]));
  }

  /**
   * @param {any} token
   * @param {boolean} again
   * @param {boolean} open
   */
  _showCode(token, again, open) {
    const block = /** @type {HTMLElement | null} */ (again ? this._element.firstElementChild : null);
    const named = (token.lang ?? "").trim().split(/\s+/)[0];
    if (block && block.dataset.language === named && open) growCode(block, token.text);
    else this._element.replaceChildren(codeBlock(token.text, token.lang ?? "", { open }));
  }

  /** @param {any} token */
  _showList(token) {
    const form = `${token.ordered} ${token.start} ${token.loose}`;
    const list = this._form === form ? this._element.firstElementChild : null;
    const raws = token.items.map((/** @type {any} */ item) => item.raw);
    if (!list || raws.length < this._items.length) {
      this._element.replaceChildren(rendered([token]));
    } else {
      for (const [index, item] of token.items.entries()) {
        if (raws[index] === this._items[index]) continue;
        const made = rendered([{ ...token, items: [item] }]).querySelector("li");
        const old = list.children[index];
        if (made && old) old.replaceWith(made);
        else if (made) list.append(made);
      }
    }
    this._form = form;
    this._items = raws;
  }
}

/** @param {any[]} tokens */
function lengthOf(tokens) {
  return tokens.reduce((n, token) => n + token.raw.length, 0);
}

/** @param {any[]} tokens */
function rendered(tokens) {
  const fragment = sanitized(parser.parse(tokens));
  dress(fragment);
  return fragment;
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}
