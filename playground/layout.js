import { at, element, instrument, judged, number, options, say } from "./instrument.js";

const STARTS = { "2x4": "dp2.pp2.tp2", "2x8": "dp2.pp2.tp4", "4x8": "dp2.pp2.tp8" };
const NAMES = { tp: "tensor ranks", dp: "data ranks", pp: "stages" };
const ORDERS = ["tp dp pp", "tp pp dp", "dp tp pp", "dp pp tp", "pp tp dp", "pp dp tp"];
let game; // the course's Python, as soon as it runs
let link; // the position, as in the address
let chosen = 0; // the rank whose groups are shown

const board = () => link.split("/")[0];
const asked = () => `${board()}/${STARTS[board()]}`;
const sizes = () => Object.fromEntries(link.split("/")[1].split(".").map((size) => [size.slice(0, 2), Number(size.slice(2))]));

function begin(address) {
  const [machines, position] = address.split("/");
  link = `${machines}/${position || STARTS[machines]}`;
  chosen = 0;
  at("rules").textContent = "";
}

function show(python, verdict) {
  game = python;
  judged(`${game.words(asked())} How many GB does the busiest rank send to another machine?`, verdict);
  const [machines, node] = board().split("x").map(Number);
  const powers = Array.from({ length: 1 + Math.log2(machines * node) }, (_, i) => String(2 ** i));
  const form = at("sizes").elements;
  options(form.tp, powers);
  options(form.pp, powers);
  options(form.order, ORDERS.map((order) => [order, order.split(" ").map((name) => NAMES[name]).join(", then ")]));
  if ("why" in JSON.parse(game.view(link))) link = asked();
  [form.tp.value, form.pp.value, form.order.value] = [sizes().tp, sizes().pp, Object.keys(sizes()).join(" ")];
  at("end").hidden = false;
  draw();
}

function draw() {
  const shown = JSON.parse(game.view(link));
  at("machines").replaceChildren(...Array.from({ length: shown.machines }, (_, machine) =>
    element("div", { class: "machine" }, element("span", { class: "soft" }, `machine ${machine}`),
      element("div", { class: "ranks" }, ...Array.from({ length: shown.node }, (_, i) => tile(machine * shown.node + i, shown))))));
  at("legend").replaceChildren(`Click a rank to see its groups. Those of rank ${chosen}: `, ...shown.groups.flatMap(({ name }) => [element("span", { class: `key ${name}` }), NAMES[name]]));
  at("groups").replaceChildren(...shown.groups.map((group) => {
    const where = group.ranks === 1 ? "nothing is sent" : group.crosses ? "between machines" : "inside a machine";
    const told = `${number(group.sent)} GB a step, ${Number(group.seconds.toPrecision(2))} s`;
    return element("li", {}, element("span", { class: `key ${group.name}` }), element("strong", {}, `${group.ranks} ${NAMES[group.name]}`), " ",
      element("strong", { class: group.crosses ? "not" : "fits" }, where), " ", element("span", { class: "soft" }, group.ranks > 1 ? told : ""));
  }));
  at("time").textContent = `${number(shown.seconds)} s (par ${number(shown.par)} s)`;
  at("held").textContent = `${number(shown.held)} of ${number(shown.room)} GiB`;
  at("crossing").textContent = `${number(shown.crossing)} GB`;
  at("cell").textContent = game.cell(link);
  if (!shown.fits) say("It does not fit: split the model among more ranks, or keep fewer stages busy.", true);
  else if (number(shown.seconds) === number(shown.par)) say("It fits, and no split of this board has a shorter step.");
  else say("It fits, and another split or order has a shorter step: find it.");
}

function tile(rank, shown) {
  const [mine, other] = [shown.places[chosen], shown.places[rank]];
  const differs = Object.keys(mine).filter((name) => mine[name] !== other[name]);
  const group = rank === chosen ? "chosen" : differs.length === 1 ? differs[0] : "";
  const words = rank === chosen ? "chosen" : group ? `one of its ${NAMES[group]}` : "in no group of it";
  return element("button", { type: "button", class: `rank ${group}`, "data-rank": rank, "aria-pressed": String(rank === chosen),
    "aria-label": `Rank ${rank}, ${words}` }, String(rank));
}

at("sizes").addEventListener("input", () => {
  const { tp, pp, order } = at("sizes").elements;
  const [machines, node] = board().split("x").map(Number);
  const dp = (machines * node) / (tp.value * pp.value);
  if (dp < 1) return say(`${tp.value} tensor ranks x ${pp.value} stages are more than ${machines * node} ranks.`, true);
  const counts = { tp: tp.value, pp: pp.value, dp };
  const next = `${board()}/${order.value.split(" ").map((name) => name + counts[name]).join(".")}`;
  const { why } = JSON.parse(game.view(next));
  if (why) return say(why, true);
  link = next;
  history.replaceState(null, "", `#${link}`);
  draw();
});
at("sizes").addEventListener("submit", (event) => event.preventDefault());
at("machines").addEventListener("click", (event) => {
  const button = event.target.closest("[data-rank]");
  if (!button) return;
  chosen = Number(button.dataset.rank);
  draw();
  at("machines").querySelector(`[data-rank="${chosen}"]`).focus();
});

instrument({ module: "playground.layout", is: (address) => Boolean(STARTS[address.split("/")[0]]), begin, rules: (python) => python.words(asked()), board: () => `layout ${asked()}`, unit: "GB", guesses: (python) => python.guesses(asked()), draw: show, first: () => at("sizes").elements.tp });
