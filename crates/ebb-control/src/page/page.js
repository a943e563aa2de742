"use strict";
// Draws the data of /v1/stat once a second. Text is inserted as text nodes only, never as markup.

const KEPT = 300; // samples
const EVERY = 1000; // ms
const samples = []; // oldest first: { time, stat }

const number = (value, digits) => value.toLocaleString("en", { maximumFractionDigits: digits });

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${number(value, value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

const rate = (value) => `${bytes(value)}/s`;
const percent = (value) => (Number.isFinite(value) ? `${number(value * 100, 1)} %` : "–");

function duration(seconds) {
  const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24;
  const minutes = Math.floor(seconds / 60) % 60;
  if (days > 0) return `${days} d ${hours} h`;
  return hours > 0 ? `${hours} h ${minutes} min` : `${minutes} min ${Math.floor(seconds % 60)} s`;
}

// The growth of `read(stat)` up to sample `at`, per second. After a restart of the daemon counters begin at 0.
function speed(at, read) {
  if (at < 1) return 0;
  const [before, now] = [samples[at - 1], samples[at]];
  const grown = read(now.stat) - read(before.stat);
  return grown < 0 ? 0 : grown / ((now.time - before.time) / 1000);
}

const operation = (volume, name, figure) => volume.operations[name]?.[figure] ?? 0;
const total = (stat, name) => stat.volumes.reduce((sum, v) => sum + operation(v, name, "bytes"), 0);

function hitRatio(at, read) {
  const [hits, misses] = [(s) => read(s)?.hit_bytes ?? 0, (s) => read(s)?.miss_bytes ?? 0]
    .map((figure) => speed(at, figure));
  return hits / (hits + misses);
}

// A line is { name, colour, read(at), area?, hidden? }; stacked areas come from the bottom up.
const PLOTS = [
  { id: "memory", text: bytes, lines: [
    { name: "wired", colour: "--a", area: true, read: (at) => samples[at].stat.memory?.wired_bytes ?? 0 },
    { name: "lent to the kernel", colour: "--b", area: true, read: (at) => samples[at].stat.memory?.unwired_bytes ?? 0 },
    { name: "resident, whole process", colour: "--c", read: (at) => samples[at].stat.resident_bytes },
  ] },
  { id: "cache", text: bytes, lines: [
    { name: "bufwiredspace", colour: "--a", read: (at) => samples[at].stat.cache?.bufwiredspace_bytes ?? 0 },
    { name: "bufspace", colour: "--d", read: (at) => samples[at].stat.cache?.bufspace_bytes ?? 0 },
    { name: "dirty", colour: "--c", read: (at) => samples[at].stat.cache?.dirty_bytes ?? 0 },
  ] },
  { id: "traffic", text: rate, lines: [
    { name: "read", colour: "--a", read: (at) => speed(at, (s) => total(s, "read")) },
    { name: "written", colour: "--c", read: (at) => speed(at, (s) => total(s, "write")) },
  ] },
  { id: "hits", text: percent, top: 1, lines: [
    { name: "of bytes", colour: "--d", read: (at) => hitRatio(at, (s) => s.cache) },
  ] },
];

const WIDTH = 420, HEIGHT = 150, LEFT = 4, BOTTOM = 16;
const SVG = "http://www.w3.org/2000/svg";

function shape(kind, attributes, parent) {
  const made = document.createElementNS(SVG, kind);
  const { style, ...others } = attributes;
  for (const [name, value] of Object.entries(others)) made.setAttribute(name, value);
  // Not as an attribute: the page's Content-Security-Policy forbids inline styles in markup.
  if (style) made.style.cssText = style;
  parent.append(made);
  return made;
}

// A round number at or above `value`.
function above(value) {
  const step = 2 ** Math.ceil(Math.log2(Math.max(value, 1)));
  return value <= step * 0.75 ? step * 0.75 : step;
}

const across = (at) => LEFT + (WIDTH - LEFT) * (1 - (samples.length - 1 - at) / (KEPT - 1));

function shadePressure(svg) {
  for (let at = 1; at < samples.length; at += 1) {
    const level = samples[at].stat.pressure?.level ?? 0;
    if (level > 0) {
      const x = across(at - 1);
      shape("rect", { x, y: 0, width: across(at) - x, height: HEIGHT - BOTTOM, style: `fill: var(--l${level})` }, svg);
    }
  }
}

function draw(plot) {
  const figure = document.getElementById(plot.id);
  const series = plot.lines.map((line) => samples.map((_, at) => line.read(at)));
  const base = samples.map(() => 0);
  const drawn = plot.lines.map((line, which) => {
    const from = line.area ? base.slice() : null;
    const to = series[which].map((value, at) => (line.area ? (base[at] += value) : value));
    return { line, from, to };
  });
  const top = plot.top ?? above(Math.max(...drawn.flatMap((d) => d.to).filter(Number.isFinite), 1));
  const y = (value) => (HEIGHT - BOTTOM) * (1 - value / top);

  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", figure.querySelector("figcaption").textContent);
  shadePressure(svg);
  for (const part of [0, 0.5, 1]) {
    shape("line", { x1: LEFT, x2: WIDTH, y1: y(top * part), y2: y(top * part), class: "grid" }, svg);
  }
  for (const { line, from, to } of drawn) {
    const points = to.map((value, at) => [at, value]).filter(([, value]) => Number.isFinite(value));
    if (points.length < 2) continue;
    const path = (list) => list.map(([at, value]) => `${across(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    if (line.area) {
      const back = from.map((value, at) => [at, value]).reverse();
      shape("polygon", { points: `${path(points)} ${path(back)}`, style: `fill: var(${line.colour})` }, svg);
    } else {
      shape("polyline", { points: path(points), style: `fill: none; stroke: var(${line.colour}); stroke-width: 1.8` }, svg);
    }
  }
  shape("text", { x: LEFT + 2, y: 11 }, svg).textContent = plot.text(top);

  const legend = document.createElement("div");
  legend.className = "legend";
  plot.lines.forEach((line, which) => {
    const box = document.createElement("i");
    box.style.background = `var(${line.colour})`;
    const entry = document.createElement("span");
    entry.append(box, `${line.name} ${plot.text(series[which].at(-1))}`);
    legend.append(entry);
  });
  figure.replaceChildren(figure.querySelector("figcaption"), legend, svg);
}

// A table of `rows`; a column is [heading, row => text or [text, is it bad]].
function table(id, rows, columns) {
  const element = document.getElementById(id);
  element.parentElement.hidden = rows.length === 0 && id !== "volumes";
  const row = (kind, cells) => {
    const made = document.createElement("tr");
    for (const content of cells) {
      const [text, bad] = Array.isArray(content) ? content : [content, false];
      const cell = document.createElement(kind);
      cell.textContent = text;
      if (bad) cell.className = "bad";
      made.append(cell);
    }
    return made;
  };
  const body = rows.map((content) => row("td", columns.map(([, read]) => read(content))));
  element.replaceChildren(row("th", columns.map(([heading]) => heading)), ...body);
}

function tables(stat) {
  const last = samples.length - 1;
  const volume = (all, name) => all.volumes.find((v) => v.name === name);
  const per = (v, name, figure) =>
    speed(last, (s) => operation(volume(s, v.name) ?? { operations: {} }, name, figure));
  const errors = (v) => Object.values(v.operations).reduce((sum, o) => sum + o.errors, 0);
  table("volumes", stat.volumes, [
    ["volume", (v) => v.name],
    ["size", (v) => bytes(v.size_bytes)],
    ["clients", (v) => number(v.clients)],
    ["reads/s", (v) => number(per(v, "read", "requests"), 0)],
    ["read", (v) => rate(per(v, "read", "bytes"))],
    ["writes/s", (v) => number(per(v, "write", "requests"), 0)],
    ["written", (v) => rate(per(v, "write", "bytes"))],
    ["cache", (v) => v.cache?.mode ?? "none"],
    ["bufspace", (v) => (v.cache ? bytes(v.cache.bufspace_bytes) : "–")],
    ["hit ratio", (v) => percent(hitRatio(last, (s) => volume(s, v.name)?.cache))],
    ["dirty", (v) => (v.cache ? bytes(v.cache.dirty_bytes) : "–")],
    ["errors", (v) => [number(errors(v)), errors(v) > 0]],
  ]);
  table("bdis", stat.bdis ?? [], [
    ["backing device", (b) => [b.stuck ? `${b.name}: stuck` : b.name, b.stuck]],
    ["dirty", (b) => bytes(b.dirty_bytes)],
    ["writeback", (b) => bytes(b.writeback_bytes)],
    ["threshold", (b) => bytes(b.threshold_bytes)],
    ["bandwidth", (b) => rate(b.bandwidth_bytes_per_second)],
    ["share", (b) => percent(b.share)],
    ["busy", (b) => percent(b.utilisation)],
    ["pauses", (b) => number(b.pauses)],
    ["longest", (b) => `${number(b.longest_pause_seconds * 1000, 0)} ms`],
    ["failures", (b) => [number(b.failures), b.failures > 0]],
  ]);
  table("xen", stat.xen ?? [], [
    ["disk", (x) => `${x.domain}/${x.device}`],
    ["volume", (x) => x.volume],
    ["state", (x) => x.state],
    ["rings", (x) => number(x.queues)],
    ["grants mapped", (x) => number(x.mapped_grants)],
    ["copies", (x) => number(x.copies)],
    ["errors", (x) => [number(x.errors), x.errors > 0]],
  ]);
}

function headline(stat) {
  const pressure = stat.pressure
    ? ` · pressure L${stat.pressure.level} (${stat.pressure.name})` : "";
  return `${stat.version} · up ${duration(stat.uptime_seconds)} · ${number(stat.clients)} clients · ` +
    `${stat.volumes.length} volumes${pressure}`;
}

async function look() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch("/v1/stat", { cache: "no-store", signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(`the daemon replied with status ${answer.status}`);
    const stat = await answer.json();
    samples.push({ time: performance.now(), stat });
    if (samples.length > KEPT) samples.shift();
    state.textContent = headline(stat);
    state.className = "";
    PLOTS.forEach(draw);
    tables(stat);
  } catch (error) {
    state.textContent = `no reply from the daemon: ${error.message}`;
    state.className = "unreachable";
  }
  setTimeout(look, EVERY);
}

look();
