// Starts Python in the browser and gives a page a module of the course.

export async function course(module) {
  const [python, files] = await Promise.all([
    import("./pyodide/pyodide.mjs").then(({ loadPyodide }) => loadPyodide()), // the page works meanwhile
    fetch("course.zip").then((reply) => reply.arrayBuffer()),
  ]);
  python.unpackArchive(files, "zip", { extractDir: "/course" });
  python.runPython("import sys; sys.path.insert(0, '/course')");
  return python.pyimport(module);
}

// An element with attributes and children; a child may be a text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export const at = (id) => document.getElementById(id);
export const number = (value) => String(Math.round(value * 100) / 100);

export function say(text, no = false) {
  at("said").textContent = text;
  at("said").classList.toggle("no", no);
}

// To be called when a page listens: buttons wait for that, and those that copy have no more to do.
export function ready() {
  document.querySelectorAll("form button").forEach((button) => (button.disabled = false));
  document.addEventListener("click", (event) => {
    const { copy } = event.target.dataset;
    if (copy) navigator.clipboard.writeText(at(copy).textContent).then(() => (event.target.textContent = "Copied"));
  });
}

// A prediction is kept in this browser, and nowhere else.
export const predictions = {
  of: (what) => localStorage.getItem(`prediction ${what}`),
  lock: (what, guess) => localStorage.setItem(`prediction ${what}`, guess),
};
