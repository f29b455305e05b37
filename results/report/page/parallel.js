/* Parallel coordinates: objectives and every choice that differs, one line a point; a range of an axis can be kept. */

const GAP = 92; // pixels between axes at least
const MOST_LINES = 4000; // of more, evenly chosen ones are drawn
const parallel = { axes: [], from: null };

function startParallel() {
  const canvas = document.getElementById("lines");
  const axisAt = (event) => parallel.axes.find((axis) => Math.abs(axis.x - event.offsetX) < GAP / 3);
  canvas.addEventListener("pointerdown", (event) => { parallel.from = { axis: axisAt(event), y: event.offsetY }; });
  canvas.addEventListener("pointerup", (event) => {
    const from = parallel.from;
    parallel.from = null;
    if (!from || !from.axis || Math.abs(event.offsetY - from.y) < 4) return;
    const ends = [from.y, event.offsetY].map((pixel) => from.axis.scale.value(pixel)).sort((p, q) => p - q);
    const brushes = new Map(state.brushes).set(from.axis.name, ends);
    keep({ brushes });
  });
  document.getElementById("unbrush").addEventListener("click", () => keep({ brushes: new Map() }));
  listeners.push((changes) => {
    if (["colour", "shown", "a", "b"].some((key) => key in changes)) drawParallel();
  });
}

/** Objectives, then what differs among the points of the front. */
function parallelAxes() {
  const names = [...data.objectives.map((one) => one.name), "num_gpus", "system", ...data.strategy];
  return [...new Set(names)].filter((name) => columns.has(name) && differs(columns.get(name)));
}

/** Whether a column has more than one value on the front: reference points alone make no axis. */
function differs(column) {
  if (column.kind === "same") return false;
  for (let row = 1; row < data.num_front; row++) if (column.at(row) !== column.at(0)) return true;
  return false;
}

function drawParallel() {
  const canvas = document.getElementById("lines");
  const names = parallelAxes();
  const width = Math.max(canvas.parentElement.clientWidth, names.length * GAP + 20);
  canvas.style.width = `${width}px`;
  canvas.style.height = "20rem";
  const [context, , height] = fitted(canvas, width, 320);
  const rows = state.shown.filter((row) => !isReference(row));
  const drawn = rows.filter((_, i) => i % Math.ceil(rows.length / MOST_LINES) === 0);
  const step = (width - GAP) / Math.max(names.length - 1, 1);
  const every = Array.from({ length: data.num_front }, (_, row) => row);
  parallel.axes = names.map((name, i) => ({
    name, x: GAP / 2 + i * step, number: columns.get(name).number,
    scale: new Scale(every.map(columns.get(name).number).filter(Number.isFinite), height - 24, 44),
  }));
  const colour = colouring(state.colour);
  context.globalAlpha = Math.max(0.08, Math.min(0.7, 60 / drawn.length));
  for (const row of drawn) path(context, row, colour.of(row).colour, 1);
  context.globalAlpha = 1;
  if (state.a >= 0) path(context, state.a, LESS, 4);
  if (state.b >= 0) path(context, state.b, MORE, 4);
  for (const axis of parallel.axes) drawAxis(context, axis, height);
  document.getElementById("unbrush").hidden = !state.brushes.size;
}

function path(context, row, colour, width) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.beginPath();
  parallel.axes.forEach((axis, i) => {
    const y = axis.scale.at(axis.number(row));
    if (i) context.lineTo(axis.x, y);
    else context.moveTo(axis.x, y);
  });
  context.stroke();
}

function drawAxis(context, axis, height) {
  context.lineWidth = 1;
  context.strokeStyle = "#555";
  line(context, axis.x, 40, axis.x, height - 20);
  const range = state.brushes.get(axis.name);
  if (range) {
    const [top, bottom] = range.map((value) => axis.scale.at(value)).sort((p, q) => p - q);
    context.fillStyle = "#0003";
    context.fillRect(axis.x - 7, top, 14, bottom - top);
  }
  context.textAlign = "center";
  context.fillStyle = "#222";
  const [first, ...others] = words(axis.name).split(" ");
  context.fillText(first, axis.x, 14);
  context.fillText(clipped(others.join(" "), 15), axis.x, 29);
  context.textAlign = "left";
  const [divisor, unit] = axisUnit(axis.name);
  const ticks = tickTexts(axis.name, axis.scale, divisor, 5);
  for (const tick of ticks.filter((_, i) => i % Math.ceil(ticks.length / 10) === 0)) {
    const text = clipped(tick.text + (unit ? ` ${unit}` : ""), 13);
    context.fillStyle = "#fffc";
    context.fillRect(axis.x + 3, tick.at - 7, context.measureText(text).width + 2, 13);
    context.fillStyle = "#222";
    context.fillText(text, axis.x + 4, tick.at + 4);
  }
}
