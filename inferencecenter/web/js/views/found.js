// @ts-check
/** Conversations whose messages have the words of the search field. */

import { openSession } from "../conversations.js";
import { number, t } from "../i18n.js";
import { sessions } from "../list.js";
import { link } from "../state.js";
import { Fragment, html, useEffect, useState } from "../ui.js";
import { rootOf } from "../versions.js";
import { asWireError } from "../wire/errors.js";

/** @typedef {import("../wire/types.js").SessionsFoundEvent} Page */
/** @typedef {import("../wire/types.js").SessionResult} Result */
/** @typedef {import("../wire/types.js").TextHit} Hit */

const PAUSE_MS = 250;
const MAX_CHARS = 256;
const PAGE_SIZE = 20;

/**
 * @param {{words: string, hasTitles: boolean, onClose: () => void}} props  `hasTitles` if titles match, which are listed elsewhere.
 */
export function Found({ words, hasTitles, onClose }) {
  const [found, setFound] = useState({ words: "", results: /** @type {readonly Result[]} */ ([]), next: "", indexed: 1, failed: false });
  const isCurrent = found.words === words;
  useEffect(() => {
    let stale = false;
    const timer = setTimeout(async () => {
      const page = await pageOf(words);
      if (!stale) setFound({ words, ...page });
    }, PAUSE_MS);
    return () => {
      stale = true;
      clearTimeout(timer);
    };
  }, [words]);
  const more = async () => {
    const page = await pageOf(words, found.next);
    setFound((shown) => (shown.words === words ? { words, ...page, results: [...shown.results, ...page.results] } : shown));
  };
  const shown = withoutRepeats(found.results);
  return html`<${Fragment}>
    ${isCurrent && shown.length === 0 && !hasTitles && !found.failed && html`<p class="hint" role="status">${t("list.no_match")}</p>`}
    ${isCurrent && found.failed && html`<p class="hint" role="status">${t("found.failed")}</p>`}
    ${shown.length > 0 && html`
      <h2>${t("found.title")}</h2>
      <ul>
        ${shown.map((each) => html`<${Entry} key=${each.session.session_id} found=${each} onClose=${onClose} />`)}
      </ul>
    `}
    ${isCurrent && found.next && html`<button type="button" class="button small" onClick=${more}>${t("found.more")}</button>`}
    ${isCurrent && found.indexed < 1 && html`<p class="hint">${t("found.indexing", { percent: `${number(Math.floor(100 * found.indexed))} %` })}</p>`}
  <//>`;
}

/**
 * Returns the results with messages that match; of the versions of a conversation, those that differ in them.
 *
 * @param {readonly Result[]} results
 */
function withoutRepeats(results) {
  const listed = new Set(sessions.value?.map((each) => each.session_id));
  /** @type {Map<string, Result>} */
  const first = new Map();
  for (const each of results) {
    const hit = each.hits.find(isMessage);
    if (!hit || !listed.has(each.session.session_id)) continue;
    const key = `${rootOf(sessions.value, each.session.session_id)} ${hit.snippet}`;
    if (!first.has(key)) first.set(key, each);
  }
  return [...first.values()];
}

/** @param {{found: Result, onClose: () => void}} props */
function Entry({ found: { session, hits }, onClose }) {
  const hit = /** @type {Hit} */ (hits.find(isMessage));
  const open = () => {
    openSession(session.session_id, hit.turn_id);
    onClose();
  };
  return html`
    <li class="item">
      <button type="button" class="item-open found" onClick=${open}>
        <span class="item-title" dir="auto">${session.metadata.title || t("chat.untitled")}</span>
        <span class="found-text" dir="auto">${partsOf(hit)}</span>
      </button>
    </li>
  `;
}

/**
 * @param {string} words
 * @param {string} [after]  The cursor of the page before.
 */
async function pageOf(words, after) {
  try {
    const request = { query: words.slice(0, MAX_CHARS), limit: PAGE_SIZE, ...(after && { after }) };
    /** @type {Page | undefined} */
    const page = await link.peek()?.request("search_sessions", request);
    return { results: page?.results ?? [], next: page?.next ?? "", indexed: page?.indexed ?? 1, failed: !page };
  } catch (error) {
    const { code, message } = asWireError(error);
    console.info("cannot search messages:", message);
    // A daemon without search.
    return { results: [], next: "", indexed: 1, failed: code !== "unknown_op" };
  }
}

/** @param {Hit} hit */
function isMessage(hit) {
  return hit.message_index !== undefined;
}

/**
 * Returns the text around a hit, with its words marked.
 *
 * @param {Hit} hit
 */
function partsOf({ snippet, marks }) {
  const chars = [...snippet];
  let from = 0;
  const parts = marks.flatMap(({ start, end }) => {
    const part = [chars.slice(from, start).join(""), html`<mark>${chars.slice(start, end).join("")}</mark>`];
    from = end;
    return part;
  });
  return [...parts, chars.slice(from).join("")];
}
