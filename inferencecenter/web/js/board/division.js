// @ts-check
/** How a plan divides memory: the parts of each bar, and notes. Pure. */

import { bytes, count } from "./format.js";

/** @typedef {import("../wire/types.js").EnginePlan} EnginePlan */
/** @typedef {import("../wire/types.js").PlannedDevice} PlannedDevice */
/** @typedef {"weights" | "kv" | "buffers" | "driver" | "others" | "free"} PartName */
/** @typedef {{name: PartName, bytes: number, fraction: number}} Part */
/**
 * @typedef {object} Place
 * @property {string} id
 * @property {string} name
 * @property {string[]} notes  Notes shown beside its name.
 * @property {Part[]} parts
 * @property {boolean} short  Whether its memory is insufficient.
 */

/** @type {Readonly<Record<PartName, string>>} */
export const PART_NAMES = {
  weights: "Weights",
  kv: "KV",
  buffers: "Buffers",
  driver: "Driver",
  others: "Used by other processes",
  free: "Free",
};
const NOT_RUNNING = new Set(["asleep", "stopped", "failed"]);
const SAME_PERCENT = 1;

/**
 * Returns the devices that hold a model: GPUs in their order, then main memory.
 *
 * @param {EnginePlan} plan
 * @returns {Place[]}
 */
export function placesOf(plan) {
  return [...plan.devices.map((device) => ofDevice(device, plan.layers)), ofHost(plan)];
}

/**
 * Returns facts of a plan that complement the engine's readings.
 *
 * @param {EnginePlan} plan
 * @returns {[string, string][]} Labels and values.
 */
export function settingsOf(plan) {
  const { devices, kv_type_k: keys, kv_type_v: values } = plan;
  return [
    ["Slots", count(plan.slots)],
    ["KV cache type", keys === values ? keys : `${keys} keys, ${values} values`],
    ["Batch", `${count(plan.n_batch)} tokens, ${count(plan.n_ubatch)} at once`],
    ["Flash attention", plan.flash_attention ? "on" : "off"],
    ["GPUs", gpusInWords(devices.length, plan.split_mode)],
  ];
}

/**
 * Returns a note that the plan does not describe the current state, if so.
 *
 * @param {EnginePlan} plan
 * @param {Record<string, any>} values  The `status` readings of the model.
 */
export function caveatOf(plan, values) {
  if (NOT_RUNNING.has(values.state)) {
    return "This is the plan of the last start. No engine is running, so none of this memory is in use.";
  }
  if (plan.n_gpu_layers > 0 && values.state === "ready" && values.gpu_layers === 0) {
    return "The engine found no usable GPU and runs on the CPU; see the daemon's log for the reason.";
  }
  return "";
}

/**
 * Returns a note that everything is on the CPU, and why, if so.
 *
 * @param {EnginePlan} plan
 */
export function processorInWords(plan) {
  if (plan.devices.length) return "";
  const reason = plan.reasons.find((each) => each.name === "n_gpu_layers");
  if (!reason) return "Everything is on the CPU.";
  const why = reason.explicit ? "set by engine.n_gpu_layers" : reason.why;
  return `Everything is on the CPU: ${why}.`;
}

/**
 * @param {PlannedDevice} device
 * @param {number} layers  Number of layers of the model.
 * @returns {Place}
 */
function ofDevice(device, layers) {
  const { weight_bytes: weights, kv_bytes: kv, compute_bytes: buffers, context_bytes: driver } = device;
  const needed = weights + kv + buffers + driver;
  const others = Math.max(0, device.total_bytes - device.free_bytes);
  const notes = [`${count(device.layers)} of ${count(layers)} layers`, `${bytes(needed)} planned`];
  if (device.used_bytes !== undefined) notes.push(tookInWords(device.used_bytes, needed));
  const sizes = { weights, kv, buffers, driver, others, free: Math.max(0, device.free_bytes - needed) };
  return {
    id: device.id, name: device.name, notes, parts: partsOf(sizes),
    short: needed > device.free_bytes - device.margin_bytes,
  };
}

/**
 * @param {EnginePlan} plan
 * @returns {Place}
 */
function ofHost({ host, layers, n_gpu_layers: onGpus }) {
  const { weight_bytes: weights, kv_bytes: kv, compute_bytes: buffers } = host;
  const needed = weights + kv + buffers;
  const available = host.available_bytes ?? null;
  const free = available === null ? {} : { free: Math.max(0, available - needed) };
  const notes = [`${count(layers - onGpus)} of ${count(layers)} layers`, `${bytes(needed)} planned`];
  if (host.expert_layers) notes.push(`the experts of ${count(host.expert_layers)} layers on GPUs`);
  return {
    id: "host", name: "Main memory", notes, parts: partsOf({ weights, kv, buffers, ...free }),
    short: available !== null && needed > available,
  };
}

/**
 * @param {Partial<Record<PartName, number>>} sizes  In bytes.
 * @returns {Part[]}
 */
function partsOf(sizes) {
  const known = /** @type {[PartName, number][]} */ (Object.entries(sizes));
  const total = Math.max(1, known.reduce((sum, [, size]) => sum + size, 0));
  return known.map(([name, size]) => ({ name, bytes: size, fraction: size / total }));
}

/**
 * @param {number} took  Bytes.
 * @param {number} needed  Planned bytes.
 */
function tookInWords(took, needed) {
  const off = Math.round((100 * (took - needed)) / Math.max(1, needed));
  if (Math.abs(off) < SAME_PERCENT) return `${bytes(took)} used, as planned`;
  return `${bytes(took)} used, ${Math.abs(off)} % ${off > 0 ? "more" : "less"}`;
}

/**
 * @param {number} devices
 * @param {EnginePlan["split_mode"]} split
 */
function gpusInWords(devices, split) {
  if (!devices) return "none";
  return split === "layer" ? `${count(devices)}, divided by layers` : count(devices);
}
