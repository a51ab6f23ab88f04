// The selected instruction: when it runs, what it waits for, and every tensor held then.
const COLLAPSED = 4; // so many tensors alike are one row
const instruction = document.getElementById("instruction");

const swatch = (colour) => element("i", { class: "swatch", style: `background:var(--${colour})`, "aria-hidden": true });
const taskLink = (task) =>
  element("button", { type: "button", class: "link", onclick: () => reveal(task) }, spans[task].name);

function facts(rows) {
  const list = element("dl", { class: "facts" });
  for (const [name, ...what] of rows) list.append(element("dt", {}, name), element("dd", {}, ...what));
  return list;
}

const taskList = (tasks) => element("ul", { class: "plain" }, ...tasks.map((task) => element("li", {}, taskLink(task))));

const momentAt = (tier, time) => Math.max(tier.times.findLastIndex((moment) => moment <= time), 0);
const bytesAt = (tier, time) => tier.bytes[momentAt(tier, time)];

/** What of a tier's memory is of which kind, the most first. */
function kindsAt(tier, time) {
  const at = momentAt(tier, time);
  const sizes = kindsOf(tier).map((kind) => [kind.levels[at], plan.kindNames[kind.key]]).filter(([size]) => size > 0);
  return sizes.sort(([a], [b]) => b - a).map(([size, name]) => `${name} ${formatBytes(size)}`).join(", ");
}

function spanFacts(span) {
  const rows = [
    ["Stream", swatch(span.stream), streamName[span.stream]],
    ["Runs", `${formatSeconds(span.start)} to ${formatSeconds(span.end)}, for ${formatSeconds(span.end - span.start)}`],
    ["Module", element("span", { class: "code" }, span.module || "none")],
    ["Source", element("span", { class: "code" }, span.source || "unknown")],
  ];
  if (!isMeasured(span.task)) rows.push(["Critical path", span.critical ? "yes: its delay delays the step" : "no"]);
  for (const tier of plan.tiers) rows.push([`${capital(tier.name)} memory`, formatBytes(bytesAt(tier, span.start))]);
  if (span.after.length) rows.push(["Waits for", taskList(span.after)]);
  if (span.before.length) rows.push(["Waited for by", taskList(span.before)]);
  return facts(rows);
}

const momentOf = (task, never) => (task === -1 ? never : spans[task].name);
const whenHeld = ({ first, last }) =>
  `${momentOf(first, "before the step")} → ${momentOf(last, "after the step")}`;

function heldRow(holding, most, ...before) {
  const share = element("span", { class: "share", "aria-hidden": true });
  const part = `width:${(100 * holding.bytes) / most}%;background:var(--kind-${holding.kind})`;
  share.append(element("i", { style: part }));
  return titled(
    HELD,
    element(
      "th",
      { scope: "row", class: "code" },
      ...before,
      holding.name,
      element("span", { class: "quiet from" }, [holding.module, shortSource(holding.source)].filter(Boolean).join(" · ")),
    ),
    element("td", {}, swatch(`kind-${holding.kind}`), plan.kindNames[holding.kind]),
    ...(tiersHeld.size > 1 ? [element("td", {}, swatch(`tier-${holding.tier}`), plan.tierNames[holding.tier])] : []),
    element("td", { class: "number" }, formatBytes(holding.bytes), share),
    element("td", {}, holding.when ?? whenHeld(holding)),
  );
}

const tiersHeld = new Set(holdings.map((holding) => holding.tier));
const HELD = ["Held", "Kind", ...(tiersHeld.size > 1 ? ["Tier"] : []), "#Bytes", "From → until"];
const starred = (name) => name.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

/** The same tensors of repeated layers, whose numbers and nodes' numbers differ: lists of one or of at least COLLAPSED. */
function alike(held) {
  const groups = new Map();
  for (const holding of held) {
    const pattern = starred(holding.name).replace(/_\d+$/, "_*");
    const { kind, tier, bytes, module, source } = holding;
    const key = JSON.stringify([pattern.replace("_*", ""), kind, tier, bytes, starred(module), source]);
    groups.set(key, [...(groups.get(key) ?? []), { ...holding, pattern }]);
  }
  return [...groups.values()].flatMap((group) => (group.length < COLLAPSED ? group.map((one) => [one]) : [group]));
}

const bytesOf = (held) => held.reduce((sum, holding) => sum + holding.bytes, 0);

function groupRow(group, most) {
  const { pattern, kind, tier, module, source } = group.at(-1); // the first node of a name has no number
  const toggle = toggleButton();
  const name = `${pattern}  ×${group.length}`;
  const times = new Set(group.map(whenHeld));
  const when = times.size === 1 ? whenHeld(group[0]) : "each its own time";
  const all = { name, kind, tier, bytes: bytesOf(group), when, module: starred(module), source };
  const row = heldRow(all, most, toggle);
  row.dataset.level = 0;
  opens(toggle, row, `each of ${group.length} ${pattern}`, () =>
    group.map((holding) => {
      const one = heldRow(holding, most, element("span", { class: "toggle-space" }));
      one.dataset.level = 1;
      return one;
    }),
  );
  return row;
}

function heldTable(span) {
  const held = heldDuring(span.task);
  const nothing = isMeasured(span.task) ? "A run tells how much is held, and not what." : "The plan names nothing that is held here.";
  if (held.length === 0) return element("p", { class: "quiet" }, nothing);
  const sums = tiers
    .map((tier) => [tier, bytesOf(held.filter((holding) => holding.tier === tier))])
    .filter(([, size]) => size > 0)
    .map(([tier, size]) => `${formatBytes(size)} on ${plan.tierNames[tier]}`);
  const groups = alike(held).sort((a, b) => bytesOf(b) - bytesOf(a));
  const most = Math.max(bytesOf(groups[0]), 1);
  return dataTable(
    `${plural(held.length, "tensor")} held: ${sums.join(", ")}`,
    HELD,
    groups.map((group) => (group.length === 1 ? heldRow(group[0], most) : groupRow(group, most))),
  );
}

function drawInstruction() {
  if (selected === null) {
    instruction.replaceChildren(element("h2", { id: "instruction-title" }, "Instruction"), invitation());
    return;
  }
  const span = spans[selected];
  const clear = element("button", { type: "button", onclick: () => select(null) }, "Clear");
  const head = element("div", { class: "bar" }, element("h2", { id: "instruction-title" }, span.name), clear);
  const table = element("div", { class: "wide" }, heldTable(span));
  instruction.replaceChildren(head, element("div", { class: "columns" }, spanFacts(span), table));
}

/** What stands there while nothing is selected: where to begin. */
function invitation() {
  if (spans.length === 0) return element("p", { class: "quiet" }, "There is nothing to select.");
  const peaks = plan.tiers.filter((tier) => tier.peak.task >= 0);
  const line = element("p", { class: "quiet" }, "Select an instruction in the timeline to see every tensor held while it runs");
  peaks.forEach((tier, i) => line.append(i ? ", or " : "; the peak of ", `${i ? "of " : ""}${tier.name} memory is at `, taskLink(tier.peak.task)));
  line.append(".");
  return line;
}
