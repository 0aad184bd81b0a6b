// @ts-check
/** Display names of parameters. Pure. */

/** Of those whose own name is abbreviated. */
const LABELS = new Map([
  ["dynatemp_range", "Dynamic temperature"],
  ["dynatemp_exponent", "Dynamic temperature exponent"],
  ["max_time_ms", "Time limit (ms)"],
  ["ignore_eos", "Ignore end of text"],
  ["n_keep", "Messages kept in a full context"],
  ["n_probs", "Probabilities per token"],
]);

/**
 * Returns a parameter's display name.
 *
 * @param {{name: string}} parameter
 */
export function labelOf({ name }) {
  const text = LABELS.get(name) ?? name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
