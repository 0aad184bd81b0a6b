// @ts-check
/** What is typed and not sent yet, by conversation: it outlives a reload of its tab, and nothing else. */

import { forgetAllHere, keepHere, keptHere } from "./storage.js";

/**
 * Returns what is typed in a conversation.
 *
 * @param {string | null} id  Null for one that is not begun.
 */
export function draftOf(id) {
  return keptHere(nameOf(id)) ?? "";
}

/**
 * @param {string | null} id
 * @param {string} text  Empty to forget it.
 */
export function keepDraft(id, text) {
  keepHere(nameOf(id), text || null);
}

/**
 * Has what is typed in one conversation be typed in another.
 *
 * @param {string | null} from
 * @param {string | null} to
 */
export function moveDraft(from, to) {
  const text = draftOf(from);
  keepDraft(from, "");
  if (text) keepDraft(to, text);
}

/** Forgets all of them, for whoever comes next. */
export function dropAllDrafts() {
  forgetAllHere("draft");
}

/** @param {string | null} id */
function nameOf(id) {
  return id === null ? "draft" : `draft.${id}`;
}
