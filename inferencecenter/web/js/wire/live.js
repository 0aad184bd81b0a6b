// @ts-check
/** The running turn. Events update it at once; views are notified once per frame. */

import { signal } from "../../vendor/signals-core.js";

/** A hidden page has no frames; its title and live region are updated at this interval. */
const HIDDEN_EVERY_MS = 500;

/**
 * @typedef {import("./types.js").QueuedEvent | import("./types.js").ProgressEvent
 *   | import("./types.js").ContextShiftedEvent | import("./types.js").TokenEvent | import("./types.js").ReasoningEvent
 *   | import("./types.js").ToolCallEvent} TurnEvent  Any but `end`.
 */
/** @typedef {"sending" | "loading" | "queued" | "reading" | "thinking" | "writing" | "calling"} Phase */

/** A turn from its request to its end. */
export class Live {
  /**
   * @param {object} turn
   * @param {readonly import("./transcript.js").ChatMessage[]} turn.asked
   * @param {object | null} turn.fields  The fields of `infer` if this page sent it; null otherwise.
   * @param {string | null} turn.turnId
   */
  constructor({ asked, fields, turnId }) {
    this.key = turnId ?? newKey();
    this.asked = asked;
    this.fields = fields && { ...fields, turn_key: this.key };
    this.turnId = turnId;
    this.content = "";
    this.reasoning = "";
    /** @type {{call_id: string, name: string, arguments: string}[]} */
    this.toolCalls = [];
    /** @type {Phase} */
    this.phase = turnId ? "queued" : "sending";
    this.position = 0;
    this.etaMs = /** @type {number | null} */ (null);
    this.progress = /** @type {{done: number, total: number} | null} */ (null);
    this.shifted = 0;
    this.notice = "";
    this.stopping = false;
    /** Incremented on each change; read it to subscribe. */
    this.version = signal(0);
    this._scheduled = false;
  }

  /** Notifies views, soon. */
  touch() {
    if (this._scheduled) return;
    this._scheduled = true;
    const show = () => {
      this._scheduled = false;
      this.version.value += 1;
    };
    if (document.visibilityState === "hidden") setTimeout(show, HIDDEN_EVERY_MS);
    else requestAnimationFrame(show);
  }

  /**
   * Applies an event of the turn other than its last.
   *
   * @param {TurnEvent} event
   */
  take(event) {
    if (event.op === "queued") {
      if (this.phase === "sending" || this.phase === "loading") this.phase = "queued";
      this.position = event.position;
      this.etaMs = event.eta_ms ?? null;
    } else if (event.op === "progress") {
      this.phase = "reading";
      this.progress = { done: event.done, total: event.total };
    } else if (event.op === "context_shifted") {
      this.shifted += event.dropped_turns;
    } else {
      this._grow(event);
    }
    this.touch();
  }

  /**
   * Replaces the known state of the turn with the daemon's.
   *
   * @param {import("./types.js").SessionResumedEvent} resumed
   */
  replace(resumed) {
    this.content = resumed.content ?? "";
    this.reasoning = resumed.reasoning ?? "";
    this.toolCalls = (resumed.tool_calls ?? []).map((call) => ({ ...call }));
    if (this.content) this.phase = "writing";
    this.touch();
  }

  /** @returns {import("./transcript.js").Answer} */
  answer() {
    return { content: this.content, reasoning: this.reasoning, toolCalls: this.toolCalls };
  }

  /** @param {TurnEvent} event  One that extends the answer. */
  _grow(event) {
    if (event.op === "token") {
      this.phase = "writing";
      this.content += event.content;
    } else if (event.op === "reasoning") {
      this.phase = "thinking";
      this.reasoning += event.content;
    } else if (event.op === "tool_call") {
      this.phase = "calling";
      const call = this.toolCalls[event.index];
      if (call) call.arguments += event.arguments;
      else this.toolCalls.push({ call_id: event.call_id, name: event.name ?? "", arguments: event.arguments });
    }
  }
}

/** Returns a unique key for a turn; `crypto.randomUUID` is unavailable on pages without TLS. */
function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
