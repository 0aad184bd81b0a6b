// @ts-check
/** Named sampling presets. Pure. */

import { loadTexts, t } from "../i18n.js";

await loadTexts("settings");

/** @typedef {Record<string, unknown>} Params */

/** @type {readonly {name: string, about: string, params: Readonly<Params>}[]} */
export const PRESETS = [
  { name: t("params.precise"), about: t("params.precise_about"), params: { temperature: 0.2, top_p: 0.9, top_k: 20 } },
  { name: t("params.balanced"), about: t("params.balanced_about"), params: {} },
  {
    name: t("params.creative"),
    about: t("params.creative_about"),
    params: { temperature: 1.2, top_p: 1, top_k: 0, min_p: 0.08 },
  },
];

const TOUCHED = new Set(PRESETS.flatMap(({ params }) => Object.keys(params)));

/**
 * Returns parameters with those of a preset applied; others are kept.
 *
 * @param {Params} params
 * @param {Readonly<Params>} preset
 * @returns {Params}
 */
export function withPreset(params, preset) {
  const others = Object.entries(params).filter(([name]) => !TOUCHED.has(name));
  return { ...Object.fromEntries(others), ...preset };
}

/**
 * Returns whether the parameters equal a preset in those that presets set.
 *
 * @param {Params} params
 * @param {Readonly<Params>} preset
 */
export function isPreset(params, preset) {
  return [...TOUCHED].every((name) => params[name] === preset[name]);
}
