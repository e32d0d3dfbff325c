"""Makes the book: the learner's notebooks, with their stored outputs, as a static website.

python tools/book.py [FOLDER]      build/book/html unless a folder is named

The pages are copies of notebooks/, in which "chapter 6" becomes a link to chapter 6. Sphinx with
MyST-NB and the theme of Jupyter Book makes the website; any warning of theirs, such as a link that
leads nowhere, fails the build. Nothing is executed, and a reader's browser loads nothing from
elsewhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "book" / "pages"
# what may hold "chapter 6" or "06: 3", its section 3, and must stay as it is: code, a link, a heading
FIXED = r"```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^#.*?$"
MENTION = re.compile(
    rf"(?P<fixed>{FIXED})|\b([Cc]hapter (?P<number>\d)|0(?P<row>\d): \d)\b",
    re.MULTILINE | re.DOTALL,
)


def linked(text: str, chapters: dict[str, str], own: str) -> str:
    """Markdown in which every mention of another chapter leads to it."""

    def link(found: re.Match) -> str:
        number = found["number"] or found["row"]
        if found["fixed"] or number == own or number not in chapters:
            return found[0]
        return f"[{found[0]}]({chapters[number]})"

    return MENTION.sub(link, text)


def write_pages(pages: Path) -> None:
    """Write what Sphinx reads: settings, pictures, first page, and a copy of every notebook."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "book", pages)
    shutil.copytree(ROOT / "notebooks" / "images", pages / "images")
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    chapters = {path.name[1]: path.name for path in notebooks if path.name[0].isdigit()}
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = linked(cell.source, chapters, own=path.name[1])
        nbformat.write(notebook, pages / path.name)


def build(html: Path) -> int:
    """Write the website into the folder `html`; return Sphinx's exit status."""
    write_pages(PAGES)
    shutil.rmtree(html, ignore_errors=True)
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", "-b", "html", *strict]
    return subprocess.call([*command, "-d", str(PAGES.parent / "doctrees"), str(PAGES), str(html)])


def main(arguments: list[str]) -> int:
    """Build the book and say where it lies; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=PAGES.parent / "html")
    folder = parser.parse_args(arguments).folder
    status = build(folder)
    print(f"The book: {folder / 'index.html'}" if status == 0 else "The book was not built.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
