// @ts-check
/** How a plan divides memory: the parts of each bar, and notes. Pure. */

import { t } from "../i18n.js";
import { bytes, count, percent } from "./format.js";

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
    [t("plan.slots"), count(plan.slots)],
    [t("plan.kv_type"), keys === values ? keys : t("plan.kv_types", { keys, values })],
    [t("plan.batch"), t("plan.batch_sizes", { batch: plan.n_batch, ubatch: plan.n_ubatch })],
    [t("plan.flash"), t(plan.flash_attention ? "plan.on" : "plan.off")],
    [t("plan.gpus"), gpusInWords(devices.length, plan.split_mode)],
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
    return t("plan.not_running");
  }
  if (plan.n_gpu_layers > 0 && values.state === "ready" && values.gpu_layers === 0) {
    return t("plan.no_usable_gpu");
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
  if (!reason) return t("plan.cpu");
  const why = reason.explicit ? t("plan.cpu_set") : reason.why;
  return t("plan.cpu_why", { why });
}

/**
 * @param {number} part
 * @param {number} whole
 */
function layersInWords(part, whole) {
  return t("plan.layers", { part, whole });
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
  const notes = [layersInWords(device.layers, layers), t("plan.planned", { size: bytes(needed) })];
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
  const notes = [layersInWords(layers - onGpus, layers), t("plan.planned", { size: bytes(needed) })];
  if (host.expert_layers) notes.push(t("plan.experts", { count: host.expert_layers }));
  return {
    id: "host", name: t("plan.main_memory"), notes, parts: partsOf({ weights, kv, buffers, ...free }),
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
  const size = bytes(took);
  if (Math.abs(off) < SAME_PERCENT) return t("plan.used_as_planned", { size });
  return t(off > 0 ? "plan.used_more" : "plan.used_less", { size, percent: percent(Math.abs(off) / 100) });
}

/**
 * @param {number} devices
 * @param {EnginePlan["split_mode"]} split
 */
function gpusInWords(devices, split) {
  if (!devices) return t("plan.no_gpus");
  return split === "layer" ? t("plan.by_layers", { count: devices }) : count(devices);
}
