// The overview: health, plots of all volumes together, and the list of volumes.

import { get, mayOperate } from "./api.js";
import { addVolume } from "./actions.js";
import { h } from "./dom.js";
import { count, duration, latency, NONE } from "./format.js";
import { Health } from "./health.js";
import { List } from "./list.js";
import { PlotSet, RANGES, rangeButtons } from "./plots.js";
import { DAEMON } from "./specs.js";
import { VolumeTable } from "./table.js";

let range = RANGES[0];

const look = { up: "good", idle: "good", silent: "doubtful" };
const half = (cluster, operation) => {
  const times = cluster.times[operation];
  return times ? `${latency(times.p50_seconds)} (99 %: ${latency(times.p99_seconds)})` : NONE;
};

const clusterColumns = [
  ["Cluster", (c) => `client.${c.user} at ${c.conf}`],
  ["State", (c) => h("span", { class: `pill ${look[c.state] ?? "bad"}` }, c.silent_seconds > 0 ? `${c.state} ${duration(c.silent_seconds)}` : c.state)],
  ["Images", (c) => (c.offline > 0 ? `${count(c.images)}, ${count(c.offline)} offline` : count(c.images))],
  ["In flight", (c) => (c.slow > 0 ? `${count(c.in_flight)}, ${count(c.slow)} slow` : count(c.in_flight))],
  ["Reads, half within", (c) => half(c, "read")], ["Writes, half within", (c) => half(c, "write")],
  ["Slow so far", (c) => count(c.slow_requests)], ["Errors", (c) => count(c.errors)], ["Last error", (c) => c.last_error ?? NONE],
];

export class Overview {
  constructor() {
    this.title = "Overview";
    this.health = new Health();
    this.plots = new PlotSet(DAEMON);
    this.clusters = new List("Ceph clusters", clusterColumns);
    this.table = new VolumeTable();
    this.buttons = h("div", { class: "bar" });
    this.choose(range);
    const add = mayOperate() ? h("button", { type: "button", class: "primary", on: { click: addVolume } }, "Add a volume") : null;
    if (add) this.table.element.querySelector(".bar").append(add);
    this.element = h("div", {}, this.health.element, this.buttons, this.plots.element, this.table.element,
      this.clusters.element);
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
    const [view, summary, , clusters] = await Promise.all([
      history ? get(`/v1/history?range=${range.name}`) : null, get("/v1/summary"),
      this.ticks % 5 === 0 ? this.health.refresh() : null,
      this.ticks % 5 === 0 ? get("/v1/clusters") : null,
    ]);
    this.ticks += 1;
    if (view) {
      this.drawn = now;
      this.plots.update(view, view.series.pressure);
    }
    this.table.update(summary.volumes);
    if (clusters) this.clusters.update(clusters);
  }

  destroy() {
    this.plots.destroy();
    this.table.destroy();
  }
}
