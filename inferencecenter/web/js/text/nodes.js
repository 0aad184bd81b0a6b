// @ts-check
/**
 * Creates the nodes of Markdown that has neither HTML nor entities, without the detour over HTML text.
 *
 * Sanitizing was two thirds of the work of an answer. Here there is nothing to sanitize: the only elements are those named
 * below, all text is in text nodes, and links are checked. The result is that of marked's renderer, sanitized.
 */

import { isLanguageClass, linkTo, mayLink } from "./sanitizer.js";

/** An entity, which only the parser of HTML decodes, or NUL, which it drops. */
const ENTITY = /&(?:#\d{1,7}|#x[a-f\d]{1,6}|\w+);|\0/i;

/**
 * Returns whether the nodes of a token can be created here.
 *
 * @param {any} token  With its inline content parsed.
 * @returns {boolean}
 */
export function isPlain(token) {
  if (token.type === "html" || token.escaped) return false; // it is HTML, or within some
  if (token.type === "link" && (ENTITY.test(`${token.href} ${token.title ?? ""}`) || token.tokens.some(isLink))) return false;
  const parts = token.rows ? [token.header, ...token.rows] : [token.tokens ?? token.items].filter(Boolean);
  return parts.length > 0 ? parts.every((part) => part.every(isPlain)) : !ENTITY.test(token.text ?? "");
}

/**
 * @param {readonly any[]} tokens  Plain blocks.
 * @returns {DocumentFragment}
 */
export function nodesOf(tokens) {
  const fragment = document.createDocumentFragment();
  fragment.append(...tokens.flatMap(nodeOf));
  return fragment;
}

/** @param {any} token  A link within a link is divided by the parser of HTML. */
function isLink(token) {
  return token.type === "link" || token.type === "image" || (token.tokens ?? []).some(isLink);
}

/**
 * @param {any} token  A block, or a part of one.
 * @returns {(Node | string)[]}
 */
function nodeOf(token) {
  const { type, text, tokens = [] } = token;
  switch (type) {
    case "space":
    case "def":
      return [];
    case "hr":
    case "br":
      return [element(type)];
    case "heading":
      return [element(`h${headingLevel(token.depth)}`, tokens)];
    case "paragraph":
      return [element("p", tokens)];
    case "blockquote":
    case "strong":
    case "em":
    case "del":
      return [element(type, tokens)];
    case "list":
      return [listOf(token)];
    case "table":
      return [tableOf(token)];
    case "code":
      return [codeOf(token)];
    case "codespan":
      return [withText("code", text)];
    case "checkbox":
      return [checkboxText(token)];
    case "formula":
      return [elementOf("p", [token.open ? text : formulaOf(text)])];
    case "inlineFormula":
      return [formulaOf(text)];
    case "image":
      return [mayLink(token.href) ? linkTo(token.href, text || token.href) : text || token.href];
    case "link":
      return anchorOf(token);
    default:
      return token.tokens ? tokens.flatMap(nodeOf) : [text];
  }
}

/** @param {any} list */
function listOf({ ordered, start, items }) {
  const list = elementOf(ordered ? "ol" : "ul", items.map((/** @type {any} */ item) => element("li", item.tokens)));
  if (ordered && start !== 1) list.setAttribute("start", String(start));
  return list;
}

/** @param {any} table */
function tableOf({ header, rows }) {
  const rowOf = (/** @type {any[]} */ cells) => elementOf("tr", cells.map(cellOf));
  return elementOf("table", [elementOf("thead", [rowOf(header)]), ...(rows.length > 0 ? [elementOf("tbody", rows.map(rowOf))] : [])]);
}

/** @param {any} cell */
function cellOf({ header, align, tokens }) {
  const cell = element(header ? "th" : "td", tokens);
  if (align) cell.setAttribute("align", align);
  return cell;
}

/** @param {any} block */
function codeOf({ lang, text }) {
  const code = withText("code", `${text.replace(/\n$/, "")}\n`);
  const className = `language-${/^\S*/.exec(lang ?? "")?.[0]}`;
  if (isLanguageClass(className)) code.className = className;
  return elementOf("pre", [code]);
}

/** @param {any} link */
function anchorOf({ href, title, text, tokens, autolink }) {
  const content = autolink ? [text] : tokens.flatMap(nodeOf);
  const address = mayLink(href) ? encoded(href) : null;
  if (address === null) return content;
  const link = linkTo(address, ...content);
  if (title) link.title = title;
  return [link];
}

/** @param {string} address  As marked encodes it. */
function encoded(address) {
  try {
    return encodeURI(address).replace(/%25/g, "%");
  } catch {
    return null; // of an unpaired surrogate
  }
}

/** @param {string} source */
function formulaOf(source) {
  const formula = withText("span", source);
  formula.className = "math";
  return formula;
}

/** @param {number} depth  h1 and h2 belong to the page. */
export function headingLevel(depth) {
  return Math.min(6, depth + 1);
}

/** @param {{checked?: boolean}} checkbox */
export function checkboxText({ checked }) {
  return checked ? "☑ " : "☐ ";
}

/**
 * @param {string} name
 * @param {readonly any[]} tokens  Of its content.
 */
function element(name, tokens = []) {
  return elementOf(name, tokens.flatMap(nodeOf));
}

/**
 * @param {string} name
 * @param {string} text
 */
function withText(name, text) {
  return elementOf(name, [text]);
}

/**
 * @param {string} name
 * @param {readonly (Node | string)[]} content
 */
function elementOf(name, content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}
