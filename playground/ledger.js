import { at, course, element, number, predictions, ready, say } from "./python.js";

const ADDRESS = /^(\d{1,4}(?:\.\d)?)\/([1-9]\d{0,4})\/([1-9]\d{0,3})$/;
const FIRST = "7.5/64/40";
let game; // the course's Python, as soon as it runs
let asked; // the board for which a prediction is asked

const sizes = (link) => ADDRESS.exec(link).slice(1).map(Number);
const words = (link) => {
  const [billions, ranks, memory] = sizes(link);
  return `A model of ${billions} billion parameters trains on ${ranks} ranks, each with a GPU of ${memory} GB, in mixed precision with Adam.`;
};

function begin() {
  asked = ADDRESS.test(location.hash.slice(1)) ? location.hash.slice(1) : FIRST;
  at("rules").textContent = words(asked);
  at("guess").value = "";
  const form = at("sizes").elements;
  [form.billions.value, form.ranks.value, form.memory.value] = sizes(asked);
  update();
}

function update() {
  const guess = predictions.of(`ledger ${asked}`);
  const open = Boolean(game && guess);
  at("loading").hidden = Boolean(game);
  at("first").hidden = open;
  at("predict").hidden = Boolean(guess);
  at("board").hidden = at("end").hidden = !open;
  if (!open) return;
  const [billions, ranks, memory] = sizes(asked);
  const truth = JSON.parse(game.view(billions, ranks, memory)).find((row) => row.way === "ZeRO 2").total;
  const right = game.is_right(Number(guess), truth) ? "That is right." : game.likely(billions, ranks, Number(guess));
  const told = [words(asked), `Under ZeRO 2 a rank holds ${number(truth)} GB; you predicted ${guess}. ${right}`];
  at("verdict").replaceChildren(...told.map((text) => element("p", {}, text)));
  draw();
}

function draw() {
  const form = at("sizes").elements;
  const link = `${form.billions.value}/${form.ranks.value}/${form.memory.value}`;
  if (!ADDRESS.test(link)) return;
  const [billions, ranks, memory] = sizes(link);
  const rows = JSON.parse(game.view(billions, ranks, memory));
  const most = Math.max(memory, ...rows.map((row) => row.total));
  at("bars").replaceChildren(...rows.map((row) => {
    const parts = Object.entries(row.parts).map(([sort, size]) => {
      const part = element("span", { class: `part ${sort}` });
      part.style.width = `${(100 * size) / most}%`;
      return part;
    });
    const limit = element("span", { class: "limit" });
    limit.style.left = `${(100 * memory) / most}%`;
    const fewest = game.fewest(row.way, billions, memory);
    const from = fewest ? `fits from ${fewest} rank${fewest > 1 ? "s" : ""} on` : "never fits";
    const size = element("strong", { class: row.fits ? "fits" : "not" }, `${number(row.total)} GB, ${row.fits ? "fits" : "too much"}`);
    const more = `This model ${from}; on these ranks the largest has ${number(row.largest)} billion.`;
    return element("li", {}, element("strong", {}, row.way), " ", size, " ", element("span", { class: "soft" }, more),
      element("div", { class: "bar" }, ...parts, limit));
  }));
  at("legend").replaceChildren(...Object.keys(rows[0].parts).flatMap((sort) => [element("span", { class: `key ${sort}` }), sort]),
    element("span", { class: "key line" }), "what a GPU has room for");
  say(`It fits with ${rows.filter((row) => row.fits).map((row) => row.way).join(", ") || "none of them"}.`);
  at("few").textContent = String(Math.min(ranks, 4));
  at("cell").textContent = game.cell(ranks);
}

at("sizes").addEventListener("input", draw);
at("sizes").addEventListener("submit", (event) => event.preventDefault());
at("predict").addEventListener("submit", (event) => {
  event.preventDefault();
  predictions.lock(`ledger ${asked}`, number(Number(at("guess").value)));
  update();
  at("sizes").elements.ranks.focus();
});

window.addEventListener("hashchange", begin);
begin();
ready();
game = await course("playground.ledger");
update();
