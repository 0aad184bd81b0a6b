// @ts-check
/** Accounts: their list, a form for a new one, and for each its settings and tokens. */

import { Panel } from "../board/panels.js";
import { known, number, t } from "../i18n.js";
import { html, useRef, useState } from "../ui.js";
import { Confirm } from "../views/dialog.js";
import { Field, LimitFields, PriorityField, Scopes, limitsIn, limitsInWords } from "./fields.js";
import { Tokens } from "./tokens.js";
import { Rest, Said, moment, useOperation, useWindows } from "./windows.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").AccountSummary} Account */
/** @typedef {{account: Account, session_usage?: import("../wire/types.js").SessionUsage}} Doomed */

const MIB = 1024 * 1024;
const FATES = /** @type {const} */ ([["delete", "accounts.fate_delete"], ["keep", "accounts.fate_keep"]]);

/** @param {{link: Link}} props */
export function Accounts({ link }) {
  const list = useWindows(link, "list_accounts", { rowsOf: (answer) => /** @type {Account[]} */ (answer.accounts) });
  const [shown, setShown] = useState("");
  const added = (/** @type {Account} */ made) => {
    list.add(made);
    setShown(made.client_id);
  };
  const { busy, said, run } = useOperation();
  const [doomed, setDoomed] = useState(/** @type {Doomed | null} */ (null));
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  // What would be lost is read before the question.
  const ask = (/** @type {Account} */ { client_id: name }) =>
    run(async () => {
      setDoomed(await link.request("get_account", { client_id: name }));
      return "";
    });
  const remove = async (/** @type {string} */ name, /** @type {"delete" | "keep"} */ sessions) => {
    await run(async () => {
      await link.request("delete_account", { client_id: name, sessions });
      list.remove((row) => row.client_id === name);
      return t("accounts.deleted", { name });
    });
    box.current?.focus();
  };
  return html`
    <${NewAccount} link=${link} onMade=${added} />
    <${Panel} title=${t("admin.accounts")}>
      <div ref=${box} tabindex="-1"><${Said} said=${said} /></div>
      <ul class="admin-list">
        ${list.rows?.map(
          (each) => html`<${Row} key=${each.client_id} account=${each} link=${link} open=${shown === each.client_id}
            onDelete=${() => ask(each)} busy=${busy}
            onToggle=${() => setShown(shown === each.client_id ? "" : each.client_id)}
            onChange=${(/** @type {Account} */ now) => list.replace((row) => (row.client_id === now.client_id ? now : row))} />`,
        )}
      </ul>
      <${Rest} list=${list} empty=${t("accounts.empty")} />
    <//>
    ${doomed && html`<${Deletion} doomed=${doomed} onDelete=${remove} onClose=${() => setDoomed(null)} />`}
  `;
}

/** @param {{doomed: Doomed, onDelete: (name: string, sessions: "delete" | "keep") => void, onClose: () => void}} props */
function Deletion({ doomed: { account, session_usage: usage }, onDelete, onClose }) {
  const [fate, setFate] = useState(/** @type {"" | "delete" | "keep"} */ (""));
  const name = account.client_id;
  const lost = [
    t("accounts.tokens", { n: account.unrevoked_tokens }),
    t("accounts.sessions", { n: (usage?.live ?? 0) + (usage?.archived ?? 0) }),
    t("accounts.stored_mib", { mib: number(Math.round((10 * (usage?.stored_chars ?? 0)) / MIB) / 10) }),
  ];
  return html`<${Confirm} title=${t("accounts.delete_question", { name })} text=${t("accounts.delete_warning", { lost: lost.join(", ") })}
    action=${t("accounts.delete")} typed=${name} disabled=${!fate} onConfirm=${() => fate && onDelete(name, fate)} onClose=${onClose}>
    <fieldset class="admin-fates">
      <legend>${t("accounts.fate")}</legend>
      ${FATES.map(
        ([each, words]) => html`<label key=${each}>
          <input type="radio" name="fate" value=${each} checked=${fate === each} onChange=${() => setFate(each)} /> ${t(words)}
        </label>`,
      )}
    </fieldset>
  <//>`;
}

/** @param {{link: Link, onMade: (made: Account) => void}} props */
function NewAccount({ link, onMade }) {
  const { busy, said, run } = useOperation();
  const form = useRef(/** @type {HTMLFormElement | null} */ (null));
  const create = async (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const given = new FormData(/** @type {HTMLFormElement} */ (event.currentTarget));
    const scopes = given.getAll("scopes").map(String);
    await run(async () => {
      const answer = await link.request("create_account", { client_id: String(given.get("client_id")).trim(), scopes });
      form.current?.reset();
      onMade(answer.account);
      return t("accounts.created", { name: answer.account.client_id });
    });
  };
  return html`<${Panel} title=${t("accounts.new")}>
    <form class="admin-form" ref=${form} onSubmit=${create}>
      <${Field} label=${t("accounts.name")} name="client_id" said=${said} required maxlength="64" spellcheck=${false} />
      <${Scopes} given=${["user"]} said=${said} />
      <div><button type="submit" class="button primary" disabled=${busy}>${t("accounts.create")}</button></div>
    </form>
    <${Said} said=${said} />
  <//>`;
}

/**
 * @param {object} props
 * @param {Account} props.account
 * @param {Link} props.link
 * @param {boolean} props.open
 * @param {boolean} props.busy
 * @param {() => void} props.onToggle
 * @param {() => void} props.onDelete
 * @param {(now: Account) => void} props.onChange
 */
function Row({ account, link, open, busy, onToggle, onDelete, onChange }) {
  const isOurs = account.source === "database";
  const id = `account-${account.client_id}`;
  return html`<li class="admin-item">
    <div class="admin-head">
      <h3 id=${id}>${account.client_id}</h3>
      ${account.scopes.map((scope) => html`<span class="pill" key=${scope}>${scope}</span>`)}
      ${isOurs
        ? html`<button type="button" class="button small" aria-expanded=${open} aria-describedby=${id} onClick=${onToggle}>
            ${t(open ? "accounts.close" : "accounts.manage")}
          </button>`
        : html`<span class="hint">${t("accounts.in_file", { file: "clients.toml" })}</span>`}
    </div>
    <p class="hint">${factsOf(account).join(" · ")}</p>
    ${open &&
    html`<div class="admin-body" role="group" aria-labelledby=${id}>
      <${Tokens} link=${link} clientId=${account.client_id}
        onCount=${(/** @type {number} */ more) => onChange({ ...account, unrevoked_tokens: account.unrevoked_tokens + more })} />
      <${Settings} account=${account} link=${link} onChange=${onChange} />
      <div><button type="button" class="button danger" disabled=${busy} onClick=${onDelete}>${t("accounts.delete_dots")}</button></div>
    </div>`}
  </li>`;
}

/** @param {{account: Account, link: Link, onChange: (now: Account) => void}} props */
function Settings({ account, link, onChange }) {
  const { busy, said, run } = useOperation();
  const save = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const given = new FormData(/** @type {HTMLFormElement} */ (event.currentTarget));
    const readNumber = (/** @type {string} */ name) => {
      const text = String(given.get(name)).trim();
      return /** @type {number} */ (/^\d+(\.\d+)?$/.test(text) ? Number(text) : text);
    };
    const readChange = (/** @type {"retention_days" | "archive_mib"} */ name) => {
      const now = String(given.get(name)).trim() === "" ? null : readNumber(name);
      return now === (account[name] ?? null) ? {} : { [name]: now };
    };
    const fields = {
      client_id: account.client_id,
      scopes: given.getAll("scopes").map(String),
      priority: /** @type {Account["priority"]} */ (given.get("priority")),
      max_sessions: readNumber("max_sessions"),
      ...readChange("retention_days"),
      ...readChange("archive_mib"),
      access_limits: limitsIn(given),
    };
    run(async () => {
      onChange((await link.request("change_account", fields)).account);
      return t("accounts.saved");
    });
  };
  return html`<form class="admin-form" aria-label=${t("accounts.settings_of", { name: account.client_id })} onSubmit=${save}>
    <h4>${t("admin.settings")}</h4>
    <${Scopes} given=${account.scopes} said=${said} />
    <div class="admin-grid">
      <${PriorityField} given=${account.priority} />
      <${Field} label=${t("accounts.most_sessions")} name="max_sessions" said=${said} inputmode="numeric"
        defaultValue=${String(account.max_sessions)} />
      <${Field} label=${t("accounts.retention_days")} name="retention_days" said=${said} inputmode="decimal"
        hint=${t("accounts.retention_hint")} placeholder=${t("limits.inherited")} defaultValue=${String(account.retention_days ?? "")} />
      <${Field} label=${t("accounts.archive_mib")} name="archive_mib" said=${said} inputmode="numeric"
        placeholder=${t("limits.inherited")} defaultValue=${String(account.archive_mib ?? "")} />
    </div>
    <${LimitFields} given=${account.access_limits} said=${said} />
    <div><button type="submit" class="button primary" disabled=${busy}>${t("admin.save")}</button></div>
    <${Said} said=${said} />
  </form>`;
}

/** @param {Account} account */
function factsOf(account) {
  const { priority, max_sessions: sessions, unrevoked_tokens: tokens, created_at: made, access_limits: limits } = account;
  const { retention_days: days, archive_mib: mib } = account;
  return [
    account.source === "database" && t("accounts.tokens", { n: tokens }),
    t("accounts.sessions", { n: sessions }),
    days !== undefined && t("accounts.kept_days", { n: days }),
    mib !== undefined && t("accounts.stored_mib", { mib: number(mib) }),
    t("accounts.with_priority", { priority: known("priority", priority) ?? priority }),
    limitsInWords(limits),
    made !== undefined && t("accounts.since", { date: moment(made) }),
  ].filter(Boolean);
}
