// The views of a job's report and of its plan: what the service worked out, as tables and bars.

import { el, number, table } from "/page/draw.js";

const STAGES = [
  ["generation", "first request to last answer"], ["scoring", "the slowest scorer"],
  ["scoring_tail", "from the last answer to the last score"], ["update", "the trainer's update"],
  ["training_tail", "what of it comes after the last score"], ["publication", "the trainer hands its weights out"],
  ["delivery", "until the servers generate with them"], ["pause", "servers stand still meanwhile"],
  ["wait", "the trainer waited for a batch"],
];

const known = (value) => value !== null && value !== undefined;
const seconds = (value) => (known(value) ? `${value.toFixed(2)} s` : "–");
const share = (value) => (known(value) ? `${Math.round(100 * value)} %` : "–");
const bound = (value) => (known(value) ? String(value) : "none");
const figure = (text) => el("td", { class: "num" }, text);
const bar = (value, whole) => el("td", {}, known(value) ? el("progress", { max: whole || 1, value, "aria-hidden": "true" }) : "");
const titled = (title, ...parts) => el("section", {}, el("h2", {}, title), parts);

export function bytes(value) {
  if (!known(value)) return "–";
  return value < 2 ** 30 ? `${number(value / 2 ** 20, 3)} MiB` : `${number(value / 2 ** 30, 3)} GiB`;
}

function stepsOf({ mode, max_staleness: most, steps }) {
  const left = Object.entries(steps.left_out).map(([reason, count]) => `${count} ${reason}`).join(", ");
  const name = mode === "async" ? `asynchronous, max_staleness ${bound(most)}` : mode === "sync" ? "synchronous" : "mode unknown";
  return titled("Steps", el("p", {}, `${name}; ${steps.made} made, ${steps.used.length} measured${left ? ` (left out: ${left})` : ""}`),
    el("p", {}, `step time: median ${seconds(steps.median)}, mean ${seconds(steps.mean)}`));
}

function stagesOf({ stages }) {
  const shown = STAGES.filter(([name]) => known(stages[name]));
  if (!shown.length) return null;
  const whole = Math.max(...shown.map(([name]) => stages[name]));
  return titled("Stages, medians", table(["stage", "seconds", "", ""], shown.map(([name, what]) => el("tr", {},
    el("td", {}, name.replace("_", " ")), figure(seconds(stages[name])), bar(stages[name], whole), el("td", { class: "dim" }, what)))));
}

function predictedOf({ mode, max_staleness: most, predicted, steps }) {
  if (!predicted) return null;
  const ratio = (value) => (predicted.own && value ? `${(predicted.own / value).toFixed(2)} × the speed` : "");
  const rows = [];
  if (known(predicted.own)) {
    const off = known(predicted.error) ? `model ${predicted.error > 0 ? "+" : ""}${Math.round(100 * predicted.error)} %; ` : "";
    const name = mode === "sync" ? "synchronous" : `max_staleness ${bound(most)}`;
    rows.push([name, predicted.own, steps.mean, `${off}pace: ${predicted.limit}`]);
  }
  if (mode !== "sync") rows.push(["synchronous, at most", predicted.sync, null, ratio(predicted.sync)]);
  const own = mode ? bound(most) : null;
  for (const [name, value] of Object.entries(predicted.by_staleness)) {
    if (name !== "0" && name !== own) rows.push([`max_staleness ${name}`, value, null, ratio(value)]);
  }
  return titled("Predicted and measured",
    table(["step time", "predicted", "measured", ""], rows.map(([name, value, measured, note]) => el("tr", {},
      el("td", {}, name), figure(seconds(value)), figure(seconds(measured)), el("td", { class: "dim" }, note)))),
    el("p", { class: "hint" }, `max_staleness above ${predicted.staleness_needed} makes no step shorter`));
}

function rolesOf({ roles }) {
  if (!roles.length) return null;
  return titled("Who was busy", table(["role", "busy", "", "idle", "idle, predicted"], roles.map((role) => el("tr", {},
    el("td", {}, role.role), figure(share(role.busy)), bar(role.busy, 1), figure(share(role.bubble)), figure(share(role.predicted_bubble))))));
}

function agesOf({ staleness, slots }) {
  const parts = [];
  if (staleness) {
    const ages = new Set(["groups", "samples", "tokens"].flatMap((kind) => Object.keys(staleness[kind])));
    const rows = [...ages].sort((one, other) => one - other).map((age) => el("tr", {}, el("td", {}, age),
      ["groups", "samples", "tokens"].map((kind) => figure(String(staleness[kind][age] ?? 0)))));
    if (rows.length) parts.push(table(["versions behind", "groups", "samples", "tokens"], rows));
    if (staleness.unknown) parts.push(el("p", { class: "hint" }, `without a version: ${staleness.unknown} samples`));
  }
  if (slots) {
    parts.push(el("p", {}, `slots: ${share(slots.occupancy)} full while a batch is generated (at most ${slots.peak} sequences at once); `
      + `the longest takes ${slots.longest_over_mean.toFixed(1)} times the mean`));
  }
  return parts.length ? titled("Staleness and slots", ...parts) : null;
}

export function reportView(found) {
  const list = (title, lines) => (lines.length ? titled(title, el("ul", {}, lines.map((line) => el("li", {}, line)))) : null);
  return [
    stepsOf(found), list("What to change", found.advice), stagesOf(found), predictedOf(found), rolesOf(found), agesOf(found),
    list("Not known", found.missing),
  ].filter((part) => part !== null);
}

export function planView(plan) {
  const { model, data, memory } = plan;
  const shape = model ? `${number(model.parameters / 1e6, 4)} million parameters, ${model.layers} layers, stored as ${model.dtype}`
    : "not on this machine yet, so that prompts and memory are not known; the run fetches it";
  const facts = [
    ["model", `${plan.model_path}: ${shape}`],
    ["step", `${plan.samples_per_step} samples; at most ${bound(plan.max_staleness)} policy versions behind`],
    ["parallelism", `${plan.parallelism.data} trainer rank(s), ZeRO stage ${plan.parallelism.zero_stage}`],
    ...(known(plan.kv_cache_tokens) ? [["KV cache", `${plan.kv_cache_tokens} tokens`]] : []),
    ...(data ? data.lines.map((line) => ["data", line]) : []),
  ];
  const parts = [titled(`Job ${plan.name}: valid`, table(["", ""], facts.map(([name, text]) => el("tr", {}, el("td", {}, name), el("td", {}, text)))))];
  if (memory) {
    const [total, machine] = [plan.memory_total_bytes, plan.memory_machine_bytes];
    const rows = Object.entries(memory).map(([role, part]) => el("tr", {}, el("td", {}, role), figure(bytes(part.bytes)), bar(part.bytes, total),
      el("td", { class: "dim" }, Object.entries(part.made_of).filter(([, size]) => size).map(([name, size]) => `${name} ${bytes(size)}`).join(", "))));
    rows.push(el("tr", {}, el("td", {}, "total"), figure(bytes(total)), el("td", {}), el("td", { class: known(machine) && total >= machine ? "error" : "dim" },
      known(machine) ? `of ${bytes(machine)} on the service's machine${total < machine ? "" : ": too much"}` : "")));
    parts.push(titled("Memory, estimated", table(["role", "", "", "made of"], rows)));
  }
  return parts;
}
