// @ts-check
/** Reading of files that the user attaches: their text, and its number of tokens. */

import { kib, messageRoom } from "./conversations.js";
import { filesOf, incoming, keepFiles } from "./drafts.js";
import { loadTexts, t } from "./i18n.js";
import { modelOf, models } from "./models.js";
import { link } from "./state.js";
import { keptToken } from "./storage.js";
import { messageOf, question } from "./wire/transcript.js";

await loadTexts("files");

/** @typedef {import("./wire/session.js").Session} Session */

const MOST_FILES = 20;
const MOST_NAME_CHARS = 120;
const MOST_PDF_BYTES = 64 * 2 ** 20;
const MOST_PDF_PAGES = 2000;
/** A PDF that takes longer is refused; its worker is ended. */
const PDF_WITHIN_MS = 60_000;
const SAMPLE_BYTES = 8192;
/** The longest side of an image that is sent; vision models scale larger ones down. */
const MOST_SIDE = 1568;
/** The size of an image that is sent, as a data URL. */
const MOST_IMAGE_CHARS = 600 * 1024;
const QUALITIES = [0.9, 0.8, 0.65, 0.5];

/** Why a file is not attached. */
class RefusedFileError extends Error {}
/** The file is encrypted, and the password is missing or wrong. */
class LockedFileError extends RefusedFileError {}

let lastKey = 0;

/**
 * Reads files one after another and attaches them to a session's next message; reports each that is refused.
 *
 * @param {Session} session
 * @param {readonly File[]} files
 * @param {string} [password]  Of an encrypted one.
 */
export async function attachFiles(session, files, password) {
  const coming = files.map((file) => ({ key: (lastKey += 1), id: session.id.peek(), name: cleanName(file.name), refusal: "" }));
  const waits = (/** @type {import("./drafts.js").Incoming} */ { refusal, locked }) => !refusal || (locked && !files.includes(locked));
  incoming.value = [...incoming.peek().filter(waits), ...coming];
  for (const [at, { key, name }] of coming.entries()) {
    const place = () => incoming.peek().find((each) => each.key === key);
    try {
      if (isImage(files[at])) checkTakesImages(modelOf(session));
      const file = isImage(files[at]) ? await imageFile(files[at], name) : await textFile(session, files[at], name, password);
      await checkContext(session, file);
      const there = place();
      if (!there) continue; // it was removed, or the user signed out
      checkRoom(there.id, file);
      const kept = keepFiles(there.id, [...filesOf(there.id), file]);
      if (!kept) throw new RefusedFileError(t("files.not_kept"));
      incoming.value = incoming.peek().filter((each) => each.key !== key);
    } catch (error) {
      const refusal = error instanceof RefusedFileError ? error.message : t("files.unreadable");
      const locked = error instanceof LockedFileError ? files[at] : undefined;
      incoming.value = incoming.peek().map((each) => (each.key === key ? { ...each, refusal, locked } : each));
    }
  }
}

/**
 * Counts the tokens of a session's attached files where they were counted for another model, or could not be counted.
 *
 * @param {Session} session
 */
export async function countAgain(session) {
  const model = modelOf(session);
  for (const file of filesOf(session.id.peek())) {
    if (file.image || (file.model === model && file.tokens !== null)) continue;
    const tokens = await tokensOf(model, file.text);
    if (modelOf(session) !== model) return;
    const id = session.id.peek();
    const files = filesOf(id);
    if (files.includes(file)) keepFiles(id, files.map((each) => (each === file ? { ...file, tokens, model } : each)));
  }
}

/** @param {File} file  SVG is text. */
function isImage(file) {
  return file.type.startsWith("image/") && file.type !== "image/svg+xml";
}

/**
 * @param {string} name  Of a model; one that is not known yet is asked when the message is sent.
 * @throws {RefusedFileError}
 */
function checkTakesImages(name) {
  const known = models.peek() ?? [];
  if (known.find((model) => model.name === name)?.vision !== false) return;
  const others = known.filter(({ vision }) => vision).map((model) => model.name).join(", ");
  throw new RefusedFileError(t(others ? "files.image_other_model" : "files.image_no_model", { model: name, others }));
}

/**
 * @param {Session} session
 * @param {File} file
 * @param {string} name
 * @param {string} [password]
 * @returns {Promise<import("./drafts.js").DraftFile>}
 */
async function textFile(session, file, name, password) {
  const text = await textOf(file, password);
  const model = modelOf(session);
  return { name, text, model, tokens: await tokensOf(model, text) };
}

/**
 * Returns an image, scaled down to what models see, as small a file as it needs to be.
 *
 * @param {File} file
 * @param {string} name
 * @returns {Promise<import("./drafts.js").DraftFile>}
 * @throws {RefusedFileError}
 */
async function imageFile(file, name) {
  const bitmap = await createImageBitmap(file).catch(() => {
    throw new RefusedFileError(t("files.image"));
  });
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  context.fillStyle = "white"; // beneath what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  const source = encoded(canvas);
  const media_type = source.startsWith("data:image/png") ? "image/png" : "image/jpeg";
  return { name, text: "", tokens: null, image: { digest: "", width: canvas.width, height: canvas.height, media_type, source } };
}

/**
 * Returns an image as a data URL: without loss if it is small enough then, else with as little as needed.
 *
 * @param {HTMLCanvasElement} canvas
 * @throws {RefusedFileError}
 */
function encoded(canvas) {
  for (const quality of [null, ...QUALITIES]) {
    const source = quality === null ? canvas.toDataURL("image/png") : canvas.toDataURL("image/jpeg", quality);
    if (source.length <= MOST_IMAGE_CHARS) return source;
  }
  throw new RefusedFileError(t("files.image_too_large"));
}

/** @param {string} name  As one line of visible characters. */
function cleanName(name) {
  return [...name.replace(/[\p{C}\p{Z}]+/gu, " ").trim()].slice(0, MOST_NAME_CHARS).join("") || t("files.unnamed");
}

/**
 * @param {File} file
 * @param {string} [password]
 * @returns {Promise<string>}
 * @throws {RefusedFileError}
 */
async function textOf(file, password) {
  const room = messageRoom();
  const start = new Uint8Array(await file.slice(0, SAMPLE_BYTES).arrayBuffer());
  if (new TextDecoder("latin1").decode(start.subarray(0, 1024)).includes("%PDF-")) {
    if (file.size > MOST_PDF_BYTES) throw new RefusedFileError(t("files.pdf_too_large", { room: kib(MOST_PDF_BYTES) }));
    return textOfPdf(new Uint8Array(await file.arrayBuffer()), password, room);
  }
  const utf16 = (start[0] === 0xff && start[1] === 0xfe && "utf-16le") || (start[0] === 0xfe && start[1] === 0xff && "utf-16be");
  if (!utf16 && start.includes(0)) throw new RefusedFileError(t("files.binary"));
  if (file.size > room) throw new RefusedFileError(t("files.too_large", { size: kib(file.size), room: kib(room) }));
  let text = "";
  try {
    text = new TextDecoder(utf16 || "utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new RefusedFileError(t("files.encoding"));
  }
  if (text.includes("\0")) throw new RefusedFileError(t("files.binary"));
  if (!text.trim()) throw new RefusedFileError(t("files.empty"));
  return text;
}

/**
 * @param {Uint8Array} data
 * @param {string | undefined} password
 * @param {number} room  Characters that are of use.
 * @returns {Promise<string>}
 * @throws {RefusedFileError}
 */
async function textOfPdf(data, password, room) {
  const folder = new URL("../vendor/pdfjs/", import.meta.url);
  const address = new URL("pdf.worker.js", folder).href;
  // Its types span a hundred files.
  const library = new URL("pdf.js", folder).href;
  const pdf = await import(library);
  const port = new Worker(/** @type {any} */ (policy?.createScriptURL(address) ?? address), { type: "module" });
  const worker = new pdf.PDFWorker({ port, verbosity: 0 });
  let timer = 0;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new RefusedFileError(t("files.too_slow"))), PDF_WITHIN_MS);
    port.addEventListener("error", () => reject(new RefusedFileError(t("files.reader_failed"))));
  });
  try {
    const loading = pdf.getDocument({
      data, password, worker, disableFontFace: true, enableXfa: false, useSystemFonts: false, useWasm: false, useWorkerFetch: false,
      isOffscreenCanvasSupported: false, isImageDecoderSupported: false, cMapUrl: new URL("cmaps/", folder).href,
    });
    return await Promise.race([pagesOf(loading, room), late]);
  } catch (error) {
    if (error instanceof RefusedFileError) throw error;
    const name = /** @type {Error} */ (error).name;
    if (name === "PasswordException") throw new LockedFileError(t(password === undefined ? "files.protected" : "files.wrong_password"));
    throw new RefusedFileError(t("files.damaged"));
  } finally {
    clearTimeout(timer);
    port.terminate();
  }
}

/** Only the worker's address, where the browser has trusted types. */
const policy = /** @type {any} */ (window).trustedTypes?.createPolicy("pdf-worker", {
  createScriptURL: (/** @type {string} */ address) => {
    if (address !== new URL("../vendor/pdfjs/pdf.worker.js", import.meta.url).href) throw new TypeError("not the worker");
    return address;
  },
});

/**
 * @param {any} loading  PDFDocumentLoadingTask
 * @param {number} room
 */
async function pagesOf(loading, room) {
  const document = await loading.promise;
  if (document.numPages > MOST_PDF_PAGES) {
    throw new RefusedFileError(t("files.pages", { pages: document.numPages, most: MOST_PDF_PAGES }));
  }
  const parts = [];
  let n_chars = 0;
  for (let number = 1; number <= document.numPages; number += 1) {
    const page = await document.getPage(number);
    const { items } = await page.getTextContent();
    // Neither half of a character nor NUL may be part of a message.
    const text = items.map((/** @type {any} */ { str = "", hasEOL }) => str + (hasEOL ? "\n" : "")).join("").replaceAll("\0", "").replace(/\p{Cs}/gu, "\ufffd");
    if (text.trim()) parts.push(`[Page ${number}]\n${text.trim()}`);
    n_chars += text.length;
    if (n_chars > room) throw new RefusedFileError(t("files.text_too_large", { room: kib(room) }));
    page.cleanup();
  }
  if (parts.length === 0) throw new RefusedFileError(t("files.pictures"));
  return parts.join("\n\n");
}

/**
 * Returns the number of tokens of a text, null if it cannot be found out now.
 *
 * @param {string} model
 * @param {string} text
 * @returns {Promise<number | null>}
 */
async function tokensOf(model, text) {
  try {
    const response = await fetch(new URL("tokenize", document.baseURI), {
      method: "POST",
      headers: { authorization: `Bearer ${keptToken() ?? ""}`, "content-type": "application/json" }, // no text
      body: JSON.stringify({ text, count_only: true, ...(model && { model }) }),
    });
    return response.ok ? (await response.json()).count : null;
  } catch {
    return null;
  }
}

/**
 * @param {Session} session
 * @param {import("./drafts.js").DraftFile} file
 * @throws {RefusedFileError} It does not fit into the context, with the other files.
 */
async function checkContext(session, { tokens }) {
  if (tokens === null) return;
  const limit = session.contextLimit.peek() ?? (await contextOf(modelOf(session)));
  const others = filesOf(session.id.peek()).reduce((sum, file) => sum + (file.tokens ?? 0), 0);
  if (limit === null || tokens + others <= limit) return;
  throw new RefusedFileError(t(others > 0 ? "files.beyond_context_with" : "files.beyond_context", { tokens, others, limit }));
}

/**
 * @param {string | null} id
 * @param {import("./drafts.js").DraftFile} file
 * @throws {RefusedFileError}
 */
function checkRoom(id, file) {
  const files = [...filesOf(id), file];
  if (files.length > MOST_FILES) throw new RefusedFileError(t("files.too_many", { most: MOST_FILES }));
  const size = new TextEncoder().encode(JSON.stringify(question([messageOf(files, "")]))).length;
  const room = messageRoom();
  if (size > room) throw new RefusedFileError(t("files.beyond_frame", { size: kib(size), room: kib(room) }));
}

/** @param {string} name  Of a model. */
async function contextOf(name) {
  const there = link.peek();
  if (there?.state.peek() !== "open") return null;
  const told = await there.request("list_models").catch(() => null);
  return told?.models.find((/** @type {any} */ model) => model.name === name)?.n_ctx ?? null;
}
