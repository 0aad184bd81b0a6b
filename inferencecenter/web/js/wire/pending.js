// @ts-check
/** Requests in flight. */

import { WireError } from "./errors.js";

/**
 * @typedef {import("./types.js").AnyEvent} WireEvent
 *
 * @typedef {object} Request
 * @property {{op: string, id: string}} frame
 * @property {boolean} sent  On the current socket.
 * @property {(event: WireEvent) => boolean} isInterim  Recognizes events that precede the reply.
 * @property {(event: any) => void} resolve
 * @property {(error: WireError) => void} reject
 */

/** Idempotent requests: they are sent again when their reply was lost with a socket. */
const REPEATABLE = new Set([
  "hello", "ping", "get_session", "list_sessions", "list_models", "close_session", "set_metadata", "unload_model",
  "status", "metrics", "subscribe_metrics", "unsubscribe_metrics", "usage", "list_clients",
]);

export class Pending {
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
