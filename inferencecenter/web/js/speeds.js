// @ts-check
/** Timings of answers, which the daemon tells once, at their end; kept for the next reload of the page. */

import { keep, kept } from "./storage.js";

/** @typedef {{tps: number, ttft_ms: number, queue_ms: number}} Speed */

const NAME = "speeds";
const MOST = 500;
/** @type {Map<string, Speed>}  By turn, the oldest first. */
const speeds = new Map(kept(NAME, []));

/**
 * @param {string} turnId
 * @param {Speed} stats
 */
export function noteSpeed(turnId, { tps, ttft_ms, queue_ms }) {
  speeds.set(turnId, { tps, ttft_ms, queue_ms });
  for (const id of speeds.keys()) if (speeds.size > MOST) speeds.delete(id);
  keep(NAME, [...speeds]);
}

/** @param {string | null} turnId */
export function speedOf(turnId) {
  return turnId === null ? null : (speeds.get(turnId) ?? null);
}

/** Deletes all, at sign-out. */
export function dropSpeeds() {
  speeds.clear();
  keep(NAME, undefined);
}
