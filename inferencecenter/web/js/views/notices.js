// @ts-check
/** Notices for all sessions: connection, engine, temperature, storage, shutdown. */

import { html, useEffect, useState } from "../ui.js";
import { failure, link, notices, outdated } from "../state.js";
import { Icon } from "./icons.js";

/** @type {Readonly<Record<string, string>>} */
const ENGINE = {
  starting: "The model is being loaded. Answers start when it is ready.",
  restarting: "The engine stopped and is restarting. Answers continue automatically.",
  failed: "The engine is not running.",
};

/** All current notices. */
export function Notices() {
  const { engine, thermal, storage, going_away: going } = notices.value;
  const broken = engine?.state === "failed";
  return html`
    <div class="notices" role="status">
      <${Connection} />
      ${outdated.value && html`<${ReloadOffer} words="The server has been updated." />`}
      ${engine && ENGINE[engine.state] &&
      html`<p class="notice" data-mood=${broken ? "bad" : "warn"}>
        ${ENGINE[engine.state]} ${engine.detail && html`<span class="notice-detail">${engine.detail}</span>`}
      </p>`}
      ${thermal && thermal.state !== "cool" &&
      html`<p class="notice" data-mood="warn">
        The GPU is ${thermal.state}${thermal.temp ? ` (${Math.round(thermal.temp)} °C)` : ""}: ${thermal.action}
      </p>`}
      ${storage?.state === "unavailable" &&
      html`<p class="notice" data-mood="bad">
        Answers are held back until the server can store them. <span class="notice-detail">${storage.detail}</span>
      </p>`}
      ${going &&
      link.value?.state.value === "open" &&
      html`<p class="notice" data-mood="warn">
        The server is stopping.${going.resume ? " Conversations are kept and can be continued afterwards." : ""}
      </p>`}
    </div>
  `;
}

/**
 * Offers to reload the page: the files of its version are no longer served.
 *
 * @param {{words: string}} props  Why.
 */
export function ReloadOffer({ words }) {
  return html`
    <p class="notice" data-mood="warn" role="alert">
      <span>${words} What you have typed is kept.</span>
      <button type="button" class="button small" onClick=${() => location.reload()}>Reload</button>
    </p>
  `;
}

/** Shows the lost connection, the reason, and the time of the next attempt. */
function Connection() {
  const there = link.value;
  const state = there?.state.value;
  const seconds = useCountdown(there?.retryAt.value ?? null);
  if (!there || state === "open" || state === "closed" || state === "refused") return null;
  const when = seconds > 0 ? `Retrying in ${seconds} s.` : "Connecting…";
  return html`
    <p class="notice" data-mood="warn">
      <span>${there.reason.value || "Not connected."} <span aria-live="off">${state === "waiting" ? when : "Connecting…"}</span></span>
      ${state === "waiting" &&
      html`<button type="button" class="button small" onClick=${() => there.retryNow()}>Retry now</button>`}
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
      <button type="button" class="icon-button" aria-label="Dismiss" onClick=${() => (failure.value = null)}>
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
