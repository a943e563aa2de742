// Numbers as text.

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const precise = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const NONE = "–";

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

// A count or rate: 0.4, 12, 3,400, 1.2 M.
export function count(value) {
  if (!known(value)) return NONE;
  if (value >= 1e6) return `${precise.format(value / 1e6)} M`;
  return value < 10 && value > 0 ? precise.format(value) : number.format(value);
}

// A count with a noun: 1 client, 2 clients.
export const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${(value < 10 && unit > 0 ? precise : number).format(value)} ${units[unit]}`;
}

export const rate = (value) => (known(value) ? `${bytes(value)}/s` : NONE);

export const percent = (value) => (known(value) ? `${precise.format(value * 100)} %` : NONE);

// A latency.
export function latency(seconds) {
  if (!known(seconds)) return NONE;
  if (seconds === 0) return "0";
  if (seconds < 1e-3) return `${precise.format(seconds * 1e6)} µs`;
  return seconds < 1 ? `${precise.format(seconds * 1e3)} ms` : `${precise.format(seconds)} s`;
}

// A long time.
export function duration(seconds) {
  if (!known(seconds)) return NONE;
  const days = Math.floor(seconds / 86400), hours = Math.floor(seconds / 3600) % 24;
  const minutes = Math.floor(seconds / 60) % 60;
  if (days > 0) return `${days} d ${hours} h`;
  if (hours > 0) return `${hours} h ${minutes} min`;
  return minutes > 0 ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export const time = (seconds) => clock.format(new Date(seconds * 1000));
