// @ts-check
/** The content of a conversation: the ended turns, and the running one. */

import { batch, signal } from "../../vendor/signals-core.js";
import { WireError } from "./errors.js";
import { restored } from "./restored.js";
import { endingOf, failureOf, systemOf, tokensOf, until, withTurn, withoutFailed } from "./transcript.js";

/**
 * @typedef {import("./live.js").Live} Live
 * @typedef {import("./transcript.js").Turn} Turn
 */

export class Talk {
  constructor() {
    this.turns = signal(/** @type {readonly Turn[]} */ ([]));
    this.live = signal(/** @type {Live | null} */ (null));
    this.system = signal("");
    this.contextTokens = signal(/** @type {number | null} */ (null));
    /** Size of the context; null if unknown. */
    this.contextLimit = signal(/** @type {number | null} */ (null));
    /** Oldest messages that are no longer in the context. */
    this.dropped = signal(0);
  }

  /** @param {{n_ctx?: number, n_tokens?: number, dropped_messages?: number}} facts  Of the context, as the daemon has them. */
  measure({ n_ctx: limit, n_tokens: tokens, dropped_messages: dropped }) {
    if (limit !== undefined) this.contextLimit.value = limit;
    if (tokens !== undefined) this.contextTokens.value = tokens;
    if (dropped !== undefined) this.dropped.value = dropped;
  }

  /** @param {Live} live  A turn that starts. */
  begin(live) {
    this.turns.value = withoutFailed(this.turns.peek());
    this.live.value = live;
  }

  /**
   * @param {Live} live
   * @param {Parameters<typeof endingOf>[0]} end  The known part of the end.
   */
  finish(live, end) {
    const said = live.content || live.reasoning || live.toolCalls.length > 0;
    const answer = said || live.turnId ? live.answer() : null;
    const ending = { ...endingOf(end), shifted: live.shifted };
    this._close({ key: live.key, turnId: live.turnId, asked: live.asked, answer, ending });
  }

  /**
   * @param {Live} live
   * @param {WireError} error
   */
  fail(live, error) {
    const answer = live.content || live.reasoning ? live.answer() : null;
    this._close({ key: live.key, turnId: null, asked: live.asked, answer, ending: failureOf(error) });
  }

  /** @param {string} turnId  The last remaining turn, or `START`. */
  rewind(turnId) {
    this.turns.value = until(this.turns.peek(), turnId);
  }

  /** @param {import("./types.js").SessionResumedEvent} event  One that tells all there is. */
  restore(event) {
    const { turns, live, lost } = restored(event, this.turns.peek(), this.live.peek());
    this.system.value = systemOf(event.transcript ?? []);
    this.turns.value = turns;
    this.live.value = live;
    this.contextTokens.value = tokensOf(turns);
    this.measure(event);
    if (lost) this.fail(lost, new WireError({ code: "turn_not_found", message: "The rest of this answer is lost." }));
  }

  /** @param {Turn} turn  The running turn, as it ended. */
  _close(turn) {
    batch(() => {
      this.turns.value = withTurn(this.turns.peek(), turn);
      this.live.value = null;
      this.contextTokens.value = tokensOf(withoutFailed(this.turns.peek()));
    });
  }
}
