// @ts-check
/** Syntax highlighting. The highlighter and its languages are loaded on demand. */

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
/** A language whose grammar continues within another; the highlighter starts with languages only. */
const REST = "rest";

/** @type {any} */
let core = null;
/** @type {Map<string, Promise<boolean>>} */
const loading = new Map();

/**
 * Returns the canonical name of a language, "" for an unknown one.
 *
 * @param {string} language  The info string of a fence.
 */
export function languageOf(language) {
  const name = language.trim().toLowerCase();
  const known = ALIASES[name] ?? name;
  return LANGUAGES.has(known) ? known : "";
}

/**
 * Returns highlighted code and the highlighter's state after it; null while the language is not loaded.
 *
 * @param {string} code
 * @param {string} language  A name of `languageOf`; `withLanguage` loads it.
 * @param {any} top  State of the highlighter after the preceding lines, null at the start.
 * @returns {{fragment: DocumentFragment, top: any} | null}
 */
export function painted(code, language, top) {
  if (!core?.getLanguage(language)) return null;
  if (top) core.registerLanguage(REST, () => restOf(top, core.getLanguage(language)));
  opening = scopesOf(top);
  const found = core.highlight(code, { language: top ? REST : language, ignoreIllegals: true });
  const end = found._top ?? null;
  return { fragment: found._emitter.fragment, top: end && Object.hasOwn(end, "stands") ? end.stands : end };
}

/**
 * Returns whether code continues in the same way after two states; null stands for the start.
 *
 * @param {any} one
 * @param {any} other
 * @returns {boolean}
 */
export function isSame(one, other) {
  const [a, b] = [one, other].map((top) => (top?.parent ? top : null));
  if (a === b) return true;
  return a !== null && b !== null && Object.getPrototypeOf(a) === Object.getPrototypeOf(b) && isSame(a.parent, b.parent);
}

/**
 * Calls back when a language is loaded.
 *
 * @param {string} language
 * @param {() => void} then
 */
export function withLanguage(language, then) {
  if (core?.getLanguage(language)) then();
  else if (language) load(language).then((there) => there && then());
}

/**
 * @param {any} top
 * @param {any} language
 */
function restOf(top, language) {
  const { case_insensitive, classNameAliases } = language;
  return Object.assign(Object.create(top), { case_insensitive, classNameAliases, stands: top });
}

/** @param {any} top */
function scopesOf(top) {
  const scopes = [];
  for (let mode = top; mode; mode = mode.parent) if (typeof mode.scope === "string") scopes.unshift(mode.scope);
  return scopes;
}

/** @type {string[]} */
let opening = [];

/** Builds nodes from the highlighter's tokens. Sanitizing its HTML output would be slower. */
class Painter {
  constructor() {
    this.fragment = document.createDocumentFragment();
    /** @type {Node[]} */
    this._path = [this.fragment];
    for (const scope of opening) this.openNode(scope);
    opening = [];
  }

  /** @param {string} text */
  addText(text) {
    const [at, last] = [this._path.at(-1), this._path.at(-1)?.lastChild];
    if (last instanceof Text) last.appendData(text);
    else if (text) at?.appendChild(document.createTextNode(text));
  }

  /** @param {string} scope  They are like "title.function". */
  openNode(scope) {
    const span = document.createElement("span");
    span.className = `hljs-${scope.split(".")[0]}`;
    this._path.at(-1)?.appendChild(span);
    this._path.push(span);
  }

  closeNode() {
    if (this._path.length > 1) this._path.pop();
  }

  /** @param {string} scope */
  startScope(scope) {
    this.openNode(scope);
  }

  endScope() {
    this.closeNode();
  }

  /** @param {Painter} within */
  __addSublanguage(within) {
    this._path.at(-1)?.appendChild(within.fragment);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

/**
 * @param {string} language
 * @returns {Promise<boolean>} Whether it is loaded.
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
    core.configure({ __emitter: Painter });
    core.registerLanguage(language, (await import(`${VENDOR}${language}.js`)).default);
    return true;
  } catch (error) {
    console.info("code is not highlighted:", error);
    loading.delete(language);
    return false;
  }
}
