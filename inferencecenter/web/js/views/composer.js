// @ts-check
import { t } from "../i18n.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { ask } from "../conversations.js";
import { draftOf, filesOf, incoming, keepDraft, keepFiles, moveDraft } from "../drafts.js";
import { modelOf, models } from "../models.js";
import { canListen, failure, preferences } from "../state.js";
import { WireError } from "../wire/errors.js";
import { Icon } from "./icons.js";
import { Lazy } from "./lazy.js";

/** @typedef {import("../wire/session.js").Session} Session */

const attachments = () => import("./files.js");
const prompts = () => import("./prompts.js");
const voice = () => import("./voice.js");
const isTouch = matchMedia("(pointer: coarse)");

/** Moves the focus to the message input, or to the messages where that would open a keyboard on the screen. */
export function focusComposer() {
  const target = matchMedia("(hover: hover)").matches ? "#composer" : ".scroller";
  /** @type {HTMLElement | null} */ (document.querySelector(target))?.focus();
}

/**
 * Attaches files to the next message of a conversation.
 *
 * @param {Session} session
 * @param {Iterable<File>} files
 * @param {string} [password]  Of an encrypted one.
 */
async function attach(session, files, password) {
  const chosen = [...files]; // the list is emptied when its event ends
  try {
    const { attachFiles } = await import("../files.js");
    await attachFiles(session, chosen, password);
  } catch {
    failure.value = new WireError({
      code: "internal",
      message: t("notice.not_loaded"),
      hint: t("files.reload"),
    });
  }
}

/**
 * Attaches files that are dropped anywhere in a conversation.
 *
 * @param {Session} session
 * @param {DragEvent} event
 */
export function dropFiles(session, event) {
  const files = event.dataTransfer?.files;
  if (files?.length && isOpen(session)) attach(session, files);
}

/**
 * The message input.
 *
 * @param {{session: Session}} props
 */
export function Composer({ session }) {
  const id = session.id.value;
  const [text, setText] = useState(() => draftOf(id));
  const before = useRef(id);
  const ref = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  const [picking, setPicking] = useState(false);
  const chooser = useRef(/** @type {HTMLInputElement | null} */ (null));
  const camera = useRef(/** @type {HTMLInputElement | null} */ (null));
  const files = filesOf(id);
  const coming = incoming.value.filter((each) => each.id === id);
  const running = session.running;
  const model = modelOf(session);
  const blocked = !isOpen(session);
  const empty = !text.trim() && files.length === 0;
  const reading = coming.some(({ refusal }) => !refusal);
  // Phones are narrow: while there is text, it has the room.
  const offersCamera = text === "" && isTouch.matches && models.value?.find((each) => each.name === model)?.vision;
  const write = (/** @type {string} */ value) => {
    keepDraft(id, value);
    setText(value);
  };
  useEffect(() => {
    if (matchMedia("(hover: hover)").matches) ref.current?.focus();
  }, [session]);
  useEffect(() => {
    // What is typed while the session is being created belongs to it.
    if (before.current !== id) moveDraft(before.current, id);
    before.current = id;
  }, [id]);
  useLayoutEffect(() => grow(ref.current), [text]);
  const type = (/** @type {any} */ event) => {
    write(event.target.value);
    if (event.target.value === "/" && text === "" && event.inputType === "insertText") offerPrompts(event.target, () => setPicking(true));
  };
  const send = () => {
    if (empty || reading || running || blocked || !ask(text, files)) return;
    write("");
    keepFiles(id, []);
    incoming.value = incoming.peek().filter((each) => each.id !== id);
  };
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (!running) send();
    else if (!blocked) session.stop();
  };
  const insert = (/** @type {string} */ prompt) => {
    const area = ref.current;
    setPicking(false);
    if (!area) return;
    area.focus();
    if (area.value === "/") area.select();
    area.setRangeText(prompt, area.selectionStart, area.selectionEnd, "end");
    write(area.value);
    selectPlaceholder(area, area.selectionEnd - prompt.length);
  };
  const hear = (/** @type {string} */ said) => {
    const before = ref.current?.value ?? "";
    write(before && !/\s$/.test(before) ? `${before} ${said}` : before + said);
  };
  const closePrompts = () => {
    setPicking(false);
    ref.current?.focus();
  };
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key === "Tab" && !event.shiftKey && ref.current && selectPlaceholder(ref.current, ref.current.selectionEnd)) event.preventDefault();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  };
  const paste = (/** @type {ClipboardEvent} */ event) => {
    const data = event.clipboardData;
    // Text that was copied in an office program comes with a picture of itself.
    if (!data?.files.length || data.types.includes("text/plain")) return;
    event.preventDefault();
    attach(session, data.files);
  };
  const unlock = (/** @type {File} */ file, /** @type {string} */ password) => {
    attach(session, [file], password);
    ref.current?.focus();
  };
  const choose = (/** @type {any} */ event) => {
    attach(session, event.target.files);
    event.target.value = "";
    ref.current?.focus();
  };
  return html`
    <form class="composer" onSubmit=${submit}>
      ${(files.length > 0 || coming.length > 0) &&
      html`<${Lazy} load=${attachments} name="Attachments" session=${session} onChange=${() => ref.current?.focus()} onUnlock=${unlock} />`}
      ${picking && html`<${Lazy} load=${prompts} name="PromptPicker" onChoose=${insert} onClose=${closePrompts} />`}
      <div class="composer-field">
        <button type="button" class="icon-button attach" aria-label=${t("files.attach")} title=${t("files.attach_title")}
          disabled=${blocked} onClick=${() => chooser.current?.click()}><${Icon} name="clip" /></button>
        <button type="button" class="icon-button attach prompt-open" aria-label=${t("prompts.open")} title=${t("prompts.open_title")}
          aria-expanded=${picking} disabled=${blocked} onMouseDown=${(/** @type {Event} */ event) => event.preventDefault()}
          onClick=${() => setPicking(!picking)}><${Icon} name="slash" /></button>
        ${canListen && preferences.value.voice && html`<${Lazy} load=${voice} name="Voice" disabled=${blocked} onSpeech=${hear} />`}
        <input type="file" ref=${chooser} hidden multiple aria-label=${t("files.attach_label")} onChange=${choose} />
        ${offersCamera &&
        html`<button type="button" class="icon-button camera" aria-label=${t("files.camera")} title=${t("files.camera")}
            disabled=${blocked} onClick=${() => camera.current?.click()}><${Icon} name="camera" /></button>
          <input type="file" ref=${camera} hidden accept="image/*" capture="environment" aria-label=${t("files.camera_label")}
            onChange=${choose} />`}
        <textarea id="composer" ref=${ref} rows="1" dir="auto" aria-label=${t("composer.message")}
          placeholder=${model ? t("composer.placeholder_model", { model }) : t("composer.placeholder")} value=${text}
          disabled=${blocked} enterkeyhint="send" title=${t("composer.title")}
          onInput=${type} onKeyDown=${keys} onPaste=${paste}></textarea>
        ${running && !blocked
          ? html`<button type="submit" class="send" data-act="stop" aria-label=${t("composer.stop")} title=${t("composer.stop_title")}><${Icon} name="stop" /></button>`
          : html`<button type="submit" class="send" aria-label=${t("composer.send")} title=${t("composer.send_title")} disabled=${empty || reading || blocked}>
              <${Icon} name="send" />
            </button>`}
      </div>
    </form>
  `;
}

/**
 * Offers the prompt library after a first "/", if there are prompts.
 *
 * @param {HTMLTextAreaElement} area
 * @param {() => void} offer
 */
async function offerPrompts(area, offer) {
  const { presets, readPresets } = await import("../presets.js");
  if (presets.peek() === null) await readPresets();
  if (area.value === "/" && presets.peek()?.some((each) => each.preset_type === "prompt")) offer();
}

/** What a prompt leaves to be filled in. */
const PLACEHOLDER = /\{\{[^{}\n]+\}\}/g;

/**
 * Selects the next placeholder; returns whether there is one.
 *
 * @param {HTMLTextAreaElement} area
 * @param {number} from
 */
function selectPlaceholder(area, from) {
  const found = [...area.value.matchAll(PLACEHOLDER)].find(({ index }) => index >= from);
  if (found) area.setSelectionRange(found.index, found.index + found[0].length);
  return found !== undefined;
}

/** @param {Session} session */
function isOpen(session) {
  return session.state.value !== "gone" && session.state.value !== "detached";
}

/** @param {HTMLTextAreaElement | null} area  Resized to its content; the style sets the maximum. */
function grow(area) {
  if (!area) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
