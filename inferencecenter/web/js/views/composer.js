// @ts-check
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { ask } from "../conversations.js";
import { draftOf, keepDraft, moveDraft } from "../drafts.js";
import { modelOfSession } from "../list.js";
import { hello } from "../state.js";
import { Icon } from "./icons.js";

/** Moves the focus to the message input, or to the messages where that would open a keyboard on the screen. */
export function focusComposer() {
  const target = matchMedia("(hover: hover)").matches ? "#composer" : ".scroller";
  /** @type {HTMLElement | null} */ (document.querySelector(target))?.focus();
}

/**
 * The message input.
 *
 * @param {{session: import("../wire/session.js").Session}} props
 */
export function Composer({ session }) {
  const id = session.id.value;
  const [text, setText] = useState(() => draftOf(id));
  const before = useRef(id);
  const ref = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const running = session.live.value !== null;
  const model = session.model.value || modelOfSession(session.id.value) || hello.value?.model || "";
  const state = session.state.value;
  const blocked = state === "gone" || state === "detached";
  const write = (/** @type {string} */ value) => {
    keepDraft(id, value);
    setText(value);
  };
  useEffect(() => {
    if (matchMedia("(hover: hover)").matches) ref.current?.focus();
  }, [session]);
  useEffect(() => {
    // Text typed while the session is being created belongs to it.
    if (before.current !== id) moveDraft(before.current, id);
    before.current = id;
  }, [id]);
  useLayoutEffect(() => grow(ref.current), [text]);
  const send = () => {
    if (!text.trim() || running || blocked) return;
    if (ask(text)) write("");
  };
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!running) send();
    else if (!blocked) session.stop();
  };
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      <textarea id="composer" ref=${ref} rows="1" dir="auto" aria-label="Message" placeholder=${model ? `Message ${model}…` : "Message…"} value=${text}
        disabled=${blocked} enterkeyhint="send" title="Enter sends, Shift+Enter starts a new line, Esc stops the answer"
        onInput=${(/** @type {any} */ event) => write(event.target.value)} onKeyDown=${keys}></textarea>
      ${running && !blocked
        ? html`<button type="submit" class="send" aria-label="Stop" title="Stop (Esc)"><${Icon} name="stop" /></button>`
        : html`<button type="submit" class="send" aria-label="Send" title="Send (Enter)" disabled=${!text.trim() || blocked}>
            <${Icon} name="send" />
          </button>`}
    </form>
  `;
}

/** @param {HTMLTextAreaElement | null} area  Resized to its content; the style sets the maximum. */
function grow(area) {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
