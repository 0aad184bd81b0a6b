// @ts-check
/**
 * The way to the daemon: one WebSocket after another, with requests by id in between.
 *
 * The token goes into an `auth` frame. As a subprotocol it would do as well, but a browser does not tell a page why an
 * upgrade was refused, and a wrong token has to be told from a daemon that is away.
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

/** One daemon, reached over as many sockets as it takes; `connect` makes one. */
export class Link {
  /** @param {{url: string, token: string}} address */
  constructor({ url, token }) {
    /** @type {import("../../vendor/signals-core.js").Signal<LinkState>} */
    this.state = signal("connecting");
    /** When the next attempt is made, as Date.now() tells; null unless the state is "waiting". */
    this.retryAt = signal(/** @type {number | null} */ (null));
    /** Why the last socket, or the attempt to open one, was lost. */
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
    // Replayed events keep the ids of the frames they answered, which another page may have sent.
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
   * Sends a request and resolves to its direct reply; while there is no socket, waits for one.
   *
   * @template {keyof Requests} Op
   * @param {Op} op
   * @param {Omit<Requests[Op], "op" | "id">} [fields]
   * @param {{isInterim?: (event: WireEvent) => boolean}} [options]  Replies of which `isInterim` is true are not the last.
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
   * Sends a frame if there is a socket; whoever sends it listens for what comes of it.
   *
   * @template {keyof Requests} Op
   * @param {Op} op
   * @param {Omit<Requests[Op], "op">} [fields]  With an `id` of `nextId()`, if one is wanted.
   * @returns {boolean} Whether it was sent.
   */
  send(op, fields) {
    return this.state.peek() === "open" && this._send({ ...fields, op });
  }

  /**
   * Tells whether a frame of this page has that id.
   *
   * @param {string | undefined} id
   */
  owns(id) {
    return id !== undefined && id.startsWith(`${this._name}-`);
  }

  /** Returns an id for a frame that no other has. */
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
   * @returns {() => void} Ends that.
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

  /** Ends it for good. */
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

  /** Leaves the socket there is, without waiting for it: a dead one may take minutes to say so. */
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

  /** @param {WireEvent} event  What comes before the socket may be used. */
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
    // The right token at a bad time is answered alike, but then the daemon closes, and the close code says so.
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

  /** @param {number} withinMs  So long may it be silent before `pong`. */
  _ping(withinMs) {
    clearTimeout(this._timers.ping);
    clearTimeout(this._timers.deadline);
    this._send({ op: "ping", id: this.nextId() });
    this._expect(withinMs, Date.now());
    this._timers.ping = setTimeout(() => this._ping(PONG_WITHIN_MS), PING_EVERY_MS);
  }

  // What was on its way when the socket died arrives after `ping`, too: only silence since then tells.
  /** @param {number} withinMs @param {number} since  When it was last heard of, or asked. */
  _expect(withinMs, since) {
    this._timers.deadline = setTimeout(() => {
      if (this._heardAt <= since) this._lost(1006, "");
      else this._expect(withinMs, this._heardAt);
    }, withinMs - (Date.now() - since));
  }

  /** The network is back or gone, or the page is looked at again: the socket may be dead without knowing it. */
  _woken() {
    if (document.visibilityState === "hidden") return;
    if (this.state.peek() === "waiting") this._open();
    else if (this.state.peek() === "open") this._ping(PROBE_WITHIN_MS);
  }
}

/**
 * Connects to a daemon and stays connected.
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
