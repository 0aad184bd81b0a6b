// @ts-check
import { html, useEffect, useState } from "../ui.js";

/**
 * A view whose code is fetched when it is first shown.
 *
 * @param {{load: () => Promise<any>, name: string, [prop: string]: any}} props  `name` is the export; others go to it.
 */
export function Lazy({ load, name, ...props }) {
  const [found, setFound] = useState(/** @type {{view?: any, failed?: boolean}} */ ({}));
  useEffect(() => {
    load().then(
      (module) => setFound({ view: module[name] }),
      () => setFound({ failed: true }),
    );
  }, [name]);
  if (found.failed) return html`<p class="quiet" role="alert">This part of the page could not be loaded. Reload the page.</p>`;
  return found.view ? html`<${found.view} ...${props} />` : html`<p class="quiet">Loading…</p>`;
}
