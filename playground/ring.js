import { at, element, instrument, judged, number, paragraphs, say } from "./instrument.js";

const BEGIN = "Begin: click a piece. Its rank sends it to the next one.";
const ADDRESS = /^n([2-4])(\/(\d\d)*)?$/;
let game; // the course's Python, as soon as it runs
let link; // the moves, as in the address

const ranks = () => Number(link[1]);
const board = () => `ring ${link.slice(0, 2)}`;

function begin(address) {
  link = address;
  at("rules").textContent = `There are ${ranks()} ranks, and each has 12 MB of gradients.`;
  say(BEGIN);
}

function draw(python, verdict) {
  game = python;
  const shown = JSON.parse(game.view(link));
  judged(at("rules").textContent, verdict);
  at("ranks").className = at("hint").checked && !shown.over ? "hint" : "";
  at("ranks").replaceChildren(...shown.ranks.map((rank, i) => row(rank, i, shown)));
  at("legend").replaceChildren("What is in a piece: ", ...shown.ranks.flatMap((_, i) => [element("span", { class: `key rank${i}` }), `rank ${i}'s numbers`]));
  at("most").textContent = `${number(shown.most)} MB (par ${number(shown.par)})`;
  at("steps").textContent = `${shown.steps} (par ${shown.stepsPar})`;
  at("back").disabled = !link.slice(3);
  if (shown.stuck.length) say(`No rank may send piece ${shown.stuck[0]} any more, and some lack its sum: take something back.`, true);
  if (shown.over) end(shown);
}

function row(rank, i, shown) {
  const to = (i + 1) % ranks();
  const pieces = rank.pieces.map((inside, piece) => {
    const dots = shown.ranks.map((_, r) => element("i", { class: inside.includes(r) ? `rank${r}` : "" }));
    const whole = inside.length === ranks();
    const has = whole ? "the whole sum" : inside.length > 1 ? `the sum of ranks ${inside.join(", ")}` : `its own`;
    const classes = ["piece", whole && "whole", rank.refused[piece] ? "no" : "may"];
    return element("button", { type: "button", "data-rank": i, "data-piece": piece, class: classes.filter(Boolean).join(" "),
      "aria-label": `Rank ${i}, piece ${piece}: ${has}. Send it to rank ${to}` },
    element("span", {}, `piece ${piece}${whole ? " ✓" : ""}`), element("span", { class: "dots" }, ...dots));
  });
  const said = element("p", { class: "soft" }, element("strong", {}, `rank ${i}`), ` → rank ${to}, ${number(rank.sent * shown.megabytes)} MB sent so far`);
  return element("div", { class: "ring" }, said, element("div", { class: "pieces" }, ...pieces));
}

function go(next) {
  link = next;
  history.replaceState(null, "", `#${link}`);
  update();
}

function end(shown) {
  const even = shown.ranks.every((rank) => rank.sent * shown.megabytes === shown.par);
  const least = even && shown.steps === shown.stepsPar
    ? "That is the least: each rank sends 2 (n - 1)/n of its gradients, in 2 (n - 1) steps in which all ranks send."
    : `The least is ${number(shown.par)} MB for each rank, in ${shown.stepsPar} steps: let all ranks send in every step.`;
  paragraphs("result", [`The busiest has sent ${number(shown.most)} MB, in ${shown.steps} steps. ${least}`]);
  at("cell").textContent = game.cell(link);
  at("end").hidden = false;
  at("truth").focus();
}

at("ranks").addEventListener("click", (event) => {
  const button = event.target.closest("[data-rank]");
  if (!button) return;
  const { rank, piece } = button.dataset;
  const { link: next, said } = JSON.parse(game.move(link, Number(rank), Number(piece)));
  const legal = next !== link;
  say(said, !legal);
  if (!legal) return;
  go(next);
  if (at("end").hidden) at("ranks").querySelector(`[data-rank="${rank}"][data-piece="${piece}"]`).focus();
});
at("hint").addEventListener("change", () => update());
at("back").addEventListener("click", () => {
  say("Taken back.");
  go(link.slice(0, -2).replace(/\/$/, ""));
});
at("again").addEventListener("click", () => {
  say(BEGIN);
  go(link.slice(0, 2));
});

const update = instrument({ module: "playground.ring", is: (address) => ADDRESS.test(address), begin, board, unit: "MB", guesses: (python) => python.guesses(ranks()), draw, first: () => at("ranks").querySelector("button") });
