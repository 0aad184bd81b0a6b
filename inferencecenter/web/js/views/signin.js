// @ts-check
import { rich, t } from "../i18n.js";
import { html, useState } from "../ui.js";
import { CREATE_TOKEN, link, signIn, signInError } from "../state.js";
import { Icon } from "./icons.js";

const EXAMPLE = "ic_…";

/** The sign-in form. */
export function SignIn() {
  const [token, setToken] = useState("");
  const [shown, setShown] = useState(false);
  const there = link.value;
  const state = there?.state.value;
  const problem = signInError.value || (state === "waiting" ? t("signin.retrying", { why: there?.reason.value ?? "" }) : "");
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (token.trim()) signIn(token.trim());
  };
  return html`
    <main class="signin">
      <form class="signin-card" onSubmit=${submit}>
        <h1><span class="mark" aria-hidden="true"></span>InferenceCenter</h1>
        <label for="token">${t("signin.token")}</label>
        <div class="field">
          <input id="token" type=${shown ? "text" : "password"} value=${token} placeholder=${EXAMPLE} autocomplete="off"
            autocapitalize="off" spellcheck=${false} required maxlength="256" autofocus
            aria-describedby="token-hint token-problem" aria-invalid=${Boolean(signInError.value)}
            onInput=${(/** @type {any} */ event) => setToken(event.target.value)} />
          <button type="button" class="button quiet" aria-pressed=${shown} onClick=${() => setShown(!shown)}>
            ${t(shown ? "signin.hide" : "signin.show")}
          </button>
        </div>
        <p id="token-problem" class="problem" role="alert">${problem}</p>
        <button type="submit" class="button primary wide" disabled=${state === "connecting"}>
          ${t(state === "connecting" ? "signin.signing_in" : "signin.sign_in")}
        </button>
        <p id="token-hint" class="hint">
          ${rich("signin.hint", { file: html`<code>admin.token</code>` })}${" "}
          ${!problem && rich("signin.hint_create", { command: html`<code>${CREATE_TOKEN}</code>` })} ${t("signin.hint_kept")}
        </p>
      </form>
    </main>
  `;
}

/** Shown while a stored token is being verified. */
export function Connecting() {
  const there = link.value;
  const state = there?.state.value;
  return html`
    <main class="signin" aria-busy="true">
      <div class="signin-card">
        <h1><span class="mark" aria-hidden="true"></span>InferenceCenter</h1>
        <p class="hint" role="status">${state === "waiting" ? there?.reason.value : t("notice.connecting")}</p>
        ${state === "waiting" &&
        html`<button type="button" class="button wide" onClick=${() => there?.retryNow()}>
          <${Icon} name="again" /> ${t("signin.try_now")}
        </button>`}
      </div>
    </main>
  `;
}
