// Tables: modules with repeated layers folded, reasons, and all instructions.
/** A column whose title starts with # has numbers. */
function dataTable(caption, columns, rows) {
  const titles = columns.map((title) =>
    element("th", { scope: "col", class: title.startsWith("#") ? "number" : null }, title.replace("#", "")),
  );
  return element(
    "table",
    {},
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...titles)),
    element("tbody", {}, ...rows),
  );
}

const amount = (value, format) => element("td", { class: "number" }, value ? format(value) : "–");

function moduleName(module) {
  const label = text(module.label);
  if (label === "") return "of no module";
  return module.paths.length > 1 ? `${label.replaceAll("-", "–")}  ×${module.paths.length}` : label;
}

/** A row, and the function that shows or hides the rows below it. */
function moduleRow(module, level) {
  const paths = module.paths.map(text);
  const toggle = module.children
    ? element("button", { type: "button", class: "fold", "aria-expanded": "false" }, "▸")
    : element("span", { class: "fold-space" });
  const name = element("button", { type: "button", class: "link code", "aria-pressed": "false" }, moduleName(module));
  name.addEventListener("click", () => mark(name.getAttribute("aria-pressed") === "true" ? null : paths));
  listeners.marked.push(() => name.setAttribute("aria-pressed", String(marked === paths)));
  const head = element("th", { scope: "row", style: `padding-left:${level * 22}px` }, toggle, name);
  const [compute, communication, other] = module.seconds;
  const row = element(
    "tr",
    { "data-level": level },
    head,
    amount(compute, formatSeconds),
    amount(communication, formatSeconds),
    amount(other, formatSeconds),
    amount(module.bytes, formatBytes),
    element("td", { class: "code" }, shortSource(text(module.source)) || "–"),
    element("td", {}, text(module.why) || "–"),
  );
  if (module.children) {
    toggle.setAttribute("aria-label", `What is in ${moduleName(module)}`);
    toggle.addEventListener("click", () => fold(row, toggle, module.children, level));
  }
  return row;
}

function fold(row, toggle, children, level) {
  const opens = toggle.getAttribute("aria-expanded") === "false";
  toggle.setAttribute("aria-expanded", String(opens));
  toggle.textContent = opens ? "▾" : "▸";
  if (opens) row.after(...children.map((child) => moduleRow(child, level + 1)));
  else while (Number(row.nextElementSibling?.dataset.level ?? -1) > level) row.nextElementSibling.remove();
}

/** Opens a module that has no neighbours, which says nothing while it is closed, and goes on inside, down to layers. */
function openSingle(row, [module, ...neighbours]) {
  if (neighbours.length || !module?.children || module.paths.length > 1) return;
  row.querySelector(".fold").click();
  openSingle(row.nextElementSibling, module.children);
}

function drawModules() {
  const place = document.getElementById("modules");
  if (plan.modules.length === 0) {
    place.append(element("p", { class: "quiet" }, "The plan names no modules."));
    return;
  }
  const rows = plan.modules.map((module) => moduleRow(module, 0));
  const columns = ["Module", "#Compute", "#Collectives", "#Transfers, updates", "#Most held", "Source", "Why it is here"];
  place.append(dataTable("Repeated layers are one row. A module's name marks its instructions in the timeline.", columns, rows));
  openSingle(rows[0], plan.modules.filter((module) => text(module.label) !== ""));
}

function drawReasons() {
  const groups = new Map();
  for (const [subject, decision, why] of plan.reasons) {
    const key = JSON.stringify([decision, why]);
    groups.set(key, [...(groups.get(key) ?? []), subject]);
  }
  const rows = [...groups].map(([key, subjects]) => {
    const [decision, why] = JSON.parse(key);
    const more = subjects.length > 3 ? ` and ${subjects.length - 3} more` : "";
    return element(
      "tr",
      {},
      element("th", { scope: "row", class: "code" }, subjects.slice(0, 3).join(", ") + more),
      element("td", {}, decision),
      element("td", {}, why),
    );
  });
  const none = element("p", { class: "quiet" }, "The plan gives no reasons.");
  document
    .getElementById("reasons")
    .append(rows.length ? dataTable("Most important first", ["Subject", "Decision", "Why"], rows) : none);
}

function instructionRow(span) {
  return element(
    "tr",
    {},
    element("td", { class: "number" }, String(span.task)),
    element("th", { scope: "row" }, taskLink(span.task)),
    element("td", {}, swatch(span.stream), streamName[span.stream]),
    element("td", { class: "number" }, formatSeconds(span.start)),
    element("td", { class: "number" }, formatSeconds(span.end - span.start)),
    element("td", { class: "code" }, span.module || "–"),
    element("td", { class: "code" }, shortSource(span.source) || "–"),
  );
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
    const columns = ["#Task", "Instruction", "Stream", "#Starts", "#Lasts", "Module", "Source"];
    details.append(dataTable("Choose one to see what is held", columns, spans.map(instructionRow)));
  });
  place.append(details);
}

function drawMissing() {
  const items = plan.notCounted.map((what) => element("li", {}, what));
  const none = element("p", { class: "quiet" }, "Nothing that is known.");
  document.getElementById("missing").append(items.length ? element("ul", {}, ...items) : none);
}
