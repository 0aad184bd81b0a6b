// @ts-check
/** What all views share: the connection, who is signed in, the conversations, the preferences. */

import { batch, effect, signal } from "../vendor/signals-core.js";
import { choicesOf, dropAllChoices, dropChoices, keepChoices, turnFields } from "./choices.js";
import { keep, keepToken, kept } from "./storage.js";
import { asWireError } from "./wire/errors.js";
import { connect } from "./wire/link.js";
import { Session } from "./wire/session.js";
import { titleOf } from "./wire/transcript.js";

/**
 * @typedef {import("./wire/link.js").WireEvent} WireEvent
 * @typedef {"chat" | "dashboard" | "models"} View
 * @typedef {{theme: "system" | "light" | "dark"}} Preferences
 * @typedef {import("./wire/types.js").SessionSummary} Summary
 * @typedef {Pick<import("./wire/types.js").Events, "engine" | "thermal" | "going_away" | "model_changed">} Notices
 */

/** @type {import("../vendor/signals-core.js").Signal<import("./wire/link.js").Link | null>} */
export const link = signal(null);
/** `auth_success`, or null before. */
export const account = signal(/** @type {import("./wire/types.js").AuthSuccessEvent | null} */ (null));
/** `hello` of the last socket. */
export const hello = signal(/** @type {import("./wire/types.js").HelloEvent | null} */ (null));
/** The client's sessions, the one used last first; null until they were read. */
export const sessions = signal(/** @type {readonly Summary[] | null} */ (null));
/** The conversation that is shown. */
export const current = signal(/** @type {Session | null} */ (null));
export const view = signal(/** @type {View} */ ("chat"));
export const preferences = signal(kept("preferences", /** @type {Preferences} */ ({ theme: "system" })));
/** What the daemon told everybody last, by op: `engine`, `thermal`, `going_away`, `model_changed`. */
export const notices = signal(/** @type {Readonly<Partial<Notices>>} */ ({}));
/** Why nobody is signed in, where there is something to say. */
export const signInError = signal("");
/** What could not be done, to be shown until it is dismissed. */
export const failure = signal(/** @type {import("./wire/errors.js").WireError | null} */ (null));

/** @type {Map<string, Session>} */
const open = new Map();
const NOTICES = new Set(["engine", "thermal", "going_away", "model_changed"]);
const LIST_LIMIT = 1000;

effect(() => keep("preferences", preferences.value));

/**
 * Connects with a token; whether it is right shows in `account` or `signInError`.
 *
 * @param {string} token
 */
export function signIn(token) {
  link.peek()?.close();
  const made = connect({ url: socketUrl(), token });
  made.on("hello", (event) => (hello.value = event));
  made.on("auth_success", (event) => {
    keepToken(token);
    account.value = event;
  });
  made.on("*", take);
  batch(() => {
    signInError.value = "";
    link.value = made;
  });
  made.state.subscribe((state) => follow(made, state));
}

/** Forgets the token, all that came with it, and what was written for it. */
export function signOut(why = "") {
  keepToken(null);
  dropAllChoices();
  link.peek()?.close();
  open.clear();
  batch(() => {
    link.value = null;
    account.value = null;
    sessions.value = null;
    current.value = null;
    notices.value = {};
    signInError.value = why;
  });
}

/** Sees to what may have changed while nobody looked: the list of sessions, and the one that is shown. */
export function lookAgain() {
  if (document.hidden || link.peek()?.state.peek() !== "open") return;
  refreshSessions();
  if (current.peek()?.state.peek() === "away") current.peek()?.resume();
}

/** Reads the list of sessions anew. */
export async function refreshSessions() {
  const there = link.peek();
  if (!there) return;
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
    sessions.value = found.toSorted((a, b) => b.last_used_at - a.last_used_at);
    const id = current.peek()?.id.peek();
    // It was closed elsewhere: only who closes a session hears of it.
    if (id && !found.some((each) => each.session_id === id)) current.peek()?.end();
  } catch (error) {
    // The next time the list is looked at, or the connection is back, it is read again.
    console.info("the list of sessions was not read:", asWireError(error).message);
  }
}

/** Shows an empty conversation. */
export function newChat() {
  const there = link.peek();
  if (!there) return;
  show(new Session(there, null));
}

/**
 * Shows a session, after reading it if that was not done yet.
 *
 * @param {string} id
 */
export function openSession(id) {
  const there = link.peek();
  if (!there) return;
  const session = open.get(id) ?? new Session(there, id);
  open.set(id, session);
  show(session);
  if (session.state.peek() === "away") session.resume();
}

/**
 * Asks in the conversation that is shown; returns whether what was chosen for it allows that.
 *
 * @param {string} text
 */
export function ask(text) {
  const session = current.peek();
  if (!session) return false;
  try {
    turnFields(choicesOf(session.id.peek()));
  } catch (error) {
    failure.value = asWireError(error);
    return false;
  }
  attempt(() => askAgain(session, [{ role: "user", content: text }]));
  return true;
}

/** Ends the answer that is being given in the conversation that is shown; returns whether there was one. */
export function stopStreaming() {
  const session = current.peek();
  if (view.peek() !== "chat" || !session?.live.peek()) return false;
  session.stop();
  return true;
}

/**
 * Asks messages in a session, with what was chosen for it.
 *
 * @param {Session} session
 * @param {readonly import("./wire/transcript.js").ChatMessage[]} asked
 */
export async function askAgain(session, asked) {
  const chosen = choicesOf(session.id.peek());
  const title = titleOf(asked.at(-1)?.content ?? "");
  const draft = session.id.peek() === null;
  await session.ask(asked, turnFields(chosen), () => ({
    metadata: { title },
    ...(chosen.system.trim() && { system: chosen.system }),
    ...(chosen.model && { model: chosen.model }),
  }));
  const id = session.id.peek();
  if (draft && id !== null) adopt(session, id, title, chosen);
  else if (id !== null) touch(id);
}

/**
 * Opens a session that begins as another does, and shows it.
 *
 * @param {Session} session
 * @param {string} turn  Id of the last turn to take over.
 */
export async function fork(session, turn) {
  const id = session.id.peek();
  if (id === null) return;
  const title = `${titleOfSession(id)} (fork)`;
  await attempt(async (there) => {
    const made = await there.request("fork_session", { session_id: id, turn });
    keepChoices(made.session_id, choicesOf(id));
    await rename(made.session_id, title);
    openSession(made.session_id);
    await refreshSessions();
  });
}

/**
 * @param {string} id
 * @param {string} title
 */
export async function rename(id, title) {
  const summary = sessions.peek()?.find((each) => each.session_id === id);
  const metadata = { ...summary?.metadata, title: title.slice(0, 200) };
  change(id, { metadata });
  await attempt((there) => there.request("set_metadata", { session_id: id, metadata }));
}

/**
 * Deletes a session for good.
 *
 * @param {string} id
 */
export async function remove(id) {
  await attempt(async (there) => {
    try {
      await there.request("close_session", { session_id: id });
    } catch (error) {
      if (asWireError(error).code !== "session_not_found") throw error;
    }
    forget(id);
    // Others are told that it is gone; who deleted it knows.
    if (current.peek()?.id.peek() === id) newChat();
  });
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
 * Runs what may be refused, and shows why it was.
 *
 * @param {(link: import("./wire/link.js").Link) => Promise<unknown>} what
 */
export async function attempt(what) {
  const there = link.peek();
  if (!there) return;
  try {
    await what(there);
  } catch (error) {
    failure.value = asWireError(error);
  }
}

/** The daemon's WebSocket, below whatever path a proxy serves this page at. */
function socketUrl() {
  const url = new URL("ws", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}

/**
 * @param {import("./wire/link.js").Link} made
 * @param {import("./wire/link.js").LinkState} state
 */
function follow(made, state) {
  if (made !== link.peek()) return;
  if (state === "refused") {
    signOut(made.reason.peek() || "The token was not accepted.");
  } else if (state === "open") {
    notices.value = {};
    refreshSessions();
    for (const [id, session] of open) {
      // What nobody looks at and nothing happens in is read again when it is opened.
      // A page in the background takes no session away from one that is looked at, unless it waits for an answer.
      if (session.live.peek() || (session === current.peek() && !document.hidden)) session.resume();
      else if (session !== current.peek()) open.delete(id);
    }
  } else {
    for (const session of open.values()) session.cut();
  }
}

/** @param {WireEvent} event */
function take(event) {
  // With a model's name it is about another one than everybody's, which the list of models tells.
  const elsewhere = event.op === "engine" && event.model !== undefined;
  if (NOTICES.has(event.op) && !elsewhere) notices.value = { ...notices.peek(), [event.op]: event };
  if (!("session_id" in event) || event.session_id === undefined) return;
  const session = open.get(event.session_id);
  if (!session) return;
  session.take(event);
  if (event.op === "end") touch(event.session_id);
  else if (event.op === "metadata_set") change(event.session_id, { metadata: event.metadata });
  else if (event.op === "session_closed" || event.op === "session_expired") forget(event.session_id);
}

/** @param {Session} session */
function show(session) {
  const before = current.peek();
  const id = before?.id.peek();
  if (before !== session && before?.state.peek() === "gone" && id) open.delete(id);
  batch(() => {
    view.value = "chat";
    current.value = session;
  });
}

/**
 * @param {Session} session
 * @param {string} id
 * @param {string} title
 * @param {import("./choices.js").Choices} chosen
 */
function adopt(session, id, title, chosen) {
  const now = Date.now() / 1000;
  open.set(id, session);
  keepChoices(id, chosen);
  keepChoices(null, { ...chosen, form: { kind: "none", text: "" } });
  /** @type {Summary} */
  const summary = {
    session_id: id, state: "idle", mode: "chat", model: session.model.peek(), messages: 1, tokens: 0, created_at: now,
    last_used_at: now, metadata: { title },
  };
  sessions.value = [summary, ...(sessions.peek() ?? []).filter((each) => each.session_id !== id)];
}

/** @param {string} id  It was used just now. */
function touch(id) {
  change(id, { last_used_at: Date.now() / 1000 });
}

/**
 * @param {string} id
 * @param {Partial<Summary>} with_
 */
function change(id, with_) {
  const changed = (sessions.peek() ?? []).map((each) => (each.session_id === id ? { ...each, ...with_ } : each));
  if (sessions.peek()) sessions.value = changed.toSorted((a, b) => b.last_used_at - a.last_used_at);
}

/** @param {string} id  It is no more. */
function forget(id) {
  dropChoices(id);
  sessions.value = (sessions.peek() ?? []).filter((each) => each.session_id !== id);
  const session = open.get(id);
  open.delete(id);
  if (session && session === current.peek() && session.state.peek() !== "gone") newChat();
}
