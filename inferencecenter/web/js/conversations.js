// @ts-check
/** The conversations that this page has opened: which one is shown, and operations on them. */

import { batch, effect, signal } from "../vendor/signals-core.js";
import { choicesOf, dropChoices, keepChoices, turnFields } from "./choices.js";
import { dropDraft, moveDraft } from "./drafts.js";
import { number, t } from "./i18n.js";
import { enlist, mark, missEvents, noteModel, readList, readUsage, rename, sessions, strike, titleOfSession, touch, unread, usage } from "./list.js";
import { dropSpeeds, noteSpeed } from "./storage.js";
import { attempt, failure, hello, link, view } from "./state.js";
import { versionFields, versionsOf } from "./versions.js";
import { WireError, asWireError } from "./wire/errors.js";
import { Session } from "./wire/session.js";
import { before, inParts, messageOf, question, titleOf } from "./wire/transcript.js";

/** @typedef {import("./wire/link.js").Link} Link */

/** The conversation that is shown. */
export const current = signal(/** @type {Session | null} */ (null));

/** A turn of a session to which its view scrolls, once it has it. */
export const sought = signal(/** @type {{id: string, turnId: string} | null} */ (null));

/** The version that was made last, the session of the one before, and the title that it had; null when that is settled. */
export const newVersion = signal(/** @type {{session: Session, before: string, title: string} | null} */ (null));

/** @type {Map<string, Session>} */
const open = new Map();
/** States in which a session's events do not come to this page. */
const LEFT = new Set(["detached", "gone"]);
const LOOK_AGAIN_MS = 5000;
/** Bytes of a frame besides the fields of the message. */
const FRAME_BYTES = 1024;
let nextRefresh = 0;
/** @type {Map<string, Record<string, unknown>>}  The latest default parameters of a new session, by model name. */
const defaults = new Map();

link.subscribe((made) => {
  if (made === null) {
    leaveAll();
    return;
  }
  made.on("*", take);
  made.state.subscribe((state) => followLink(made, state));
});

effect(() => {
  const id = current.value?.id.value ?? null;
  if (view.value === "chat" && id !== null) mark(id, false);
});

/** Refreshes what may have changed while the page was hidden: the list of sessions, and the shown one. */
export function lookAgain() {
  const there = link.peek();
  if (document.hidden || there?.state.peek() !== "open") return;
  const id = current.peek()?.id.peek() ?? null;
  if (view.peek() === "chat" && id !== null) mark(id, false);
  refresh(there);
  if (current.peek()?.state.peek() === "away") current.peek()?.resume();
}

/** Shows an empty conversation. */
export function newChat() {
  const there = link.peek();
  if (!there) return;
  show(new Session(there, null));
}

/** Shows an empty conversation in place of a deleted one, keeping its draft. */
export function newChatInstead() {
  moveDraft(current.peek()?.id.peek() ?? null, null);
  newChat();
}

/**
 * Shows a session, reading it first if necessary.
 *
 * @param {string} id
 * @param {string} [turnId]  Of the turn to show; the last one by default.
 */
export function openSession(id, turnId) {
  const there = link.peek();
  if (!there) return;
  sought.value = turnId === undefined ? null : { id, turnId };
  const session = open.get(id) ?? follow(id, new Session(there, id));
  show(session);
  if (session.state.peek() === "away") session.resume();
}

/**
 * Sends a message in the shown conversation; returns whether its settings are valid, and it fits into a frame.
 *
 * @param {string} text
 * @param {readonly import("./wire/transcript.js").AttachedFile[]} [files]
 */
export function ask(text, files = []) {
  const session = current.peek();
  if (!session) return false;
  const message = messageOf(files, text);
  try {
    checkSize({ ...turnFields(choicesOf(session.id.peek())), ...question([message]) });
  } catch (error) {
    failure.value = asWireError(error);
    return false;
  }
  attempt(() => askAgain(session, [message]));
  return true;
}

/**
 * @param {object} fields  Of a message that is to be sent.
 * @throws {WireError} They do not fit into a frame.
 */
function checkSize(fields) {
  const room = messageRoom();
  const size = new TextEncoder().encode(JSON.stringify(fields)).length;
  if (size <= room) return;
  const message = t("files.message_too_large", { size: kib(size), room: kib(room) });
  throw new WireError({ code: "message_too_large", message, hint: t("files.message_hint") });
}

/** Returns how many bytes of JSON a message may have. */
export function messageRoom() {
  return (hello.peek()?.limits.max_frame_bytes ?? 2 ** 20) - FRAME_BYTES;
}

/** @param {number} bytes */
export function kib(bytes) {
  return `${number(Math.ceil(bytes / 1024))} KiB`;
}

/** Aborts the running answer of the shown conversation; returns whether there was one. */
export function stopStreaming() {
  const session = current.peek();
  if (view.peek() !== "chat" || !session?.running || LEFT.has(session.state.peek())) return false;
  session.stop();
  return true;
}

/**
 * Sends messages in a session, with its choices.
 *
 * @param {Session} session
 * @param {readonly import("./wire/transcript.js").ChatMessage[]} asked
 */
export async function askAgain(session, asked) {
  const chosen = choicesOf(session.id.peek());
  const title = titleOf(asked.at(-1)?.content ?? "");
  const draft = session.id.peek() === null;
  const own = turnFields(chosen);
  const fields = { ...own, ...(await serverToolFields(chosen, own.tools ?? [])) };
  await session.ask(asked, fields, () => ({
    metadata: { title },
    ...(chosen.system.trim() && { system: chosen.system }),
    ...(chosen.model && { model: chosen.model }),
  }));
  const id = session.id.peek();
  if (draft && id !== null) adopt(session, id, title, chosen);
  else if (draft) readUsage();
  else if (id !== null) touch(id);
}

/**
 * Returns the fields of `infer` that offer the tools of the chosen servers too; those that cannot be listed are reported.
 *
 * @param {import("./choices.js").Choices} chosen
 * @param {readonly import("./wire/types.js").Tool[]} own  The user's tools.
 */
async function serverToolFields({ servers }, own) {
  if (servers.length === 0) return {};
  try {
    const { offeredTools } = await import("./tools.js");
    return { tools: [...own, ...(await offeredTools(servers, own))] };
  } catch (error) {
    failure.value = asWireError(error);
    return {};
  }
}

/**
 * Sends a turn again, with other messages or the same; the version before stays, as a session of its own.
 *
 * @param {Session} session
 * @param {number} index  Of the turn.
 * @param {readonly import("./wire/transcript.js").ChatMessage[]} asked
 */
export async function askInVersion(session, index, asked) {
  const turns = session.turns.peek();
  const [id, last] = [session.id.peek(), before(turns, index)];
  if (id === null || last === null || turns[index].turnId === null) {
    await session.takeBack(index);
    await askAgain(session, asked);
    return;
  }
  await attempt(async (there) => {
    const titleBefore = titleOfSession(id);
    const followsQuestion = index === 0 && titleOfSession(id) === titleOf(turns[0].asked.at(-1)?.content ?? "");
    const title = followsQuestion ? titleOf(asked.at(-1)?.content ?? "") : titleOfSession(id);
    const made = await there.request("fork_session", { session_id: id, turn: last });
    const metadata = { title, ...versionFields(sessions.peek(), id, index) };
    keepChoices(made.session_id, choicesOf(id));
    enlist(made.session_id, metadata, made.model);
    await there.request("set_metadata", { session_id: made.session_id, metadata });
    const version = follow(made.session_id, new Session(there, made.session_id));
    version.preview(session, index);
    show(version);
    newVersion.value = { session: version, before: id, title: titleBefore };
    version.resume();
    await askAgain(version, asked);
    if (followsQuestion) await rename(made.session_id, title);
  });
}

/** Shows the version before the newest one, which is deleted. */
export async function undoVersion() {
  const made = newVersion.peek();
  const id = made?.session.id.peek();
  if (!made || !id) return;
  newVersion.value = null;
  openSession(made.before);
  await attempt(async (there) => {
    await there.request("close_session", { session_id: id });
    forget(id);
    if (titleOfSession(made.before) !== made.title) await rename(made.before, made.title);
  });
}

/**
 * Forks a session, and shows the copy.
 *
 * @param {Session} session
 * @param {string} turn  Id of the last turn to copy.
 */
export async function fork(session, turn) {
  const id = session.id.peek();
  if (id === null) return;
  const title = t("chat.fork_title", { title: titleOfSession(id) });
  await attempt(async (there) => {
    const made = await there.request("fork_session", { session_id: id, turn });
    keepChoices(made.session_id, choicesOf(id));
    await rename(made.session_id, title);
    openSession(made.session_id);
  });
}

/**
 * Creates a conversation from an export.
 *
 * @param {import("./transfer.js").Exported} exported
 * @param {readonly (readonly import("./wire/transcript.js").ChatMessage[])[]} batches  Its messages, as they fit into requests.
 */
export async function importConversation({ title, messages }, batches) {
  const there = link.peek();
  if (!there) return;
  const system = messages[0]?.role === "system" ? messages[0].content : "";
  const metadata = { title: title.slice(0, 200) };
  const made = await there.request("create_session", { metadata, ...(system && { system }) });
  for (const [at, batch] of batches.entries()) {
    const part = at === 0 && system ? batch.slice(1) : batch;
    if (part.length > 0) await there.request("append", { session_id: made.session_id, messages: part.map(inParts) });
  }
  enlist(made.session_id, metadata, made.model);
}

/**
 * Deletes a conversation permanently, with all its versions.
 *
 * @param {string} id
 */
export async function remove(id) {
  const versions = versionsOf(sessions.peek(), id).map((each) => each.session_id);
  await attempt(async (there) => {
    for (const session_id of versions) {
      try {
        await there.request("close_session", { session_id });
      } catch (error) {
        if (asWireError(error).code !== "session_not_found") throw error;
      }
      forget(session_id);
      // The event tells other pages; this one requested it.
      if (current.peek()?.id.peek() === session_id) newChat();
    }
  });
}

/**
 * Returns the effective defaults of a session's turns, as far as known.
 *
 * @param {Session} session
 * @param {string} model  The chosen model of a session that does not exist yet; empty for the default.
 * @returns {Record<string, unknown> | undefined}
 */
export function effectiveParams(session, model) {
  return session.params.value ?? (session.id.value === null ? defaults.get(model || hello.value?.model || "") : undefined);
}

/**
 * Returns whether a session's answer is being generated: by its events, where they come to this page.
 *
 * @param {import("./list.js").Summary} summary
 */
export function isAnswering({ session_id: id, state }) {
  const own = open.get(id);
  return own && !LEFT.has(own.state.value) ? own.live.value !== null : state === "busy";
}

/** @param {Link} there */
async function refresh(there) {
  clearTimeout(nextRefresh);
  if (!(await readList(there))) return;
  // This page gets no event when an answer that another page receives ends.
  if (sessions.peek()?.some(isAnsweredElsewhere)) nextRefresh = setTimeout(lookAgain, LOOK_AGAIN_MS);
  const session = current.peek();
  const id = session?.id.peek();
  // It ended while the connection was lost.
  if (id && !sessions.peek()?.some((each) => each.session_id === id)) session?.end();
}

/**
 * @param {Link} made
 * @param {import("./wire/link.js").LinkState} state
 */
function followLink(made, state) {
  if (made !== link.peek()) return;
  if (state !== "open") {
    missEvents();
    for (const session of open.values()) session.cut();
    return;
  }
  refresh(made);
  for (const [id, session] of open) {
    // A hidden, idle session is read again when it is opened.
    // A page in the background does not take a session from a visible page, unless it waits for an answer.
    if (session.live.peek() || (session === current.peek() && !document.hidden)) session.resume();
    else if (session !== current.peek()) open.delete(id);
  }
}

/** @param {import("./wire/link.js").WireEvent} event */
function take(event) {
  if (!("session_id" in event) || event.session_id === undefined) return;
  const id = event.session_id;
  open.get(id)?.take(event);
  if (event.op === "end") noteSpeed(event.turn_id, event.stats);
  if (event.op === "metadata_set") enlist(id, event.metadata);
  else if (event.op === "model_set") noteModel(id, event.model);
  else if (event.op === "session_closed" || event.op === "session_expired") forget(id);
}

/**
 * Notes the ends of a session's answers.
 *
 * @param {string} id
 * @param {Session} session
 */
function follow(id, session) {
  open.set(id, session);
  let answering = false;
  session.live.subscribe((live) => {
    const ended = answering && live === null;
    answering = live !== null;
    if (!ended || open.get(id) !== session) return;
    touch(id);
    const seen = session === current.peek() && view.peek() === "chat" && !document.hidden;
    if (!seen) mark(id, true);
  });
  return session;
}

/** @param {import("./list.js").Summary} summary */
function isAnsweredElsewhere(summary) {
  return !open.has(summary.session_id) && summary.state === "busy";
}

/** @param {Session} session */
function show(session) {
  const before = current.peek();
  const id = before?.id.peek();
  if (before !== session && before?.state.peek() === "gone" && id) {
    open.delete(id);
    dropDraft(id);
  }
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
  follow(id, session);
  keepChoices(id, chosen);
  keepChoices(null, { ...chosen, form: { kind: "none", text: "" }, approved: [] });
  enlist(id, { title }, session.model.peek());
  defaults.set(session.model.peek(), session.params.peek() ?? {});
}

/** @param {string} id  Of a session that no longer exists. */
function forget(id) {
  dropChoices(id);
  strike(id);
  open.get(id)?.end();
  open.delete(id);
  // A shown one displays that, and keeps its draft.
  if (current.peek()?.id.peek() !== id) dropDraft(id);
}

function leaveAll() {
  if (sessions.peek()) {
    for (const id of unread.peek()) mark(id, false);
    dropSpeeds();
  }
  open.clear();
  batch(() => {
    sessions.value = null;
    usage.value = null;
    newVersion.value = null;
    current.value = null;
  });
}
