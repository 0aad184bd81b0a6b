// @ts-check
/** The main numbers, side by side. */

import { t } from "../i18n.js";
import { html } from "../ui.js";
import { count, degrees, duration, memory, short } from "./format.js";
import { effortOf, hasGpu } from "./gpu.js";

const COLUMNS = 4;
const COLUMNS_WITH_GPU = 5;

/** @param {{metrics: import("../wire/types.js").MetricsEvent | null}} props */
export function Tiles({ metrics }) {
  const work = metrics?.inference;
  const gpu = metrics?.gpu;
  const waiting = work?.queue_depth ?? null;
  const parked = work?.parked_mb ? t("tile.parked_size", { size: memory(work.parked_mb) }) : t("tile.parked_note");
  return html`<dl class="tiles" style=${{ "--columns": hasGpu(gpu) ? COLUMNS_WITH_GPU : COLUMNS }}>
    <${Tile} label=${t("chart.tokens")} value=${short(work?.tokens_per_s)} note=${t("tile.tokens_note")} />
    <${Tile} label=${t("chart.first")} value=${duration(work?.last_ttft_ms)} note=${t("chart.first_last")} />
    <${Tile} label=${t("tile.slots")} value=${count(work?.slots_used)} of=${work ? t("tile.of", { count: work.slots }) : ""} />
    <${Tile} label=${t("tile.waiting")} value=${count(waiting)} note=${t("tile.waiting_note")} mood=${waiting ? "busy" : ""} />
    <${Tile} label=${t("chart.sessions")} value=${count(work?.total_sessions)} note=${t("chart.open")} />
    <${Tile} label=${t("tile.parked")} value=${count(work?.parked_sessions)} note=${parked} />
    <${Tile} label=${t("tile.generated")} value=${count(work?.total_tokens_generated)} note=${t("tile.generated_note")} />
    <${Tile} label=${t("tile.engine")} value=${memory(metrics?.engine.rss_mb)} note=${restarts(metrics?.engine.restarts)} />
    ${hasGpu(gpu) &&
    html`
      <${Tile} label=${t("chart.vram")} value=${memory(gpu.vram_used_mb)}
        note=${gpu.vram_total_mb ? t("tile.of", { count: memory(gpu.vram_total_mb) }) : ""} />
      <${Tile} label=${t("tile.gpu")} value=${degrees(gpu.temp)} note=${effortOf(gpu)} mood=${gpu.throttling ? "bad" : ""} />
    `}
  </dl>`;
}

/** @param {{label: string, value: string, of?: string, note?: string, mood?: string}} props */
function Tile({ label, value, of = "", note = "", mood = "" }) {
  return html`<div class="tile" data-mood=${mood || undefined}>
    <dt>${label}</dt>
    <dd>
      <b>${value}</b>${of && html` <span class="tile-of">${of}</span>`}
      ${note && html`<small>${note}</small>`}
    </dd>
  </div>`;
}

/** @param {number | undefined} times */
function restarts(times) {
  return times ? t("tile.restarted", { n: times }) : "";
}
