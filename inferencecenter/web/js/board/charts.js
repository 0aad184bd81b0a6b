// @ts-check
/** Definitions of the charts. Pure. */

import { t } from "../i18n.js";
import { count, degrees, duration, memory, short } from "./format.js";
import { hasGpu } from "./gpu.js";

/** @typedef {import("./chart.js").ChartOptions} ChartOptions */

/** For counts. */
const WHOLE_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000];
const MS_STEPS = [0, 1, 2, 3, 4, 5, 6]
  .flatMap((power) => [1, 2, 2.5, 5].map((step) => step * 10 ** power))
  .filter(Number.isInteger);
const MIB_STEPS = Array.from({ length: 20 }, (_, power) => 2 ** power);
const HOT_C = 90;

/**
 * Returns the charts that have data.
 *
 * @param {import("../wire/types.js").MetricsEvent | null} metrics
 * @returns {ChartOptions[]}
 */
export function chartsOf(metrics) {
  /** @type {ChartOptions[]} */
  const charts = [
    { title: t("chart.tokens"), show: short, lines: [{ column: "tokensPerS", label: t("chart.tokens_all") }] },
    {
      title: t("chart.first"),
      show: duration,
      steps: MS_STEPS,
      lines: [{ column: "ttftMs", label: t("chart.first_last"), stepped: true }],
    },
    {
      title: t("chart.turns"),
      show: count,
      steps: stepsTo(metrics?.inference.slots ?? 0),
      ceiling: metrics?.inference.slots,
      lines: [
        { column: "running", label: t("chart.running"), stepped: true },
        { column: "waiting", label: t("chart.waiting"), stepped: true },
      ],
    },
    {
      title: t("chart.sessions"),
      show: count,
      steps: WHOLE_STEPS,
      lines: [
        { column: "sessions", label: t("chart.open"), stepped: true },
        { column: "parked", label: t("chart.parked"), stepped: true },
      ],
    },
  ];
  if (!metrics || !hasGpu(metrics.gpu)) return charts;
  const vramMb = metrics.gpu.vram_total_mb;
  return [
    ...charts,
    { title: t("chart.vram"), show: memory, steps: MIB_STEPS, ceiling: vramMb, lines: [{ column: "vramMb", label: t("chart.in_use") }] },
    { title: t("chart.temperature"), show: degrees, ceiling: HOT_C, lines: [{ column: "temperature", label: t("chart.now") }] },
  ];
}

/**
 * Returns grid spacings that divide the ceiling, followed by round ones.
 *
 * @param {number} ceiling
 */
function stepsTo(ceiling) {
  const parts = [ceiling / 4, ceiling / 2, ceiling].filter((step) => step > 0 && Number.isInteger(step));
  return [...parts, ...WHOLE_STEPS.filter((step) => step > ceiling)];
}
