// @ts-check
/** The content of a conversation: the ended turns, and the running one. */

import { batch, signal } from "../../vendor/signals-core.js";
import { t } from "../i18n.js";
import { WireError } from "./errors.js";
import { Live } from "./live.js";
import { divide, endingOf, failureOf, loose, systemOf, tokensOf, until, withoutFailed, withTurn } from "./transcript.js";

/**
 * @typedef {import("./transcript.js").Turn} Turn
 * @typedef {import("./types.js").ChatMessage} ChatMessage
 * @typedef {Pick<import("./types.js").McpCallEvent, "call_id" | "server" | "tool" | "call_state"> & {detail?: string}} CallStatus
 */

export class Talk {
  constructor() {
    this.turns = signal(/** @type {readonly Turn[]} */ ([]));
    this.live = signal(/** @type {Live | null} */ (null));
    this.system = signal("");
    this.contextTokens = signal(/** @type {number | null} */ (null));
    /** Size of the context; null if unknown. */
    this.contextLimit = signal(/** @type {number | null} */ (null));
    /** The results of the last answer's tool calls, in the history and not answered yet. */
    this.results = signal(/** @type {readonly ChatMessage[]} */ ([]));
    /** The tool calls of the last answer that the daemon ran, by id. */
    this.calls = signal(/** @type {Readonly<Record<string, CallStatus>>} */ ({}));
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
    this._forgetCalls();
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

  /** @param {import("./types.js").McpCallEvent} event  A tool call runs, or has ended. */
  takeCall(event) {
    batch(() => {
      this.calls.value = { ...this.calls.peek(), [event.call_id]: event };
      if (event.call_state !== "done") return;
      const result = { role: /** @type {const} */ ("tool"), content: event.content ?? "", tool_call_id: event.call_id };
      this.results.value = [...this.results.peek(), result];
    });
  }

  /** @param {string} turnId  The last remaining turn, or `START`. */
  rewind(turnId) {
    this._forgetCalls();
    this.turns.value = until(this.turns.peek(), turnId);
  }

  /** @param {import("./types.js").SessionResumedEvent} event  One that tells all there is. */
  restore(event) {
    const { turns, live, lost, results } = restored(event, this.turns.peek(), this.live.peek());
    this.results.value = results;
    this.calls.value = Object.fromEntries((event.mcp_calls ?? []).map((call) => [call.call_id, call]));
    this.system.value = systemOf(event.transcript ?? []);
    this.turns.value = turns;
    this.live.value = live;
    this.contextTokens.value = tokensOf(turns);
    this.measure(event);
    if (lost) this.fail(lost, new WireError({ code: "turn_not_found", message: t("chat.lost") }));
  }

  _forgetCalls() {
    this.results.value = [];
    this.calls.value = {};
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

/**
 * @typedef {import("./types.js").SessionResumedEvent} Resumed
 *
 * @typedef {object} Restored
 * @property {readonly Turn[]} turns
 * @property {Live | null} live  The turn that runs, or is still to be sent.
 * @property {Live | null} lost  A turn that ran here and no longer exists.
 * @property {readonly ChatMessage[]} results  Of tool calls, which no turn has answered.
 */

/**
 * Returns the current conversation, including what only this page knows.
 *
 * @param {Resumed} resumed  With `resumed` false.
 * @param {readonly Turn[]} known  The previously known turns.
 * @param {Live | null} live  The running turn as known to this page.
 * @returns {Restored}
 */
function restored(resumed, known, live) {
  const { turns: ended, rest } = divide(resumed.transcript ?? [], resumed.turns ?? []);
  const seen = new Map(known.map((turn) => [turn.turnId, turn.ending]));
  const turns = ended.map((turn) => ({ ...turn, ending: seen.get(turn.turnId) ?? turn.ending }));
  if (resumed.turn_id !== undefined) return { turns, live: running(resumed, resumed.turn_id, live, rest), lost: null, results: [] };
  const results = rest.every(({ role }) => role === "tool") ? rest : [];
  if (rest.length > results.length) turns.push(loose(rest, "rest"));
  const asking = live?.turnId === null;
  const gone = live !== null && !asking && !turns.some((turn) => turn.turnId === live.turnId);
  return { turns, live: asking ? live : null, lost: gone ? live : null, results };
}

/**
 * @param {Resumed} resumed
 * @param {string} turnId
 * @param {Live | null} live
 * @param {readonly import("./types.js").ChatMessage[]} asked
 */
function running(resumed, turnId, live, asked) {
  // A turn sent just before the connection was lost may be the running one.
  if (live?.turnId === null && live.asked.at(-1)?.content === asked.at(-1)?.content) live.turnId = turnId;
  const found = live !== null && live.turnId === turnId ? live : new Live({ asked, fields: null, turnId });
  found.replace(resumed);
  return found;
}
