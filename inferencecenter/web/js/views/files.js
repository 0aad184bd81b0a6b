// @ts-check
/** Files of a message, before and after it is sent. */

import { loadTexts, t } from "../i18n.js";
import { html, useEffect, useId, useRef, useState } from "../ui.js";
import { filesOf, incoming, keepFiles } from "../drafts.js";
import { countAgain } from "../files.js";
import { modelOf, models } from "../models.js";
import { link } from "../state.js";
import { Icon } from "./icons.js";

await loadTexts("files");

/**
 * @typedef {import("../wire/transcript.js").AttachedFile} AttachedFile
 * @typedef {import("../wire/transcript.js").SeenImage} SeenImage
 */

/** More of a file is not laid out. */
const MOST_SHOWN_CHARS = 100_000;
/** As the protocol allows. */
const MOST_ALT_CHARS = 256;

/**
 * The files of the next message: attached ones, those being read, and refused ones.
 *
 * @param {object} props
 * @param {import("../wire/session.js").Session} props.session
 * @param {() => void} props.onChange
 * @param {(file: File, password: string) => void} props.onUnlock  Reads a file with its password.
 */
export function Attachments({ session, onChange, onUnlock }) {
  const id = session.id.value;
  const files = filesOf(id);
  const model = modelOf(session);
  const isLoaded = models.value?.some(({ name, state }) => name === model && state === "loaded");
  useEffect(() => {
    countAgain(session);
  }, [session, model, isLoaded, files.length]);
  const coming = incoming.value.filter((each) => each.id === id);
  const drop = (/** @type {number} */ key) => {
    incoming.value = incoming.peek().filter((each) => each.key !== key);
    onChange();
  };
  const remove = (/** @type {number} */ at) => {
    keepFiles(id, files.toSpliced(at, 1));
    onChange();
  };
  const describe = (/** @type {number} */ at, /** @type {string} */ name) => {
    keepFiles(id, files.with(at, { ...files[at], name }));
    onChange();
  };
  return html`
    <div class="attachments" role="group" aria-label=${t("files.attached")}>
      <${RemovableFiles} files=${files} onRemove=${remove} onDescribe=${describe} />
      ${coming.map(({ key, name, refusal, locked }) =>
        refusal
          ? html`<div class="notice" data-mood="bad" role="alert" key=${key}>
              <span><strong dir="auto">${name}</strong> ${refusal}</span>
              ${locked && html`<${Password} name=${name} onEnter=${(/** @type {string} */ password) => onUnlock(locked, password)} />`}
              <button type="button" class="icon-button" aria-label=${t("files.dismiss", { name })} onClick=${() => drop(key)}><${Icon} name="close" /></button>
            </div>`
          : html`<span class="chip file-chip" role="status" key=${key}>
              <span class="chip-name" dir="auto">${name}</span><span class="pulse" aria-hidden="true"></span><span>${t("files.reading")}</span>
              <button type="button" class="chip-clear" aria-label=${t("files.remove_one", { name })} title=${t("files.remove")} onClick=${() => drop(key)}><${Icon} name="close" /></button>
            </span>`,
      )}
    </div>
  `;
}

/** @param {{name: string, onEnter: (password: string) => void}} props */
function Password({ name, onEnter }) {
  const [password, setPassword] = useState("");
  const keys = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    if (password) onEnter(password);
  };
  // Not a form: it stands in that of the message.
  return html`
    <span class="file-password">
      <input type="password" autocomplete="off" aria-label=${t("files.password", { name })} placeholder=${t("files.password_short")}
        value=${password} onKeyDown=${keys} onInput=${(/** @type {any} */ event) => setPassword(event.target.value)} />
      <button type="button" class="button small" disabled=${!password} onClick=${() => onEnter(password)}>${t("files.unlock")}</button>
    </span>
  `;
}

/**
 * Files of a message that is being written or edited; an image's name is its alternative text.
 *
 * @param {object} props
 * @param {readonly (AttachedFile & {tokens?: number | null})[]} props.files
 * @param {(at: number) => void} props.onRemove
 * @param {(at: number, name: string) => void} props.onDescribe
 */
export function RemovableFiles({ files, onRemove, onDescribe }) {
  return files.map(
    ({ name, text, tokens, image }, at) => html`<span class="chip file-chip" key=${at}>
      ${image
        ? html`<${DescribedImage} key=${image.source ?? image.digest} image=${image} text=${name} name=${name || t("files.image_number", { n: at + 1 })}
            onDescribe=${(/** @type {string} */ text) => onDescribe(at, text)} />`
        : html`<${Icon} name="file" /><span class="chip-name" dir="auto" title=${name}>${name}</span>`}
      <span class="file-size">${image ? dimensions(image) : tokens === null || tokens === undefined ? sizeWords(text) : t("files.tokens", { n: tokens })}</span>
      <button type="button" class="chip-clear" aria-label=${t("files.remove_one", { name: name || t("files.image_number", { n: at + 1 }) })}
        title=${t("files.remove")} onClick=${() => onRemove(at)}><${Icon} name="close" /></button>
    </span>`,
  );
}

/**
 * An image that is not sent yet; it opens where its alternative text is written.
 *
 * @param {{image: SeenImage, text: string, name: string, onDescribe: (text: string) => void}} props
 */
function DescribedImage({ image, text, name, onDescribe }) {
  const [open, setOpen] = useState(false);
  return html`
    <${Picture} image=${image} alt="" />
    <button type="button" class="chip-name" dir="auto" title=${t("files.image_describe")} aria-label=${t("files.image_describe_one", { name })}
      onClick=${() => setOpen(true)}>${name}</button>
    ${open && html`<${Description} image=${image} text=${text} onDescribe=${onDescribe} onClose=${() => setOpen(false)} />`}
  `;
}

/** @param {{image: SeenImage, text: string, onDescribe: (text: string) => void, onClose: () => void}} props */
function Description({ image, text, onDescribe, onClose }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  const [value, setValue] = useState(text);
  const id = useId();
  useEffect(() => ref.current?.showModal(), []);
  const save = () => {
    onDescribe(value.replace(/\s+/g, " ").trim());
    ref.current?.close();
  };
  // Neither sends the message in whose form the dialog stands, nor ends its being edited.
  const keys = (/** @type {KeyboardEvent} */ event) => {
    event.stopPropagation();
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    save();
  };
  return html`
    <dialog class="dialog image-view" ref=${ref} aria-labelledby=${id} onClose=${onClose} onKeyDown=${(/** @type {KeyboardEvent} */ event) => event.stopPropagation()}>
      <${Picture} image=${image} alt="" />
      <label id=${id} for=${`${id}-text`}>${t("files.image_alt")}</label>
      <input id=${`${id}-text`} type="text" dir="auto" autocomplete="off" maxlength=${MOST_ALT_CHARS} aria-describedby=${`${id}-hint`}
        value=${value} onKeyDown=${keys} onInput=${(/** @type {any} */ event) => setValue(event.target.value)} />
      <p class="hint" id=${`${id}-hint`}>${t("files.image_alt_hint")}</p>
      <div class="dialog-actions">
        <button type="button" class="button" onClick=${() => ref.current?.close()}>${t("files.image_alt_cancel")}</button>
        <button type="button" class="button primary" onClick=${save}>${t("files.image_alt_save")}</button>
      </div>
    </dialog>
  `;
}

/** @param {{files: readonly AttachedFile[]}} props  Of a message that was sent. */
export function FileList({ files }) {
  return html`<div class="files">
    ${files.map((file, at) => (file.image ? html`<${SentImage} key=${at} image=${file.image} alt=${file.name || t("files.image_number", { n: at + 1 })} />` : html`<${SentFile} key=${at} file=${file} />`))}
  </div>`;
}

/** @param {{image: SeenImage, alt: string}} props  It opens in full size. */
function SentImage({ image, alt }) {
  const [open, setOpen] = useState(false);
  return html`
    <button type="button" class="sent-image" aria-label=${t("files.image_open", { name: alt })} title=${t("files.image_open", { name: alt })}
      onClick=${() => setOpen(true)}><${Picture} key=${image.source ?? image.digest} image=${image} alt=${alt} /></button>
    ${open && html`<${ImageView} image=${image} alt=${alt} onClose=${() => setOpen(false)} />`}
  `;
}

/** @param {{image: SeenImage, alt: string, onClose: () => void}} props */
function ImageView({ image, alt, onClose }) {
  const ref = useRef(/** @type {HTMLDialogElement | null} */ (null));
  useEffect(() => ref.current?.showModal(), []);
  return html`
    <dialog class="dialog image-view" ref=${ref} aria-label=${alt} onClose=${onClose}>
      <${Picture} image=${image} alt=${alt} />
      <div class="dialog-actions">
        <span class="hint">${dimensions(image)}</span>
        <button type="button" class="button" onClick=${() => ref.current?.close()}>${t("files.image_close")}</button>
      </div>
    </dialog>
  `;
}

/**
 * An image, which is read from the daemon once it is near the visible part.
 *
 * @param {{image: SeenImage, alt: string}} props
 */
function Picture({ image, alt }) {
  const ref = useRef(/** @type {HTMLImageElement | null} */ (null));
  const [source, setSource] = useState(image.source ?? fetched.get(image.digest) ?? "");
  const [failed, setFailed] = useState(false);
  const isConnected = link.value?.state.value === "open";
  useEffect(() => {
    if (isConnected) setFailed(false);
  }, [isConnected]);
  useEffect(() => {
    const element = ref.current;
    if (source || failed || !element) return undefined;
    const observer = new IntersectionObserver(
      async (entries) => {
        if (!entries.some(({ isIntersecting }) => isIntersecting)) return;
        observer.disconnect();
        const found = await fetchImage(image);
        if (found) setSource(found);
        else setFailed(true);
      },
      { rootMargin: "50%" },
    );
    observer.observe(element);
    return () => observer.disconnect();
  }, [source, failed]);
  if (failed) return html`<span class="hint">${t("files.image_failed")}</span>`;
  return html`<img ref=${ref} src=${source || EMPTY} alt=${alt} width=${image.width} height=${image.height} data-loaded=${Boolean(source)} />`;
}

const EMPTY = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw==";
const MOST_FETCHED = 64;
/** @type {Map<string, string>}  Data URLs of images by digest, the latest last. */
const fetched = new Map();
// Another user's images are not kept.
link.subscribe(() => fetched.clear());

/**
 * @param {SeenImage} image
 * @returns {Promise<string | null>}
 */
async function fetchImage({ digest, media_type, shared }) {
  const reading = shared ? import("./share.js").then(({ sharedImage }) => sharedImage(shared, digest)) : link.peek()?.request("get_image", { digest });
  const answer = await reading?.catch(() => null);
  if (!answer) return null;
  const source = `data:${media_type};base64,${answer.data}`;
  fetched.set(digest, source);
  if (fetched.size > MOST_FETCHED) fetched.delete(/** @type {string} */ (fetched.keys().next().value));
  return source;
}

/** @param {SeenImage} image */
function dimensions({ width, height }) {
  return `${width} × ${height}`;
}

/** @param {{file: AttachedFile}} props */
function SentFile({ file: { name, text } }) {
  const [open, setOpen] = useState(false);
  const rest = text.length - MOST_SHOWN_CHARS;
  return html`
    <details class="tool file" onToggle=${(/** @type {any} */ event) => setOpen(event.target.open)}>
      <summary><${Icon} name="file" /> <span dir="auto">${name}</span> <span class="file-size">${sizeWords(text)}</span></summary>
      ${open &&
      html`<pre tabindex="0" dir="auto" aria-label=${name} role="region">${text.slice(0, MOST_SHOWN_CHARS)}</pre>
        ${rest > 0 && html`<p class="hint">${t("files.rest", { n: rest })}</p>`}`}
    </details>
  `;
}

/** @param {string} text */
function sizeWords(text) {
  return t("files.characters", { n: text.length });
}
