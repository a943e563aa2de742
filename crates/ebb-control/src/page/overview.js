// The overview: health, plots of all volumes together, and the list of volumes.

import { get, mayOperate } from "./api.js";
import { addVolume } from "./actions.js";
import { h } from "./dom.js";
import { Health } from "./health.js";
import { PlotSet, RANGES, rangeButtons } from "./plots.js";
import { DAEMON } from "./specs.js";
import { VolumeTable } from "./table.js";

let range = RANGES[0];

export class Overview {
  constructor() {
    this.title = "Overview";
    this.health = new Health();
    this.plots = new PlotSet(DAEMON);
    this.table = new VolumeTable();
    this.buttons = h("div", { class: "bar" });
    this.choose(range);
    const add = mayOperate() ? h("button", { type: "button", class: "primary", on: { click: addVolume } }, "Add a volume") : null;
    if (add) this.table.element.querySelector(".bar").append(add);
    this.element = h("div", {}, this.health.element, this.buttons, this.plots.element, this.table.element);
    this.ticks = 0;
  }

  choose(wanted) {
    range = wanted;
    this.drawn = 0;
    this.buttons.replaceChildren(h("h2", {}, "All volumes"), rangeButtons(range, (one) => { this.choose(one); this.refresh(); }));
  }

  async refresh() {
    const now = performance.now();
    const history = now - this.drawn >= range.every - 300;
    const [view, summary] = await Promise.all([
      history ? get(`/v1/history?range=${range.name}`) : null, get("/v1/summary"),
      this.ticks % 5 === 0 ? this.health.refresh() : null,
    ]);
    this.ticks += 1;
    if (view) {
      this.drawn = now;
      this.plots.update(view, view.series.pressure);
    }
    this.table.update(summary.volumes);
  }

  destroy() {
    this.plots.destroy();
    this.table.destroy();
  }
}
