// @ts-check
/** The only conversion from HTML text to nodes, and which links are allowed. Output of models is untrusted. */

import DOMPurify from "../../vendor/dompurify.js";

const TAGS = [
  "a", "b", "blockquote", "br", "code", "del", "details", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "ins",
  "kbd", "li", "mark", "ol", "p", "pre", "s", "span", "strong", "sub", "summary", "sup", "table", "tbody", "td", "th",
  "thead", "tr", "u", "ul",
];
const HARMLESS = ["align", "class", "colspan", "dir", "lang", "open", "rowspan", "start", "title"];
const CLASSES = /^(math|language-[\w+#.-]{1,32}|(hljs-[\w-]{1,32}( [\w-]{1,32}_{0,2})*))$/;
const LANGUAGE_CLASS = /^language-[\w+#.-]{1,32}$/;
const ADDRESSES = /^(?:https?:\/\/|mailto:)/i;
/** The start of anything but a tag without attributes. */
const NO_BARE_TAG = new RegExp(`<(?!/?(?:${TAGS.join("|")})\\s*/?>)`, "gi");

const purify = DOMPurify(window);

purify.addHook("uponSanitizeAttribute", (_node, attribute) => {
  if (attribute.attrName === "class" && !CLASSES.test(attribute.attrValue)) attribute.keepAttr = false;
});

purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A" && node.hasAttribute("href")) openInNewTab(node);
});

const CONFIG = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: [...HARMLESS, "href"],
  // All attributes but these may contain URLs.
  ADD_URI_SAFE_ATTR: HARMLESS,
  ALLOWED_URI_REGEXP: ADDRESSES,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: /** @type {const} */ (true),
};
// Once: reading a configuration with each text takes as long as sanitizing a short one.
purify.setConfig(CONFIG);

/**
 * Returns the harmless parts of an HTML text: text and formatting, no images, ids, styles or scripts, and links only to
 * other sites and to mail, which open in a new tab.
 *
 * @param {string} text
 * @returns {DocumentFragment}
 */
export function sanitized(text) {
  const found = purify.sanitize(text, CONFIG);
  if (found) return found;
  const fragment = document.createDocumentFragment(); // of a text that is a document without a body
  fragment.append(text);
  return fragment;
}

/**
 * Returns HTML with only the tags without attributes; others are escaped. Browsers report scripts and styles even when
 * they are only parsed, and dropping them could drop what the user asked for.
 *
 * @param {string} html
 */
export function withBareTags(html) {
  return html.replace(NO_BARE_TAG, "&lt;");
}

/**
 * Returns whether a link target is allowed.
 *
 * @param {string} address
 */
export function mayLink(address) {
  return ADDRESSES.test(address.trim());
}

/**
 * Returns a link to another site.
 *
 * @param {string} address  One that `mayLink` allows.
 * @param {(Node | string)[]} content
 */
export function linkTo(address, ...content) {
  const link = document.createElement("a");
  link.setAttribute("href", address);
  openInNewTab(link);
  link.append(...content);
  return link;
}

/**
 * Returns whether a class names the language of code.
 *
 * @param {string} name
 */
export function isLanguageClass(name) {
  return LANGUAGE_CLASS.test(name);
}

/** @param {Element} link */
function openInNewTab(link) {
  link.setAttribute("target", "_blank");
  link.setAttribute("rel", "noopener noreferrer");
}
