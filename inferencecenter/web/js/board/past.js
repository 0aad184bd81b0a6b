// @ts-check
/** Load and work of the last hours, which the daemon keeps: also from before the page was opened. */

import { t } from "../i18n.js";
import { html, useMemo, useState } from "../ui.js";
import { Chart } from "./chart.js";
import { chartsOf } from "./charts.js";
import { useAnswer } from "./feed.js";
import { short } from "./format.js";
import { Past } from "./history.js";
import { Panel, Readings, Unanswered } from "./panels.js";

/** @typedef {import("../wire/types.js").MetricsEvent} MetricsEvent */
/** @typedef {import("../wire/types.js").HistoryReportEvent} HistoryEvent */

const HOUR_S = 3600;
const HOURS = [1, 6, 24];
const EVERY_MS = 60_000;
const GROUPS = /** @type {const} */ (["model", "client"]);

/** @param {{link: import("../wire/link.js").Link, metrics: MetricsEvent | null, active: boolean}} props */
export function PastPanel({ link, metrics, active }) {
  const [hours, setHours] = useState(HOURS[0]);
  const [group, setGroup] = useState(/** @type {(typeof GROUPS)[number]} */ ("model"));
  const [asTable, setAsTable] = useState(false);
  const windowS = hours * HOUR_S;
  const told = useAnswer(link, { op: "metrics_history", fields: { range_s: windowS, group_by: group }, everyMs: EVERY_MS, active });
  /** @type {HistoryEvent | null} */
  const event = told.answer;
  const past = useMemo(() => event && new Past(event), [event]);
  const charts = past ? [...chartsOf(metrics), workChart(past, group)] : [];
  const aside = html`<div class="board-choices">
    <${Choice} label=${t("past.window")} options=${HOURS} chosen=${hours} onChoose=${setHours}
      words=${(/** @type {number} */ n) => t("past.hours", { n })} />
    <${Choice} label=${t("past.group")} options=${GROUPS} chosen=${group} onChoose=${setGroup}
      words=${(/** @type {(typeof GROUPS)[number]} */ each) => t(`past_by.${each}`)} />
    <button type="button" class="button quiet" aria-label=${t("past.table")} aria-pressed=${asTable}
      onClick=${() => setAsTable(!asTable)}>${t("board.as_table")}</button>
  </div>`;
  return html`<${Panel} title=${t("past.title")} aside=${aside}>
    <${Unanswered} told=${told} nothing=${!past} />
    ${past && asTable && html`<${Readings} label=${t("past.table")} charts=${charts} history=${past} windowS=${windowS} />`}
    ${past &&
    !asTable &&
    html`<div class="charts">
      ${charts.map(
        (chart) => html`<${Chart} key=${[chart.title, ...chart.lines.map(({ label }) => label)].join("\n")} options=${chart}
          history=${past} windowS=${windowS} version=${event?.starts_at} group="past" />`,
      )}
    </div>`}
  <//>`;
}

/**
 * @param {object} props
 * @param {string} props.label
 * @param {readonly any[]} props.options
 * @param {unknown} props.chosen
 * @param {(option: any) => string} props.words
 * @param {(option: any) => void} props.onChoose
 */
function Choice({ label, options, chosen, words, onChoose }) {
  return html`<div class="segments" role="group" aria-label=${label}>
    ${options.map(
      (option) => html`<button key=${option} type="button" aria-pressed=${option === chosen} onClick=${() => onChoose(option)}>
        ${words(option)}
      </button>`,
    )}
  </div>`;
}

/**
 * @param {Past} past
 * @param {(typeof GROUPS)[number]} group
 * @returns {import("./chart.js").ChartOptions}
 */
function workChart(past, group) {
  const lines = past.groups.map((name, index) => ({ column: /** @type {const} */ (`work${index}`), label: name ?? t("past.others") }));
  return { title: t(`past_work.${group}`), show: short, lines };
}
