// Tables: modules with repeated layers collapsed, reasons, and all instructions.
/** A column whose title starts with # has numbers. */
function dataTable(caption, columns, rows) {
  const titles = columns.map((title) =>
    element("th", { scope: "col", class: title.startsWith("#") ? "number" : null }, title.replace("#", "")),
  );
  // With their roles, since a narrow screen shows rows as blocks, which some browsers then take for no table.
  return element(
    "table",
    { role: "table" },
    element("caption", {}, caption),
    element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...titles)),
    element("tbody", { role: "rowgroup" }, ...rows),
  );
}

/** A row of a table with these columns, whose cells know their titles: on a narrow screen they stand beside them. */
function titled(columns, ...cells) {
  cells.forEach((cell, i) => {
    cell.setAttribute("role", cell.tagName === "TH" ? "rowheader" : "cell");
    if (i) cell.dataset.title = columns[i].replace("#", "");
    if (cell.textContent === "–") cell.classList.add("none");
  });
  return element("tr", { role: "row" }, ...cells);
}

const toggleButton = () => element("button", { type: "button", class: "toggle", "aria-expanded": "false" }, "▸");

/** Lets `toggle` show and hide what is in a row, the rows of a higher level below it; `inside` makes them. */
function opens(toggle, row, what, inside) {
  toggle.setAttribute("aria-label", `What is in ${what}`);
  toggle.addEventListener("click", () => {
    const open = toggle.getAttribute("aria-expanded") === "false";
    toggle.setAttribute("aria-expanded", String(open));
    toggle.textContent = open ? "▾" : "▸";
    if (open) row.after(...inside());
    else while (Number(row.nextElementSibling?.dataset.level ?? -1) > Number(row.dataset.level)) row.nextElementSibling.remove();
  });
}

const amount = (value, format) => element("td", { class: "number" }, value ? format(value) : "–");

function moduleName(module) {
  const label = text(module.label);
  if (label === "") return "of no module";
  return module.paths.length > 1 ? `${label.replaceAll("-", " to ")} (${module.paths.length} alike)` : label;
}

const MODULES = ["Module", "#Compute", "#Collectives", "#Transfers, updates", "#Most held", "Source", "Why it is here"];

/** A row, and the function that shows or hides the rows below it. */
function moduleRow(module, level) {
  const paths = module.paths.map(text);
  const toggle = module.children ? toggleButton() : element("span", { class: "toggle-space" });
  const name = element("button", { type: "button", class: "link code", "aria-pressed": "false" }, moduleName(module));
  name.addEventListener("click", () => mark(name.getAttribute("aria-pressed") === "true" ? null : paths));
  listeners.marked.push(() => name.setAttribute("aria-pressed", String(marked === paths)));
  const head = element("th", { scope: "row", style: `padding-left:${level * 22}px` }, toggle, name);
  const [compute, communication, other] = module.seconds;
  const row = titled(
    MODULES,
    head,
    amount(compute, formatSeconds),
    amount(communication, formatSeconds),
    amount(other, formatSeconds),
    amount(module.bytes, formatBytes),
    element("td", { class: "code" }, shortSource(text(module.source)) || "–"),
    element("td", {}, text(module.why) || "–"),
  );
  row.dataset.level = level;
  if (module.children) opens(toggle, row, moduleName(module), () => module.children.map((child) => moduleRow(child, level + 1)));
  return row;
}

/** Opens what says nothing while it is closed: a module alone, or with one part; and goes on inside, down to layers. */
function openSingle(row, module, alone) {
  if (!module.children || module.paths.length > 1 || !(alone || module.children.length === 1)) return;
  row.querySelector(".toggle").click();
  if (module.children.length === 1) openSingle(row.nextElementSibling, module.children[0], true);
}

function drawModules() {
  const place = document.getElementById("modules");
  if (plan.modules.length === 0) {
    place.append(element("p", { class: "quiet" }, "The plan names no modules."));
    return;
  }
  const rows = plan.modules.map((module) => moduleRow(module, 0));
  place.append(dataTable("Repeated layers are one row. A module's name marks its instructions in the timeline.", MODULES, rows));
  const named = plan.modules.filter((module) => text(module.label) !== "");
  named.forEach((module, i) => openSingle(rows[i], module, named.length === 1));
}

const REASONS = ["Subject", "Decision", "Why"];

/** Subjects in few words: layers that follow one another as one. */
function allOf(subjects) {
  const numbers = subjects.map((subject) => Number(/\d+/.exec(subject)?.[0]));
  const follow = subjects.every((subject, i) => !i || (starred(subject) === starred(subjects[0]) && numbers[i] === numbers[i - 1] + 1));
  if (subjects.length > 2 && follow) return `${subjects[0]} to ${subjects.at(-1)} (${subjects.length} alike)`;
  return subjects.slice(0, 3).join(", ") + (subjects.length > 3 ? ` and ${subjects.length - 3} more` : "");
}

function drawReasons() {
  const groups = new Map();
  for (const [subject, decision, why] of plan.reasons) {
    const key = JSON.stringify([decision, why]);
    groups.set(key, [...(groups.get(key) ?? []), subject]);
  }
  const rows = [...groups].map(([key, subjects]) => {
    const [decision, why] = JSON.parse(key);
    return titled(
      REASONS,
      element("th", { scope: "row", class: "code" }, allOf([...new Set(subjects)])),
      element("td", {}, decision),
      element("td", {}, why),
    );
  });
  const none = element("p", { class: "quiet" }, "The plan gives no reasons.");
  document
    .getElementById("reasons")
    .append(rows.length ? dataTable("Most important first", REASONS, rows) : none);
}

const INSTRUCTIONS = ["Instruction", "#Task", "Stream", "#Starts", "#Lasts", "Module", "Source"];

function instructionRow(span, level) {
  const row = titled(
    INSTRUCTIONS,
    element("th", { scope: "row", style: indent(level) }, taskLink(span.task)),
    element("td", { class: "number" }, String(span.task)),
    element("td", {}, swatch(span.stream), streamName[span.stream]),
    element("td", { class: "number" }, formatSeconds(span.start)),
    element("td", { class: "number" }, formatSeconds(span.end - span.start)),
    element("td", { class: "code" }, span.module || "–"),
    element("td", { class: "code" }, shortSource(span.source) || "–"),
  );
  row.dataset.level = level;
  return row;
}

const indent = (level) => `padding-left:${level * 22}px`;
const LEAST = 3, LONGEST_LAYER = 64; // so often it repeats, and so many instructions are looked at for one
const withoutLayers = (name) => name.replace(/(?<!\w)\d+(?!\w)/g, "#");
const sameAs = (span) => JSON.stringify([withoutLayers(span.name), span.stream, formatSeconds(span.end - span.start), withoutLayers(span.module)]);

/** Instructions in program order, where those of layers that differ in nothing but their numbers are taken together. */
function repeats(all) {
  const keys = all.map(sameAs), found = [];
  for (let first = 0; first < keys.length; ) {
    let run = { first, period: 1, times: 1 };
    for (let period = 1; period <= LONGEST_LAYER && first + LEAST * period <= keys.length; period++) {
      let end = first + period;
      while (end < keys.length && keys[end] === keys[end - period]) end++;
      const times = Math.floor((end - first) / period);
      if (times >= LEAST && times * period > run.times * run.period) run = { first, period, times };
    }
    found.push(run);
    first += run.period * run.times;
  }
  return found;
}

/** Rows of one repetition each; of a single instruction that repeats, itself. */
function runRow({ first, period, times }) {
  const of = (turn) => spans.slice(first + turn * period, first + (turn + 1) * period);
  const main = (turn) => of(turn).find((span) => span.stream === "compute") ?? of(turn)[0];
  const shared = main(0).name.slice(0, main(0).name.lastIndexOf(" ") + 1);
  const label = `${main(0).name} to ${main(times - 1).name.replace(shared, "")} (${times} alike)`;
  const turns = () =>
    Array.from({ length: times }, (_, turn) =>
      period === 1
        ? instructionRow(of(turn)[0], 1)
        : collapsedRow(main(turn).name, of(turn), 1, () => of(turn).map((span) => instructionRow(span, 2))),
    );
  return collapsedRow(label, spans.slice(first, first + times * period), 0, turns, period);
}

/** One row for `all` of these; `inside` makes those below it, when they are first asked for. */
function collapsedRow(label, all, level, inside, period = all.length) {
  const toggle = toggleButton();
  const begin = Math.min(...all.map((span) => span.start)), end = Math.max(...all.map((span) => span.end));
  const of = (what) => new Set(all.map(what)).size === 1 ? what(all[0]) : "";
  const row = titled(
    INSTRUCTIONS,
    element("th", { scope: "row", style: indent(level) }, toggle, label),
    element("td", { class: "number" }, `${all[0].task} to ${all.at(-1).task}`),
    element("td", {}, period === 1 ? streamName[all[0].stream] : `${period} instructions${level ? "" : " each"}`),
    element("td", { class: "number" }, formatSeconds(begin)),
    element("td", { class: "number" }, formatSeconds(end - begin)),
    element("td", { class: "code" }, of((span) => starred(span.module)) || "–"),
    element("td", { class: "code" }, of((span) => shortSource(span.source)) || "–"),
  );
  row.dataset.level = level;
  opens(toggle, row, label, inside);
  return row;
}

/** Closed at first: hundreds of rows that only some people want. */
function drawAll() {
  const place = document.getElementById("all");
  if (spans.length === 0) {
    place.append(element("p", { class: "quiet" }, "This plan has no instructions."));
    return;
  }
  const open = element("summary", {}, `${plural(spans.length, "instruction")} in program order`);
  const details = element("details", {}, open);
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const rows = repeats(spans).flatMap((run) => (run.times === 1 ? [instructionRow(spans[run.first], 0)] : [runRow(run)]));
    details.append(dataTable("Choose one to see what is held. What repeats, layer by layer, is one row.", INSTRUCTIONS, rows));
  });
  place.append(details);
}

function drawMissing() {
  const items = plan.notCounted.map((what) => element("li", {}, what));
  const none = element("p", { class: "quiet" }, "Nothing that is known.");
  document.getElementById("missing").append(items.length ? element("ul", {}, ...items) : none);
}
