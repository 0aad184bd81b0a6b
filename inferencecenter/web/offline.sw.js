// @ts-check
/**
 * Shows a page while the server cannot be reached. Its files are all that is cached: the rest of the page is in the
 * browser's own cache, and nothing of a conversation is stored.
 */

const worker = /** @type {any} */ (self);
const folder = new URL("./", worker.location.href);
const PAGE = new URL("offline.html", folder).href;
const PARTS = ["css/base.css?offline", "js/offline.js?offline"].map((path) => new URL(path, folder).href);
/** The folder of the files is named by their version. */
const CACHE = `inferencecenter ${folder.pathname}`;

worker.addEventListener("install", (/** @type {any} */ event) => event.waitUntil(install()));
worker.addEventListener("activate", (/** @type {any} */ event) => event.waitUntil(activate()));
worker.addEventListener("fetch", (/** @type {any} */ event) => {
  const { request } = event;
  if (request.mode === "navigate") event.respondWith(fetch(request).catch(() => cached(PAGE)));
  else if (PARTS.includes(request.url)) event.respondWith(cached(request.url));
});

async function install() {
  await (await caches.open(CACHE)).addAll([PAGE, ...PARTS]);
  await worker.skipWaiting();
}

async function activate() {
  for (const name of await caches.keys()) if (name.startsWith("inferencecenter ") && name !== CACHE) await caches.delete(name);
  await worker.clients.claim();
}

/** @param {string} address */
async function cached(address) {
  return (await (await caches.open(CACHE)).match(address)) ?? Response.error();
}
