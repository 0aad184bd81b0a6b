// @ts-check
/** Renders parsed Markdown to nodes. */

import { Marked, Parser } from "../../vendor/marked.js";
import { dress } from "./blocks.js";
import { drawFormulas, formulaExtensions } from "./math.js";
import { mayLink, sanitized, withBareTags } from "./sanitizer.js";

/**
 * Overrides of the renderer: no images, links to other sites only, and no h1 or h2, which belong to the page. `false`
 * means the default.
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
/** Options of the lexer. */
export const options = /** @type {any} */ (new Marked({ gfm: true, renderer, extensions: formulaExtensions }).defaults);
const parser = new Parser(options);

/**
 * Renders blocks.
 *
 * @param {any[]} tokens
 */
export function rendered(tokens) {
  const fragment = sanitized(parser.parse(tokens));
  dress(fragment);
  drawFormulas(fragment);
  return fragment;
}

/**
 * Renders inline content.
 *
 * @param {any[]} tokens
 */
export function renderedInline(tokens) {
  const fragment = sanitized(parser.parseInline(tokens));
  drawFormulas(fragment);
  return fragment;
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}
