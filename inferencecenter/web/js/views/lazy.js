// @ts-check
import { t } from "../i18n.js";
import { html, styled, useEffect, useState } from "../ui.js";
import { ReloadOffer } from "./notices.js";

/**
 * A view whose code is loaded when it is first shown.
 *
 * @param {{load: () => Promise<any>, name: string, [prop: string]: any}} props  `name` is the export; other props are passed to it.
 */
export function Lazy({ load, name, ...props }) {
  const [found, setFound] = useState(/** @type {{view?: any, failed?: boolean}} */ ({}));
  useEffect(() => {
    Promise.all([load(), styled("css/dashboard.css")]).then(
      ([module]) => setFound(module[name] ? { view: module[name] } : { failed: true }),
      () => setFound({ failed: true }),
    );
  }, [name]);
  if (found.failed) return html`<${ReloadOffer} words=${t("notice.not_loaded")} />`;
  return found.view ? html`<${found.view} ...${props} />` : html`<p class="quiet">${t("notice.loading")}</p>`;
}
