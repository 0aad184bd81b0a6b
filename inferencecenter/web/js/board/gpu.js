// @ts-check
/** Formats the GPU's readings. Pure. */

import { t } from "../i18n.js";
import { percent } from "./format.js";

/** @typedef {import("../wire/types.js").GpuReadings} GpuReadings */

/**
 * Returns whether there is a GPU with readings.
 *
 * @param {GpuReadings | undefined} gpu
 * @returns {gpu is GpuReadings}
 */
export function hasGpu(gpu) {
  return gpu !== undefined && (gpu.name !== null || gpu.vram_total_mb !== null || gpu.temp !== null);
}

/**
 * Returns its load.
 *
 * @param {GpuReadings} gpu
 */
export function effortOf({ throttling, utilization, power_watts: watts }) {
  if (throttling) return t("gpu.throttled");
  const busy = utilization === null ? "" : t("gpu.busy", { percent: percent(utilization / 100) });
  return [busy, watts === null ? "" : `${Math.round(watts)} W`].filter(Boolean).join(", ");
}

/**
 * Returns the GPU's name and problems, or that there is none.
 *
 * @param {GpuReadings | undefined} gpu
 * @param {import("../wire/types.js").ThermalEvent | null} thermal
 */
export function gpuInWords(gpu, thermal) {
  if (!gpu) return "";
  if (!hasGpu(gpu)) return t("gpu.none");
  const why = gpu.throttle_reasons?.join(", ");
  const slowed = gpu.throttling ? (why ? t("gpu.slowed_why", { why }) : t("gpu.slowed")) : "";
  const heat = thermal && thermal.state !== "cool" ? t("gpu.heat", { state: thermal.state, action: thermal.action }) : "";
  return [gpu.name, slowed, heat].filter(Boolean).join(". ");
}
