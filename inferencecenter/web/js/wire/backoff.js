// @ts-check
/** Backoff of reconnects, and the meaning of close codes. No I/O, no clock. */

export const MIN_WAIT_MS = 500;
export const MAX_WAIT_MS = 30_000;
/** Milliseconds after which a connection counts as stable: its loss restarts the backoff. */
export const HEALTHY_AFTER_MS = 10_000;

/**
 * @typedef {object} Verdict
 * @property {boolean} final  Whether another attempt with the same token is useless.
 * @property {number} waitMs  Minimum delay in milliseconds.
 * @property {string} words  Description for the user.
 */

/** @type {ReadonlyMap<number, Verdict>} */
const CLOSES = new Map([
  [1000, { final: false, waitMs: 1000, words: "The server closed the connection." }],
  [1001, { final: false, waitMs: 1000, words: "The server is shutting down." }],
  [1008, { final: true, waitMs: 0, words: "The server closed this page's connection." }],
  [1009, { final: false, waitMs: 0, words: "A message was larger than the server allows." }],
  [1011, { final: false, waitMs: 1000, words: "The server had an internal error." }],
  [1012, { final: false, waitMs: 0, words: "The server is restarting." }],
  [1013, { final: false, waitMs: 5000, words: "The server is overloaded." }],
  [4401, { final: false, waitMs: 0, words: "The server requires authentication again." }],
  [4408, { final: false, waitMs: 0, words: "This page was too slow for the server." }],
  [4429, { final: false, waitMs: 10_000, words: "Too many connections or failed sign-ins." }],
]);

/** @type {Verdict} */
const LOST = { final: false, waitMs: 0, words: "The server cannot be reached." };

/**
 * Returns the meaning of a closed socket.
 *
 * @param {number} code  Close code; 1006 if there was none.
 * @param {string} reason  Close reason, may be empty.
 * @returns {Verdict}
 */
export function verdictOf(code, reason) {
  const known = CLOSES.get(code) ?? LOST;
  return reason && known.final ? { ...known, words: `${known.words} Its reason: ${reason}.` } : known;
}

/**
 * Returns the delay before an attempt: uniform up to a bound that doubles (full jitter), added to the daemon's minimum.
 *
 * @param {number} attempt  Number of failed attempts, from 0.
 * @param {number} atLeastMs  Minimum given by the daemon.
 * @param {number} chance  Random number from 0 to 1.
 * @returns {number} Milliseconds.
 */
export function waitMs(attempt, atLeastMs, chance) {
  const bound = Math.min(MAX_WAIT_MS, MIN_WAIT_MS * 2 ** Math.min(attempt, 10));
  return Math.round(Math.min(Math.max(MAX_WAIT_MS, atLeastMs), atLeastMs + (0.3 + 0.7 * chance) * bound));
}
