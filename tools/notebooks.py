"""Builds and checks the notebooks of the course.

python tools/notebooks.py build            rebuild what is missing, stale or edited by hand
python tools/notebooks.py build 03 ...     rebuild and execute these chapters in any case
python tools/notebooks.py check [03 ...]   fail unless every notebook matches its source

solutions/NN_topic.py is the only authored file of a lesson. From it come notebooks/NN_topic.ipynb,
the learner's copy, and solutions/NN_topic.ipynb, the solved one, both executed. So it is with
NN_topic_further.py, what goes beyond the lesson, and with the quick reference, which is no chapter
and has no number. Prose never executes: where the code cells are those of the stored notebook, to
the letter and in their order, its outputs are kept.
"""

import argparse
import dataclasses
import os
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import limits
import minutes
import nbformat
import printed
import registrations
from copies import code_of, is_sealed, make_copy, seal, take_outputs
from execution import ExecutionError, execute
from source import Cell, SourceError, leaked_line, read_source

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("[0-9][0-9]_*", "quick_reference")  # the chapters, and the page beside them


class BuildError(Exception):
    """What stops a build, in words for the author."""


@dataclass
class Copy:
    """One of the two notebooks of a source."""

    root: Path
    chapter: str  # "03_ddp", "03_ddp_further"
    solved: bool
    cells: list[Cell]

    @property
    def name(self) -> str:
        return f"{'solutions' if self.solved else 'notebooks'}/{self.chapter}.ipynb"

    @property
    def source(self) -> str:
        return f"solutions/{self.chapter}.py"

    @property
    def path(self) -> Path:
        return self.root / self.name

    def fresh(self) -> nbformat.NotebookNode:
        """The notebook as the source has it now, not executed, its minutes under the title."""
        return make_copy(self.timed(), self.source, self.solved)

    def timed(self) -> list[Cell]:
        """The source's cells, with what the builder says of the notebook's time."""
        title, *rest = self.cells
        if not self.chapter[:1].isdigit() or not title.source.startswith("# "):
            return self.cells
        head, _, text = title.source.partition("\n")
        line = minutes.of(self.root, self.chapter, self.cells).line()
        return [dataclasses.replace(title, source=f"{head}\n\n*{line}*\n{text}"), *rest]

    def problem(self) -> str | None:
        """Why the stored notebook is not the one that the source gives, or what it should not print.

        Its cells count, not the file: another answer leaves the learner's copy as it is.
        """
        if not self.path.exists():
            return f"{self.name} is missing: run `make notebooks`."
        try:
            stored = nbformat.read(self.path, as_version=4)
        except (ValueError, AttributeError, nbformat.ValidationError):  # half written, merged ...
            return f"{self.name} is not a readable notebook: run `make notebooks`."
        if not is_sealed(stored):
            return (
                f"{self.name} was edited, or run and saved: put a change into {self.source} and "
                f"run `make notebooks`, or take it back with `git checkout {self.name}`."
            )
        if stored.metadata["course"]["cells"] != self.fresh().metadata["course"]["cells"]:
            return f"{self.name} does not match {self.source}: run `make notebooks`."
        return self.truths(stored)

    def reusable(self) -> nbformat.NotebookNode | None:
        """The stored notebook, if the build left it so and its code cells are the source's."""
        try:
            stored = nbformat.read(self.path, as_version=4)
        except (OSError, ValueError, AttributeError, nbformat.ValidationError):
            return None
        same = is_sealed(stored) and code_of(stored) == code_of(self.fresh())
        return stored if same else None

    def build(self, stored: nbformat.NotebookNode | None) -> None:
        """Generate the notebook, give it the outputs of `stored` or execute it, and write it."""
        notebook = self.fresh()
        self.path.parent.mkdir(exist_ok=True)
        if stored:
            take_outputs(notebook, stored)
        else:
            started = time.monotonic()
            try:
                execute(notebook, self.path.parent)
            except ExecutionError as error:
                raise BuildError(self._failure(error)) from error
            if not self.solved and minutes.ran(self.root, self.chapter, time.monotonic() - started):
                notebook, done = self.fresh(), notebook  # with its new time under the title
                take_outputs(notebook, done)
        if not self.solved:
            self._refuse_leaks(notebook)
        if sentence := self.truths(notebook):
            raise BuildError(sentence)
        seal(notebook)
        self._write(notebook)

    def truths(self, notebook: nbformat.NotebookNode) -> str | None:
        """What is wrong with the truth values that it prints."""
        sentence = printed.problem(notebook)
        return f"{self.name}: {sentence}" if sentence else None

    def _failure(self, error: ExecutionError) -> str:
        cell = self.cells[error.cell]
        source = "\n".join(f"    {line}" for line in cell.source.split("\n"))
        return f"{self.source}:{cell.line}: this cell fails in {self.name}:\n{source}\n{error}"

    def _refuse_leaks(self, notebook: nbformat.NotebookNode) -> None:
        """What a cell prints can give an answer away too, for instance in a traceback."""
        for answer in filter(lambda cell: cell.is_answer, self.cells):
            for cell, built in zip(self.cells, notebook.cells, strict=True):
                for output in built.get("outputs", []):
                    text = output.get("text") or output.get("data", {}).get("text/plain", "")
                    if leaked_line(answer.source, text) is not None:
                        raise BuildError(
                            f"{self.source}:{cell.line}: the output of this cell gives away the "
                            f"answer {answer.nbgrader['grade_id']!r} of line {answer.line}."
                        )

    def keep_edited(self) -> None:
        """Save what somebody typed into the generated notebook before it is overwritten."""
        if self.path.exists() and "edited" in (self.problem() or ""):
            kept = self.root / "build" / "edited" / self.name
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.path, kept)
            print(f"{self.name} was edited; that version is kept in {kept.relative_to(self.root)}.")

    def _write(self, notebook: nbformat.NotebookNode) -> None:
        partial = self.path.with_suffix(".ipynb.partial")
        nbformat.write(notebook, partial)
        os.replace(partial, self.path)  # an interrupted build leaves the old notebook whole


def find_sources(root: Path, names: list[str]) -> list[Path]:
    """The sources of all chapters, or of those named by number, name or path."""
    sources = _files(root / "solutions", ".py")
    if not names:
        return sources
    wanted = [Path(name).stem for name in names]
    for name in wanted:
        if not any(source.stem == name or source.stem[:2] == name for source in sources):
            raise BuildError(f"there is no chapter {name!r} in solutions/.")
    return [source for source in sources if source.stem in wanted or source.stem[:2] in wanted]


def _files(folder: Path, suffix: str) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in folder.glob(pattern + suffix))


def copies_of(root: Path, source: Path) -> list[Copy]:
    """The learner's and the solved copy of one source; SourceError if it breaks a rule."""
    os.chdir(root)  # so that errors name the file as the author does
    path = source.relative_to(root)
    cells = read_source(path)
    found = [
        *limits.problems(path.stem, cells, minutes.of(root, path.stem, cells)),
        *registrations.problems(root, path.stem[:2], cells),
    ]
    if found:
        raise SourceError([f"{path}:{line}: {sentence}" for line, sentence in found])
    return [Copy(root, path.stem, solved, cells) for solved in (False, True)]


def build(root: Path, names: list[str]) -> None:
    """Build what needs it (or all that is named); raise BuildError or SourceError."""
    copies = [copy for source in find_sources(root, names) for copy in copies_of(root, source)]
    todo = [copy for copy in copies if names or copy.problem()]
    for number, copy in enumerate(todo, 1):
        copy.keep_edited()
        code = sum(cell.kind == "code" for cell in copy.cells)
        stored = None if names else copy.reusable()
        what = "only its prose has changed" if stored else f"{code} cells"
        print(f"[{number}/{len(todo)}] {copy.name}: {what} ... ", end="", flush=True)
        started = time.monotonic()
        copy.build(stored)
        print(f"{time.monotonic() - started:.1f} s", flush=True)
    minutes.write(root)
    print(f"{len(todo)} notebooks built, {len(copies) - len(todo)} were up to date.")


def check(root: Path, names: list[str]) -> None:
    """Raise BuildError unless every notebook matches its source and every source its rules."""
    problems, checked = [], 0
    for source in find_sources(root, names):
        try:
            copies = copies_of(root, source)
        except SourceError as error:
            problems += error.problems
            continue
        checked += len(copies)
        problems += filter(None, (copy.problem() for copy in copies))
    if not names:
        problems += _strays(root)
        problems += [] if problems else minutes.problems(root)
    if problems:
        raise BuildError("\n".join(problems))
    print(f"{checked} notebooks match their sources.")


def _strays(root: Path) -> list[str]:
    found = [path for d in ("notebooks", "solutions") for path in _files(root / d, ".ipynb")]
    return [
        f"{path.relative_to(root)} has no source solutions/{path.stem}.py: delete it."
        for path in sorted(found)
        if not (root / "solutions" / f"{path.stem}.py").exists()
    ]


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["build", "check"])
    parser.add_argument("chapters", nargs="*", metavar="NN|name")
    options = parser.parse_args(arguments)
    try:
        {"build": build, "check": check}[options.command](root, options.chapters)
    except (BuildError, SourceError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; notebooks that were finished are kept.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
