// What all pages share: Python in the browser, and a prediction that is locked before the board opens.

// The course's Python, by the name of a module.
async function course(module) {
  const [python, files] = await Promise.all([
    import("./pyodide/pyodide.mjs").then(({ loadPyodide }) => loadPyodide()), // the page works meanwhile
    fetch("course.json").then((reply) => reply.json()),
  ]);
  for (const [path, text] of Object.entries(files)) {
    python.FS.mkdirTree(`/course/${path}`.replace(/\/[^/]*$/, ""));
    python.FS.writeFile(`/course/${path}`, text);
  }
  python.runPython("import sys; sys.path.insert(0, '/course')");
  return python.pyimport(module);
}

export const at = (id) => document.getElementById(id);
export const number = (value) => String(Math.round(value * 100) / 100);

// An element with attributes and children; a child may be a text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

// The choices of a select: values, or pairs of a value and its words.
export const options = (select, choices) => select.replaceChildren(...choices.map((choice) => {
  const [value, words] = Array.isArray(choice) ? choice : [choice, choice];
  return element("option", { value }, words);
}));

export const paragraphs = (id, texts) => at(id).replaceChildren(...texts.map((text) => element("p", {}, text)));

// The verdict on a prediction, and the question for who wants to read it again.
export function judged(question, ...verdicts) {
  paragraphs("verdict", verdicts);
  at("verdict").append(element("details", { class: "soft" }, element("summary", {}, "The question"), element("p", {}, question)));
}

export function say(text, no = false) {
  at("said").textContent = text;
  at("said").classList.toggle("no", no);
}

// A page: `is(address)` says whether it has such a board, and `begin(address)` takes it, or the first of those that the
// page links to; `board` names what is predicted; `guesses(game)` is what one may choose, in some `unit`, and `rules(game)`, if any, says what is asked; `draw(game,
// verdict)` shows the board, and `first` finds where the focus goes when it opens. Returns the function that draws anew.
// A prediction is kept in this browser, and nowhere else.
export function instrument({ module, is, begin, board, guesses, unit, rules, draw, first }) {
  const links = [...document.querySelectorAll(".boards a")];
  const addresses = links.map((link) => link.hash.slice(1));
  let game;
  let choices = [];
  const kept = () => `prediction ${board()}`;
  function ask() {
    choices = JSON.parse(guesses(game));
    if (rules) at("rules").textContent = rules(game);
    at("guesses").replaceChildren(...choices.map(({ value }) => element("button", { class: "main", value }, `${number(value)} ${unit}`)));
  }
  function update() {
    const guess = choices.find(({ value }) => String(value) === localStorage.getItem(kept()));
    at("loading").hidden = Boolean(game);
    at("first").hidden = Boolean(guess);
    at("board").hidden = !guess;
    at("end").hidden = true;
    if (guess) draw(game, `You predicted ${number(guess.value)} ${unit}. ${guess.said}`);
  }
  function start() {
    const address = location.hash.slice(1);
    begin(is(address) ? address : addresses[0]);
    links.forEach((link, i) => (link.ariaCurrent = board().includes(addresses[i].split("/")[0]) ? "true" : null));
    if (game) ask();
    update();
  }
  window.addEventListener("hashchange", start);
  start();
  course(module).then((python) => {
    game = python;
    ask();
    update();
  });
  at("predict").addEventListener("submit", (event) => {
    event.preventDefault();
    localStorage.setItem(kept(), event.submitter.value);
    update();
    first().focus({ preventScroll: true });
    at("board").scrollIntoView({ block: "nearest" });
  });
  document.addEventListener("click", (event) => {
    const { copy } = event.target.dataset;
    if (copy) navigator.clipboard.writeText(at(copy).textContent).then(() => (event.target.textContent = "Copied"));
  });
  document.querySelectorAll("details button").forEach((button) => (button.disabled = false));
  return update;
}
