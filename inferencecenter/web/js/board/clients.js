// @ts-check
/** The connected clients, for accounts that may list them, and their disconnection. */

import { t } from "../i18n.js";
import { html, useState } from "../ui.js";
import { Confirm } from "../views/dialog.js";
import { asWireError } from "../wire/errors.js";
import { useAnswer } from "./feed.js";
import { count } from "./format.js";
import { Panel, Unanswered } from "./panels.js";

/** @typedef {import("../wire/types.js").ConnectedClient} Client */

// Each request is recorded in the daemon's audit log, so it is rare.
const EVERY_MS = 20_000;
const NUMBERS = /** @type {const} */ ([
  ["connections", "clients.connections"],
  ["addresses", "clients.addresses"],
  ["sessions", "clients.sessions"],
  ["busy", "clients.busy"],
  ["tokens_today", "clients.tokens_today"],
]);

/** @param {{link: import("../wire/link.js").Link, active: boolean, own: string}} props  `own` is the signed-in account. */
export function Clients({ link, active, own }) {
  const [times, setTimes] = useState(0);
  const [chosen, setChosen] = useState(/** @type {Client | null} */ (null));
  const [said, setSaid] = useState({ words: "", failed: false });
  const told = useAnswer(link, { op: "list_clients", everyMs: EVERY_MS, active, times });
  /** @type {readonly Client[]} */
  const clients = told.answer?.clients ?? [];
  const disconnect = async (/** @type {string} */ name) => {
    try {
      const { connections } = await link.request("kick", { client_id: name });
      setSaid({ words: t("clients.disconnected", { name, n: connections }), failed: false });
    } catch (error) {
      const { message, hint } = asWireError(error);
      setSaid({ words: `${message} ${hint}`.trim(), failed: true });
    }
    setTimes((before) => before + 1);
  };
  return html`<${Panel} title=${t("clients.title")}>
    <${Unanswered} told=${told} nothing=${!clients.length} />
    <div role="status">${said.words && html`<p class=${said.failed ? "problem" : "board-note"}>${said.words}</p>`}</div>
    ${clients.length > 0 &&
    html`<div class="table-scroll" tabindex="0" role="region" aria-label=${t("clients.table")}>
      <table>
        <thead>
          <tr>
            <th scope="col">${t("clients.client")}</th>
            ${NUMBERS.map(([name, key]) => html`<th scope="col" key=${name} class="number">${t(key)}</th>`)}
            <td class="client-act"></td>
          </tr>
        </thead>
        <tbody>
          ${clients.map(
            (client) => html`<${Row} key=${client.client_id} client=${client} own=${client.client_id === own}
              active=${active} onDisconnect=${() => setChosen(client)} />`,
          )}
        </tbody>
      </table>
    </div>`}
    ${chosen &&
    html`<${Confirm} title=${t("clients.disconnect_question", { name: chosen.client_id })} text=${warningOf(chosen, own)} action=${t("clients.disconnect")}
      onConfirm=${() => disconnect(chosen.client_id)} onClose=${() => setChosen(null)} />`}
  <//>`;
}

/** @param {{client: Client, own: boolean, active: boolean, onDisconnect: () => void}} props */
function Row({ client, own, active, onDisconnect }) {
  return html`<tr>
    <th scope="row" class="client-name">
      ${client.client_id}${own && html` <span class="pill" data-mood="accent">${t("clients.you")}</span>`}
    </th>
    ${NUMBERS.map(([name]) => html`<td key=${name} class="number">${count(client[name])}</td>`)}
    <td class="client-act">
      <button type="button" class="button small" disabled=${!active} onClick=${onDisconnect}
        aria-label=${t("clients.disconnect_one", { name: client.client_id })}>${t("clients.disconnect")}</button>
    </td>
  </tr>`;
}

/**
 * Returns the consequences of disconnecting a client, as text. Pure.
 *
 * @param {Client} client
 * @param {string} own  The signed-in account.
 */
function warningOf(client, own) {
  const warning = t("clients.warning", { n: client.connections });
  return client.client_id === own ? `${t("clients.own")} ${warning}` : warning;
}
