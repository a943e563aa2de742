// Questions to the operator, and the progress of operations.

import { call, Failure, get, optional } from "./api.js";
import { h, setText } from "./dom.js";
import { bytes, count, duration } from "./format.js";

const LOOK = 1000; // ms between two looks at an operation

export function message(error) {
  if (error instanceof Failure) return error.remedy ? `${error.message}: ${error.remedy}` : error.message;
  return error.name === "TimeoutError" ? "the daemon did not reply in time" : error.message;
}

// Asks in a dialog. `fields`: [{ name, label, value?, type?, help?, required? }]; `act(values)` is awaited, and its error is
// shown in the dialog. `confirm`: a text that must be typed first.
export function ask({ title, text, fields = [], confirm, button, danger, act }) {
  const error = h("p", { class: "error", role: "alert" });
  const inputs = fields.map((field) => h("input", {
    name: field.name, type: field.type ?? "text", value: field.value ?? null, required: field.required,
    autocomplete: "off", spellcheck: "false", checked: field.checked, "aria-describedby": field.help ? `help-${field.name}` : null,
  }));
  const rows = fields.map((field, at) => h("label", { class: field.type === "checkbox" ? "check" : null },
    h("span", {}, field.label), inputs[at], field.help ? h("small", { id: `help-${field.name}` }, field.help) : null));
  const typed = confirm ? h("input", { autocomplete: "off", spellcheck: "false" }) : null;
  const send = h("button", { type: "submit", class: danger ? "danger" : "primary", disabled: Boolean(confirm) }, button);
  typed?.addEventListener("input", () => { send.disabled = typed.value !== confirm; });
  const cancel = h("button", { type: "button", on: { click: () => dialog.close() } }, "Cancel");
  const form = h("form", { method: "dialog", on: { submit: async (event) => {
    event.preventDefault();
    send.disabled = true;
    setText(error, "");
    try {
      const values = Object.fromEntries(inputs.map((input) =>
        [input.name, input.type === "checkbox" ? input.checked : input.value.trim()]));
      await act(values);
      dialog.close();
    } catch (failure) {
      setText(error, message(failure));
      send.disabled = false;
    }
  } } }, h("h2", { id: "dialog-title" }, title), text ? h("p", {}, text) : null, rows,
  typed ? h("label", {}, h("span", {}, `Type ${confirm} to confirm`), typed) : null, error,
  h("div", { class: "buttons" }, cancel, send));
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", on: { close: () => dialog.remove() } }, form);
  document.body.append(dialog);
  dialog.showModal();
}

const followed = new Map(); // by id: the element

function progress(operation) {
  const unit = operation.unit === "bytes" ? bytes : count;
  const part = operation.total > 0 ? `${unit(operation.done)} of ${unit(operation.total)}` : unit(operation.done);
  const eta = operation.eta_seconds === undefined ? "" : `, ${duration(operation.eta_seconds)} left`;
  return { running: `${operation.step}: ${part}${eta}`, done: "done", cancelled: "cancelled",
    failed: `failed: ${operation.failure?.message ?? "no reason given"}` }[operation.state] ?? operation.state;
}

function panel() {
  const element = document.getElementById("operations");
  element.hidden = followed.size === 0;
  return element;
}

// Shows an operation until some time after its end.
export function follow(operation) {
  if (!operation?.id || !operation.kind || followed.has(operation.id)) return;
  const text = h("span", {}), bar = h("progress", { "aria-label": `Progress of ${operation.kind}` });
  const cancel = h("button", { type: "button", on: { click: async () => {
    try { await call("DELETE", `/v1/operations/${operation.id}`); } catch (error) { setText(text, message(error)); }
  } } }, "Cancel");
  const close = h("button", { type: "button", "aria-label": "Close", on: { click: () => end() } }, "×");
  const element = h("div", { class: "operation" },
    h("b", {}, `${operation.kind} ${operation.volume ?? "all volumes"}`), text, bar, cancel, close);
  const end = () => { element.remove(); followed.delete(operation.id); panel(); };
  const show = (now) => {
    setText(text, progress(now));
    bar.hidden = now.state !== "running";
    if (now.total > 0) { bar.max = now.total; bar.value = Math.min(now.done, now.total); } else bar.removeAttribute("value");
    cancel.hidden = !(now.state === "running" && now.cancellable);
    element.classList.toggle("bad", now.state === "failed");
    return now.state === "running";
  };
  const look = async () => {
    if (!followed.has(operation.id)) return;
    try {
      const again = show(await get(`/v1/operations/${operation.id}`));
      if (again) setTimeout(look, LOOK);
      else setTimeout(end, 15000);
    } catch (error) {
      setText(text, message(error));
    }
  };
  followed.set(operation.id, element);
  panel().append(element);
  if (show(operation)) setTimeout(look, LOOK);
  else setTimeout(end, 15000);
}

// Follows the operations that others have started, too.
export async function findOperations() {
  const all = (await optional("/v1/operations")) ?? [];
  all.filter((operation) => operation.state === "running").forEach(follow);
}
