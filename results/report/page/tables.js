/* What is told rather than drawn: points as a list, rejections, where numbers come from. */

const LISTED = 200;

function startTables() {
  listeners.push((changes) => {
    if ("shown" in changes || "x" in changes || "y" in changes) drawList();
  });
  drawRejections();
  drawSources();
}

function drawList() {
  const names = [...new Set([...data.objectives.map((one) => one.name), state.x, state.y])];
  const first = columns.get(names[0]);
  const rows = [...state.shown].sort((p, q) => first.number(p) - first.number(q)).slice(0, LISTED);
  const cells = rows.map((row) => [
    nameOf(row), ...names.map((name) => shownValue(name, columns.get(name).at(row))), { text: told(row).slice(0, 4).join("; ") },
    element("button", { type: "button", onclick: () => choose(row, false) }, "A"),
    element("button", { type: "button", onclick: () => choose(row, true) }, "B"),
  ]);
  const more = state.shown.length > LISTED ? element("p", { class: "note" }, `the first ${LISTED} of ${state.shown.length}`) : null;
  clear(document.getElementById("list"), table(["id", ...names.map(words), { text: "configuration" }, "", ""], cells), more);
}

function drawRejections() {
  const place = document.getElementById("rejected");
  const total = data.rejections.reduce((sum, one) => sum + one.count, 0);
  const most = Math.max(...data.rejections.map((one) => one.count), 1);
  const rows = [...data.rejections].sort((p, q) => q.count - p.count).map((one) => [
    { text: words(one.rule) }, one.count.toLocaleString("en"), percent(one.count / total), { bar: bar(0, Math.log1p(one.count) / Math.log1p(most), "#777") }, { text: one.example },
  ]);
  const near = data.closest.map((one) => [{ text: one.configuration }, gib(one.device_memory_bytes), gib(one.short_by_bytes), { text: one.remedy }]);
  clear(place, element("p", {}, data.counts),
    rows.length ? element("div", { class: "scroll", tabindex: 0 }, table([{ text: "rule" }, "rejected", "share", { bar: "log of it" }, { text: "for example" }], rows)) : element("p", {}, "nothing was rejected by a rule"),
    element("h3", {}, "Closest to feasible"), element("p", { class: "note" }, data.closest_note),
    near.length ? element("div", { class: "scroll", tabindex: 0 }, table([{ text: "configuration" }, "needs", "too much", { text: "what would help" }], near)) : null);
}

function drawSources() {
  clear(document.getElementById("sources"), ...data.provenance.map(([head, pairs]) =>
    element("details", { open: pairs.length <= 8 }, element("summary", {}, head),
      element("dl", {}, ...pairs.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)])))));
}
