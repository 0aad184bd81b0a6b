// @ts-check
/** The daemon's log while it is displayed, in a bounded list. */

import { useActive } from "../board/feed.js";
import { Panel } from "../board/panels.js";
import { t, time } from "../i18n.js";
import { html, useEffect, useRef, useState } from "../ui.js";
import { asWireError } from "../wire/errors.js";
import { Field } from "./fields.js";

/** @typedef {import("../wire/link.js").Link} Link */
/** @typedef {import("../wire/types.js").LogRecord & {key: number}} Line */

const MOST = 1000;
const LEVELS = /** @type {const} */ (["debug", "info", "warning", "error"]);
/** @type {Readonly<Record<string, string>>} */
const MOODS = { warning: "busy", error: "bad", critical: "bad" };
/** Pixels from the end at which the list still follows. */
const NEAR = 40;

/** @param {{link: Link}} props */
export function Logs({ link }) {
  const [level, setLevel] = useState(/** @type {(typeof LEVELS)[number]} */ ("info"));
  const [lines, setLines] = useState(/** @type {readonly Line[]} */ ([]));
  const [said, setSaid] = useState("");
  const active = useActive(link);
  const list = useRef(/** @type {HTMLElement | null} */ (null));
  const number = useRef(0);
  const follows = useRef(true);
  useEffect(() => {
    if (!active) return undefined;
    setLines([]);
    setSaid("");
    const off = link.on("log", (event) => {
      const fresh = event.log_lines.map((line) => ({ ...line, key: (number.current += 1) }));
      setLines((before) => [...before, ...fresh].slice(-MOST));
    });
    link.request("subscribe_log", { level }).catch((error) => setSaid(asWireError(error).message));
    return () => {
      off();
      link.send("unsubscribe_log");
    };
  }, [link, level, active]);
  useEffect(() => {
    if (follows.current) list.current?.scrollTo(0, list.current.scrollHeight);
  }, [lines]);
  const scrolled = (/** @type {any} */ { currentTarget: box }) => {
    follows.current = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
  };
  return html`<${Panel} title=${t("admin.log")} aside=${!active && html`<span class="hint">${t("board.paused")}</span>`}>
    <${Field} label=${t("log.level")} name="level" kind="select" value=${level} onChange=${(/** @type {any} */ event) => setLevel(event.target.value)}>
      ${LEVELS.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
    <//>
    <p class="problem" role="status">${said}</p>
    <div class="log-lines" ref=${list} tabindex="0" role="region" aria-label=${t("log.lines")} onScroll=${scrolled}>
      ${lines.length === 0 && html`<p class="hint">${t("log.empty")}</p>`}
      ${lines.map((line) => html`<p key=${line.key}>
        <time>${time(line.at * 1000, { timeStyle: "medium" })}</time> <span class="log-level" data-mood=${MOODS[line.level]}>${line.level}</span> ${line.text}
      </p>`)}
    </div>
  <//>`;
}
