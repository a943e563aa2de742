// Makes elements. Text is inserted as text nodes only, never as markup.

// An element with properties: `class`, `on` (listeners by event), `data-…` and other attributes; `null` and `false` omit one.
export function h(tag, properties = {}, ...children) {
  const [name, space] = tag.split(":").reverse();
  const made = space ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (value === true) made.setAttribute(key, "");
    else made.setAttribute(key, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// Sets a text only if it has changed: the browser then lays out nothing.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setClass(element, name) {
  if (element.className !== name) element.className = name;
}
