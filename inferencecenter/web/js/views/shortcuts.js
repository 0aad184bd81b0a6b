// @ts-check
import { t } from "../i18n.js";
import { html, useEffect, useRef } from "../ui.js";

const SHORTCUTS = /** @type {const} */ (["send", "newline", "escape", "search", "new", "move", "rename", "delete", "help"]);

/** @param {{onClose: () => void}} props  All keyboard shortcuts. */
export function Shortcuts({ onClose }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => ref.current?.showModal(), []);
  return html`
    <dialog class="dialog" ref=${ref} aria-labelledby="shortcuts-title" onClose=${onClose}>
      <h2 id="shortcuts-title">${t("shortcuts.title")}</h2>
      <dl class="shortcuts">
        ${SHORTCUTS.map((name) => html`<div key=${name}><dt><kbd>${t(`keys.${name}`)}</kbd></dt><dd>${t(`shortcuts.${name}`)}</dd></div>`)}
      </dl>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${() => ref.current?.close()}>${t("shortcuts.close")}</button>
      </div>
    </dialog>
  `;
}
