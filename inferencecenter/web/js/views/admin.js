// @ts-check
/** Administration: a tab for each task that the scopes of the account allow. */

import { loadTexts, t } from "../i18n.js";
import { account, adminTab, link } from "../state.js";
import { html, useRef } from "../ui.js";
import { Lazy } from "./lazy.js";

await loadTexts("admin", "board");

/** @typedef {{name: string, label: string, scope: string, view: string, load: () => Promise<any>}} Tab  `name` is in the address. */

/** @type {readonly Tab[]} */
const TABS = [
  { name: "accounts", label: t("admin.accounts"), scope: "admin", view: "Accounts", load: () => import("../admin/accounts.js") },
  { name: "usage", label: t("admin.usage"), scope: "operator", view: "AllUsage", load: () => import("../admin/usage.js") },
  { name: "models", label: t("admin.models"), scope: "operator", view: "ModelFiles", load: () => import("../admin/models.js") },
  { name: "sessions", label: t("admin.sessions"), scope: "admin", view: "Sessions", load: () => import("../admin/sessions.js") },
  { name: "audit", label: t("admin.audit"), scope: "admin", view: "Audit", load: () => import("../admin/audit.js") },
  { name: "log", label: t("admin.log"), scope: "admin", view: "Logs", load: () => import("../admin/logs.js") },
];

/** The tabs of the signed-in account; empty without a connection. */
export function Administration() {
  const there = link.value;
  const scopes = account.value?.scopes ?? [];
  const tabs = TABS.filter(({ scope }) => scopes.includes(scope));
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  const tab = tabs.find(({ name }) => name === adminTab.value) ?? tabs[0];
  if (!there || !tab) return null;
  const keys = (/** @type {KeyboardEvent} */ event) => {
    const at = tabs.indexOf(tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    adminTab.value = next.name;
    /** @type {HTMLElement | null} */ (list.current?.querySelector(`[id="tab-${next.name}"]`))?.focus();
  };
  return html`<div class="board">
    <header class="board-head"><h1>${t("foot.admin")}</h1></header>
    <div class="segments tabs" role="tablist" aria-label=${t("foot.admin")} ref=${list} onKeyDown=${keys}>
      ${tabs.map(
        ({ name, label }) => html`<button key=${name} type="button" role="tab" id=${`tab-${name}`}
          aria-selected=${name === tab.name} aria-controls="admin-panel" tabindex=${name === tab.name ? 0 : -1}
          onClick=${() => (adminTab.value = name)}>${label}</button>`,
      )}
    </div>
    <div id="admin-panel" class="admin-panel" role="tabpanel" aria-labelledby=${`tab-${tab.name}`} tabindex="-1">
      <${Lazy} key=${tab.name} load=${tab.load} name=${tab.view} link=${there} />
    </div>
  </div>`;
}
