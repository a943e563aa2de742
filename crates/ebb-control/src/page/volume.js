// A volume: its plots, latency heat map, clients, store, limits, and what may be done with it.

import * as actions from "./actions.js";
import { get, mayOperate, name as encoded, optional } from "./api.js";
import { h, setClass, setText } from "./dom.js";
import { bytes, count, duration, NONE, percent, plural, rate } from "./format.js";
import { Heatmap } from "./heatmap.js";
import { Facts, List } from "./list.js";
import { PlotSet, RANGES, rangeButtons } from "./plots.js";
import { parameterColumns } from "./parameters.js";
import { THROTTLED, VOLUME } from "./specs.js";
import { look } from "./table.js";

let range = RANGES[0];

const errors = (stat) => Object.values(stat.operations).reduce((sum, one) => sum + one.errors, 0);
const isDown = (remote) => remote.connections === 0 && (remote.last_error != null || remote.in_flight > 0);
const isOverlay = (stat) => stat.layers > 1;
const layer = ({ snapshot, store, cache_bytes: cached }) =>
  `${snapshot === undefined ? "" : `snapshot ${snapshot}, `}${store} (${bytes(cached)} cached)`;
const yes = (value) => (value ? "yes" : "no");

export class VolumeView {
  constructor(name) {
    this.name = name;
    this.title = name;
    this.path = `/v1/volumes/${encoded(name)}`;
    this.state = h("span", { class: "pill" }, "");
    this.trouble = h("p", { class: "error", role: "status" });
    this.buttons = h("div", { class: "ranges-place" });
    this.plots = new PlotSet(VOLUME);
    this.throttled = new PlotSet([THROTTLED]);
    this.throttled.element.hidden = true;
    this.heat = new Heatmap();
    this.store = new Facts("Store");
    this.cache = new Facts("Cache");
    this.layers = new Facts("Layers");
    this.remote = new Facts("Remote store");
    this.limits = new Facts("Limits");
    this.clients = new List("Clients", [
      ["Client", (c) => c.id], ["Address", (c) => c.address], ["Identity", (c) => c.identity ?? "–"],
      ["Connected", (c) => duration(c.connected_seconds)], ["In flight", (c) => count(c.in_flight)],
      ["Read", (c) => bytes(c.read_bytes)], ["Written", (c) => bytes(c.written_bytes)],
      ...(mayOperate() ? [["", (c) => h("button", { type: "button", "aria-label": `Disconnect ${c.id}`,
        on: { click: () => actions.disconnect(c) } }, "Disconnect")]] : []),
    ]);
    this.parameters = new List("Parameters of this volume", parameterColumns(name));
    this.choose(range);
    this.element = h("div", {},
      h("div", { class: "bar" }, h("h2", { class: "name" }, name), this.state, this.buttons, this.actions()),
      this.trouble, this.plots.element, this.throttled.element, this.heat.element,
      h("div", { class: "panels" }, this.store.element, this.cache.element, this.layers.element, this.remote.element,
        this.limits.element),
      this.clients.element, this.parameters.element);
    this.ticks = 0;
  }

  actions() {
    if (!mayOperate()) return null;
    const one = (text, act, danger) => h("button", { type: "button", class: danger ? "danger" : null, on: { click: act } }, text);
    this.ofOverlays = [one("Snapshot", () => actions.snapshot(this.name)), one("Flatten", () => actions.flatten(this.name))];
    this.ofOverlays.forEach((button) => { button.hidden = true; });
    return h("div", { class: "actions", role: "group", "aria-label": "Actions" },
      one("Flush", () => actions.flush(this.name)), one("Resize", () => actions.resize(this.name, bytes(this.stat?.size_bytes))),
      one("Limit", () => actions.limit(this.name, this.stat?.limits ?? {})), one("Rename", () => actions.rename(this.name)),
      ...this.ofOverlays, one("Remove", () => actions.remove(this.name), true));
  }

  choose(wanted) {
    range = wanted;
    this.drawn = 0;
    this.buttons.replaceChildren(rangeButtons(range, (one) => { this.choose(one); this.refresh(); }));
  }

  async refresh() {
    const now = performance.now();
    const history = now - this.drawn >= range.every - 300;
    const slow = this.ticks % 5 === 0;
    this.ticks += 1;
    const [view, daemon, heat, stat, clients, parameters, settings] = await Promise.all([
      history ? get(`/v1/history?range=${range.name}&volume=${encoded(this.name)}`) : null,
      history ? get(`/v1/history?range=${range.name}`) : null,
      history ? get(`${this.path}/heatmap?range=${range.name}`) : null,
      get(`${this.path}/stat`), optional("/v1/clients"),
      slow ? optional(`${this.path}/parameters`, "volume parameters") : null,
      slow ? optional(this.path, "volume settings") : null,
    ]);
    if (view) {
      this.drawn = now;
      this.plots.update(view, daemon.series.pressure);
      this.throttled.element.hidden = !view.series.throttled?.some((part) => part > 0);
      if (!this.throttled.element.hidden) this.throttled.update(view, daemon.series.pressure);
      this.heat.update(heat);
    }
    if (settings) this.base = settings.base;
    this.show(stat);
    this.clients.update((clients ?? []).filter((client) => client.volume === this.name));
    if (parameters) this.parameters.update(parameters);
  }

  show(stat) {
    this.stat = stat;
    const open = !["failed", "opening"].includes(stat.state);
    setText(this.state, stat.state);
    setClass(this.state, `pill ${look(stat.state)}`);
    const { failure } = stat;
    const tries = failure?.next_seconds === undefined ? "a reload reads it again" : `tried ${plural(failure.attempts, "time")}`;
    setText(this.trouble, failure ? `${failure.reason} (${tries})` : stat.loss ? `${stat.loss.error}: ${stat.loss.remedy}` : "");
    this.store.update([
      ["Size", open ? bytes(stat.size_bytes) : NONE], ["Read-only", open ? yes(stat.read_only) : NONE],
      ["Direct I/O", open ? yes(stat.direct) : NONE, "Whether its file is opened with O_DIRECT"], ["Clients", count(stat.clients)],
      ["Failed requests", count(errors(stat)), null, errors(stat) > 0 ? "bad" : ""],
    ]);
    const { cache, remote, limits } = stat;
    this.cache.update(cache ? [
      ["Mode", cache.mode], ["Cached", bytes(cache.bufspace_bytes), "bufspace"],
      ["Dirty", bytes(cache.dirty_bytes), "Acknowledged data that the store does not have yet"],
      ["Hits since the start", percent(cache.hit_bytes / (cache.hit_bytes + cache.miss_bytes)), "hit_bytes and miss_bytes"],
      ["Taken back by the kernel", bytes(cache.reclaimed_bytes + cache.rewire_lost_bytes), "reclaimed and rewire_lost"],
    ] : []);
    const shared = stat.shared_hit_bytes + stat.shared_miss_bytes;
    this.layers.update(isOverlay(stat) ? [
      ["Base", this.base ?? null, "The volume below it, by the configuration"],
      ["Layers", count(stat.layers), "Its own one included"],
      ["Own", `${bytes(cache?.bufspace_bytes ?? 0)} cached`, "What its own store holds"],
      ["In its delta", stat.own_bytes === undefined ? NONE : bytes(stat.own_bytes), "own_bytes: what its delta holds on its store"],
      ["Shared", `${bytes(stat.shared_cache_bytes)} cached`, "What layers below hold, which other volumes may use, too"],
      ["Found shared", shared > 0 ? percent(stat.shared_hit_bytes / shared) : NONE, "shared_hit_bytes and shared_miss_bytes"],
      ...stat.below.map((one, at) => [`Below ${at + 1}`, layer(one)]),
    ] : []);
    this.ofOverlays?.forEach((button) => { button.hidden = !isOverlay(stat) || stat.read_only; });
    this.remote.update(remote ? [
      ["Server", remote.address], ["Connections", count(remote.connections), null, isDown(remote) ? "bad" : ""],
      ["For", duration(remote.since_seconds), "Since the number of connections last changed"],
      ["In flight", count(remote.in_flight)], ["Reconnects", count(remote.reconnects)],
      ["Silent", remote.silent_seconds > 0 ? duration(remote.silent_seconds) : null, "It is connected and does not reply", "bad"],
      ["Last error", remote.last_error],
    ] : []);
    this.limits.update(limits ? [
      ["Group", limits.group ?? null], ["IOPS", limits.iops ? count(limits.iops) : "no limit"],
      ["Bandwidth", limits.bandwidth ? rate(limits.bandwidth) : "no limit"],
      ["Read", limits.read_iops || limits.read_bandwidth ? `${count(limits.read_iops)} IOPS, ${rate(limits.read_bandwidth)}` : null],
      ["Write", limits.write_iops || limits.write_bandwidth ? `${count(limits.write_iops)} IOPS, ${rate(limits.write_bandwidth)}` : null],
      ["Delayed requests", count(limits.throttled_requests)], ["Time throttled", duration(limits.throttled_seconds)],
    ] : []);
  }

  destroy() {
    this.plots.destroy();
    this.throttled.destroy();
    this.heat.destroy();
  }
}
