"""Makes nbgrader's course folder from the chapters, and reports on a class that was autograded.

python tools/assignments.py build [03 ...]    every chapter, or these, as an assignment
python tools/assignments.py report [03 ...]   a line for each submission: its points, and remarks

--folder DIR is the course folder, build/assignments without it: source/ with the answers, release/
for learners, gradebook.db, and nbgrader_config.py, which is the instructor's own once it is there.
Submissions and marks are kept. source/ is made from solutions/*.py, not from the executed
notebooks, so that it is never stale.
"""

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook, MissingEntry, SubmittedAssignment
from nbgrader.apps import NbGraderAPI
from nbgrader.utils import parse_utc
from source import SourceError
from traitlets.config import Config, PyFileConfigLoader

from course_grader.nbgrader import REMARKS
from notebooks import ROOT, BuildError, Copy, copies_of, find_sources

FOLDER = ROOT / "build" / "assignments"
CONFIG = "nbgrader_config.py"


@dataclass(frozen=True)
class Line:
    """One submission in the report."""

    student: str
    points: str
    remarks: list[str]


# --- build -------------------------------------------------------------------------------------


def build(folder: Path, names: list[str]) -> None:
    """Write source and release of the chapters; raise BuildError or SourceError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"{folder} cannot be the course folder: {error.strerror}.") from None
    if not (folder / CONFIG).exists():
        shutil.copy(Path(__file__).with_name(CONFIG), folder)
    chapters = with_exercises(names)
    nbgrader = NbGraderAPI(config=configuration(folder))
    for number, solved in enumerate(chapters, 1):
        print(f"[{number}/{len(chapters)}] release/{solved.chapter}", flush=True)
        write_source(folder, solved)
        outcome = nbgrader.generate_assignment(solved.chapter)
        if not outcome["success"]:
            raise BuildError(f"nbgrader did not release {solved.chapter}:\n{outcome['error']}")
    print(f"{len(chapters)} assignments are in {folder}.")


def with_exercises(names: list[str]) -> list[Copy]:
    """The solved copies of the chapters that ask for something."""
    copies = [copies_of(ROOT, source)[1] for source in find_sources(ROOT, names)]
    return [solved for solved in copies if any(cell.is_check for cell in solved.cells)]


def write_source(folder: Path, solved: Copy) -> None:
    """Write nbgrader's source version of one chapter, without outputs.

    nbgrader takes out the answers. Predictions are open here already: it does not know of them.
    """
    path = folder / "source" / solved.chapter / f"{solved.chapter}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    notebook = solved.fresh()
    for cell, written in zip(solved.timed(), notebook.cells, strict=True):
        if not cell.is_answer:
            written.source = cell.for_learners()
    nbformat.write(notebook, path)


def configuration(folder: Path) -> Config:
    """The instructor's configuration of the course folder."""
    config = PyFileConfigLoader(CONFIG, path=str(folder)).load_config()
    config.CourseDirectory.root = str(folder)
    config.NbGraderAPI.log_level = "ERROR"
    return config


# --- report ------------------------------------------------------------------------------------


def report(folder: Path, names: list[str]) -> None:
    """Print what came of every submission of the chapters. Raises BuildError."""
    if not (folder / "gradebook.db").exists():
        raise BuildError(
            f"There is no gradebook in {folder}: name the course folder with --folder."
        )
    for source in find_sources(ROOT, names):
        lines = list(submissions(folder, source.stem))
        if lines:
            print(f"\n{source.stem}: {len(lines)} submission{'' if len(lines) == 1 else 's'}")
        for line in lines:
            print(f"  {line.student:<20} {line.points:>10}  {' '.join(line.remarks)}".rstrip())


def submissions(folder: Path, chapter: str) -> Iterator[Line]:
    """A line for each submission of a chapter, in the order of the students' names."""
    with Gradebook(f"sqlite:///{folder / 'gradebook.db'}") as gradebook:
        for handed_in in sorted(folder.glob(f"submitted/*/{chapter}")):
            student = handed_in.parent.name
            graded = folder / "autograded" / student / chapter / f"{chapter}.ipynb"
            submission = _found(gradebook, chapter, student) if graded.exists() else None
            if submission:
                points = f"{submission.score:g} of {submission.max_score:g}"
                remarks = nbformat.read(graded, as_version=4).metadata[REMARKS]
                yield Line(student, points, [*remarks, *_ungraded(handed_in)])
            else:
                yield Line(student, "no grade", [_why_not(handed_in)])


def _found(gradebook: Gradebook, chapter: str, student: str) -> SubmittedAssignment | None:
    with contextlib.suppress(MissingEntry):  # a gradebook that is newer than what was autograded
        return gradebook.find_submission(chapter, student)


def _ungraded(handed_in: Path) -> list[str]:
    """Remarks on the notebooks that stand beside the graded one."""
    graded = handed_in / f"{handed_in.name}.ipynb"
    others = set(handed_in.glob("*.ipynb")) - {graded, graded.resolve()}
    return [f"{path.name} was handed in too, and not graded." for path in sorted(others)]


def _why_not(handed_in: Path) -> str:
    """Why a submission was not autograded, and what to do."""
    student, chapter = handed_in.parent.name, handed_in.name
    notebooks = sorted(path.name for path in handed_in.glob("*.ipynb") if path.is_file())
    if not notebooks:
        found = ", ".join(sorted(path.name for path in handed_in.iterdir()))
        return f"No notebook was handed in, only {found or 'an empty folder'}."
    if f"{chapter}.ipynb" not in notebooks and len(notebooks) > 1:
        return (
            f"None of its notebooks is named {chapter}.ipynb: {', '.join(notebooks)}; rename the "
            f"right one in submitted/{student}/{chapter} and autograde again."
        )
    with contextlib.suppress(OSError):
        timestamp = (handed_in / "timestamp.txt").read_text(errors="replace")
        try:
            parse_utc(timestamp)
        except (ValueError, OverflowError):
            return (
                f"Its timestamp.txt is no date: {timestamp[:40]!r}; delete it and autograde again."
            )
    return f"Run `nbgrader autograde {chapter} --student {student}` and read what it says."


def find_programs() -> None:
    """nbgrader starts alembic by its name: let it find the one that lies beside this Python."""
    own, path = str(Path(sys.executable).parent), os.environ.get("PATH", "")
    if own not in path.split(os.pathsep):
        os.environ["PATH"] = own + os.pathsep + path


def main(arguments: list[str]) -> int:
    """Run one command; return the exit status."""
    find_programs()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["build", "report"])
    parser.add_argument("chapters", nargs="*", metavar="NN|name")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="nbgrader's course folder")
    options = parser.parse_intermixed_args(arguments)
    command = {"build": build, "report": report}[options.command]
    try:
        command(options.folder.resolve(), options.chapters)
    except (BuildError, SourceError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
