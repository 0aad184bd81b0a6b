// @ts-check
/**
 * Versions of a conversation. Pure.
 *
 * A question that is edited, or an answer that is generated again, begins a fork, which shares the turns before. Its metadata
 * name the conversation that it began as (`version_root`), the one that has the other version of the turn (`version_of`), and
 * the index of that turn (`version_at`).
 */

/**
 * @typedef {import("./wire/types.js").SessionSummary} Summary
 * @typedef {readonly Summary[] | null} List
 */

/**
 * Returns the metadata of a new version of a turn.
 *
 * @param {List} list
 * @param {string} id  The session of the version before.
 * @param {number} index  Of the turn.
 */
export function versionFields(list, id, index) {
  return { version_root: rootOf(list, id), version_of: ownerOf(list, id, index), version_at: String(index) };
}

/**
 * Returns the sessions with the versions of a turn, in their order, and which of them a session shows.
 *
 * @param {List} list
 * @param {string} id
 * @param {number} index
 * @returns {{ids: readonly string[], at: number}}
 */
export function versionsAt(list, id, index) {
  const owner = ownerOf(list, id, index);
  const forks = versionsOf(list, id).filter((each) => each.metadata.version_of === owner && Number(each.metadata.version_at) === index);
  const ids = forks.toSorted((a, b) => a.created_at - b.created_at).map((each) => each.session_id);
  if (summaryOf(list, owner)) ids.unshift(owner);
  let shown = id;
  for (let each = summaryOf(list, id); each && turnOf(each) > index; each = summaryOf(list, shown)) shown = each.metadata.version_of;
  return { ids, at: ids.indexOf(shown) };
}

/**
 * Returns all versions of a conversation.
 *
 * @param {List} list
 * @param {string} id
 * @returns {readonly Summary[]}
 */
export function versionsOf(list, id) {
  return indexed(list).families.get(rootOf(list, id)) ?? [];
}

/**
 * Returns the list with the first version of each conversation only.
 *
 * @param {readonly Summary[]} list
 */
export function withoutVersions(list) {
  return [...indexed(list).families.values()].map(([first]) => first);
}

/**
 * Returns the session that a conversation began as.
 *
 * @param {List} list
 * @param {string} id
 */
export function rootOf(list, id) {
  return summaryOf(list, id)?.metadata.version_root ?? id;
}

/**
 * Returns the session that has the first version of a turn.
 *
 * @param {List} list
 * @param {string} id
 * @param {number} index
 */
function ownerOf(list, id, index) {
  let owner = id;
  for (let each = summaryOf(list, id); each && turnOf(each) >= index; each = summaryOf(list, owner)) owner = each.metadata.version_of;
  return owner;
}

/** @param {Summary} summary  Its first own turn; -1 if all are its own. */
function turnOf({ metadata }) {
  return metadata.version_of === undefined ? -1 : Number(metadata.version_at);
}

/**
 * @param {List} list
 * @param {string} id
 */
function summaryOf(list, id) {
  return indexed(list).byId.get(id);
}

/** @type {WeakMap<object, {byId: Map<string, Summary>, families: Map<string, Summary[]>}>} */
const indexes = new WeakMap();
/** @type {readonly Summary[]} */
const NONE = [];

/** @param {List} list  It is replaced and never changed. */
function indexed(list) {
  const all = list ?? NONE;
  const known = indexes.get(all);
  if (known) return known;
  const byId = new Map(all.map((each) => [each.session_id, each]));
  /** @type {Map<string, Summary[]>} */
  const families = new Map();
  for (const each of all) {
    const root = each.metadata.version_root ?? each.session_id;
    const family = families.get(root);
    if (family) family.push(each);
    else families.set(root, [each]);
  }
  const made = { byId, families };
  indexes.set(all, made);
  return made;
}
