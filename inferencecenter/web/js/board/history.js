// @ts-check
/** Data of the charts: readings of the last minutes or hours, by column. Pure, no clock. */

/** Retention in seconds. */
export const KEPT_S = 900;
/** Readings further apart than this are not joined by a line. */
const GAP_S = 5;

/**
 * @typedef {"tokensPerS" | "ttftMs" | "running" | "waiting" | "sessions" | "parked" | "vramMb" | "temperature"} Reading
 * @typedef {Reading | `work${number}`} Column
 */
/** @typedef {(number | null)[]} Values */
/** @typedef {{now: number | null, lowest: number | null, mean: number | null, highest: number | null}} Summary */

/** @typedef {import("../wire/types.js").MetricsEvent} Metrics */

/** @type {Readonly<Record<Reading, (metrics: Metrics) => number | null>>} */
const READ = {
  tokensPerS: (metrics) => metrics.inference.tokens_per_s,
  ttftMs: (metrics) => metrics.inference.last_ttft_ms,
  running: (metrics) => metrics.inference.slots_used,
  waiting: (metrics) => metrics.inference.queue_depth,
  sessions: (metrics) => metrics.inference.total_sessions,
  parked: (metrics) => metrics.inference.parked_sessions,
  vramMb: (metrics) => metrics.gpu.vram_used_mb,
  temperature: (metrics) => metrics.gpu.temp,
};

/** @type {readonly Reading[]} */
const COLUMNS = /** @type {Reading[]} */ (Object.keys(READ));

/** Readings in chronological order; those older than `KEPT_S` are dropped. */
export class History {
  constructor() {
    /** Unix seconds. @type {number[]} */
    this.times = [];
    /** @type {Record<Column, Values>} */
    this.columns = /** @type {any} */ (Object.fromEntries(COLUMNS.map((column) => [column, []])));
  }

  /** Unix seconds of the latest reading, 0 before the first. */
  get latest() {
    return this.times.at(-1) ?? 0;
  }

  /**
   * Adds the readings of a `metrics` event; one that is not later than the last is ignored. When the daemon's clock is
   * set back, the history is cleared.
   *
   * @param {Metrics} metrics
   */
  add(metrics) {
    const time = metrics.timestamp;
    if (time < this.latest - GAP_S) this._drop(this.times.length);
    if (time <= this.latest) return;
    if (this.latest && time - this.latest > GAP_S) this._push(this.latest + GAP_S / 2, () => null);
    this._push(time, (column) => READ[column](metrics) ?? null);
    let old = 0;
    while (this.times[old] < time - KEPT_S) old += 1;
    if (old > 0) this._drop(old);
  }

  /**
   * Returns statistics of a column over the last `windowS` seconds.
   *
   * @param {Column} column
   * @param {number} windowS
   * @returns {Summary}
   */
  summary(column, windowS) {
    const from = this.latest - windowS;
    const known = this.columns[column].filter((value, at) => value !== null && this.times[at] >= from);
    const values = /** @type {number[]} */ (known);
    if (!values.length) return { now: null, lowest: null, mean: null, highest: null };
    return {
      now: this.columns[column].at(-1) ?? null,
      lowest: Math.min(...values),
      mean: values.reduce((sum, value) => sum + value, 0) / values.length,
      highest: Math.max(...values),
    };
  }

  /** @param {number} n  Number of oldest readings to drop. */
  _drop(n) {
    this.times.splice(0, n);
    for (const column of COLUMNS) this.columns[column].splice(0, n);
  }

  /**
   * @param {number} time
   * @param {(column: Reading) => number | null} valueOf
   */
  _push(time, valueOf) {
    this.times.push(time);
    for (const column of COLUMNS) this.columns[column].push(valueOf(column));
  }
}

/** @type {Readonly<Partial<Record<Reading, string>>>}  Names of the daemon's columns. */
const SENT = {
  tokensPerS: "tokens_per_s", running: "running", waiting: "waiting", sessions: "sessions", parked: "parked_sessions",
  vramMb: "vram_used_mb", temperature: "gpu_temp",
};
/** Groups that are shown apart, and the others together. */
const MOST_GROUPS = 4;

/** What the daemon has kept of the last hours; the columns `work0`, `work1`, … are generated tokens per minute of `groups`. */
export class Past extends History {
  /** @param {import("../wire/types.js").HistoryReportEvent} event */
  constructor({ starts_at: start, resolution_s: step, columns, series }) {
    super();
    const n_steps = columns.running.length;
    this.times = Array.from({ length: n_steps }, (_, at) => start + (at + 0.5) * step);
    for (const [own, sent] of Object.entries(SENT)) this.columns[/** @type {Reading} */ (own)] = [...columns[sent]];
    this.columns.ttftMs = this.times.map((_, at) => meanTtft(series, at));
    const whole = series.length <= MOST_GROUPS ? series : series.slice(0, MOST_GROUPS - 1);
    const rest = series.slice(whole.length);
    /** @type {readonly (string | null)[]}  Their names; null for the others. */
    this.groups = [...whole.map(({ group }) => group ?? null), ...(rest.length > 0 ? [null] : [])];
    for (const [index, each] of [...whole.map((one) => [one]), ...(rest.length > 0 ? [rest] : [])].entries()) {
      const total = (/** @type {number} */ at) => each.reduce((sum, one) => sum + (one.columns.completion_tokens[at] ?? 0), 0);
      // The last step has not ended.
      this.columns[`work${index}`] = this.times.map((_, at) => (at < n_steps - 1 ? (total(at) * 60) / step : null));
    }
  }
}

/**
 * @param {readonly import("../wire/types.js").HistorySeries[]} series
 * @param {number} at  Index of a step.
 */
function meanTtft(series, at) {
  const known = series.filter(({ columns }) => columns.ttft_ms[at] !== null);
  const turns = known.reduce((sum, { columns }) => sum + (columns.turns[at] ?? 0), 0);
  return turns > 0 ? known.reduce((sum, { columns }) => sum + (columns.ttft_ms[at] ?? 0) * (columns.turns[at] ?? 0), 0) / turns : null;
}
