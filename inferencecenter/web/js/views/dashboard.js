// @ts-check
/** The live dashboard: tiles, charts, the plan, machines, facts, connected clients, and the user's own usage. */

import { Chart } from "../board/chart.js";
import { chartsOf } from "../board/charts.js";
import { Clients } from "../board/clients.js";
import { stateInWords } from "../board/facts.js";
import { feedOf, useActive, useAnswer } from "../board/feed.js";
import { duration } from "../board/format.js";
import { gpuInWords } from "../board/gpu.js";
import { Nodes } from "../board/nodes.js";
import { Facts, Panel, Readings } from "../board/panels.js";
import { PastPanel } from "../board/past.js";
import { ModelPanel } from "../board/plan.js";
import { Tiles } from "../board/tiles.js";
import { USAGE_DAYS, Usage } from "../board/usage.js";
import { loadTexts, t } from "../i18n.js";
import { account, link } from "../state.js";
import { html, useMemo, useState } from "../ui.js";

await loadTexts("board");

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").MetricsEvent} MetricsEvent */
/** @typedef {(typeof SIDES)[number][0]} Side */

const FACTS_EVERY_MS = 5000;
const USAGE_EVERY_MS = 20_000;
const MAY_SEE_CLIENTS = "admin";
const MAY_SEE_NODES = "operator";
const WINDOWS = [60, 300, 900];
const SIDES = /** @type {const} */ ([
  ["memory", "board.memory"],
  ["queue", "board.queue"],
  ["performance", "board.performance"],
  ["sessions", "board.sessions"],
]);

/** The dashboard; empty without a connection. */
export function Dashboard() {
  const there = link.value;
  return there && html`<${Board} link=${there} />`;
}

/** @param {{link: Link}} props */
function Board({ link: there }) {
  const feed = useMemo(() => feedOf(there), [there]);
  const active = useActive(there);
  feed.useFollowing(active);
  const asked = { fields: { days: USAGE_DAYS }, everyMs: USAGE_EVERY_MS, active };
  const usage = useAnswer(there, { op: "usage", ...asked });
  const model = useAnswer(there, { op: "status", fields: { type: "model" }, everyMs: FACTS_EVERY_MS, active });
  const self = account.value;
  const metrics = feed.latest.value;
  return html`<div class="board">
    <header class="board-head">
      <h1>${t("foot.dashboard")}</h1>
      <${State} link=${there} metrics=${metrics} active=${active} />
    </header>
    ${feed.fault.value && html`<p class="problem" role="alert">${feed.fault.value}</p>`}
    <${Tiles} metrics=${metrics} />
    <${Live} feed=${feed} metrics=${metrics} />
    <${PastPanel} link=${there} metrics=${metrics} active=${active} />
    <${ModelPanel} told=${model} />
    ${self?.scopes.includes(MAY_SEE_NODES) && html`<${Nodes} link=${there} active=${active} />`}
    <div class="sides">
      ${SIDES.map(
        ([type, key]) => html`<div class="side" key=${type}>
          <${Told} link=${there} type=${type} title=${t(key)} active=${active} />
        </div>`,
      )}
    </div>
    ${self?.scopes.includes(MAY_SEE_CLIENTS) &&
    html`<${Clients} link=${there} active=${active} own=${self.client_id} />`}
    <${Usage} told=${usage} account=${self} />
  </div>`;
}

/** @param {{link: Link, metrics: MetricsEvent | null, active: boolean}} props */
function State({ link: there, metrics, active }) {
  const { answer: hello } = useAnswer(there, { op: "hello", fields: { protocol: 1 }, everyMs: FACTS_EVERY_MS, active });
  const [words, mood] = stateInWords(metrics?.engine.state);
  const unready = hello && hello.status !== "ready" && mood !== "good";
  return html`<p class="board-state" role="status">
    <span class="pill" data-mood=${mood}>${words}</span>
    ${metrics?.engine.model && html`<span class="board-model">${metrics.engine.model}</span>`}
    ${unready && html`<span>${hello.message}</span>`}
    ${hello && html`<span class="hint">${t("board.up", { time: duration(hello.uptime_seconds * 1000), version: hello.version })}</span>`}
    ${!active && html`<span class="hint">${t("board.paused")}</span>`}
  </p>`;
}

/** @param {{feed: import("../board/feed.js").Feed, metrics: MetricsEvent | null}} props */
function Live({ feed, metrics }) {
  const [windowS, setWindowS] = useState(WINDOWS[1]);
  const [asTable, setAsTable] = useState(false);
  const { history } = feed;
  const charts = chartsOf(metrics);
  const gpu = gpuInWords(metrics?.gpu, feed.thermal.value);
  const aside = html`<div class="board-choices">
    <div class="segments" role="group" aria-label=${t("board.window")}>
      ${WINDOWS.map(
        (s) => html`<button key=${s} type="button" aria-pressed=${windowS === s}
          onClick=${() => setWindowS(s)}>
          ${t("board.minutes", { n: s / 60 })}
        </button>`,
      )}
    </div>
    <button type="button" class="button quiet" aria-pressed=${asTable} onClick=${() => setAsTable(!asTable)}>
      ${t("board.as_table")}
    </button>
  </div>`;
  return html`<${Panel} title=${t("board.live")} aside=${aside}>
    ${asTable && html`<${Readings} charts=${charts} history=${history} windowS=${windowS} />`}
    ${!asTable &&
    html`<div class="charts">
      ${charts.map(
        (chart) => html`<${Chart} key=${chart.title} options=${chart} history=${history} windowS=${windowS}
          version=${metrics?.timestamp ?? 0} />`,
      )}
    </div>`}
    ${gpu && html`<p class="hint" role="status">${gpu}</p>`}
  <//>`;
}

/** @param {{link: Link, type: Side, title: string, active: boolean}} props */
function Told({ link: there, type, title, active }) {
  const told = useAnswer(there, { op: "status", fields: { type }, everyMs: FACTS_EVERY_MS, active });
  return html`<${Facts} title=${title} told=${told} />`;
}
