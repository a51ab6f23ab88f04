// The plan, elements, and how bytes and seconds are written: as zerograph.core.units and labels.py write them.
const plan = JSON.parse(document.getElementById("data").textContent);
const text = (place) => plan.texts[place];
const spans = plan.spans.start.map((start, task) => ({
  task,
  start,
  end: plan.spans.end[task],
  name: text(plan.spans.name[task]),
  stream: text(plan.spans.stream[task]),
  module: text(plan.spans.module[task]),
  source: text(plan.spans.source[task]),
  after: plan.spans.after[task],
  before: [],
  critical: false,
}));
for (const span of spans) for (const task of span.after) spans[task].before.push(span.task);
for (const task of plan.critical) spans[task].critical = true;
const streamName = Object.fromEntries(plan.streams.map((stream) => [stream.key, stream.name]));
const tiers = Object.keys(plan.tierNames);
for (const tier of plan.tiers) {
  for (const kind of tier.kinds) kind.levels = everywhere(kind, tier.times.length);
}

const holdings = plan.holdings.bytes.map((bytes, i) => ({
  bytes,
  name: text(plan.holdings.name[i]),
  kind: text(plan.holdings.kind[i]),
  tier: text(plan.holdings.tier[i]),
  first: plan.holdings.first[i],
  last: plan.holdings.last[i],
  module: text(plan.holdings.module[i]),
  source: text(plan.holdings.source[i]),
}));

/** Values listed where they change, at each of so many moments. */
function everywhere({ at, bytes }, moments) {
  const levels = [];
  at.forEach((from, i) => {
    for (let moment = from; moment < (at[i + 1] ?? moments); moment++) levels.push(bytes[i]);
  });
  return levels;
}

// In time, not in program order: what a later gather brings early is held early.
const heldAt = (h, time) =>
  (h.first === -1 || spans[h.first].start <= time) && (h.last === -1 || time < spans[h.last].end);
const isMeasured = (task) => task >= plan.planned; // a run tells how much is held, and not what
const heldDuring = (task) =>
  isMeasured(task) ? [] : holdings.filter((h) => task === h.first || task === h.last || heldAt(h, spans[task].start));

const digits = (number) => (Math.abs(number) < 999.5 ? String(Number(number.toPrecision(3))) : number.toFixed(0));

function formatSeconds(seconds) {
  if (seconds === 0) return "0 s";
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) {
    if (Math.abs(seconds) >= 0.9995 * scale) return `${digits(seconds / scale)} ${unit}`;
  }
  return `${digits(seconds / 1e-9)} ns`;
}

function formatBytes(size) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (Math.abs(size) < 1024) return `${digits(size)} ${unit}`;
    size /= 1024;
  }
  return `${digits(size)} TiB`;
}

const shortened = (name, most) =>
  name.length <= most ? name : `${name.slice(0, most / 2)}…${name.slice(1 - most / 2)}`;

/** A source line without the folders that all of a project's files share. */
const shortSource = (source) => source.split("/").slice(-2).join("/");

const plural = (count, what) => `${count} ${what}${count === 1 ? "" : "s"}`;

const capital = (word) => word[0].toUpperCase() + word.slice(1);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children); // texts become text nodes: nothing in a name is ever read as markup
  return node;
}

const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const drawn = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
