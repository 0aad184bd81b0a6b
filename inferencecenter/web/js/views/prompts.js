// @ts-check
/** The prompt library at the composer: a search and a list of prompts, of which one is inserted. */

import { t } from "../i18n.js";
import { presets, readPresets } from "../presets.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";

/** @param {{onChoose: (text: string) => void, onClose: () => void}} props */
export function PromptPicker({ onChoose, onClose }) {
  const [wanted, setWanted] = useState("");
  const [at, setAt] = useState(0);
  const ref = useRef(/** @type {HTMLInputElement | null} */ (null));
  const all = presets.value?.filter((each) => each.preset_type === "prompt") ?? null;
  const found = all?.filter(({ name, text }) => `${name} ${text}`.toLowerCase().includes(wanted.trim().toLowerCase())) ?? [];
  const active = Math.min(at, found.length - 1);
  useLayoutEffect(() => ref.current?.focus(), []);
  useEffect(() => {
    if (presets.peek() === null) readPresets();
  }, []);
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.isComposing) return;
    if (event.key === "ArrowDown") setAt(Math.min(active + 1, found.length - 1));
    else if (event.key === "ArrowUp") setAt(Math.max(active - 1, 0));
    else if (event.key === "Enter" && found[active]) onChoose(found[active].text ?? "");
    else if (event.key === "Escape") onClose();
    else if (event.key !== "Enter") return;
    event.preventDefault();
    event.stopPropagation();
  };
  const search = (/** @type {any} */ event) => {
    setWanted(event.target.value);
    setAt(0);
  };
  const left = (/** @type {any} */ event) => {
    if (event.relatedTarget && !event.currentTarget.contains(event.relatedTarget)) onClose();
  };
  return html`
    <div class="picker prompt-picker" onFocusOut=${left}>
      <div role="listbox" class="picker-list" id="prompt-list" aria-label=${t("prompts.title")}>
        ${found.map(
          ({ name, text }, index) => html`<div role="option" class="picker-option" id=${`prompt-${index}`} key=${name}
            aria-selected=${index === active} data-active=${index === active} onMouseDown=${(/** @type {Event} */ event) => event.preventDefault()}
            onClick=${() => onChoose(text ?? "")}>
            <bdi class="picker-name">${name}</bdi>
            <span class="picker-state prompt-text" dir="auto">${text}</span>
          </div>`,
        )}
      </div>
      <input type="search" ref=${ref} role="combobox" aria-expanded="true" aria-controls="prompt-list" aria-autocomplete="list"
        aria-activedescendant=${found.length > 0 ? `prompt-${active}` : undefined} aria-label=${t("prompts.search")}
        placeholder=${t("prompts.search")} value=${wanted} onInput=${search} onKeyDown=${keys} />
      <p class="hint" role="status">${all?.length === 0 ? t("prompts.empty") : all && found.length === 0 ? t("prompts.no_match") : ""}</p>
    </div>
  `;
}
