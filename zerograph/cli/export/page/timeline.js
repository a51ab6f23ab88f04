// Streams over memory, drawn anew for every view.
const AXIS = 24, LANE = 30, BAR = 22, TIER_HEAD = 38, MEMORY = 150, RIGHT = 24, CHARACTER = 6.5, NARROWEST = 340;
const LEFT = Math.min(118, 14 + CHARACTER * Math.max(8, ...plan.streams.map((stream) => stream.name.length)));
const TITLE = 54, SHORT = 10; // characters of a memory title without the name in it; of a name that says something
const FLAG = 6, BAND = 14; // pixels: beside the text of a flag, and from which height on a band bears its name
const FINEST = 0.5; // pixels between two moments of a curve
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

function barNode(bar, top, flags) {
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
  const middle = left + room / 2, half = (label.length * CHARACTER) / 2;
  const covered = flags.some((flag) => middle - half < flag.right && middle + half > flag.left);
  if (label && !covered) node.append(drawn("text", { x: middle, y: top + BAR / 2 + 4, "aria-hidden": true }, label));
  const from = alone ? [first.module, first.source].filter(Boolean).join(" · ") : "";
  node.append(drawn("title", {}, [name, when, from].filter(Boolean).join("\n")));
  return node;
}

/** Of the instructions of a stream that run when a tier holds the most, where each one's name goes: beside its bar. */
function flagsOf(stream) {
  const flags = [];
  for (const { peak } of plan.tiers) {
    const span = peak.task < 0 ? undefined : spans.find((s) => s.stream === stream && s.start <= peak.time && peak.time < s.end);
    if (!span || isMeasured(span.task) !== isMeasured(peak.task) || peak.time < shown.from || peak.time > shown.to) continue;
    const begin = Math.max(toX(span.start), LEFT), end = Math.min(toX(span.end), LEFT + plotWidth());
    const wide = span.name.length * CHARACTER + 2 * FLAG;
    const label = fittingLabel(span, end - begin);
    if (label && label.endsWith(span.module)) continue; // it bears its name already
    const left = end + 3 + wide <= LEFT + plotWidth() ? end + 3 : begin - 3 - wide;
    if (left < LEFT) continue; // there is no room beside it
    const flag = { span, left, right: left + wide };
    if (flags.every((other) => flag.right < other.left || other.right < flag.left)) flags.push(flag);
  }
  return flags;
}

function flagNode({ span, left, right }, top) {
  return drawn(
    "g",
    { class: "flag", "aria-hidden": true },
    drawn("rect", { x: left, y: top + 2, width: right - left, height: BAR - 4, rx: 3, style: `stroke:var(--${span.stream})` }),
    drawn("text", { x: left + FLAG, y: top + BAR / 2 + 4 }, span.name),
  );
}

function lane(stream, row) {
  const top = AXIS + row * LANE;
  const flags = flagsOf(stream.key);
  return drawn(
    "g",
    { role: "group", "aria-label": `${stream.name} stream` },
    drawn("text", { class: "end", x: LEFT - 10, y: top + BAR / 2 + 4, "aria-hidden": true }, stream.name),
    drawn("rect", { class: "track", x: LEFT, y: top, width: plotWidth(), height: BAR, rx: 3 }),
    ...barsOf(stream.key).map((bar) => barNode(bar, top, flags)),
    ...flags.map((flag) => flagNode(flag, top)),
  );
}

function byteTicks(top) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(top / 3)));
  return Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
}

/** Places of a tier's moments in sight; of those in one half of a pixel the one that holds most. */
function momentsInSight({ times, bytes }) {
  const found = [Math.max(0, times.findLastIndex((time) => time <= shown.from))];
  let begin = -1;
  for (let i = found[0] + 1; i < times.length && times[i] <= shown.to; i++) {
    const x = toX(times[i]);
    if (x - begin >= FINEST) {
      begin = x;
      found.push(i);
    } else if (bytes[i] > bytes[found.at(-1)]) found[found.length - 1] = i;
  }
  return found;
}

/** Levels at these moments, as corners of their steps. */
function corners(times, levels, toY, [first, ...moments]) {
  let y = toY(levels[first]);
  const found = [[LEFT, y]];
  for (const i of moments) {
    const x = toX(times[i]);
    found.push([x, y], [x, (y = toY(levels[i]))]);
  }
  return [...found, [LEFT + plotWidth(), y]];
}

const line = (points) => points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L");

/** The kinds that are drawn as bands, each from what lies under it to what lies on it; and the sum of all. */
function stacked(tier) {
  let sum = tier.times.map(() => 0);
  const bands = kindsOf(tier).map((kind) => {
    const under = sum;
    sum = under.map((bytes, i) => bytes + kind.levels[i]);
    return { kind, under, over: sum };
  });
  return { bands, sum: tier.kinds.length ? sum : tier.bytes };
}

/** The name of a band, where it stays high enough for so long as the name is, or nothing; the highest place wins. */
function bandLabel(name, under, over) {
  const half = (name.length * CHARACTER) / 2 + 4;
  const every = 6, heights = [];
  for (let x = LEFT, i = 0; x <= LEFT + plotWidth(); x += every) {
    while (i + 1 < over.length && over[i + 1][0] <= x) i++;
    heights.push([over[i][1], under[i][1]]); // both have their corners at the same places
  }
  const around = Math.ceil(half / every);
  let best = { room: BAND };
  for (let i = around; i + around < heights.length; i++) {
    const near = heights.slice(i - around, i + around + 1);
    const top = Math.max(...near.map(([high]) => high)), bottom = Math.min(...near.map(([, low]) => low));
    if (bottom - top > best.room) best = { room: bottom - top, x: LEFT + i * every, y: (top + bottom) / 2 + 4 };
  }
  return best;
}

function bandNodes({ kind, under, over }, tier, toY, moments) {
  const low = corners(tier.times, under, toY, moments), high = corners(tier.times, over, toY, moments);
  const name = plan.kindNames[kind.key];
  const band = drawn("path", { class: "kind", d: `M${line(high)}L${line(low.toReversed())}Z`, style: `fill:var(--kind-${kind.key})` });
  band.append(drawn("title", {}, `${name}: ${formatBytes(kind.peak)} at the peak`));
  const { x, y } = bandLabel(name, low, high);
  if (x === undefined) return [band];
  return [band, drawn("text", { class: "middle", x, y, style: `fill:var(--on-${kind.key})`, "pointer-events": "none" }, name)];
}

function memory(tier, row) {
  const top = tierTop(row), bottom = top + MEMORY - 12;
  const { bands, sum } = stacked(tier);
  const most = isComplete(tier) ? tier.top : Math.max(...sum) * 1.15 || 1;
  const toY = (size) => bottom - (size / most) * (bottom - top);
  const moments = momentsInSight(tier);
  const points = corners(tier.times, sum, toY, moments);
  const right = LEFT + plotWidth();
  const group = drawn("g", { role: "img", "aria-label": memoryInWords(tier) }, ...memoryTitle(tier, top));
  for (const tick of byteTicks(most)) {
    const y = toY(tick);
    group.append(drawn("line", { class: "grid", x1: LEFT, x2: right, y1: y, y2: y }));
    group.append(drawn("text", { class: "quiet end", x: LEFT - 10, y: y + 4 }, formatBytes(tick)));
  }
  const colour = `var(--tier-${tier.key})`;
  for (const band of bands) group.append(...bandNodes(band, tier, toY, moments));
  if (tier.kinds.length === 0) {
    group.append(drawn("path", { class: "area", d: `M${LEFT} ${bottom}L${line(points)}V${bottom}Z`, style: `fill:${colour}` }));
  }
  const stroke = tier.kinds.length ? "var(--text)" : colour;
  group.append(drawn("path", { class: "curve", d: `M${line(points)}`, style: `stroke:${stroke}` }));
  if (!isComplete(tier)) return group; // the budget and the peak are of all
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
  if (!isComplete(tier)) return [partTitle(tier, top)];
  const name = room < SHORT ? "" : ` at ${shortened(tier.peak.name, room)}`;
  const narrow = room < SHORT; // then it begins at the very left, and the text of the budget is a line of its own
  const title = drawn(
    "text",
    { x: narrow ? 0 : LEFT, y: top - (narrow && tier.budget ? 22 : 10) },
    drawn("tspan", { class: "strong" }, `${capital(tier.name)} memory`),
    drawn("tspan", { dx: 12, style: `fill:var(--tier-${tier.key})` }, "●"),
    drawn("tspan", { class: "quiet" }, ` peak ${formatBytes(tier.peak.bytes)}${tier.peak.name && name}`),
  );
  if (tier.budget) {
    const used = `${Math.round((100 * tier.peak.bytes) / tier.budget)}% used`;
    const place = narrow ? { x: 0, dy: 14 } : { dx: 12 };
    const line = drawn("tspan", { ...place, class: "bad" }, tier.budget <= tier.top ? "– –" : "\u200b"); // dx needs a text
    title.append(line, drawn("tspan", { class: over ? "bad" : "quiet" }, ` budget ${formatBytes(tier.budget)}, ${used}`));
  }
  return [title];
}

/** Of a stack from which some kinds are left out. */
function partTitle(tier, top) {
  const names = kindsOf(tier).map((kind) => plan.kindNames[kind.key]);
  return drawn(
    "text",
    { x: plotWidth() / CHARACTER < TITLE + SHORT ? 0 : LEFT, y: top - 10 },
    drawn("tspan", { class: "strong" }, `${capital(tier.name)} memory`),
    drawn("tspan", { dx: 12, class: "quiet" }, `up to ${formatBytes(Math.max(...stacked(tier).sum))} of ${names.length} kinds of ${tier.kinds.length}`),
  );
}

function memoryInWords(tier) {
  const budget = tier.budget ? `, budget ${formatBytes(tier.budget)}` : "";
  const kinds = tier.kinds.map((kind) => `${plan.kindNames[kind.key]} ${formatBytes(kind.peak)}`);
  const parts = kinds.length ? `, of it ${kinds.join(", ")}` : "";
  return `${tier.name} memory over time: peak ${formatBytes(tier.peak.bytes)} at ${tier.peak.name}${budget}${parts}`;
}

/** The legend of the bands: each is a switch. */
function drawKinds() {
  const shown = plan.tiers.filter((tier) => tier.kinds.length);
  const keys = Object.keys(plan.kindNames).filter((key) => shown.some((tier) => tier.kinds.some((kind) => kind.key === key)));
  const switches = keys.map((key) => {
    const sizes = shown.map((tier) => [tier, tier.kinds.find((kind) => kind.key === key)]).filter(([, kind]) => kind?.peak);
    const words = sizes.map(([tier, kind]) => formatBytes(kind.peak) + (shown.length > 1 ? ` ${tier.name}` : ""));
    const button = element(
      "button",
      { type: "button", "aria-pressed": "true", onclick: () => toggleKind(key) },
      swatch(`kind-${key}`),
      `${plan.kindNames[key]} `,
      element("span", { class: "quiet" }, words.join(", ")),
    );
    listeners.kinds.push(() => button.setAttribute("aria-pressed", String(!hidden.has(key))));
    return button;
  });
  const place = document.getElementById("kinds");
  if (switches.length) place.append(element("span", { class: "quiet" }, "At the peak:"), ...switches);
  for (const tier of plan.tiers.filter((tier) => tier.kinds.length === 0)) {
    const why = tier.key.startsWith("measured-") ? "a run tells how much is held, and not what" : "the plan names nothing that it holds";
    place.append(element("span", { class: "quiet" }, `${capital(tier.name)} memory is one curve: ${why}.`));
  }
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
  for (const id of ["keys", "zoom", "kinds"]) document.getElementById(id).hidden = true;
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
