// What is shown, and which instruction is selected. Whoever draws listens.
const listeners = { view: [], selection: [], marked: [], kinds: [] };
const tell = (what) => listeners[what].forEach((listener) => listener());
const duration = Math.max(plan.seconds, 1e-9);
const shown = { from: 0, to: duration };
let selected = null;
let marked = null;
const hidden = new Set(); // kinds of memory

/** The kinds of a tier's memory that are drawn, the lowest first. */
const kindsOf = (tier) => tier.kinds.filter((kind) => !hidden.has(kind.key));
const isComplete = (tier) => kindsOf(tier).length === tier.kinds.length;

function toggleKind(key) {
  if (!hidden.delete(key)) hidden.add(key);
  tell("kinds");
}

function show(from, to) {
  const length = Math.min(Math.max(to - from, duration * 1e-5), duration);
  shown.from = Math.min(Math.max(from, 0), duration - length);
  shown.to = shown.from + length;
  tell("view");
}

/** `factor` above 1 comes nearer; the moment `at` stays where it is. */
function zoom(factor, at = (shown.from + shown.to) / 2) {
  show(at - (at - shown.from) / factor, at + (shown.to - at) / factor);
}

function pan(share) {
  const by = share * (shown.to - shown.from);
  show(shown.from + by, shown.to + by);
}

const showAll = () => show(0, duration);

function select(task) {
  selected = task;
  tell("selection");
  document.getElementById("status").textContent = task === null ? "Nothing is selected." : spokenOf(spans[task]);
}

/** Selects, and moves to it if it is out of sight or too short to see. */
function reveal(task) {
  const span = spans[task];
  const length = shown.to - shown.from;
  const small = span.end - span.start < length / 100;
  if (span.start < shown.from || span.end > shown.to || small) {
    const around = small ? Math.max((span.end - span.start) * 25, duration * 1e-5) : length;
    const middle = (span.start + span.end) / 2;
    show(middle - around / 2, middle + around / 2);
  }
  select(task);
}

function mark(paths) {
  marked = paths;
  tell("marked");
}

const isMarked = (span) => {
  if (marked === null) return true;
  return marked.some((path) => span.module === path || (path !== "" && span.module.startsWith(`${path}.`)));
};

function spokenOf(span) {
  const held = heldDuring(span.task);
  return `${span.name} is selected. ${plural(held.length, "tensor")} held, ${formatBytes(bytesOf(held))}.`;
}
