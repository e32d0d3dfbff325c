import { at, element, instrument, number, paragraphs, say } from "./instrument.js";

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
  const form = at("sizes").elements;
  [form.billions.value, form.ranks.value, form.memory.value] = sizes(asked);
}

function show(python, guess) {
  game = python;
  at("end").hidden = false;
  const [billions, ranks, memory] = sizes(asked);
  const truth = JSON.parse(game.view(billions, ranks, memory)).find((row) => row.way === "ZeRO 2").total;
  const right = game.is_right(Number(guess), truth) ? "That is right." : game.likely(billions, ranks, Number(guess));
  paragraphs("verdict", [words(asked), `Under ZeRO 2 a rank holds ${number(truth)} GB; you predicted ${guess}. ${right}`]);
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

instrument({ module: "playground.ledger", begin, board: () => `ledger ${asked}`, draw: show, first: () => at("sizes").elements.ranks });
