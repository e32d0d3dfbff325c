"""Makes the notebooks that Colab and Kaggle open: python tools/publish.py

Each is the learner's copy, with its outputs, behind a first cell (`first_cell.py`) that fetches the
course where it runs there, and prints nothing, there or elsewhere: so a published notebook is
tested like the others. The notebooks of this repository have no such cell: most readers would meet
it first, and whoever has cloned it needs none. The course comes from `repository` in
pyproject.toml, which whoever publishes it sets.
"""

import sys
import tomllib
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).resolve().parents[1]
CELL = Path(__file__).with_name("first_cell.py")
# Folded in JupyterLab, in Colab and in Kaggle
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form", "_kg_hide-input": True}


def address(root: Path) -> str:
    """Where the published course lies, for `git clone`; empty if nobody has said it."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    return settings["tool"]["course"]["repository"]


def first_cell(repository: str) -> nbformat.NotebookNode:
    """Returns the cell that fetches the course from there."""
    text = CELL.read_text(encoding="utf-8").strip().replace('"ADDRESS"', repr(repository))
    return new_code_cell(text, id="fetch-the-course", metadata=FOLDED)


def publish(root: Path, repository: str, folder: Path) -> list[Path]:
    """Writes each of the learner's notebooks into `folder`, behind the first cell."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, first_cell(repository))
        nbformat.write(notebook, folder / path.name)
        written.append(folder / path.name)
    return written


def main() -> int:
    """Run the command; return the exit status."""
    repository = address(ROOT)
    if not repository:
        sys.stderr.write(
            "Nobody has said where the course lies: set `repository` under [tool.course] in "
            "pyproject.toml to the address that `git clone` takes, and run this again.\n"
        )
        return 1
    folder = ROOT / "build" / "colab"
    written = publish(ROOT, repository, folder)
    print(
        f"{len(written)} notebooks for Colab and Kaggle are in {folder}; they fetch {repository}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
