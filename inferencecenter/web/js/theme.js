// @ts-check
/** Dark or light, as chosen or as the system has it. */

import { effect } from "../vendor/signals-core.js";
import { preferences } from "./state.js";

/** Has the page follow the preference and the system from now on. */
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
