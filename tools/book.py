"""Makes the book: the learner's notebooks, with their stored outputs, as a static website.

python tools/book.py [FOLDER]      build/book/html unless a folder is named

The pages are copies of notebooks/ and docs/, in which "chapter 6" becomes a link to chapter 6. Sphinx with
MyST-NB and the theme of Jupyter Book makes the website; any warning of theirs, such as a link that
leads nowhere, fails the build. The playground lies in it, where npm is there to fetch what it needs. (Jupyter Book 2 renders with Node, which it downloads.) Nothing is
executed, and a reader's browser loads nothing from elsewhere.
"""

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import playground_pages

from course_exercises.sources.chapters import chapters as lessons

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "book" / "pages"
HTML = PAGES.parent / "html"
# what may hold "chapter 6" or "06: 3", its section 3, and must stay as it is: code, a link, a heading
FIXED = r"```.*?```|`[^`]*`|!?\[[^\]]*\]\([^)]*\)|^#.*?$"
MENTION = re.compile(
    rf"(?P<fixed>{FIXED})|\b([Cc]hapter (?P<number>\d\d?)|(?P<row>\d\d)(?P<beyond> further)?: \d)\b",
    re.MULTILINE | re.DOTALL,
)

PLACE = "<!-- playground -->\n"  # in the first page
PLAY = """```{raw} html
<p><a href="playground/index.html">Play first</a>: nothing to install, the course's own Python runs in your browser.</p>
```
"""


def linked(text: str, chapters: dict[str, str], own: str) -> str:
    """Markdown in which every mention of another chapter leads to its lesson, or beyond it."""

    def link(found: re.Match) -> str:
        if found["fixed"]:
            return found[0]
        number = str(int(found["number"] or found["row"])) + (found["beyond"] or "")
        if chapters.get(number, own) == own:
            return found[0]
        return f"[{found[0]}]({chapters[number]})"

    return MENTION.sub(link, text)


def inside(text: str) -> str:
    """A page of docs/ in which links to files that are not in the book keep their words only."""

    def link(found: re.Match) -> str:
        words, target = found.groups()
        if target.startswith("../notebooks/"):
            return f"[{words}]({target.replace('notebooks/', '')})"
        return words if target.startswith("../") else found[0]

    return re.sub(r"\[([^\]]*)\]\(([^)]*)\)", link, text)


def write_pages(pages: Path, play: bool) -> None:
    """Write what Sphinx reads: settings, pictures, first page, a copy of every notebook and of docs/. The
    first page leads to the playground where there is one."""
    shutil.rmtree(pages, ignore_errors=True)
    shutil.copytree(ROOT / "book", pages)
    first = (pages / "index.md").read_text(encoding="utf-8")
    (pages / "index.md").write_text(first.replace(PLACE, PLAY if play else ""), encoding="utf-8")
    shutil.copytree(ROOT / "notebooks" / "images", pages / "images")
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    chapters = {
        str(each.number) + beyond: f"{name}.ipynb"
        for each in lessons(ROOT)
        for name, beyond in zip(each.notebooks, ("", " further"))
    }
    for path in notebooks:
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = linked(cell.source, chapters, own=path.name)
        nbformat.write(notebook, pages / path.name)
    above = {number: f"../{name}" for number, name in chapters.items()}
    (pages / "docs").mkdir()
    for path in (ROOT / "docs").glob("*.md"):
        text = linked(inside(path.read_text(encoding="utf-8")), above, own=path.name)
        (pages / "docs" / path.name).write_text(text, encoding="utf-8")


def build(html: Path) -> int:
    """Write the website into the folder `html`; return Sphinx's exit status, or 1 where the folder
    holds something else."""
    if html.exists() and not _is_ours(html):
        print(f"{html} holds something that is no book: name a new folder, or an empty one.")
        return 1
    play = _has_playground()
    write_pages(PAGES, play)
    shutil.rmtree(html, ignore_errors=True)
    strict = ["--fail-on-warning", "--keep-going", "--quiet"]
    command = [sys.executable, "-m", "sphinx", "-b", "html", *strict]
    command += ["-d", str(PAGES.parent / "doctrees"), str(PAGES), str(html)]
    status = subprocess.call(command)
    if status == 0 and play:
        playground_pages.build(html / "playground")
    return status


def _has_playground() -> bool:
    try:
        playground_pages.fetch()
    except RuntimeError as error:
        print(f"The book goes without its playground. {error}")
        return False
    return True


def _is_ours(html: Path) -> bool:
    """Whether nothing is lost if the folder is emptied. Sphinx leaves .buildinfo in its own."""
    if html == HTML or not html.is_dir():
        return html == HTML
    return (html / ".buildinfo").exists() or not any(html.iterdir())


def main(arguments: list[str]) -> int:
    """Build the book and say where it lies; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=HTML)
    folder = parser.parse_args(arguments).folder
    status = build(folder)
    print(f"The book: {folder / 'index.html'}" if status == 0 else "The book was not built.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
