// @ts-check
/** Presets and prompts of the account, in step with its other tabs and devices. Loaded when they are first used. */

import { signal } from "../vendor/signals-core.js";
import { wireTools } from "./choices.js";
import { link } from "./state.js";
import { asWireError } from "./wire/errors.js";

/**
 * @typedef {import("./wire/types.js").Preset} Preset
 * @typedef {import("./choices.js").Choices} Choices
 * @typedef {import("./wire/link.js").Link} Link
 */

/** By type and name; null until read. */
export const presets = signal(/** @type {readonly Preset[] | null} */ (null));
/** Whether the daemon keeps them when it restarts. */
export const areStored = signal(true);

link.subscribe((made) => {
  presets.value = null;
  if (!made) return;
  made.on("preset_saved", ({ preset }) => note(preset, preset));
  made.on("preset_deleted", (event) => note(event, null));
  made.state.subscribe((state) => {
    if (state === "open" && made === link.peek()) readPresets();
  });
});

/** Reads all again. */
export async function readPresets() {
  const there = link.peek();
  try {
    const event = await there?.request("list_presets");
    if (there !== link.peek() || !event) return;
    areStored.value = event.stored;
    presets.value = event.presets;
  } catch (error) {
    console.info("cannot read the presets:", asWireError(error).message);
  }
}

/**
 * Returns the fields of a preset for what is chosen.
 *
 * @param {Choices} chosen
 * @param {string} system  The system prompt of the conversation.
 * @returns {Omit<Preset, "preset_type" | "name">}
 * @throws {SyntaxError} The schema is not valid JSON.
 */
export function settingsOf({ params, form, tools }, system) {
  const offered = wireTools(tools);
  const text = form.text.trim();
  return {
    ...(system.trim() && { system }),
    ...(Object.keys(params).length > 0 && { params }),
    ...(offered.length > 0 && { tools: offered }),
    ...(form.kind !== "none" && text && { [form.kind]: form.kind === "json_schema" ? JSON.parse(text) : text }),
  };
}

/**
 * Returns what a preset chooses.
 *
 * @param {Preset} preset
 * @param {Choices} chosen  Before; its tools of other names are kept, and not allowed.
 * @returns {Pick<Choices, "system" | "params" | "form" | "tools">}
 */
export function choicesIn({ system, params, json_schema: schema, regex, grammar, tools: offered }, { tools }) {
  /** @type {Choices["form"]} */
  let form = { kind: "none", text: "" };
  if (schema !== undefined && schema !== null) form = { kind: "json_schema", text: JSON.stringify(schema, null, 2) };
  else if (regex) form = { kind: "regex", text: regex };
  else if (grammar) form = { kind: "grammar", text: grammar };
  const own = (offered ?? []).map(({ name, description, parameters }) => ({
    name, description: description ?? "", parameters: parameters ?? null, allowed: true,
  }));
  const names = new Set(own.map(({ name }) => name));
  const others = tools.filter(({ name }) => !names.has(name)).map((tool) => ({ ...tool, allowed: false }));
  return { system: system ?? "", params: { ...params }, form, tools: [...own, ...others] };
}

/**
 * @param {{preset_type: string, name: string}} key
 * @param {Preset | null} preset  In its place.
 */
function note({ preset_type: type, name }, preset) {
  const others = presets.peek()?.filter((each) => each.preset_type !== type || each.name !== name);
  if (others) presets.value = preset ? [...others, preset].toSorted((a, b) => (a.name < b.name ? -1 : 1)) : others;
}
