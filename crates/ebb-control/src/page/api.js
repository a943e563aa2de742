// Requests to the daemon. A token is kept in this tab only, until it is closed.

const TOKEN = "ebbd-token";
const REPLY_TIMEOUT_MS = 10000;

export const session = { role: "view", identity: null, known: false };

export class Failure extends Error {
  constructor(status, body) {
    super(body?.message ?? `the daemon replied with status ${status}`);
    this.status = status;
    this.remedy = body?.remedy ?? "";
  }
}

export const token = () => sessionStorage.getItem(TOKEN);

export function setToken(value) {
  if (value) sessionStorage.setItem(TOKEN, value);
  else sessionStorage.removeItem(TOKEN);
}

// The JSON of a reply; throws a `Failure`, or the browser's error if there was no reply.
export async function call(method, path, body) {
  const headers = {};
  if (token()) headers.Authorization = `Bearer ${token()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, {
    method, headers, cache: "no-store", signal: AbortSignal.timeout(REPLY_TIMEOUT_MS),
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  const text = await reply.text();
  let value = null;
  try {
    value = text === "" ? null : JSON.parse(text);
  } catch {
    value = null;
  }
  if (!reply.ok) throw new Failure(reply.status, value);
  return value;
}

export const get = (path) => call("GET", path);

// Paths that this daemon or this role does not have: they are not asked for again, as the browser reports each 404.
const absent = new Set();

export const forgetAbsent = () => absent.clear();

// As `get`, but `null` if there is no such path, or it needs a login. `part` names what is absent then.
export async function optional(path, part = path) {
  if (absent.has(part)) return null;
  try {
    return await get(path);
  } catch (error) {
    if (!(error instanceof Failure) || ![401, 403, 404, 405, 501].includes(error.status)) throw error;
    absent.add(part);
    return null;
  }
}

export const name = encodeURIComponent;

// Asks the daemon for the caller's role; daemons without logins allow to view. A token that the daemon rejects is
// dropped, so that the page can ask for another one. Returns false then.
export async function identify() {
  forgetAbsent();
  let who = null, accepted = true;
  try {
    who = await get("/v1/whoami");
  } catch (error) {
    if (!(error instanceof Failure) || ![401, 403, 404, 405, 501].includes(error.status)) throw error;
    if (error.status === 401 && token()) {
      setToken(null);
      accepted = false;
      who = await optional("/v1/whoami");
    }
  }
  Object.assign(session, { role: "view", identity: null }, who ?? {}, { known: who !== null });
  return accepted;
}

export const mayOperate = () => session.role === "operate";
