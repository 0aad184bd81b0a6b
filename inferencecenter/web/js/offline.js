// @ts-check
/** The page that is shown without a connection, alone: in the language and theme of the last visit. */

const { language, direction, words, retry } = kept("offline", {});
const { theme } = kept("preferences", { theme: "system" });
const isDark = theme === "system" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
const button = /** @type {HTMLElement} */ (document.getElementById("retry"));

document.documentElement.dataset.theme = isDark ? "dark" : "light";
if (words) {
  document.documentElement.lang = language;
  document.documentElement.dir = direction;
  /** @type {HTMLElement} */ (document.getElementById("words")).textContent = words;
  button.textContent = retry;
}
button.addEventListener("click", () => location.reload());
addEventListener("online", () => location.reload());

/**
 * @param {string} name
 * @param {any} otherwise
 */
function kept(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`inferencecenter.${name}`) ?? "null") ?? otherwise;
  } catch {
    return otherwise;
  }
}
