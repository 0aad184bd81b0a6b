// @ts-check
/** Text panels of the dashboard: facts, and readings as a table. */

import { t } from "../i18n.js";
import { html, useId } from "../ui.js";
import { factsOf } from "./facts.js";

/**
 * A titled part of the page.
 *
 * @param {{title: string, aside?: unknown, children?: unknown}} props
 */
export function Panel({ title, aside, children }) {
  const id = useId();
  return html`<section class="panel" aria-labelledby=${id}>
    <header class="panel-head"><h2 id=${id}>${title}</h2>${aside}</header>
    ${children}
  </section>`;
}

/**
 * The readings of one part of the daemon.
 *
 * @param {{title: string, told: import("./feed.js").Told}} props
 */
export function Facts({ title, told }) {
  const facts = factsOf(told.answer?.values);
  return html`<${Panel} title=${title}>
    <${Unanswered} told=${told} nothing=${!facts.length} />
    <${FactList} facts=${facts} />
  <//>`;
}

/**
 * A placeholder for a reply: its error, or that it is pending.
 *
 * @param {{told: import("./feed.js").Told, nothing: boolean}} props  `nothing`: there is no other content.
 */
export function Unanswered({ told, nothing }) {
  if (told.fault) return html`<p class="problem">${told.fault}</p>`;
  return nothing && html`<p class="hint">${t(told.answer ? "board.no_data" : "notice.loading")}</p>`;
}

/**
 * Labels and values side by side, in columns if the panel is `wide`.
 *
 * @param {{facts: readonly import("./facts.js").Fact[], wide?: boolean}} props
 */
export function FactList({ facts, wide = false }) {
  return html`<dl class=${wide ? "fact-list wide" : "fact-list"}>
    ${facts.map(({ name, label, text }) => html`<div key=${name}><dt>${label}</dt><dd>${text}</dd></div>`)}
  </dl>`;
}

/**
 * The charts' data as a table, for accessibility.
 *
 * @param {object} props
 * @param {readonly import("./chart.js").ChartOptions[]} props.charts
 * @param {import("./history.js").History} props.history
 * @param {number} props.windowS
 * @param {string} [props.label]
 */
export function Readings({ charts, history, windowS, label = t("board.metrics_table") }) {
  const rows = charts.flatMap((chart) =>
    chart.lines.map((line) => {
      const name = chart.lines.length > 1 ? `${chart.title}: ${line.label}` : chart.title;
      return { name, show: chart.show, summary: history.summary(line.column, windowS) };
    }),
  );
  return html`<div class="table-scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead>
        <tr>
          <th scope="col">${t("board.metric")}</th>
          ${[t("board.now"), t("board.minimum"), t("board.average"), t("board.maximum")].map(
            (name) => html`<th scope="col" key=${name} class="number">${name}</th>`,
          )}
        </tr>
      </thead>
      <tbody>
        ${rows.map(
          ({ name, show, summary }) => html`<tr key=${name}>
            <th scope="row">${name}</th>
            ${[summary.now, summary.lowest, summary.mean, summary.highest].map(
              (value) => html`<td class="number">${show(value)}</td>`,
            )}
          </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}
