/* Fills the controls, keeps what the conditions leave, and starts every picture. */

/** Applies the field of conditions and the ranges of the parallel axes. */
function keep(changes = {}) {
  Object.assign(state, changes);
  const ranges = [...state.brushes].map(([name, [low, high]]) => [columns.get(name).number, low, high]);
  const shown = [];
  for (let row = 0; row < data.num_rows; row++) {
    if (state.test && !state.test(row)) continue;
    if (ranges.every(([number, low, high]) => number(row) >= low && number(row) <= high)) shown.push(row);
  }
  const front = shown.filter((row) => !isReference(row)).length;
  const references = data.num_rows - data.num_front;
  document.getElementById("shown").textContent = `${front} of ${data.num_front} points of the front${references ? `, ${shown.length - front} of ${references} reference points` : ""}`;
  changed({ ...changes, shown });
}

function fillControls() {
  const numbers = [...columns.values()].filter((column) => column.kind !== "texts" && column.kind !== "same");
  const [first, second, third] = data.objectives.map((one) => one.name);
  const usual = { x: first, y: second ?? "peak_memory_bytes", size: third && columns.get(third).kind !== "same" ? third : "", colour: ["pp", "system", "num_gpus", "tp"].find((name) => columns.has(name) && columns.get(name).kind !== "same") ?? first };
  for (const key of ["x", "y", "size", "colour"]) {
    const select = document.getElementById(key);
    const offered = [...new Set([...data.objectives.map((one) => one.name), ...(usual[key] ? [usual[key]] : []), ...numbers.map((column) => column.name)])];
    select.append(...(key === "size" ? [element("option", { value: "" }, "nothing")] : []),
      ...offered.map((name) => element("option", { value: name, title: columns.get(name).about, selected: name === usual[key] }, words(name))));
    select.addEventListener("change", () => changed({ [key]: select.value }));
  }
  Object.assign(state, usual);
  const filter = document.getElementById("filter");
  filter.addEventListener("input", () => {
    try {
      const test = conditionOf(filter.value);
      filter.removeAttribute("aria-invalid");
      keep({ test });
    } catch (error) {
      filter.setAttribute("aria-invalid", "true");
      document.getElementById("shown").textContent = error.message;
    }
  });
}

async function start() {
  readColumns(await bytesOf(document.getElementById("bytes").textContent));
  fillControls();
  startPareto();
  startParallel();
  startPoint();
  startTables();
  keep();
  if (data.num_rows) changed({ a: data.details[0]?.row ?? 0 });
  let waiting = 0;
  window.addEventListener("resize", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { keep(); drawPoint(); });
  });
  document.documentElement.dataset.ready = "yes";
}

start();
