// Plots of the history, drawn by uPlot, with one cursor for all plots of a view.

import { h, setText } from "./dom.js";
import { NONE } from "./format.js";

const HEIGHT = 150;

// Steps of axes of bytes.
const POWERS = Array.from({ length: 55 }, (_, power) => 2 ** power);

// Steps of the axis of time.
const SECONDS = [1, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

// The powers of ten of a range.
function tens(low, high) {
  const marks = [];
  for (let power = Math.round(Math.log10(low)); power <= Math.round(Math.log10(high)); power += 1) marks.push(10 ** power);
  return marks;
}

// The powers of ten around a range, at least two apart.
function decades(least, most) {
  const low = Math.floor(Math.log10(Math.max(least, 1e-7)));
  return [10 ** low, 10 ** Math.max(Math.ceil(Math.log10(Math.max(most, 1e-6))), low + 2)];
}

// The colours of the present scheme.
export function palette() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(name).trim();
}

export const RANGES = [
  { name: "5m", text: "5 min", every: 1000 },
  { name: "1h", text: "1 h", every: 6000 },
  { name: "24h", text: "24 h", every: 60000 },
];

// Buttons that choose the range; `changed` is called with it.
export function rangeButtons(current, changed) {
  const buttons = RANGES.map((range) => h("button", {
    type: "button", "aria-pressed": String(range.name === current.name), class: "range",
    on: { click: () => changed(range) },
  }, range.text));
  return h("div", { class: "ranges", role: "group", "aria-label": "Range of the plots" }, buttons);
}

// The times of a history.
function times(view) {
  const points = Object.values(view.series)[0]?.length ?? 0;
  return Array.from({ length: points }, (_, at) => view.end - (points - 1 - at) * view.step_seconds);
}

function shade(pressure, colour) {
  return (plot) => {
    const levels = pressure();
    const xs = plot.data[0];
    if (!levels || xs.length < 2) return;
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const wide = Math.max(width / (xs.length - 1), 1);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    levels.forEach((level, at) => {
      if (!level) return;
      ctx.fillStyle = colour(`--l${Math.min(3, Math.round(level))}`);
      ctx.fillRect(plot.valToPos(xs[at], "x", true) - wide, top, wide, height);
    });
    ctx.restore();
  };
}

// The samples without a neighbour on either side: no line leads to them, so they are drawn as points.
function isolated(plot, series) {
  const values = plot.data[series];
  return values.flatMap((value, at) => ((value ?? null) !== null && (values[at - 1] ?? null) === null && (values[at + 1] ?? null) === null ? [at] : []));
}

// A plot: { title, help?, text(value), log?, binary?, lines: [{ name, series, colour, fill? }] }.
export class Plot {
  constructor(spec, pressure) {
    this.spec = spec;
    this.pressure = pressure;
    this.values = spec.lines.map(() => h("b", {}, NONE));
    const keys = spec.lines.map((line, at) => {
      const box = h("i");
      box.style.background = `var(${line.colour})`;
      return h("span", {}, box, `${line.name} `, this.values[at]);
    });
    this.box = h("div", { class: "plot" });
    this.element = h("figure", { title: spec.help ?? null },
      h("figcaption", {}, spec.title), h("div", { class: "legend" }, keys), this.box);
    this.data = [[], ...spec.lines.map(() => [])];
  }

  make() {
    this.plot?.destroy();
    const colour = palette();
    const { spec } = this;
    const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const options = {
      width: Math.max(this.box.clientWidth, 200), height: HEIGHT, legend: { show: false },
      cursor: { sync: { key: "ebbd" }, drag: { x: false, y: false }, points: { size: 5 } },
      scales: {
        x: { time: true },
        y: spec.log ? { distr: 3, log: 10, range: (_, least, most) => decades(least ?? 1e-5, most ?? 1e-2) }
          : { range: (_, __, most) => [0, spec.top ?? Math.max(most ?? 0, spec.least ?? 1) * 1.08] },
      },
      axes: [
        { ...axis, size: 24, space: 70,
          incrs: SECONDS,
          values: [[3600, "{HH}:{mm}", null, null, null, null, null, null, 1],
            [60, "{HH}:{mm}", null, null, null, null, null, null, 1],
            [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]] },
        { ...axis, size: 66, space: 34, incrs: spec.binary ? POWERS : undefined,
          splits: spec.log ? (_, __, low, high) => tens(low, high) : undefined,
          filter: spec.log ? (_, marks) => marks : undefined,
          values: (_, marks) => marks.map(spec.text) },
      ],
      series: [{}, ...spec.lines.map((line) => ({
        label: line.name, stroke: colour(line.colour), width: 1.6, spanGaps: false,
        fill: line.fill ? `${colour(line.colour)}30` : undefined, points: { show: true, size: 3, filter: isolated },
      }))],
      hooks: { drawClear: [shade(this.pressure, colour)], setCursor: [(plot) => this.tell(plot.cursor.idx)] },
    };
    this.plot = new uPlot(options, this.data, this.box);
    this.plot.root.setAttribute("role", "img");
    this.plot.root.setAttribute("aria-label", `${spec.title} over time`);
  }

  // Shows the values at the cursor, or the last ones.
  tell(at) {
    this.spec.lines.forEach((_, line) => {
      const values = this.data[line + 1];
      setText(this.values[line], this.spec.text(values[at ?? values.length - 1]));
    });
  }

  update(view) {
    const xs = times(view);
    this.data = [xs, ...this.spec.lines.map((line) => view.series[line.series] ?? xs.map(() => null))];
    if (this.plot) this.plot.setData(this.data);
    else this.make();
    this.tell(this.plot.cursor.idx);
  }

  resize() {
    if (this.plot) this.plot.setSize({ width: Math.max(this.box.clientWidth, 200), height: HEIGHT });
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }
}

// Plots with one range and one cursor.
export class PlotSet {
  constructor(specs) {
    this.levels = null;
    this.plots = specs.map((spec) => new Plot(spec, () => this.levels));
    this.element = h("div", { class: "plots" }, this.plots.map((plot) => plot.element));
    this.observer = new ResizeObserver(() => this.plots.forEach((plot) => plot.resize()));
    this.observer.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => this.plots.forEach((plot) => plot.plot && plot.make());
    this.scheme.addEventListener("change", this.recolour);
  }

  update(view, levels) {
    this.levels = levels;
    this.plots.forEach((plot) => plot.update(view));
  }

  destroy() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.recolour);
    this.plots.forEach((plot) => plot.destroy());
  }
}
