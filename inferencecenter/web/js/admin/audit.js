// @ts-check
/** The audit log, newest first, by windows. */

import { count } from "../board/format.js";
import { Panel } from "../board/panels.js";
import { known, t } from "../i18n.js";
import { html, useState } from "../ui.js";
import { Field } from "./fields.js";
import { Rest, moment, useWindows } from "./windows.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").AuditRecord} AuditRecord */

const COLUMNS = /** @type {const} */ ([
  "audit.time", "audit.event", "admin.account", "audit.by", "audit.detail", "audit.token", "audit.address", "audit.times",
]);

/** @param {{link: Link}} props */
export function Audit({ link }) {
  const [events, setEvents] = useState(/** @type {readonly string[]} */ ([]));
  const [filter, setFilter] = useState(/** @type {{client_id?: string, event?: string}} */ ({}));
  const [times, setTimes] = useState(0);
  const list = useWindows(link, "read_audit", {
    fields: filter,
    rowsOf: (answer) => {
      setEvents(answer.audit_events);
      return /** @type {AuditRecord[]} */ (answer.audit_lines);
    },
    cursorOf: (answer) => answer.older,
    cursor: "before",
    times,
  });
  const show = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = new FormData(/** @type {HTMLFormElement} */ (event.currentTarget));
    const given = ["client_id", "event"].map((name) => [name, String(form.get(name)).trim()]);
    setFilter(Object.fromEntries(given.filter(([, value]) => value)));
    setTimes((before) => before + 1);
  };
  return html`<${Panel} title=${t("admin.audit")}>
    <form class="admin-form admin-inline" aria-label=${t("audit.filter")} onSubmit=${show}>
      <${Field} label=${t("admin.account")} name="client_id" placeholder=${t("admin.all")} maxlength="64" spellcheck=${false} />
      <${Field} label=${t("audit.event")} name="event" kind="select">
        <option value="">${t("admin.all")}</option>
        ${events.map((each) => html`<option key=${each} value=${each}>${nameOf(each)}</option>`)}
      <//>
      <button type="submit" class="button">${t("admin.show")}</button>
    </form>
    ${(list.rows?.length ?? 0) > 0 &&
    html`<div class="table-scroll" tabindex="0" role="region" aria-label=${t("audit.table")}>
      <table>
        <thead><tr>${COLUMNS.map((name) => html`<th scope="col" key=${name}>${t(name)}</th>`)}</tr></thead>
        <tbody>
          ${list.rows?.map((line) => html`<tr key=${line.line_id}>
            <th scope="row">${moment(line.at)}</th>
            <td>${nameOf(line.event)}</td>
            <td>${line.client_id}</td><td>${line.actor}</td>
            <td class="admin-detail">${line.detail}</td>
            <td>${line.token_id}</td><td>${line.address}</td><td class="number">${count(line.count)}</td>
          </tr>`)}
        </tbody>
      </table>
    </div>`}
    <${Rest} list=${list} empty=${t("audit.empty")} />
  <//>`;
}

/** @param {string} event */
function nameOf(event) {
  return known("audit_event", event) ?? event.replaceAll("_", " ");
}
