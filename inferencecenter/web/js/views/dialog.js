// @ts-check
import { rich, t } from "../i18n.js";
import { html, useEffect, useRef, useState } from "../ui.js";

/**
 * A modal confirmation dialog. With `typed` it is confirmed by typing that text; `children` stand below `text`.
 *
 * @param {{title: string, text: string, action: string, typed?: string, disabled?: boolean, children?: any, onConfirm: () => void, onClose: () => void}} props
 */
export function Confirm({ title, text, action, typed = "", disabled = false, children, onConfirm, onClose }) {
  const [given, setGiven] = useState("");
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
      ${children}
      ${typed &&
      html`<label for="confirm-typed">${rich("dialog.type", { text: html`<b>${typed}</b>` })}</label>
        <input id="confirm-typed" value=${given} autocomplete="off" spellcheck=${false}
          onInput=${(/** @type {any} */ event) => setGiven(event.target.value)} />`}
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${() => ref.current?.close()}>${t("message.cancel")}</button>
        <button type="button" class="button danger" disabled=${disabled || given !== typed} onClick=${confirm}>${action}</button>
      </div>
    </dialog>
  `;
}
