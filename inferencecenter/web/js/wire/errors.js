// @ts-check
/** Errors of the daemon or the connection. */

import { known, number, t } from "../i18n.js";

/**
 * Returns the message for this page, where the daemon's is for programs.
 *
 * @param {string} kind  A code, or `storage_full`.
 * @param {string} message
 */
function messageFor(kind, message) {
  if (kind === "prompt_too_long") {
    const [, limit, tokens] = /length is (\d+) tokens\. However, the prompt has ([^,]+),/.exec(message) ?? [];
    if (limit) return t("error.prompt_sizes", { tokens, limit: number(Number(limit)) });
  }
  return known("error", kind) ?? message;
}

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
    super(messageFor(kind, told.message));
    this.name = "WireError";
    this.code = told.code;
    this.hint = known("hint", kind) ?? told.hint ?? "";
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
    message: t("error.outcome_unknown", { op }),
    hint: t("error.outcome_hint"),
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
