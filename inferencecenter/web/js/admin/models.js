// @ts-check
/** Files of models: downloads with their progress, and deletion; beside the list in which models are loaded. */

import { useActive, useAnswer } from "../board/feed.js";
import { bytes, percent } from "../board/format.js";
import { Panel } from "../board/panels.js";
import { t } from "../i18n.js";
import { readModels } from "../models.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { Confirm } from "../views/dialog.js";
import { ModelList } from "../views/models.js";
import { Field } from "./fields.js";
import { Said, useOperation } from "./windows.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").PullSummary} Pull */

/** A repository and one of its quantizations. */
const EXAMPLE = "owner/repo:Q4_K_M";
const EVERY_MS = 10_000;
const EVERY_WHILE_PULLING_MS = 1000;
/** @type {Readonly<Record<Pull["phase"], string>>} */
const MOODS = { running: "busy", done: "good", failed: "bad", cancelled: "calm" };

/** @param {{link: Link}} props */
export function ModelFiles({ link }) {
  const { said, run } = useOperation();
  const [doomed, setDoomed] = useState("");
  const head = useRef(/** @type {HTMLElement | null} */ (null));
  const remove = async () => {
    await run(async () => {
      await link.request("remove_model", { name: doomed });
      await readModels();
      return t("model_files.deleted", { name: doomed });
    });
    head.current?.focus();
  };
  return html`
    <${Pulls} link=${link} />
    <section class="admin-panel" aria-labelledby="models-title">
      <h2 id="models-title" class="visually-hidden" ref=${head} tabindex="-1">${t("admin.models")}</h2>
      <${Said} said=${said} />
      <${ModelList} link=${link} onRemove=${setDoomed} />
    </section>
    ${doomed &&
    html`<${Confirm} title=${t("model_files.question")} action=${t("model_files.delete")} typed=${doomed} onConfirm=${remove}
      onClose=${() => setDoomed("")}
      text=${t("model_files.warning", { name: doomed })} />`}
  `;
}

/** @param {{link: Link}} props */
function Pulls({ link }) {
  const { busy, said, run } = useOperation();
  const [times, setTimes] = useState(0);
  const [pulling, setPulling] = useState(false);
  const active = useActive(link);
  const head = useRef(/** @type {HTMLElement | null} */ (null));
  const told = useAnswer(link, { op: "list_pulls", everyMs: pulling ? EVERY_WHILE_PULLING_MS : EVERY_MS, active, times });
  /** @type {readonly Pull[]} */
  const pulls = told.answer?.pulls ?? [];
  const running = pulls.filter(({ phase }) => phase === "running").length;
  useEffect(() => {
    setPulling(running > 0);
    readModels();
  }, [link, running]);
  const start = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.currentTarget);
    const reference = String(new FormData(form).get("reference")).trim();
    run(async () => {
      await link.request("pull_model", { reference });
      form.reset();
      setTimes((before) => before + 1);
      return t("pull.started", { name: reference });
    });
  };
  const cancel = async (/** @type {string} */ reference) => {
    await run(async () => {
      await link.request("cancel_pull", { reference });
      setTimes((before) => before + 1);
      return t("pull.cancelled", { name: reference });
    });
    head.current?.focus();
  };
  return html`<${Panel} title=${t("pull.title")}>
    <form class="admin-form" aria-label=${t("pull.title")} onSubmit=${start} ref=${head} tabindex="-1">
      <${Field} label=${t("pull.model")} name="reference" said=${said} required maxlength="512" spellcheck=${false}
        placeholder=${EXAMPLE} hint=${t("pull.hint")} />
      <div><button type="submit" class="button primary" disabled=${busy}>${t("pull.start")}</button></div>
    </form>
    <${Said} said=${said} />
    ${told.fault && html`<p class="problem">${told.fault}</p>`}
    <ul class="admin-list">
      ${pulls.toReversed().map((pull) => html`<${Download} key=${pull.reference} pull=${pull} onCancel=${() => cancel(pull.reference)} />`)}
    </ul>
  <//>`;
}

/** @param {{pull: Pull, onCancel: () => void}} props */
function Download({ pull, onCancel }) {
  const name = pull.reference;
  const part = pull.total_bytes > 0 ? pull.done_bytes / pull.total_bytes : undefined;
  return html`<li class="admin-item">
    <div class="admin-head">
      <b>${name}</b>
      <span class="pill" data-mood=${MOODS[pull.phase]}>${t(`pull_phase.${pull.phase}`)}</span>
      ${pull.phase === "running" &&
      html`<button type="button" class="button small" aria-label=${t("pull.cancel_one", { name })} onClick=${onCancel}>${t("pull.cancel")}</button>`}
    </div>
    ${pull.phase === "running" &&
    html`<div class="model-progress">
      ${part !== undefined && html`<span>${t("pull.progress", { done: bytes(pull.done_bytes), total: bytes(pull.total_bytes), percent: percent(part) })}</span>`}
      <progress aria-label=${t("pull.progress_of", { name })} max="1" value=${part}></progress>
    </div>`}
    ${pull.detail && html`<p class="problem">${pull.detail}</p>`}
    ${pull.model && html`<p class="hint">${t("pull.as", { name: pull.model })}</p>`}
  </li>`;
}
