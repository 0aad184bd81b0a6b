// @ts-check
/** How far a session's numbered history of events has arrived here. */

/** @typedef {import("./types.js").AnyEvent & {seq: number, session_id: string}} Numbered */

/** @type {ReadonlySet<string>} */
const TEXT = new Set(["token", "reasoning", "tool_call"]);

export class Position {
  /**
   * @param {string | null} epoch  Null when it is not known.
   * @param {number} [seq]  0 before the first event.
   */
  constructor(epoch, seq = 0) {
    this.epoch = epoch;
    this.seq = seq;
    /** @type {number | null} */
    this._resumedAfter = null;
  }

  /**
   * Counts an event, unless it was here before or events before it are missing.
   *
   * A text may stand for several, of which it has the last number, so nothing is missing before one. Nor is there a gap
   * to fill where the history was resumed already: what is not sent again was not for this page.
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
   * Counts an event that is taken whatever its number, as the answer to a request.
   *
   * @param {number} seq
   */
  note(seq) {
    this.seq = Math.max(this.seq, seq);
  }

  /**
   * Goes on where the daemon goes on: at the same place, or after all that is lost.
   *
   * @param {import("./types.js").SessionResumedEvent} resumed
   */
  resume(resumed) {
    if (!resumed.resumed) this.seq = resumed.seq;
    this.epoch = resumed.epoch;
    this._resumedAfter = this.seq;
  }

  /** Returns the fields of `resume_session` that ask for what comes after. */
  fields() {
    return this.epoch === null ? {} : { epoch: this.epoch, last_seq: this.seq };
  }
}
