/* Chips as squares, nodes as boxes around them, and the groups of one rank in colour. */

const [DP, PP, EP, CP, TP] = [4, 1, 2, 3, 5].map((place) => data.hues[place]);
const GROUPS = { tp: TP, cp: CP, ep: EP, dp: DP, pp: PP };
let chosenRank = 0;

/** Size and stride of each dimension from the inside out, as ranks are numbered (estimator/strategy.py, RankOrder). */
function dimensions(row) {
  const value = (name) => columns.get(name)?.number(row) ?? 1; // what answers has no context parallelism
  const made = {};
  let stride = 1;
  for (const name of String(columns.get("rank_order")?.at(row) ?? "tp-cp-dp-pp").split("-")) {
    made[name] = [value(name), stride];
    stride *= value(name);
  }
  made.expert = [value("ep"), value("etp")];
  return made;
}

/** Ranks that share a group with one rank, by dimension; experts fold over the world without the pipeline. */
function groupsOf(row, rank) {
  const { expert, ...dense } = dimensions(row);
  const found = {};
  for (const [name, shape] of Object.entries(dense)) found[name] = members(rank, shape);
  const [pp, stride] = dense.pp;
  const stage = Math.floor(rank / stride) % pp;
  const place = Math.floor(rank / (stride * pp)) * stride + (rank % stride); // among the ranks of its stage
  found.ep = members(place, expert).map((other) => Math.floor(other / stride) * stride * pp + stage * stride + (other % stride));
  return found;
}

function members(rank, [size, stride]) {
  const first = rank - (Math.floor(rank / stride) % size) * stride;
  return Array.from({ length: size }, (_, i) => first + i * stride);
}

function drawRanks() {
  const place = document.getElementById("ranks");
  if (state.a < 0) return clear(place);
  const row = state.a;
  const system = data.systems[columns.get("system").at(row)];
  const number = (name) => columns.get(name)?.number(row) ?? 1;
  const total = number("tp") * number("cp") * number("dp") * number("pp");
  if (!system || !Number.isFinite(total)) return clear(place, element("p", { class: "note" }, "the system is not in this page"));
  chosenRank = Math.min(chosenRank, total - 1);
  const input = element("input", { type: "number", id: "rank", min: 0, max: total - 1, value: chosenRank, oninput: (event) => {
    const wanted = Number(event.target.value);
    if (Number.isInteger(wanted) && wanted >= 0 && wanted < total) { chosenRank = wanted; paint(); }
  } });
  const canvas = element("canvas", { id: "chips", class: "block", role: "img", "aria-label": "chips of the cluster, groups of one rank in colour" });
  const list = element("div", { id: "groups" });
  clear(place, element("label", {}, `groups of rank (0 to ${total - 1})`, input), element("div", { class: "scroll" }, canvas), list);
  const node = system.chips_per_node;
  let across = Math.ceil(Math.sqrt(node));
  while (node % across) across++;
  const down = node / across;
  const nodes = Math.ceil(total / node);
  const width = Math.max(place.clientWidth, 280);
  const cell = Math.max(3, Math.min(14, Math.floor(Math.sqrt((width * 360) / (nodes * (across + 0.6) * (down + 0.6))))));
  const box = [across * cell + 4, down * cell + 4];
  const perLine = Math.max(1, Math.floor(width / box[0]));
  const corner = (rank) => {
    const [n, chip] = [Math.floor(rank / node), rank % node];
    return [(n % perLine) * box[0] + 1 + (chip % across) * cell, Math.floor(n / perLine) * box[1] + 1 + Math.floor(chip / across) * cell];
  };
  const height = Math.ceil(nodes / perLine) * box[1];
  const paint = () => {
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const [context] = fitted(canvas, width, height);
    context.strokeStyle = "#aaa";
    for (let n = 0; n < nodes; n++) context.strokeRect(...corner(n * node).map((at) => at - 1), box[0] - 2, box[1] - 2);
    context.fillStyle = "#ddd";
    for (let rank = 0; rank < total; rank++) context.fillRect(...corner(rank), cell - 1, cell - 1);
    const groups = groupsOf(row, chosenRank);
    for (const name of ["dp", "pp", "ep", "cp", "tp"]) {
      if (groups[name].length < 2) continue;
      groups[name].forEach((rank) => { context.fillStyle = GROUPS[name]; context.fillRect(...corner(rank), cell - 1, cell - 1); });
    }
    context.fillStyle = "#000";
    context.fillRect(...corner(chosenRank), cell - 1, cell - 1);
    clear(list, groupTable(groups, node, system));
  };
  canvas.addEventListener("click", (event) => {
    for (let rank = 0; rank < total; rank++) {
      const [x, y] = corner(rank);
      if (event.offsetX >= x && event.offsetX < x + cell && event.offsetY >= y && event.offsetY < y + cell) {
        chosenRank = rank;
        input.value = rank;
        paint();
      }
    }
  });
  paint();
  return place;
}

function groupTable(groups, node, system) {
  const rows = ["tp", "cp", "ep", "dp", "pp"].map((name) => {
    const ranks = groups[name];
    const nodes = new Set(ranks.map((rank) => Math.floor(rank / node))).size;
    const swatch = element("span", {}, element("span", { style: `display:inline-block;width:.8em;height:.8em;background:${GROUPS[name]}` }), ` ${name}`);
    const shown = ranks.length <= 10 ? ranks.join(", ") : `${ranks.slice(0, 8).join(", ")}, … ${ranks.at(-1)}`;
    const tier = ranks.length < 2 ? "-" : system.tiers.find((one) => Math.floor(ranks[0] / one.span) === Math.floor(ranks.at(-1) / one.span))?.name ?? system.tiers.at(-1).name;
    return [{ text: swatch }, String(ranks.length), String(nodes), { text: tier }, { text: shown }];
  });
  return element("div", { class: "scroll" }, table([{ text: "group" }, "ranks", "nodes", { text: "reaches" }, { text: "members" }], rows));
}
