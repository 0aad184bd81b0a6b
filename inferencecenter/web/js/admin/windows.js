// @ts-check
/** Lists of the daemon that are read window by window, and the results of operations. */

import { t, time } from "../i18n.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { asWireError } from "../wire/errors.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").Requests} Requests */
/** @typedef {{words: string, failed: boolean, field: string}} Outcome  `field` is the field that the daemon refused. */

export const NOTHING_SAID = /** @type {Outcome} */ ({ words: "", failed: false, field: "" });
const PAGE = 50;

/**
 * A list that is read from its start, and further on request.
 *
 * @template Row
 * @param {Link} link
 * @param {keyof Requests} op
 * @param {object} how
 * @param {object} [how.fields]  A change reads the list anew.
 * @param {(answer: any) => readonly Row[]} how.rowsOf
 * @param {(answer: any) => unknown} [how.cursorOf]  Where the next window begins; none at the end.
 * @param {string} [how.cursor]  The field that has it.
 * @param {number} [how.times]  A change reads the list anew.
 */
export function useWindows(link, op, { fields = {}, rowsOf, cursorOf = (answer) => answer.next, cursor = "after", times = 0 }) {
  const [known, setKnown] = useState({ rows: /** @type {Row[] | null} */ (null), next: /** @type {unknown} */ (undefined), fault: "" });
  const reads = useRef(0);
  const read = async (/** @type {unknown} */ from, /** @type {Row[]} */ before) => {
    reads.current += 1;
    const own = reads.current;
    try {
      const answer = await link.request(op, /** @type {any} */ ({ ...fields, limit: PAGE, ...(from === undefined ? {} : { [cursor]: from }) }));
      if (own === reads.current) setKnown({ rows: [...before, ...rowsOf(answer)], next: cursorOf(answer), fault: "" });
    } catch (error) {
      if (own === reads.current) setKnown((now) => ({ ...now, fault: wordsOf(error) }));
    }
  };
  useEffect(() => {
    read(undefined, []);
    return () => {
      reads.current += 1;
    };
  }, [link, op, JSON.stringify(fields), times]);
  const more = () => read(known.next, known.rows ?? []);
  const replace = (/** @type {(row: Row) => Row} */ change) => setKnown((now) => ({ ...now, rows: now.rows?.map(change) ?? null }));
  const add = (/** @type {Row} */ row) => setKnown((now) => ({ ...now, rows: [...(now.rows ?? []), row] }));
  const remove = (/** @type {(row: Row) => boolean} */ which) =>
    setKnown((now) => ({ ...now, rows: now.rows?.filter((row) => !which(row)) ?? null }));
  return { ...known, more, replace, add, remove };
}

/**
 * What stands below a list: its error, that it is read or empty, or a button that reads on.
 *
 * @param {{list: {rows: readonly unknown[] | null, next: unknown, fault: string, more: () => void}, empty: string}} props
 */
export function Rest({ list, empty }) {
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const asked = useRef(false);
  useEffect(() => {
    // The button is gone with the last window; the focus stays here.
    if (asked.current && list.next === undefined) box.current?.focus();
    asked.current = false;
  }, [list.rows]);
  const more = () => {
    asked.current = true;
    list.more();
  };
  return html`<div ref=${box} tabindex="-1">
    ${list.fault && html`<p class="problem" role="alert">${list.fault}</p>`}
    ${list.rows === null && !list.fault && html`<p class="hint">${t("notice.loading")}</p>`}
    ${list.rows?.length === 0 && html`<p class="hint">${empty}</p>`}
    ${list.next !== undefined && html`<button type="button" class="button" onClick=${more}>${t("admin.more")}</button>`}
  </div>`;
}

/**
 * Runs operations one at a time.
 *
 * @returns {{busy: boolean, said: Outcome, run: (what: () => Promise<string>) => Promise<boolean>}} `run` returns
 *   whether it succeeded; the text that the operation returns is announced.
 */
export function useOperation() {
  const [busy, setBusy] = useState(false);
  const [said, setSaid] = useState(NOTHING_SAID);
  const run = async (/** @type {() => Promise<string>} */ what) => {
    setBusy(true);
    setSaid(NOTHING_SAID);
    try {
      setSaid({ ...NOTHING_SAID, words: await what() });
      return true;
    } catch (error) {
      setSaid({ words: wordsOf(error), failed: true, field: asWireError(error).field });
      return false;
    } finally {
      setBusy(false);
    }
  };
  return { busy, said, run };
}

/**
 * The result of an operation, announced to screen readers.
 *
 * @param {{said: Outcome}} props
 */
export function Said({ said }) {
  return html`<div class="board-said" role="status">
    ${said.words && html`<p class=${said.failed ? "problem" : "board-note"}>${said.words}</p>`}
  </div>`;
}

/** @param {unknown} error */
function wordsOf(error) {
  const { message, hint } = asWireError(error);
  return hint ? `${message}. ${hint}` : message;
}

/** @param {number} seconds  Unix seconds. */
export function moment(seconds) {
  return time(seconds * 1000, { dateStyle: "medium", timeStyle: "short" });
}
