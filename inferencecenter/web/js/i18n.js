// @ts-check
/**
 * Texts of the page in the user's language; numbers and times as that language has them. Only this language is loaded, and
 * the parts of its texts that belong to views are loaded with these.
 */

import { keep, kept } from "./storage.js";

/** @typedef {typeof import("./texts/en.js").default} English */
/**
 * @typedef {object} Parts
 * @property {typeof import("./texts/en/admin.js").default} admin
 * @property {typeof import("./texts/en/board.js").default} board
 * @property {typeof import("./texts/en/files.js").default} files
 * @property {typeof import("./texts/en/models.js").default} models
 * @property {typeof import("./texts/en/settings.js").default} settings
 * @property {typeof import("./texts/en/tools.js").default} tools
 */
/** @typedef {keyof English | {[P in keyof Parts]: keyof Parts[P]}[keyof Parts]} Key */
/** @typedef {string | ({other: string} & Partial<Record<Intl.LDMLPluralRule, string>>)} Text  Or by the plural form of `n`. */
/** @typedef {Readonly<Record<keyof English, Text>>} Texts */
/**
 * @template {keyof Parts} P
 * @typedef {Readonly<Record<keyof Parts[P], Text>>} PartOf
 */
/** @typedef {Readonly<Record<string, string | number>>} Values */

const FALLBACK = "en";
/** Languages that the page has, as the daemon lists them in the front page. */
export const languages = (globalThis.document?.documentElement.dataset.languages ?? FALLBACK).split(" ");

/** The user's choice; empty for the browser's languages. */
export const chosenLanguage = kept("language", "");

/**
 * Returns the first of the wanted languages that is available, and as which variant it was wanted.
 *
 * @param {readonly string[]} wanted
 * @param {readonly string[]} available
 * @returns {[string, string]}
 */
export function languageOf(wanted, available) {
  for (const each of wanted) {
    const found = available.find((one) => one.toLowerCase() === each.toLowerCase()) ?? available.find((one) => one === each.split("-")[0]);
    if (found) return [found, each];
  }
  return [FALLBACK, FALLBACK];
}

const [language, locale] = languageOf([...(chosenLanguage ? [chosenLanguage] : []), ...(globalThis.navigator?.languages ?? [])], languages);
/** @type {{default: Texts, direction: string}} */
const { default: first, direction } = await import(`./texts/${language}.js`).catch(() => import("./texts/en.js"));
/** Those loaded so far. */
const texts = /** @type {Record<Key, Text>} */ ({ ...first });
const plurals = new Intl.PluralRules(locale);
/** @type {Map<number | undefined, Intl.NumberFormat>} */
const formats = new Map();

if (globalThis.document) {
  document.documentElement.lang = language;
  document.documentElement.dir = direction;
}

/**
 * Uses another language from the next load of the page on.
 *
 * @param {string} chosen  Empty for the browser's languages.
 */
export function keepLanguage(chosen) {
  keep("language", chosen || undefined);
}

/**
 * Loads parts of the texts. Modules outside the first load await it after their imports.
 *
 * @param {(keyof Parts)[]} parts
 */
export async function loadTexts(...parts) {
  for (const part of await Promise.all(parts.map((name) => import(`./texts/${language}/${name}.js`)))) Object.assign(texts, part.default);
}

/**
 * Returns a text with values for its placeholders; `n` also decides its plural form.
 *
 * @param {Key} key
 * @param {Values} [values]
 */
export function t(key, values = {}) {
  return partsOf(key, values).join("");
}

/**
 * Returns the parts of a text whose placeholders stand for elements.
 *
 * @param {Key} key
 * @param {Readonly<Record<string, any>>} values
 */
export function rich(key, values) {
  return partsOf(key, values);
}

/**
 * Returns the text of a value that the daemon sent, if it is a known one.
 *
 * @param {string} group  The part of the key before the dot.
 * @param {string} name
 * @returns {string | undefined}
 */
export function known(group, name) {
  const key = `${group}.${name}`;
  return Object.hasOwn(texts, key) ? t(/** @type {Key} */ (key)) : undefined;
}

/**
 * Returns a number in the form of the language.
 *
 * @param {number} value
 * @param {number} [decimals]  As many as are needed, up to three, by default.
 */
export function number(value, decimals) {
  const format = formats.get(decimals) ?? new Intl.NumberFormat(locale, { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  formats.set(decimals, format);
  return format.format(value);
}

/**
 * Returns a date or time in the form of the language.
 *
 * @param {number} ms  Since 1970.
 * @param {Intl.DateTimeFormatOptions} options
 */
export function time(ms, options) {
  return new Date(ms).toLocaleString(locale, options);
}

/**
 * @param {Key} key
 * @param {Readonly<Record<string, any>>} values
 * @returns {any[]}
 */
function partsOf(key, values) {
  const text = texts[key];
  const form = typeof text === "string" ? text : (text[plurals.select(values.n)] ?? text.other);
  return form.split(/\{(\w+)\}/).map((part, at) => (at % 2 === 0 ? part : shown(values[part])));
}

/** @param {unknown} value */
function shown(value) {
  return typeof value === "number" ? number(value) : value;
}
