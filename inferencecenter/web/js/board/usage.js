// @ts-check
/** The user's usage by day, and the remaining quota of the token. */

import { t, time } from "../i18n.js";
import { html } from "../ui.js";
import { count, duration } from "./format.js";
import { Panel } from "./panels.js";

/** Days that are shown. */
export const USAGE_DAYS = 30;

/** @typedef {import("../wire/types.js").UsageDay} Day */
/** @typedef {{label: string, used: number, limit: number | null, note: string}} Allowance */

/**
 * Returns the current use of each limit. Pure.
 *
 * @param {import("../wire/types.js").UsageLeft} left
 * @param {Partial<import("../wire/types.js").ClientLimits>} limits
 * @returns {Allowance[]}
 */
export function allowancesOf(left, limits) {
  const { tokens_per_day: day, tokens_per_minute: tokens, requests_per_minute: requests } = limits;
  const { concurrent_turns: turns } = limits;
  const anew = t("usage.resets", { time: duration(left.day_ends_in_ms) });
  const all = [
    { label: t("usage.tokens_today"), used: left.tokens_today, limit: day ?? null, note: anew },
    { label: t("usage.turns"), used: left.turns, limit: turns ?? null, note: "" },
  ];
  if (tokens) all.push(ofMinute(t("usage.tokens_minute"), tokens, left.minute_tokens_left));
  if (requests) all.push(ofMinute(t("usage.turns_minute"), requests, left.requests_left));
  return all;
}

/**
 * @param {string} label
 * @param {number} limit
 * @param {number | undefined} rest  The remainder.
 * @returns {Allowance}
 */
function ofMinute(label, limit, rest) {
  return { label, used: Math.max(0, limit - (rest ?? limit)), limit, note: "" };
}

/** @param {{told: import("./feed.js").Told, account: import("../wire/types.js").AuthSuccessEvent | null}} props */
export function Usage({ told, account }) {
  /** @type {import("../wire/types.js").UsageReportEvent | null} */
  const usage = told.answer;
  const aside = account && html`<span class="hint">${account.client_id}</span>`;
  return html`<${Panel} title=${t("usage.title")} aside=${aside}>
    ${told.fault && html`<p class="problem">${told.fault}</p>`}
    ${usage?.left && html`<${Allowances} all=${allowancesOf(usage.left, account?.limits ?? {})} />`}
    ${usage && html`<${Days} days=${usage.days} />`}
  <//>`;
}

/** @param {{all: readonly Allowance[]}} props */
function Allowances({ all }) {
  return html`<dl class="allowances">
    ${all.map(
      ({ label, used, limit, note }) => html`<div key=${label}>
        <dt>${label}</dt>
        <dd>
          <b>${count(used)}</b> ${limit === null ? html`<span class="hint">${t("usage.no_limit")}</span>` : t("tile.of", { count: limit })}
          ${limit !== null &&
          html`<meter min="0" max=${limit} high=${limit * 0.9} value=${Math.min(used, limit)}
            aria-label=${label}></meter>`}
          ${note && html`<small>${note}</small>`}
        </dd>
      </div>`,
    )}
  </dl>`;
}

/** @param {{days: readonly Day[]}} props */
export function Days({ days }) {
  if (!days.length) return html`<p class="hint">${t("usage.none", { n: USAGE_DAYS })}</p>`;
  const most = Math.max(...days.map(tokensOf), 1);
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${t("usage.by_day")}>
    <table>
      <thead>
        <tr>
          <th scope="col">${t("usage.day")}</th>
          ${[t("usage.day_turns"), t("usage.prompt"), t("usage.cached"), t("usage.generated")].map(
            (name) => html`<th scope="col" key=${name} class="number">${name}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${days.toReversed().map(
          (day) => html`<tr key=${day.day}>
            <th scope="row">
              ${time(Date.parse(day.day), { dateStyle: "medium", timeZone: "UTC" })}<span class="bar" style=${{ "--part": tokensOf(day) / most }} aria-hidden="true"></span>
            </th>
            <td class="number">${count(day.turns)}</td><td class="number">${count(day.prompt_tokens)}</td>
            <td class="number">${count(day.cached_tokens)}</td><td class="number">${count(day.completion_tokens)}</td>
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** @param {Day} day */
function tokensOf(day) {
  return day.prompt_tokens + day.completion_tokens;
}
