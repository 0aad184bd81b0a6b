// @ts-check
/** Metrics, subscribed to while they are displayed. */

import { signal, useEffect, useState } from "../ui.js";
import { asWireError } from "../wire/errors.js";
import { History } from "./history.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").Requests} Requests */
/** @typedef {{answer: any, fault: string}} Told  The direct reply, null before the first; the error if there is none. */

const EVERY_MS = 1000;

/** What a daemon has reported while it was displayed. */
export class Feed {
  /** @param {Link} link */
  constructor(link) {
    this._link = link;
    this.history = new History();
    /** The last `metrics` event. */
    this.latest = signal(/** @type {import("../wire/types.js").MetricsEvent | null} */ (null));
    /** The last `thermal` event, which is sent only on changes. */
    this.thermal = signal(/** @type {import("../wire/types.js").ThermalEvent | null} */ (null));
    /** Why there are no readings, as text. */
    this.fault = signal("");
    link.on("thermal", (event) => {
      this.thermal.value = event;
    });
  }

  /**
   * Subscribes to readings every second while a component is mounted.
   *
   * @param {boolean} active
   */
  useFollowing(active) {
    useEffect(() => (active ? this.follow() : undefined), [this, active]);
  }

  /**
   * Subscribes to readings every second.
   *
   * @returns {() => void} Unsubscribes.
   */
  follow() {
    const off = this._link.on("metrics", (event) => {
      this.history.add(event);
      this.latest.value = event;
    });
    this._link.send("metrics");
    this._link.request("subscribe_metrics", { interval_ms: EVERY_MS }).then(
      () => {
        this.fault.value = "";
      },
      (error) => {
        this.fault.value = asWireError(error).message;
      },
    );
    return () => {
      off();
      this._link.send("unsubscribe_metrics");
    };
  }
}

/** @type {WeakMap<Link, Feed>} */
const feeds = new WeakMap();

/**
 * Returns a link's feed, which keeps its history while it is not displayed.
 *
 * @param {Link} link
 * @returns {Feed}
 */
export function feedOf(link) {
  const feed = feeds.get(link) ?? new Feed(link);
  feeds.set(link, feed);
  return feed;
}

/**
 * Returns whether the page is visible and its link open, so that requests are useful.
 *
 * @param {Link} link
 * @returns {boolean}
 */
export function useActive(link) {
  const [visible, setVisible] = useState(document.visibilityState !== "hidden");
  useEffect(() => {
    const look = () => setVisible(document.visibilityState !== "hidden");
    document.addEventListener("visibilitychange", look);
    return () => document.removeEventListener("visibilitychange", look);
  }, []);
  return visible && link.state.value === "open";
}

/**
 * Sends a request every few seconds, and returns the last reply.
 *
 * @template {keyof Requests} Op
 * @param {Link} link
 * @param {object} question
 * @param {Op} question.op
 * @param {Omit<Requests[Op], "op" | "id">} [question.fields]
 * @param {number} question.everyMs
 * @param {boolean} question.active  Whether to send requests.
 * @param {number} [question.times]  A change triggers a request at once.
 * @returns {Told}
 */
export function useAnswer(link, { op, fields, everyMs, active, times = 0 }) {
  const [known, setKnown] = useState(/** @type {Told} */ ({ answer: null, fault: "" }));
  useEffect(() => {
    if (!active) return undefined;
    let timer = 0;
    let left = false;
    const ask = async () => {
      try {
        const answer = await link.request(op, fields);
        if (!left) setKnown({ answer, fault: "" });
      } catch (error) {
        if (!left) setKnown(({ answer }) => ({ answer, fault: asWireError(error).message }));
      }
      if (!left) timer = setTimeout(ask, everyMs);
    };
    ask();
    return () => {
      left = true;
      clearTimeout(timer);
    };
  }, [link, op, JSON.stringify(fields), everyMs, active, times]);
  return known;
}
