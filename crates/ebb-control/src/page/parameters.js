// The run-time parameters, which those who may operate can change.

import { setParameter, unsetParameter } from "./actions.js";
import { get, mayOperate } from "./api.js";
import { h } from "./dom.js";
import { List } from "./list.js";

// The columns of a list of parameters; `volume` if they are those of a volume.
export function parameterColumns(volume) {
  const buttons = (p) => h("span", { class: "buttons" },
    h("button", { type: "button", "aria-label": `Set ${p.name}`, on: { click: () => setParameter(p, volume) } }, "Set"),
    p.origin === "run-time"
      ? h("button", { type: "button", "aria-label": `Reset ${p.name}`, on: { click: () => unsetParameter(p, volume) } }, "Reset") : null);
  return [
    ["Parameter", (p) => h("code", { title: `${p.range}. ${p.effect}. Since ${p.since}.` }, p.name)],
    ["Value", (p) => p.text], ["Set by", (p) => p.origin], ["Range", (p) => p.range], ["Takes effect", (p) => p.effect],
    ...(mayOperate() ? [["", buttons]] : []),
  ];
}

export class ParametersView {
  constructor() {
    this.title = "Parameters";
    this.list = new List("Parameters", parameterColumns());
    this.element = h("div", { class: "parameters" }, this.list.element);
  }

  async refresh() {
    this.list.update(await get("/v1/parameters"));
  }

  destroy() {}
}
