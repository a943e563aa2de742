// The plots of the daemon and of a volume.

import { bytes, count, latency, percent, rate } from "./format.js";

const IOPS = { title: "IOPS", text: count, lines: [
  { name: "read", series: "read_iops", colour: "--a", fill: true }, { name: "write", series: "write_iops", colour: "--c" }] };
const THROUGHPUT = { title: "Throughput", text: rate, binary: true, least: 1024, lines: [
  { name: "read", series: "read_bytes", colour: "--a", fill: true }, { name: "write", series: "write_bytes", colour: "--c" }] };
const LATENCY = { title: "Latency", text: latency, log: true, help: "Reads and writes, from the daemon's receipt to the reply",
  lines: [{ name: "p50", series: "p50_seconds", colour: "--d" }, { name: "p99", series: "p99_seconds", colour: "--c" }] };
const DIRTY = { title: "Dirty data", text: bytes, binary: true, least: 4096, help: "Acknowledged data that the stores do not have yet",
  lines: [{ name: "dirty", series: "dirty_bytes", colour: "--c", fill: true }] };

export const DAEMON = [IOPS, THROUGHPUT, LATENCY, DIRTY];

export const VOLUME = [IOPS, THROUGHPUT, LATENCY, DIRTY,
  { title: "Cache hits", text: percent, top: 1, lines: [{ name: "of the data read", series: "hit_ratio", colour: "--d" }] },
  { title: "Cached", text: bytes, binary: true, least: 4096, help: "bufspace: memory that holds data of this volume",
    lines: [{ name: "cached", series: "cached_bytes", colour: "--a", fill: true }] }];

export const THROTTLED = { title: "Throttled", text: percent, top: 1, help: "The part of the time in which a limit delayed requests",
  lines: [{ name: "of the time", series: "throttled", colour: "--c", fill: true }] };

export const MEMORY = [{ title: "I/O memory", text: bytes, binary: true, least: 4096, lines: [
  { name: "wired", series: "wired_bytes", colour: "--a", fill: true },
  { name: "lent", series: "lent_bytes", colour: "--d" },
  { name: "cached", series: "cached_bytes", colour: "--c" }] }];
