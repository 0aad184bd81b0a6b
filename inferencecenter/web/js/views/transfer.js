// @ts-check
/** Export of conversations as Markdown or JSON, and import of the latter. */

import { t } from "../i18n.js";
import { html, useRef, useState } from "../ui.js";
import { importConversation } from "../conversations.js";
import { sessions, titleOfSession } from "../list.js";
import { hello, link } from "../state.js";
import { keptToken } from "../storage.js";
import { asMarkdown, batchesOf, conversationsIn, fileName, imagesIn, presetsIn } from "../transfer.js";
import { asWireError, WireError } from "../wire/errors.js";

/** @typedef {import("../transfer.js").Exported} Exported */

/** Of the files of images in an export. */
const MOST_IMAGE_CHARS = 64 * 2 ** 20;
const FORMAT = "inferencecenter.conversations";

/** @param {{id: string | null}} props  The shown conversation. */
export function Transfer({ id }) {
  const [said, setSaid] = useState("");
  const [busy, setBusy] = useState(false);
  const file = useRef(/** @type {HTMLInputElement | null} */ (null));
  const work = async (/** @type {() => Promise<string>} */ what) => {
    setBusy(true);
    setSaid("");
    try {
      setSaid(await what());
    } catch (error) {
      const { message, hint } = asWireError(error);
      setSaid(`${message} ${hint}`);
    }
    setBusy(false);
  };
  const saveOne = async (/** @type {"md" | "json"} */ kind) => {
    const one = await read(/** @type {string} */ (id));
    const { files, n_omitted: n } = await imageFiles([one]);
    if (kind === "md") save(`${fileName(one.title)}.md`, asMarkdown(one, files), "text/markdown");
    else save(`${fileName(one.title)}.json`, jsonOf([one], files), "application/json");
    return omitted(n);
  };
  const saveAll = async () => {
    const list = sessions.peek() ?? [];
    const all = [];
    for (const { session_id } of list) {
      setSaid(t("transfer.reading", { at: all.length + 1, count: list.length }));
      all.push(await read(session_id));
    }
    const kept = (await link.peek()?.request("list_presets"))?.presets ?? [];
    const { files, n_omitted: n } = await imageFiles(all);
    save("conversations.json", jsonOf(all, files, kept), "application/json");
    return `${t("transfer.exported", { n: all.length })} ${omitted(n)}`.trim();
  };
  const load = async (/** @type {File} */ chosen) => {
    const text = await chosen.text();
    const { conversations: found, files } = conversationsIn(text);
    for (const digest of imagesIn(found)) await uploadImage(files[digest].data);
    const limit = (hello.peek()?.limits.max_frame_bytes ?? 2 ** 20) / 2;
    for (const each of found) await importConversation(each, batchesOf(each.messages, limit));
    for (const preset of presetsIn(text)) await link.peek()?.request("save_preset", { preset });
    return t("transfer.imported", { n: found.length });
  };
  const choose = (/** @type {any} */ event) => {
    const [chosen] = event.target.files;
    if (chosen) work(() => load(chosen));
    event.target.value = "";
  };
  return html`
    <section class="setting">
      <h3>${t("transfer.title")}</h3>
      <div class="suggestions transfer">
        ${id !== null &&
        html`<button type="button" class="button" disabled=${busy} onClick=${() => work(() => saveOne("md"))}>${t("transfer.markdown")}</button>
          <button type="button" class="button" disabled=${busy} onClick=${() => work(() => saveOne("json"))}>${t("transfer.json")}</button>`}
        <button type="button" class="button" disabled=${busy} onClick=${() => work(saveAll)}>${t("transfer.all")}</button>
        <button type="button" class="button" disabled=${busy} onClick=${() => file.current?.click()}>${t("transfer.import")}</button>
        <input type="file" ref=${file} hidden accept=".json,application/json" aria-label=${t("transfer.file")} onChange=${choose} />
      </div>
      <p class="hint" role="status">${said}</p>
    </section>
  `;
}

/**
 * @param {string} id
 * @returns {Promise<Exported>}
 */
async function read(id) {
  /** @type {import("../wire/types.js").SessionEvent} */
  const told = await link.peek()?.request("get_session", { session_id: id });
  return { title: titleOfSession(id), model: told.model, messages: told.transcript };
}

/**
 * Reads the files of images, up to a limit for all of them.
 *
 * @param {readonly Exported[]} conversations
 * @returns {Promise<{files: import("../transfer.js").Files, n_omitted: number}>}
 */
async function imageFiles(conversations) {
  /** @type {Record<string, {media_type: string, data: string}>} */
  const files = {};
  const digests = imagesIn(conversations);
  let room = MOST_IMAGE_CHARS;
  for (const digest of digests) {
    if (room <= 0) break;
    const found = await link.peek()?.request("get_image", { digest }).catch(unlessGone);
    room -= found?.data.length ?? 0;
    if (found && room >= 0) files[digest] = { media_type: found.media_type, data: found.data };
  }
  return { files, n_omitted: digests.length - Object.keys(files).length };
}

/** @param {unknown} error */
function unlessGone(error) {
  if (asWireError(error).code !== "invalid_request") throw error;
  return null;
}

/** @param {number} n  Of images. */
function omitted(n) {
  return n > 0 ? t("transfer.omitted", { n }) : "";
}

/**
 * Stores an image for the messages that name it.
 *
 * @param {string} data
 */
async function uploadImage(data) {
  const response = await fetch(new URL("images", document.baseURI), {
    method: "POST",
    headers: { authorization: `Bearer ${keptToken() ?? ""}`, "content-type": "application/json" }, // no text
    body: JSON.stringify({ data }),
  });
  if (!response.ok) throw new WireError({ code: "invalid_request", message: t("transfer.bad_image"), hint: "", ...(await response.json()).error });
}

/**
 * @param {readonly Exported[]} conversations
 * @param {import("../transfer.js").Files} images
 * @param {readonly import("../wire/types.js").Preset[]} [presets]
 */
function jsonOf(conversations, images, presets) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations, images, presets }, null, 2);
}

/**
 * @param {string} name
 * @param {string} text
 * @param {string} type
 */
function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
