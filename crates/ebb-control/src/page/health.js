// The health banner: the state, the reasons with their remedies, and the last events.

import { get, optional } from "./api.js";
import { h, setClass, setText } from "./dom.js";
import { count, duration, plural, time } from "./format.js";

const EVENTS = 8;
const WORDS = { ok: "All is well", degraded: "Degraded", failing: "Failing" };

function reason(one) {
  const where = one.volume ? h("a", { href: `#/volume/${encodeURIComponent(one.volume)}` }, one.volume) : null;
  const since = one.since_seconds === undefined ? null : h("span", { class: "faint" }, ` for ${duration(one.since_seconds)}`);
  return h("li", { class: one.state === "failing" ? "bad" : "doubtful" },
    h("div", {}, where, where ? ": " : null, one.message, since),
    one.remedy ? h("div", { class: "remedy" }, one.remedy) : null);
}

export class Health {
  constructor() {
    this.title = h("strong", {}, "");
    this.served = h("span", { class: "faint" }, "");
    this.list = h("ul", { class: "reasons" });
    this.events = h("ol", { class: "events", "aria-label": "Last events" });
    this.details = h("details", {}, h("summary", {}, "Last events"), this.events);
    this.details.hidden = true;
    this.banner = h("div", { role: "status" }, h("div", { class: "line" }, this.title, this.served), this.list);
    this.element = h("section", { class: "banner", "aria-label": "Health", hidden: true }, this.banner, this.details);
    this.known = [];
    this.since = 0;
  }

  async refresh() {
    const [health] = await Promise.all([optional("/v1/health"), this.refreshEvents()]);
    this.element.hidden = health === null && this.known.length === 0;
    this.banner.hidden = health === null;
    if (!health) return;
    setClass(this.element, `banner ${health.state}`);
    setText(this.title, WORDS[health.state] ?? health.state);
    setText(this.served, `${count(health.serving)} of ${plural(health.volumes, "volume")} served`);
    const shown = health.reasons.slice(0, 10);
    const more = health.reasons.length - shown.length + (health.more ?? 0);
    this.list.replaceChildren(...shown.map(reason), ...(more > 0 ? [h("li", { class: "faint" }, `and ${count(more)} more`)] : []));
    // What is wrong is explained by what happened.
    if (health.state !== "ok" && this.state === "ok") this.details.open = true;
    this.state = health.state;
  }

  async refreshEvents() {
    const path = "/v1/events";
    const fresh = await optional(this.since > 0 ? `${path}?since=${this.since}` : path, path);
    if (!Array.isArray(fresh)) return;
    for (const event of fresh) {
      if (event.id > this.since) { this.known.push(event); this.since = event.id; }
    }
    this.known = this.known.slice(-EVENTS);
    this.details.hidden = this.known.length === 0;
    if (fresh.length > 0) {
      this.events.replaceChildren(...this.known.slice().reverse().map((event) => {
        const fields = Object.entries(event.fields ?? {}).map(([key, value]) => `${key}=${value}`).join(" ");
        return h("li", { class: { error: "bad", warn: "doubtful" }[event.level] ?? null },
          h("time", { datetime: new Date(event.time * 1000).toISOString() }, time(event.time)),
          h("span", { class: "level" }, event.level), h("span", {}, `${event.message} `, h("small", {}, fields)));
      }));
    }
  }
}

// The line at the top of the page.
export async function headline() {
  const [daemon, version] = [await optional("/v1/daemon"), await optional("/v1/version")];
  if (!daemon) return version ? `${version.version}` : (await get("/v1/version")).version;
  const { pressure } = daemon;
  const level = pressure && pressure.level > 0 ? ` · memory pressure L${pressure.level} (${pressure.name})` : "";
  return `${daemon.version} · up ${duration(daemon.uptime_seconds)} · ${plural(daemon.clients, "client")}${level}`;
}
