// @ts-check
/** Parameters as text: formatting, parsing and validation. Pure. */

import { labelOf } from "../choices.js";
import { loadTexts, t } from "../i18n.js";

await loadTexts("settings");

/** @typedef {import("../wire/params.js").ParamSpec} Parameter */
/** @typedef {{value?: unknown, fault?: string}} Reading  Neither: the default. */

/** Placeholder of a field without a value or default. */
const WITHOUT = new Map([
  ["seed", t("params.random")],
  ["max_tokens", t("params.no_limit")],
  ["max_time_ms", t("params.no_limit")],
]);
/** Maximum range for a slider. */
const SLIDER_SPAN = 20;
const FINE_SPAN = 2;
const MAX_BIAS = 100;

/**
 * Returns the steps of a parameter's slider, or null for none.
 *
 * @param {Parameter} parameter
 * @returns {{min: number, max: number, step: number} | null}
 */
export function sliderOf({ kind, minimum, maximum }) {
  if (minimum === null || maximum === null || maximum - minimum > SLIDER_SPAN) return null;
  const fine = maximum - minimum <= FINE_SPAN ? 0.01 : 0.05;
  return { min: minimum, max: maximum, step: kind === "integer" ? 1 : fine };
}

/**
 * Returns a value as text for its field.
 *
 * @param {Parameter} parameter
 * @param {unknown} value
 * @returns {string}
 */
export function textOf(parameter, value) {
  if (value === undefined || value === null) return "";
  if (parameter.kind === "texts") return asList(value).map((line) => escaped(parameter, line)).join("\n");
  if (parameter.kind === "biases") {
    return Object.entries(value).map(([token, bias]) => `${token}: ${bias}`).join("\n");
  }
  return String(value);
}

/**
 * Returns the default as text.
 *
 * @param {Parameter} parameter
 * @param {unknown} value
 * @returns {string}
 */
export function defaultText(parameter, value) {
  if (value === null || value === undefined) return WITHOUT.get(parameter.name) ?? t("params.none");
  if (typeof value === "boolean") return t(value ? "params.on" : "params.off");
  if (typeof value === "object" && !Object.keys(value).length) return t("params.none");
  return textOf(parameter, value).replaceAll("\n", "  ");
}

/**
 * Parses the text in a field.
 *
 * @param {Parameter} parameter
 * @param {string} text
 * @returns {Reading}
 */
export function readingOf(parameter, text) {
  if (parameter.kind === "texts") return lines(parameter, text);
  if (!text.trim()) return {};
  return parameter.kind === "biases" ? pairs(parameter, text) : number(parameter, text.trim());
}

/**
 * Returns whether a search matches a parameter.
 *
 * @param {Parameter} parameter
 * @param {string} search
 */
export function isFound(parameter, search) {
  const { name, aliases, description } = parameter;
  const hay = [name, name.replaceAll("_", " "), labelOf(parameter), ...aliases, description].join("\n").toLowerCase();
  return search.toLowerCase().split(/\s+/).every((word) => hay.includes(word));
}

/**
 * Returns whether an error of the daemon is about a parameter.
 *
 * @param {Parameter} parameter
 * @param {string | undefined} field  As the error names it, like `params.top_k`.
 */
export function isMeant({ name, aliases }, field) {
  const [root, given] = (field ?? "").split(".");
  return root === "params" && (given === name || aliases.includes(given));
}

/**
 * @param {Parameter} parameter
 * @param {string} text
 * @returns {Reading}
 */
function number(parameter, text) {
  const value = /^[-+]?(\d+([.,]\d*)?|[.,]\d+)(e[-+]?\d+)?$/i.test(text) ? Number(text.replace(",", ".")) : NaN;
  const { kind, minimum, maximum } = parameter;
  const inside = value >= (minimum ?? -Infinity) && value <= (maximum ?? Infinity) && !isBetween(parameter, value);
  return inside && (kind === "number" || Number.isInteger(value)) ? { value } : refused(parameter);
}

/**
 * Returns whether a value lies between a range and the special value outside it, such as 0 for "from 1 to 9, or -1".
 *
 * @param {Parameter} parameter
 * @param {number} value
 */
function isBetween({ allowed }, value) {
  const low = / from (-?\d+) to /.exec(allowed);
  const apart = /^(-?\d+) or |, or (-?\d+) /.exec(allowed);
  return low !== null && apart !== null && value < Number(low[1]) && value !== Number(apart[1] ?? apart[2]);
}

/**
 * @param {Parameter} parameter
 * @param {string} text
 * @returns {Reading}
 */
function lines(parameter, text) {
  const all = text.split("\n").filter((line) => line !== "").map((line) => meant(parameter, line));
  if (!all.length) return {};
  const [most, longest] = limitsOf(parameter);
  const fits = all.length <= most && all.every((line) => sizeOf(parameter, line) <= longest);
  return fits ? { value: all } : refused(parameter);
}

/**
 * @param {Parameter} parameter
 * @param {string} text
 * @returns {Reading}
 */
function pairs(parameter, text) {
  /** @type {Record<string, number | false>} */
  const value = {};
  for (const line of text.split("\n").filter((each) => each.trim())) {
    const match = /^\s*(\d{1,10})\s*[:=]\s*(false|[-+]?\d+(?:\.\d+)?)\s*$/.exec(line);
    const bias = match && (match[2] === "false" ? false : Number(match[2]));
    if (!match || bias === null || Math.abs(Number(bias)) > MAX_BIAS || match[1] in value) {
      return { fault: t("params.bad_bias", { line: line.trim() }) };
    }
    value[match[1]] = bias;
  }
  return Object.keys(value).length <= limitsOf(parameter)[0] ? { value } : refused(parameter);
}

/**
 * Returns the maximum number and length of entries; other limits are left to the daemon.
 *
 * @param {Parameter} parameter
 * @returns {[number, number]}
 */
function limitsOf({ allowed }) {
  const [most = Infinity, longest = Infinity] = [...allowed.matchAll(/at most (\d+)/g)].map(([, n]) => Number(n));
  return [most, longest];
}

/**
 * @param {Parameter} parameter
 * @param {string} text
 */
function sizeOf({ allowed }, text) {
  return allowed.endsWith("bytes") ? new TextEncoder().encode(text).length : [...text].length;
}

/** @param {Parameter} parameter */
function refused(parameter) {
  return { fault: t("params.must_be", { allowed: parameter.allowed }) };
}

/** @param {unknown} value */
function asList(value) {
  return Array.isArray(value) ? value.map(String) : [String(value)];
}

/**
 * Returns a line with escapes; patterns have escapes of their own and are unchanged.
 *
 * @param {Parameter} parameter
 * @param {string} text
 */
function escaped({ name }, text) {
  if (name === "stop_regex") return text;
  return text.replaceAll("\\", "\\\\").replaceAll("\n", "\\n").replaceAll("\t", "\\t");
}

/**
 * Undoes `escaped`.
 *
 * @param {Parameter} parameter
 * @param {string} line
 */
function meant({ name }, line) {
  if (name === "stop_regex") return line;
  return line.replace(/\\([\\nt])/g, (_all, char) => ({ n: "\n", t: "\t" })[/** @type {"n" | "t"} */ (char)] ?? char);
}
