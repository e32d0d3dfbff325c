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

export function say(text, no = false) {
  at("said").textContent = text;
  at("said").classList.toggle("no", no);
}

// A page: `begin` reads the address, `board` names what is predicted, `draw(game, guess)` shows the board,
// `rules(game)`, if any, says what is asked, and `first` finds where the focus goes when the board opens. Returns the function that draws anew. A prediction
// is kept in this browser, and nowhere else.
export function instrument({ module, begin, board, rules, draw, first }) {
  let game;
  const kept = () => `prediction ${board()}`;
  function update() {
    const guess = localStorage.getItem(kept());
    const open = Boolean(game && guess);
    at("loading").hidden = Boolean(game);
    at("first").hidden = open;
    at("predict").hidden = Boolean(guess);
    at("board").hidden = !open;
    at("end").hidden = true;
    if (game && rules) at("rules").textContent = rules(game);
    if (open) draw(game, guess);
  }
  function start() {
    at("guess").value = "";
    begin();
    update();
  }
  window.addEventListener("hashchange", start);
  start();
  const loaded = course(module).then((python) => {
    game = python;
    update();
  });
  at("predict").addEventListener("submit", (event) => {
    event.preventDefault();
    localStorage.setItem(kept(), number(Number(at("guess").value)));
    update();
    loaded.then(() => first().focus());
  });
  document.addEventListener("click", (event) => {
    const { copy } = event.target.dataset;
    if (copy) navigator.clipboard.writeText(at(copy).textContent).then(() => (event.target.textContent = "Copied"));
  });
  document.querySelectorAll("form button").forEach((button) => (button.disabled = false));
  return update;
}
