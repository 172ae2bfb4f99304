// The service's API: requests with this tab's token, and event streams that go on where they broke off.

const KEY = "nightshift-token";

export class Refused extends Error {
  constructor(status, problem) {
    super(problem.detail || `the service answered ${status}`);
    this.status = status;
    this.fields = problem.errors || [];
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY) || "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

function headers(more = {}) {
  return token.get() ? { Authorization: `Bearer ${token.get()}`, ...more } : more;
}

async function answered(response) {
  if (response.ok) return response;
  let problem = {};
  try {
    problem = await response.json();
  } catch { /* no JSON */ }
  throw new Refused(response.status, problem);
}

export async function get(path, query = {}, signal = undefined) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== "" && value !== null && value !== undefined) {
      for (const item of [value].flat()) parameters.append(name, item);
    }
  }
  const text = parameters.toString();
  return answered(await fetch(text ? `${path}?${text}` : path, { headers: headers(), signal }));
}

export const getJson = async (...values) => (await get(...values)).json();
export const getText = async (...values) => (await get(...values)).text();

export async function send(method, path, body = undefined) {
  const options = { method, headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }) };
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await answered(await fetch(path, options));
  return response.status === 204 ? null : response.json();
}

// Sends a text as it is; the answer is JSON.
export async function sendText(method, path, text, kind, signal = undefined) {
  return (await answered(await fetch(path, { method, headers: headers({ "Content-Type": kind }), body: text, signal }))).json();
}

// Calls `take` with each event; ends with the job, or with the signal. Returns the id of the last event.
export async function stream(path, { after = "0", kinds = [], follow = true, signal, take }) {
  let last = after;
  for (let failures = 0; !signal?.aborted && failures < 8; failures += 1) {
    try {
      const query = { kind: kinds.length ? [...kinds, "end"] : [], follow, after: last };
      const response = await get(path, query, signal);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
        rest = blocks.pop();
        for (const block of blocks) {
          const fields = Object.fromEntries(
            block.split("\n").filter((line) => line && !line.startsWith(":")).map((line) => {
              const at = line.indexOf(":");
              return [line.slice(0, at), line.slice(at + 1).trimStart()];
            }),
          );
          if (fields.id) last = fields.id;
          failures = 0;
          if (fields.event === "end") return last;
          if (fields.data) take(JSON.parse(fields.data), fields.event);
        }
      }
    } catch (error) {
      if (signal?.aborted || error instanceof Refused) throw error;
    }
    await new Promise((done) => { setTimeout(done, Math.min(10000, 500 * 2 ** failures)); });
  }
  return last;
}
