// @ts-check
/** The main numbers, side by side. */

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
  const parked = work?.parked_mb ? `sessions; ${memory(work.parked_mb)} of KV cache` : "sessions";
  return html`<dl class="tiles" style=${{ "--columns": hasGpu(gpu) ? COLUMNS_WITH_GPU : COLUMNS }}>
    <${Tile} label="Tokens per second" value=${short(work?.tokens_per_s)} note="10 s average" />
    <${Tile} label="Time to first token" value=${duration(work?.last_ttft_ms)} note="last turn" />
    <${Tile} label="Slots in use" value=${count(work?.slots_used)} of=${work ? `of ${count(work.slots)}` : ""} />
    <${Tile} label="Waiting" value=${count(waiting)} note="turns in the queue" mood=${waiting ? "busy" : ""} />
    <${Tile} label="Sessions" value=${count(work?.total_sessions)} note="open" />
    <${Tile} label="Parked" value=${count(work?.parked_sessions)} note=${parked} />
    <${Tile} label="Generated" value=${count(work?.total_tokens_generated)} note="tokens since start" />
    <${Tile} label="Engine memory" value=${memory(metrics?.engine.rss_mb)} note=${restarts(metrics?.engine.restarts)} />
    ${hasGpu(gpu) &&
    html`
      <${Tile} label="VRAM" value=${memory(gpu.vram_used_mb)}
        note=${gpu.vram_total_mb ? `of ${memory(gpu.vram_total_mb)}` : ""} />
      <${Tile} label="GPU" value=${degrees(gpu.temp)} note=${effortOf(gpu)} mood=${gpu.throttling ? "bad" : ""} />
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
  return times ? `restarted ${count(times)} ${times === 1 ? "time" : "times"}` : "";
}
