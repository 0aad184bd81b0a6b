// @ts-check
/** Errors of the daemon or the connection. */

/**
 * Hints for this page by code, or `storage_full`, where the daemon's hint is for programs.
 *
 * @type {Readonly<Record<string, string>>}
 */
const HINTS = {
  prompt_too_long: "Shorten it, or start a new chat.",
  session_limit: "Wait until an answer has ended, or delete a conversation that is no longer needed, then try again.",
  storage_full: "Those that exist can be continued. To make room, delete some from the list; Settings can export all of them before.",
};

/** @type {Readonly<Record<string, (message: string) => string>>}  The same for messages. */
const MESSAGES = {
  prompt_too_long: (message) => {
    const [, limit, tokens] = /length is (\d+) tokens\. However, the prompt has ([^,]+),/.exec(message) ?? [];
    const sizes = limit ? ` With the conversation it has ${tokens}; ${Number(limit).toLocaleString()} fit, with the answer.` : "";
    return `This message is too long for the model.${sizes}`;
  },
  session_limit: () => "Too many conversations are in use at once.",
  storage_full: () => "The space for conversations is full: no further conversation or version can be stored.",
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
    const isStorageFull = told.code === "quota_exceeded" && told.field === "store";
    const kind = isStorageFull ? "storage_full" : told.code;
    super(MESSAGES[kind]?.(told.message) ?? told.message);
    this.name = "WireError";
    this.code = told.code;
    this.hint = HINTS[kind] ?? told.hint ?? "";
    this.field = isStorageFull ? "" : (told.field ?? "");
    /** Whether nothing new can be stored until something is deleted. */
    this.isStorageFull = isStorageFull;
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
