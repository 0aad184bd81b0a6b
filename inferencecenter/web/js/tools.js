// @ts-check
/** Tools of the MCP servers that the account may use. Loaded when a conversation uses some, or its settings are opened. */

import { loadTexts, t } from "./i18n.js";
import { link } from "./state.js";
import { WireError } from "./wire/errors.js";

await loadTexts("tools");

/**
 * @typedef {import("./wire/types.js").McpServer} McpServer
 * @typedef {{name: string, server: string, tool: string, description: string, parameters: object, asks: boolean}} ServerTool
 *   `name` is that for the model, `tool` that on the server; `asks` if the operator wants each call approved.
 */

/** Maximum number of tools of a turn. */
export const MOST_TOOLS = 128;
const MAX_NAME = 64;
const KEPT_MS = 30_000;

/** @type {{there: object | null, at: number, list: Promise<readonly McpServer[]>}} */
let last = { there: null, at: 0, list: Promise.resolve([]) };

/** Returns the servers with their tools, those of the last half minute if they are known. */
export function listServers() {
  const there = link.peek();
  if (!there) return Promise.resolve([]);
  const isKnown = last.there === there && performance.now() - last.at < KEPT_MS;
  if (!isKnown) {
    const list = there.request("list_mcp_tools").then((event) => event.mcp_servers);
    last = { there, at: performance.now(), list };
    list.catch(() => (last = { there: null, at: 0, list: Promise.resolve([]) }));
  }
  return last.list;
}

/**
 * Returns the tools of some servers by their names for the model.
 *
 * @param {readonly string[]} names
 * @param {readonly {name: string}[]} own  The user's tools, whose names those of servers do not get.
 * @returns {Promise<ReadonlyMap<string, ServerTool>>}
 */
export async function toolsOf(names, own) {
  const taken = new Set(own.map(({ name }) => name));
  /** @type {Map<string, ServerTool>} */
  const found = new Map();
  for (const { server, mcp_tools: tools } of await listServers()) {
    if (!names.includes(server)) continue;
    for (const { name: tool, description, parameters, approval } of tools) {
      // Two servers may have tools of the same name.
      const name = taken.has(tool) ? `${server}_${tool}`.slice(0, MAX_NAME) : tool;
      if (taken.size < MOST_TOOLS && !taken.has(name)) {
        taken.add(name);
        found.set(name, { name, server, tool, description, parameters, asks: approval === "always" });
      }
    }
  }
  return found;
}

/**
 * Returns the tools of some servers as `infer` has them.
 *
 * @param {readonly string[]} names
 * @param {readonly {name: string}[]} own  The user's tools.
 * @throws {WireError} None of the servers can be used.
 */
export async function offeredTools(names, own) {
  const tools = [...(await toolsOf(names, own)).values()];
  if (tools.length > 0) return tools.map(({ name, description, parameters }) => ({ name, description, parameters, strict: false }));
  const message = t("tools.unusable", { servers: names.join(", ") });
  throw new WireError({ code: "engine_unavailable", message, hint: t("tools.without") });
}
