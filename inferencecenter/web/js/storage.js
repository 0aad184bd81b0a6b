// @ts-check
/** What the browser keeps: preferences for good, the token and what is typed until the tab is closed. Without storage nothing is kept. */

const PREFIX = "inferencecenter.";
const TOKEN = "token";

/**
 * Returns what is kept under a name, or `otherwise`.
 *
 * @template T
 * @param {string} name
 * @param {T} otherwise
 * @returns {T}
 */
export function kept(name, otherwise) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {
    return otherwise;
  }
}

/**
 * @param {string} name
 * @param {unknown} value  Undefined forgets it.
 */
export function keep(name, value) {
  try {
    if (value === undefined) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Storage is full or forbidden: it holds for this page then.
  }
}

/** @param {string} name  All is forgotten whose name begins so. */
export function forgetAll(name) {
  forgetFrom(() => localStorage, name);
}

/**
 * Returns what this tab keeps under a name.
 *
 * @param {string} name
 */
export function keptHere(name) {
  try {
    return sessionStorage.getItem(PREFIX + name);
  } catch {
    return null;
  }
}

/**
 * Keeps a text for this tab.
 *
 * @param {string} name
 * @param {string | null} text  Null forgets it.
 */
export function keepHere(name, text) {
  try {
    if (text === null) sessionStorage.removeItem(PREFIX + name);
    else sessionStorage.setItem(PREFIX + name, text);
  } catch {
    // It holds for this page then.
  }
}

/** @param {string} name  All that this tab keeps is forgotten whose name begins so. */
export function forgetAllHere(name) {
  forgetFrom(() => sessionStorage, name);
}

/** Returns the token of this tab. */
export function keptToken() {
  return keptHere(TOKEN);
}

/** @param {string | null} token  Null forgets it. */
export function keepToken(token) {
  keepHere(TOKEN, token);
}

/**
 * Returns the token that the first-run link carries in its fragment, and wipes it from the address and the history.
 *
 * @returns {string | null}
 */
export function takeTokenFromAddress() {
  const match = /^#(?:.*&)?token=([^&]+)/.exec(location.hash);
  if (!match) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return decodeURIComponent(match[1]);
}

/**
 * @param {() => Storage} storage  Throws where there is none.
 * @param {string} name
 */
function forgetFrom(storage, name) {
  try {
    for (const key of Object.keys(storage())) {
      if (key.startsWith(PREFIX + name)) storage().removeItem(key);
    }
  } catch {
    // Nothing was kept.
  }
}
