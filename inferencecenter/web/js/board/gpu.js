// @ts-check
/** What is told of the GPU, in words. Pure. */

/** @typedef {import("../wire/types.js").GpuReadings} GpuReadings */

/**
 * Tells whether there is a GPU that says anything.
 *
 * @param {GpuReadings | undefined} gpu
 * @returns {gpu is GpuReadings}
 */
export function hasGpu(gpu) {
  return gpu !== undefined && (gpu.name !== null || gpu.vram_total_mb !== null || gpu.temp !== null);
}

/**
 * Returns how much it does.
 *
 * @param {GpuReadings} gpu
 */
export function effortOf({ throttling, utilization, power_watts: watts }) {
  if (throttling) return "slows itself down";
  const busy = utilization === null ? "" : `${Math.round(utilization)} % busy`;
  return [busy, watts === null ? "" : `${Math.round(watts)} W`].filter(Boolean).join(", ");
}

/**
 * Returns which GPU there is and what is wrong with it, or that there is none.
 *
 * @param {GpuReadings | undefined} gpu
 * @param {import("../wire/types.js").ThermalEvent | null} thermal
 */
export function gpuInWords(gpu, thermal) {
  if (!gpu) return "";
  if (!hasGpu(gpu)) return "No GPU is in use or readable here, so there is no VRAM and no temperature to show.";
  const reasons = gpu.throttle_reasons?.length ? `: ${gpu.throttle_reasons.join(", ")}` : "";
  const slowed = gpu.throttling ? `It slows itself down${reasons}` : "";
  const heat = thermal && thermal.state !== "cool" ? `It is ${thermal.state}: ${thermal.action}` : "";
  return [gpu.name, slowed, heat].filter(Boolean).join(". ");
}
