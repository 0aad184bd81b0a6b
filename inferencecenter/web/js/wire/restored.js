// @ts-check
/** A conversation restored from `session_resumed` when events were lost. */

import { Live } from "./live.js";
import { divide, loose } from "./transcript.js";

/**
 * @typedef {import("./types.js").SessionResumedEvent} Resumed
 * @typedef {import("./transcript.js").Turn} Turn
 *
 * @typedef {object} Restored
 * @property {readonly Turn[]} turns
 * @property {Live | null} live  The turn that runs, or is still to be sent.
 * @property {Live | null} lost  A turn that ran here and no longer exists.
 */

/**
 * Returns the current conversation, including what only this page knows.
 *
 * @param {Resumed} resumed  With `resumed` false.
 * @param {readonly Turn[]} known  The previously known turns.
 * @param {Live | null} live  The running turn as known to this page.
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
  // A turn sent just before the connection was lost may be the running one.
  if (live?.turnId === null && live.asked.at(-1)?.content === asked.at(-1)?.content) live.turnId = turnId;
  const found = live !== null && live.turnId === turnId ? live : new Live({ asked, fields: null, turnId });
  found.replace(resumed);
  return found;
}
