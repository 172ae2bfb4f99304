// Fleets: servers that jobs share, who has them, what each job is owed and had, and the leases.

import { getJson } from "/page/api.js";
import { age, el, number, table } from "/page/draw.js";

const MORE = 50;

function holder(jobId) {
  return jobId ? el("a", { href: `#/job/${jobId}` }, jobId) : el("span", { class: "dim" }, "a job of another project");
}

function servers(fleet) {
  const lent = fleet.servers.filter((server) => server.lent).length;
  const away = fleet.servers.filter((server) => !server.healthy).length;
  const words = [`${fleet.servers.length} servers`, `${lent} lent`, ...(away ? [`${away} do not answer`] : [])];
  return [
    el("p", {}, words.join(", ")),
    table(["server", "address", "answers", "who has it"], fleet.servers.map((server) => el("tr", {},
      el("td", {}, server.name), el("td", { class: "text" }, server.url),
      el("td", { class: server.healthy ? "succeeded" : "error" }, server.healthy ? "yes" : "no"),
      el("td", {}, server.lent ? holder(server.job_id) : el("span", { class: "dim" }, "nobody"))))),
  ];
}

// A share as a number and as a bar; `null` where nothing is shared out yet.
function part(value, whole, what) {
  if (!whole) return el("td", { class: "num" }, "–");
  return el("td", { class: "num" }, `${((100 * value) / whole).toFixed(1)} % `,
    el("progress", { max: whole, value, "aria-label": what }));
}

function sharesTable(shares) {
  if (!shares.length) return el("p", { class: "hint" }, "No running job asks for servers of this fleet.");
  const owed = shares.reduce((sum, share) => sum + share.owed, 0);
  const used = shares.reduce((sum, share) => sum + share.used, 0);
  return table(["job", "weight", "servers now", "owed", "share wanted", "share got", "server-seconds", "behind"],
    shares.map((share) => el("tr", {},
      el("td", {}, holder(share.job_id), share.wants ? null : el("span", { class: "dim" }, " wants none now")),
      el("td", { class: "num" }, number(share.weight)), el("td", { class: "num" }, String(share.held)),
      el("td", { class: "num" }, share.owed.toFixed(2)),
      part(share.owed, owed, "share wanted"), part(share.used, used, "share got"),
      el("td", { class: "num" }, share.used.toFixed(0)), el("td", { class: "num" }, `${share.lag.toFixed(0)} s`))));
}

function leaseRow(lease, now) {
  const until = lease.ended ?? now;
  const what = lease.ended !== null ? `ended: ${lease.ended_why}`
    : lease.asked !== null ? `asked back ${age(now - lease.asked)} ago: ${lease.asked_why}` : "lent";
  return el("tr", {},
    el("td", { class: "num" }, String(lease.number)), el("td", {}, lease.server), el("td", {}, holder(lease.job_id)),
    el("td", {}, new Date(lease.since * 1000).toLocaleString()), el("td", { class: "num" }, age(until - lease.since)),
    el("td", { class: lease.ended === null ? "text" : "text dim" }, what));
}

export async function fleetsView(body, every, signal) {
  const place = el("div", {});
  const load = async () => {
    const { fleets } = await getJson("/v1/fleets", {}, signal);
    place.replaceChildren(...(fleets.length ? fleets.flatMap((fleet) => [
      el("h2", {}, el("a", { href: `#/fleet/${fleet.name}` }, fleet.name)), ...servers(fleet),
    ]) : [el("p", { class: "hint" }, "No fleets. Register one: nightshift up --fleets FILE, or PUT /v1/fleets/NAME")]));
  };
  body(el("h1", {}, "Fleets"), place);
  await load();
  every(3000, signal, load);
}

export async function fleetView(name, body, every, guard, signal) {
  const base = `/v1/fleets/${encodeURIComponent(name)}`;
  const [head, owed, list] = [el("div", {}), el("div", {}), el("div", {})];
  let shown = 20;
  const load = async () => {
    const [fleet, found] = await Promise.all([
      getJson(base, {}, signal), getJson(`${base}/leases`, { limit: Math.min(1000, shown) }, signal)]);
    const now = Date.now() / 1000;
    head.replaceChildren(...servers(fleet), el("p", { class: "hint" },
      `A job keeps a server for ${number(fleet.hold_s)} s at least; a change costs ${number(fleet.switch_s)} s. `
      + `Responses end within ${number(fleet.drain_s)} s of being asked back, the lease within ${number(fleet.deadline_s)} s.`));
    owed.replaceChildren(sharesTable(found.shares));
    const more = found.next !== null && shown < 1000 ? el("button", {
      type: "button", onclick: () => { shown += MORE; guard(load, signal); },
    }, "Older") : null;
    list.replaceChildren(found.leases.length
      ? table(["lease", "server", "job", "since", "for", ""], found.leases.map((lease) => leaseRow(lease, now)))
      : el("p", { class: "hint" }, "Nothing was lent yet."), ...(more ? [el("div", { class: "bar" }, more)] : []));
  };
  body(el("h1", {}, `Fleet ${name}`), head,
    el("section", { class: "shares" }, el("h2", {}, "Shares"), owed), el("section", { class: "leases" }, el("h2", {}, "Leases"), list));
  await load();
  every(3000, signal, load);
}
