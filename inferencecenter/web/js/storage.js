// @ts-check
/** Browser storage: preferences persist, token and drafts last until the tab is closed. Optional. */

const PREFIX = "inferencecenter.";
const TOKEN = "token";

/**
 * Returns the stored value of a name, or `otherwise`.
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
 * @param {unknown} value  Undefined deletes it.
 */
export function keep(name, value) {
  try {
    if (value === undefined) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Storage is full or disabled: the value lasts for this page only.
  }
}

/** @param {string} name  Prefix of the names to delete. */
export function forgetAll(name) {
  forgetFrom(() => localStorage, name);
}

/**
 * Returns this tab's stored value of a name.
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
 * Stores a text for this tab; returns whether there was room.
 *
 * @param {string} name
 * @param {string | null} text  Null deletes it.
 */
export function keepHere(name, text) {
  try {
    if (text === null) sessionStorage.removeItem(PREFIX + name);
    else sessionStorage.setItem(PREFIX + name, text);
    return true;
  } catch {
    return false; // the value lasts for this page only
  }
}

/** @param {string} name  Prefix of this tab's names to delete. */
export function forgetAllHere(name) {
  forgetFrom(() => sessionStorage, name);
}

/** Returns the token of this tab. */
export function keptToken() {
  return keptHere(TOKEN);
}

/** @param {string | null} token  Null deletes it. */
export function keepToken(token) {
  keepHere(TOKEN, token);
}

/**
 * Returns the token in the fragment of the first-run link, and removes it from the address and the history.
 *
 * @returns {string | null}
 */
export function takeTokenFromAddress() {
  const match = /^#(?:.*&)?token=([^&]+)/.exec(location.hash);
  if (!match) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return decodeURIComponent(match[1]);
}

/** @typedef {{tps: number, ttft_ms: number, queue_ms: number}} Speed */

const MOST_SPEEDS = 500;
/** @type {Map<string, Speed>}  Timings of answers by turn, the oldest first; the daemon tells them once, at the end. */
const speeds = new Map(kept("speeds", []));

/**
 * @param {string} turnId
 * @param {Speed} stats
 */
export function noteSpeed(turnId, { tps, ttft_ms, queue_ms }) {
  speeds.set(turnId, { tps, ttft_ms, queue_ms });
  for (const id of speeds.keys()) if (speeds.size > MOST_SPEEDS) speeds.delete(id);
  keep("speeds", [...speeds]);
}

/** @param {string | null} turnId */
export function speedOf(turnId) {
  return turnId === null ? null : (speeds.get(turnId) ?? null);
}

/** Deletes all, at sign-out. */
export function dropSpeeds() {
  speeds.clear();
  keep("speeds", undefined);
}

/**
 * @param {() => Storage} storage  Throws if unavailable.
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
