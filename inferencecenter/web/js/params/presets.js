// @ts-check
/** Ways to sample with a name. Pure. */

/** @typedef {Record<string, unknown>} Params */

/** @type {readonly {name: string, about: string, params: Readonly<Params>}[]} */
export const PRESETS = [
  { name: "Precise", about: "Stays with what is likely", params: { temperature: 0.2, top_p: 0.9, top_k: 20 } },
  { name: "Balanced", about: "As the model and the server recommend", params: {} },
  {
    name: "Creative",
    about: "Lets the unlikely in, but not the absurd",
    params: { temperature: 1.2, top_p: 1, top_k: 0, min_p: 0.08 },
  },
];

const TOUCHED = new Set(PRESETS.flatMap(({ params }) => Object.keys(params)));

/**
 * Returns parameters with a preset in place of what presets are about; the others stay.
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
 * Tells whether parameters are those of a preset, in what presets are about.
 *
 * @param {Params} params
 * @param {Readonly<Params>} preset
 */
export function isPreset(params, preset) {
  return [...TOUCHED].every((name) => params[name] === preset[name]);
}
