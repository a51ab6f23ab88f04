// Keys, mouse and buttons; then the first drawing.
const PAN = 0.15, ZOOM = 1.5, CLICK = 4; // share of the view, factor, pixels
const readout = document.getElementById("readout");

function activate(node) {
  const [first, last] = [Number(node.dataset.task), Number(node.dataset.last)];
  if (first === last) select(first === selected ? null : first);
  else show(spans[first].start, spans[last].end);
}

/** To the instruction of the next stream above or below that is nearest in time. */
function changeLane(node, step) {
  const lanes = [...timeline.querySelectorAll("svg > [role=group]")];
  const from = spans[node.dataset.task].start;
  for (let row = lanes.indexOf(node.parentNode) + step; lanes[row]; row += step) {
    const nodes = [...lanes[row].querySelectorAll(".task")];
    const far = (other) => Math.abs(spans[other.dataset.task].start - from);
    if (nodes.length) return nodes.reduce((best, other) => (far(other) < far(best) ? other : best)).focus();
  }
}

/** The middle of the instruction that has the focus, which then stays in sight; undefined if none has. */
function focusedMoment() {
  const task = document.activeElement.dataset.task;
  return task === undefined ? undefined : (spans[task].start + spans[task].end) / 2;
}

const keys = {
  ArrowLeft: () => pan(-PAN),
  ArrowRight: () => pan(PAN),
  "+": () => zoom(ZOOM, focusedMoment()),
  "=": () => zoom(ZOOM, focusedMoment()),
  "-": () => zoom(1 / ZOOM, focusedMoment()),
  0: showAll,
};

timeline.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const node = event.target.closest(".task");
  const lane = { ArrowUp: -1, ArrowDown: 1 }[event.key];
  if (node && (event.key === "Enter" || event.key === " ")) activate(node);
  else if (node && lane) changeLane(node, lane);
  else if (keys[event.key]) keys[event.key]();
  else return;
  event.preventDefault();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (marked !== null) mark(null);
  if (selected !== null) select(null);
});

const pointerY = (event) => ((event.clientY - timeline.getBoundingClientRect().top) / timeline.clientWidth) * width;
const pointerX = (event) => ((event.clientX - timeline.getBoundingClientRect().left) / timeline.clientWidth) * width;

timeline.addEventListener(
  "wheel",
  (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    const out = event.deltaY > 0 && shown.to - shown.from >= duration * (1 - 1e-9);
    if (Math.abs(sideways) > Math.abs(event.deltaY) || event.shiftKey) pan(sideways / plotWidth());
    else if (out) return; // everything is shown already: the page may scroll
    else zoom(ZOOM ** (-event.deltaY / 100), toTime(pointerX(event)));
    event.preventDefault();
  },
  { passive: false },
);

let drag = null;
timeline.addEventListener("pointerdown", (event) => {
  if (event.button === 0) drag = { x: pointerX(event), from: shown.from, length: shown.to - shown.from, moved: false };
});
window.addEventListener("pointermove", (event) => {
  if (drag === null) return;
  const by = pointerX(event) - drag.x;
  drag.moved ||= Math.abs(by) > CLICK;
  if (!drag.moved) return;
  timeline.classList.add("dragging");
  const from = drag.from - (by / plotWidth()) * drag.length;
  show(from, from + drag.length);
});
window.addEventListener("pointerup", (event) => {
  const moved = drag?.moved;
  drag = null;
  timeline.classList.remove("dragging");
  const node = moved ? null : event.target.closest?.("#timeline .task");
  if (node && event.button === 0) activate(node);
});

timeline.addEventListener("pointermove", (event) => {
  const x = pointerX(event);
  if (x < LEFT || x > LEFT + plotWidth()) return tellView();
  const time = toTime(x);
  const tier = plan.tiers[Math.floor((pointerY(event) - lanesBottom()) / (TIER_HEAD + MEMORY))];
  const sizes = tier?.kinds.length
    ? [`${tier.name} ${formatBytes(bytesAt(tier, time))}: ${kindsAt(tier, time)}`]
    : plan.tiers.map((each) => `${each.name} ${formatBytes(bytesAt(each, time))}`);
  readout.textContent = [`at ${formatSeconds(time)}`, ...sizes].join(" · ");
});
timeline.addEventListener("pointerleave", tellView);

function tellView() {
  const all = shown.to - shown.from >= duration * (1 - 1e-9);
  const part = `${formatSeconds(shown.from)} to ${formatSeconds(shown.to)} of ${formatSeconds(plan.seconds)}`;
  readout.textContent = all ? "" : part;
}

document.getElementById("zoom-in").addEventListener("click", () => zoom(ZOOM));
document.getElementById("zoom-out").addEventListener("click", () => zoom(1 / ZOOM));
document.getElementById("zoom-all").addEventListener("click", showAll);

listeners.view.push(draw, tellView);
listeners.selection.push(drawSelection, drawInstruction);
listeners.marked.push(draw);
listeners.kinds.push(draw);
new ResizeObserver(() => {
  if (setWidth()) draw();
}).observe(timeline);
setWidth();
draw();
drawKinds();
drawInstruction();
drawModules();
drawReasons();
drawAll();
drawMissing();
