// @ts-check
/** The machines of a cluster, for accounts that may list them: their memory, GPUs and engines. */

import { known, t } from "../i18n.js";
import { html } from "../ui.js";
import { stateInWords } from "./facts.js";
import { useAnswer } from "./feed.js";
import { degrees, duration, memory, percent } from "./format.js";
import { Panel } from "./panels.js";

/** @typedef {import("../wire/types.js").ClusterNode} Node */
/** @typedef {import("../wire/types.js").ClusterEngine} Engine */
/** @typedef {import("../wire/types.js").ClusterRpcServer} RpcServer */
/** @typedef {import("./facts.js").Mood} Mood */

const EVERY_MS = 5000;
/** Without a cluster there is nothing to show until the daemon is restarted. */
const SELDOM_MS = 120_000;
const SECOND_MS = 1000;
const LATE_S = 2;

/** @type {Readonly<Record<string, Mood>>} */
const MOODS = { up: "good", down: "bad", unknown: "calm", draining: "busy", drained: "calm" };
/** @type {Readonly<Record<RpcServer["state"], Mood>>} */
const RPC_MOODS = { stopped: "calm", starting: "busy", ready: "good", missing: "bad" };

/** @param {{link: import("../wire/link.js").Link, active: boolean}} props */
export function Nodes({ link, active }) {
  const { answer } = useAnswer(link, { op: "list_nodes", everyMs: SELDOM_MS, active });
  return answer?.nodes.length > 0 && html`<${NodeList} link=${link} active=${active} first=${answer.nodes} />`;
}

/** @param {{link: import("../wire/link.js").Link, active: boolean, first: readonly Node[]}} props */
function NodeList({ link, active, first }) {
  const told = useAnswer(link, { op: "list_nodes", everyMs: EVERY_MS, active });
  /** @type {readonly Node[]} */
  const nodes = told.answer?.nodes ?? first;
  return html`<${Panel} title=${t("nodes.title")}>
    ${told.fault && html`<p class="problem">${told.fault}</p>`}
    <ul class="nodes">${nodes.map((node) => html`<${NodeItem} key=${node.name} node=${node} />`)}</ul>
  <//>`;
}

/** @param {{node: Node}} props */
function NodeItem({ node }) {
  const [state, mood] = nodeStateInWords(node);
  return html`<li class="node">
    <div class="node-head">
      <h3>${node.name === "local" ? t("nodes.local") : node.name}</h3>
      <span class="pill" data-mood=${mood}>${state}</span>
    </div>
    <p class="model-facts">${nodeFacts(node).map((fact) => html`<span key=${fact}>${fact}</span>`)}</p>
    ${node.drain_waits_for.length > 0 &&
    html`<p class="hint">${t("nodes.waits_for", { what: node.drain_waits_for.join(", ") })}</p>`}
    ${gaugesOf(node).map((gauge) => html`<${Gauge} key=${gauge.key} ...${gauge} />`)}
    ${node.engines.length > 0 &&
    html`<ul class="node-engines" aria-label=${t("nodes.engines")}>
      ${node.engines.map((engine) => html`<${EngineItem} key=${`${engine.model}/${engine.replica}`} engine=${engine} />`)}
    </ul>`}
    ${node.rpc_servers.length > 0 &&
    html`<ul class="node-engines" aria-label=${t("nodes.rpc_servers")}>
      ${node.rpc_servers.map((server) => html`<${RpcServerItem} key=${server.model} server=${server} />`)}
    </ul>`}
    ${node.engines.length + node.rpc_servers.length === 0 && html`<p class="hint">${t("nodes.no_engines")}</p>`}
  </li>`;
}

/** @param {{name: string, used: number, total: number, text: string}} props */
function Gauge({ name, used, total, text }) {
  return html`<div class="node-gauge">
    <span class="node-gauge-name">${name}</span><span>${text}</span>
    <meter min="0" max=${total} value=${used} aria-label=${t("nodes.memory_of", { name })} aria-valuetext=${text}></meter>
  </div>`;
}

/** @param {{engine: Engine}} props */
function EngineItem({ engine }) {
  const [state, mood] = stateInWords(engine.state);
  const loads = engine.state === "starting" && engine.load_fraction > 0;
  return html`<li>
    <div class="node-head">
      <span class="node-engine-name">${t("nodes.replica", { model: engine.model, n: engine.replica })}</span>
      <span class="pill" data-mood=${mood}>${state}${loads && ` ${percent(engine.load_fraction)}`}</span>
    </div>
    <p class="model-facts">
      <span>${t("nodes.running", { n: engine.running })}</span>
      <span>${t("nodes.waiting", { n: engine.waiting })}</span>
      <span>${t("nodes.sessions", { n: engine.sessions })}</span>
    </p>
    ${engine.detail && html`<p class="problem">${engine.detail}</p>`}
  </li>`;
}

/** @param {{server: RpcServer}} props */
function RpcServerItem({ server }) {
  return html`<li>
    <div class="node-head">
      <span class="node-engine-name">${t("nodes.rpc_server", { model: server.model })}</span>
      <span class="pill" data-mood=${RPC_MOODS[server.state] ?? "calm"}>${known("rpc", server.state) ?? server.state}</span>
    </div>
    ${server.state === "ready" &&
    html`<p class="model-facts"><span>${t("nodes.running", { n: server.running })}</span></p>`}
    ${server.detail && html`<p class="problem">${server.detail}</p>`}
  </li>`;
}

/**
 * Returns whether a machine is in the cluster, or leaves it, as text, and its mood. Pure.
 *
 * @param {Node} node
 * @returns {[string, Mood]}
 */
export function nodeStateInWords(node) {
  const state = node.state === "up" && node.drain !== "none" ? node.drain : node.state;
  const late = state === "up" && (node.heartbeat_age_s ?? 0) > LATE_S;
  return late ? [t("nodes.late"), "busy"] : [known("node", state) ?? state, MOODS[state] ?? "calm"];
}

/**
 * Returns the known facts about a machine as text. Pure.
 *
 * @param {Node} node
 * @returns {string[]}
 */
export function nodeFacts(node) {
  const age = node.heartbeat_age_s;
  return [
    node.address ?? "",
    node.version === undefined ? "" : t("nodes.version", { version: node.version }),
    age === undefined ? "" : t("nodes.heartbeat", { age: duration(age * SECOND_MS) }),
    t("nodes.sessions", { n: node.sessions }),
  ].filter(Boolean);
}

/**
 * Returns the memory of a machine's GPUs, and its main memory. Pure.
 *
 * @param {Node} node
 */
export function gaugesOf(node) {
  const gpus = node.gpus.map(({ name, used_mb: used, total_mb: total, utilization, temp }, number) => ({
    key: `gpu${number}`,
    name: name || t("nodes.gpu", { n: number }),
    used,
    total,
    text: [
      t("unit.of", { part: memory(used), whole: memory(total) }),
      utilization === undefined ? "" : t("nodes.busy", { percent: percent(utilization / 100) }),
      temp === undefined ? "" : degrees(temp),
    ].filter(Boolean).join(", "),
  }));
  const { ram_used_mb: used, ram_total_mb: total } = node;
  if (used === undefined || total === undefined) return gpus;
  const text = t("unit.of", { part: memory(used), whole: memory(total) });
  return [...gpus, { key: "ram", name: t("nodes.ram"), used, total, text }];
}
