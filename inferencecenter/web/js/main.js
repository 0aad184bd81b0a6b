// @ts-check
/** Entry point of the page. */

import { lookAgain, newChat, stopStreaming } from "./conversations.js";
import { followAddress, goToAddress } from "./routing.js";
import { account, link, signIn, signOut } from "./state.js";
import { keptToken, takeTokenFromAddress } from "./storage.js";
import { followTheme } from "./theme.js";
import { html, render, useEffect } from "./ui.js";
import { Connecting, SignIn } from "./views/signin.js";
import { Shell } from "./views/shell.js";

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
  if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
    event.preventDefault();
    newChat();
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

followTheme();
addEventListener("keydown", shortcuts);
document.addEventListener("visibilitychange", lookAgain);
setInterval(lookAgain, LOOK_EVERY_MS);
addEventListener("popstate", followLink);
const token = keptToken();
if (!followLink() && token) signIn(token);
render(html`<${App} />`, /** @type {HTMLElement} */ (document.getElementById("app")));
