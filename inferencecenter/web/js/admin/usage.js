// @ts-check
/** Usage of all accounts: tokens by day as a chart and a table, and the accounts by tokens. */

import { useActive, useAnswer } from "../board/feed.js";
import { count } from "../board/format.js";
import { Panel, Unanswered } from "../board/panels.js";
import { Days } from "../board/usage.js";
import { t } from "../i18n.js";
import { html, useState } from "../ui.js";
import { Field } from "./fields.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").AccountUsage} AccountUsage */
/** @typedef {import("../wire/types.js").UsageDay} Day */

const EVERY_MS = 30_000;
const DAYS = 30;
const DAY_MS = 86_400_000;
const SUMS = /** @type {const} */ (["turns", "prompt_tokens", "cached_tokens", "completion_tokens"]);

/** @param {{link: Link}} props */
export function AllUsage({ link }) {
  const [whose, setWhose] = useState("");
  const told = useAnswer(link, { op: "list_usage", fields: { days: DAYS }, everyMs: EVERY_MS, active: useActive(link) });
  /** @type {readonly AccountUsage[]} */
  const accounts = told.answer?.usage_by_account ?? [];
  const omitted = told.answer?.omitted_accounts ?? 0;
  const chosen = accounts.filter(({ client_id: id }) => !whose || id === whose);
  const days = sumByDay(chosen.flatMap((each) => each.days));
  return html`
    <${Panel} title=${t("all_usage.title", { n: DAYS })}>
      <${Unanswered} told=${told} nothing=${false} />
      <${Field} label=${t("admin.account")} name="account" kind="select" value=${whose} onChange=${(/** @type {any} */ event) => setWhose(event.target.value)}>
        <option value="">${t("admin.all")}</option>
        ${accounts.map(({ client_id: id }) => html`<option key=${id} value=${id}>${id}</option>`)}
      <//>
      ${told.answer && html`<${Columns} days=${days} /><${Days} days=${days} />`}
    <//>
    <${Panel} title=${t("all_usage.accounts")}>
      ${told.answer && accounts.length === 0 && html`<p class="hint">${t("all_usage.none")}</p>`}
      ${accounts.length > 0 &&
      html`<div class="table-scroll" tabindex="0" role="region" aria-label=${t("all_usage.table")}>
        <table>
          <thead><tr>
            <th scope="col">${t("admin.account")}</th>
            ${[t("usage.day_turns"), t("usage.prompt"), t("usage.cached"), t("usage.generated")].map((name) => html`<th scope="col" key=${name} class="number">${name}</th>`)}
          </tr></thead>
          <tbody>
            ${accounts.map((each) => html`<tr key=${each.client_id}>
              <th scope="row" class="client-name">${each.client_id}</th>
              ${SUMS.map((name) => html`<td class="number" key=${name}>${count(each.days.reduce((sum, day) => sum + day[name], 0))}</td>`)}
            </tr>`)}
          </tbody>
        </table>
      </div>`}
      ${omitted > 0 && html`<p class="hint">${t("all_usage.omitted", { n: omitted })}</p>`}
    <//>
  `;
}

/**
 * Columns of the tokens of each day; the table below has the same values.
 *
 * @param {{days: readonly Day[]}} props
 */
function Columns({ days }) {
  const used = new Map(days.map((day) => [day.day, day.prompt_tokens + day.completion_tokens]));
  const most = Math.max(...used.values(), 1);
  const today = Math.floor(Date.now() / DAY_MS);
  const dates = Array.from({ length: DAYS }, (_, at) => new Date((today - DAYS + 1 + at) * DAY_MS).toISOString().slice(0, 10));
  return html`<div class="usage-columns" aria-hidden="true">
    ${dates.map((day) => html`<i key=${day} title=${`${day}: ${count(used.get(day) ?? 0)}`} style=${{ "--part": (used.get(day) ?? 0) / most }}></i>`)}
  </div>`;
}

/**
 * Returns the sums of several accounts by day, the latest last. Pure.
 *
 * @param {readonly Day[]} days
 * @returns {Day[]}
 */
export function sumByDay(days) {
  /** @type {Map<string, Day>} */
  const sums = new Map();
  for (const day of days) {
    const before = sums.get(day.day) ?? { day: day.day, turns: 0, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 };
    const sum = { ...before };
    for (const name of SUMS) sum[name] += day[name];
    sums.set(day.day, sum);
  }
  return [...sums.values()].sort((one, other) => (one.day < other.day ? -1 : 1));
}
