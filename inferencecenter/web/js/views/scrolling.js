// @ts-check

/** Distance from the end that counts as being at the end. */
const NEAR_PX = 48;

/**
 * Keeps an element scrolled to its end while its content grows, until the user scrolls up.
 *
 * @param {HTMLElement} scroller  Its only child is the growing content.
 * @param {(atEnd: boolean) => void} onChange
 */
export function followEnd(scroller, onChange) {
  let following = true;
  let lastTop = 0;
  const atEnd = () => scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_PX;
  const set = (/** @type {boolean} */ value) => {
    if (following === value) return;
    following = value;
    onChange(value);
  };
  const toEnd = () => {
    set(true);
    scroller.scrollTop = scroller.scrollHeight;
  };
  const scrolled = () => {
    // Resizing scrolls, too; only a user scrolls up while there is more below.
    const up = scroller.scrollTop < lastTop - 1;
    lastTop = scroller.scrollTop;
    if (atEnd()) set(true);
    else if (up) set(false);
  };
  const grown = new ResizeObserver(() => {
    if (following) toEnd();
    else onChange(atEnd());
  });
  const watch = () => {
    grown.disconnect();
    grown.observe(scroller);
    for (const child of scroller.children) grown.observe(child);
  };
  const replaced = new MutationObserver(watch);
  watch();
  replaced.observe(scroller, { childList: true });
  scroller.addEventListener("scroll", scrolled, { passive: true });
  const end = () => {
    grown.disconnect();
    replaced.disconnect();
    scroller.removeEventListener("scroll", scrolled);
  };
  return { toEnd, end };
}
