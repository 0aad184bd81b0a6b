// @ts-check
/** What concerns all sessions: the connection, the engine, heat, storage, a daemon that stops. */

import { html, useEffect, useState } from "../ui.js";
import { failure, link, notices, outdated } from "../state.js";
import { Icon } from "./icons.js";

/** @type {Readonly<Record<string, string>>} */
const ENGINE = {
  starting: "The model is being loaded. Answers begin when it is there.",
  restarting: "The engine stopped and is started again. Answers go on by themselves.",
  failed: "The engine does not run.",
};

/** All there are now. */
export function Notices() {
  const { engine, thermal, storage, going_away: going } = notices.value;
  const broken = engine?.state === "failed";
  return html`
    <div class="notices" role="status">
      <${Connection} />
      ${outdated.value && html`<${ReloadOffer} words="A newer version is running." />`}
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
 * Offers to load the page again: its files have gone with the version of the server that they came from.
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

/** Says when there is no connection, why, and when the next attempt is. */
function Connection() {
  const there = link.value;
  const state = there?.state.value;
  const seconds = useCountdown(there?.retryAt.value ?? null);
  if (!there || state === "open" || state === "closed" || state === "refused") return null;
  const when = seconds > 0 ? `Trying again in ${seconds} s.` : "Connecting…";
  return html`
    <p class="notice" data-mood="warn">
      <span>${there.reason.value || "Not connected."} <span aria-live="off">${state === "waiting" ? when : "Connecting…"}</span></span>
      ${state === "waiting" &&
      html`<button type="button" class="button small" onClick=${() => there.retryNow()}>Try now</button>`}
    </p>
  `;
}

/** What could not be done, until it is dismissed. */
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
 * Returns the seconds until a time, every second anew.
 *
 * @param {number | null} at  As Date.now() tells.
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
