// @ts-check
/**
 * The connection to the daemon: successive WebSockets, with requests matched to replies by id.
 *
 * The token is sent in an `auth` frame, not as a subprotocol, because a browser does not tell a page why an upgrade was
 * refused, and an invalid token must be distinguished from an unreachable daemon.
 */

import { signal } from "../../vendor/signals-core.js";
import { known, t } from "../i18n.js";
import { outcomeUnknown, WireError } from "./errors.js";

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
    return new WireError({ code: "daemon_unreachable", message: this.reason.peek() || t("link.closed") });
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

/**
 * @typedef {object} Request
 * @property {{op: string, id: string}} frame
 * @property {boolean} sent  On the current socket.
 * @property {(event: WireEvent) => boolean} isInterim  Recognizes events that precede the reply.
 * @property {(event: any) => void} resolve
 * @property {(error: WireError) => void} reject
 */

/** Idempotent requests: they are sent again when their reply was lost with a socket. */
const REPEATABLE = new Set([
  "hello", "ping", "get_session", "list_sessions", "search_sessions", "list_models", "list_mcp_tools", "close_session", "set_metadata", "set_model",
  "unload_model", "status", "metrics", "metrics_history", "subscribe_metrics", "unsubscribe_metrics", "usage", "list_clients",
  "list_accounts", "list_tokens", "list_pulls", "list_nodes", "list_all_sessions", "read_audit", "list_usage",
]);

class Pending {
  constructor() {
    /** @type {Map<string, Request>} */
    this._requests = new Map();
  }

  /** @param {Request} request */
  add(request) {
    this._requests.set(request.frame.id, request);
  }

  /**
   * Passes an event to the request that it answers.
   *
   * @param {WireEvent} event
   */
  answer(event) {
    const request = event.id === undefined ? undefined : this._requests.get(event.id);
    if (!request) return;
    if (event.op !== "error" && request.isInterim(event)) return;
    this._requests.delete(request.frame.id);
    if (event.op === "error") request.reject(new WireError(event));
    else request.resolve(event);
  }

  /**
   * Sends all requests that were not sent on this socket; some were, as it was already open.
   *
   * @param {(frame: {op: string, id: string}) => boolean} send
   */
  sendAll(send) {
    for (const request of this._requests.values()) request.sent ||= send(request.frame);
  }

  /**
   * Rejects requests that were sent and are not idempotent, as their outcome is unknown. The others wait for a socket.
   *
   * @param {(op: string) => WireError} why
   */
  cut(why) {
    this._reject((request) => request.sent && !REPEATABLE.has(request.frame.op), why);
    for (const request of this._requests.values()) request.sent = false;
  }

  /** @param {() => WireError} why */
  end(why) {
    this._reject(() => true, why);
  }

  /**
   * @param {(request: Request) => boolean} which
   * @param {(op: string) => WireError} why
   */
  _reject(which, why) {
    for (const request of [...this._requests.values()].filter(which)) {
      this._requests.delete(request.frame.id);
      request.reject(why(request.frame.op));
    }
  }
}

const MIN_WAIT_MS = 500;
const MAX_WAIT_MS = 30_000;
/** Milliseconds after which a connection counts as stable: its loss restarts the backoff. */
const HEALTHY_AFTER_MS = 10_000;

/**
 * @typedef {object} Verdict
 * @property {boolean} final  Whether another attempt with the same token is useless.
 * @property {number} waitMs  Minimum delay in milliseconds.
 * @property {string} words  Description for the user.
 */

/** @type {ReadonlyMap<number, number>}  Minimum delays by close code, where it is not 0. */
const WAITS_MS = new Map([[1000, 1000], [1001, 1000], [1011, 1000], [1013, 5000], [4429, 10_000]]);
/** The daemon refuses this page. */
const POLICY_VIOLATION = 1008;

/**
 * Returns the meaning of a closed socket.
 *
 * @param {number} code  Close code; 1006 if there was none.
 * @param {string} reason  Close reason, may be empty.
 * @returns {Verdict}
 */
export function verdictOf(code, reason) {
  const final = code === POLICY_VIOLATION;
  const words = known("close", String(code)) ?? t("link.unreachable");
  return { final, waitMs: WAITS_MS.get(code) ?? 0, words: reason && final ? t("link.reason", { words, reason }) : words };
}

/**
 * Returns the delay before an attempt: uniform up to a bound that doubles (full jitter), added to the daemon's minimum.
 *
 * @param {number} attempt  Number of failed attempts, from 0.
 * @param {number} atLeastMs  Minimum given by the daemon.
 * @param {number} chance  Random number from 0 to 1.
 * @returns {number} Milliseconds.
 */
export function waitMs(attempt, atLeastMs, chance) {
  const bound = Math.min(MAX_WAIT_MS, MIN_WAIT_MS * 2 ** Math.min(attempt, 10));
  return Math.round(Math.min(Math.max(MAX_WAIT_MS, atLeastMs), atLeastMs + (0.3 + 0.7 * chance) * bound));
}
