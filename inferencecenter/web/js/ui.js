// @ts-check
/** UI primitives: preact with htm in place of JSX, and signals to which views subscribe by reading. */

import htm from "../vendor/htm.js";
import { h } from "../vendor/preact.js";

export { Fragment, render } from "../vendor/preact.js";
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-hooks.js";
export { batch, computed, effect, signal, useComputed, useSignal, useSignalEffect } from "../vendor/signals.js";

/** @type {(strings: TemplateStringsArray, ...values: any[]) => any} */
export const html = htm.bind(h);

/** @type {Map<string, Promise<unknown>>} */
const styles = new Map();

/**
 * Loads a style sheet, once; resolves also if that fails.
 *
 * @param {string} path  From the folder of the page.
 */
export function styled(path) {
  const known = styles.get(path);
  if (known) return known;
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL(`../${path}`, import.meta.url).href;
  const loaded = new Promise((resolve) => {
    link.onload = link.onerror = resolve;
    document.head.append(link);
  });
  styles.set(path, loaded);
  return loaded;
}
