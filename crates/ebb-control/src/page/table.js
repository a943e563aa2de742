// The list of volumes: thousands of rows, of which only those in sight have elements.

import { h, setClass, setText } from "./dom.js";
import { bytes, count, latency, NONE, percent, rate } from "./format.js";

const BEYOND = 6; // rows above and below those in sight
const WIDTH = 90, HEIGHT = 22, POINTS = 25; // of a sparkline

const REMOTE_ORDER = { down: 3, silent: 2, up: 1, idle: 1 };
const STATE_ORDER = { failed: 4, lost: 4, disconnected: 4, failing: 4, silent: 3, opening: 2, closing: 2, serving: 1 };

const COLUMNS = [
  { key: "name", title: "Volume", value: (v) => v.name },
  { key: "state", title: "State", value: (v) => STATE_ORDER[v.state] ?? 3, text: (v) => v.state },
  { key: "iops", title: "IOPS", value: (v) => v.iops ?? 0, text: (v) => count(v.iops ?? 0) },
  { key: "bytes", title: "Throughput", value: (v) => v.bytes ?? 0, text: (v) => rate(v.bytes ?? 0) },
  { key: "spark", title: "IOPS, 5 min", value: (v) => Math.max(0, ...(v.spark ?? [])) },
  { key: "p99", title: "p99", value: (v) => v.p99 ?? -1, text: (v) => latency(v.p99),
    help: "99 of 100 reads and writes of the last second took no longer" },
  { key: "hit", title: "Hit ratio", value: (v) => v.hit_ratio ?? -1, text: (v) => percent(v.hit_ratio),
    help: "The part of the data read in the last second that was in the cache" },
  { key: "dirty", title: "Dirty", value: (v) => v.dirty ?? 0, text: (v) => ((v.dirty ?? 0) > 0 ? bytes(v.dirty) : NONE),
    help: "Acknowledged data that the store does not have yet" },
  { key: "remote", title: "Remote", value: (v) => REMOTE_ORDER[v.remote] ?? 0, text: (v) => v.remote ?? NONE },
];

const collator = new Intl.Collator("en", { numeric: true });
// The class of a pill with the state of a volume, which the daemon computes from everything it knows.
export const look = (state) => (state === "serving" ? "good" : STATE_ORDER[state] === 4 ? "bad" : "doubtful");

function sparkline(line, values) {
  const most = Math.max(1e-9, ...(values ?? []));
  const step = WIDTH / (POINTS - 1);
  const points = (values ?? []).map((value, at) => {
    const x = WIDTH - (values.length - 1 - at) * step;
    return `${x.toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 4) * (value / most)).toFixed(1)}`;
  });
  const text = points.length > 1 ? points.join(" ") : `0,${HEIGHT - 2} ${WIDTH},${HEIGHT - 2}`;
  if (line.getAttribute("points") !== text) line.setAttribute("points", text);
}

class Row {
  constructor() {
    this.link = h("a", {});
    this.line = h("svg:polyline", {});
    this.texts = {};
    const cells = COLUMNS.map((column) => {
      const cell = h("div", { role: "cell", class: `c-${column.key}`, "data-label": column.title });
      if (column.key === "name") cell.append(this.link);
      else if (column.key === "spark") {
        cell.append(h("svg:svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, this.line));
      } else {
        this.texts[column.key] = h("span", {});
        cell.append(this.texts[column.key]);
      }
      return cell;
    });
    this.element = h("div", { role: "row", class: "row" }, cells);
  }

  show(volume, index) {
    setText(this.link, volume.name);
    const target = `#/volume/${encodeURIComponent(volume.name)}`;
    if (this.link.getAttribute("href") !== target) this.link.setAttribute("href", target);
    for (const column of COLUMNS) {
      if (column.text) setText(this.texts[column.key], column.text(volume));
    }
    setClass(this.texts.state, `pill ${look(volume.state)}`);
    setClass(this.texts.remote, volume.remote ? `pill ${{ up: "good", idle: "good", silent: "doubtful" }[volume.remote] ?? "bad"}` : "");
    sparkline(this.line, volume.spark);
    this.element.setAttribute("aria-rowindex", String(index + 2));
  }
}

export class VolumeTable {
  constructor() {
    this.volumes = [];
    this.shown = [];
    this.rows = [];
    this.sort = { key: "name", down: false };
    this.search = h("input", {
      type: "search", id: "search", placeholder: "Search volumes", "aria-label": "Search volumes", autocomplete: "off",
      spellcheck: "false", on: { input: () => { this.scroller.scrollTop = 0; this.arrange(); } },
    });
    this.count = h("span", { class: "faint", role: "status" });
    this.order = h("select", { class: "order", "aria-label": "Sort by", on: { change: () => this.sortBy(this.order.value) } },
      COLUMNS.map((column) => h("option", { value: column.key }, `Sort: ${column.title}`)));
    this.heads = COLUMNS.map((column) => h("div", { role: "columnheader", class: `c-${column.key}`, "aria-sort": "none" },
      h("button", { type: "button", title: column.help ?? null, on: { click: () => this.sortBy(column.key) } }, column.title)));
    this.space = h("div", { class: "space", role: "rowgroup" });
    this.scroller = h("div", { class: "scroller", tabindex: "0", role: "group", "aria-label": "Rows of volumes",
      on: { scroll: () => this.draw() } }, this.space);
    this.table = h("div", { class: "table", role: "table", "aria-label": "Volumes" },
      h("div", { role: "rowgroup" }, h("div", { class: "row head", role: "row", "aria-rowindex": "1" }, this.heads)), this.scroller);
    this.element = h("section", { class: "volumes" },
      h("div", { class: "bar" }, h("h2", {}, "Volumes"), this.count, this.search, this.order), this.table);
    this.observer = new ResizeObserver(() => { this.measure(); this.draw(); });
    this.observer.observe(this.scroller);
  }

  measure() {
    const style = getComputedStyle(this.table);
    this.height = parseFloat(style.getPropertyValue("--row")) || 36;
  }

  sortBy(key) {
    // Figures are wanted from the largest down.
    const down = this.sort.key === key ? !this.sort.down : key !== "name";
    this.sort = { key, down };
    this.order.value = key;
    this.arrange();
  }

  update(volumes) {
    this.volumes = volumes;
    this.arrange();
  }

  arrange() {
    const wanted = this.search.value.trim().toLowerCase();
    const list = wanted ? this.volumes.filter((v) => v.name.toLowerCase().includes(wanted)) : this.volumes.slice();
    const { key, down } = this.sort;
    const column = COLUMNS.find((one) => one.key === key);
    if (key === "name") {
      // The daemon sorts by name already, byte by byte; that is enough for thousands.
      if (list.length <= 1000) list.sort((a, b) => collator.compare(a.name, b.name));
      if (down) list.reverse();
    } else {
      const sign = down ? -1 : 1;
      const values = new Map(list.map((volume) => [volume, column.value(volume)]));
      list.sort((a, b) => sign * (values.get(a) - values.get(b)));
    }
    COLUMNS.forEach((one, at) => {
      const sorted = one.key === key ? (down ? "descending" : "ascending") : "none";
      if (this.heads[at].getAttribute("aria-sort") !== sorted) this.heads[at].setAttribute("aria-sort", sorted);
    });
    this.shown = list;
    const all = this.volumes.length;
    setText(this.count, list.length === all ? count(all) : `${count(list.length)} of ${count(all)}`);
    this.table.setAttribute("aria-rowcount", String(list.length + 1));
    this.draw();
  }

  draw() {
    if (!this.height) this.measure();
    const { scrollTop, clientHeight } = this.scroller;
    const total = `${this.shown.length * this.height}px`;
    if (this.space.style.height !== total) this.space.style.height = total;
    const first = Math.max(0, Math.floor(scrollTop / this.height) - BEYOND);
    const last = Math.min(this.shown.length, Math.ceil((scrollTop + (clientHeight || 600)) / this.height) + BEYOND);
    const wanted = Math.max(0, last - first);
    while (this.rows.length < wanted) {
      const row = new Row();
      this.rows.push(row);
      this.space.append(row.element);
    }
    while (this.rows.length > wanted) this.rows.pop().element.remove();
    this.rows.forEach((row, at) => {
      row.show(this.shown[first + at], first + at);
      const place = `translateY(${(first + at) * this.height}px)`;
      if (row.element.style.transform !== place) row.element.style.transform = place;
    });
  }

  destroy() {
    this.observer.disconnect();
  }
}
