// @ts-check
/** The address: `#/` is an empty conversation, `#/c/<id>` one that is known, `#/dashboard` and `#/models` the others. */

import { effect } from "../vendor/signals-core.js";
import { current, newChat, openSession } from "./conversations.js";
import { titleOfSession } from "./list.js";
import { view } from "./state.js";

/** @typedef {import("./state.js").View} View */

/**
 * Returns what an address shows.
 *
 * @param {string} hash
 * @returns {{view: View, session: string | null}}
 */
export function placeOf(hash) {
  const [, first, second] = hash.split("/");
  if (first === "dashboard" || first === "models") return { view: first, session: null };
  return { view: "chat", session: first === "c" && second ? decodeURIComponent(second) : null };
}

/**
 * Returns the address of what is shown.
 *
 * @param {View} shown
 * @param {string | null} session
 */
export function addressOf(shown, session) {
  if (shown !== "chat") return `#/${shown}`;
  return session === null ? "#/" : `#/c/${encodeURIComponent(session)}`;
}

/** Shows what the address says. */
export function goToAddress() {
  const place = placeOf(location.hash);
  if (place.session !== null) openSession(place.session);
  else if (place.view === "chat" || current.peek() === null) newChat();
  view.value = place.view;
}

/** Has the address say what is shown, and the other way round; returns what ends that. */
export function followAddress() {
  /** @type {unknown} */
  let shown = null;
  const end = effect(() => {
    const session = current.value;
    if (!session) return;
    const address = addressOf(view.value, session.id.value);
    document.title = view.value === "chat" ? `${titleOfSession(session.id.value)} · InferenceCenter` : "InferenceCenter";
    if (address === (location.hash || "#/")) shown = session;
    // A draft that becomes a session stays the same place.
    else if (shown === session && (location.hash || "#/") === "#/") history.replaceState(null, "", address);
    else history.pushState(null, "", address);
    shown = session;
  });
  addEventListener("popstate", goToAddress);
  return () => {
    end();
    removeEventListener("popstate", goToAddress);
  };
}
