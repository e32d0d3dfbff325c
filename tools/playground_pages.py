"""Makes the playground: static pages that run the course's own Python in the browser.

python tools/playground_pages.py      writes build/playground

Python for browsers is Pyodide, from its npm package. Once the folder is there, nothing needs a network.
"""

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from string import Template

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "playground"
FRAME = PAGES / "frame.html"  # around each page, whose first line is its title
PARTS = ("prediction", "real")  # a page names them as an element, and its text goes into $text
FOLDER = ROOT / "build" / "playground"
VERSION = "314.0.7"
SHA256 = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PACKAGE = ROOT / "build" / "npm" / f"pyodide-{VERSION}.tgz"
PYODIDE = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
PLANNER = (
    *("catalogue", "counting", "descriptions", "memory", "networks", "pipelining", "searching"),
    *("stages", "timing", "traffic"),
)
# what the pages import; it needs the standard library alone
PYTHON = (
    "course_utils/lesson/schedules.py",
    "course_utils/comm/rings.py",
    "course_exercises/checks/positions.py",
    *(f"course_planner/{name}.py" for name in PLANNER),
    *("data/catalogue/models.json", "data/catalogue/gpus.json"),
    *(f"playground/{name}.py" for name in ("game", "guesses", "ring", "ledger", "layout", "plan")),
    "playground/pars.json",
)


def fetch() -> None:
    """Get Pyodide's package, unless it is there. Raises RuntimeError where npm is missing or fails."""
    if PACKAGE.exists():
        return
    PACKAGE.parent.mkdir(parents=True, exist_ok=True)
    if not (npm := shutil.which("npm")):
        raise RuntimeError(
            "The playground needs npm, which brings Python for browsers: install Node.js."
        )
    command = [npm, "pack", f"pyodide@{VERSION}", "--silent"]
    done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=False)
    if done.returncode or not PACKAGE.exists():
        raise RuntimeError(f"npm did not fetch pyodide {VERSION}: {done.stderr.strip()}")


def framed(path: Path) -> str:
    """A whole page: its head, the way to the others, and what is its own."""
    title, main = path.read_text(encoding="utf-8").split("\n", 1)
    frame = FRAME.read_text(encoding="utf-8").replace(
        f'"{path.name}"', f'"{path.name}" aria-current="page"'
    )
    for name in PARTS:
        part = Template((PAGES / f"{name}.html").read_text(encoding="utf-8"))
        element = rf"(?ms)^ *<{name}>(?P<text>.*?)</{name}>\n"
        main = re.sub(element, lambda found, to=part: to.substitute(found.groupdict()), main)
    return frame.replace("<title>$title</title>", title).replace("$main", main)


def build(folder: Path) -> None:
    """Write the pages, the course's Python and Pyodide into `folder`. Raises RuntimeError."""
    fetch()
    if hashlib.sha256(PACKAGE.read_bytes()).hexdigest() != SHA256:
        raise RuntimeError(f"{PACKAGE} is not the package that the course knows: delete it.")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "pyodide").mkdir(parents=True)
    for path in (*PAGES.glob("*.css"), *PAGES.glob("*.js")):
        shutil.copy(path, folder)
    parts = {FRAME, *(PAGES / f"{name}.html" for name in PARTS)}
    for path in set(PAGES.glob("*.html")) - parts:
        (folder / path.name).write_text(framed(path), encoding="utf-8")
    with tarfile.open(PACKAGE) as package:
        for name in PYODIDE:
            (folder / "pyodide" / name).write_bytes(package.extractfile(f"package/{name}").read())
    course = {name: (ROOT / name).read_text(encoding="utf-8") for name in PYTHON}
    (folder / "course.json").write_text(json.dumps(course), encoding="utf-8")


def main() -> None:
    """Build, and say how the pages are opened."""
    try:
        build(FOLDER)
    except RuntimeError as error:
        sys.exit(str(error))
    size = sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file())
    print(
        f"The playground ({size / 1e6:.1f} MB): {FOLDER}. Any static server shows it, for instance"
    )
    print(f"    python -m http.server --bind 127.0.0.1 --directory {FOLDER}")


if __name__ == "__main__":
    main()
