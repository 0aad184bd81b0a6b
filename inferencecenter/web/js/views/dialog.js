// @ts-check
import { html, useEffect, useRef } from "../ui.js";

/**
 * A modal confirmation dialog.
 *
 * @param {{title: string, text: string, action: string, onConfirm: () => void, onClose: () => void}} props
 */
export function Confirm({ title, text, action, onConfirm, onClose }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => ref.current?.showModal(), []);
  const confirm = () => {
    ref.current?.close();
    onConfirm();
  };
  return html`
    <dialog class="dialog" ref=${ref} aria-labelledby="confirm-title" onClose=${onClose}>
      <h2 id="confirm-title">${title}</h2>
      <p>${text}</p>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${() => ref.current?.close()}>Cancel</button>
        <button type="button" class="button danger" onClick=${confirm}>${action}</button>
      </div>
    </dialog>
  `;
}
