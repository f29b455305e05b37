/* The front as a scatter plot: two columns as axes, one as size, one as colour; hover, keys, two chosen points. */

const MANY = 3000; // points from which each is a small square: circles would take too long
const REACH = 18; // pixels around the pointer in which a point is meant

const plot = { across: null, upward: null, x: null, y: null, order: [] };

function startPareto() {
  const over = document.getElementById("over");
  over.addEventListener("mousemove", (event) => hoverAt(event.offsetX, event.offsetY));
  over.addEventListener("mouseleave", () => changed({ hover: -1 }));
  over.addEventListener("click", (event) => {
    hoverAt(event.offsetX, event.offsetY);
    if (state.hover >= 0) choose(state.hover, event.shiftKey);
  });
  over.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageDown: 10, PageUp: -10 }[event.key];
    if (step) moveHover(step);
    else if (event.key === "Home" || event.key === "End") moveHover(event.key === "Home" ? -Infinity : Infinity);
    else if (event.key === "Enter" && state.hover >= 0) choose(state.hover, event.shiftKey);
    else if (event.key === "Escape") changed({ a: -1, b: -1, hover: -1 });
    else return;
    event.preventDefault();
  });
  listeners.push((changes) => {
    if (["x", "y", "size", "colour", "shown"].some((key) => key in changes)) drawPoints();
    if (["x", "y", "shown", "hover", "a", "b"].some((key) => key in changes)) drawOver();
    if ("hover" in changes) showTip();
  });
}

/** Chooses a point as A, or with `second` as B beside it. */
function choose(row, second) {
  if (second && state.a >= 0 && state.a !== row) changed({ b: row });
  else changed({ a: row, b: -1 });
}

function drawPoints() {
  const [context, width, height] = fitted(document.getElementById("points"));
  const [x, y] = [columns.get(state.x), columns.get(state.y)];
  const rows = state.shown.filter((row) => Number.isFinite(x.number(row)) && Number.isFinite(y.number(row)));
  plot.across = new Scale(rows.map(x.number), width < 500 ? 54 : 70, width - 12);
  plot.upward = new Scale(rows.map(y.number), height - 46, 10);
  plot.x = Float32Array.from(rows, (row) => plot.across.at(x.number(row)));
  plot.y = Float32Array.from(rows, (row) => plot.upward.at(y.number(row)));
  plot.rows = rows;
  plot.order = rows.map((_, i) => i).sort((i, j) => plot.x[i] - plot.x[j] || plot.y[i] - plot.y[j]);
  axes(context, plot.across, plot.upward, state.x, state.y);
  stairs(context);
  const colour = colouring(state.colour);
  const radius = radii(rows);
  rows.forEach((row, i) => {
    if (isReference(row)) return;
    const look = colour.of(row);
    context.fillStyle = context.strokeStyle = look.colour;
    const r = radius(row);
    if (rows.length > MANY) context.fillRect(plot.x[i] - r / 2, plot.y[i] - r / 2, r, r);
    else mark(context, look.shape, plot.x[i], plot.y[i], r);
  });
  rows.forEach((row, i) => {
    if (!isReference(row)) return;
    context.fillStyle = "#000";
    mark(context, "star", plot.x[i], plot.y[i], 6);
    context.textAlign = plot.x[i] > width - 120 ? "right" : "left";
    context.fillText(nameOf(row), plot.x[i] + (plot.x[i] > width - 120 ? -11 : 11), plot.y[i] - 8);
  });
  const entries = rows.some(isReference) ? [{ text: "reference", colour: "#000", shape: "star" }] : [];
  legend(document.getElementById("legend"), [{ text: `${words(state.colour)}:`, colour: "transparent", shape: "circle" }, ...colour.entries, ...entries]);
}

/** Radius by a column: from 3 to 9 pixels along its axis. */
function radii(rows) {
  if (!state.size) return () => (rows.length > MANY ? 3 : 4.5);
  const column = columns.get(state.size);
  const scale = new Scale(rows.map(column.number).filter(Number.isFinite), 3, 9);
  return (row) => (Number.isFinite(column.number(row)) ? scale.at(column.number(row)) : 3);
}

/** The line beyond which nothing was found, for these two columns alone; none where a column knows no better. */
function stairs(context) {
  const [sx, sy] = [state.x, state.y].map((name) => ({ lower: 1, higher: -1 })[columns.get(name).better]);
  if (!sx || !sy) return;
  const order = plot.order.filter((i) => !isReference(plot.rows[i]));
  if (sx < 0) order.reverse();
  context.strokeStyle = "#999";
  context.beginPath();
  let best = null;
  for (const i of order) {
    const level = sy * -plot.y[i]; // pixels grow downward
    if (best !== null && level >= sy * -best) continue;
    if (best === null) context.moveTo(plot.x[i], plot.y[i]);
    else { context.lineTo(plot.x[i], best); context.lineTo(plot.x[i], plot.y[i]); }
    best = plot.y[i];
  }
  context.stroke();
}

function drawOver() {
  const [context] = fitted(document.getElementById("over"));
  const ring = (row, colour, letter) => {
    const i = plot.rows ? plot.rows.indexOf(row) : -1;
    if (i < 0) return;
    context.strokeStyle = colour;
    context.lineWidth = 3;
    context.beginPath();
    context.arc(plot.x[i], plot.y[i], 10, 0, 2 * Math.PI);
    context.stroke();
    if (!letter) return;
    context.font = "bold 14px system-ui, sans-serif";
    context.fillStyle = colour;
    context.strokeStyle = "#fff"; // a rim, for the letter may lie over other marks
    context.strokeText(letter, plot.x[i] + 12, plot.y[i] + 14);
    context.fillText(letter, plot.x[i] + 12, plot.y[i] + 14);
  };
  if (state.hover >= 0) ring(state.hover, "#000", "");
  if (state.a >= 0) ring(state.a, LESS, "A");
  if (state.b >= 0) ring(state.b, MORE, "B");
}

function hoverAt(x, y) {
  let [near, best] = [-1, REACH * REACH];
  for (let i = 0; i < plot.x.length; i++) {
    const distance = (plot.x[i] - x) ** 2 + (plot.y[i] - y) ** 2;
    if (distance < best) [near, best] = [i, distance];
  }
  const row = near < 0 ? -1 : plot.rows[near];
  if (row !== state.hover) changed({ hover: row });
}

/** To another point in order of the axis across. */
function moveHover(step) {
  if (!plot.order.length) return;
  const at = plot.order.findIndex((i) => plot.rows[i] === state.hover);
  const next = Math.min(Math.max(at < 0 ? 0 : at + step, 0), plot.order.length - 1);
  changed({ hover: plot.rows[plot.order[next]] });
}

function showTip() {
  const tip = document.getElementById("tip");
  const row = state.hover;
  tip.hidden = row < 0;
  if (row < 0) return;
  const named = [...new Set([state.x, state.y, ...data.objectives.map((one) => one.name)])];
  clear(tip,
    element("p", {}, element("strong", {}, isReference(row) ? nameOf(row) : `id ${nameOf(row)}`)),
    element("p", {}, named.map((name) => `${words(name)} ${shownValue(name, columns.get(name).at(row))}`).join("; ")),
    element("p", {}, told(row).join("; ")),
    element("p", { class: "why" }, `why: ${whyOnFront(row).join("; ")}`));
  const i = plot.rows.indexOf(row);
  const box = document.getElementById("plot");
  const left = Math.min(plot.x[i] + 16, Math.max(0, box.clientWidth - tip.offsetWidth));
  tip.style.left = `${left + tip.offsetWidth > box.clientWidth || left < plot.x[i] ? Math.max(0, plot.x[i] - tip.offsetWidth - 16) : left}px`;
  tip.style.top = `${Math.max(0, Math.min(plot.y[i] - 20, box.clientHeight - tip.offsetHeight))}px`;
}
