/* Elements, axes and colours that every picture uses. Knows nothing of runs. */

/* Colours are those of every picture (results/colours.py); shapes repeat the message. */
const HUES = data.hues;
const [LESS, MORE] = [HUES[0], HUES[5]]; // A and what is saved, B and what is lost
const SHAPES = ["circle", "square", "triangle", "diamond", "down", "plus", "cross", "ring"];
/* Nuñez, Anderton and Renslow 2018, cividis (doi:10.1371/journal.pone.0199239), at eight places. */
const RAMP = ["#00224e", "#1a386f", "#434e6c", "#61656f", "#7d7c78", "#9b9476", "#bcae6c", "#dec958"];

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** A table of texts and elements; `rows` are lists of cells, a cell { text } is set to the left, { bar } takes a bar. */
function table(header, rows, classOf = () => "") {
  const cell = (tag, content) => {
    if (content && content.bar) return element(tag, { class: "bar" }, content.bar);
    if (content && content.text !== undefined) return element(tag, { class: "text" }, content.text);
    return element(tag, {}, content ?? "");
  };
  return element("table", {},
    element("thead", {}, element("tr", {}, ...header.map((content) => cell("th", content)))),
    element("tbody", {}, ...rows.map((row, i) => element("tr", { class: classOf(i) }, ...row.map((content) => cell("td", content))))));
}

/** A bar from `start` to `end`, shares of the whole. */
function bar(start, end, colour, title = "") {
  const [low, high] = start <= end ? [start, end] : [end, start];
  const piece = element("span", { style: `left:${100 * low}%;width:${100 * (high - low)}%;background:${colour}`, title });
  return element("div", { class: "track" }, piece);
}

const clear = (place, ...children) => { place.replaceChildren(...children.filter((child) => child !== null)); return place; };

/** A canvas as large as its box, with sharp pixels; gives its context and size. */
function fitted(canvas, width = canvas.clientWidth, height = canvas.clientHeight) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "12px system-ui, sans-serif";
  return [context, width, height];
}

/** Values to pixels: a log axis where all are positive and span a factor of three, else a linear one. */
class Scale {
  constructor(values, first, last) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (!(low <= high)) [low, high] = [0, 1];
    this.isWhole = values.every(Number.isInteger);
    this.isLog = low > 0 && high >= 3 * low;
    const room = this.isLog ? 0.03 * Math.log(high / low) : 0.03 * (high - low || Math.abs(high) || 1);
    this.low = this.isLog ? low * Math.exp(-room) : low - room;
    this.high = this.isLog ? high * Math.exp(room) : high + room;
    [this.first, this.last] = [first, last];
  }

  at(value) {
    const share = this.isLog ? Math.log(value / this.low) / Math.log(this.high / this.low) : (value - this.low) / (this.high - this.low);
    return this.first + share * (this.last - this.first);
  }

  value(pixel) {
    const share = (pixel - this.first) / (this.last - this.first);
    return this.isLog ? this.low * (this.high / this.low) ** share : this.low + share * (this.high - this.low);
  }

  /** Round values that lie on the axis, in its unit. */
  ticks(divisor, most = 7) {
    const [low, high] = [this.low / divisor, this.high / divisor];
    if (this.isLog && high / low > 30) {
      const found = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        for (const lead of high / low > 1000 ? [1] : [1, 2, 5]) found.push(lead * 10 ** power);
      }
      return found.filter((value) => value >= low && value <= high);
    }
    const rough = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const least = this.isWhole && divisor === 1 ? 1 : 0; // there is no degree between two whole ones
    const step = Math.max(least, [1, 2, 5, 10].map((lead) => lead * power).find((size) => size >= rough));
    const found = [];
    for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(n * step);
    return found;
  }
}

/** Axes with ticks and titles around a plot. */
function axes(context, across, upward, x, y) {
  const [left, right, bottom, top] = [across.first, across.last, upward.first, upward.last];
  const label = (name, divisorUnit) => words(name) + (divisorUnit ? ` [${divisorUnit}]` : "");
  context.strokeStyle = "#ddd";
  context.fillStyle = "#444";
  context.lineWidth = 1;
  const [xDivisor, xUnit] = axisUnit(x);
  const [yDivisor, yUnit] = axisUnit(y);
  context.textAlign = "center";
  for (const tick of tickTexts(x, across, xDivisor, (right - left) / 70)) {
    line(context, tick.at, top, tick.at, bottom);
    context.fillText(tick.text, tick.at, bottom + 16);
  }
  context.textAlign = "right";
  for (const tick of tickTexts(y, upward, yDivisor, (bottom - top) / 45)) {
    line(context, left, tick.at, right, tick.at);
    context.fillText(tick.text, left - 5, tick.at + 4);
  }
  context.fillStyle = "#222";
  context.textAlign = "center";
  context.fillText(label(x, xUnit), (left + right) / 2, bottom + 34);
  context.save();
  context.translate(12, (top + bottom) / 2);
  context.rotate(-Math.PI / 2);
  context.fillText(label(y, yUnit), 0, 0);
  context.restore();
}

/** Ticks of a column: round numbers, or the texts that it has. */
function tickTexts(name, scale, divisor, most) {
  const column = columns.get(name);
  if (column.values && typeof column.values.find((value) => value !== null) !== "number") { // texts and switches
    return column.values.map((text, code) => ({ at: scale.at(code), text: clipped(String(text), 12) }));
  }
  return scale.ticks(divisor, Math.max(2, most)).map((value) => ({ at: scale.at(value * divisor), text: digits(value) }));
}

const clipped = (text, most) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`);

function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}

/** One mark of a shape around a place. */
function mark(context, shape, x, y, r) {
  context.beginPath();
  if (shape === "square") context.rect(x - r, y - r, 2 * r, 2 * r);
  else if (shape === "triangle") polygon(context, [[x, y - 1.2 * r], [x + 1.1 * r, y + 0.9 * r], [x - 1.1 * r, y + 0.9 * r]]);
  else if (shape === "down") polygon(context, [[x, y + 1.2 * r], [x + 1.1 * r, y - 0.9 * r], [x - 1.1 * r, y - 0.9 * r]]);
  else if (shape === "diamond") polygon(context, [[x, y - 1.3 * r], [x + 1.3 * r, y], [x, y + 1.3 * r], [x - 1.3 * r, y]]);
  else if (shape === "plus") { context.rect(x - r * 1.2, y - r * 0.4, 2.4 * r, 0.8 * r); context.rect(x - r * 0.4, y - r * 1.2, 0.8 * r, 2.4 * r); }
  else if (shape === "cross") polygon(context, [[x - r, y - r], [x + r, y + r], [x, y], [x + r, y - r], [x - r, y + r], [x, y]]);
  else if (shape === "star") polygon(context, Array.from({ length: 10 }, (_, i) => {
    const [angle, reach] = [Math.PI * (i / 5 - 0.5), i % 2 ? 0.7 * r : 1.7 * r];
    return [x + reach * Math.cos(angle), y + reach * Math.sin(angle)];
  }));
  else context.arc(x, y, r, 0, 2 * Math.PI);
  if (shape === "ring") context.stroke();
  else context.fill();
}

function polygon(context, corners) {
  corners.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
}

/** How rows are coloured by a column: `of(row)` gives colour and shape, `entries` a legend. */
function colouring(name) {
  const column = columns.get(name);
  const rows = Array.from({ length: data.num_rows }, (_, row) => row);
  const distinct = column.kind === "same" ? [column.value] : column.kind === "codes" ? column.values : null;
  if (distinct && distinct.length <= HUES.length) {
    const place = new Map(distinct.map((value, i) => [value, i]));
    return {
      of: (row) => ({ colour: HUES[place.get(column.at(row))], shape: SHAPES[place.get(column.at(row))] }),
      entries: distinct.map((value, i) => ({ text: shownValue(name, value), colour: HUES[i], shape: SHAPES[i] })),
    };
  }
  const scale = new Scale(rows.map(column.number).filter(Number.isFinite), 0, 1);
  const shade = (share) => RAMP[Math.min(Math.max(Math.floor(share * RAMP.length), 0), RAMP.length - 1)];
  return {
    of: (row) => ({ colour: shade(scale.at(column.number(row))), shape: "circle" }),
    entries: RAMP.map((colour, i) => ({ text: i % 2 ? "" : shownValue(name, distinct && column.is_text ? distinct[Math.round(scale.value((i + 0.5) / RAMP.length))] : scale.value((i + 0.5) / RAMP.length)), colour, shape: "square" })),
  };
}

function legend(place, entries) {
  clear(place, ...entries.map(({ text, colour, shape }) => {
    const canvas = element("canvas", { width: 16, height: 14, "aria-hidden": true });
    const context = canvas.getContext("2d");
    context.fillStyle = context.strokeStyle = colour;
    mark(context, shape, 8, 7, 4.5);
    return element("span", {}, canvas, text);
  }));
}
