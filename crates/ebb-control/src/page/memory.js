// The memory of the daemon, in the words of docs/glossary.md.

import { get } from "./api.js";
import { h } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { Facts } from "./list.js";
import { PlotSet, RANGES, rangeButtons } from "./plots.js";
import { MEMORY } from "./specs.js";

let range = RANGES[0];

export class MemoryView {
  constructor() {
    this.title = "Memory";
    this.buttons = h("div", { class: "bar" });
    this.plots = new PlotSet(MEMORY);
    this.plots.element.classList.add("one");
    this.bar = h("div", { class: "share", role: "img" });
    this.all = new Facts("I/O memory");
    this.cache = new Facts("Cache");
    this.pressure = new Facts("Memory pressure");
    this.choose(range);
    this.element = h("div", {}, this.buttons,
      h("p", { class: "faint" }, "Lent memory costs nothing: the kernel takes it when it needs it, without waiting. Wired memory it may not take."),
      this.bar, this.plots.element, h("div", { class: "panels" }, this.all.element, this.cache.element, this.pressure.element));
  }

  choose(wanted) {
    range = wanted;
    this.drawn = 0;
    this.buttons.replaceChildren(h("h2", {}, "Memory"), rangeButtons(range, (one) => { this.choose(one); this.refresh(); }));
  }

  async refresh() {
    const now = performance.now();
    const [daemon, view] = await Promise.all([get("/v1/daemon"),
      now - this.drawn >= range.every - 300 ? get(`/v1/history?range=${range.name}`) : null]);
    if (view) {
      this.drawn = now;
      this.plots.update(view, view.series.pressure);
    }
    const { memory, cache, pressure } = daemon;
    if (memory) this.share(memory);
    this.all.update(memory ? [
      ["Wired", bytes(memory.wired_bytes), "In use, or free and kept warm"],
      ["Lent", bytes(memory.lent_bytes), "Lent to the kernel with MADV_FREE, which may have discarded any of it"],
      ["Ceiling", bytes(memory.ceiling_bytes), "The most that may be wired"],
      ["Whole process", bytes(daemon.resident_bytes), "VmRSS: includes lent memory"],
      ["Requests that wait for memory", count(memory.waiting), "waiting", memory.waiting > 0 ? "bad" : ""],
    ] : []);
    this.cache.update(cache ? [
      ["Cached", bytes(cache.bufspace_bytes), "bufspace: data in memory, wired and lent"],
      ["Of it wired", bytes(cache.bufwiredspace_bytes), "bufwiredspace"],
      ["Of it lent", bytes(Math.max(0, cache.bufspace_bytes - cache.bufwiredspace_bytes)), "bufspace without bufwiredspace"],
      ["Dirty", bytes(cache.dirty_bytes), "Acknowledged data that the stores do not have yet"],
      ["May grow to", cache.max_bytes ? bytes(cache.max_bytes) : "no limit", "max_bytes, at present"],
      ["State", cache.state, "growing; pausing after a sign of memory pressure; off in the last resort"],
      ["Hits since the start", percent(cache.hit_bytes / (cache.hit_bytes + cache.miss_bytes)), "hit_bytes and miss_bytes"],
      ["Discarded by the kernel", bytes(cache.reclaimed_bytes + cache.rewire_lost_bytes), "reclaimed and rewire_lost"],
      ["Returned by proactive reclaim", bytes(cache.proactively_reclaimed_bytes), "Before the kernel had to look for memory"],
    ] : []);
    this.pressure.update(pressure ? [
      ["Level", `L${pressure.level} (${pressure.name})`, "0 calm, 1 squeeze, 2 drain, 3 last resort", pressure.level > 1 ? "bad" : ""],
      ["Last cause", pressure.cause], ["Monitored", pressure.listening.join("\n") || "nothing", null, "long"],
      ["Not monitored", pressure.missing.join("\n") || null, null, "long"], ["Notes", pressure.notes.join("\n") || null, null, "long"],
    ] : []);
  }

  share(memory) {
    const parts = [["wired", memory.wired_bytes], ["lent", memory.lent_bytes]];
    const whole = Math.max(memory.ceiling_bytes, memory.wired_bytes + memory.lent_bytes, 1);
    this.bar.setAttribute("aria-label", parts.map(([name, size]) => `${bytes(size)} ${name}`).join(", "));
    this.bar.replaceChildren(...parts.map(([name, size]) => {
      const part = h("span", { class: name, title: `${bytes(size)} ${name}` });
      part.style.width = `${100 * size / whole}%`;
      return part;
    }));
  }

  destroy() {
    this.plots.destroy();
  }
}
