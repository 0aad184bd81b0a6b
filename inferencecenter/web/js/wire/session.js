// @ts-check
/** One conversation, across any number of sockets. */

import { batch, signal } from "../../vendor/signals-core.js";
import { t } from "../i18n.js";
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
 * "draft" has no turn and does not exist on the daemon; "away" waits for a socket; the events of a "detached" one go to
 * another page; "gone" is closed, expired, or never existed.
 *
 * @typedef {"draft" | "opening" | "ready" | "away" | "detached" | "gone"} SessionState
 */

/** Temporary refusals of a daemon or engine that has just started. */
const PASSING = new Set(["model_loading", "engine_unavailable"]);
const ASK_AGAIN_MS = 1000;

export class Session {
  /**
   * @param {import("./link.js").Link} link
   * @param {string | null} id  Null for one that is created with its first turn.
   */
  constructor(link, id) {
    this.id = signal(id);
    this.state = signal(/** @type {SessionState} */ (id === null ? "draft" : "away"));
    /** Why it is "gone". */
    this.farewell = signal("");
    this._talk = new Talk();
    this.turns = this._talk.turns;
    this.live = this._talk.live;
    this.results = this._talk.results;
    this.calls = this._talk.calls;
    this.system = this._talk.system;
    this.contextTokens = this._talk.contextTokens;
    this.contextLimit = this._talk.contextLimit;
    this.dropped = this._talk.dropped;
    /** The last error outside a turn. */
    this.error = signal(/** @type {WireError | null} */ (null));
    this.model = signal("");
    /** Effective default parameters of turns; null if unknown. */
    this.params = signal(/** @type {Record<string, unknown> | null} */ (null));
    /** Whether the session has been read completely. */
    this.known = signal(id === null);
    this._link = link;
    this._position = new Position(null);
    this._missing = true;
    /** @type {number | null} */
    this._replayedAt = null;
    this._retry = 0;
  }

  /** Whether a turn or a tool call runs. */
  get running() {
    return this.live.value !== null || Object.values(this.calls.value).some((call) => call.call_state === "running");
  }

  /** Whether a turn may be started now. */
  get idle() {
    return !this.running && (this.state.value === "draft" || this.state.value === "ready");
  }

  /**
   * Starts a turn, after creating the session if it is a draft.
   *
   * @param {readonly ChatMessage[]} asked
   * @param {object} fields  Other fields of `infer`.
   * @param {() => Omit<Requests["create_session"], "op" | "id">} [creation]  Returns the fields of `create_session`.
   */
  async ask(asked, fields, creation = () => ({})) {
    const appended = this.results.peek();
    const sent = asked.filter((message) => !appended.includes(message));
    const live = new Live({ asked, fields: { ...fields, ...question(sent) }, turnId: null });
    batch(() => {
      this.error.value = null;
      this._talk.begin(live);
    });
    while (this.id.peek() === null) {
      try {
        await this._create(creation());
      } catch (error) {
        const why = asWireError(error);
        // A model that cannot be loaded has no time of the next attempt.
        const passes = PASSING.has(why.code) && why.retryAfterMs !== null;
        if (this.live.peek() === live && !passes) this._fail(live, why);
        if (this.live.peek() !== live) return;
        await new Promise((resolve) => setTimeout(resolve, this._waits(live, why)));
        if (this.live.peek() !== live) return;
      }
    }
    this._infer();
  }

  /**
   * Has the daemon run a tool call of the last answer.
   *
   * @param {string} callId
   * @param {string} server
   * @param {string} tool  Its name there.
   */
  async runCall(callId, server, tool) {
    const id = this.id.peek();
    if (id !== null) await this._link.request("call_mcp_tool", { session_id: id, call_id: callId, server, tool });
  }

  /** Aborts the running turn, now or as soon as the connection is restored, or else the running tool calls. */
  stop() {
    const live = this.live.peek();
    if (!live) {
      const id = this.id.peek();
      if (id !== null && this.running) this._link.send("abort", { session_id: id, id: this._link.nextId() });
      return;
    }
    live.stopping = true;
    live.touch();
    if (live.turnId === null && live.phase === "loading") this._finish(live, { finish_reason: "aborted" });
    else this._abort();
  }

  /**
   * Discards the turn at `index` and all later ones; returns its messages.
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

  /**
   * Shows the turns that it shares with another session until its own are read.
   *
   * @param {Session} other
   * @param {number} count  Of turns.
   */
  preview(other, count) {
    batch(() => {
      this.turns.value = other.turns.peek().slice(0, count);
      this.system.value = other.system.peek();
      this.model.value = other.model.peek();
      this.contextLimit.value = other.contextLimit.peek();
      this.known.value = true;
    });
  }

  /** Attaches the session to this page, replaying missed events. */
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

  /** Handles the loss of the socket: events are ignored until `session_resumed`. */
  cut() {
    clearTimeout(this._retry);
    this._missing = true;
    if (this.state.peek() === "ready" || this.state.peek() === "opening") this.state.value = "away";
  }

  /** @param {string} [words]  Why it no longer exists. */
  end(words = t("chat.gone")) {
    if (this.state.peek() === "gone") return;
    clearTimeout(this._retry);
    const live = this.live.peek();
    if (live) this._fail(live, new WireError({ code: "session_not_found", message: t("chat.deleted") }));
    this.farewell.value = words;
    this.state.value = "gone";
  }

  /** Reads the effective default parameters, and how full the context is. */
  async readFacts() {
    const id = this.id.peek();
    if (id === null || this.state.peek() === "gone") return;
    try {
      const facts = await this._link.request("get_session", { session_id: id });
      this.params.value = facts.params;
      if (this.live.peek() === null) this._talk.measure(facts);
    } catch (error) {
      console.info("cannot read the parameters:", asWireError(error).message);
    }
  }

  /**
   * Handles an event that names this session.
   *
   * @param {WireEvent} event
   */
  take(event) {
    if (event.op === "session_resumed") this._resumed(event);
    else if (event.op === "session_detached") this._detached();
    else if (event.op === "model_set") this._setModel(event);
    else if (event.op === "session_closed") this.end(t("chat.deleted_elsewhere"));
    else if ("seq" in event && event.op !== "session") this._takeNumbered(/** @type {Numbered} */ (event));
  }

  /** @param {import("./types.js").ModelSetEvent} event */
  _setModel(event) {
    this.model.value = event.model;
    this._talk.measure(event);
    this.readFacts();
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
      this._talk.measure({ n_ctx: created.n_ctx });
      this.system.value = fields.system ?? "";
      this.state.value = "ready";
    });
  }

  /** Sends the turn, unless the daemon has it; it is sent again with the same key while it may be lost. */
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
   * @param {WireError} error  Why the turn was refused.
   */
  _refused(live, error) {
    if (error.code === "daemon_unreachable" && this._link.state.peek() !== "closed") return; // it is sent again
    if (!PASSING.has(error.code)) {
      this._fail(live, error);
      if (error.code === "session_not_found") this.end();
      return;
    }
    this._retry = setTimeout(() => this._infer(), this._waits(live, error));
  }

  /**
   * Shows why a turn does not start yet; returns the milliseconds until the next attempt.
   *
   * @param {Live} live
   * @param {WireError} error
   */
  _waits(live, error) {
    live.phase = "loading";
    live.notice = error.message;
    live.touch();
    return error.retryAfterMs ?? ASK_AGAIN_MS;
  }

  _abort() {
    const [live, id] = [this.live.peek(), this.id.peek()];
    if (!live?.stopping || live.turnId === null || id === null || this.state.peek() !== "ready") return;
    this._link.send("abort", { session_id: id, turn_id: live.turnId, id: this._link.nextId() });
  }

  /**
   * Returns whether an event is new; requests the replay of missing events before it.
   *
   * @param {Numbered} event
   */
  _counts(event) {
    if (this._missing) return false;
    const arrival = this._position.admit(event);
    if (this._link.owns(event.id) && arrival !== "next") {
      // The end of a turn that is requested again has its old number.
      this._position.note(event.seq);
      return true;
    }
    if (arrival === "gap") this.resume();
    return arrival === "next";
  }

  /** @param {Numbered} event  A new one. */
  _hear(event) {
    if (event.op === "session_expired") this.end(t("chat.expired"));
    else if (event.op === "session_rewound") this._talk.rewind(event.turn);
    else if (event.op === "appended") this._reload();
    else if (event.op === "mcp_call") this._talk.takeCall(event);
    else if ("turn_id" in event) this._hearTurn(event);
  }

  /** @param {Numbered & {turn_id?: string}} event  An event of a turn. */
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
    // Its usage counts every prompt that was processed for it.
    if (live.shifted > 0 || this.dropped.peek() > 0) this.readFacts();
  }

  /**
   * @param {Live} live
   * @param {WireError} error
   */
  _fail(live, error) {
    clearTimeout(this._retry);
    this._talk.fail(live, error);
  }

  /** Reads everything again. */
  _reload() {
    this._position = new Position(null);
    this.state.value = "away";
    this.resume();
  }

  /** Another page receives the events from now on; the content stays visible. */
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

  /** Sends a pending turn only after all missed events have arrived: they may contain its answer. */
  _settle() {
    if (this._replayedAt === null || this._position.seq < this._replayedAt) return;
    this._replayedAt = null;
    this._infer();
    this._abort();
  }
}
