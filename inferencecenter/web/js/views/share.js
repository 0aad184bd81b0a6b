// @ts-check
/** Share links: the owner's, and what another account sees. */

import { loadTexts, t, time } from "../i18n.js";
import { html, useEffect, useId, useRef, useState } from "../ui.js";
import { link, sharedAt } from "../state.js";
import { keptToken } from "../storage.js";
import { copy } from "../text/blocks.js";
import { asWireError } from "../wire/errors.js";
import { loose } from "../wire/transcript.js";
import { TurnView } from "./message.js";

await loadTexts("settings");

/** @typedef {import("../wire/types.js").Share} Share */
/** @typedef {{client_id: string, title: string, created_at: number, transcript: import("../wire/types.js").ChatMessage[]}} Shared */

const DAY_S = 86_400;
const LIFETIMES = [1, 7, 30, 0];
const USUAL_DAYS = 7;

/**
 * Creates a share link of a conversation, and lists those of the account.
 *
 * @param {{id: string}} props  The conversation.
 */
export function ShareLinks({ id }) {
  const field = useId();
  const [days, setDays] = useState(USUAL_DAYS);
  const [shares, setShares] = useState(/** @type {readonly Share[]} */ ([]));
  const [made, setMade] = useState("");
  const [said, setSaid] = useState("");
  const create = useRef(/** @type {HTMLButtonElement | null} */ (null));
  const work = async (/** @type {(there: import("../wire/link.js").Link) => Promise<unknown>} */ what) => {
    const there = link.peek();
    if (!there) return;
    setSaid("");
    try {
      await what(there);
      setShares((await there.request("list_shares")).shares);
    } catch (error) {
      const { message, hint } = asWireError(error);
      setSaid(`${message} ${hint}`);
    }
  };
  useEffect(() => {
    setMade("");
    work(async () => {});
  }, [id]);
  const share = () =>
    work(async (there) => {
      const { share: found, share_token: secret } = await there.request("create_share", {
        session_id: id,
        ...(days > 0 && { expires_in_s: days * DAY_S }),
      });
      setMade(new URL(`#/s/${found.share_id}/${secret}`, document.baseURI).href);
    });
  const revoke = (/** @type {string} */ share_id) =>
    work(async (there) => {
      await there.request("revoke_share", { share_id });
      if (made.includes(`/${share_id}/`)) setMade("");
      create.current?.focus();
    });
  const copyLink = async () => {
    if (await copy(made)) setSaid(t("share.copied"));
  };
  return html`
    <section class="setting">
      <h3>${t("share.title")}</h3>
      <p class="hint">${t("share.hint")}</p>
      <label for=${field}>${t("share.ends")}</label>
      <select id=${field} value=${days} onChange=${(/** @type {any} */ event) => setDays(Number(event.target.value))}>
        ${LIFETIMES.map((n) => html`<option key=${n} value=${n}>${n > 0 ? t("share.days", { n }) : t("share.never")}</option>`)}
      </select>
      <div class="suggestions transfer">
        <button type="button" class="button" ref=${create} onClick=${share}>${t("share.create")}</button>
        ${made && html`<button type="button" class="button" onClick=${copyLink}>${t("share.copy")}</button>`}
      </div>
      ${made && html`<input type="text" readonly aria-label=${t("share.link")} value=${made} onFocus=${(/** @type {any} */ event) => event.target.select()} />`}
      <p class="hint" role="status">${said}</p>
      ${shares.length > 0 &&
      html`<ul class="share-list" aria-label=${t("share.list")}>
        ${shares.map(
          ({ share_id, title, created_at: from, expires_at: end }) => html`<li key=${share_id}>
            <span><span dir="auto">${title || t("chat.untitled")}</span> <span class="hint">${lifeWords(from, end)}</span></span>
            <button type="button" class="button small" aria-label=${t("share.revoke_one", { title: title || t("chat.untitled") })}
              onClick=${() => revoke(share_id)}>${t("share.revoke")}</button>
          </li>`,
        )}
      </ul>`}
    </section>
  `;
}

/** The shared conversation that the address names. */
export function SharedConversation() {
  const at = sharedAt.value;
  const [found, setFound] = useState(/** @type {{shared?: Shared, problem?: string}} */ ({}));
  useEffect(() => {
    let isCurrent = true;
    setFound({});
    read(at).then(
      (shared) => isCurrent && setFound({ shared }),
      (error) => isCurrent && setFound({ problem: asWireError(error).message }),
    );
    return () => {
      isCurrent = false;
    };
  }, [at]);
  const { shared, problem } = found;
  if (problem) return html`<p class="notice" data-mood="bad" role="alert">${problem}</p>`;
  if (!shared) return html`<p class="empty hint">${t("notice.loading")}</p>`;
  return html`
    <header class="shared-head">
      <h1 dir="auto">${shared.title || t("chat.untitled")}</h1>
      <p class="hint">${t("share.by", { client: shared.client_id, date: dateOf(shared.created_at) })}</p>
    </header>
    <div class="turns"><${TurnView} turn=${loose(shared.transcript, at)} waiting="" doing=${{}} /></div>
  `;
}

/**
 * @param {string} at  Its id and secret.
 * @returns {Promise<Shared>}
 */
async function read(at) {
  const response = await requestShare(at);
  if (response.ok) {
    const shared = await response.json();
    return { ...shared, transcript: shared.transcript.map((/** @type {any} */ message) => withImagesOf(message, at)) };
  }
  throw new Error(response.status === 404 ? t("share.gone") : ((await response.json()).error?.message ?? t("share.unreadable")));
}

/**
 * @param {import("../wire/types.js").ChatMessage} message
 * @param {string} at
 */
function withImagesOf(message, at) {
  return { ...message, ...(message.images && { images: message.images.map((image) => ({ ...image, shared: at })) }) };
}

/**
 * @param {string} at  Its id and secret.
 * @param {string} [digest]  Of an image.
 */
function requestShare(at, digest) {
  const [id, secret = ""] = at.split("/");
  const headers = { authorization: `Bearer ${keptToken() ?? ""}`, "x-share-token": secret }; // no text
  const path = `shares/${encodeURIComponent(id)}${digest ? `/images/${digest}` : ""}`; // no text
  return fetch(new URL(path, document.baseURI), { headers });
}

/**
 * Returns the file of a shared conversation's image in Base64, null if it cannot be read.
 *
 * @param {string} at  Its id and secret.
 * @param {string} digest
 * @returns {Promise<{data: string} | null>}
 */
export async function sharedImage(at, digest) {
  const response = await requestShare(at, digest);
  return response.ok ? response.json() : null;
}

/**
 * @param {number} from
 * @param {number | undefined} end
 */
function lifeWords(from, end) {
  return end === undefined ? t("share.from", { from: dateOf(from) }) : t("share.from_to", { from: dateOf(from), to: dateOf(end) });
}

/** @param {number} seconds */
function dateOf(seconds) {
  return time(seconds * 1000, { dateStyle: "medium", timeStyle: "short" });
}
