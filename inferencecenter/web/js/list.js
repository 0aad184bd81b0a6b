// @ts-check
/** The list of the client's conversations as known to this page; other tabs and devices change it, too. */

import { batch, computed, signal } from "../vendor/signals-core.js";
import { t } from "./i18n.js";
import { attempt, link } from "./state.js";
import { keep, kept } from "./storage.js";
import { versionsOf } from "./versions.js";
import { asWireError } from "./wire/errors.js";

/** @typedef {import("./wire/types.js").SessionSummary} Summary */

/** The client's sessions, most recently used first; null until read. */
export const sessions = signal(/** @type {readonly Summary[] | null} */ (null));

/** How much of its limits the client uses, as last read. */
export const usage = signal(/** @type {import("./wire/types.js").SessionUsage | null} */ (null));

/** Whether further conversations are refused until some are deleted. */
export const full = computed(() => usage.value !== null && usage.value.stored_chars >= usage.value.max_stored_chars);

/** Sessions with an answer that ended while they were not shown. */
export const unread = signal(/** @type {ReadonlySet<string>} */ (new Set(kept("unread", []))));

const LIST_LIMIT = 1000;
/** Of the page that is read first: it fills the view, and has what changed since the list was read. */
const RECENT_LIMIT = 100;
/** Whether the whole list was read, and events have told of changes since. */
let isComplete = false;

/** Reads the whole list again, because events were missed. */
export function missEvents() {
  isComplete = false;
}

/**
 * Reads the list again; returns whether that succeeded.
 *
 * The conversations used last come first. The others follow where they are not known yet, or may have changed.
 *
 * @param {import("./wire/link.js").Link} there
 */
export async function readList(there) {
  try {
    /** @type {import("./wire/types.js").SessionsEvent} */
    const recent = await there.request("list_sessions", { limit: RECENT_LIMIT, order: "recent" });
    const known = sessions.peek() ?? [];
    const merged = recent.next === undefined ? recent.sessions : withRecent(known, recent.sessions);
    const isWhole = recent.next === undefined || (isComplete && reachesKnown(merged, known, recent));
    setList(merged, recent.session_usage);
    if (!isWhole) setList(await readAll(there), recent.session_usage);
    isComplete = true;
    for (const id of unread.peek()) if (!summaryOf(id)) mark(id, false);
    return true;
  } catch (error) {
    // It is read again when the list is shown next, or the connection is restored.
    console.info("cannot read the list of sessions:", asWireError(error).message);
    return false;
  }
}

/**
 * Returns all sessions, by creation: in this order none is passed over because it is used meanwhile.
 *
 * @param {import("./wire/link.js").Link} there
 */
async function readAll(there) {
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
  return found;
}

/**
 * @param {readonly Summary[]} known
 * @param {readonly Summary[]} recent
 */
function withRecent(known, recent) {
  const ids = new Set(recent.map((each) => each.session_id));
  return [...recent, ...known.filter((each) => !ids.has(each.session_id))];
}

/**
 * Returns whether the known sessions with the recently used ones are all, as they are: none is missing or too many, and
 * the recently used ones reach back to one that has not changed.
 *
 * @param {readonly Summary[]} merged
 * @param {readonly Summary[]} known
 * @param {import("./wire/types.js").SessionsEvent} recent
 */
function reachesKnown(merged, known, { sessions: read, session_usage: used }) {
  const last = read.at(-1);
  const before = known.find((each) => each.session_id === last?.session_id);
  return used !== undefined && merged.length === used.live + used.archived && before?.last_used_at === last?.last_used_at;
}

/**
 * @param {readonly Summary[]} list
 * @param {import("./wire/types.js").SessionUsage} [used]
 */
function setList(list, used) {
  batch(() => {
    sessions.value = latestFirst(list);
    usage.value = used ?? null;
  });
}

/** Reads how much of its limits the client uses. */
export async function readUsage() {
  try {
    const page = await link.peek()?.request("list_sessions", { limit: 1 });
    if (page) usage.value = page.session_usage ?? null;
  } catch (error) {
    console.info("cannot read the limits of sessions:", asWireError(error).message);
  }
}

/**
 * Gives a conversation a title, in all its versions.
 *
 * @param {string} id
 * @param {string} title
 */
export async function rename(id, title) {
  const versions = versionsOf(sessions.peek(), id).map((each) => each.session_id);
  for (const session_id of versions.length > 0 ? versions : [id]) {
    const metadata = { ...summaryOf(session_id)?.metadata, title: title.slice(0, 200) };
    change(session_id, { metadata });
    await attempt((there) => there.request("set_metadata", { session_id, metadata }));
  }
}

/**
 * Returns the name of a session's model, "" if unknown.
 *
 * @param {string | null} id
 */
export function modelOfSession(id) {
  return sessions.value?.find((each) => each.session_id === id)?.model ?? "";
}

/**
 * Returns the title of a session.
 *
 * @param {string | null} id
 */
export function titleOfSession(id) {
  if (id === null) return t("chat.new");
  return sessions.value?.find((each) => each.session_id === id)?.metadata.title || t("chat.untitled");
}

/**
 * Records the title of a session; one that is not in the list is new.
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
      metadata, archived: false,
    };
    sessions.value = [summary, ...(sessions.peek() ?? [])];
    readUsage();
  }
}

/**
 * @param {string} id
 * @param {string} model  That it has from now on.
 */
export function noteModel(id, model) {
  change(id, { model });
}

/** @param {string} id  Of a session whose turn has ended, or was just requested. */
export function touch(id) {
  change(id, { last_used_at: Date.now() / 1000, state: "idle" });
}

/**
 * @param {string} id
 * @param {boolean} isUnread
 */
export function mark(id, isUnread) {
  if (unread.peek().has(id) === isUnread) return;
  const marked = new Set(unread.peek());
  if (isUnread) marked.add(id);
  else marked.delete(id);
  unread.value = marked;
  keep("unread", [...marked]);
}

/** @param {string} id  Of a session that no longer exists. */
export function strike(id) {
  mark(id, false);
  if (!summaryOf(id)) return;
  sessions.value = (sessions.peek() ?? []).filter((each) => each.session_id !== id);
  readUsage();
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
