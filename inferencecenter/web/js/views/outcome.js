// @ts-check
/** The line below an answer: end reason and statistics, or its progress. */

import { speedOf } from "../storage.js";
import { html } from "../ui.js";

/** @type {Readonly<Record<string, string>>} */
const REASONS = {
  aborted: "Stopped",
  length: "Reached the token limit",
  context_full: "Context is full",
  time: "Reached the time limit",
  repetition: "Stopped: repetitive output",
  quota_exceeded: "Today's token quota is used up",
  tool_calls: "Called tools",
};

/**
 * @param {{ending: import("../wire/transcript.js").Ending, turnId: string | null}} props
 */
export function Outcome({ ending, turnId }) {
  const words = REASONS[ending.reason];
  return html`
    <div class="outcome">
      ${words && html`<span class="badge" data-mood="warn">${words}</span>`}
      ${measures({ ...ending, stats: ending.stats ?? speedOf(turnId) }).map(([short, long]) => html`<span key=${long} title=${long}>${short}</span>`)}
      ${ending.warnings.map((warning) => html`<span class="outcome-warning" key=${warning}>${warning}</span>`)}
    </div>
  `;
}

/**
 * Returns the statistics of a turn, each in short and in full.
 *
 * @param {{usage: import("../wire/transcript.js").Usage | null, stats: import("../storage.js").Speed | null}} ending
 * @returns {[string, string][]}
 */
export function measures({ usage, stats }) {
  /** @type {[string, string][]} */
  const found = [];
  if (usage) {
    const n = usage.completion_tokens;
    found.push([`${n} ${n === 1 ? "token" : "tokens"}`, promptWords(usage)]);
  }
  if (stats && stats.tps > 0) found.push([`${rounded(stats.tps)} tokens/s`, "Speed after the first token"]);
  if (stats && stats.ttft_ms > 0) found.push([`${seconds(stats.ttft_ms)} to first token`, "Time from the request to the first token"]);
  if (stats && stats.queue_ms >= 100) found.push([`waited ${seconds(stats.queue_ms)}`, "Time in the queue"]);
  return found;
}

/** @param {{live: import("../wire/live.js").Live, waiting: string}} props  `waiting` says why no events come, "" if they do. */
export function Progress({ live, waiting }) {
  const words = waiting || phaseWords(live);
  const part = live.phase === "reading" && live.progress?.total ? live.progress.done / live.progress.total : null;
  return html`
    <div class="progress-line">
      ${words && html`<span class="pulse" aria-hidden="true"></span><span>${words}</span>`}
      ${part !== null && html`<progress aria-label="Processing the prompt" max="1" value=${part}></progress>`}
    </div>
  `;
}

/**
 * Returns the phase as text, "" while the answer itself shows it.
 *
 * @param {import("../wire/live.js").Live} live
 */
export function phaseWords(live) {
  if (live.stopping) return "Stopping…";
  if (live.phase === "loading") return live.notice || "The model is being loaded…";
  if (live.phase === "queued" && live.position > 0) {
    const wait = live.etaMs === null ? "" : `, about ${seconds(live.etaMs)}`;
    return `In the queue: ${live.position} ahead${wait}`;
  }
  if (live.phase === "reading") return `Processing ${live.progress?.total ?? ""} tokens…`;
  if (live.phase === "thinking") return "Thinking…";
  if (live.phase === "calling") return "Calling a tool…";
  return live.phase === "writing" ? "" : "Starting…";
}

/** @param {import("../wire/transcript.js").Usage} usage */
function promptWords(usage) {
  return `${usage.completion_tokens} generated; ${usage.prompt_tokens} prompt tokens, ${usage.cached_tokens} of them cached`;
}

/** @param {number} ms */
function seconds(ms) {
  return ms < 995 ? `${Math.max(10, Math.round(ms / 10) * 10)} ms` : `${rounded(ms / 1000)} s`;
}

/** @param {number} n */
function rounded(n) {
  return n >= 10 ? Math.round(n).toString() : n.toFixed(1);
}
