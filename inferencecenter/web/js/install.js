// @ts-check
/** Registers the service worker, which shows a page of its own while the server cannot be reached. */

import { t } from "./i18n.js";
import { keep } from "./storage.js";

const worker = new URL("../offline.sw.js", import.meta.url).href;

/** Registers the worker of this version; browsers offer it in secure contexts only. */
export async function install() {
  const { lang: language, dir: direction } = document.documentElement;
  keep("offline", { language, direction, words: t("offline.words"), retry: t("offline.retry") });
  try {
    const policy = /** @type {any} */ (window).trustedTypes?.createPolicy("offline-worker", { createScriptURL: () => worker });
    await navigator.serviceWorker?.register(policy?.createScriptURL("") ?? worker, { scope: "./" });
  } catch (error) {
    console.info("no page for times without a connection:", error);
  }
}
