/* The chosen point, alone or beside a second one: where its time goes, what fills its stages, how it would shift. */

const NOISE = 1e-7; // of a step: what is left of columns that are kept to seven digits

function startPoint() {
  listeners.push((changes) => {
    if ("a" in changes || "b" in changes) drawPoint();
  });
}

function drawPoint() {
  const chosen = [["a", state.a], ["b", state.b]].filter(([, row]) => row >= 0);
  clear(document.getElementById("chosen"), ...chosen.map(([letter, row]) => card(letter, row)),
    state.b >= 0 ? differences(state.a, state.b) : null,
    chosen.length ? null : element("p", {}, "no point is chosen: click one in the picture of the front"));
  clear(document.getElementById("waterfall"), ...(chosen.length ? [waterfall(state.a, state.b)] : []));
  drawStages();
  drawPipeline();
  drawRanks();
  drawSensitivity();
}

function card(letter, row) {
  const ring = isReference(row) ? nameOf(row) : `id ${nameOf(row)}`;
  const step = columns.get(data.whole.name).at(row);
  const [low, high] = data.whole.band.map((name) => columns.get(name)?.at(row));
  const band = Number.isFinite(low) ? ` (P10 ${seconds(low)}, P90 ${seconds(high)})` : "";
  const memory = ["peak_memory_bytes", "device_memory_bytes"].map((name) => `${words(name)} ${shownValue(name, columns.get(name).at(row))}`);
  return element("div", { class: `card ${letter}` },
    element("p", {}, element("span", { class: `badge ${letter}` }, letter.toUpperCase()), " ", element("strong", {}, ring), `: ${seconds(step)} ${data.whole.each}${band}; ${memory.join(", ")}`),
    element("p", {}, told(row).join("; ")),
    element("p", {}, `why: ${whyOnFront(row).join("; ")}`),
    element("code", {}, `${data.command} ${data.run}:${nameOf(row)}`));
}

/** What is not the same in two configurations. */
function differences(a, b) {
  const names = ["system", "num_gpus", ...data.strategy, "num_micro_batches"].filter((name) => columns.has(name));
  const rows = names.filter((name) => columns.get(name).at(a) !== columns.get(name).at(b))
    .map((name) => [words(name), { text: shownValue(name, columns.get(name).at(a)) }, { text: shownValue(name, columns.get(name).at(b)) }]);
  const [x, y] = [a, b].map(columns.get(data.whole.name).number);
  const head = x === y ? "B takes as long as A" : `B is ${percent(Math.abs(y - x) / x)} ${y < x ? "faster" : "slower"} than A`;
  const more = columns.get("device_memory_bytes").number(b) - columns.get("device_memory_bytes").number(a);
  const memory = more ? `with ${gib(Math.abs(more))} ${more > 0 ? "more" : "less"} memory` : "with equal memory";
  return element("div", { id: "compare" }, element("p", {}, element("strong", {}, `${head}, ${memory}`)),
    rows.length ? element("div", { class: "scroll" }, table(["what differs", { text: "A" }, { text: "B" }], rows)) : null);
}

function waterfall(a, b) {
  const terms = (row) => data.terms.map((name) => columns.get(name)?.number(row) ?? 0);
  const step = columns.get(data.whole.name).number;
  const whole = b < 0 ? step(a) : Math.max(step(a), step(b));
  const [mine, other] = [terms(a), b < 0 ? null : terms(b)];
  const matters = data.terms.map((_, i) => Math.max(Math.abs(mine[i]), Math.abs(other ? other[i] : 0)) > NOISE * whole);
  let start = 0;
  const rows = [];
  const widest = other ? Math.max(...mine.map((value, i) => Math.abs(other[i] - value)), 1e-30) : 1;
  data.terms.forEach((name, i) => {
    const end = start + mine[i];
    if (matters[i]) {
      const kind = HUES[name.startsWith("exposed") || name === "optimizer_comm_s" ? 1 : name === "bubble_s" ? 5 : ["forward_s", "backward_s", "recompute_s", "optimizer_s", "compute_s"].includes(name) ? 0 : 3];
      rows.push(other
        ? [words(name), seconds(mine[i]), seconds(other[i]), signed(clean(other[i] - mine[i], whole), seconds), { bar: bar(0.5, 0.5 + (other[i] - mine[i]) / widest / 2, other[i] > mine[i] ? MORE : LESS) }]
        : [words(name), seconds(mine[i]), percent(mine[i] / whole), { bar: bar(start / whole, end / whole, kind, `${words(name)} ${seconds(mine[i])}`) }]);
    }
    start = end;
  });
  const total = other
    ? [words(data.whole.name), seconds(step(a)), seconds(step(b)), signed(step(b) - step(a), seconds), ""]
    : [words(data.whole.name), seconds(step(a)), "100 %", { bar: bar(0, 1, "#888") }];
  rows.push(total);
  const header = other ? ["term", "A", "B", "B − A", ""] : ["term", "time", "share", ""];
  return table(header, rows, (i) => (i === rows.length - 1 ? "sum" : ""));
}

const clean = (value, whole) => (Math.abs(value) <= NOISE * whole ? 0 : value);

/* ---------------------------------------------------------------------------------------------------------- stages */

let stage = -1;

const itemHue = (item) => data.items[item];

const heldBytes = (one) => Object.values(one.memory).reduce((sum, bytes) => sum + bytes, 0);

function detailNote(row) {
  const known = data.details.map((detail) => nameOf(detail.row));
  return element("p", { class: "note" }, `stages are in this page for ${known.slice(0, 12).join(", ")}${known.length > 12 ? ` and ${known.length - 12} more` : ""}; of ${nameOf(row)} they are told by`,
    element("code", {}, `${data.command} ${data.run}:${nameOf(row)}`));
}

function drawStages() {
  const place = document.getElementById("stages");
  const detail = state.a >= 0 ? detailOf(state.a) : null;
  clear(document.getElementById("treemap"));
  if (state.a < 0) return clear(place);
  if (!detail) return clear(place, detailNote(state.a));
  const held = detail.stages.map(heldBytes);
  stage = held.indexOf(Math.max(...held));
  const pick = element("select", { id: "stage", onchange: (event) => { stage = Number(event.target.value); drawTreemap(detail); markStage(); } },
    ...detail.stages.map((one, i) => element("option", { value: i, selected: i === stage }, `stage ${one.rank}: layers ${one.layers.join(" + ")}, ${gib(held[i])}`)));
  const note = element("p", { class: "note" }, `allocated by item; the line is what a plan may fill (${gib(detail.usable_bytes)}, before the allocator's and the driver's share)`);
  clear(place, note, stageBars(detail, held), element("label", {}, "stage in full", pick));
  drawTreemap(detail);
  markStage();
  return place;
}

/** A bar a stage, items on top of each other, and below it what a micro-batch takes. */
function stageBars(detail, held) {
  const [width, height] = [Math.max(document.getElementById("stages").clientWidth, 280), 190];
  const most = Math.max(detail.usable_bytes, ...held);
  const longest = Math.max(...detail.stages.map((one) => one.forward_s + one.backward_s));
  const gap = (width - 46) / detail.stages.length;
  const drawn = svg("svg", { width, height: height + 64, role: "img", "aria-label": "memory and seconds by stage" });
  detail.stages.forEach((one, i) => {
    const group = svg("g", { class: "stagebar", "data-stage": i, onclick: () => { document.getElementById("stage").value = i; document.getElementById("stage").dispatchEvent(new Event("change")); } });
    let top = height;
    for (const [item, bytes] of Object.entries(one.memory)) {
      const tall = (bytes / most) * (height - 10);
      top -= tall;
      group.append(svg("rect", { x: 44 + i * gap + gap * 0.1, y: top, width: gap * 0.8, height: tall, fill: itemHue(item), stroke: "#fff", "stroke-width": 0.5 }, svg("title", {}, `stage ${one.rank}, ${words(item)}: ${gib(bytes)}`)));
    }
    const busy = one.forward_s + one.backward_s;
    group.append(svg("rect", { x: 44 + i * gap + gap * 0.1, y: height + 6, width: gap * 0.8, height: 34 * (busy / longest), fill: "#777" }, svg("title", {}, `stage ${one.rank}: ${seconds(one.forward_s)} forward, ${seconds(one.backward_s)} backward of a micro-batch`)));
    if (detail.stages.length <= 32 || i % 4 === 0) group.append(svg("text", { x: 44 + (i + 0.5) * gap, y: height + 58, "text-anchor": "middle" }, String(one.rank)));
    drawn.append(group);
  });
  const limit = height - (detail.usable_bytes / most) * (height - 10);
  drawn.append(svg("line", { x1: 44, x2: width, y1: limit, y2: limit, stroke: "#000", "stroke-dasharray": "5 3" }),
    svg("text", { x: 40, y: height, "text-anchor": "end" }, "0"),
    svg("text", { x: 2, y: limit + 14 }, `${digits(detail.usable_bytes / GIB, 3)} GiB`),
    svg("text", { x: 40, y: height + 22, "text-anchor": "end" }, "s"));
  return element("div", { class: "scroll" }, drawn);
}

function markStage() {
  for (const group of document.querySelectorAll(".stagebar")) group.style.opacity = Number(group.dataset.stage) === stage ? 1 : 0.55;
}

/** Rectangles in proportion, as square as they can be: Bruls, Huizing and van Wijk 2000, "Squarified Treemaps". */
function squarified(items, x, y, width, height) {
  const whole = items.reduce((sum, item) => sum + item.size, 0);
  const left = items.map((item) => ({ ...item, area: (item.size / whole) * width * height }));
  const placed = [];
  while (left.length) {
    const side = Math.min(width, height);
    const row = [left.shift()];
    let area = row[0].area;
    const worst = (parts, sum) => Math.max(...parts.map((part) => Math.max((side * side * part.area) / (sum * sum), (sum * sum) / (side * side * part.area))));
    while (left.length && worst([...row, left[0]], area + left[0].area) <= worst(row, area)) {
      area += left[0].area;
      row.push(left.shift());
    }
    const thick = area / side;
    let along = 0;
    for (const part of row) {
      const length = part.area / thick;
      placed.push(width >= height ? { ...part, x, y: y + along, width: thick, height: length } : { ...part, x: x + along, y, width: length, height: thick });
      along += length;
    }
    if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
  }
  return placed;
}

function drawTreemap(detail) {
  const place = document.getElementById("treemap");
  const width = Math.max(place.clientWidth, 280);
  const one = detail.stages[stage];
  const items = Object.entries(one.memory).filter(([, bytes]) => bytes > 0).map(([name, size]) => ({ name, size })).sort((p, q) => q.size - p.size);
  const whole = heldBytes(one);
  const drawn = svg("svg", { width, height: 260, role: "img", "aria-label": `what fills stage ${one.rank}` });
  for (const part of squarified(items, 0, 0, width, 260)) {
    const label = `${words(part.name)} ${gib(part.size)} (${percent(part.size / whole, 0)})`;
    const group = svg("g", { class: "item" }, svg("rect", { x: part.x, y: part.y, width: part.width, height: part.height, fill: itemHue(part.name), stroke: "#fff", "stroke-width": 2 }), svg("title", {}, label));
    if (part.width > 90 && part.height > 30) {
      group.append(svg("rect", { x: part.x + 4, y: part.y + 4, width: Math.min(part.width - 8, 150), height: part.height > 46 ? 34 : 18, fill: "#fffd", rx: 2 }),
        svg("text", { x: part.x + 8, y: part.y + 17 }, clipped(words(part.name), Math.floor((part.width - 10) / 7))));
      if (part.height > 46) group.append(svg("text", { x: part.x + 8, y: part.y + 33 }, gib(part.size)));
    }
    drawn.append(group);
  }
  const list = items.map((item) => [words(item.name), gib(item.size), percent(item.size / whole)]);
  clear(place, drawn, element("details", {}, element("summary", {}, `items of stage ${one.rank} as a table`), table(["item", "bytes", "share"], list)));
}

/* ----------------------------------------------------------------------------------------------------- sensitivity */

function drawSensitivity() {
  const place = document.getElementById("sensitivity");
  const detail = state.a >= 0 ? detailOf(state.a) : null;
  if (!detail) return clear(place, state.a >= 0 ? detailNote(state.a) : null);
  if (!detail.shifts.length) return clear(place, element("p", { class: "note" }, "this point was not evaluated on changed systems"));
  const step = columns.get(data.whole.name).number(state.a);
  const widest = Math.max(...detail.shifts.map((shift) => Math.abs(shift.step_time_s - step)), 1e-30);
  const rows = detail.shifts.map((shift) => [
    `${shift.what} ${shift.factor > 1 ? "+" : "\u2212"}${percent(Math.abs(shift.factor - 1), 0)}`, seconds(shift.step_time_s),
    `${signed((shift.step_time_s - step) / step, percent)}`, gib(shift.peak_memory_bytes) + (shift.feasible ? "" : ", does not fit"),
    { bar: bar(0.5, 0.5 + (shift.step_time_s - step) / widest / 2, shift.step_time_s > step ? MORE : LESS) },
  ]);
  return clear(place, element("p", { class: "note" }, "the same configuration, evaluated again with one thing changed"),
    element("div", { class: "scroll", tabindex: 0 }, table(["changed", data.whole.each, "difference", "peak memory", ""], rows)));
}
