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

// A prediction is kept in this browser, and nowhere else.
export const predictions = {
  of: (what) => localStorage.getItem(`prediction ${what}`),
  lock: (what, guess) => localStorage.setItem(`prediction ${what}`, guess),
};
