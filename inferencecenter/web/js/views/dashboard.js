// @ts-check
/** How the daemon is, live: tiles, charts, facts, and one's own usage. */

import { Chart, MIB_STEPS, WHOLE_STEPS } from "../board/chart.js";
import { stateInWords } from "../board/facts.js";
import { feedOf, useActive, useAnswer } from "../board/feed.js";
import { NOTHING, count, duration, memory, short } from "../board/format.js";
import { Facts, Panel, Readings, Tile } from "../board/panels.js";
import { Usage } from "../board/usage.js";
import { account, link } from "../state.js";
import { html, useMemo, useState } from "../ui.js";

/** @typedef {import("../board/chart.js").ChartOptions} ChartOptions */
/** @typedef {import("../wire/types.js").MetricsEvent | null} Metrics */
/** @typedef {import("../wire/types.js").GpuReadings} Gpu */

const FACTS_EVERY_MS = 5000;
const USAGE_EVERY_MS = 20_000;
/** @type {readonly [number, string][]} */
const WINDOWS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];
const SIDES = /** @type {const} */ ([
  ["model", "Model and plan"],
  ["memory", "Memory"],
  ["queue", "Queue"],
  ["performance", "Performance"],
  ["sessions", "Sessions"],
]);

/** The dashboard; without a connection nothing. */
export function Dashboard() {
  const there = link.value;
  return there && html`<${Board} link=${there} />`;
}

/** @param {{link: import("../wire/link.js").Link}} props */
function Board({ link: there }) {
  const feed = useMemo(() => feedOf(there), [there]);
  const active = useActive(there);
  feed.useFollowing(active);
  const [windowS, setWindowS] = useState(WINDOWS[1][0]);
  const [asTable, setAsTable] = useState(false);
  const metrics = feed.latest.value;
  const charts = chartsOf(metrics);
  const usage = useAnswer(there, { op: "usage", fields: { days: 30 }, everyMs: USAGE_EVERY_MS, active });
  return html`<div class="board">
    <header class="board-head">
      <h1>Dashboard</h1>
      <${State} link=${there} metrics=${metrics} active=${active} />
    </header>
    ${feed.fault.value && html`<p class="problem" role="alert">${feed.fault.value}</p>`}
    <${Tiles} metrics=${metrics} />
    <${Panel} title="Live" aside=${html`<${Choices} windowS=${windowS} onWindow=${setWindowS} asTable=${asTable} onTable=${setAsTable} />`}>
      ${asTable
        ? html`<${Readings} charts=${charts} history=${feed.history} windowS=${windowS} />`
        : html`<div class="charts">
            ${charts.map(
              (chart) => html`<${Chart} key=${chart.title} options=${chart} history=${feed.history}
                version=${metrics?.timestamp ?? 0} windowS=${windowS} />`,
            )}
          </div>`}
      <${Gpu} gpu=${metrics?.gpu} thermal=${feed.thermal.value} />
    <//>
    <div class="sides">
      ${SIDES.map(([type, title]) => html`<${Side} key=${type} link=${there} type=${type} title=${title} active=${active} />`)}
    </div>
    <${Usage} told=${usage} account=${account.value} />
  </div>`;
}

/** @param {{link: import("../wire/link.js").Link, metrics: Metrics, active: boolean}} props */
function State({ link: there, metrics, active }) {
  const { answer: hello } = useAnswer(there, { op: "hello", fields: { protocol: 1 }, everyMs: FACTS_EVERY_MS, active });
  const [words, mood] = stateInWords(metrics?.engine.state);
  const loading = hello?.status === "loading" || hello?.status === "degraded";
  return html`<p class="board-state" role="status">
    <span class="pill" data-mood=${mood}>${words}</span>
    ${metrics?.engine.model && html`<span class="board-model">${metrics.engine.model}</span>`}
    ${loading && mood !== "good" && html`<span>${hello.message}</span>`}
    ${hello && html`<span class="hint">up ${duration(hello.uptime_seconds * 1000)}, version ${hello.version}</span>`}
    ${!active && html`<span class="hint">paused</span>`}
  </p>`;
}

/** @param {{windowS: number, onWindow: (s: number) => void, asTable: boolean, onTable: (on: boolean) => void}} props */
function Choices({ windowS, onWindow, asTable, onTable }) {
  return html`<div class="board-choices">
    <div class="segments" role="group" aria-label="Time shown">
      ${WINDOWS.map(
        ([s, label]) => html`<button type="button" key=${s} aria-pressed=${windowS === s} onClick=${() => onWindow(s)}>${label}</button>`,
      )}
    </div>
    <button type="button" class="button quiet" aria-pressed=${asTable} onClick=${() => onTable(!asTable)}>As a table</button>
  </div>`;
}

/** @param {{metrics: Metrics}} props */
function Tiles({ metrics }) {
  const work = metrics?.inference;
  const gpu = metrics?.gpu;
  return html`<dl class="tiles" style=${{ "--columns": hasGpu(gpu) ? 5 : 4 }}>
    <${Tile} label="Tokens a second" value=${short(work?.tokens_per_s)} note="mean of 10 s" />
    <${Tile} label="Time to first token" value=${duration(work?.last_ttft_ms)} note="the last turn" />
    <${Tile} label="Slots in use" value=${count(work?.slots_used)} of=${work ? `of ${count(work.slots)}` : ""} />
    <${Tile} label="Waiting" value=${count(work?.queue_depth)} note="turns in the queue" mood=${work?.queue_depth ? "busy" : ""} />
    <${Tile} label="Sessions" value=${count(work?.total_sessions)} note="open" />
    <${Tile} label="Parked" value=${count(work?.parked_sessions)} note=${work?.parked_mb ? `sessions; ${memory(work.parked_mb)} of KV` : "sessions"} />
    <${Tile} label="Generated" value=${count(work?.total_tokens_generated)} note="tokens since the start" />
    <${Tile} label="Engine memory" value=${memory(metrics?.engine.rss_mb)} note=${restarts(metrics)} />
    ${hasGpu(gpu) &&
    html`<${Tile} label="VRAM" value=${memory(gpu.vram_used_mb)} note=${gpu.vram_total_mb ? `of ${memory(gpu.vram_total_mb)}` : ""} />
      <${Tile} label="GPU" value=${gpu.temp === null ? NOTHING : `${short(gpu.temp)} °C`} note=${gpuNote(gpu)} mood=${gpu.throttling ? "bad" : ""} />`}
  </dl>`;
}

/** @param {{gpu: Gpu | undefined, thermal: import("../wire/types.js").ThermalEvent | null}} props */
function Gpu({ gpu, thermal }) {
  if (!gpu) return null;
  if (!hasGpu(gpu)) return html`<p class="hint">No GPU is in use or readable here, so there is no VRAM and no temperature to show.</p>`;
  const slowed = gpu.throttling && `It slows itself down${gpu.throttle_reasons?.length ? `: ${gpu.throttle_reasons.join(", ")}` : ""}.`;
  return html`<p class="hint" role="status">
    ${[gpu.name, slowed, thermal && thermal.state !== "cool" && `It is ${thermal.state}: ${thermal.action}`].filter(Boolean).join(". ")}
  </p>`;
}

/** @param {{link: import("../wire/link.js").Link, type: (typeof SIDES)[number][0], title: string, active: boolean}} props */
function Side({ link: there, type, title, active }) {
  const told = useAnswer(there, { op: "status", fields: { type }, everyMs: FACTS_EVERY_MS, active });
  return html`<${Facts} title=${title} told=${told} />`;
}

/**
 * @param {Metrics} metrics
 * @returns {ChartOptions[]}
 */
function chartsOf(metrics) {
  /** @type {ChartOptions[]} */
  const charts = [
    { title: "Tokens a second", lines: [{ column: "tokensPerS", label: "Tokens a second" }], show: short },
    { title: "Time to first token", lines: [{ column: "ttftMs", label: "The last turn", stepped: true }], show: duration },
    {
      title: "Turns", steps: WHOLE_STEPS, show: count, ceiling: metrics?.inference.slots,
      lines: [{ column: "running", label: "running", stepped: true }, { column: "waiting", label: "waiting", stepped: true }],
    },
    {
      title: "Sessions", steps: WHOLE_STEPS, show: count,
      lines: [{ column: "sessions", label: "open", stepped: true }, { column: "parked", label: "parked", stepped: true }],
    },
  ];
  if (!hasGpu(metrics?.gpu)) return charts;
  return [
    ...charts,
    { title: "VRAM", lines: [{ column: "vramMb", label: "VRAM" }], show: memory, steps: MIB_STEPS, ceiling: metrics.gpu.vram_total_mb },
    { title: "GPU temperature", lines: [{ column: "temperature", label: "Temperature" }], show: degrees, ceiling: 90 },
  ];
}

/**
 * @param {Gpu | undefined} gpu
 * @returns {gpu is Gpu}
 */
function hasGpu(gpu) {
  return gpu !== undefined && (gpu.name !== null || gpu.vram_total_mb !== null || gpu.temp !== null);
}

/** @param {number | null | undefined} value */
function degrees(value) {
  return value === null || value === undefined ? NOTHING : `${Math.round(value)} °C`;
}

/** @param {Gpu} gpu */
function gpuNote(gpu) {
  const parts = [gpu.utilization !== null && `${Math.round(gpu.utilization)} % busy`, gpu.power_watts !== null && `${Math.round(gpu.power_watts)} W`];
  return gpu.throttling ? "slows itself down" : parts.filter(Boolean).join(", ");
}

/** @param {Metrics} metrics */
function restarts(metrics) {
  const times = metrics?.engine.restarts;
  return times ? `restarted ${count(times)} ${times === 1 ? "time" : "times"}` : "";
}
