"use strict";
/* Reads what the page carries: columns of numbers and texts, what is chosen, and how values are told. Draws nothing. */

const data = JSON.parse(document.getElementById("data").textContent);
const columns = new Map();
const GIB = 2 ** 30;

/** What is shown and chosen: places of rows; -1 is none. `changed` runs the listeners. */
const state = { x: "", y: "", size: "", colour: "", test: null, brushes: new Map(), shown: [], hover: -1, a: -1, b: -1 };
const listeners = [];

function changed(changes) {
  Object.assign(state, changes);
  for (const listener of listeners) listener(changes);
}

/** Bytes of all columns, inflated. */
async function bytesOf(text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(inflated).arrayBuffer();
}

const ARRAYS = { uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array, float32: Float32Array, float64: Float64Array };

function arrayAt(buffer, told) {
  return new ARRAYS[told.type](buffer, told.at, told.length);
}

/** Gives each column `at(row)`, its value, and `number(row)`, its place on an axis (of a text: the place of its value). */
function readColumns(buffer) {
  for (const told of data.columns) {
    const column = { ...told };
    if (told.kind === "same") {
      column.at = () => told.value;
      column.number = () => (typeof told.value === "number" ? told.value : 0);
    } else if (told.kind === "numbers") {
      const values = arrayAt(buffer, told);
      column.at = (row) => values[row];
      column.number = column.at;
    } else {
      const codes = arrayAt(buffer, told);
      const isNumber = typeof told.values.find((value) => value !== null) === "number";
      column.at = (row) => told.values[codes[row]];
      column.number = isNumber ? (row) => told.values[codes[row]] ?? NaN : (row) => codes[row];
      if (told.kind === "texts") {
        const starts = arrayAt(buffer, told.starts);
        column.all = (row) => Array.from(codes.subarray(starts[row], starts[row + 1]), (code) => told.values[code]);
      }
    }
    columns.set(told.name, column);
  }
}

const isReference = (row) => row >= data.num_front;
const nameOf = (row) => data.ids[row];
const told = (row) => columns.get("told").all(row);
const detailOf = (row) => data.details.find((detail) => detail.row === row);
const words = (name) => name.replace(/_bytes$|_s$/, "").replaceAll("_", " ");

function digits(value, count = 4) {
  if (!Number.isFinite(value)) return "-";
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(count - 2);
  return String(Number(value.toPrecision(count)));
}

function seconds(value) {
  const size = Math.abs(value);
  if (!Number.isFinite(value)) return "-";
  if (size >= 1 || size === 0) return `${digits(value)} s`;
  return size >= 1e-3 ? `${digits(value * 1e3)} ms` : `${digits(value * 1e6)} µs`;
}

const gib = (value) => (Number.isFinite(value) ? `${digits(value / GIB)} GiB` : "-");
const percent = (share, count = 1) => (Number.isFinite(share) ? `${(100 * share).toFixed(count)} %` : "-");
const signed = (value, text) => (value === 0 ? "-" : `${value > 0 ? "+" : "\u2212"}${text(Math.abs(value))}`);

/** A value of a column for a reader. */
function shownValue(name, value) {
  const { unit } = columns.get(name);
  if (value === null || value === undefined) return "-";
  if (typeof value !== "number") return String(value);
  if (unit === "s") return seconds(value);
  if (unit === "B") return gib(value);
  return unit === "1" || unit === "" ? digits(value) : `${digits(value)} ${unit}`;
}

/** What a column's numbers are divided by on an axis, and the unit that is left. */
function axisUnit(name) {
  const { unit } = columns.get(name);
  if (unit === "B") return [GIB, "GiB"];
  return [1, unit === "1" ? "" : unit];
}

/* ---------------------------------------------------------------- conditions: `tp <= 4 and pp == 16 or zero_stage == 3` */

const TESTS = {
  "<=": (a, b) => a <= b, ">=": (a, b) => a >= b, "==": (a, b) => a === b, "!=": (a, b) => a !== b,
  "<": (a, b) => a < b, ">": (a, b) => a > b,
};

/** A condition as a function of a row; an Error says what is wrong with it. */
function conditionOf(text) {
  if (!text.trim()) return null;
  const groups = text.split(/\s+or\s+/).map((part) => part.split(/\s+and\s+/).map(comparison));
  return (row) => groups.some((group) => group.every((test) => test(row)));
}

function comparison(text) {
  const parts = /^\s*(\w+)\s*(<=|>=|==|!=|<|>)\s*(.+?)\s*$/.exec(text);
  if (!parts) throw new Error(`'${text.trim()}' is no comparison; write one such as tp <= 4`);
  const [, name, sign, right] = parts;
  const column = columns.get(name);
  if (!column || column.kind === "texts") throw new Error(`no column is called ${name}`);
  const word = right.replace(/^["']|["']$/g, "");
  const number = Number(word);
  const limit = column.is_text ? word : word === "true" ? true : word === "false" ? false : number;
  if (typeof limit === "number" && Number.isNaN(limit)) throw new Error(`${name} is compared with a number, not with ${right}`);
  return (row) => TESTS[sign](column.at(row), limit);
}

/* ------------------------------------------------------------------------------------------------ why on the front */

const costOf = (objective) => (row) => (objective.better === "higher" ? -1 : 1) * columns.get(objective.name).number(row);

/** Sentences: what a point is best at, and what the next better in each objective pays in the others. */
function whyOnFront(row) {
  const marks = data.marks[row] ?? [];
  const said = marks.map((mark) => (mark === "knee" ? "the knee of the front" : mark));
  if (isReference(row)) return [columns.get("feasible").at(row) ? "a reference point of the space" : "a reference point that is not feasible"];
  data.objectives.forEach((objective, k) => {
    const cost = costOf(objective);
    const mine = cost(row);
    let next = -1;
    for (let i = 0; i < data.num_front; i++) {
      if (cost(i) < mine && (next < 0 || cost(i) > cost(next))) next = i;
    }
    if (next < 0) return;
    const pays = data.objectives.filter((_, j) => j !== k).flatMap((other) => {
      const more = costOf(other)(next) - costOf(other)(row);
      return more > 0 ? [`${shownValue(other.name, more)} ${other.better === "higher" ? "less" : "more"} ${words(other.name)}`] : [];
    });
    if (pays.length) said.push(`the next better in ${words(objective.name)}, ${nameOf(next)}, takes ${pays.join(" and ")}`);
  });
  return said;
}
