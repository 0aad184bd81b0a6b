// @ts-check
/** The models there are, and what is done to them. */

import { signal } from "../ui.js";
import { asWireError } from "../wire/errors.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {{name: string, phase: "asked" | "draining" | "loading", done: number}} Swap */

/** The models of one daemon. */
export class Shelf {
  /** @param {Link} link */
  constructor(link) {
    this._link = link;
    /** As `models` lists them; null before the first answer. */
    this.models = signal(/** @type {readonly import("../wire/types.js").ModelSummary[] | null} */ (null));
    /** The swap that was asked for here and goes on. */
    this.swap = signal(/** @type {Swap | null} */ (null));
    /** What was done last, or why it could not be. */
    this.said = signal({ words: "", hint: "", failed: false });
    const changes = /** @type {const} */ (["model_changed", "model_unloaded", "engine"]);
    for (const op of changes) link.on(op, () => void this.refresh());
  }

  /** Reads the list anew. */
  async refresh() {
    try {
      this.models.value = (await this._link.request("list_models")).models;
    } catch (error) {
      this._failed(error);
    }
  }

  /**
   * Has a model loaded and answer from then on.
   *
   * @param {string} name
   */
  async load(name) {
    if (this.swap.peek()) return;
    this.swap.value = { name, phase: "asked", done: 0 };
    this._say("");
    try {
      const last = await this._link.request("load_model", { name }, { isInterim: (event) => this._goesOn(event) });
      if (last.phase === "failed") this._say(`${name} could not be loaded: ${last.detail}`, { failed: true });
      else this._say(`${name} answers from now on.`);
    } catch (error) {
      this._failed(error);
    }
    this.swap.value = null;
    await this.refresh();
  }

  /**
   * Has a model's memory freed.
   *
   * @param {string} name
   */
  async unload(name) {
    try {
      await this._link.request("unload_model", { name });
      this._say(`${name} leaves the memory when its turns have ended.`);
    } catch (error) {
      this._failed(error);
    }
    await this.refresh();
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
 * Returns a link's models, with the swap that goes on while nobody looks.
 *
 * @param {Link} link
 * @returns {Shelf}
 */
export function shelfOf(link) {
  const shelf = shelves.get(link) ?? new Shelf(link);
  shelves.set(link, shelf);
  return shelf;
}
