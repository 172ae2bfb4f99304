// Elements, curves and lanes. Text goes in as text only: what a model wrote is never markup.

const SVG = "http://www.w3.org/2000/svg";

export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  put(element, attributes, children);
  return element;
}

export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  put(element, attributes, children);
  return element;
}

function put(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return String(value);
  return Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits)));
}

export function age(seconds) {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export function table(headings, rows) {
  return el("div", { class: "scroll" },
    el("table", {},
      el("thead", {}, el("tr", {}, headings.map((heading) => el("th", { scope: "col" }, heading)))),
      el("tbody", {}, rows)));
}

// One curve, or two in one figure: series is [[step, value], …] each.
export function chart(title, series) {
  const points = series.flat().filter(([, value]) => value !== null && value !== undefined);
  const last = series[0].at(-1)?.[1];
  const caption = el("figcaption", {}, title, el("b", {}, number(last)));
  if (!points.length) return el("figure", {}, caption, el("p", { class: "hint" }, "no values yet"));
  const [width, height, left, bottom] = [300, 110, 4, 14];
  const steps = points.map(([step]) => step);
  const values = points.map(([, value]) => value);
  const [first, end, low, high] = [Math.min(...steps), Math.max(...steps), Math.min(...values), Math.max(...values)];
  const x = (step) => left + ((step - first) / (end - first || 1)) * (width - 2 * left);
  const y = (value) => 12 + (1 - (value - low) / (high - low || 1)) * (height - bottom - 16);
  const curves = series.map((line, at) => {
    const drawn = line.filter(([, value]) => value !== null && value !== undefined)
      .map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    return svg("polyline", { points: drawn, class: at ? "curve second" : "curve" });
  });
  const summary = `${title}: ${number(values[0])} at step ${first}, ${number(last)} at step ${end}, between ${number(low)} and ${number(high)}`;
  return el("figure", {}, caption,
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": summary },
      svg("line", { x1: left, y1: height - bottom, x2: width - left, y2: height - bottom, class: "axis" }),
      curves,
      svg("text", { x: left, y: 10 }, number(high)),
      svg("text", { x: left, y: height - bottom - 3 }, number(low)),
      svg("text", { x: left, y: height - 2 }, `step ${first}`),
      svg("text", { x: width - left, y: height - 2, "text-anchor": "end" }, String(end))));
}

// Who did what when: one lane for each role, overlapping spans below each other.
export function lanes(spans, seconds) {
  if (!spans.length) return el("p", { class: "hint" }, "no spans yet");
  const until = Math.max(...spans.map((span) => span.end));
  const from = Math.max(until - seconds, Math.min(...spans.map((span) => span.start)));
  const shown = spans.filter((span) => span.end >= from).sort((one, other) => one.start - other.start).slice(-4000);
  const roles = new Map();
  for (const span of shown) {
    const rows = roles.get(span.role) || [];
    let row = rows.findIndex((free) => free <= span.start);
    if (row < 0) row = rows.length < 12 ? rows.length : 11;
    rows[row] = Math.max(rows[row] || 0, span.end);
    roles.set(span.role, rows);
    span.row = row;
  }
  const [width, label, tall] = [1000, 90, 9];
  const x = (time) => label + ((Math.max(time, from) - from) / (until - from || 1)) * (width - label);
  let top = 4;
  const drawn = [];
  for (const [role, rows] of roles) {
    drawn.push(svg("text", { x: 0, y: top + 9 }, role || "?"));
    for (const span of shown.filter((item) => item.role === role)) {
      const title = `${span.name} · ${((span.end - span.start) * 1000).toFixed(0)} ms`;
      const box = svg("rect", {
        x: x(span.start).toFixed(1), y: top + span.row * tall, height: tall - 2,
        width: Math.max(1, x(span.end) - x(span.start)).toFixed(1), class: `span ${role} ${span.status || ""}`,
      }, svg("title", {}, title));
      drawn.push(svg("a", { href: `#/trace/${span.trace_id}`, "aria-label": title, tabindex: "-1" }, box));
    }
    top += rows.length * tall + 10;
    drawn.push(svg("line", { x1: 0, y1: top - 5, x2: width, y2: top - 5, class: "axis" }));
  }
  const name = `${shown.length} spans of ${roles.size} roles over ${(until - from).toFixed(1)} s`;
  return el("div", {}, el("p", { class: "hint" }, name),
    el("div", { class: "scroll" },
      svg("svg", { viewBox: `0 0 ${width} ${top + 4}`, role: "img", "aria-label": name, class: "lanes" }, drawn)));
}
