// @ts-check
/** One conversation, from its first question on, across any number of sockets. */

import { batch, signal } from "../../vendor/signals-core.js";
import { WireError, asWireError } from "./errors.js";
import { Live } from "./live.js";
import { Position } from "./position.js";
import { Talk } from "./talk.js";
import { before, question } from "./transcript.js";

/**
 * @typedef {import("./types.js").AnyEvent} WireEvent
 * @typedef {import("./types.js").ChatMessage} ChatMessage
 * @typedef {import("./types.js").Requests} Requests
 * @typedef {import("./position.js").Numbered} Numbered
 */

/**
 * "draft" has not been asked anything and is not known to the daemon; "away" waits for a socket; of a "detached" one
 * another page has the events; "gone" is closed, expired, or was never there.
 *
 * @typedef {"draft" | "opening" | "ready" | "away" | "detached" | "gone"} SessionState
 */

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
    /** Why it is "gone", in words. */
    this.farewell = signal("");
    this._talk = new Talk();
    this.turns = this._talk.turns;
    this.live = this._talk.live;
    this.system = this._talk.system;
    this.contextTokens = this._talk.contextTokens;
    /** What went wrong last, other than in a turn. */
    this.error = signal(/** @type {WireError | null} */ (null));
    this.model = signal("");
    /** What holds for turns that choose nothing else; null where the daemon was not asked. */
    this.params = signal(/** @type {Record<string, unknown> | null} */ (null));
    /** Whether everything there was to know is here. */
    this.known = signal(id === null);
    this._link = link;
    this._position = new Position(null);
    this._missing = true;
    /** @type {number | null} */
    this._replayedAt = null;
    this._retry = 0;
  }

  /** Whether something else may be asked now. */
  get idle() {
    return this.live.value === null && (this.state.value === "draft" || this.state.value === "ready");
  }

  /**
   * Asks, after creating the session if it is a draft.
   *
   * @param {readonly ChatMessage[]} asked
   * @param {object} fields  Others of `infer`.
   * @param {() => Omit<Requests["create_session"], "op" | "id">} [creation]  Returns the fields of `create_session`.
   */
  async ask(asked, fields, creation = () => ({})) {
    const live = new Live({ asked, fields: { ...fields, ...question(asked) }, turnId: null });
    batch(() => {
      this.error.value = null;
      this._talk.begin(live);
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
    const [id, turn] = [this.id.peek(), before(turns, index)];
    const asked = turns[index].asked;
    if (turns[index].turnId !== null && id !== null && turn !== null) {
      await this._link.request("rewind_session", { session_id: id, turn });
    }
    this.turns.value = turns.slice(0, index);
    return asked;
  }

  /** Has the session's events come to this page, those first that it missed. */
  async resume() {
    const id = this.id.peek();
    if (id === null || this.state.peek() === "opening" || this._link.state.peek() !== "open") return;
    this.state.value = "opening";
    this._missing = true;
    try {
      await this._link.request("resume_session", { session_id: id, ...this._position.fields() });
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

  /** @param {string} [words]  Why it is no more. */
  end(words = "This conversation was deleted, or it expired.") {
    if (this.state.peek() === "gone") return;
    clearTimeout(this._retry);
    const live = this.live.peek();
    if (live) this._fail(live, new WireError({ code: "session_not_found", message: "The conversation was deleted." }));
    this.farewell.value = words;
    this.state.value = "gone";
  }

  /** Asks what holds for turns that choose nothing else, and shows it in `params`. */
  async readParams() {
    const id = this.id.peek();
    if (id === null || this.state.peek() === "gone") return;
    try {
      this.params.value = (await this._link.request("get_session", { session_id: id })).params;
    } catch (error) {
      console.info("the parameters were not read:", asWireError(error).message);
    }
  }

  /**
   * Takes an event that names this session.
   *
   * @param {WireEvent} event
   */
  take(event) {
    if (event.op === "session_resumed") this._resumed(event);
    else if (event.op === "session_detached") this._detached();
    else if (event.op === "session_closed") this.end("This conversation was deleted elsewhere.");
    else if ("seq" in event && event.op !== "session") this._takeNumbered(/** @type {Numbered} */ (event));
  }

  /** @param {Numbered} event */
  _takeNumbered(event) {
    if (!this._counts(event)) return;
    this._hear(event);
    this._settle();
  }

  /** @param {Omit<Requests["create_session"], "op" | "id">} fields */
  async _create(fields) {
    const created = await this._link.request("create_session", fields);
    this._position = new Position(created.epoch);
    this._missing = false;
    batch(() => {
      this.id.value = created.session_id;
      this.model.value = created.model;
      this.params.value = created.params;
      this.system.value = fields.system ?? "";
      this.state.value = "ready";
    });
  }

  /** Sends the question, unless the daemon has it; it is sent again with the same key for as long as it may be lost. */
  async _infer() {
    const [live, id] = [this.live.peek(), this.id.peek()];
    if (!live?.fields || live.turnId !== null || id === null || this.state.peek() !== "ready") return;
    try {
      await this._link.request("infer", { session_id: id, ...live.fields });
    } catch (error) {
      if (this.live.peek() === live && live.turnId === null) this._refused(live, asWireError(error));
    }
  }

  /**
   * @param {Live} live
   * @param {WireError} error  Why its question was not taken.
   */
  _refused(live, error) {
    if (error.code === "daemon_unreachable" && this._link.state.peek() !== "closed") return; // it is sent again
    if (!PASSING.has(error.code)) {
      this._fail(live, error);
      if (error.code === "session_not_found") this.end();
      return;
    }
    live.phase = "loading";
    live.notice = error.message;
    live.touch();
    this._retry = setTimeout(() => this._infer(), error.retryAfterMs ?? ASK_AGAIN_MS);
  }

  _abort() {
    const [live, id] = [this.live.peek(), this.id.peek()];
    if (!live?.stopping || live.turnId === null || id === null || this.state.peek() !== "ready") return;
    this._link.send("abort", { session_id: id, turn_id: live.turnId, id: this._link.nextId() });
  }

  /**
   * Returns whether an event is new; if others are missing before it, has them sent.
   *
   * @param {Numbered} event
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

  /** @param {Numbered} event  A new one. */
  _hear(event) {
    if (event.op === "session_expired") this.end("This conversation was not used for a long time, and has expired.");
    else if (event.op === "session_rewound") this._talk.rewind(event.turn);
    else if (event.op === "appended") this._reload();
    else if ("turn_id" in event) this._hearTurn(event);
  }

  /** @param {Numbered & {turn_id?: string}} event  Of some turn. */
  _hearTurn(event) {
    const live = this.live.peek();
    if (live?.turnId === null && this._link.owns(event.id)) live.turnId = event.turn_id ?? null;
    if (!live || !event.turn_id || live.turnId !== event.turn_id) return;
    if (event.op === "end") this._finish(live, event);
    else if (event.op === "error") this._fail(live, new WireError(event));
    else live.take(/** @type {import("./live.js").TurnEvent} */ (event));
    if (event.op === "queued") this._abort();
  }

  /**
   * @param {Live} live
   * @param {Parameters<Talk["finish"]>[1]} end
   */
  _finish(live, end) {
    clearTimeout(this._retry);
    this._talk.finish(live, end);
  }

  /**
   * @param {Live} live
   * @param {WireError} error
   */
  _fail(live, error) {
    clearTimeout(this._retry);
    this._talk.fail(live, error);
  }

  /** Reads everything anew. */
  _reload() {
    this._position = new Position(null);
    this.state.value = "away";
    this.resume();
  }

  /** Another page has the events from now on; what is shown stays as it was. */
  _detached() {
    this._position = new Position(null);
    this._missing = true;
    this.state.value = "detached";
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

  /** @param {import("./types.js").SessionResumedEvent} event */
  _resumed(event) {
    this._position.resume(event);
    this._missing = false;
    this._replayedAt = event.seq;
    batch(() => {
      this.state.value = "ready";
      this.error.value = null;
      if (!event.resumed) this._talk.restore(event);
      this.known.value = true;
    });
    this._settle();
  }

  /** Asks what is still to be asked once all that was missed is here, and not earlier: it may be answered in there. */
  _settle() {
    if (this._replayedAt === null || this._position.seq < this._replayedAt) return;
    this._replayedAt = null;
    this._infer();
    this._abort();
  }
}
