// @ts-check
/** Export of conversations as Markdown or JSON, and import of the latter. */

import { t } from "../i18n.js";
import { html, useRef, useState } from "../ui.js";
import { importConversation } from "../conversations.js";
import { sessions, titleOfSession } from "../list.js";
import { hello, link } from "../state.js";
import { asMarkdown, batchesOf, conversationsIn, fileName, presetsIn } from "../transfer.js";
import { asWireError } from "../wire/errors.js";

/** @typedef {import("../transfer.js").Exported} Exported */

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
    if (kind === "md") save(`${fileName(one.title)}.md`, asMarkdown(one), "text/markdown");
    else save(`${fileName(one.title)}.json`, jsonOf([one]), "application/json");
    return "";
  };
  const saveAll = async () => {
    const list = sessions.peek() ?? [];
    const all = [];
    for (const { session_id } of list) {
      setSaid(t("transfer.reading", { at: all.length + 1, count: list.length }));
      all.push(await read(session_id));
    }
    const kept = (await link.peek()?.request("list_presets"))?.presets ?? [];
    save("conversations.json", jsonOf(all, kept), "application/json");
    return t("transfer.exported", { n: all.length });
  };
  const load = async (/** @type {File} */ chosen) => {
    const text = await chosen.text();
    const found = conversationsIn(text);
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
 * @param {readonly Exported[]} conversations
 * @param {readonly import("../wire/types.js").Preset[]} [presets]
 */
function jsonOf(conversations, presets) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations, presets }, null, 2);
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
