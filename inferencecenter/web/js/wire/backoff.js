// @ts-check
/** When to connect again after a socket was lost, and what its close code says about that. No I/O, no clock. */

export const MIN_WAIT_MS = 500;
export const MAX_WAIT_MS = 30_000;
/** A connection that held for so long starts the count of attempts anew. */
export const HEALTHY_AFTER_MS = 10_000;

/**
 * @typedef {object} Verdict
 * @property {boolean} final  Whether another attempt with the same token is of no use.
 * @property {number} waitMs  Milliseconds to wait at least.
 * @property {string} words  What happened, for people.
 */

/** @type {ReadonlyMap<number, Verdict>} */
const CLOSES = new Map([
  [1000, { final: false, waitMs: 1000, words: "The server closed the connection." }],
  [1001, { final: false, waitMs: 1000, words: "The server is shutting down." }],
  [1008, { final: true, waitMs: 0, words: "The server ended the connection of this page." }],
  [1009, { final: false, waitMs: 0, words: "A message was larger than the server allows." }],
  [1011, { final: false, waitMs: 1000, words: "The server had an internal error." }],
  [1012, { final: false, waitMs: 0, words: "The server restarts." }],
  [1013, { final: false, waitMs: 5000, words: "The server is overloaded." }],
  [4401, { final: false, waitMs: 0, words: "The server asks for the token again." }],
  [4408, { final: false, waitMs: 0, words: "This page was too slow for the server." }],
  [4429, { final: false, waitMs: 10_000, words: "Too many connections or failed sign-ins." }],
]);

/** @type {Verdict} */
const LOST = { final: false, waitMs: 0, words: "The server cannot be reached." };

/**
 * Returns what the end of a socket means.
 *
 * @param {number} code  Close code; 1006 where there was none.
 * @param {string} reason  What the daemon said with it, or nothing.
 * @returns {Verdict}
 */
export function verdictOf(code, reason) {
  const known = CLOSES.get(code) ?? LOST;
  return reason && known.final ? { ...known, words: `${known.words} Its reason: ${reason}.` } : known;
}

/**
 * Returns how long to wait before an attempt: drawn evenly from a range whose bound doubles, on top of what is asked for.
 *
 * @param {number} attempt  Attempts that failed before, from 0.
 * @param {number} atLeastMs  What the daemon asked for.
 * @param {number} chance  From 0 to 1.
 * @returns {number} Milliseconds.
 */
export function waitMs(attempt, atLeastMs, chance) {
  const bound = Math.min(MAX_WAIT_MS, MIN_WAIT_MS * 2 ** Math.min(attempt, 10));
  return Math.round(Math.min(Math.max(MAX_WAIT_MS, atLeastMs), atLeastMs + (0.3 + 0.7 * chance) * bound));
}
