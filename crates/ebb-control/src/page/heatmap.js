// The latency heat map of a volume: time across, latency upwards, the number of requests as colour.

import { h, setText } from "./dom.js";
import { count, latency, time } from "./format.js";
import { palette } from "./plots.js";

const LEFT = 66, BOTTOM = 22, HEIGHT = 210;

export class Heatmap {
  constructor() {
    this.canvas = h("canvas", { role: "img", "aria-label": "Latency heat map: how many requests took how long",
      on: { pointermove: (event) => this.point(event), pointerleave: () => setText(this.note, this.hint) } });
    this.hint = "Point at a cell for its numbers.";
    this.note = h("p", { class: "faint" }, this.hint);
    this.element = h("figure", { class: "heat" }, h("figcaption", {}, "Latency of reads and writes"), this.canvas, this.note);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.element);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.scheme.addEventListener("change", this.redraw);
  }

  update(view) {
    this.view = view;
    this.element.hidden = view.columns.length === 0;
    this.draw();
  }

  // The rows to show: those with requests, and some around them.
  rows() {
    const used = this.view.columns.flatMap((column) => (column ?? []).map(([row]) => row));
    const all = this.view.bounds.length - 1;
    if (used.length === 0) return [10, Math.min(all, 26)];
    const low = used.reduce((a, b) => Math.min(a, b)), high = used.reduce((a, b) => Math.max(a, b));
    return [Math.max(0, Math.min(low - 2, 10)), Math.min(all, Math.max(high + 3, 22))];
  }

  draw() {
    const { view, canvas } = this;
    if (!view || view.columns.length === 0) return;
    const scale = devicePixelRatio || 1;
    const width = Math.max(200, this.element.clientWidth - 26);
    canvas.width = width * scale;
    canvas.height = HEIGHT * scale;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${HEIGHT}px`;
    const colour = palette();
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, width, HEIGHT);
    const [low, high] = this.rows();
    const plotHeight = HEIGHT - BOTTOM - 4;
    const cellHeight = plotHeight / (high - low);
    const cellWidth = (width - LEFT - 4) / view.columns.length;
    this.grid = { low, high, cellHeight, cellWidth };
    const y = (row) => 4 + plotHeight - (row - low) * cellHeight;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.strokeStyle = colour("--line");
    context.fillStyle = colour("--faint");
    context.textAlign = "right";
    let free = Infinity;
    for (const decade of [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10]) {
      const row = 2 * Math.log2(decade / view.bounds[0]);
      if (row < low || row > high) continue;
      const at = y(row);
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width, at);
      context.stroke();
      if (free - at > 14) { context.fillText(latency(decade), LEFT - 6, at); free = at; }
    }
    context.textAlign = "center";
    for (let part = 0; part <= 4; part += 1) {
      const at = LEFT + part * (width - LEFT - 4) / 4;
      const seconds = view.end - (1 - part / 4) * view.columns.length * view.step_seconds;
      context.textAlign = part === 0 ? "left" : part === 4 ? "right" : "center";
      if (width > 500 || part % 2 === 0) context.fillText(time(seconds).slice(0, view.step_seconds > 1 ? 5 : 8), at, HEIGHT - 9);
    }
    const most = view.columns.reduce((sum, column) => (column ?? []).reduce((a, [, n]) => Math.max(a, n), sum), 1);
    context.fillStyle = colour("--a");
    view.columns.forEach((column, at) => (column ?? []).forEach(([row, n]) => {
      context.globalAlpha = 0.18 + 0.82 * Math.log(1 + n) / Math.log(1 + most);
      context.fillRect(LEFT + at * cellWidth, y(row + 1), Math.max(cellWidth, 1) + 0.3, cellHeight);
    }));
    context.globalAlpha = 1;
  }

  point(event) {
    if (!this.grid) return;
    const box = this.canvas.getBoundingClientRect();
    const { view, grid } = this;
    const at = Math.floor((event.clientX - box.left - LEFT) / grid.cellWidth);
    const row = grid.low + Math.floor((HEIGHT - BOTTOM - (event.clientY - box.top)) / grid.cellHeight);
    const column = view.columns[at];
    if (!column || row < grid.low || row >= grid.high) return setText(this.note, this.hint);
    const n = column.find(([one]) => one === row)?.[1] ?? 0;
    const seconds = view.end - (view.columns.length - 1 - at) * view.step_seconds;
    return setText(this.note, `${time(seconds)}: about ${count(n)} requests took ` +
      `${latency(view.bounds[row])} to ${latency(view.bounds[row + 1])}`);
  }

  destroy() {
    this.observer.disconnect();
    this.scheme.removeEventListener("change", this.redraw);
  }
}
