// @ts-check
/** Voice input, by the browser's speech recognition. */

import { t } from "../i18n.js";
import { failure } from "../state.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { WireError } from "../wire/errors.js";
import { Icon } from "./icons.js";

/** @param {{disabled: boolean, onSpeech: (said: string) => void}} props */
export function Voice({ disabled, onSpeech }) {
  const [listens, setListens] = useState(false);
  const recognition = useRef(/** @type {any} */ (null));
  useEffect(() => () => recognition.current?.abort(), []);
  const toggle = () => {
    if (listens) {
      recognition.current.stop();
      return;
    }
    const own = /** @type {any} */ (window);
    const made = new (own.SpeechRecognition ?? own.webkitSpeechRecognition)();
    made.lang = document.documentElement.lang;
    made.continuous = true;
    made.onresult = (/** @type {any} */ event) => {
      for (const result of [...event.results].slice(event.resultIndex)) if (result.isFinal) onSpeech(result[0].transcript.trim());
    };
    made.onerror = (/** @type {any} */ event) => {
      if (event.error !== "aborted") failure.value = new WireError({ code: "internal", message: t("voice.failed", { why: event.error }) });
    };
    made.onend = () => setListens(false);
    made.start();
    recognition.current = made;
    setListens(true);
  };
  return html`<button type="button" class="icon-button attach voice" aria-pressed=${listens} aria-label=${t("voice.speak")}
    title=${t("voice.note")} disabled=${disabled} onClick=${toggle}><${Icon} name="microphone" /></button>`;
}
