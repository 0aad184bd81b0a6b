// @ts-check
/** The line below an answer: end reason and statistics, or its progress. */

import { known, number, t } from "../i18n.js";
import { speedOf } from "../storage.js";
import { html } from "../ui.js";

/**
 * @param {{ending: import("../wire/transcript.js").Ending, turnId: string | null}} props
 */
export function Outcome({ ending, turnId }) {
  const words = known("ending", ending.reason);
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
    found.push([t("outcome.tokens", { n: usage.completion_tokens }), promptWords(usage)]);
  }
  if (stats && stats.tps > 0) found.push([t("outcome.speed", { speed: rounded(stats.tps) }), t("outcome.speed_title")]);
  if (stats && stats.ttft_ms > 0) found.push([t("outcome.first", { time: seconds(stats.ttft_ms) }), t("outcome.first_title")]);
  if (stats && stats.queue_ms >= 100) found.push([t("outcome.queued", { time: seconds(stats.queue_ms) }), t("outcome.queued_title")]);
  return found;
}

/** @param {{live: import("../wire/live.js").Live, waiting: string}} props  `waiting` says why no events come, "" if they do. */
export function Progress({ live, waiting }) {
  const words = waiting || phaseWords(live);
  const part = live.phase === "reading" && live.progress?.total ? live.progress.done / live.progress.total : null;
  return html`
    <div class="progress-line">
      ${words && html`<span class="pulse" aria-hidden="true"></span><span>${words}</span>`}
      ${part !== null && html`<progress aria-label=${t("phase.reading_label")} max="1" value=${part}></progress>`}
    </div>
  `;
}

/**
 * Returns the phase as text, "" while the answer itself shows it.
 *
 * @param {import("../wire/live.js").Live} live
 */
export function phaseWords(live) {
  if (live.stopping) return t("phase.stopping");
  if (live.phase === "loading") return live.notice || t("phase.loading");
  if (live.phase === "queued" && live.position > 0) {
    const ahead = live.position;
    return live.etaMs === null ? t("phase.queued", { ahead }) : t("phase.queued_eta", { ahead, time: seconds(live.etaMs) });
  }
  if (live.phase === "reading") return live.progress ? t("phase.reading_of", { n: live.progress.total }) : t("phase.reading");
  if (live.phase === "thinking") return t("message.thinking");
  if (live.phase === "calling") return t("phase.calling");
  return live.phase === "writing" ? "" : t("phase.starting");
}

/** @param {import("../wire/transcript.js").Usage} usage */
function promptWords(usage) {
  const { completion_tokens: generated, prompt_tokens: prompt, cached_tokens: cached } = usage;
  return t("outcome.tokens_title", { generated, prompt, cached });
}

/** @param {number} ms */
function seconds(ms) {
  return ms < 995 ? `${Math.max(10, Math.round(ms / 10) * 10)} ms` : `${rounded(ms / 1000)} s`;
}

/** @param {number} n */
function rounded(n) {
  return number(n, n >= 10 ? 0 : 1);
}
