// @ts-check
/** Errors of the daemon or the connection. */

/**
 * Hints for this page by code, where the daemon's hint is for programs.
 *
 * @type {Readonly<Record<string, string>>}
 */
const HINTS = {
  session_limit: "Delete a conversation that is no longer needed from the list, then try again.",
};

/** An `error` event, or a local failure in its form. */
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
 * Returns the error for a request whose reply was lost.
 *
 * @param {string} op
 */
export function outcomeUnknown(op) {
  return new WireError({
    code: "daemon_unreachable",
    message: `The connection was lost before ${op} was answered.`,
    hint: "Its outcome is unknown: check before trying again.",
    retryable: true,
  });
}

/**
 * Returns any error as a WireError.
 *
 * @param {unknown} error
 * @returns {WireError}
 */
export function asWireError(error) {
  if (error instanceof WireError) return error;
  return new WireError({ code: "internal", message: error instanceof Error ? error.message : String(error) });
}
