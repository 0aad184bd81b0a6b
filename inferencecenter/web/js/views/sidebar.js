// @ts-check
import { number, t } from "../i18n.js";
import { Fragment, html, useEffect, useRef, useState } from "../ui.js";
import { current, isAnswering, newChat, openSession, remove } from "../conversations.js";
import { full, rename, sessions, unread, usage } from "../list.js";
import { rootOf, versionsOf, withoutVersions } from "../versions.js";
import { account, administers, preferences, signOut, view } from "../state.js";
import { Confirm } from "./dialog.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";

/** @typedef {import("../list.js").Summary} Summary */

const foundViews = () => import("./found.js");
const DAY_MS = 86_400_000;
/** Conversations that are added to the list at a time. */
const WINDOW = 100;
/** Shares of the limits from which they are shown. */
const NEARLY_ACTIVE = 7 / 8;
const NEARLY_STORED = 0.9;
const THEMES = /** @type {const} */ (["system", "light", "dark"]);
const THEME_ICONS = { system: "system", light: "sun", dark: "moon" };
const THEME_LABELS = /** @type {const} */ ({ system: "foot.theme_system", light: "foot.theme_light", dark: "foot.theme_dark" });

/** Moves the focus to the search of conversations; opens the list where it is closed. */
export function focusSearch() {
  const field = /** @type {HTMLElement | null} */ (document.querySelector(".sidebar .filter"));
  if (!field?.checkVisibility({ visibilityProperty: true })) {
    /** @type {HTMLElement | null} */ (document.querySelector(".list-opener"))?.click();
  }
  requestAnimationFrame(() => field?.focus());
}

/**
 * Conversations, other views, and the account.
 *
 * @param {{open: boolean, onClose: () => void}} props  Whether it is open on narrow screens.
 */
export function Sidebar({ open, onClose }) {
  const [filter, setFilter] = useState("");
  const [count, setCount] = useState(WINDOW);
  const [focused, setFocused] = useState("");
  const list = sessions.value;
  const wanted = filter.trim().toLowerCase();
  const found = withoutVersions(list ?? []).filter((each) => titleOf(each).toLowerCase().includes(wanted));
  const listed = found.slice(0, count);
  const shown = rootOf(list, current.value?.id.value ?? "");
  const stop = listed.find(isOf(focused)) ?? listed.find(isOf(shown)) ?? listed[0];
  const type = (/** @type {any} */ event) => {
    setFilter(event.target.value);
    setCount(WINDOW);
  };
  const start = () => {
    newChat();
    onClose();
  };
  return html`
    <nav class="sidebar" data-open=${open} aria-label=${t("list.title")}>
      <div class="sidebar-head">
        <span class="brand"><span class="mark" aria-hidden="true"></span>InferenceCenter</span>
        <button type="button" class="icon-button only-narrow" aria-label=${t("list.close")} onClick=${onClose}>
          <${Icon} name="close" />
        </button>
      </div>
      <button type="button" class="button new-chat" title=${t("keys.new")} onClick=${start}>
        <${Icon} name="plus" /> ${t("chat.new")}
      </button>
      <input type="search" class="filter" placeholder=${t("list.search")} title=${t("keys.search")} aria-label=${t("list.search_label")}
        value=${filter} onInput=${type} />
      <div class="sidebar-list" onKeyDown=${moveFocus} onFocusIn=${(/** @type {any} */ event) => setFocused(event.target.closest(".item")?.dataset.id ?? "")}>
        ${list === null && html`<p class="hint">${t("notice.loading")}</p>`}
        ${list?.length === 0 && html`<p class="hint">${t("list.empty")}</p>`}
        ${byAge(listed, Date.now()).map(
          ([age, group]) => html`
            <${Fragment} key=${age}>
              <h2>${age}</h2>
              <ul>
                ${group.map((each) => html`<${Item} key=${each.session_id} summary=${each} isStop=${each === stop} onClose=${onClose} />`)}
              </ul>
            <//>
          `,
        )}
        ${found.length > count && html`<${More} key=${count} onReach=${() => setCount(count + WINDOW)} />`}
        ${wanted && html`<${Lazy} load=${foundViews} name="Found" words=${wanted} hasTitles=${found.length > 0} onClose=${onClose} />`}
      </div>
      <${Limits} />
      <${Foot} onClose=${onClose} />
    </nav>
  `;
}

/** @param {{onReach: () => void}} props  Called when the end of what is listed is nearly in view. */
function More({ onReach }) {
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => {
    const end = /** @type {HTMLElement} */ (ref.current);
    const observer = new IntersectionObserver(([seen]) => seen.isIntersecting && onReach(), { root: end.parentElement, rootMargin: "0px 0px 100%" });
    observer.observe(end);
    return () => observer.disconnect();
  }, []);
  return html`<div class="more" ref=${ref}></div>`;
}

/** @param {string} id */
function isOf(id) {
  return (/** @type {Summary} */ { session_id: own }) => own === id;
}

/** @param {{summary: Summary, isStop: boolean, onClose: () => void}} props  Whether Tab stops here; the arrow keys reach the others. */
function Item({ summary, isStop, onClose }) {
  const [doing, setDoing] = useState(/** @type {"" | "renaming" | "deleting"} */ (""));
  const ref = useRef(/** @type {HTMLButtonElement | null} */ (null));
  const id = summary.session_id;
  const title = titleOf(summary);
  const tabIndex = isStop ? 0 : -1;
  const shown = view.value === "chat" ? (current.value?.id.value ?? null) : null;
  const versions = versionsOf(sessions.value, id);
  const selected = shown !== null && rootOf(sessions.value, shown) === rootOf(sessions.value, id);
  const busy = versions.some(isAnswering);
  const isUnread = !busy && versions.some((each) => unread.value.has(each.session_id));
  const done = () => {
    setDoing("");
    setTimeout(() => ref.current?.focus());
  };
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "F2") setDoing("renaming");
    else if (event.key === "Delete") setDoing("deleting");
  };
  const select = () => {
    openSession(id);
    onClose();
  };
  if (doing === "renaming") {
    return html`<li><${Rename} title=${title} onDone=${done} onSave=${(/** @type {string} */ to) => rename(id, to)} /></li>`;
  }
  return html`
    <li class="item" data-id=${id} data-selected=${selected} data-unread=${isUnread}>
      <button type="button" class="item-open" ref=${ref} tabindex=${tabIndex} aria-current=${selected ? "page" : undefined} title=${title}
        onClick=${select} onKeyDown=${keys}>
        ${busy && html`<span class="dot" role="img" aria-label=${t("list.answering")}></span>`}
        ${isUnread && html`<span class="dot" data-still role="img" aria-label=${t("list.unread")}></span>`}
        <span class="item-title" dir="auto">${title}</span>
      </button>
      <span class="item-actions">
        <button type="button" class="icon-button" tabindex=${tabIndex} aria-label=${t("list.rename", { title })} title=${t("list.rename_title")}
          onClick=${() => setDoing("renaming")}><${Icon} name="edit" /></button>
        <button type="button" class="icon-button" tabindex=${tabIndex} aria-label=${t("list.delete_one", { title })} title=${t("list.delete")}
          onClick=${() => setDoing("deleting")}><${Icon} name="trash" /></button>
      </span>
      ${doing === "deleting" &&
      html`<${Confirm} title=${t("list.delete_question")} text=${t("list.delete_warning", { title, n: versions.length })} action=${t("list.delete")}
        onConfirm=${() => remove(id)} onClose=${done} />`}
    </li>
  `;
}

/** @param {{title: string, onSave: (title: string) => void, onDone: () => void}} props */
function Rename({ title, onSave, onDone }) {
  const saved = useRef(false);
  const save = (/** @type {string} */ text) => {
    if (saved.current) return;
    saved.current = true;
    if (text.trim() && text.trim() !== title) onSave(text.trim());
    onDone();
  };
  const keys = (/** @type {any} */ event) => {
    event.stopPropagation();
    if (event.key === "Enter" && !event.isComposing) save(event.target.value);
    if (event.key === "Escape") save(title);
  };
  return html`<input class="rename" aria-label=${t("list.rename_label")} maxlength="200" value=${title} onKeyDown=${keys}
    ref=${focusAll} onBlur=${(/** @type {any} */ event) => save(event.target.value)} />`;
}

/** How many conversations there are, where a limit is near. */
function Limits() {
  const used = usage.value;
  if (!used) return null;
  const words = [activeWords(used), storedWords(used)].filter(Boolean);
  if (words.length === 0) return null;
  return html`<p class="hint limits" title=${t("list.limits_title")}>${words.join(" ")}</p>`;
}

/** @param {import("../wire/types.js").SessionUsage} used */
function activeWords({ live, max_sessions: most, archived }) {
  if (live < NEARLY_ACTIVE * most) return "";
  return archived > 0 ? t("list.active_archived", { live, most, archived }) : t("list.active", { live, most });
}

/** @param {import("../wire/types.js").SessionUsage} used */
function storedWords({ stored_chars: held, max_stored_chars: most }) {
  if (full.value) return t("list.full");
  return held < NEARLY_STORED * most ? "" : t("list.nearly_full", { percent: `${number(Math.floor((100 * held) / most))} %` });
}

/** @param {{onClose: () => void}} props */
function Foot({ onClose }) {
  const theme = preferences.value.theme;
  const go = (/** @type {import("../state.js").View} */ to) => () => {
    view.value = to;
    onClose();
  };
  const nextTheme = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    preferences.value = { ...preferences.value, theme: next };
  };
  return html`
    <div class="sidebar-foot">
      <${ViewLink} to="chat" icon="chat" label=${t("foot.chat")} onClick=${go("chat")} />
      <${ViewLink} to="dashboard" icon="chart" label=${t("foot.dashboard")} onClick=${go("dashboard")} />
      <${ViewLink} to="models" icon="cube" label=${t("foot.models")} onClick=${go("models")} />
      ${administers.value && html`<${ViewLink} to="admin" icon="settings" label=${t("foot.admin")} onClick=${go("admin")} />`}
      <div class="account">
        <span class="account-name" title=${t("foot.account")}>${account.value?.client_id}</span>
        <button type="button" class="icon-button" aria-label=${t(THEME_LABELS[theme])} title=${t(THEME_LABELS[theme])}
          onClick=${nextTheme}><${Icon} name=${THEME_ICONS[theme]} /></button>
        <button type="button" class="icon-button" aria-label=${t("foot.sign_out")} title=${t("foot.sign_out")} onClick=${() => signOut()}>
          <${Icon} name="leave" />
        </button>
      </div>
    </div>
  `;
}

/** @param {{to: string, icon: string, label: string, onClick: () => void}} props */
function ViewLink({ to, icon, label, onClick }) {
  const here = view.value === to;
  return html`
    <button type="button" class="view-link" aria-current=${here ? "page" : undefined} onClick=${onClick}>
      <${Icon} name=${icon} /> ${label}
    </button>
  `;
}

/** @param {Summary} summary */
function titleOf(summary) {
  return summary.metadata.title || t("chat.untitled");
}

/**
 * Groups conversations by the time of their last use.
 *
 * @param {readonly Summary[]} list  Most recent first.
 * @param {number} now  Milliseconds since 1970.
 * @returns {[string, Summary[]][]}
 */
export function byAge(list, now) {
  const midnight = new Date(now).setHours(0, 0, 0, 0);
  const ages = /** @type {const} */ ([
    [t("age.today"), midnight],
    [t("age.yesterday"), midnight - DAY_MS],
    [t("age.week"), midnight - 7 * DAY_MS],
    [t("age.month"), midnight - 30 * DAY_MS],
    [t("age.older"), -Infinity],
  ]);
  const ageOf = (/** @type {Summary} */ each) => ages.find(([, since]) => each.last_used_at * 1000 >= since)?.[0];
  /** @type {[string, Summary[]][]} */
  const groups = ages.map(([age]) => [age, list.filter((each) => ageOf(each) === age)]);
  return groups.filter(([, group]) => group.length > 0);
}

/** @param {HTMLInputElement | null} input */
function focusAll(input) {
  if (!input || input === document.activeElement) return;
  input.focus();
  input.select();
}

/** @param {any} event  Arrow keys move through the list. */
function moveFocus(event) {
  const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
  if (!step || !event.target.classList.contains("item-open")) return;
  const all = [...event.currentTarget.querySelectorAll(".item-open")];
  all[all.indexOf(event.target) + step]?.focus();
  event.preventDefault();
}
