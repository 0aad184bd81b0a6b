// @ts-check
/** Formats the readings of `status`. Pure. */

import { NOTHING, bytes, count, duration, magnitude, percent, short } from "./format.js";

/** @typedef {{name: string, label: string, text: string}} Fact */
/** @typedef {(value: any, values: Record<string, any>) => string} Show */

/** @type {Show} */
const words = (value) => String(value).replaceAll("_", " ");
/** @type {Show} */
const tokens = (value) => `${count(value)} tokens`;

/** @type {Readonly<Record<string, [string, Show]>>} */
const KNOWN = {
  name: ["Model", String],
  architecture: ["Architecture", String],
  parameters: ["Parameters", magnitude],
  model_bytes: ["Weights", bytes],
  n_ctx: ["Context per session", tokens],
  n_ctx_train: ["Training context", tokens],
  n_vocab: ["Vocabulary", tokens],
  gpu_layers: [
    "Layers on the GPU",
    (value, { layers }) => (layers ? `${count(value)} of ${count(layers)}` : count(value)),
  ],
  backend: ["Backend", String],
  threads: ["CPU threads", count],
  lora: ["LoRA", String],
  library: ["Library", String],
  load_fraction: ["Loaded", percent],
  running: ["Turns running", count],
  waiting: ["Turns waiting", count],
  unfinished: ["Your unfinished turns", count],
  slots: ["Slots", count],
  pressure: ["Pressure", words],
  memory_used_bytes: [
    "Main memory in use",
    (value, { memory_limit_bytes: limit }) => (limit ? `${bytes(value)} of ${bytes(limit)}` : bytes(value)),
  ],
  engine_rss_bytes: ["Engine process", bytes],
  parked_sessions: ["Parked sessions", count],
  parked_bytes: ["Parked KV", bytes],
  parked_ram_bytes: ["Parked KV cache in memory", bytes],
  tokens: ["Tokens in your sessions", count],
  messages: ["Messages in your sessions", count],
  last_tps: ["Last turn", (value) => `${short(value)} tokens/s`],
  last_ttft_ms: ["Time to first token", duration],
  tokens_per_s: ["Now", (value) => `${short(value)} tokens/s`],
  total_tokens_generated: ["Generated since the start", tokens],
  restarts: ["Engine restarts", count],
  sessions: ["Sessions", count],
  max_sessions: ["Maximum sessions", count],
  busy: ["Sessions generating", count],
  connections: ["Connections", count],
  storage: ["Storage", words],
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
      const [label, show] = KNOWN[name] ?? [unknownLabel(name), words];
      return { name, label, text: show(value, values ?? {}) || NOTHING };
    });
}

/** @param {string} name */
function unknownLabel(name) {
  const text = name.replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** @typedef {"good" | "busy" | "bad" | "calm"} Mood */

/** @type {Readonly<Record<string, [string, Mood]>>} */
const STATES = {
  ready: ["Ready", "good"],
  starting: ["Loading the model", "busy"],
  backoff: ["Restarting", "busy"],
  draining: ["Finishing running turns", "busy"],
  suspending: ["Going to sleep", "calm"],
  asleep: ["Asleep until the next message", "calm"],
  stopped: ["Stopped", "bad"],
  failed: ["Failed", "bad"],
};

/**
 * Returns an engine's state as text, and its mood.
 *
 * @param {string | null | undefined} state  As reported by `metrics`.
 * @returns {[string, Mood]}
 */
export function stateInWords(state) {
  return STATES[state ?? ""] ?? [state ?? "Unknown", "calm"];
}
