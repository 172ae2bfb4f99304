// The page: what is shown for each address, and the keys.

import { Refused, getJson, getText, send, sendText, stream, token } from "/page/api.js";
import { age, chart, el, lanes, number, table } from "/page/draw.js";
import { fleetView, fleetsView } from "/page/fleets.js";
import { planView, reportView } from "/page/figures.js";

const main = document.getElementById("main");
const crumbs = document.getElementById("crumbs");
const notice = document.getElementById("notice");
const TABS = ["overview", "lanes", "rollouts", "settings", "events", "logs", "ledger", "checkpoints", "report", "plan"];
const CURVES = [
  ["reward", ["reward/mean"]], ["loss", ["loss/actor"]], ["KL", ["kl"]], ["response length", ["response_length/mean"]],
  ["staleness", ["staleness/max"]], ["tokens/s", ["response_tokens_per_second"]],
  ["busy share: trainer, rollout", ["busy/trainer", "busy/rollout"]], ["seconds a step", ["timing/step"]],
];
const TOLD = ["state", "job", "role", "warning", "checkpoint", "evaluation", "setting", "summary"];
let leaving = new AbortController();

function say(text, bad = false) {
  notice.textContent = text;
  notice.className = bad ? "error" : "";
  notice.hidden = !text;
}

function show(...children) {
  main.replaceChildren(...children.flat());
}

function state(job) {
  return el("span", { class: `state ${job.state}` }, job.pausing ? "pausing" : job.state);
}

// Jobs -----------------------------------------------------------------------------------------------------------------

async function jobs(signal) {
  const list = el("div", {});
  const filter = el("select", { id: "state", onchange: () => refresh() },
    ["", "queued", "starting", "running", "paused", "resuming", "cancelling", "succeeded", "failed", "cancelled"]
      .map((name) => el("option", { value: name }, name || "all states")));
  let cursor = null;
  async function refresh(more = false) {
    const page = await getJson("/v1/jobs", { state: filter.value, limit: 50, cursor: more ? cursor : null }, signal);
    cursor = page.next;
    const rows = page.jobs.map((job) => el("tr", {},
      el("td", {}, el("a", { href: `#/job/${job.id}` }, job.id)), el("td", {}, state(job)), el("td", {}, job.project),
      el("td", {}, el("progress", { max: job.steps || 1, value: job.step, "aria-label": "progress" }),
        ` ${job.step}/${job.steps || "?"}`),
      el("td", { class: "num" }, age(Date.now() / 1000 - job.submitted)), el("td", { class: "text error" }, job.error)));
    const next = cursor ? el("button", { type: "button", onclick: () => guard(() => refresh(true)) }, "Older") : null;
    list.replaceChildren(
      rows.length ? table(["job", "state", "project", "step", "age", "error"], rows)
        : el("p", { class: "hint" }, "No jobs. Submit one: nightshift submit JOB.yaml"), ...(next ? [next] : []));
    return more;
  }
  show(el("h1", {}, "Jobs"), el("form", { class: "row" }, el("label", { for: "state" }, "State", filter)), list);
  await refresh();
  every(3000, signal, () => cursor === null && refresh());
}

// One job --------------------------------------------------------------------------------------------------------------

async function job(id, tab, signal) {
  crumbs.replaceChildren(...TABS.map((name, at) => el("a", {
    href: `#/job/${id}/${name}`, title: `key ${(at + 1) % 10}`, ...(name === tab ? { "aria-current": "page" } : {}),
  }, name)));
  const head = el("div", { class: "bar" });
  const body = el("div", {});
  const base = `/v1/jobs/${id}`;
  async function refresh() {
    const found = await getJson(base, {}, signal);
    const button = (call, able) => el("button", {
      type: "button", disabled: !able, onclick: () => guard(async () => { await send("POST", `${base}/${call}`); await refresh(); }),
    }, call);
    const waits = ["queued", "resuming"].includes(found.state);
    const runs = ["starting", "running"].includes(found.state);
    head.replaceChildren(state(found), el("progress", { max: found.steps || 1, value: found.step, "aria-label": "progress" }),
      `step ${found.step}/${found.steps || "?"}`, button("pause", (waits || runs) && !found.pausing),
      button("resume", ["paused", "failed", "cancelled"].includes(found.state)),
      button("cancel", waits || runs || found.state === "paused"), el("span", { class: "error" }, found.error));
  }
  show(el("h1", {}, id), head, body);
  await refresh();
  every(2000, signal, refresh);
  await VIEWS[tab](base, body, signal);
}

const VIEWS = {
  async overview(base, body, signal) {
    const grid = el("div", { class: "charts" });
    body.replaceChildren(grid);
    const history = await getJson(`${base}/metrics-history`, { kind: "train", most: 1000 }, signal);
    const points = new Map(history.points.map((point) => [point.step, point.metrics]));
    const value = (metrics, name) => (name.startsWith("busy/")
      ? (metrics[name.replace("busy", "bubble")] ?? null) === null ? null : 1 - metrics[name.replace("busy", "bubble")]
      : metrics[name]);
    const draw = () => {
      const steps = [...points.keys()].sort((one, other) => one - other);
      grid.replaceChildren(...CURVES.map(([title, names]) => chart(title,
        names.map((name) => steps.map((step) => [step, value(points.get(step), name) ?? null])))));
    };
    draw();
    await stream(`${base}/events`, {
      kinds: ["step"], signal, after: await behind(base, 1 << 16, signal),
      take: (event) => { points.set(event.step, event.metrics); draw(); },
    });
  },

  async lanes(base, body, signal) {
    const spans = [];
    const place = el("div", {});
    const window = el("select", { id: "window", onchange: () => draw() },
      [["10", "10 s"], ["30", "30 s"], ["120", "2 min"], ["600", "10 min"]].map(([v, name]) => el("option", { value: v, selected: v === "30" }, name)));
    const draw = () => place.replaceChildren(lanes(spans.slice(-20000), Number(window.value)));
    body.replaceChildren(el("form", { class: "row" }, el("label", { for: "window" }, "Window", window)), place);
    let due = false;
    const later = () => {
      if (due) return;
      due = true;
      setTimeout(() => { due = false; draw(); }, 500);
    };
    draw();
    await stream(`${base}/events`, {
      kinds: ["span"], signal, after: await behind(base, 1 << 22, signal),
      take: (event) => {
        if (typeof event.start === "number" && typeof event.end === "number") spans.push(event);
        later();
      },
    });
  },

  async rollouts(base, body, signal) {
    const field = (name, label, kind = "number") => [name, el("label", {}, label, el("input", { type: kind, name, step: "any" }))];
    const fields = [field("step", "Step"), field("other", "Compare with step"), field("min_reward", "Reward from"), field("max_reward", "Reward to")];
    const sort = el("select", { name: "sort" }, ["-step", "-reward", "reward", "-response_tokens", "response_tokens"].map((v) => el("option", { value: v }, v)));
    const place = el("div", { class: "two" });
    let offset = 0;
    const form = el("form", { class: "row", onsubmit: (event) => { event.preventDefault(); offset = 0; guard(load); } },
      fields.map(([, label]) => label), el("label", {}, "Sort", sort), el("button", {}, "Show"));
    async function column(step) {
      const value = (name) => form.elements[name].value;
      const query = { step, min_reward: value("min_reward"), max_reward: value("max_reward"), sort: sort.value, offset, limit: 25 };
      const page = await getJson(`${base}/rollouts`, query, signal);
      const mean = page.rollouts.reduce((sum, row) => sum + (row.reward ?? 0), 0) / (page.rollouts.length || 1);
      const more = (by, name, able) => el("button", { type: "button", disabled: !able, onclick: () => { offset += by; guard(load); } }, name);
      return el("section", {},
        el("h2", {}, `${step ? `Step ${step}` : "All steps"}: ${page.total} samples, reward ${number(mean)} on this page`),
        page.rollouts.map((row) => el("details", {},
          el("summary", {}, `step ${row.step} · reward ${number(row.reward)} · ${row.response_tokens} tokens · ${row.finish_reason ?? ""} · ${(row.response ?? "").slice(0, 80)}`),
          el("h2", {}, "Prompt"), el("pre", {}, row.prompt ?? ""), el("h2", {}, "Response"), el("pre", {}, row.response ?? ""),
          el("p", { class: "hint" }, `${row.sample_id}; weights ${row.versions.map((v) => v.split("/").slice(-2).join("/")).join(", ")} from token ${row.version_starts.join(", ")}`,
            row.reward_error ? `; ${row.reward_error}` : "", row.trace_id ? " " : "",
            row.trace_id ? el("a", { href: `#/trace/${row.trace_id}` }, "trace") : null))),
        el("div", { class: "bar" }, more(-25, "Newer", offset > 0), more(25, "Older", offset + 25 < page.total)));
    }
    async function load() {
      const steps = [form.elements.step.value, form.elements.other.value];
      place.replaceChildren(...await Promise.all((steps[1] ? steps : steps.slice(0, 1)).map(column)));
    }
    body.replaceChildren(form, place);
    await load();
  },

  async settings(base, body, signal) {
    const place = el("div", {});
    body.replaceChildren(el("p", { class: "hint" }, "A change takes effect at the next step boundary."), place);
    async function load(found = null) {
      const { settings, pending } = found ?? await getJson(`${base}/settings`, {}, signal);
      place.replaceChildren(table(["setting", "value", "", "when, or why not"], settings.map((setting) => {
        const input = el("input", { "aria-label": setting.key, value: JSON.stringify(setting.value) });
        const save = () => guard(async () => {
          let value = input.value;
          try { value = JSON.parse(value); } catch { /* text */ }
          await load(await send("PATCH", `${base}/settings`, { [setting.key]: value }));
          say(`${setting.key} is asked for`);
        });
        const key = (event) => { if (event.key === "Enter") save(); };
        if (setting.live) input.addEventListener("keydown", key);
        return el("tr", {}, el("td", {}, setting.key),
          el("td", {}, setting.live ? input : JSON.stringify(setting.value)),
          el("td", {}, setting.live ? el("button", { type: "button", onclick: save }, "Set") : "fixed",
            setting.key in pending ? ` → ${JSON.stringify(pending[setting.key])}` : ""),
          el("td", { class: "dim" }, setting.why));
      })));
    }
    await load();
  },

  async events(base, body, signal) {
    const list = el("tbody", {});
    body.replaceChildren(el("div", { class: "scroll" }, el("table", {}, list)));
    const told = (event) => {
      const { time, kind, run_id: _run, metrics: _metrics, ...rest } = event;
      const when = time ? new Date(time * 1000).toLocaleTimeString() : "";
      return el("tr", {}, el("td", { class: "num" }, when), el("td", { class: kind === "warning" || rest.state === "failed" ? "error" : "" }, kind),
        el("td", { class: "text" }, Object.entries(rest).filter(([, v]) => v !== null && v !== "").map(([k, v]) => `${k}: ${typeof v === "object" ? JSON.stringify(v) : v}`).join("  ")));
    };
    await stream(`${base}/events`, {
      kinds: TOLD, signal, after: await behind(base, 1 << 20, signal),
      take: (event) => { list.prepend(told(event)); while (list.children.length > 500) list.lastChild.remove(); },
    });
  },

  async logs(base, body, signal) {
    const { logs } = await getJson(`${base}/logs`, {}, signal);
    const text = el("pre", { tabindex: "0", "aria-label": "log" });
    const load = async () => { text.textContent = await getText(`${base}/logs/${select.value}`, { lines: 400 }, signal); };
    const select = el("select", { id: "role", onchange: () => guard(load) }, logs.map((log) => el("option", { value: log.role }, `${log.role} (${number(log.bytes)} bytes)`)));
    if (!logs.length) return body.replaceChildren(el("p", { class: "hint" }, "no logs yet"));
    body.replaceChildren(el("form", { class: "row" }, el("label", { for: "role" }, "Log", select)), text);
    await load();
    every(3000, signal, load);
    return undefined;
  },

  async ledger(base, body, signal) {
    const load = async () => {
      const { balanced, ...terms } = await getJson(`${base}/ledger`, {}, signal);
      body.replaceChildren(
        table(["prompt groups", ""], Object.entries(terms).map(([name, count]) => el("tr", {}, el("td", {}, name.replace("_", " ")), el("td", { class: "num" }, String(count))))),
        el("p", { class: balanced ? "succeeded" : "error" }, balanced ? "Balanced: every issued group is accounted for." : "NOT balanced."));
    };
    await load();
    every(3000, signal, load);
  },

  async checkpoints(base, body, signal) {
    const { checkpoints } = await getJson(`${base}/checkpoints`, {}, signal);
    body.replaceChildren(checkpoints.length ? table(["step", "policy version", "size", "written"], checkpoints.map((item) => el("tr", {},
      el("td", { class: "num" }, String(item.step)), el("td", {}, item.policy_version ?? ""), el("td", { class: "num" }, `${number(item.bytes / 2 ** 20, 3)} MiB`),
      el("td", {}, new Date(item.time * 1000).toLocaleString())))) : el("p", { class: "hint" }, "no checkpoints yet"),
      el("p", { class: "hint" }, "Fetch one with: nightshift export JOB DIR"));
  },

  async report(base, body, signal) {
    const place = el("div", { "aria-live": "polite" }, el("p", { class: "hint" }, "Reading the run"));
    const load = async () => place.replaceChildren(...reportView(await getJson(`${base}/report`, {}, signal)));
    body.replaceChildren(el("div", { class: "bar" }, el("button", { type: "button", onclick: () => guard(load) }, "Draw up again")), place);
    await load();
  },

  async plan(base, body, signal) {
    body.replaceChildren(el("p", { class: "hint" }, "Measuring the prompts"));
    body.replaceChildren(...planView(await getJson(`${base}/plan`, {}, signal)));
  },
};

// The plan of a job file that is not submitted yet.
async function plan(signal) {
  const text = el("textarea", { rows: "16", spellcheck: "false", "aria-label": "job file", name: "job" });
  const place = el("div", { "aria-live": "polite" });
  const check = async () => {
    place.replaceChildren(el("p", { class: "hint" }, "Checking"));
    try {
      place.replaceChildren(...planView(await sendText("POST", "/v1/plan", text.value, "application/yaml", signal)));
      say("");
    } catch (error) {
      place.replaceChildren(...(error.fields ?? []).map(({ field, message }) => el("p", { class: "error" }, `${field}: ${message}`)));
      throw error;
    }
  };
  const form = el("form", { onsubmit: (event) => { event.preventDefault(); guard(check, signal); } }, text,
    el("div", { class: "bar" }, el("button", {}, "Plan"), el("span", { class: "hint" }, "Nothing is started. Files are uploads or paths that the service allows.")));
  show(el("h1", {}, "Plan a job"), form, place);
}

async function trace(id, signal) {
  const found = await getJson(`/v1/traces/${id}`, {}, signal);
  const whole = Math.max(...found.entries.map((entry) => entry.offset + entry.seconds));
  show(el("h1", {}, `Trace ${id}`), el("p", {}, el("a", { href: `#/job/${found.job}` }, found.job)),
    table(["at", "took", "what", "role", ""], found.entries.map((entry) => el("tr", { class: entry.status === "error" ? "error" : "" },
      el("td", { class: "num" }, `${(entry.offset * 1000).toFixed(1)} ms`), el("td", { class: "num" }, `${(entry.seconds * 1000).toFixed(1)} ms`),
      el("td", {}, `${"  ".repeat(entry.depth)}${entry.kind === "linked" ? "↪ " : ""}${entry.name}`), el("td", {}, entry.role),
      el("td", {}, el("progress", { max: whole || 1, value: entry.seconds, "aria-hidden": "true" }))))));
}

// Moving about ---------------------------------------------------------------------------------------------------------

// The id of an event so many bytes before the end.
async function behind(base, bytes, signal) {
  const end = await stream(`${base}/events`, { after: String(2 ** 40), follow: false, signal, take: () => {} });
  return String(Math.max(0, Number(end) - bytes));
}

function every(milliseconds, signal, work) {
  const timer = setInterval(() => guard(async () => { if (!document.hidden) await work(); }, signal), milliseconds);
  signal.addEventListener("abort", () => clearInterval(timer));
}

async function guard(work, signal = leaving.signal) {
  try {
    await work();
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    if (error instanceof Refused && error.status === 401) ask();
    say(error.message, true);
  }
}

function ask() {
  const dialog = document.getElementById("token-dialog");
  if (dialog.open) return;
  dialog.returnValue = "";
  dialog.showModal();
  dialog.onclose = () => {
    if (dialog.returnValue === "ok") {
      token.set(document.getElementById("token").value.trim());
      document.getElementById("token").value = "";
      go();
    }
  };
}

function go() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const [, kind, id, tab] = location.hash.replace(/^#\/?/, "/").split("/");
  crumbs.replaceChildren();
  say("");
  document.title = id ? `${id} · Nightshift` : "Nightshift";
  show(el("p", { class: "hint" }, "Loading"));
  guard(async () => {
    if (kind === "job" && id) await job(id, TABS.includes(tab) ? tab : "overview", signal);
    else if (kind === "trace" && id) await trace(id, signal);
    else if (kind === "plan") await plan(signal);
    else if (kind === "fleets") await fleetsView(show, every, signal);
    else if (kind === "fleet" && id) await fleetView(decodeURIComponent(id), show, every, guard, signal);
    else await jobs(signal);
  }, signal);
}

document.getElementById("sign").addEventListener("click", ask);
addEventListener("hashchange", go);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
  const [, kind, id] = location.hash.replace(/^#\/?/, "/").split("/");
  const tab = TABS[(Number(event.key) + 9) % 10]; // 1 to 9, and 0 for the tenth
  if (event.key === "j") location.hash = "#/";
  else if (event.key === "p") location.hash = "#/plan";
  else if (event.key === "f") location.hash = "#/fleets";
  else if (kind === "job" && /^[0-9]$/.test(event.key) && tab) location.hash = `#/job/${id}/${tab}`;
});
go();
