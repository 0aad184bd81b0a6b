// @ts-check
/** Manual entry of the results of tool calls. */

import { html, useId, useState } from "../ui.js";

/**
 * @param {object} props
 * @param {readonly import("../wire/transcript.js").ToolCall[]} props.calls
 * @param {(contents: readonly string[]) => void} props.onSend  Called with the result of each call.
 */
export function ToolResults({ calls, onSend }) {
  const id = useId();
  const [texts, setTexts] = useState(() => calls.map(() => ""));
  const many = calls.length > 1;
  const ready = texts.every((text) => text.trim());
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (ready) onSend(texts);
  };
  const write = (/** @type {number} */ at, /** @type {string} */ text) => setTexts(texts.with(at, text));
  return html`
    <form class="results" onSubmit=${submit}>
      ${calls.map(
        ({ call_id, name }, at) => html`<div class="setting" key=${call_id}>
          <label for=${`${id}-${at}`}>Output of <code>${name}</code>${many && `, call ${at + 1} of ${calls.length}`}</label>
          <textarea id=${`${id}-${at}`} class="code" rows="2" spellcheck=${false} value=${texts[at]}
            placeholder="Tool output (text or JSON)"
            onInput=${(/** @type {any} */ event) => write(at, event.target.value)}></textarea>
        </div>`,
      )}
      <div class="results-foot">
        <button type="submit" class="button primary" disabled=${!ready}>${many ? "Send outputs" : "Send output"}</button>
        <span class="hint">The model will continue with ${many ? "these" : "this"}.</span>
      </div>
    </form>
  `;
}
