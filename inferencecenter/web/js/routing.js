// @ts-check
/**
 * Routing: `#/` is an empty conversation, `#/c/<id>` an existing one, `#/dashboard`, `#/models` and `#/admin` the other views.
 * `#/admin/<tab>` is a tab of administration, `#/s/<id>/<secret>` is a conversation that another account shares.
 */

import { effect } from "../vendor/signals-core.js";
import { current, newChat, openSession } from "./conversations.js";
import { titleOfSession, unread } from "./list.js";
import { adminTab, administers, sharedAt, view } from "./state.js";

/** @typedef {import("./state.js").View} View */

/**
 * Returns the view of an address.
 *
 * @param {string} hash
 * @returns {{view: View, session: string | null}}
 */
export function placeOf(hash) {
  const [, first, second] = hash.split("/");
  if (first === "dashboard" || first === "models" || first === "admin") return { view: first, session: null };
  if (first === "s") return { view: "shared", session: null };
  return { view: "chat", session: first === "c" && second ? decodeURIComponent(second) : null };
}

/**
 * Returns the address of a view.
 *
 * @param {View} shown
 * @param {string | null} session
 */
export function addressOf(shown, session) {
  if (shown === "shared") return `#/s/${sharedAt.peek()}`;
  if (shown === "admin" && adminTab.value) return `#/admin/${adminTab.value}`;
  if (shown !== "chat") return `#/${shown}`;
  return session === null ? "#/" : `#/c/${encodeURIComponent(session)}`;
}

/** Shows the view of the current address. */
export function goToAddress() {
  const place = placeOf(location.hash);
  if (place.session !== null) openSession(place.session);
  else if (place.view === "chat" || current.peek() === null) newChat();
  if (place.view === "admin") adminTab.value = location.hash.split("/")[2] ?? "";
  if (place.view === "shared") sharedAt.value = location.hash.split("/").slice(2).join("/");
  view.value = place.view === "admin" && !administers.peek() ? "chat" : place.view;
}

/** Synchronizes address and view in both directions; returns the function that stops it. */
export function followAddress() {
  /** @type {unknown} */
  let shown = null;
  const end = effect(() => {
    const session = current.value;
    if (!session) return;
    const address = addressOf(view.value, session.id.value);
    const count = unread.value.size > 0 ? `(${unread.value.size}) ` : "";
    const title = view.value === "chat" ? `${titleOfSession(session.id.value)} · ` : "";
    document.title = `${count}${title}InferenceCenter`;
    if (address === (location.hash || "#/")) shown = session;
    // A draft that becomes a session replaces its history entry.
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
