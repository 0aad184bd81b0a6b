// @ts-check
/** Presets and prompts in the settings: use, save, change, delete. */

import { choicesOf, keepChoices } from "../choices.js";
import { t } from "../i18n.js";
import { areStored, choicesIn, presets, readPresets, settingsOf } from "../presets.js";
import { link } from "../state.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { asWireError } from "../wire/errors.js";
import { Icon } from "./icons.js";

/** @typedef {import("../presets.js").Preset} Preset */

const MOST_NAME = 100;
const PLACEHOLDER = "{{topic}}"; // no text

/** @param {{session: import("../wire/session.js").Session}} props */
export function Presets({ session }) {
  const id = session.id.value;
  const chosen = choicesOf(id);
  const [name, setName] = useState("");
  const [said, setSaid] = useState("");
  useEffect(() => {
    if (presets.peek() === null) readPresets();
  }, []);
  const apply = (/** @type {Preset} */ preset) => {
    keepChoices(id, { ...chosen, ...choicesIn(preset, chosen) });
    setName(preset.name);
    setSaid(t(id === null || !preset.system ? "presets.applied" : "presets.applied_new", { name: preset.name }));
  };
  const save = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const system = id === null ? chosen.system : session.system.value;
    setSaid(await change(() => ({ preset_type: "settings", name: name.trim(), ...settingsOf(chosen, system) })));
  };
  return html`
    <section class="setting">
      <h3>${t("presets.title")}</h3>
      <${List} type="settings" act="presets.apply" onAct=${apply} onSaid=${setSaid} />
      <form class="preset-form" onSubmit=${save}>
        <input aria-label=${t("presets.name")} placeholder=${t("presets.name")} maxlength=${MOST_NAME} required value=${name}
          onInput=${(/** @type {any} */ event) => setName(event.target.value)} />
        <button type="submit" class="button">${t("presets.save")}</button>
      </form>
      <p class="hint" role="status">${said || (areStored.value ? t("presets.hint") : t("presets.not_stored"))}</p>
    </section>
    <${Prompts} />
  `;
}

/** The prompt library. */
function Prompts() {
  const [name, setName] = useState("");
  const [text, setText] = useState("");
  const [said, setSaid] = useState("");
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const edit = (/** @type {Preset} */ prompt) => {
    setName(prompt.name);
    setText(prompt.text ?? "");
    ref.current?.focus();
  };
  const save = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const words = await change(() => ({ preset_type: "prompt", name: name.trim(), text }));
    setSaid(words);
    if (words !== t("presets.saved", { name: name.trim() })) return;
    setName("");
    setText("");
  };
  return html`
    <section class="setting">
      <h3>${t("prompts.title")}</h3>
      <${List} type="prompt" act="prompts.edit" onAct=${edit} onSaid=${setSaid} />
      <form class="preset-form" onSubmit=${save}>
        <input aria-label=${t("prompts.name")} placeholder=${t("prompts.name")} maxlength=${MOST_NAME} required value=${name}
          onInput=${(/** @type {any} */ event) => setName(event.target.value)} />
        <textarea ref=${ref} rows="3" dir="auto" aria-label=${t("prompts.text")} placeholder=${t("prompts.text")} required value=${text}
          onInput=${(/** @type {any} */ event) => setText(event.target.value)}></textarea>
        <button type="submit" class="button">${t("prompts.save")}</button>
      </form>
      <p class="hint" role="status">${said || t("prompts.hint", { example: PLACEHOLDER })}</p>
    </section>
  `;
}

/** @param {{type: Preset["preset_type"], act: "presets.apply" | "prompts.edit", onAct: (preset: Preset) => void, onSaid: (words: string) => void}} props */
function List({ type, act, onAct, onSaid }) {
  const list = presets.value?.filter((each) => each.preset_type === type);
  const ref = useRef(/** @type {HTMLElement | null} */ (null));
  const remove = async (/** @type {string} */ name) => {
    try {
      await link.peek()?.request("delete_preset", { preset_type: type, name });
      onSaid(t("presets.deleted", { name }));
    } catch (error) {
      onSaid(asWireError(error).message);
    }
    // The button with the focus is gone.
    /** @type {HTMLElement | null | undefined} */ (ref.current?.parentElement?.querySelector("input"))?.focus();
  };
  return html`
    <ul class="presets" ref=${ref}>
      ${list?.map(
        (each) => html`<li class="item" key=${each.name}>
          <button type="button" class="item-open" title=${t(act, { name: each.name })} aria-label=${t(act, { name: each.name })}
            onClick=${() => onAct(each)}><bdi class="item-title">${each.name}</bdi></button>
          <button type="button" class="icon-button" aria-label=${t("presets.delete", { name: each.name })}
            title=${t("presets.delete", { name: each.name })} onClick=${() => remove(each.name)}><${Icon} name="trash" /></button>
        </li>`,
      )}
    </ul>
  `;
}

/**
 * Saves a preset; returns what to say.
 *
 * @param {() => Preset} make
 */
async function change(make) {
  try {
    const preset = make();
    await link.peek()?.request("save_preset", { preset });
    return t("presets.saved", { name: preset.name });
  } catch (error) {
    if (error instanceof SyntaxError) return t("form.invalid", { why: error.message });
    const { message, hint } = asWireError(error);
    return `${message} ${hint}`;
  }
}
