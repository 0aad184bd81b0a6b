// @ts-check
/** A conversation as `session_resumed` tells it, where events were lost for good. */

import { Live } from "./live.js";
import { divide, loose } from "./transcript.js";

/**
 * @typedef {import("./types.js").SessionResumedEvent} Resumed
 * @typedef {import("./transcript.js").Turn} Turn
 *
 * @typedef {object} Restored
 * @property {readonly Turn[]} turns
 * @property {Live | null} live  The turn that runs, or that is still to be asked.
 * @property {Live | null} lost  One that ran here and left no trace.
 */

/**
 * Returns the conversation as it is, with what only this page knows of it.
 *
 * @param {Resumed} resumed  Not `resumed`.
 * @param {readonly Turn[]} known  The turns before.
 * @param {Live | null} live  What ran, as far as this page knows.
 * @returns {Restored}
 */
export function restored(resumed, known, live) {
  const { turns: ended, rest } = divide(resumed.transcript ?? [], resumed.turns ?? []);
  const seen = new Map(known.map((turn) => [turn.turnId, turn.ending]));
  const turns = ended.map((turn) => ({ ...turn, ending: seen.get(turn.turnId) ?? turn.ending }));
  if (resumed.turn_id !== undefined) return { turns, live: running(resumed, resumed.turn_id, live, rest), lost: null };
  if (rest.length > 0) turns.push(loose(rest, "rest"));
  const asking = live?.turnId === null;
  const gone = live !== null && !asking && !turns.some((turn) => turn.turnId === live.turnId);
  return { turns, live: asking ? live : null, lost: gone ? live : null };
}

/**
 * @param {Resumed} resumed
 * @param {string} turnId
 * @param {Live | null} live
 * @param {readonly import("./types.js").ChatMessage[]} asked
 */
function running(resumed, turnId, live, asked) {
  // One that was sent just before the cut may be the one that runs.
  if (live?.turnId === null && live.asked.at(-1)?.content === asked.at(-1)?.content) live.turnId = turnId;
  const found = live !== null && live.turnId === turnId ? live : new Live({ asked, fields: null, turnId });
  found.replace(resumed);
  return found;
}
