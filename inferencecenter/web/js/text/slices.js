// @ts-check
/** Work that takes longer than a frame has, done a slice in each frame. What was begun last comes first. */

const BUDGET_MS = 6;
/** After a slice that took long all rest for so many times as long, so that other things have their turn. */
const REST_FACTOR = 3;
const REST_FROM_MS = 12;
const MAX_REST_MS = 200;

/** @typedef {Iterator<void>} Work  Each step takes a small part of a slice. */

/** @type {Work[]} */
const begun = [];
let waits = false;
let restUntil = 0;

/**
 * Begins at once where this frame has had no slice, and goes on in the next ones. A hidden page has no frames: its work
 * is done when it is seen again.
 *
 * @param {Work} work
 */
export function begin(work) {
  begun.push(work);
  if (!waits) slice();
}

/**
 * Begins in the next frame: this one has enough to do.
 *
 * @param {Work} work
 */
export function beginLater(work) {
  begun.push(work);
  if (!waits) wait();
}

/** @param {Work} work  Makes no step any more. */
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

/** @param {Work} work  It is gone if it throws. */
function step(work) {
  const at = begun.length;
  if (!work.next().done) begun.splice(at, 0, work);
}
