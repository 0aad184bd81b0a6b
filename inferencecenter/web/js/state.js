// @ts-check
/** State shared by all views: connection, account, current view, and the daemon's broadcasts. */

import { batch, computed, effect, signal } from "../vendor/signals-core.js";
import { dropAllChoices } from "./choices.js";
import { dropAllDrafts } from "./drafts.js";
import { t } from "./i18n.js";
import { keep, keepToken, kept } from "./storage.js";
import { asWireError } from "./wire/errors.js";
import { connect } from "./wire/link.js";

/**
 * @typedef {import("./wire/link.js").Link} Link
 * @typedef {import("./wire/link.js").WireEvent} WireEvent
 * @typedef {"chat" | "dashboard" | "models" | "admin" | "shared"} View
 * @typedef {{theme: "system" | "light" | "dark", voice?: boolean}} Preferences
 * @typedef {Pick<import("./wire/types.js").Events, "engine" | "thermal" | "storage" | "going_away" | "model_changed">} Notices
 */

/** @type {import("../vendor/signals-core.js").Signal<Link | null>} */
export const link = signal(null);
/** `auth_success`, or null before it. */
export const account = signal(/** @type {import("./wire/types.js").AuthSuccessEvent | null} */ (null));
/** `hello` of the last socket. */
export const hello = signal(/** @type {import("./wire/types.js").HelloEvent | null} */ (null));
/** Whether the daemon's version differs from the one that served this page. */
export const outdated = signal(false);
export const view = signal(/** @type {View} */ ("chat"));
/** Id and secret of the shared conversation that is shown. */
export const sharedAt = signal("");
/** The tab of administration in the address; empty for the first one. */
export const adminTab = signal("");
export const preferences = signal(kept("preferences", /** @type {Preferences} */ ({ theme: "system" })));
/** The last events that were sent to all sockets, by op: `engine`, `thermal`, `storage`, `going_away`, `model_changed`. */
export const notices = signal(/** @type {Readonly<Partial<Notices>>} */ ({}));
/** Whether the keyboard shortcuts are shown. */
export const helping = signal(false);
/** Why sign-in failed; empty if it did not. */
export const signInError = signal("");
/** The last error, shown until it is dismissed. */
export const failure = signal(/** @type {import("./wire/errors.js").WireError | null} */ (null));

/** Whether the account may see the view of administration. */
export const administers = computed(() => account.value?.scopes.some((scope) => ADMINISTRATORS.has(scope)) ?? false);

const ADMINISTRATORS = new Set(["admin", "operator"]);
/** Whether the browser recognizes speech; it may do so at its maker's servers. */
export const canListen = "SpeechRecognition" in globalThis || "webkitSpeechRecognition" in globalThis;

const NOTICES = new Set(["engine", "thermal", "storage", "going_away", "model_changed"]);
/** Creates a token, on the server. */
export const CREATE_TOKEN = "inferencecenter token create NAME"; // no text

/** @type {string | null} */
let ownVersion = null;

effect(() => keep("preferences", preferences.value));

/**
 * Connects with a token; the result is in `account` or `signInError`.
 *
 * @param {string} token
 */
export function signIn(token) {
  link.peek()?.close();
  const made = connect({ url: socketUrl(), token });
  let denied = false;
  made.on("hello", greet);
  made.on("auth_success", (event) => {
    keepToken(token);
    account.value = event;
  });
  made.on("auth_failed", () => (denied = true));
  made.on("*", notice);
  batch(() => {
    signInError.value = "";
    link.value = made;
  });
  made.state.subscribe((state) => {
    if (made !== link.peek()) return;
    if (state === "refused") signOut(denied ? deniedWords(made) : sentence(made.reason.peek()));
    else if (state === "open") notices.value = {};
  });
}

/** Deletes the token, and all state and drafts that belong to it. */
export function signOut(why = "") {
  keepToken(null);
  dropAllChoices();
  dropAllDrafts();
  link.peek()?.close();
  batch(() => {
    link.value = null;
    account.value = null;
    notices.value = {};
    signInError.value = why;
  });
}

/**
 * Runs an operation, and shows its error.
 *
 * @param {(link: Link) => Promise<unknown>} what
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

/** The daemon's WebSocket, below the path at which a proxy serves this page. */
function socketUrl() {
  const url = new URL("ws", document.baseURI);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}

/** @param {import("./wire/types.js").HelloEvent} event */
function greet(event) {
  hello.value = event;
  ownVersion ??= event.version;
  if (event.version !== ownVersion) outdated.value = true;
}

/** @param {WireEvent} event */
function notice(event) {
  // An event with a model's name is not about the default model; the list of models shows it.
  const elsewhere = event.op === "engine" && event.model !== undefined;
  if (NOTICES.has(event.op) && !elsewhere) notices.value = { ...notices.peek(), [event.op]: event };
}

/** @param {Link} made  The link whose token was not accepted. */
function deniedWords(made) {
  return `${t(made.everOpen ? "signin.revoked" : "signin.wrong")} ${t("signin.another", { command: CREATE_TOKEN })}`;
}

/** @param {string} words  A sentence of the daemon without initial capital. */
function sentence(words) {
  return words ? words.charAt(0).toUpperCase() + words.slice(1) : t("signin.refused");
}
