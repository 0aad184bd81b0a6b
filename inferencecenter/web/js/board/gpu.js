// @ts-check
/** Formats the GPU's readings. Pure. */

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
  if (throttling) return "throttled";
  const busy = utilization === null ? "" : `${Math.round(utilization)} % busy`;
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
  if (!hasGpu(gpu)) return "No GPU is in use or readable, so VRAM and temperature are not shown.";
  const reasons = gpu.throttle_reasons?.length ? `: ${gpu.throttle_reasons.join(", ")}` : "";
  const slowed = gpu.throttling ? `It is throttled${reasons}` : "";
  const heat = thermal && thermal.state !== "cool" ? `It is ${thermal.state}: ${thermal.action}` : "";
  return [gpu.name, slowed, heat].filter(Boolean).join(". ");
}
