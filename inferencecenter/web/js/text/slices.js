// @ts-check
/** Time-sliced work, one slice per frame, and work for idle times; the latest work has priority. */

/** A step that starts within it is finished, so a slice may take somewhat longer. */
const BUDGET_MS = 3;
/** After a long slice, all work pauses for this multiple of its duration. */
const REST_FACTOR = 3;
const REST_FROM_MS = 12;
const MAX_REST_MS = 200;
const IDLE_BUDGET_MS = 12;
/** Until a view has its first text there is nothing that a long slice would delay. */
const FIRST_BUDGET_MS = 50;
/** With less time than this left, a frame is due. */
const FRAME_MS = 17;
/** Work for idle times gets a slice after this time at the latest. */
const IDLE_WITHIN_MS = 500;

/** @typedef {Iterator<void>} Work  Each step is much shorter than a slice. */

/** @type {Work[]} */
const begun = [];
/** @type {Work[]} */
const idle = [];
let waits = false;
let waitsIdle = false;
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

/**
 * Starts with a long slice before this frame is drawn, and continues in the next ones.
 *
 * @param {Work} work
 */
export function beginFirst(work) {
  begun.push(work);
  queueMicrotask(() => {
    if (!waits) wait();
    const from = performance.now();
    while (begun.includes(work) && performance.now() - from < FIRST_BUDGET_MS) step(begun);
  });
}

/**
 * Starts when the browser is idle, and continues in such times only.
 *
 * @param {Work} work
 */
export function beginIdle(work) {
  idle.push(work);
  waitIdle();
}

/** @param {Work} work  Work to cancel; it may be begun again. */
export function cancel(work) {
  for (const queue of [begun, idle]) if (queue.includes(work)) queue.splice(queue.indexOf(work), 1);
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
  while (begun.length > 0 && performance.now() - from < BUDGET_MS) step(begun);
  const took = performance.now() - from;
  restUntil = took > REST_FROM_MS ? from + took + Math.min(MAX_REST_MS, took * REST_FACTOR) : 0;
}

/** @param {Work[]} queue  Its last work does a step; it is removed if it throws. */
function step(queue) {
  const work = /** @type {Work} */ (queue.pop());
  const at = queue.length;
  if (!work.next().done) queue.splice(at, 0, work);
}

/** Safari has no idle callbacks. */
const requestIdle =
  globalThis.requestIdleCallback ??
  ((/** @type {IdleRequestCallback} */ then) => setTimeout(() => then({ didTimeout: true, timeRemaining: () => 0 }), 2 * FRAME_MS));

function waitIdle() {
  if (waitsIdle || idle.length === 0) return;
  waitsIdle = true;
  requestIdle(idleSlice, { timeout: IDLE_WITHIN_MS });
}

/** @param {IdleDeadline} deadline */
function idleSlice(deadline) {
  waitsIdle = false;
  const from = performance.now();
  const budget = deadline.didTimeout ? BUDGET_MS : deadline.timeRemaining() > FRAME_MS ? IDLE_BUDGET_MS : 0;
  while (idle.length > 0 && performance.now() - from < budget) step(idle);
  waitIdle();
}
