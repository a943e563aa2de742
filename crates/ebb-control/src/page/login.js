// Login with a token, and who is logged in.

import { identify, session, setToken, token } from "./api.js";
import { ask } from "./dialogs.js";
import { h } from "./dom.js";

export function login(changed) {
  ask({
    title: "Log in", text: "A token is shown by the administrator of this daemon. It is kept in this tab until it is closed.",
    fields: [{ name: "token", label: "Token", type: "password", required: true }], button: "Log in",
    act: async ({ token: value }) => {
      setToken(value);
      if (!(await identify())) throw new Error("the daemon does not know this token");
      changed();
    },
  });
}

// The corner of the page that says who is logged in; empty if the daemon has no logins.
export function who(changed) {
  if (!session.known) return [];
  // Without a login a viewer has no name.
  const words = { operate: "may operate", view: session.identity ? "may view" : "read only", none: "not logged in" };
  const text = h("span", { class: "faint" }, [session.identity, words[session.role] ?? session.role].filter(Boolean).join(", "));
  const act = token()
    ? h("button", { type: "button", on: { click: async () => { setToken(null); await identify(); changed(); } } }, "Log out")
    : h("button", { type: "button", on: { click: () => login(changed) } }, "Log in");
  return [text, act];
}
