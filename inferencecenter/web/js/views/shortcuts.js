// @ts-check
import { html, useEffect, useRef } from "../ui.js";

const SHORTCUTS = [
  ["Enter", "Send the message"],
  ["Shift+Enter", "Start a new line"],
  ["Esc", "Stop the answer; close settings, editor or dialog"],
  ["Ctrl+K", "Search conversations"],
  ["Ctrl+Shift+O", "New chat"],
  ["↑ ↓", "Move in the list of conversations"],
  ["F2", "Rename the conversation in the list"],
  ["Delete", "Delete the conversation in the list"],
  ["?", "Show this page"],
];

/** @param {{onClose: () => void}} props  All keyboard shortcuts. */
export function Shortcuts({ onClose }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => ref.current?.showModal(), []);
  return html`
    <dialog class="dialog" ref=${ref} aria-labelledby="shortcuts-title" onClose=${onClose}>
      <h2 id="shortcuts-title">Keyboard shortcuts</h2>
      <dl class="shortcuts">
        ${SHORTCUTS.map(([keys, words]) => html`<div key=${keys}><dt><kbd>${keys}</kbd></dt><dd>${words}</dd></div>`)}
      </dl>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${() => ref.current?.close()}>Close</button>
      </div>
    </dialog>
  `;
}
