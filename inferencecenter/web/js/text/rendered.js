// @ts-check
/** What was read as nodes. */

import { Marked, Parser } from "../../vendor/marked.js";
import { dress } from "./blocks.js";
import { mayLink, sanitized, withBareTags } from "./sanitizer.js";

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
/** What the lexer has to know. */
export const options = /** @type {any} */ (new Marked({ gfm: true, renderer }).defaults);
const parser = new Parser(options);

/**
 * Returns the nodes of blocks.
 *
 * @param {any[]} tokens
 */
export function rendered(tokens) {
  const fragment = sanitized(parser.parse(tokens));
  dress(fragment);
  return fragment;
}

/**
 * Returns the nodes of what is within a paragraph.
 *
 * @param {any[]} tokens
 */
export function renderedInline(tokens) {
  return sanitized(parser.parseInline(tokens));
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"']/g, (letter) => `&#${letter.charCodeAt(0)};`);
}
