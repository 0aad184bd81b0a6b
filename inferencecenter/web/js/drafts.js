// @ts-check
/** What is not sent yet, by conversation: text and attached files. Both survive a reload of the tab. */

import { signal } from "../vendor/signals-core.js";
import { forgetAllHere, keepHere, keptHere } from "./storage.js";

/**
 * @typedef {import("./wire/transcript.js").AttachedFile} AttachedFile
 * @typedef {AttachedFile & {tokens: number | null, model?: string}} DraftFile
 *   `tokens` is null if they could not be counted, as of images; `model` is the one that they were counted for.
 * @typedef {{key: number, id: string | null, name: string, refusal: string, locked?: File}} Incoming
 *   `locked` is a file that can be read with a password.
 */

/** Files that are being read, or were refused (`refusal` says why). */
export const incoming = signal(/** @type {readonly Incoming[]} */ ([]));

const changes = signal(0);
/** @type {Map<string, readonly DraftFile[]>}  Attached files; the browser's storage may be full. */
const attached = new Map();

/**
 * Returns the draft of a conversation.
 *
 * @param {string | null} id  Null for a new one.
 */
export function draftOf(id) {
  return keptHere(nameOf(id)) ?? "";
}

/**
 * @param {string | null} id
 * @param {string} text  Empty to delete it.
 */
export function keepDraft(id, text) {
  keepHere(nameOf(id), text || null);
}

/**
 * Returns the files attached to the next message; views that read them follow them.
 *
 * @param {string | null} id
 * @returns {readonly DraftFile[]}
 */
export function filesOf(id) {
  changes.value;
  const name = filesNameOf(id);
  if (!attached.has(name)) attached.set(name, JSON.parse(keptHere(name) ?? "[]"));
  return attached.get(name) ?? [];
}

/**
 * Sets the attached files; returns whether they would survive a reload.
 *
 * @param {string | null} id
 * @param {readonly DraftFile[]} files
 */
export function keepFiles(id, files) {
  const name = filesNameOf(id);
  attached.set(name, files);
  changes.value += 1;
  return keepHere(name, files.length > 0 ? JSON.stringify(files) : null);
}

/**
 * Moves the draft of one conversation to another.
 *
 * @param {string | null} from
 * @param {string | null} to
 */
export function moveDraft(from, to) {
  const [text, files] = [draftOf(from), filesOf(from)];
  dropDraft(from);
  if (text) keepDraft(to, text);
  if (files.length > 0) keepFiles(to, files);
  incoming.value = incoming.peek().map((each) => (each.id === from ? { ...each, id: to } : each));
}

/** @param {string | null} id */
export function dropDraft(id) {
  keepDraft(id, "");
  if (filesOf(id).length > 0) keepFiles(id, []);
}

/** Deletes all drafts, at sign-out. */
export function dropAllDrafts() {
  forgetAllHere("draft");
  attached.clear();
  incoming.value = [];
  changes.value += 1;
}

/** @param {string | null} id */
function nameOf(id) {
  return id === null ? "draft" : `draft.${id}`;
}

/** @param {string | null} id */
function filesNameOf(id) {
  return id === null ? "draft-files" : `draft-files.${id}`;
}
