// @ts-check
/** The tokens of an account. The secret of a new one is in memory until it is dismissed, and nowhere else. */

import { t } from "../i18n.js";
import { keptToken } from "../storage.js";
import { signIn } from "../state.js";
import { copy } from "../text/blocks.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { Confirm } from "../views/dialog.js";
import { Field, LimitFields, limitsIn, limitsInWords } from "./fields.js";
import { Rest, Said, moment, useOperation, useWindows } from "./windows.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").AccessToken} Token */
/** @typedef {"rotate" | "revoke"} Act */

const DAY_S = 86_400;
const YEAR_DAYS = 365;
/** In days; 0 is no expiry. */
const LIFETIMES = [0, 1, 7, 30, 90, YEAR_DAYS];

/** @param {{link: Link, clientId: string, onCount: (more: number) => void}} props  `onCount`: there are more or fewer valid ones. */
export function Tokens({ link, clientId, onCount }) {
  const list = useWindows(link, "list_tokens", {
    fields: { client_id: clientId },
    rowsOf: (answer) => /** @type {Token[]} */ (answer.access_tokens),
  });
  const [secret, setSecret] = useState("");
  const [asked, setAsked] = useState(/** @type {{act: Act, token: Token} | null} */ (null));
  const [limited, setLimited] = useState("");
  const { busy, said, run } = useOperation();
  const head = useRef(/** @type {HTMLElement | null} */ (null));
  const changed = (/** @type {Token} */ now) => list.replace((row) => (row.token_id === now.token_id ? now : row));

  const create = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const form = /** @type {HTMLFormElement} */ (event.currentTarget);
    const given = new FormData(form);
    const lifetime = DAY_S * Number(given.get("expires_in_s"));
    run(async () => {
      const answer = await link.request("create_token", {
        client_id: clientId,
        name: String(given.get("name")).trim(),
        ...(lifetime ? { expires_in_s: lifetime } : {}),
      });
      form.reset();
      list.add(answer.access_token);
      onCount(1);
      setSecret(answer.token);
      return t("access.created");
    });
  };
  const act = async (/** @type {Act} */ what, /** @type {Token} */ { token_id: id }) => {
    await run(async () => {
      if (what === "revoke") {
        changed((await link.request("revoke_token", { token_id: id })).access_token);
        onCount(-1);
        return t("access.revoked");
      }
      const answer = await link.request("rotate_token", { token_id: id });
      list.replace((row) => (row.token_id === id ? { ...row, revoked: true } : row));
      list.add(answer.access_token);
      setSecret(answer.token);
      if (isOwn(id)) signIn(answer.token);
      return t("access.replaced");
    });
    head.current?.focus();
  };
  return html`<section aria-label=${t("access.of", { name: clientId })}>
    <h4 ref=${head} tabindex="-1">${t("access.title")}</h4>
    ${secret && html`<${Secret} token=${secret} onDone=${() => { setSecret(""); head.current?.focus(); }} />`}
    <${Said} said=${said} />
    <ul class="admin-list">
      ${list.rows?.map(
        (token) => html`<${Row} key=${token.token_id} token=${token} link=${link} busy=${busy}
          limiting=${limited === token.token_id} onChange=${changed}
          onLimit=${() => setLimited(limited === token.token_id ? "" : token.token_id)}
          onAct=${(/** @type {Act} */ what) => setAsked({ act: what, token })} />`,
      )}
    </ul>
    <${Rest} list=${list} empty=${t("access.empty")} />
    <form class="admin-form admin-inline" aria-label=${t("access.new_of", { name: clientId })} onSubmit=${create}>
      <${Field} label=${t("access.purpose")} name="name" said=${said} placeholder=${t("access.purpose_example")} maxlength="256" />
      <${Field} label=${t("access.expires")} name="expires_in_s" kind="select">
        ${LIFETIMES.map((days) => html`<option key=${days} value=${days}>${lifetimeInWords(days)}</option>`)}
      <//>
      <button type="submit" class="button" disabled=${busy}>${t("access.create")}</button>
    </form>
    ${asked &&
    html`<${Confirm} title=${t(asked.act === "revoke" ? "access.revoke_question" : "access.replace_question")} text=${warningOf(asked.token)}
      action=${t(asked.act === "revoke" ? "access.revoke" : "access.replace")} onConfirm=${() => act(asked.act, asked.token)}
      onClose=${() => setAsked(null)} />`}
  </section>`;
}

/**
 * @param {object} props
 * @param {Token} props.token
 * @param {Link} props.link
 * @param {boolean} props.busy
 * @param {boolean} props.limiting  Whether its limits are edited.
 * @param {(now: Token) => void} props.onChange
 * @param {() => void} props.onLimit
 * @param {(what: Act) => void} props.onAct
 */
function Row({ token, link, busy, limiting, onChange, onLimit, onAct }) {
  const name = token.name || token.token_id;
  const state = stateOf(token);
  return html`<li class="admin-item">
    <div class="admin-head">
      <b>${name}</b>
      <span class="pill" data-mood=${state === "valid" ? "good" : "calm"}>${t(`access_state.${state}`)}</span>
      ${isOwn(token.token_id) && html`<span class="pill" data-mood="accent">${t("access.own")}</span>`}
      ${state === "valid" &&
      html`<span class="admin-acts">
        <button type="button" class="button small" aria-label=${t("access.limits_of", { name })} aria-expanded=${limiting} onClick=${onLimit}>${t("limits.title")}</button>
        <button type="button" class="button small" aria-label=${t("access.replace_one", { name })} disabled=${busy} onClick=${() => onAct("rotate")}>${t("access.replace")}</button>
        <button type="button" class="button small" aria-label=${t("access.revoke_one", { name })} disabled=${busy} onClick=${() => onAct("revoke")}>${t("access.revoke")}</button>
      </span>`}
    </div>
    <p class="hint">${factsOf(token).join(" · ")}</p>
    ${limiting && state === "valid" && html`<${TokenLimits} token=${token} link=${link} name=${name} onChange=${onChange} />`}
  </li>`;
}

/** @param {{token: Token, link: Link, name: string, onChange: (now: Token) => void}} props */
function TokenLimits({ token, link, name, onChange }) {
  const { busy, said, run } = useOperation();
  const save = (/** @type {SubmitEvent} */ event) => {
    event.preventDefault();
    const limits = limitsIn(new FormData(/** @type {HTMLFormElement} */ (event.currentTarget)));
    run(async () => {
      onChange((await link.request("change_token", { token_id: token.token_id, access_limits: limits })).access_token);
      return t("access.limits_saved");
    });
  };
  return html`<form class="admin-form" aria-label=${t("access.limits_of", { name })} onSubmit=${save}>
    <${LimitFields} given=${token.access_limits} said=${said} />
    <div><button type="submit" class="button primary" disabled=${busy}>${t("access.save_limits")}</button></div>
    <${Said} said=${said} />
  </form>`;
}

/** @param {{token: string, onDone: () => void}} props */
function Secret({ token, onDone }) {
  const [copied, setCopied] = useState("");
  const button = useRef(/** @type {HTMLButtonElement | null} */ (null));
  useEffect(() => button.current?.focus(), [token]);
  const take = async () => setCopied(t((await copy(token)) ? "access.copied" : "access.not_copied"));
  return html`<div class="admin-secret" role="group" aria-label=${t("access.new")}>
    <code>${token}</code>
    <p class="hint">${t("access.once")} <span role="status">${copied}</span></p>
    <div class="admin-acts">
      <button type="button" class="button primary" ref=${button} onClick=${take}>${t("message.copy")}</button>
      <button type="button" class="button" onClick=${onDone}>${t("access.done")}</button>
    </div>
  </div>`;
}

/** @param {number} days */
function lifetimeInWords(days) {
  if (days === 0) return t("access.never");
  return days === YEAR_DAYS ? t("access.year") : t("access.days", { n: days });
}

/** @param {Token} token */
function stateOf({ revoked, expires_at: end }) {
  if (revoked) return "revoked";
  return end !== undefined && end * 1000 <= Date.now() ? "expired" : "valid";
}

/** @param {Token} token */
function factsOf(token) {
  const limits = limitsInWords(token.access_limits);
  return [
    token.name && token.token_id,
    t("access.made_at", { date: moment(token.created_at) }),
    token.expires_at !== undefined && t("access.expires_at", { date: moment(token.expires_at) }),
    token.last_used_at === undefined ? t("access.unused") : t("access.used_at", { date: moment(token.last_used_at) }),
    limits,
  ].filter(Boolean);
}

/** @param {string} id  Of a token. */
function isOwn(id) {
  return keptToken()?.split("_")[1] === id;
}

/** @param {Token} token */
function warningOf(token) {
  return t(isOwn(token.token_id) ? "access.warning_own" : "access.warning", { name: token.name || token.token_id });
}
