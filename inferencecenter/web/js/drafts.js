// @ts-check
/** Unsent text by conversation; survives a reload of the tab. */

import { forgetAllHere, keepHere, keptHere } from "./storage.js";

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
 * Moves the draft of one conversation to another.
 *
 * @param {string | null} from
 * @param {string | null} to
 */
export function moveDraft(from, to) {
  const text = draftOf(from);
  keepDraft(from, "");
  if (text) keepDraft(to, text);
}

/** Deletes all drafts, at sign-out. */
export function dropAllDrafts() {
  forgetAllHere("draft");
}

/** @param {string | null} id */
function nameOf(id) {
  return id === null ? "draft" : `draft.${id}`;
}
