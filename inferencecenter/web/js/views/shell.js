// @ts-check
import { t } from "../i18n.js";
import { html, useEffect, useState } from "../ui.js";
import { current } from "../conversations.js";
import { helping, view } from "../state.js";
import { Conversation } from "./conversation.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";
import { Failure, Notices } from "./notices.js";
import { Sidebar } from "./sidebar.js";

const dashboard = () => import("./dashboard.js");
const shortcuts = () => import("./shortcuts.js");
const models = () => import("./models.js");
const share = () => import("./share.js");
const administration = () => import("./admin.js");

/** The page of a signed-in user. */
export function Shell() {
  const [listed, setListed] = useState(false);
  const close = () => setListed(false);
  useEffect(() => {
    if (!listed) return undefined;
    const keys = (/** @type {KeyboardEvent} */ event) => {
      // In a dialog it closes that only.
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) close();
    };
    addEventListener("keydown", keys);
    /** @type {HTMLElement | null} */ (document.querySelector(".sidebar .new-chat"))?.focus();
    return () => {
      removeEventListener("keydown", keys);
      // The focus moves from the hidden list to the button that opened it.
      if (document.activeElement?.matches("body, .sidebar *, .scrim")) /** @type {HTMLElement | null} */ (document.querySelector(".list-opener"))?.focus();
    };
  }, [listed]);
  const opener = html`
    <button type="button" class="icon-button only-narrow list-opener" aria-label=${t("list.title")} aria-expanded=${listed}
      onClick=${() => setListed(true)}><${Icon} name="menu" /></button>
  `;
  const session = current.value;
  return html`
    <div class="app">
      <${Sidebar} open=${listed} onClose=${close} />
      ${listed && html`<button type="button" class="scrim" aria-label=${t("list.close")} onClick=${close}></button>`}
      ${view.value === "chat" && session && html`<${Conversation} key=${session} session=${session} opener=${opener} />`}
      ${view.value !== "chat" &&
      html`<main class="page">
        <div class="page-head">${opener}</div>
        <${Notices} />
        ${view.value === "dashboard" && html`<${Lazy} key="dashboard" load=${dashboard} name="Dashboard" />`}
        ${view.value === "models" && html`<${Lazy} key="models" load=${models} name="Models" />`}
        ${view.value === "shared" && html`<${Lazy} key="shared" load=${share} name="SharedConversation" />`}
        ${view.value === "admin" && html`<${Lazy} key="admin" load=${administration} name="Administration" />`}
      </main>`}
      ${helping.value && html`<${Lazy} load=${shortcuts} name="Shortcuts" onClose=${() => (helping.value = false)} />`}
      <${Failure} />
    </div>
  `;
}
