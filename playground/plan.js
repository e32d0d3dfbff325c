import { at, element, instrument, judged, number, options, say } from "./instrument.js";

const STARTS = {
  "8xH100": "tp1.pp1.z3.b1.selective",
  "64xH100": "tp8.pp1.z1.b1.selective",
  "8x4090": "tp8.pp1.z1.b1.selective",
};
const AGAIN = ["selective", "half", "full"]; // the planner has "none", too, which no one would choose here
const POSITION = /^tp(\d+)\.pp(\d+)\.z(\d)\.b(\d+)\.(\w+)$/;
let game; // the course's Python, as soon as it runs
let words; // the page's, of limits and of what is recomputed
let link; // the position, as in the address

const board = () => link.split("/")[0];
const asked = () => `${board()}/${STARTS[board()]}`;
const kept = () => `limit ${asked()}`;

function begin(address) {
  const [gpus, position] = address.split("/");
  link = `${gpus}/${position || STARTS[gpus]}`;
  at("rules").textContent = "";
  at("best").textContent = "";
}

function show(python, verdict) {
  game = python;
  const truth = JSON.parse(game.view(asked()));
  words = JSON.parse(game.vocabulary());
  const limit = localStorage.getItem(kept());
  const most = limit === truth.limit ? "as you predicted" : `you predicted ${words.limits[limit] ?? "nothing"}`;
  judged(`${game.words(asked())} How many GiB does the fullest rank hold?`, verdict,
    `Most of a step goes into ${words.limits[truth.limit] ?? truth.limit}; ${most}.`);
  const gpus = parseInt(board(), 10);
  const powers = Array.from({ length: 1 + Math.log2(gpus) }, (_, i) => String(2 ** i));
  const form = at("sizes").elements;
  options(form.tp, powers);
  options(form.pp, powers);
  options(form.zero, ["0", "1", "2", "3"]);
  options(form.rows, ["1", "2", "4", "8"]);
  options(form.again, AGAIN.map((name) => [name, words.again[name]]));
  if ("why" in JSON.parse(game.view(link))) link = asked();
  [form.tp.value, form.pp.value, form.zero.value, form.rows.value, form.again.value] = POSITION.exec(link.split("/")[1]).slice(1);
  at("end").hidden = false;
  draw();
}

function bar(id, parts, most, unit, limit) {
  const pieces = Object.entries(parts).filter(([, size]) => size > 0.002 * most);
  const drawn = pieces.map(([kind, size]) => {
    const piece = element("span", { class: `part ${kind}` });
    piece.style.width = `${(100 * size) / most}%`;
    return piece;
  });
  if (limit) {
    drawn.push(element("span", { class: "limit" }));
    drawn.at(-1).style.left = `${(100 * limit) / most}%`;
  }
  const keys = pieces.map(([kind, size]) => element("span", { class: "pair" }, element("span", { class: `key ${kind}` }), `${words.limits[kind] ?? kind} ${number(size)} ${unit}`));
  if (limit) keys.push(element("span", { class: "pair" }, element("span", { class: "key line" }), `a GPU has ${number(limit)} ${unit}`));
  at(id).replaceChildren(element("li", {}, element("div", { class: "bar" }, ...drawn), element("p", { class: "soft" }, ...keys)));
}

function draw() {
  const shown = JSON.parse(game.view(link));
  bar("memory", shown.held, Math.max(shown.room, shown.total), "GiB", shown.room);
  bar("time", shown.parts, shown.seconds, "s");
  const verdict = shown.fits ? "It fits" : "It does not fit";
  say(`${verdict}: ${number(shown.total)} of ${number(shown.room)} GiB. A step takes ${number(shown.seconds)} s, ${Math.round(shown.tokens).toLocaleString("en")} tokens a second, with ${shown.dp} data ranks.${link === asked() ? " Find a shorter step, then ask the planner." : ""}`, !shown.fits);
  at("cell").textContent = game.cell(link);
}

at("sizes").addEventListener("input", () => {
  const { tp, pp, zero, rows, again } = at("sizes").elements;
  const next = `${board()}/tp${tp.value}.pp${pp.value}.z${zero.value}.b${rows.value}.${again.value}`;
  const { why } = JSON.parse(game.view(next));
  if (why) return say(why, true);
  link = next;
  history.replaceState(null, "", `#${link}`);
  draw();
});
at("sizes").addEventListener("submit", (event) => event.preventDefault());
at("ask").addEventListener("click", () => {
  const { layout, total, seconds } = JSON.parse(game.best(board()));
  at("best").textContent = `The planner's plan: ${layout}. It holds ${number(total)} GiB, and a step takes ${number(seconds)} s.`;
});

// what limits is predicted too, and kept before the board opens
const limits = element("select", { name: "limit", required: true });
at("predict").prepend(element("label", {}, "What takes most of a step?", limits));
at("predict").addEventListener("submit", () => localStorage.setItem(kept(), limits.value));

instrument({
  module: "playground.plan", is: (address) => Boolean(STARTS[address.split("/")[0]]), begin, board: () => `plan ${asked()}`, unit: "GiB", guesses: (python) => python.guesses(asked()), draw: show, first: () => at("sizes").elements.tp,
  rules: (python) => {
    options(limits, [["", "choose"], ...Object.entries(JSON.parse(python.vocabulary()).limits)]);
    return python.words(asked());
  },
});
