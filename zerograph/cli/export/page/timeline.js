// Streams over memory, drawn anew for every view.
const AXIS = 24, LANE = 30, BAR = 22, TIER_HEAD = 38, MEMORY = 104, LEFT = 118, RIGHT = 24, CHARACTER = 6.5, NARROWEST = 420;
const TITLE = 54, SHORT = 10; // characters of a memory title without the name in it; of a name that says something
const SHORTEST = 1.5, LONGEST = 24; // pixels; shorter neighbours are drawn as one bar, which gets no longer than that
const timeline = document.getElementById("timeline");
let width = 0;
let overlay = null;

/** Whether the width is another one now. A page that is not laid out yet has none; the drawing needs some. */
function setWidth() {
  const before = width;
  width = Math.max(timeline.clientWidth, NARROWEST);
  return width !== before;
}

const plotWidth = () => width - LEFT - RIGHT;
const toX = (time) => LEFT + ((time - shown.from) / (shown.to - shown.from)) * plotWidth();
const toTime = (x) => shown.from + ((x - LEFT) / plotWidth()) * (shown.to - shown.from);
const lanesBottom = () => AXIS + LANE * Math.max(1, plan.streams.length);
const tierTop = (row) => lanesBottom() + row * (TIER_HEAD + MEMORY) + TIER_HEAD;
const height = () => lanesBottom() + plan.tiers.length * (TIER_HEAD + MEMORY) + 6;

function timeTicks() {
  const rough = (shown.to - shown.from) / Math.max(2, plotWidth() / 110);
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(shown.from / step - 1e-6); i * step <= shown.to * (1 + 1e-9); i++) ticks.push(i * step);
  return { ticks, step };
}

/** Enough digits that two neighbouring ticks differ. */
function tickLabel(time, step) {
  const [scale, unit] = step >= 0.1 ? [1, "s"] : step >= 1e-4 ? [1e-3, "ms"] : step >= 1e-7 ? [1e-6, "µs"] : [1e-9, "ns"];
  const decimals = Math.max(0, -Math.floor(Math.log10(step / scale) + 1e-9));
  return `${(time / scale).toFixed(decimals)} ${unit}`;
}

function axis() {
  const { ticks, step } = timeTicks();
  return ticks.flatMap((tick) => {
    const x = toX(tick);
    const label = drawn("text", { class: "quiet middle", x, y: AXIS - 9 }, tickLabel(tick, step));
    return [drawn("line", { class: "grid", x1: x, x2: x, y1: AXIS - 4, y2: height() }), label];
  });
}

/** What of a stream is in sight, as lists of instructions that are drawn as one bar. */
function barsOf(stream) {
  const shortest = (SHORTEST * (shown.to - shown.from)) / plotWidth();
  const bars = [];
  let open = false;
  for (const span of spans) {
    if (span.stream !== stream || span.end < shown.from || span.start > shown.to) continue;
    const short = span.end - span.start < shortest;
    const bar = bars.at(-1);
    const near = open && span.start - bar.at(-1).end < shortest;
    if (near && short && span.end - bar[0].start < (shortest * LONGEST) / SHORTEST) bar.push(span);
    else bars.push([span]);
    open = short;
  }
  return bars;
}

function fittingLabel(span, room) {
  const parts = span.module === "" ? [] : span.module.split(".");
  const texts = [span.name, ...parts.map((_, i) => parts.slice(i).join("."))];
  return texts.find((label) => label.length * CHARACTER + 8 <= room) ?? "";
}

function barNode(bar, top) {
  const [first, last] = [bar[0], bar.at(-1)];
  const left = Math.max(toX(first.start), LEFT);
  const right = Math.min(toX(last.end), LEFT + plotWidth());
  const alone = bar.length === 1;
  const room = Math.max(right - left - (alone ? 0.8 : 0), 0.8);
  const when = `${formatSeconds(last.end - first.start)} from ${formatSeconds(first.start)}`;
  const name = alone ? first.name : plural(bar.length, "instruction");
  const hint = alone ? `${first.critical ? ", on the critical path" : ""}` : ", Enter zooms in";
  const node = drawn("g", {
    class: `task${alone ? "" : " many"}${bar.some(isMarked) ? "" : " faint"}`,
    role: "button",
    tabindex: 0,
    "data-task": first.task,
    "data-last": last.task,
    "aria-label": `${name}, ${streamName[first.stream]}, ${when}${hint}`,
    "aria-pressed": alone ? String(selected === first.task) : null,
  });
  const rounded = alone ? Math.min(3, room / 4) : 0;
  const fillOf = `fill:var(--${first.stream})`;
  node.append(drawn("rect", { class: "body", x: left, y: top, width: room, height: BAR, rx: rounded, style: fillOf }));
  if (bar.some((span) => span.critical)) {
    node.append(drawn("rect", { class: "critical", x: left, y: top + BAR + 1.5, width: room, height: 2.5 }));
  }
  const label = alone ? fittingLabel(first, room) : "";
  if (label) node.append(drawn("text", { x: left + room / 2, y: top + BAR / 2 + 4, "aria-hidden": true }, label));
  node.append(drawn("title", {}, `${name}\n${when}`));
  return node;
}

function lane(stream, row) {
  const top = AXIS + row * LANE;
  return drawn(
    "g",
    { role: "group", "aria-label": `${stream.name} stream` },
    drawn("text", { class: "end", x: LEFT - 10, y: top + BAR / 2 + 4, "aria-hidden": true }, stream.name),
    drawn("rect", { class: "track", x: LEFT, y: top, width: plotWidth(), height: BAR, rx: 3 }),
    ...barsOf(stream.key).map((bar) => barNode(bar, top)),
  );
}

function byteTicks(top) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(top / 3)));
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
}

/** The curve in sight, as corners of its steps. */
function steps(tier, toY) {
  const first = Math.max(0, tier.times.findLastIndex((time) => time <= shown.from));
  let path = `V${toY(tier.bytes[first]).toFixed(1)}`;
  for (let i = first + 1; i < tier.times.length && tier.times[i] <= shown.to; i++) {
    path += `H${toX(tier.times[i]).toFixed(1)}V${toY(tier.bytes[i]).toFixed(1)}`;
  }
  return { begin: toY(tier.bytes[first]), path: `${path}H${LEFT + plotWidth()}` };
}

function memory(tier, row) {
  const top = tierTop(row), bottom = top + MEMORY - 12;
  const toY = (size) => bottom - (size / tier.top) * (bottom - top);
  const { begin, path } = steps(tier, toY);
  const right = LEFT + plotWidth();
  const group = drawn("g", { role: "img", "aria-label": memoryInWords(tier) }, ...memoryTitle(tier, top));
  for (const tick of byteTicks(tier.top)) {
    const y = toY(tick);
    group.append(drawn("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
    group.append(drawn("text", { class: "quiet end", x: LEFT - 10, y: y + 4 }, formatBytes(tick)));
  }
  const colour = `var(--tier-${tier.key})`;
  group.append(drawn("path", { class: "area", d: `M${LEFT} ${bottom}${path}V${bottom}Z`, style: `fill:${colour}` }));
  group.append(drawn("path", { class: "curve", d: `M${LEFT} ${begin}${path}`, style: `stroke:${colour}` }));
  if (tier.budget && tier.budget <= tier.top) {
    const y = toY(tier.budget);
    group.append(drawn("line", { class: "budget", x1: LEFT, x2: right, y1: y, y2: y }));
  }
  if (tier.peak.time >= shown.from && tier.peak.time <= shown.to) {
    const fillOf = tier.budget && tier.peak.bytes > tier.budget ? "fill:var(--bad)" : `fill:${colour}`;
    const place = { cx: toX(tier.peak.time), cy: toY(tier.peak.bytes), r: 5 };
    group.append(drawn("circle", { class: "peak", ...place, style: fillOf }));
  }
  return group;
}

function memoryTitle(tier, top) {
  const over = tier.budget && tier.peak.bytes > tier.budget;
  const room = Math.floor(plotWidth() / CHARACTER) - TITLE;
  const name = room < SHORT ? "" : ` at ${shortened(tier.peak.name, room)}`;
  const title = drawn(
    "text",
    { x: room < SHORT ? 0 : LEFT, y: top - 10 },
    drawn("tspan", { class: "strong" }, `${capital(tier.name)} memory`),
    drawn("tspan", { dx: 12, style: `fill:var(--tier-${tier.key})` }, "●"),
    drawn("tspan", { class: "quiet" }, ` peak ${formatBytes(tier.peak.bytes)}${tier.peak.name && name}`),
  );
  if (tier.budget) {
    const used = `${Math.round((100 * tier.peak.bytes) / tier.budget)}% used`;
    const line = drawn("tspan", { dx: 12, class: "bad" }, tier.budget <= tier.top ? "– –" : "\u200b"); // dx needs a text
    title.append(line, drawn("tspan", { class: over ? "bad" : "quiet" }, ` budget ${formatBytes(tier.budget)}, ${used}`));
  }
  return [title];
}

function memoryInWords(tier) {
  const budget = tier.budget ? `, budget ${formatBytes(tier.budget)}` : "";
  return `${tier.name} memory over time: peak ${formatBytes(tier.peak.bytes)} at ${tier.peak.name}${budget}`;
}

function draw() {
  if (spans.length === 0 && plan.tiers.length === 0) return drawNothing();
  const focused = timeline.contains(document.activeElement) ? document.activeElement.dataset.task : undefined;
  overlay = drawn("g", { "aria-hidden": true });
  const svg = drawn("svg", { viewBox: `0 0 ${width} ${height()}`, role: "group", "aria-label": "streams and memory" });
  svg.append(...axis(), ...plan.streams.map(lane), ...plan.tiers.map(memory), overlay);
  timeline.replaceChildren(svg);
  drawSelection();
  if (focused !== undefined) (nodeOf(Number(focused)) ?? timeline).focus({ preventScroll: true });
}

function drawNothing() {
  timeline.replaceChildren(element("p", { class: "quiet" }, "This plan has no instructions."));
  for (const id of ["keys", "zoom"]) document.getElementById(id).hidden = true;
}

/** The bar that shows a task, if it is in sight. */
function nodeOf(task) {
  const nodes = [...timeline.querySelectorAll(".task")];
  const stream = spans[task].stream;
  return nodes.find((node) => {
    const { task: first, last } = node.dataset;
    return spans[first].stream === stream && Number(first) <= task && task <= Number(last);
  });
}

const laneMiddle = (span) => AXIS + plan.streams.findIndex((stream) => stream.key === span.stream) * LANE + BAR / 2;
const inPlot = (x) => Math.min(Math.max(x, LEFT), LEFT + plotWidth());

function drawSelection() {
  for (const node of timeline.querySelectorAll(".task[aria-pressed]")) {
    node.setAttribute("aria-pressed", String(Number(node.dataset.task) === selected));
  }
  overlay.replaceChildren();
  if (selected === null) return;
  const span = spans[selected];
  const left = inPlot(toX(span.start)), right = inPlot(toX(span.end));
  const [top, bottom] = [lanesBottom(), height()];
  overlay.append(drawn("rect", { class: "band", x: left, y: top, width: Math.max(right - left, 1), height: bottom - top }));
  for (const task of span.after) {
    const [x1, y1, x2, y2] = [inPlot(toX(spans[task].end)), laneMiddle(spans[task]), left, laneMiddle(span)];
    const bend = Math.max(4, (x2 - x1) / 2);
    overlay.append(drawn("path", { class: "wait", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` }));
    overlay.append(drawn("circle", { cx: x2, cy: y2, r: 3, style: "fill:var(--text)" }));
  }
}
