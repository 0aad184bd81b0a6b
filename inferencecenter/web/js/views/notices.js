// @ts-check
/** Notices for all sessions: connection, engine, temperature, storage, shutdown. */

import { known, number, t } from "../i18n.js";
import { html, useEffect, useState } from "../ui.js";
import { failure, link, notices, outdated } from "../state.js";
import { Icon } from "./icons.js";

/** All current notices. */
export function Notices() {
  const { engine, thermal, storage, going_away: going } = notices.value;
  const broken = engine?.state === "failed";
  const words = engine && known("notice_engine", engine.state);
  return html`
    <div class="notices" role="status">
      <${Connection} />
      ${outdated.value && html`<${ReloadOffer} words=${t("notice.updated")} />`}
      ${words &&
      html`<p class="notice" data-mood=${broken ? "bad" : "warn"}>
        ${words} ${engine.detail && html`<span class="notice-detail">${engine.detail}</span>`}
      </p>`}
      ${thermal && thermal.state !== "cool" &&
      html`<p class="notice" data-mood="warn">
        ${thermalWords(thermal)}
      </p>`}
      ${storage?.state === "unavailable" &&
      html`<p class="notice" data-mood="bad">
        ${t("notice.storage")} <span class="notice-detail">${storage.detail}</span>
      </p>`}
      ${going &&
      link.value?.state.value === "open" &&
      html`<p class="notice" data-mood="warn">
        ${t(going.resume ? "notice.stopping_kept" : "notice.stopping")}
      </p>`}
    </div>
  `;
}

/** @param {import("../wire/types.js").ThermalEvent} thermal */
function thermalWords({ state, temp, action }) {
  return temp ? t("notice.thermal_at", { state, action, temperature: `${number(temp, 0)} °C` }) : t("notice.thermal", { state, action });
}

/**
 * Offers to reload the page: the files of its version are no longer served.
 *
 * @param {{words: string}} props  Why.
 */
export function ReloadOffer({ words }) {
  return html`
    <p class="notice" data-mood="warn" role="alert">
      <span>${t("notice.kept", { why: words })}</span>
      <button type="button" class="button small" onClick=${() => location.reload()}>${t("notice.reload")}</button>
    </p>
  `;
}

/** Shows the lost connection, the reason, and the time of the next attempt. */
function Connection() {
  const there = link.value;
  const state = there?.state.value;
  const seconds = useCountdown(there?.retryAt.value ?? null);
  if (!there || state === "open" || state === "closed" || state === "refused") return null;
  const connecting = t("notice.connecting");
  const when = seconds > 0 ? t("notice.retrying", { seconds }) : connecting;
  return html`
    <p class="notice" data-mood="warn">
      <span>${there.reason.value || t("notice.not_connected")} <span aria-live="off">${state === "waiting" ? when : connecting}</span></span>
      ${state === "waiting" &&
      html`<button type="button" class="button small" onClick=${() => there.retryNow()}>${t("notice.retry")}</button>`}
    </p>
  `;
}

/** The last error, until it is dismissed. */
export function Failure() {
  const error = failure.value;
  if (!error) return null;
  return html`
    <div class="toast" role="alert">
      <div>
        <strong>${error.message}</strong>
        ${error.hint && html`<p>${error.hint}</p>`}
      </div>
      <button type="button" class="icon-button" aria-label=${t("notice.dismiss")} onClick=${() => (failure.value = null)}>
        <${Icon} name="close" />
      </button>
    </div>
  `;
}

/**
 * Returns the seconds until a time, updated every second.
 *
 * @param {number | null} at  In milliseconds, as Date.now().
 */
function useCountdown(at) {
  const [now, setNow] = useState(Date.now());
  useEffect(() => {
    if (at === null) return undefined;
    setNow(Date.now());
    const timer = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(timer);
  }, [at]);
  return at === null ? 0 : Math.max(0, Math.ceil((at - now) / 1000));
}
