// @ts-check
/** Dark or light theme, as chosen or as set by the system. */

import { effect } from "../vendor/signals-core.js";
import { preferences } from "./state.js";

/** Applies the preference and follows the system's setting. */
export function followTheme() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    const { theme } = preferences.peek();
    document.documentElement.dataset.theme = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  };
  dark.addEventListener("change", show);
  effect(() => {
    preferences.value;
    show();
  });
}
