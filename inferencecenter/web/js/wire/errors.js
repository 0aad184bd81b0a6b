// @ts-check
/** What the daemon, or the way to it, refused. */

/**
 * What to do on this page, by code, where the daemon's hint is for programs.
 *
 * @type {Readonly<Record<string, string>>}
 */
const HINTS = {
  session_limit: "Delete a conversation that is no longer needed from the list, then try again.",
};

/** An `error` event, or a failure that is told like one. */
export class WireError extends Error {
  /**
   * @param {object} told
   * @param {string} told.code  A row of docs/errors.md.
   * @param {string} told.message
   * @param {string} [told.hint]
   * @param {string} [told.field]
   * @param {boolean} [told.retryable]
   * @param {number} [told.retry_after_ms]
   */
  constructor(told) {
    super(told.message);
    this.name = "WireError";
    this.code = told.code;
    this.hint = HINTS[told.code] ?? told.hint ?? "";
    this.field = told.field ?? "";
    this.retryable = told.retryable ?? false;
    this.retryAfterMs = told.retry_after_ms ?? null;
  }
}

/**
 * Returns that a request was cut off from its answer.
 *
 * @param {string} op
 */
export function outcomeUnknown(op) {
  return new WireError({
    code: "daemon_unreachable",
    message: `The connection was lost before ${op} was answered.`,
    hint: "It may have been done or not: look before trying again.",
    retryable: true,
  });
}

/**
 * Returns an error as one of the wire, whatever it was.
 *
 * @param {unknown} error
 * @returns {WireError}
 */
export function asWireError(error) {
  if (error instanceof WireError) return error;
  return new WireError({ code: "internal", message: error instanceof Error ? error.message : String(error) });
}
