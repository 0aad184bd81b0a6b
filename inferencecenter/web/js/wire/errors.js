// @ts-check
/** Errors of the daemon or the connection. */

/**
 * Hints for this page by code, where the daemon's hint is for programs.
 *
 * @type {Readonly<Record<string, string>>}
 */
const HINTS = {
  prompt_too_long: "Shorten it, or start a new chat.",
  session_limit: "Delete a conversation that is no longer needed from the list, then try again.",
};

/** @type {Readonly<Record<string, (message: string) => string>>}  The same for messages. */
const MESSAGES = {
  prompt_too_long: (message) => {
    const [, limit, tokens] = /length is (\d+) tokens\. However, the prompt has ([^,]+),/.exec(message) ?? [];
    const sizes = limit ? ` With the conversation it has ${tokens}; ${Number(limit).toLocaleString()} fit, with the answer.` : "";
    return `This message is too long for the model.${sizes}`;
  },
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
    super(MESSAGES[told.code]?.(told.message) ?? told.message);
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
