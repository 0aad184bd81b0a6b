// @ts-check
/** One conversation, from its first question on, across any number of sockets. */

import { batch, signal } from "../../vendor/signals-core.js";
import { WireError, asWireError } from "./errors.js";
import { Live } from "./live.js";
import { Position } from "./position.js";
import { before, divide, loose, question, systemOf } from "./transcript.js";

/**
 * @typedef {import("./link.js").WireEvent} WireEvent
 * @typedef {import("./transcript.js").ChatMessage} ChatMessage
 * @typedef {import("./transcript.js").Turn} Turn
 */

/**
 * "draft" has not been asked anything and is not known to the daemon; "away" waits for a socket; of a "detached" one
 * another page has the events; "gone" is closed, expired, or was never there.
 *
 * @typedef {"draft" | "opening" | "ready" | "away" | "detached" | "gone"} SessionState
 */

const TURN_OPS = new Set(["queued", "progress", "context_shifted", "token", "reasoning", "tool_call"]);
/** What a daemon that has just started, or whose engine has, says to a turn. It passes. */
const PASSING = new Set(["model_loading", "engine_unavailable"]);
const ASK_AGAIN_MS = 1000;

export class Session {
  /**
   * @param {import("./link.js").Link} link
   * @param {string | null} id  Null for one that is to be created with its first question.
   */
  constructor(link, id) {
    this.id = signal(id);
    this.state = signal(/** @type {SessionState} */ (id === null ? "draft" : "away"));
    this.turns = signal(/** @type {readonly Turn[]} */ ([]));
    this.live = signal(/** @type {Live | null} */ (null));
    /** What went wrong last, other than in a turn. */
    this.error = signal(/** @type {WireError | null} */ (null));
    this.system = signal("");
    this.model = signal("");
    this.contextTokens = signal(/** @type {number | null} */ (null));
    /** Whether everything there was to know is here. */
    this.known = signal(id === null);
    this._link = link;
    this._position = new Position(null);
    this._missing = true;
    /** @type {number | null} */
    this._replayedAt = null;
    this._retry = 0;
  }

  /** Whether a question may be asked now. */
  get idle() {
    return this.live.value === null && (this.state.value === "draft" || this.state.value === "ready");
  }

  /**
   * Asks, after creating the session if it is a draft.
   *
   * @param {readonly ChatMessage[]} asked
   * @param {object} fields  Others of `infer`.
   * @param {() => object} [creation]  Returns the fields of `create_session`.
   */
  async ask(asked, fields, creation = () => ({})) {
    const live = new Live({ asked, fields: { ...fields, ...question(asked) }, turnId: null });
    batch(() => {
      this.error.value = null;
      this.turns.value = this.turns.value.filter((turn) => turn.ending?.reason !== "error");
      this.live.value = live;
    });
    if (this.id.peek() === null) {
      try {
        await this._create(creation());
      } catch (error) {
        if (this.live.peek() === live) this._fail(live, asWireError(error));
        return;
      }
    }
    this._infer();
  }

  /** Ends the turn that runs, now or as soon as the daemon can be told. */
  stop() {
    const live = this.live.peek();
    if (!live) return;
    live.stopping = true;
    live.touch();
    if (live.turnId === null && live.phase === "loading") this._finish(live, { finish_reason: "aborted" });
    else this._abort();
  }

  /**
   * Takes back the turn at `index` and all that came later; returns what it asked.
   *
   * @param {number} index
   * @returns {Promise<readonly ChatMessage[]>}
   */
  async takeBack(index) {
    const turns = this.turns.peek();
    const asked = turns[index].asked;
    if (turns[index].turnId !== null) {
      await this._link.request("rewind_session", { session_id: this.id.peek(), turn: before(turns, index) });
    }
    this.turns.value = turns.slice(0, index);
    return asked;
  }

  /** Has the session's events come to this page, those first that it missed. */
  async resume() {
    const session_id = this.id.peek();
    if (session_id === null || this.state.peek() === "opening" || this._link.state.peek() !== "open") return;
    this.state.value = "opening";
    this._missing = true;
    try {
      await this._link.request("resume_session", { session_id, ...this._position.fields() });
    } catch (error) {
      this._notResumed(asWireError(error));
    }
  }

  /** Takes note that the socket is lost: only what comes after `session_resumed` counts. */
  cut() {
    clearTimeout(this._retry);
    this._missing = true;
    if (this.state.peek() === "ready" || this.state.peek() === "opening") this.state.value = "away";
  }

  /** Says that it is no more. */
  end() {
    clearTimeout(this._retry);
    const live = this.live.peek();
    if (live) this._fail(live, new WireError({ code: "session_not_found", message: "The conversation was deleted." }));
    this.state.value = "gone";
  }

  /**
   * Takes an event that names this session.
   *
   * @param {WireEvent} event
   */
  take(event) {
    if (event.op === "session_resumed") this._resumed(event);
    else if (event.op === "session_detached") this._detached();
    else if (event.op === "session_closed") this.end();
    else if (typeof event.seq === "number" && event.op !== "session" && this._counts(event)) {
      this._hear(event);
      this._settle();
    }
  }

  /** @param {object} fields */
  async _create(fields) {
    const created = await this._link.request("create_session", fields);
    batch(() => {
      this.id.value = created.session_id;
      this.model.value = created.model;
      this.state.value = "ready";
    });
    this._position = new Position(created.epoch);
    this._missing = false;
  }

  /** Sends the question, unless the daemon has it; it is sent again with the same key for as long as it may be lost. */
  async _infer() {
    const live = this.live.peek();
    if (!live?.fields || live.turnId !== null || this.state.peek() !== "ready") return;
    try {
      await this._link.request("infer", { session_id: this.id.peek(), ...live.fields });
    } catch (caught) {
      const error = asWireError(caught);
      if (this.live.peek() !== live || live.turnId !== null) return;
      if (error.code === "daemon_unreachable" && this._link.state.peek() !== "closed") return;
      if (!PASSING.has(error.code)) {
        this._fail(live, error);
        return;
      }
      live.phase = "loading";
      live.notice = error.message;
      live.touch();
      this._retry = setTimeout(() => this._infer(), error.retryAfterMs ?? ASK_AGAIN_MS);
    }
  }

  _abort() {
    const live = this.live.peek();
    if (!live?.stopping || live.turnId === null || this.state.peek() !== "ready") return;
    this._link.send("abort", { session_id: this.id.peek(), turn_id: live.turnId, id: this._link.nextId() });
  }

  /**
   * Returns whether an event is new; if others are missing before it, has them sent.
   *
   * @param {WireEvent} event
   */
  _counts(event) {
    if (this._missing) return false;
    const arrival = this._position.admit(event);
    if (this._link.owns(event.id) && arrival !== "next") {
      // The end of a turn that is asked for again has its old number.
      this._position.note(event.seq);
      return true;
    }
    if (arrival === "gap") this.resume();
    return arrival === "next";
  }

  /** @param {WireEvent} event  A new one. */
  _hear(event) {
    const live = this._liveOf(event);
    if (event.op === "session_expired") this.end();
    else if (event.op === "session_rewound") this._rewound(event.turn);
    else if (event.op === "appended" && !this._link.owns(event.id)) this._reload();
    else if (live && TURN_OPS.has(event.op)) this._grow(live, event);
    else if (live && event.op === "end") this._finish(live, event);
    else if (live && event.op === "error" && event.turn_id) this._fail(live, new WireError(/** @type {any} */ (event)));
  }

  /**
   * Returns the turn that an event is of, if it is the one that runs.
   *
   * @param {WireEvent} event
   */
  _liveOf(event) {
    const live = this.live.peek();
    if (live && event.turn_id && live.turnId === null && this._link.owns(event.id)) live.turnId = event.turn_id;
    return live && event.turn_id && live.turnId === event.turn_id ? live : null;
  }

  /**
   * @param {Live} live
   * @param {WireEvent} event
   */
  _grow(live, event) {
    live.take(event);
    if (event.op === "queued" && live.stopping) this._abort();
  }

  /**
   * @param {Live} live
   * @param {any} end  `end`, or as much of it as is known.
   */
  _finish(live, end) {
    const ending = {
      reason: end.finish_reason,
      usage: end.usage ?? null,
      stats: end.stats ?? null,
      stop: end.stop ?? "",
      warnings: end.warnings ?? [],
      error: null,
    };
    const said = live.content || live.reasoning || live.toolCalls.length > 0;
    batch(() => {
      this._close(live, { answer: said || live.turnId ? live.answer() : null, ending });
      if (end.usage) this.contextTokens.value = end.usage.prompt_tokens + end.usage.completion_tokens;
    });
  }

  /**
   * @param {Live} live
   * @param {WireError} error
   */
  _fail(live, error) {
    const said = live.content || live.reasoning;
    const ending = { reason: "error", usage: null, stats: null, stop: "", warnings: [], error };
    this._close({ ...live, turnId: null }, { answer: said ? live.answer() : null, ending });
  }

  /**
   * @param {{key: string, turnId: string | null, asked: readonly ChatMessage[]}} live
   * @param {Pick<Turn, "answer" | "ending">} outcome
   */
  _close({ key, turnId, asked }, outcome) {
    clearTimeout(this._retry);
    batch(() => {
      const others = this.turns.peek().filter((turn) => turn.turnId === null || turn.turnId !== turnId);
      this.turns.value = [...others, { key, turnId, asked, ...outcome }];
      this.live.value = null;
    });
  }

  /** @param {string} turn  The last one that is left. */
  _rewound(turn) {
    const turns = this.turns.peek();
    const last = turns.findIndex((each) => each.turnId === turn);
    this.turns.value = turns.slice(0, last + 1);
  }

  /** Reads everything anew. */
  _reload() {
    this._position = new Position(null);
    this.state.value = "away";
    this.resume();
  }

  _detached() {
    this._position = new Position(null);
    this._missing = true;
    const live = this.live.peek();
    batch(() => {
      this.state.value = "detached";
      if (live?.turnId) this.live.value = null;
    });
  }

  /** @param {WireError} error */
  _notResumed(error) {
    if (error.code === "session_not_found") {
      this.end();
    } else if (this.state.peek() === "opening") {
      this.state.value = "away";
      this.error.value = error.code === "daemon_unreachable" ? null : error;
      if (error.retryable) this._retry = setTimeout(() => this.resume(), error.retryAfterMs ?? ASK_AGAIN_MS);
    }
  }

  /** @param {WireEvent} event */
  _resumed(event) {
    this._position.resume(event);
    this._missing = false;
    this._replayedAt = event.seq;
    batch(() => {
      this.state.value = "ready";
      this.error.value = null;
      if (!event.resumed) this._restart(event);
      this.known.value = true;
    });
    this._settle();
  }

  /** @param {WireEvent} event  `session_resumed` with all that was said. */
  _restart(event) {
    const live = this.live.peek();
    const { turns, rest } = divide(event.transcript ?? [], event.turns ?? []);
    const answered = new Map(this.turns.peek().map((turn) => [turn.turnId, turn]));
    this.system.value = systemOf(event.transcript ?? []);
    // What this page saw end, it knows more of.
    this.turns.value = turns.map((turn) => ({ ...turn, ending: answered.get(turn.turnId)?.ending ?? turn.ending }));
    const usage = turns.at(-1)?.ending?.usage;
    this.contextTokens.value = usage ? usage.prompt_tokens + usage.completion_tokens : null;
    if (event.turn_id) this._follow(live, rest, event);
    else if (live?.turnId) this._lose(live);
    if (!event.turn_id && rest.length > 0) this.turns.value = [...this.turns.peek(), loose(rest, "rest")];
  }

  /**
   * Goes on with the turn that runs.
   *
   * @param {Live | null} live  What this page thinks runs.
   * @param {readonly ChatMessage[]} asked
   * @param {any} resumed
   */
  _follow(live, asked, resumed) {
    // One that was sent just before the cut may be the one that runs.
    if (live && live.turnId === null && live.asked.at(-1)?.content === asked.at(-1)?.content) {
      live.turnId = resumed.turn_id;
    }
    const running = live?.turnId === resumed.turn_id ? live : new Live({ asked, fields: null, turnId: resumed.turn_id });
    running.replace(resumed);
    this.live.value = running;
  }

  /**
   * The turn ended while nobody listened: as part of the transcript, or without a trace.
   *
   * @param {Live} live
   */
  _lose(live) {
    if (this.turns.peek().some((turn) => turn.turnId === live.turnId)) this.live.value = null;
    else this._fail(live, new WireError({ code: "turn_not_found", message: "The rest of this answer is lost." }));
  }

  /** Asks what is still to be asked once all that was missed is here, and not earlier: it may be answered in there. */
  _settle() {
    if (this._replayedAt === null || this._position.seq < this._replayedAt) return;
    this._replayedAt = null;
    this._infer();
    this._abort();
  }
}
