// @ts-check
/** Operations on the available models. */

import { t } from "../i18n.js";
import { readModels } from "../models.js";
import { signal } from "../ui.js";
import { asWireError } from "../wire/errors.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {{name: string, phase: "asked" | "draining" | "loading", done: number}} Swap */

export class Shelf {
  /** @param {Link} link */
  constructor(link) {
    this._link = link;
    /** The pending swap that this page requested. */
    this.swap = signal(/** @type {Swap | null} */ (null));
    /** Result of the last operation. */
    this.said = signal({ words: "", hint: "", failed: false });
  }

  /**
   * Loads a model and makes it the default.
   *
   * @param {string} name
   */
  async load(name) {
    if (this.swap.peek()) return;
    this.swap.value = { name, phase: "asked", done: 0 };
    this._say("");
    try {
      const last = await this._link.request("load_model", { name }, { isInterim: (event) => this._goesOn(event) });
      if (last.phase === "failed") this._say(t("models.load_failed", { name, why: last.detail }), { failed: true });
      else this._say(t("models.switched", { name }));
    } catch (error) {
      this._failed(error);
    }
    this.swap.value = null;
    await readModels();
  }

  /**
   * Frees a model's memory.
   *
   * @param {string} name
   */
  async unload(name) {
    try {
      await this._link.request("unload_model", { name });
      this._say(t("models.unloading", { name }));
    } catch (error) {
      this._failed(error);
    }
    await readModels();
  }

  /** @param {import("../wire/link.js").WireEvent} event */
  _goesOn(event) {
    if (event.op !== "swap" || event.phase === "done" || event.phase === "failed") return false;
    this.swap.value = { name: event.model, phase: event.phase, done: event.done ?? 0 };
    return true;
  }

  /** @param {unknown} error */
  _failed(error) {
    const { message, hint } = asWireError(error);
    this._say(message, { hint, failed: true });
  }

  /**
   * @param {string} words
   * @param {{hint?: string, failed?: boolean}} [more]
   */
  _say(words, { hint = "", failed = false } = {}) {
    this.said.value = { words, hint, failed };
  }
}

/** @type {WeakMap<Link, Shelf>} */
const shelves = new WeakMap();

/**
 * Returns a link's operations, with the swap that continues while they are not displayed.
 *
 * @param {Link} link
 * @returns {Shelf}
 */
export function shelfOf(link) {
  const shelf = shelves.get(link) ?? new Shelf(link);
  shelves.set(link, shelf);
  return shelf;
}
