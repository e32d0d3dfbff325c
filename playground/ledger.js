import { at, element, instrument, judged, number, say } from "./instrument.js";

const ADDRESS = /^(\d{1,4}(?:\.\d)?)\/([1-9]\d{0,4})\/([1-9]\d{0,3})$/;
let game; // the course's Python, as soon as it runs
let asked; // the board for which a prediction is asked

const sizes = (link) => ADDRESS.exec(link).slice(1).map(Number);
const words = (link) => {
  const [billions, ranks, memory] = sizes(link);
  return `A model of ${billions} billion parameters trains on ${ranks} ranks, each with a GPU of ${memory} GB, in mixed precision with Adam.`;
};

function begin(address) {
  asked = address;
  at("rules").textContent = words(asked);
  const form = at("sizes").elements;
  [form.billions.value, form.ranks.value, form.memory.value] = sizes(asked);
}

function show(python, verdict) {
  game = python;
  at("end").hidden = false;
  judged(`${words(asked)} How many GB does a rank hold under ZeRO 2?`, verdict);
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
    const from = fewest ? `Fits from ${fewest} rank${fewest > 1 ? "s" : ""} on` : "Never fits";
    const size = element("strong", { class: row.fits ? "fits" : "not" }, `${number(row.total)} GB, ${row.fits ? "fits" : "too much"}`);
    const cut = row.most ? `, cut in ${row.most} at most` : "";
    const more = `${from}. On these ranks the largest model has ${number(row.largest)} billion.`;
    return element("li", {}, element("strong", {}, row.way), `${cut}: `, size, " ", element("span", { class: "soft" }, more),
      element("div", { class: "bar" }, ...parts, limit));
  }));
  at("legend").replaceChildren(...Object.keys(rows[0].parts).flatMap((sort) => [element("span", { class: `key ${sort}` }), sort]),
    element("span", { class: "key line" }), "what a GPU has room for");
  say(`Change the numbers and see. Now it fits with ${rows.filter((row) => row.fits).map((row) => row.way).join(", ") || "none of them"}.`);
  at("few").textContent = String(Math.min(ranks, 4));
  at("cell").textContent = game.cell(ranks);
}

at("sizes").addEventListener("input", draw);
at("sizes").addEventListener("submit", (event) => event.preventDefault());

instrument({ module: "playground.ledger", is: (address) => ADDRESS.test(address), begin, board: () => `ledger ${asked}`, unit: "GB", guesses: (python) => python.guesses(...sizes(asked).slice(0, 2)), draw: show, first: () => at("sizes").elements.ranks });
