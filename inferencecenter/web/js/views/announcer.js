// @ts-check
import { html, useEffect, useRef, useState } from "../ui.js";
import { phaseWords } from "./outcome.js";

const EVERY_MS = 2500;

/**
 * Announces an answer to screen readers, in whole sentences and at a limited rate.
 *
 * @param {{session: import("../wire/session.js").Session}} props
 */
export function Announcer({ session }) {
  const [said, setSaid] = useState("");
  const told = useRef(0);
  const live = session.live.value;
  useEffect(() => {
    if (!live) return undefined;
    told.current = 0;
    setSaid(phaseWords(live));
    const timer = setInterval(() => {
      const end = sentenceEnd(live.content, told.current);
      if (end === told.current) return;
      setSaid(live.content.slice(told.current, end));
      told.current = end;
    }, EVERY_MS);
    return () => {
      clearInterval(timer);
      const rest = live.content.slice(told.current);
      setSaid(live.stopping ? "Stopped." : `${rest} End of the answer.`);
    };
  }, [live]);
  return html`<div class="visually-hidden" role="log" aria-live="polite" aria-label="Streaming answer">${said}</div>`;
}

/**
 * Returns the end of the last whole sentence or line.
 *
 * @param {string} text
 * @param {number} from
 */
export function sentenceEnd(text, from) {
  const part = text.slice(from);
  const ends = [...part.matchAll(/[.!?…:;]\s|\n/g)];
  const last = ends.at(-1);
  return last ? from + last.index + last[0].length : from;
}
