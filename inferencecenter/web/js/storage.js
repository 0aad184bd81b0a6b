// @ts-check
/** What the browser keeps: preferences for good, the token until the tab is closed. Without storage nothing is kept. */

const PREFIX = "inferencecenter.";
const TOKEN = `${PREFIX}token`;

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
  try {
    for (const key of Object.keys(localStorage)) {
      if (key.startsWith(PREFIX + name)) localStorage.removeItem(key);
    }
  } catch {
    // Nothing was kept.
  }
}

/** Returns the token of this tab. */
export function keptToken() {
  try {
    return sessionStorage.getItem(TOKEN);
  } catch {
    return null;
  }
}

/** @param {string | null} token  Null forgets it. */
export function keepToken(token) {
  try {
    if (token === null) sessionStorage.removeItem(TOKEN);
    else sessionStorage.setItem(TOKEN, token);
  } catch {
    // It holds for this page then.
  }
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
