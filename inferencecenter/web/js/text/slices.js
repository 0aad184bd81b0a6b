// @ts-check
/** Time-sliced work, one slice per frame; the latest work has priority. */

const BUDGET_MS = 6;
/** After a long slice, all work pauses for this multiple of its duration. */
const REST_FACTOR = 3;
const REST_FROM_MS = 12;
const MAX_REST_MS = 200;

/** @typedef {Iterator<void>} Work  Each step is much shorter than a slice. */

/** @type {Work[]} */
const begun = [];
let waits = false;
let restUntil = 0;

/**
 * Starts at once if this frame has had no slice, and continues in the next ones. A hidden page has no frames: its work
 * resumes when it is visible again.
 *
 * @param {Work} work
 */
export function begin(work) {
  begun.push(work);
  if (!waits) slice();
}

/**
 * Starts in the next frame, as this one is busy.
 *
 * @param {Work} work
 */
export function beginLater(work) {
  begun.push(work);
  if (!waits) wait();
}

/** @param {Work} work  Work to cancel. */
export function cancel(work) {
  const at = begun.indexOf(work);
  if (at >= 0) begun.splice(at, 1);
}

function wait() {
  waits = true;
  requestAnimationFrame(() => {
    waits = false;
    if (begun.length > 0) slice();
  });
}

function slice() {
  wait();
  const from = performance.now();
  if (from < restUntil) return;
  while (begun.length > 0 && performance.now() - from < BUDGET_MS) step(/** @type {Work} */ (begun.pop()));
  const took = performance.now() - from;
  restUntil = took > REST_FROM_MS ? from + took + Math.min(MAX_REST_MS, took * REST_FACTOR) : 0;
}

/** @param {Work} work  Removed if it throws. */
function step(work) {
  const at = begun.length;
  if (!work.next().done) begun.splice(at, 0, work);
}
