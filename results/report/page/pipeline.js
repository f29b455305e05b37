/* The pipeline of the chosen point: which pass each rank runs when, and what the fullest rank holds meanwhile. */

const PASSES = data.passes; // by letter: colour and words
let zoom = 1;

function drawPipeline() {
  const place = document.getElementById("pipeline");
  const detail = state.a >= 0 ? detailOf(state.a) : null;
  if (!detail) return clear(place, state.a >= 0 ? detailNote(state.a) : null);
  if (!detail.lane) return clear(place, element("p", { class: "note" }, detail.lane_note));
  const used = Object.keys(PASSES).filter((letter) => detail.lane.kinds.some((kinds) => kinds.includes(letter)));
  const names = element("div", { class: "legend" });
  legend(names, used.map((letter) => ({ text: PASSES[letter][1], colour: PASSES[letter][0], shape: "square" })));
  const canvas = element("canvas", { id: "swimlane", class: "block", role: "img", "aria-label": "passes of each rank over time, and activations of the fullest rank" });
  const told = element("p", { class: "note", role: "status", id: "pass" }, `passes without traffic, in the order of the schedule; below: activations of rank ${detail.lane.worst}, the fullest`);
  const times = element("select", { onchange: (event) => { zoom = Number(event.target.value); paint(); } }, ...[1, 2, 4, 8, 16].map((n) => element("option", { value: n, selected: n === zoom }, `${n}x`)));
  const box = element("div", { class: "pipeline-box", tabindex: 0 }, canvas);
  clear(place, element("label", {}, "time magnified", times), names, box, told);
  const span = Math.max(...detail.lane.end.map((ends) => ends.at(-1)));
  const tall = Math.max(5, Math.min(22, 320 / detail.lane.kinds.length));
  const bottom = detail.lane.kinds.length * tall;
  const left = 30;
  let scale = 1;
  const paint = () => {
    const width = Math.max(280, box.clientWidth - 2) * zoom;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${bottom + 100}px`;
    const [context] = fitted(canvas, width, bottom + 100);
    scale = (width - left - 8) / span;
    context.textAlign = "right";
    detail.lane.kinds.forEach((kinds, rank) => {
      context.fillStyle = "#222";
      if (tall > 9 || rank % 4 === 0) context.fillText(String(rank), left - 4, rank * tall + tall / 2 + 4);
      for (let n = 0; n < kinds.length; n++) {
        const [start, end] = [detail.lane.start[rank][n], detail.lane.end[rank][n]];
        context.fillStyle = PASSES[kinds[n]][0];
        const wide = (end - start) * scale;
        context.fillRect(left + start * scale, rank * tall, wide > 2 ? wide - 0.5 : wide, tall - 1);
      }
    });
    strip(context, detail.lane, left, scale, bottom);
  };
  canvas.addEventListener("mousemove", (event) => {
    const rank = Math.floor(event.offsetY / tall);
    const at = (event.offsetX - left) / scale;
    const ends = detail.lane.end[rank];
    const n = ends ? detail.lane.start[rank].findIndex((start, k) => start <= at && at < ends[k]) : -1;
    if (n >= 0) told.textContent = `rank ${rank}: ${PASSES[detail.lane.kinds[rank][n]][1]}, pass ${n + 1} of ${ends.length}, ${seconds(detail.lane.start[rank][n])} to ${seconds(ends[n])}`;
  });
  paint();
  return place;
}

function strip(context, lane, left, scale, bottom) {
  const most = Math.max(...lane.held_bytes, 1);
  const [base, tall] = [bottom + 78, 62];
  context.fillStyle = "#999";
  lane.moments.forEach((at, i) => {
    const until = lane.moments[i + 1] ?? at;
    const height = (lane.held_bytes[i] / most) * tall;
    context.fillRect(left + at * scale, base - height, Math.max((until - at) * scale, 0.5), height);
  });
  context.fillStyle = "#222";
  context.textAlign = "left";
  context.fillText(`${gib(most)} at most`, left + 2, bottom + 12);
  context.fillText("0 s", left, base + 14);
  context.textAlign = "right";
  const end = Math.max(...lane.end.map((ends) => ends.at(-1)));
  context.fillText(seconds(end), left + end * scale, base + 14);
}
