// @ts-check
/**
 * The connection to the daemon: successive WebSockets, with requests matched to replies by id.
 *
 * The token is sent in an `auth` frame, not as a subprotocol, because a browser does not tell a page why an upgrade was
 * refused, and an invalid token must be distinguished from an unreachable daemon.
 */

import { signal } from "../../vendor/signals-core.js";
import { HEALTHY_AFTER_MS, verdictOf, waitMs } from "./backoff.js";
import { WireError, outcomeUnknown } from "./errors.js";
import { Pending } from "./pending.js";

/** @typedef {import("./types.js").AnyEvent} WireEvent */
/** @typedef {import("./types.js").Requests} Requests */
/** @typedef {import("./types.js").Events & {"*": WireEvent}} Events */
/** @typedef {"connecting" | "open" | "waiting" | "refused" | "closed"} LinkState */

const SUBPROTOCOL = "inferencecenter.v1";
const PING_EVERY_MS = 20_000;
const PONG_WITHIN_MS = 10_000;
const PROBE_WITHIN_MS = 4_000;
const OPEN_WITHIN_MS = 15_000;
const LAST_WORD_MS = 300;

/** A connection to one daemon over successive sockets; made by `connect`. */
export class Link {
  /** @param {{url: string, token: string}} address */
  constructor({ url, token }) {
    /** @type {import("../../vendor/signals-core.js").Signal<LinkState>} */
    this.state = signal("connecting");
    /** Time of the next attempt, as Date.now(); null unless the state is "waiting". */
    this.retryAt = signal(/** @type {number | null} */ (null));
    /** Why the last socket, or the attempt to open one, failed. */
    this.reason = signal("");
    /** Whether a socket was ever open. */
    this.everOpen = false;
    this._url = url;
    this._token = token;
    /** @type {WebSocket | null} */
    this._socket = null;
    this._attempt = 0;
    this._openedAt = 0;
    this._heardAt = 0;
    this._count = 0;
    // Replayed events keep the ids of the frames they answered, possibly frames of another page.
    this._name = Math.random().toString(36).slice(2, 8);
    this._pending = new Pending();
    /** @type {Map<string, Set<(event: any) => void>>} */
    this._listeners = new Map();
    this._timers = { retry: 0, ping: 0, deadline: 0 };
    this._wake = () => this._woken();
    addEventListener("online", this._wake);
    addEventListener("offline", this._wake);
    document.addEventListener("visibilitychange", this._wake);
    this._open();
  }

  /**
   * Sends a request and resolves to its direct reply; waits while there is no socket.
   *
   * @template {keyof Requests} Op
   * @param {Op} op
   * @param {Omit<Requests[Op], "op" | "id">} [fields]
   * @param {{isInterim?: (event: WireEvent) => boolean}} [options]  `isInterim` recognizes events that precede the reply.
   * @returns {Promise<any>} Rejects with a WireError.
   */
  request(op, fields, { isInterim = () => false } = {}) {
    const frame = { ...fields, op, id: this.nextId() };
    return new Promise((resolve, reject) => {
      if (this._over()) {
        reject(this._unreachable());
        return;
      }
      const sent = this.state.peek() === "open" && this._send(frame);
      this._pending.add({ frame, sent, isInterim, resolve, reject });
    });
  }

  /**
   * Sends a frame if there is a socket; the caller handles its replies.
   *
   * @template {keyof Requests} Op
   * @param {Op} op
   * @param {Omit<Requests[Op], "op">} [fields]  With an `id` from `nextId()`, if needed.
   * @returns {boolean} Whether it was sent.
   */
  send(op, fields) {
    return this.state.peek() === "open" && this._send({ ...fields, op });
  }

  /**
   * Returns whether an id belongs to a frame of this page.
   *
   * @param {string | undefined} id
   */
  owns(id) {
    return id !== undefined && id.startsWith(`${this._name}-`);
  }

  /** Returns a unique id for a frame. */
  nextId() {
    this._count += 1;
    return `${this._name}-${this._count}`;
  }

  /**
   * Calls `listener` with each event of an op, or of all with "*".
   *
   * @template {keyof Events} Op
   * @param {Op} op
   * @param {(event: Events[Op]) => void} listener
   * @returns {() => void} Unsubscribes.
   */
  on(op, listener) {
    const listeners = this._listeners.get(op) ?? new Set();
    this._listeners.set(op, listeners.add(listener));
    return () => listeners.delete(listener);
  }

  /** Makes the next attempt now. */
  retryNow() {
    if (this.state.peek() === "waiting") this._open();
  }

  /** Closes the connection for good. */
  close() {
    this._end("closed", "");
  }

  _over() {
    return this.state.peek() === "refused" || this.state.peek() === "closed";
  }

  _unreachable() {
    return new WireError({ code: "daemon_unreachable", message: this.reason.peek() || "The connection is closed." });
  }

  _open() {
    this._drop();
    this.retryAt.value = null;
    this.state.value = "connecting";
    this._heardAt = Date.now();
    this._timers.deadline = setTimeout(() => this._lost(1006, ""), OPEN_WITHIN_MS);
    const socket = new WebSocket(this._url, [SUBPROTOCOL]);
    this._socket = socket;
    socket.onmessage = (message) => this._take(String(message.data));
    socket.onclose = (event) => this._lost(event.code, event.reason);
  }

  /** Abandons the socket without waiting for its close, which can take minutes on a dead connection. */
  _drop() {
    for (const timer of Object.values(this._timers)) clearTimeout(timer);
    const socket = this._socket;
    this._socket = null;
    if (!socket) return;
    socket.onmessage = null;
    socket.onclose = null;
    socket.close();
  }

  /** @param {object} frame */
  _send(frame) {
    if (this._socket?.readyState !== WebSocket.OPEN) return false;
    this._socket.send(JSON.stringify(frame));
    return true;
  }

  /** @param {string} text */
  _take(text) {
    this._heardAt = Date.now();
    const event = parse(text);
    if (!event) return;
    if (this.state.peek() === "connecting") this._enter(event);
    else if (event.op === "pong") clearTimeout(this._timers.deadline);
    for (const op of [event.op, "*"]) {
      for (const listener of [...(this._listeners.get(op) ?? [])]) listener(event);
    }
    this._pending.answer(event);
  }

  /** @param {WireEvent} event  An event before authentication completes. */
  _enter(event) {
    if (event.op === "hello") {
      this._send({ op: "auth", token: this._token, protocol: 1, id: this.nextId() });
    } else if (event.op === "auth_success") {
      clearTimeout(this._timers.deadline);
      this._openedAt = Date.now();
      this.everOpen = true;
      this.reason.value = "";
      this.state.value = "open";
      this._timers.ping = setTimeout(() => this._ping(PONG_WITHIN_MS), PING_EVERY_MS);
      this._pending.sendAll((frame) => this._send(frame));
    } else if (event.op === "auth_failed" || event.op === "error") {
      this._notLetIn(event);
    }
  }

  /** @param {import("./types.js").AuthFailedEvent | import("./types.js").ErrorEvent} event */
  _notLetIn(event) {
    const reason = event.op === "error" ? event.message : event.reason;
    if (event.retry_after_ms !== undefined || (event.op === "error" && event.retryable)) {
      this._wait(event.retry_after_ms ?? 0, reason);
      return;
    }
    // A valid token at a bad time gets the same reply, but then the daemon closes with a distinct code.
    clearTimeout(this._timers.deadline);
    this._timers.deadline = setTimeout(() => this._end("refused", reason), LAST_WORD_MS);
  }

  /**
   * @param {number} code
   * @param {string} reason
   */
  _lost(code, reason) {
    const verdict = verdictOf(code, reason);
    if (this._openedAt && Date.now() - this._openedAt > HEALTHY_AFTER_MS) this._attempt = 0;
    this._openedAt = 0;
    if (verdict.final) this._end("refused", verdict.words);
    else this._wait(verdict.waitMs, verdict.words);
  }

  /**
   * @param {number} atLeastMs
   * @param {string} reason
   */
  _wait(atLeastMs, reason) {
    this._drop();
    const wait = waitMs(this._attempt, atLeastMs, Math.random());
    this._attempt += 1;
    this._timers.retry = setTimeout(() => this._open(), wait);
    this.reason.value = reason;
    this.retryAt.value = Date.now() + wait;
    this.state.value = "waiting";
    this._pending.cut(outcomeUnknown);
  }

  /**
   * @param {"refused" | "closed"} state
   * @param {string} reason
   */
  _end(state, reason) {
    this._drop();
    removeEventListener("online", this._wake);
    removeEventListener("offline", this._wake);
    document.removeEventListener("visibilitychange", this._wake);
    this.reason.value = reason;
    this.retryAt.value = null;
    this.state.value = state;
    this._pending.end(() => this._unreachable());
  }

  /** @param {number} withinMs  Timeout for `pong`. */
  _ping(withinMs) {
    clearTimeout(this._timers.ping);
    clearTimeout(this._timers.deadline);
    this._send({ op: "ping", id: this.nextId() });
    this._expect(withinMs, Date.now());
    this._timers.ping = setTimeout(() => this._ping(PONG_WITHIN_MS), PING_EVERY_MS);
  }

  // Data that was in flight when the socket died arrives after `ping`, too: only silence since then counts.
  /** @param {number} withinMs @param {number} since  Time of the last data or `ping`. */
  _expect(withinMs, since) {
    this._timers.deadline = setTimeout(() => {
      if (this._heardAt <= since) this._lost(1006, "");
      else this._expect(withinMs, this._heardAt);
    }, withinMs - (Date.now() - since));
  }

  /** The network state or visibility changed: the socket may be dead without a close event. */
  _woken() {
    if (document.visibilityState === "hidden") return;
    if (this.state.peek() === "waiting") this._open();
    else if (this.state.peek() === "open") this._ping(PROBE_WITHIN_MS);
  }
}

/**
 * Connects to a daemon, and reconnects as needed.
 *
 * @param {{url: string, token: string}} address  `url` is the WebSocket's.
 * @returns {Link}
 */
export function connect(address) {
  return new Link(address);
}

/**
 * @param {string} text
 * @returns {WireEvent | null}
 */
function parse(text) {
  try {
    const event = JSON.parse(text);
    return event && typeof event.op === "string" ? event : null;
  } catch {
    return null; // not from the daemon
  }
}
