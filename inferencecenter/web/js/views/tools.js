// @ts-check
/** The tools of a conversation: those that the user defines, and those of MCP servers. */

import { loadTexts, rich, t } from "../i18n.js";
import { MOST_TOOLS, listServers } from "../tools.js";
import { html, useEffect, useId, useRef, useState } from "../ui.js";
import { Icon } from "./icons.js";

await loadTexts("tools");

/**
 * @typedef {import("../choices.js").UserTool} UserTool
 * @typedef {{field: "name" | "parameters", words: string}} Problem
 */

const TOOL_NAME = /^[A-Za-z0-9_.-]{1,64}$/;
const MOST_DESCRIPTION = 10_000;
const MOST_SCHEMA = 50_000;
const TYPES = ["object", "array", "string", "number", "integer", "boolean", "null"];
const EXAMPLE_NAME = "get_weather"; // no text
const EXAMPLE = '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}';

/**
 * @param {object} props
 * @param {import("../choices.js").Choices} props.chosen
 * @param {(some: Partial<import("../choices.js").Choices>) => void} props.onChoose
 */
export function Tools({ chosen, onChoose }) {
  const [servers, setServers] = useState(/** @type {readonly import("../tools.js").McpServer[]} */ ([]));
  useEffect(() => {
    listServers().then(setServers, () => setServers([]));
  }, []);
  const turn = (/** @type {string} */ server, /** @type {boolean} */ on) => {
    const others = chosen.servers.filter((each) => each !== server);
    onChoose({ servers: on ? [...others, server] : others });
  };
  return html`
    <section class="setting">
      <h3>${t("tools.title")}</h3>
      <${UserTools} tools=${chosen.tools} onChange=${(/** @type {readonly UserTool[]} */ tools) => onChoose({ tools })} />
      ${servers.map((each) => html`<${Server} key=${each.server} server=${each} on=${chosen.servers.includes(each.server)} onTurn=${turn} />`)}
      ${chosen.approved.length > 0 &&
      html`<p class="hint">${t("tools.approved", { names: chosen.approved.join(", ") })}</p>
        <button type="button" class="button small" onClick=${() => onChoose({ approved: [] })}>${t("tools.ask_again")}</button>`}
    </section>
  `;
}

/** @param {{tools: readonly UserTool[], onChange: (tools: readonly UserTool[]) => void}} props */
function UserTools({ tools, onChange }) {
  /** The name of the tool in the form; "" for a new one, null without the form. */
  const [editing, setEditing] = useState(/** @type {string | null} */ (null));
  const add = useRef(/** @type {HTMLElement | null} */ (null));
  const close = () => {
    setEditing(null);
    setTimeout(() => add.current?.focus());
  };
  const save = (/** @type {UserTool} */ tool) => {
    const at = tools.findIndex(({ name }) => name === editing);
    onChange(at < 0 ? [...tools, tool] : tools.with(at, tool));
    close();
  };
  const remove = (/** @type {UserTool} */ tool) => {
    onChange(tools.filter((each) => each !== tool));
    close();
  };
  const allow = (/** @type {UserTool} */ tool, /** @type {boolean} */ allowed) =>
    onChange(tools.map((each) => (each === tool ? { ...tool, allowed } : each)));
  return html`
    ${tools.map(
      (tool) => html`<div class="tool-server user-tool" key=${tool.name}>
        <label class="check">
          <input type="checkbox" checked=${tool.allowed} onChange=${(/** @type {any} */ event) => allow(tool, event.target.checked)} />
          <code>${tool.name}</code>
        </label>
        <button type="button" class="icon-button" aria-label=${t("tools.edit", { name: tool.name })} title=${t("tools.edit", { name: tool.name })}
          onClick=${() => setEditing(tool.name)}><${Icon} name="edit" /></button>
        <button type="button" class="icon-button" aria-label=${t("tools.delete", { name: tool.name })} title=${t("tools.delete", { name: tool.name })}
          onClick=${() => remove(tool)}><${Icon} name="trash" /></button>
        ${tool.description && html`<p class="hint" dir="auto">${tool.description}</p>`}
      </div>`,
    )}
    ${editing === null
      ? html`<button type="button" class="button small" ref=${add} disabled=${tools.length >= MOST_TOOLS} onClick=${() => setEditing("")}>
          ${t("tools.add")}
        </button>`
      : html`<${ToolForm} key=${editing} tool=${tools.find(({ name }) => name === editing)}
          taken=${tools.map(({ name }) => name).filter((name) => name !== editing)} onSave=${save} onCancel=${close} />`}
  `;
}

/**
 * @param {object} props
 * @param {UserTool} [props.tool]  The one that is changed; absent for a new one.
 * @param {readonly string[]} props.taken  Names of the others.
 * @param {(tool: UserTool) => void} props.onSave
 * @param {() => void} props.onCancel
 */
function ToolForm({ tool, taken, onSave, onCancel }) {
  const id = useId();
  const [problem, setProblem] = useState(/** @type {Problem | null} */ (null));
  const form = useRef(/** @type {HTMLFormElement | null} */ (null));
  useEffect(() => form.current?.querySelector("input")?.focus(), []);
  const save = (/** @type {Event} */ event) => {
    event.preventDefault();
    const data = new FormData(/** @type {HTMLFormElement} */ (form.current));
    const [name, description, schema] = ["name", "description", "parameters"].map((key) => String(data.get(key)).trim());
    const found = nameProblem(name, taken) ?? schemaProblem(schema);
    setProblem(found);
    if (!found) onSave({ name, description, parameters: schema ? JSON.parse(schema) : null, allowed: tool?.allowed ?? true });
    else /** @type {HTMLElement | null | undefined} */ (form.current?.querySelector(`[name=${found.field}]`))?.focus();
  };
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    onCancel();
  };
  const at = (/** @type {Problem["field"]} */ field) => ({
    name: field, "aria-invalid": problem?.field === field, "aria-describedby": problem?.field === field ? `${id}-problem` : undefined,
  });
  const problemOf = (/** @type {Problem["field"]} */ field) =>
    problem?.field === field && html`<p class="problem" id=${`${id}-problem`} role="alert">${problem.words}</p>`;
  return html`
    <form class="tool-form" ref=${form} noValidate onSubmit=${save} onKeyDown=${keys}>
      <label for=${`${id}-name`}>${t("tools.name")}</label>
      <input id=${`${id}-name`} ...${at("name")} maxlength="64" autocomplete="off" spellcheck=${false} placeholder=${EXAMPLE_NAME}
        defaultValue=${tool?.name} />
      ${problemOf("name")}
      <label for=${`${id}-description`}>${t("tools.description")}</label>
      <textarea id=${`${id}-description`} name="description" rows="2" dir="auto" maxlength=${MOST_DESCRIPTION}
        defaultValue=${tool?.description}></textarea>
      <label for=${`${id}-parameters`}>${t("tools.parameters")}</label>
      <textarea id=${`${id}-parameters`} ...${at("parameters")} class="code" rows="6" maxlength=${MOST_SCHEMA} spellcheck=${false} placeholder=${EXAMPLE}
        defaultValue=${tool?.parameters ? JSON.stringify(tool.parameters, null, 2) : ""}></textarea>
      ${problemOf("parameters")}
      <p class="hint">${t("tools.hint")}</p>
      <div class="results-foot">
        <button type="submit" class="button primary">${t("tools.save")}</button>
        <button type="button" class="button" onClick=${onCancel}>${t("tools.cancel")}</button>
      </div>
    </form>
  `;
}

/**
 * @param {string} name
 * @param {readonly string[]} taken
 * @returns {Problem | null}
 */
function nameProblem(name, taken) {
  if (!TOOL_NAME.test(name)) return { field: "name", words: t("tools.bad_name") };
  return taken.includes(name) ? { field: "name", words: t("tools.taken", { name }) } : null;
}

/**
 * Returns what is wrong with the schema of a tool's arguments; keywords that the daemon does not enforce are left to it.
 *
 * @param {string} text
 * @returns {Problem | null}
 */
function schemaProblem(text) {
  if (!text) return null;
  const field = "parameters";
  /** @type {any} */
  let schema;
  try {
    schema = JSON.parse(text);
  } catch (error) {
    return { field, words: t("form.invalid", { why: /** @type {Error} */ (error).message }) };
  }
  if (!isObject(schema) || schema.type !== "object") return { field, words: t("tools.not_object", { start: '{"type": "object", …}' }) };
  const words = partProblem(schema, "");
  return words ? { field, words } : null;
}

/**
 * @param {any} schema  A schema, or a part of one.
 * @param {string} path  Of the part, such as "properties.city".
 * @returns {string | null}
 */
function partProblem(schema, path) {
  if (typeof schema === "boolean") return null;
  if (!isObject(schema)) return t("tools.not_schema", { path });
  const { type, properties, required, items } = schema;
  const below = (/** @type {string} */ name) => (path ? `${path}.${name}` : name);
  for (const each of Array.isArray(type) ? type : [type ?? "object"]) {
    if (!TYPES.includes(each)) return t("tools.unknown_type", { path: below("type"), type: JSON.stringify(each), types: TYPES.join(", ") });
  }
  if (properties !== undefined && !isObject(properties)) return t("tools.not_schemas", { path: below("properties") });
  if (required !== undefined && !Array.isArray(required)) return t("tools.not_names", { path: below("required") });
  const unknown = required?.find((/** @type {unknown} */ name) => typeof name !== "string" || !Object.hasOwn(properties ?? {}, name));
  if (unknown !== undefined) return t("tools.unknown_property", { path: below("required"), name: JSON.stringify(unknown) });
  for (const [name, part] of Object.entries(properties ?? {})) {
    const words = partProblem(part, below(`properties.${name}`));
    if (words) return words;
  }
  return items === undefined ? null : partProblem(items, below("items"));
}

/** @param {unknown} value */
function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/**
 * @param {object} props
 * @param {import("../tools.js").McpServer} props.server
 * @param {boolean} props.on
 * @param {(server: string, on: boolean) => void} props.onTurn
 */
function Server({ server: { server, mcp_tools: tools, detail }, on, onTurn }) {
  return html`
    <div class="tool-server">
      <label class="check">
        <input type="checkbox" checked=${on} disabled=${tools.length === 0 && !on}
          onChange=${(/** @type {any} */ event) => onTurn(server, event.target.checked)} />
        ${server}
      </label>
      ${detail && html`<p class="problem">${t("tools.broken", { detail })}</p>`}
      ${tools.length > 0 &&
      html`<details>
        <summary>${t("tools.count", { n: tools.length })}</summary>
        <dl>
          ${tools.map(
            ({ name, description, approval }) => html`<div key=${name}>
              <dt>${rich(approval === "never" ? "tools.unasked" : "tools.asked", { name: html`<code>${name}</code>` })}</dt>
              <dd dir="auto">${description}</dd>
            </div>`,
          )}
        </dl>
      </details>`}
    </div>
  `;
}
