// @ts-check
/** Formats the readings of `status`. Pure. */

import { known, t } from "../i18n.js";
import { NOTHING, bytes, count, duration, magnitude, percent, short } from "./format.js";

/** @typedef {{name: string, label: string, text: string}} Fact */
/** @typedef {(value: any, values: Record<string, any>) => string} Show */

/** @type {Show} */
const words = (value) => String(value).replaceAll("_", " ");
/** @type {Show} */
const tokens = (value) => t("unit.tokens", { count: value });
/** @type {(part: string, whole: string) => string} */
const partOf = (part, whole) => t("unit.of", { part, whole });
/** @type {Show} */
const speed = (value) => t("unit.tokens_per_s", { count: short(value) });

/** @type {Readonly<Record<string, Show>>} */
const KNOWN = {
  name: String,
  architecture: String,
  parameters: magnitude,
  model_bytes: bytes,
  n_ctx: tokens,
  n_ctx_train: tokens,
  n_vocab: tokens,
  gpu_layers: (value, { layers }) => (layers ? partOf(count(value), count(layers)) : count(value)),
  backend: String,
  threads: count,
  lora: String,
  library: String,
  load_fraction: percent,
  running: count,
  waiting: count,
  unfinished: count,
  slots: count,
  pressure: words,
  memory_used_bytes: (value, { memory_limit_bytes: limit }) => (limit ? partOf(bytes(value), bytes(limit)) : bytes(value)),
  engine_rss_bytes: bytes,
  parked_sessions: count,
  parked_bytes: bytes,
  parked_ram_bytes: bytes,
  tokens: count,
  messages: count,
  last_tps: speed,
  last_ttft_ms: duration,
  tokens_per_s: speed,
  total_tokens_generated: tokens,
  restarts: count,
  sessions: count,
  max_sessions: count,
  busy: count,
  connections: count,
  storage: words,
};
/** Included in the preceding fact, or shown elsewhere. */
const ELSEWHERE = new Set(["state", "layers", "memory_limit_bytes"]);

/**
 * Returns the displayable readings of a `status` event, in its order.
 *
 * @param {Record<string, any> | null | undefined} values
 * @returns {Fact[]}
 */
export function factsOf(values) {
  return Object.entries(values ?? {})
    .filter(([name, value]) => value !== null && !ELSEWHERE.has(name))
    .map(([name, value]) => {
      const show = KNOWN[name] ?? words;
      const label = known("fact", name) ?? unknownLabel(name);
      return { name, label, text: show(value, values ?? {}) || NOTHING };
    });
}

/** @param {string} name */
function unknownLabel(name) {
  const text = name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** @typedef {"good" | "busy" | "bad" | "calm"} Mood */

/** @type {Readonly<Record<string, Mood>>} */
const MOODS = { ready: "good", starting: "busy", backoff: "busy", draining: "busy", stopped: "bad", failed: "bad" };

/**
 * Returns an engine's state as text, and its mood.
 *
 * @param {string | null | undefined} state  As reported by `metrics`.
 * @returns {[string, Mood]}
 */
export function stateInWords(state) {
  return state ? [known("engine", state) ?? state, MOODS[state] ?? "calm"] : [t("engine.unknown"), "calm"];
}
