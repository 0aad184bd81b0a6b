// @ts-check
/** Position in a session's numbered event history. */

/** @typedef {import("./types.js").AnyEvent & {seq: number, session_id: string}} Numbered */

/** @type {ReadonlySet<string>} */
const TEXT = new Set(["token", "reasoning", "tool_call"]);

export class Position {
  /**
   * @param {string | null} epoch  Null if unknown.
   * @param {number} [seq]  0 before the first event.
   */
  constructor(epoch, seq = 0) {
    this.epoch = epoch;
    this.seq = seq;
    /** @type {number | null} */
    this._resumedAfter = null;
  }

  /**
   * Records an event, unless it is a duplicate or events before it are missing.
   *
   * A text event may have been coalesced from several and carries the last one's number, so it never indicates a gap.
   * Nor does a gap directly after a resume: events that are not replayed were not meant for this page.
   *
   * @param {Numbered} event
   * @returns {"next" | "repeated" | "gap"}
   */
  admit(event) {
    if (event.seq <= this.seq) return "repeated";
    const adjoins = TEXT.has(event.op) || event.seq === this.seq + 1 || this.seq === this._resumedAfter;
    if (!adjoins) return "gap";
    this.seq = event.seq;
    return "next";
  }

  /**
   * Records the number of an event that is accepted in any case, such as a direct reply.
   *
   * @param {number} seq
   */
  note(seq) {
    this.seq = Math.max(this.seq, seq);
  }

  /**
   * Continues at the daemon's position, which is later than this one if events were lost.
   *
   * @param {import("./types.js").SessionResumedEvent} resumed
   */
  resume(resumed) {
    if (!resumed.resumed) this.seq = resumed.seq;
    this.epoch = resumed.epoch;
    this._resumedAfter = this.seq;
  }

  /** Returns the fields of `resume_session` for this position. */
  fields() {
    return this.epoch === null ? {} : { epoch: this.epoch, last_seq: this.seq };
  }
}
