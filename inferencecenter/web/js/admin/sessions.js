// @ts-check
/** The sessions of all accounts, without what was said in them, and their deletion. */

import { Panel } from "../board/panels.js";
import { t } from "../i18n.js";
import { html, useRef, useState } from "../ui.js";
import { Confirm } from "../views/dialog.js";
import { Field } from "./fields.js";
import { Rest, Said, moment, useOperation, useWindows } from "./windows.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").AccountSession} AccountSession */

const KINDS = /** @type {const} */ ([[false, "all_sessions.live"], [true, "all_sessions.archived"]]);

/** @param {{link: Link}} props */
export function Sessions({ link }) {
  const [archived, setArchived] = useState(false);
  const [whose, setWhose] = useState("");
  const [times, setTimes] = useState(0);
  const [doomed, setDoomed] = useState(/** @type {AccountSession | null} */ (null));
  const { busy, said, run } = useOperation();
  const head = useRef(/** @type {HTMLElement | null} */ (null));
  const list = useWindows(link, "list_all_sessions", {
    fields: { archived, ...(whose ? { client_id: whose } : {}) },
    rowsOf: (answer) => /** @type {AccountSession[]} */ (answer.all_sessions),
    times,
  });
  const filter = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    setWhose(String(new FormData(/** @type {HTMLFormElement} */ (event.currentTarget)).get("client_id")).trim());
    setTimes((before) => before + 1);
  };
  const remove = async (/** @type {AccountSession} */ { session_id: id }) => {
    await run(async () => {
      await link.request("purge_session", { session_id: id });
      setTimes((before) => before + 1);
      return t("all_sessions.deleted", { name: id });
    });
    head.current?.focus();
  };
  const aside = html`<div class="segments" role="group" aria-label=${t("all_sessions.shown")}>
    ${KINDS.map(
      ([kind, label]) => html`<button key=${label} type="button" aria-pressed=${archived === kind}
        onClick=${() => setArchived(kind)}>${t(label)}</button>`,
    )}
  </div>`;
  return html`<${Panel} title=${t("admin.sessions")} aside=${aside}>
    <form class="admin-form admin-inline" aria-label=${t("all_sessions.filter")} onSubmit=${filter} ref=${head} tabindex="-1">
      <${Field} label=${t("admin.account")} name="client_id" said=${said} placeholder=${t("admin.all")} maxlength="64" spellcheck=${false} />
      <button type="submit" class="button">${t("admin.show")}</button>
    </form>
    <${Said} said=${said} />
    <ul class="admin-list">
      ${list.rows?.map(
        (each) => html`<li class="admin-item" key=${each.session_id}>
          <div class="admin-head">
            <b>${each.client_id}</b>
            <code>${each.session_id}</code>
            ${each.state === "busy" && html`<span class="pill" data-mood="busy">${t("all_sessions.answering")}</span>`}
            ${each.attached && html`<span class="pill" data-mood="good">${t("all_sessions.connected")}</span>`}
            ${!each.stored && html`<span class="pill">${t("all_sessions.not_stored")}</span>`}
            <button type="button" class="button small" disabled=${busy} aria-label=${t("all_sessions.delete_one", { name: each.session_id })}
              onClick=${() => setDoomed(each)}>${t("all_sessions.delete_dots")}</button>
          </div>
          <p class="hint">${factsOf(each).join(" · ")}</p>
        </li>`,
      )}
    </ul>
    <${Rest} list=${list} empty=${t("all_sessions.empty")} />
    ${doomed &&
    html`<${Confirm} title=${t("all_sessions.question")} action=${t("all_sessions.delete")} onConfirm=${() => remove(doomed)} onClose=${() => setDoomed(null)}
      text=${t("all_sessions.warning", { client: doomed.client_id, n: doomed.messages })} />`}
  <//>`;
}

/** @param {AccountSession} session */
function factsOf({ model, messages, tokens, created_at: made, last_used_at: used }) {
  return [
    model || t("all_sessions.default_model"),
    t("all_sessions.messages", { n: messages }),
    t("all_sessions.tokens", { n: tokens }),
    t("all_sessions.made_at", { date: moment(made) }),
    t("all_sessions.used_at", { date: moment(used) }),
  ];
}
