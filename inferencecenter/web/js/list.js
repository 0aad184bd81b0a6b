// @ts-check
/** The list of the client's conversations, as far as this page knows it: other tabs and devices change it, too. */

import { signal } from "../vendor/signals-core.js";
import { attempt } from "./state.js";
import { asWireError } from "./wire/errors.js";

/** @typedef {import("./wire/types.js").SessionSummary} Summary */

/** The client's sessions, the one used last first; null until they were read. */
export const sessions = signal(/** @type {readonly Summary[] | null} */ (null));

const LIST_LIMIT = 1000;

/**
 * Reads the list anew; returns whether that was possible.
 *
 * @param {import("./wire/link.js").Link} there
 */
export async function readList(there) {
  try {
    /** @type {Summary[]} */
    const found = [];
    /** @type {string | undefined} */
    let after;
    do {
      /** @type {import("./wire/types.js").SessionsEvent} */
      const page = await there.request("list_sessions", { limit: LIST_LIMIT, ...(after && { after }) });
      found.push(...page.sessions);
      after = page.next;
    } while (after);
    sessions.value = latestFirst(found);
    return true;
  } catch (error) {
    // The next time the list is looked at, or the connection is back, it is read again.
    console.info("the list of sessions was not read:", asWireError(error).message);
    return false;
  }
}

/**
 * @param {string} id
 * @param {string} title
 */
export async function rename(id, title) {
  const metadata = { ...summaryOf(id)?.metadata, title: title.slice(0, 200) };
  change(id, { metadata });
  await attempt((there) => there.request("set_metadata", { session_id: id, metadata }));
}

/**
 * Returns the title of a session.
 *
 * @param {string | null} id
 */
export function titleOfSession(id) {
  if (id === null) return "New chat";
  return sessions.value?.find((each) => each.session_id === id)?.metadata.title || "Untitled";
}

/**
 * Takes note of what a session is called; one that was not in the list has just begun.
 *
 * @param {string} id
 * @param {Record<string, string>} metadata
 * @param {string} [model]
 */
export function enlist(id, metadata, model = "") {
  if (summaryOf(id)) {
    change(id, { metadata });
  } else if (sessions.peek()) {
    const now = Date.now() / 1000;
    /** @type {Summary} */
    const summary = {
      session_id: id, state: "idle", mode: "chat", model, messages: 0, tokens: 0, created_at: now, last_used_at: now,
      metadata,
    };
    sessions.value = [summary, ...(sessions.peek() ?? [])];
  }
}

/** @param {string} id  It was used just now. */
export function touch(id) {
  change(id, { last_used_at: Date.now() / 1000 });
}

/** @param {string} id  It is no more. */
export function strike(id) {
  if (summaryOf(id)) sessions.value = (sessions.peek() ?? []).filter((each) => each.session_id !== id);
}

/** @param {string} id */
function summaryOf(id) {
  return sessions.peek()?.find((each) => each.session_id === id);
}

/**
 * @param {string} id
 * @param {Partial<Summary>} with_
 */
function change(id, with_) {
  const list = sessions.peek();
  if (list) sessions.value = latestFirst(list.map((each) => (each.session_id === id ? { ...each, ...with_ } : each)));
}

/** @param {readonly Summary[]} list */
function latestFirst(list) {
  return list.toSorted((a, b) => b.last_used_at - a.last_used_at);
}
