// @ts-check
/** Formats numbers for display. Pure. */

import { number } from "../i18n.js";

/** Placeholder for an unknown value. */
export const NOTHING = "–";

const KIB = 1024;
const SECOND_MS = 1000;
const MINUTE_S = 60;
const HOUR_S = 3600;
const DAY_S = 86_400;

/**
 * Returns a count with thousands separators.
 *
 * @param {number | null | undefined} value
 */
export function count(value) {
  return value === null || value === undefined ? NOTHING : number(Math.round(value));
}

/**
 * Returns a number with significant decimals only: 0.42, 4.2, 42.
 *
 * @param {number | null | undefined} value
 */
export function short(value) {
  if (value === null || value === undefined) return NOTHING;
  const size = Math.abs(value);
  if (size >= 100 || Number.isInteger(value)) return count(value);
  return number(value, size >= 10 ? 1 : 2);
}

/**
 * Returns a large count with its magnitude: 950, 1.2 M, 7.6 B.
 *
 * @param {number | null | undefined} value
 */
export function magnitude(value) {
  if (value === null || value === undefined) return NOTHING;
  for (const [step, name] of /** @type {[number, string][]} */ ([[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "k"]])) {
    if (value >= step) return `${short(value / (step === 1e4 ? 1e3 : step))} ${name}`;
  }
  return count(value);
}

/**
 * Returns a duration: 85 ms, 1.4 s, 3 min, 2 h 10 min.
 *
 * @param {number | null | undefined} ms
 */
export function duration(ms) {
  if (ms === null || ms === undefined) return NOTHING;
  if (ms < SECOND_MS) return `${Math.round(ms)} ms`;
  const s = ms / SECOND_MS;
  if (s < MINUTE_S) return `${number(s, s < 10 ? 1 : 0)} s`;
  if (s < HOUR_S) return `${Math.round(s / MINUTE_S)} min`;
  const [whole, rest] = s < DAY_S ? [HOUR_S, MINUTE_S] : [DAY_S, HOUR_S];
  const [wholeName, restName] = s < DAY_S ? ["h", "min"] : ["d", "h"];
  return `${Math.floor(s / whole)} ${wholeName} ${Math.floor((s % whole) / rest)} ${restName}`;
}

/**
 * Returns an amount of memory.
 *
 * @param {number | null | undefined} mib
 */
export function memory(mib) {
  if (mib === null || mib === undefined) return NOTHING;
  if (mib > 0 && mib < 1) return `${Math.round(mib * KIB)} KiB`;
  return mib < KIB ? `${short(mib)} MiB` : `${short(mib / KIB)} GiB`;
}

/**
 * Returns an amount of memory that is given in bytes.
 *
 * @param {number | null | undefined} value
 */
export function bytes(value) {
  return memory(value === null || value === undefined ? null : value / KIB / KIB);
}

/**
 * Returns a temperature.
 *
 * @param {number | null | undefined} celsius
 */
export function degrees(celsius) {
  return celsius === null || celsius === undefined ? NOTHING : `${number(celsius, 0)} °C`;
}

/**
 * Returns a fraction as a percentage.
 *
 * @param {number} fraction  From 0 to 1.
 */
export function percent(fraction) {
  return `${number(fraction * 100, 0)} %`;
}
