// @ts-check
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

/** The page of a signed-in user. */
export function Shell() {
  const [listed, setListed] = useState(false);
  const close = () => setListed(false);
  useEffect(() => {
    if (!listed) return undefined;
    const keys = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape") return;
      close();
      /** @type {HTMLElement | null} */ (document.querySelector("[aria-label=Conversations][aria-expanded]"))?.focus();
    };
    addEventListener("keydown", keys);
    /** @type {HTMLElement | null} */ (document.querySelector(".sidebar .new-chat"))?.focus();
    return () => removeEventListener("keydown", keys);
  }, [listed]);
  const opener = html`
    <button type="button" class="icon-button only-narrow" aria-label="Conversations" aria-expanded=${listed}
      onClick=${() => setListed(true)}><${Icon} name="menu" /></button>
  `;
  const session = current.value;
  return html`
    <div class="app">
      <${Sidebar} open=${listed} onClose=${close} />
      ${listed && html`<button type="button" class="scrim" aria-label="Close the list" onClick=${close}></button>`}
      ${view.value === "chat" && session && html`<${Conversation} key=${session} session=${session} opener=${opener} />`}
      ${view.value !== "chat" &&
      html`<main class="page">
        <div class="page-head">${opener}</div>
        <${Notices} />
        ${view.value === "dashboard" && html`<${Lazy} key="dashboard" load=${dashboard} name="Dashboard" />`}
        ${view.value === "models" && html`<${Lazy} key="models" load=${models} name="Models" />`}
      </main>`}
      ${helping.value && html`<${Lazy} load=${shortcuts} name="Shortcuts" onClose=${() => (helping.value = false)} />`}
      <${Failure} />
    </div>
  `;
}
