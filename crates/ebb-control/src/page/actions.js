// What may be done with volumes and clients by those who may operate. Each is confirmed first.

import { call, name as encoded } from "./api.js";
import { ask, follow } from "./dialogs.js";

const path = (volume, rest = "") => `/v1/volumes/${encoded(volume)}${rest}`;

// A size in bytes from text such as 20G; throws a message.
function size(text) {
  const match = /^([0-9]+(?:\.[0-9]+)?)\s*([KMGTP]?)(?:i?B)?$/i.exec(text);
  if (!match) throw new Error(`"${text}" is no size: use a number with K, M, G or T, such as 20G`);
  return Math.round(Number(match[1]) * 1024 ** " KMGTP".indexOf(match[2].toUpperCase() || " "));
}

export function addVolume() {
  ask({
    title: "Add a volume", button: "Add",
    fields: [
      { name: "name", label: "Name", required: true },
      { name: "store", label: "Store", required: true, help: "file:/path, nbd://host/export, memory:1G" },
      { name: "size", label: "Size of a new file", help: "such as 20G; empty if the file exists" },
      { name: "cache", label: "Cache", help: "off, writethrough or writeback; empty for the default" },
      { name: "persist", label: "Keep it after a restart", type: "checkbox", checked: true },
    ],
    act: async ({ name, store, size: wanted, cache, persist }) => {
      const body = { name, store, persist };
      if (wanted) Object.assign(body, { size: wanted, create: true });
      if (cache) body.cache = cache;
      follow(await call("POST", "/v1/volumes", body));
    },
  });
}

export function flush(volume) {
  ask({
    title: `Flush ${volume}`, text: "Writes all dirty data to the store and makes it stable.", button: "Flush",
    act: async () => follow(await call("POST", path(volume, "/flush"), {})),
  });
}

export function resize(volume, present) {
  ask({
    title: `Resize ${volume}`, text: `It has ${present} now.`, button: "Resize",
    fields: [
      { name: "size", label: "New size", help: "such as 20G; empty to adopt the size of its file or device" },
      { name: "shrink", label: "Allow a smaller size: data beyond it is lost", type: "checkbox" },
    ],
    act: async ({ size: wanted, shrink }) => {
      const body = { shrink };
      if (wanted) body.size = size(wanted);
      follow(await call("POST", path(volume, "/resize"), body));
    },
  });
}

export function snapshot(volume) {
  ask({
    title: `Make a snapshot of ${volume}`, button: "Make",
    text: `It holds what was acknowledged before, and is served as the read-only volume ${volume}@NAME.`,
    fields: [
      { name: "name", label: "Name", required: true, help: "letters, digits, and . _ -" },
      { name: "persist", label: "Keep it after a restart", type: "checkbox", checked: true },
    ],
    act: async ({ name, persist }) => follow(await call("POST", path(volume, "/snapshot"), { name, persist })),
  });
}

export function flatten(volume) {
  ask({
    title: `Flatten ${volume}`, button: "Flatten",
    text: "Copies what is below into its own store, which may take long. Then it needs no base: set base = \"none\" for it.",
    act: async () => follow(await call("POST", path(volume, "/flatten"), {})),
  });
}

export function rename(volume) {
  ask({
    title: `Rename ${volume}`, text: "Clients find it under the new name when they connect again.", button: "Rename",
    fields: [{ name: "name", label: "New name", value: volume, required: true }],
    act: async ({ name }) => {
      follow(await call("POST", path(volume, "/rename"), { name }));
      location.hash = `#/volume/${encoded(name)}`;
    },
  });
}

export function remove(volume) {
  ask({
    title: `Remove ${volume}`, danger: true, confirm: volume, button: "Remove",
    text: "Its clients are disconnected after their requests have completed and its data is stable. The file stays.",
    act: async () => {
      follow(await call("DELETE", path(volume)));
      location.hash = "#/";
    },
  });
}

export function limit(volume, now = {}) {
  const value = (number) => (number ? String(number) : "");
  ask({
    title: `Limit ${volume}`, text: "Requests beyond a limit wait. Empty: no limit of its own.", button: "Set",
    fields: [
      { name: "limit_iops", label: "Requests per second", value: value(now.iops) },
      { name: "limit_bandwidth", label: "Bytes per second", value: value(now.bandwidth), help: "such as 200M" },
    ],
    act: async (values) => {
      for (const [parameter, text] of Object.entries(values)) {
        const target = path(volume, `/parameters/${parameter}`);
        await (text ? call("PUT", target, { value: text }) : call("DELETE", target));
      }
    },
  });
}

export function disconnect(client) {
  ask({
    title: `Disconnect ${client.address}`, danger: true, button: "Disconnect",
    text: `${client.id} uses ${client.volume}. ${client.export === "vhost-user"
      ? "Its requests in flight complete first. QEMU connects again if its chardev has the option reconnect."
      : "It may connect again at once."}`,
    act: async () => { await call("DELETE", `/v1/clients/${encoded(client.id)}`); },
  });
}

export function setParameter(parameter, volume) {
  const target = `${volume ? path(volume, "/parameters") : "/v1/parameters"}/${encoded(parameter.name)}`;
  ask({
    title: `Set ${parameter.name}`, text: `${parameter.range}. ${parameter.effect}`, button: "Set",
    fields: [{ name: "value", label: parameter.unit ? `Value (${parameter.unit})` : "Value", value: parameter.text, required: true }],
    act: async ({ value }) => { await call("PUT", target, { value }); },
  });
}

export async function unsetParameter(parameter, volume) {
  const target = `${volume ? path(volume, "/parameters") : "/v1/parameters"}/${encoded(parameter.name)}`;
  ask({
    title: `Reset ${parameter.name}`, text: "The value of the configuration applies again.", button: "Reset",
    act: async () => { await call("DELETE", target); },
  });
}
