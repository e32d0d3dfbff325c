import { at, element, instrument, judged, number, paragraphs, say } from "./instrument.js";

const BOARD = /^p([2-4])m([1-8])(v1|v2|V2)-(FBW?)-cap(\d\d?)(\/|$)/;
const WORDS = { F: "forward", B: "backward", W: "its second half: the gradient of the weights" };

let game; // the course's Python, as soon as it runs
let link; // the position, as in the address
let chosen = 0; // the rank on which to place
let shown; // what Python says of the position
let earlier = []; // positions to take back to

const board = () => link.split("/")[0];
const percent = (share) => `${(100 * share).toFixed(1)} %`;

function begin(address) {
  link = address;
  chosen = 0;
  earlier = [];
  say(link === board() ? "Begin: click rank 0's row, or F0." : "");
  const [, p, m, v, kinds, cap] = BOARD.exec(link);
  const work = kinds === "FBW" ? "F, B and W take 1 unit of time each" : "F takes 1 unit of time, B takes 2";
  const turn = v === "V2" ? " The line turns at the last rank and comes back, so rank 0 has its first chunk and its last." : "";
  const pieces = v[1] === "2" ? ` Each rank holds 2 chunks, and a pass through a chunk takes half as long.${turn}` : "";
  const halves = kinds === "FBW" ? " W must follow its B, and no other rank waits for it." : "";
  at("rules").textContent = `${p} ranks, ${m} micro-batch${m > 1 ? "es" : ""}. ${work}.${pieces}${halves} ` +
    `A rank may hold at most ${cap} micro-batch${cap > 1 ? "es" : ""} between F and ${kinds === "FBW" ? "W" : "B"} (in flight).`;
  const passes = [...kinds].join(", ").replace(/, (?=\w$)/, " and ");
  at("keys").textContent = `Keys: 0 to ${p - 1} choose a rank, ${passes} place its next pass, U takes back.`;
}

function show(python, verdict) {
  game = python;
  if (!earlier.length) link = game.playable(link);
  shown = JSON.parse(game.view(link));
  judged(at("rules").textContent, verdict);
  draw();
  if (shown.over) end();
}

function draw() {
  const units = Math.max(shown.time, shown.par, 3 * shown.microBatches) + 1.5;
  at("lanes").style.setProperty("--units", units);
  at("lanes").replaceChildren(...shown.ranks.map(lane), axis(units));
  const kinds = [...shown.kinds].flatMap((kind) => [element("span", { class: `key ${kind}` }), `${kind}: ${WORDS[kind]}`]);
  at("legend").replaceChildren(...kinds, element("span", { class: "key critical" }), "a critical path", element("span", { class: "shelf key-shelf" }, element("i", { class: "kept" })), "in flight", element("span", { class: "shelf key-shelf" }, element("i", { class: "was" })), "the most at once so far");
  at("time").textContent = `${number(shown.time)} (par ${number(shown.par)})`;
  at("idle").textContent = percent(shown.idle);
  const placed = shown.ranks.some((rank) => rank.ops.length);
  at("names").textContent = placed ? shown.names.join(", ") || "no schedule with a name" : "–";
  at("rank").replaceChildren(at("rank").firstElementChild, ...shown.ranks.map((_, rank) =>
    element("label", {}, element("input", { type: "radio", name: "rank", value: rank, checked: rank === chosen }), `rank ${rank}`)));
  at("back").disabled = !earlier.length;
  at("place").hidden = shown.over;
  palette();
  const last = at("lanes").querySelector(".newest");
  if (last) at("lanes").scrollLeft = last.offsetLeft - at("lanes").clientWidth / 2;
}

function lane(rank, i) {
  const ops = rank.ops.map((op) => {
    const classes = ["op", op.kind, op.chunk && "later", op.critical && "critical", op.end === shown.time && "newest"];
    const box = element("li", { class: classes.filter(Boolean).join(" ") }, `${op.end - op.start < 1 ? "" : op.kind}${op.microBatch}`);
    box.prepend(element("span", {}, `${op.name}, ${number(op.start)} to ${number(op.end)}: `));
    box.style.setProperty("--start", op.start);
    box.style.setProperty("--length", op.end - op.start);
    return box;
  });
  const track = element("div", { class: "track" }, element("ol", { "aria-label": `rank ${i}` }, ...ops));
  const line = element("div", { class: "parline" });
  line.style.setProperty("--start", shown.par);
  track.append(line);
  const places = [...Array(shown.cap).keys()].map((i) =>
    element("i", { class: i < rank.kept ? "kept" : i < rank.peak ? "was" : "" }));
  const told = `${rank.kept} of ${shown.cap} in flight, at most ${rank.peak} so far`;
  const shelf = element("div", { class: "shelf", role: "img", "aria-label": told, title: told }, ...places);
  return element("div", { class: i === chosen ? "lane chosen" : "lane", "data-rank": i },
    element("div", {}, element("strong", {}, `rank ${i}`, element("small", {}, ` ${rank.kept}/${shown.cap}`)), shelf), track);
}

function axis(units) {
  const step = units > 30 ? 5 : units > 14 ? 3 : 1;
  const places = [...Array(Math.ceil(units)).keys()].filter((unit) => unit % step === 0 && Math.abs(unit - shown.par) >= step);
  const marks = places.map((unit) => [String(unit), unit, ""]);
  marks.push([`par ${number(shown.par)}`, shown.par, "par"]);
  const line = element("div", { class: "axis", "aria-hidden": true }, ...marks.map(([text, unit, name]) => {
    const mark = element("span", { class: name }, text);
    mark.style.setProperty("--start", unit);
    return mark;
  }));
  return element("div", { class: "lane" }, element("div"), line);
}

function palette() {
  const { left } = shown.ranks[chosen];
  const rows = [...shown.kinds].flatMap((kind) => [...Array(shown.chunks).keys()].map((chunk) => [kind, chunk]));
  const names = rows.flatMap(([kind, chunk]) =>
    [...Array(8).keys()].map((i) => (i < shown.microBatches ? `${kind}${i}${chunk ? `.${chunk}` : ""}` : "")));
  at("moves").setAttribute("aria-label", `Passes of rank ${chosen}`);
  at("moves").className = at("hint").checked ? "moves hint" : "moves";
  at("moves").replaceChildren(...names.map((name) => {
    if (!(name in left)) return element("span");
    const may = left[name] === null;
    const told = at("hint").checked && may ? `${name}, may go next` : name;
    const later = name.includes(".") ? " later" : "";
    return element("button", { type: "button", class: `${name[0]}${later} ${may ? "may" : "no"}`, "data-op": name, "aria-label": told }, name);
  }));
}

function place(name) {
  const { link: next, said } = JSON.parse(game.move(link, chosen, name));
  const legal = next !== link;
  if (legal) go(next);
  say(shown.stuck ? `${said} Now nothing may go anywhere: take something back.` : said, !legal || shown.stuck);
  if (!shown.over) (at("moves").querySelector(`[data-op="${name}"]`) ?? following(name[0])).focus();
}

// Where the focus goes when the button with the focus is gone.
function following(kind = "") {
  return at("moves").querySelector(`[data-op^="${kind}"]`) ?? at("moves").querySelector("button") ?? at("rank").querySelector(":checked");
}

function go(next) {
  earlier.push(link);
  link = next;
  history.replaceState(null, "", `#${link}`);
  update();
}

function takeBack() {
  if (!earlier.length) return;
  link = earlier.pop();
  history.replaceState(null, "", `#${link}`);
  say("Taken back.");
  update();
  following().focus();
}

function end() {
  const time = number(shown.time);
  const name = shown.names.length ? ` It is ${shown.names.join(", which here is the same as ")}.` : "";
  const par = `It is proven that ${number(shown.par)} is the least. ` +
    (shown.time > shown.par ? "So there is a shorter one: find it." : "No schedule on this board is shorter.");
  const told = [`Your step takes ${time} units, and its ranks are idle for ${percent(shown.idle)} of it.${name}`, par];
  paragraphs("result", told);
  at("cell").textContent = `import matplotlib.pyplot as plt\nfrom course_exercises import play\n\nplay("${link}")\nplt.show()`;
  at("command").textContent = `python -m course_utils play ${link}`;
  at("end").hidden = false;
  at("truth").focus();
}

// The next pass of a kind on the chosen rank: one that may go, or the first that is left.
function next(kind) {
  const { left } = shown.ranks[chosen];
  const names = Object.keys(left).filter((name) => name[0] === kind);
  return names.find((name) => left[name] === null) ?? names[0];
}

function choose(rank) {
  if (rank !== chosen) say("");
  chosen = rank;
  draw();
  following().focus();
}

at("board").addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.toUpperCase();
  if (/^\d$/.test(key) && Number(key) < shown.ranks.length) choose(Number(key));
  else if (shown.kinds.includes(key) && next(key)) place(next(key));
  else if (key === "U") takeBack();
  else return;
  event.preventDefault();
});
at("moves").addEventListener("click", (event) => event.target.dataset.op && place(event.target.dataset.op));
at("rank").addEventListener("change", (event) => {
  chosen = Number(event.target.value);
  draw();
  at("rank").querySelector(":checked").focus();
});
at("lanes").addEventListener("click", (event) => {
  const lane = event.target.closest("[data-rank]");
  if (!lane || shown.over) return;
  choose(Number(lane.dataset.rank));
  const [kind, other] = [...shown.kinds].filter((each) => shown.ranks[chosen].left[next(each)] === null);
  if (kind && !other) place(next(kind));
  else say(kind ? `Choose a pass for rank ${chosen}, below.` : `Nothing may go on rank ${chosen} now: another rank comes first.`);
});
at("hint").addEventListener("change", palette);
at("back").addEventListener("click", takeBack);
at("again").addEventListener("click", () => go(board()));
const own = at("own").querySelector("form");
for (let m = 1; m <= 8; m++) own.m.append(element("option", {}, String(m)));
own.addEventListener("change", caps);
function caps() {
  const [fewest, most] = own.kind.value[1] === "2" ? [2, 2 * own.m.value] : [1, Number(own.m.value)];
  const kept = own.cap.value;
  own.cap.replaceChildren(...Array.from({ length: most - fewest + 1 }, (_, i) => element("option", {}, String(i + fewest))));
  own.cap.value = [...own.cap.options].some((option) => option.value === kept) ? kept : most;
}
caps();
own.addEventListener("submit", (event) => {
  event.preventDefault();
  location.hash = `p${own.p.value}m${own.m.value}${own.kind.value}-cap${own.cap.value}`;
});

const update = instrument({ module: "playground.game", is: (address) => BOARD.test(address), begin, board, unit: "units", guesses: (python) => python.guesses(board()), draw: show, first: following });
