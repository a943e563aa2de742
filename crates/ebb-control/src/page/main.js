// The page: chooses the view by the address, and refreshes it once a second while it is visible.

import { Failure, forgetAbsent, identify, mayOperate, optional, session } from "./api.js";
import { findOperations, message } from "./dialogs.js";
import { h, setClass, setText } from "./dom.js";
import { headline } from "./health.js";
import { login, who } from "./login.js";
import { MemoryView } from "./memory.js";
import { Overview } from "./overview.js";
import { ParametersView } from "./parameters.js";
import { VolumeView } from "./volume.js";

const EVERY = 1000; // ms
const HEADLINE = 5; // refreshes

const place = document.getElementById("view"), state = document.getElementById("state");
let view = null, ticks = 0, timer = null, running = false, again = false, parameters = false;

function choose() {
  const [, kind, name] = /^#\/([a-z]*)\/?(.*)$/.exec(location.hash) ?? [null, "", ""];
  if (kind === "volume" && name) {
    try {
      return new VolumeView(decodeURIComponent(name));
    } catch (error) {
      // An address that was typed and is not percent-encoded.
      if (!(error instanceof URIError)) throw error;
      return new VolumeView(name);
    }
  }
  if (kind === "memory") return new MemoryView();
  return kind === "parameters" && parameters ? new ParametersView() : new Overview();
}

function navigation() {
  const links = [["#/", "Overview"], ["#/memory", "Memory"], ...(parameters ? [["#/parameters", "Parameters"]] : [])];
  const here = location.hash || "#/";
  document.getElementById("nav").replaceChildren(...links.map(([target, text]) =>
    h("a", { href: target, "aria-current": target === here ? "page" : null }, text)));
  document.getElementById("who").replaceChildren(...who(restart));
}

function open() {
  view?.destroy();
  view = choose();
  document.title = view.title === "Overview" ? "ebbd" : `${view.title} · ebbd`;
  place.replaceChildren(view.element);
  navigation();
  now();
}

async function refresh() {
  const shown = view;
  try {
    if (session.role === "none") {
      setText(state, "log in to see this daemon");
      return;
    }
    await shown.refresh();
    if (ticks % HEADLINE === 0) {
      setText(state, await headline());
      if (mayOperate()) await findOperations();
    }
    ticks += 1;
    setClass(state, "");
    performance.mark("ebbd-updated");
  } catch (error) {
    if (shown !== view) return;
    setClass(state, "unreachable");
    const lost = error instanceof Failure ? message(error) : `no reply from the daemon: ${message(error)}`;
    setText(state, lost);
    ticks = 0;
    // The token was removed from the daemon, or has expired.
    if (error instanceof Failure && error.status === 401) {
      await identify().catch(() => {});
      navigation();
      if (session.role === "none") login(restart);
    }
  }
}

// Refreshes now, and then once a second while the page is visible; never twice at a time.
async function now() {
  if (running) { again = true; return; }
  clearTimeout(timer);
  running = true;
  do {
    again = false;
    await refresh();
  } while (again);
  running = false;
  if (!document.hidden) timer = setTimeout(now, EVERY);
}

async function restart() {
  forgetAbsent();
  ticks = 0;
  parameters = session.role === "none" ? false : (await optional("/v1/parameters")) !== null;
  open();
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) now(); });
addEventListener("hashchange", () => { open(); place.focus({ preventScroll: true }); scrollTo(0, 0); });

async function start() {
  try {
    await identify();
    await restart();
    if (session.role === "none") login(restart);
  } catch (error) {
    setClass(state, "unreachable");
    setText(state, `no reply from the daemon: ${message(error)}`);
    setTimeout(start, 2 * EVERY);
  }
}

start();
