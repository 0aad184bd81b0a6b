// @ts-check
/** A live chart: uPlot on a canvas, its legend and latest values as text. */

import uPlot from "../../vendor/uplot.js";
import { time } from "../i18n.js";
import { html, useEffect, useId, useRef, useState } from "../ui.js";

/**
 * @typedef {object} Line
 * @property {import("./history.js").Column} column
 * @property {string} label
 * @property {boolean} [stepped]  The value is constant until the next reading.
 */

/**
 * @typedef {object} ChartOptions
 * @property {string} title
 * @property {readonly Line[]} lines  Drawn in the colors `--chart-1`, `--chart-2`, …
 * @property {(value: number | null | undefined) => string} show
 * @property {number | null} [ceiling]  Minimum upper end of the axis.
 * @property {number[]} [steps]  Allowed grid spacings; any round number by default.
 */

const HEIGHT_PX = 132;
const AXIS_PX = 52;
/** Minimum range of the axis, so that the first readings are not isolated dots. */
const LEAST_S = 60;

/**
 * @param {object} props
 * @param {ChartOptions} props.options
 * @param {import("./history.js").History} props.history
 * @param {number} props.version  Changes with the history.
 * @param {number} props.windowS  Visible range in seconds.
 * @param {string} [props.group]  Charts of a group share the cursor.
 */
export function Chart({ options, history, version, windowS, group = "live" }) {
  const id = useId();
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  const plot = useRef(/** @type {uPlot | null} */ (null));
  const [pointed, setPointed] = useState(/** @type {number | null} */ (null));
  const view = useRef({ windowS, options });
  view.current = { windowS, options };

  useEffect(() => {
    const parent = /** @type {HTMLElement} */ (box.current);
    const made = draw(parent, view, setPointed, group);
    plot.current = made;
    const sized = new ResizeObserver(() => made.setSize({ width: parent.clientWidth, height: HEIGHT_PX }));
    sized.observe(parent);
    const unthemed = onTheme(() => made.redraw(false, true));
    return () => {
      sized.disconnect();
      unthemed();
      made.destroy();
    };
  }, []);

  useEffect(() => {
    const columns = options.lines.map((line) => history.columns[line.column]);
    plot.current?.setData([history.times, ...columns]);
  }, [history, version, windowS, options.ceiling]);

  const at = pointed !== null && pointed < history.times.length ? pointed : history.times.length - 1;
  return html`<figure class="chart" aria-labelledby=${id}>
    <figcaption>
      <span class="chart-title" id=${id}>${options.title}</span>
      <span class="chart-legend">
        ${options.lines.map(
          (line, index) => html`<span key=${line.column} class="chart-value">
            <i class="swatch swatch-${index + 1}" aria-hidden="true"></i>${options.lines.length > 1 && `${line.label} `}
            <b>${options.show(history.columns[line.column][at])}</b>
          </span>`,
        )}
      </span>
    </figcaption>
    <div class="chart-plot" ref=${box} aria-hidden="true"></div>
  </figure>`;
}

/**
 * @param {HTMLElement} parent
 * @param {{current: {windowS: number, options: ChartOptions}}} view
 * @param {(at: number | null) => void} point
 * @param {string} group
 * @returns {uPlot}
 */
function draw(parent, view, point, group) {
  const { lines, steps } = view.current.options;
  const faint = () => getComputedStyle(parent).borderTopColor;
  const text = () => getComputedStyle(parent).color;
  const axis = { stroke: text, font: `11px ${getComputedStyle(parent).fontFamily}` };
  const ticks = { stroke: faint, width: 1, size: 4 };
  return new uPlot(
    {
      width: parent.clientWidth || 300,
      height: HEIGHT_PX,
      padding: [8, 24, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: uPlot.sync(group).key }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
      scales: {
        x: { range: (plot) => shownTimes(plot, view.current.windowS) },
        y: { range: (_plot, _low, high) => shownValues(high, view.current.options.ceiling ?? 0) },
      },
      axes: [
        { ...axis, grid: { show: false }, ticks, size: 26, space: 64, values: (_plot, times) => clockTimes(times) },
        {
          ...axis, grid: { stroke: faint, width: 1 }, ticks: { show: false }, size: AXIS_PX, space: 28,
          values: (_plot, values) => values.map((value) => view.current.options.show(value)),
          ...(steps ? { incrs: () => view.current.options.steps ?? steps } : {}),
        },
      ],
      series: [{}, ...lines.map((line, index) => lineOf(parent, line, index))],
      hooks: { setCursor: [(plot) => point(plot.cursor.idx ?? null)] },
    },
    [[], ...lines.map(() => [])],
    parent,
  );
}

/**
 * @param {HTMLElement} parent
 * @param {Line} line
 * @param {number} index
 * @returns {uPlot.Series}
 */
function lineOf(parent, line, index) {
  const color = () => {
    const swatch = parent.parentElement?.querySelector(`.swatch-${index + 1}`);
    return swatch ? getComputedStyle(swatch).backgroundColor : "gray";
  };
  const stepped = line.stepped && uPlot.paths.stepped;
  return {
    label: line.label,
    stroke: color,
    width: 1.75,
    points: { show: false },
    ...(stepped ? { paths: stepped({ align: 1 }) } : {}),
  };
}

/**
 * @param {uPlot} plot
 * @param {number} windowS
 * @returns {[number, number]}
 */
function shownTimes(plot, windowS) {
  const times = plot.data[0];
  const latest = times.at(-1) ?? Date.now() / 1000;
  return [Math.max(latest - windowS, Math.min(times[0] ?? latest, latest - LEAST_S)), latest];
}

/**
 * @param {number | null} high
 * @param {number} ceiling
 * @returns {[number, number]}
 */
function shownValues(high, ceiling) {
  return [0, Math.max((high ?? 0) * 1.08, ceiling * 1.04, 1.04)];
}

/**
 * @param {number[]} times  Unix seconds.
 */
function clockTimes(times) {
  const second = times.some((each) => each % 60 !== 0) ? /** @type {const} */ ("2-digit") : undefined;
  return times.map((each) => time(each * 1000, { hour: "2-digit", minute: "2-digit", second, hour12: false }));
}

/**
 * Calls `listener` when colors may have changed (theme).
 *
 * @param {() => void} listener
 * @returns {() => void} Unsubscribes.
 */
function onTheme(listener) {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const themed = new MutationObserver(listener);
  themed.observe(document.documentElement, { attributes: true });
  dark.addEventListener("change", listener);
  return () => {
    themed.disconnect();
    dark.removeEventListener("change", listener);
  };
}
