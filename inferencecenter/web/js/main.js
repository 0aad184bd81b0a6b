// @ts-check
/** Entry point of the page. */

import { effect } from "../vendor/signals-core.js";
import { lookAgain, newChat, stopStreaming } from "./conversations.js";
import { install } from "./install.js";
import { followAddress, goToAddress } from "./routing.js";
import { account, helping, link, preferences, signIn, signOut } from "./state.js";
import { keptToken, takeTokenFromAddress } from "./storage.js";
import { html, render, useEffect } from "./ui.js";
import { Connecting, SignIn } from "./views/signin.js";
import { Shell } from "./views/shell.js";
import { focusSearch } from "./views/sidebar.js";

/** The list is polled: the daemon does not announce turns of other pages, nor new sessions without a title. */
const LOOK_EVERY_MS = 60_000;

/** Signed in or not. */
function App() {
  const known = account.value !== null;
  useEffect(() => {
    if (!known) return undefined;
    goToAddress();
    return followAddress();
  }, [known]);
  if (known) return html`<${Shell} />`;
  return link.value && keptToken() ? html`<${Connecting} />` : html`<${SignIn} />`;
}

/** @param {KeyboardEvent} event */
function shortcuts(event) {
  if (account.peek() === null || event.defaultPrevented || document.querySelector("dialog[open]")) return;
  const key = (event.ctrlKey || event.metaKey) && !event.altKey ? event.key.toLowerCase() : "";
  if (key === "k" && !event.shiftKey) {
    event.preventDefault();
    focusSearch();
  } else if (key === "o" && event.shiftKey) {
    event.preventDefault();
    newChat();
  } else if (key === "/" || (event.key === "?" && !/** @type {Element} */ (event.target).closest("input, textarea, select"))) {
    event.preventDefault();
    helping.value = true;
  } else if (event.key === "Escape" && stopStreaming()) {
    event.preventDefault();
  }
}

/**
 * Signs in with the token of a first-run link; it may be opened in a tab that has the page already.
 *
 * @param {Event} [moved]  Navigation event, absent at the start.
 */
function followLink(moved) {
  const token = takeTokenFromAddress();
  if (token === null) return false;
  moved?.stopImmediatePropagation();
  signOut();
  signIn(token);
  return true;
}

/** Applies the preference and follows the system's setting. */
function followTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const { theme } = preferences.peek();
    document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  };
  dark.addEventListener("change", show);
  effect(() => {
    preferences.value;
    show();
  });
}

/** @param {DragEvent} event  A file that is dropped beside a conversation would replace the page. */
function keepPage(event) {
  if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
}

followTheme();
addEventListener("dragover", keepPage);
addEventListener("drop", keepPage);
addEventListener("keydown", shortcuts);
document.addEventListener("visibilitychange", lookAgain);
setInterval(lookAgain, LOOK_EVERY_MS);
addEventListener("popstate", followLink);
const token = keptToken();
if (!followLink() && token) signIn(token);
render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
install();
