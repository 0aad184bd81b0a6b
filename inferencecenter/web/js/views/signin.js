// @ts-check
import { html, useState } from "../ui.js";
import { link, signIn, signInError } from "../state.js";
import { Icon } from "./icons.js";

/** The sign-in form. */
export function SignIn() {
  const [token, setToken] = useState("");
  const [shown, setShown] = useState(false);
  const there = link.value;
  const state = there?.state.value;
  const problem = signInError.value || (state === "waiting" ? `${there?.reason.value} Retrying…` : "");
  const submit = (/** @type {Event} */ event) => {
    event.preventDefault();
    if (token.trim()) signIn(token.trim());
  };
  return html`
    <main class="signin">
      <form class="signin-card" onSubmit=${submit}>
        <h1><span class="mark" aria-hidden="true"></span>InferenceCenter</h1>
        <label for="token">Token</label>
        <div class="field">
          <input id="token" type=${shown ? "text" : "password"} value=${token} placeholder="ic_…" autocomplete="off"
            autocapitalize="off" spellcheck=${false} required maxlength="256" autofocus
            aria-describedby="token-hint token-problem" aria-invalid=${Boolean(signInError.value)}
            onInput=${(/** @type {any} */ event) => setToken(event.target.value)} />
          <button type="button" class="button quiet" aria-pressed=${shown} onClick=${() => setShown(!shown)}>
            ${shown ? "Hide" : "Show"}
          </button>
        </div>
        <p id="token-problem" class="problem" role="alert">${problem}</p>
        <button type="submit" class="button primary wide" disabled=${state === "connecting"}>
          ${state === "connecting" ? "Signing in…" : "Sign in"}
        </button>
        <p id="token-hint" class="hint">
          The server printed one when it first started, and keeps it in <code>admin.token</code> in its state directory.${" "}
          ${!problem && html`<code>inferencecenter token create NAME</code> creates one.`} It is kept in this tab only.
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
        <p class="hint" role="status">${state === "waiting" ? there?.reason.value : "Connecting…"}</p>
        ${state === "waiting" &&
        html`<button type="button" class="button wide" onClick=${() => there?.retryNow()}>
          <${Icon} name="again" /> Try now
        </button>`}
      </div>
    </main>
  `;
}
