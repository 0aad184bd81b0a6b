// @ts-check
/** Colours for code. The highlighter and its languages are loaded when there is code to show. */

const VENDOR = "../../vendor/highlight/";
const LANGUAGES = new Set([
  "bash", "c", "cpp", "csharp", "css", "diff", "dockerfile", "go", "ini", "java", "javascript", "json", "kotlin", "lua",
  "makefile", "markdown", "php", "powershell", "python", "ruby", "rust", "sql", "swift", "typescript", "xml", "yaml",
]);
/** @type {Readonly<Record<string, string>>} */
const ALIASES = {
  "c#": "csharp", "c++": "cpp", cc: "cpp", cs: "csharp", console: "bash", docker: "dockerfile", golang: "go", h: "c",
  hpp: "cpp", html: "xml", js: "javascript", jsonc: "json", jsx: "javascript", kt: "kotlin", make: "makefile",
  md: "markdown", mjs: "javascript", patch: "diff", ps1: "powershell", py: "python", python3: "python", rb: "ruby",
  rs: "rust", sh: "bash", shell: "bash", svg: "xml", toml: "ini", ts: "typescript", tsx: "typescript", yml: "yaml",
  zsh: "bash",
};
/** More is shown without colours: they would take longer than a frame. */
const MAX_CHARS = 40_000;

/** @type {any} */
let core = null;
/** @type {Map<string, Promise<boolean>>} */
const loading = new Map();

/**
 * Returns the name under which a language is known, "" for one that is not.
 *
 * @param {string} language  As models write it behind a fence.
 */
export function languageOf(language) {
  const name = language.trim().toLowerCase();
  const known = ALIASES[name] ?? name;
  return LANGUAGES.has(known) ? known : "";
}

/**
 * Colours the code in an element, now if the language is here already, else when it is.
 *
 * @param {HTMLElement} element  Holds the code as text.
 * @param {string} language  As `languageOf` tells.
 */
export function highlight(element, language) {
  const code = element.textContent ?? "";
  if (!language || code.length > MAX_CHARS) return;
  if (core?.getLanguage(language)) {
    paint(element, code, language);
    return;
  }
  load(language).then((there) => {
    if (there && element.textContent === code) paint(element, code, language);
  });
}

/**
 * @param {HTMLElement} element
 * @param {string} code
 * @param {string} language
 */
function paint(element, code, language) {
  const tree = core.highlight(code, { language, ignoreIllegals: true })._emitter;
  const painter = new Painter();
  tree.walk(painter);
  element.replaceChildren(painter.fragment);
}

/** Makes nodes of what the highlighter found. Its own writer makes HTML, which would have to be sanitized: that takes longer. */
class Painter {
  constructor() {
    this.fragment = document.createDocumentFragment();
    /** @type {Node[]} */
    this._path = [this.fragment];
  }

  /** @param {string} text */
  addText(text) {
    this._path.at(-1)?.appendChild(document.createTextNode(text));
  }

  /** @param {{scope?: string}} node  Scopes are like "title.function". */
  openNode({ scope }) {
    const span = document.createElement("span");
    if (scope) span.className = `hljs-${scope.split(".")[0]}`;
    this._path.at(-1)?.appendChild(span);
    this._path.push(span);
  }

  closeNode() {
    this._path.pop();
  }
}

/**
 * @param {string} language
 * @returns {Promise<boolean>} Whether it is here.
 */
function load(language) {
  const under = loading.get(language) ?? fetched(language);
  loading.set(language, under);
  return under;
}

/** @param {string} language */
async function fetched(language) {
  try {
    core ??= (await import(`${VENDOR}core.js`)).default;
    core.registerLanguage(language, (await import(`${VENDOR}${language}.js`)).default);
    return true;
  } catch (error) {
    console.info("code is shown without colours:", error);
    loading.delete(language);
    return false;
  }
}
