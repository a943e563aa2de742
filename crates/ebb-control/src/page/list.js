// Short lists: a table on a screen, cards on a phone.

import { h, setText } from "./dom.js";

// `columns`: [title, row => text or element]. The list hides itself while it is empty.
export class List {
  constructor(title, columns) {
    this.columns = columns;
    this.body = h("tbody", {});
    this.element = h("section", { class: "list", hidden: true }, h("h2", {}, title),
      h("table", {}, h("thead", {}, h("tr", {}, columns.map(([head]) => h("th", { scope: "col" }, head)))), this.body));
    this.shown = "";
  }

  update(rows) {
    this.element.hidden = !rows || rows.length === 0;
    const cells = (rows ?? []).map((row) => this.columns.map(([, read]) => read(row)));
    const texts = JSON.stringify(cells.map((row) => row.map((cell) => (cell instanceof Node ? cell.textContent : cell))));
    // Buttons keep their focus if nothing has changed.
    if (texts === this.shown) return;
    this.shown = texts;
    const old = [...this.body.children];
    cells.forEach((row, at) => {
      const known = old[at];
      if (known) {
        row.forEach((cell, place) => {
          const target = known.children[place];
          if (cell instanceof Node) { if (target.textContent !== cell.textContent) target.replaceChildren(cell); } else setText(target, cell);
        });
      } else {
        this.body.append(h("tr", {}, row.map((cell, place) => h("td", { "data-label": this.columns[place][0] }, cell))));
      }
    });
    old.slice(cells.length).forEach((row) => row.remove());
  }
}

// Pairs of a name and a value.
export class Facts {
  constructor(title) {
    this.list = h("dl", { class: "facts" });
    this.element = h("section", { class: "panel" }, h("h2", {}, title), this.list);
    this.values = new Map();
  }

  // `rows`: [name, text, help?, class?]; rows without a text are left out.
  update(rows) {
    const wanted = rows.filter(([, text]) => text !== null && text !== undefined);
    const names = wanted.map(([name]) => name).join();
    if (names !== this.names) {
      this.names = names;
      this.values.clear();
      this.list.replaceChildren(...wanted.flatMap(([name, , help]) => {
        const value = h("dd", {});
        this.values.set(name, value);
        return [h("dt", { title: help ?? null, class: help ? "help" : null }, name), value];
      }));
    }
    wanted.forEach(([name, text, , look]) => {
      const value = this.values.get(name);
      setText(value, text);
      value.className = look ?? "";
    });
    this.element.hidden = wanted.length === 0;
  }
}
