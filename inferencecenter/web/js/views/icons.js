// @ts-check
import { html } from "../ui.js";

/** @type {Readonly<Record<string, string>>} */
const PATHS = {
  plus: "M8 3v10M3 8h10",
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  stop: "M4.5 4.5h7v7h-7z",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  close: "M4 4l8 8M12 4l-8 8",
  edit: "M10.5 3 13 5.5 5.5 13H3v-2.5zM9 4.5 11.5 7",
  trash: "M3 4.5h10M6 4.5V3h4v1.5M4.5 4.5l.5 8.5h6l.5-8.5M6.8 7v4M9.2 7v4",
  copy: "M5.5 5.5h7v7h-7zM3.5 10.5v-7h7",
  again: "M12.6 6.2A5 5 0 1 0 13 8.6M13 3v3.3H9.7",
  fork: "M4.5 3v4.5a2 2 0 0 0 2 2h5M9 7l2.5 2.5L9 12M4.5 7.5V13",
  settings: "M2.5 5h6M11.5 5h2M2.5 11h2M7.5 11h6M10 3.5v3M6 9.5v3",
  down: "M8 3v10M3.5 8.5 8 13l4.5-4.5",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6zM8 1.5v1.2M8 13.3v1.2M1.5 8h1.2M13.3 8h1.2M3.4 3.4l.9.9M11.7 11.7l.9.9M3.4 12.6l.9-.9M11.7 4.3l.9-.9",
  moon: "M12.8 9.6A5.3 5.3 0 0 1 6.4 3.2a5.3 5.3 0 1 0 6.4 6.4z",
  system: "M2.5 3.5h11v7h-11zM6 13h4M8 10.5V13",
  chart: "M2.5 13.5h11M4.5 11V8M8 11V4M11.5 11V6.5",
  cube: "M8 2.5 13 5v6l-5 2.5L3 11V5zM3 5l5 2.5L13 5M8 7.5v6",
  chat: "M3 3.5h10v7H7.5L4.5 13v-2.5H3z",
  leave: "M6.5 3h-3v10h3M7 8h6M10.5 5.5 13 8l-2.5 2.5",
  tool: "M10.2 2.8a3.2 3.2 0 0 0-3.9 4.3L2.8 10.6l2.6 2.6 3.5-3.5a3.2 3.2 0 0 0 4.3-3.9L11.3 7.7 9 7l-.7-2.3z",
  clip: "M12.5 7.5 7.6 12.4a3 3 0 0 1-4.2-4.2l5.3-5.3a2 2 0 0 1 2.8 2.8L6.4 10.8a1 1 0 0 1-1.4-1.4l4.6-4.6",
  camera: "M2.5 5h2.8l1-1.5h3.4l1 1.5h2.8v7.5h-11zM8 6.5a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4z",
  file: "M4 2.5h5l3 3v8H4zM9 2.5v3h3",
  microphone: "M6 3.5a2 2 0 0 1 4 0v4a2 2 0 0 1-4 0zM3.5 7.5a4.5 4.5 0 0 0 9 0M8 12v2",
  slash: "M2.5 2.5h11v11h-11zM9.8 5l-3.6 6",
  unfold: "M4.5 6.5 8 10l3.5-3.5",
  check: "M3.5 8.5 6.5 11.5 12.5 4.5",
};

/**
 * A decorative icon beside or in place of text.
 *
 * @param {{name: string}} props
 */
export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`;
}
