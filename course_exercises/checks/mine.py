"""The learner's own script, which grows with the chapters: `mine/train.py` beside the notebooks.

Nothing here writes over it. `check("3.6", mine.script(3))` checks what a chapter asks for.
"""

import difflib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from course_exercises.checks import catalogue, progress
from course_exercises.sources import versions

if TYPE_CHECKING:
    from course_planner import Layout, Trace

FILE = Path("mine/train.py")
_SOLVED = "solutions"  # the folder of the solved notebooks, in which the course's own versions are checked


def script(chapter: int, further: bool = False) -> Path:
    """The path of your script, which begins as chapter 2 gives it; beside the solved notebooks, of the course's own."""
    if Path.cwd().name == _SOLVED:
        return versions.version(chapter, further)
    if not FILE.exists():
        _copy(versions.version(2))
    return FILE


def first() -> Path:
    """The path of your script while it is as chapter 2 gives it; later, of the one that chapter 2 gives."""
    path, given = script(2), versions.version(2)
    if path.read_bytes() == given.read_bytes():
        return path
    print(f"{path} has changed since chapter 2: what follows runs the course's own.")
    return given


def start(chapter: int, further: bool = False) -> None:
    """Skips what you have not written: your script becomes what this chapter begins with. What is yours is kept."""
    if FILE.exists() and not versions.is_own(FILE):
        number = 1 + len(list(FILE.parent.glob("train_kept_*.py")))
        kept = FILE.rename(FILE.with_stem(f"train_kept_{number}"))
        print(f"Your script is now {kept}.")
    _copy(versions.before(chapter, further))
    begins = f"what goes beyond chapter {chapter}" if further else f"chapter {chapter}"
    print(f"{FILE} is the course's own, as {begins} begins with it.")


def diff(chapter: int, further: bool = False) -> None:
    """Prints what your script has more, and less, than the course's own with which the chapter begins."""
    before = versions.before(chapter, further).read_text().splitlines()
    after = script(chapter, further).read_text().splitlines()
    lines = list(difflib.unified_diff(before, after, "before", str(FILE), n=1, lineterm=""))
    print("\n".join(lines) or "Nothing has changed yet.")


def passing(id: str) -> Path:
    """The path of your script when it has passed this stage; of the course's own before."""
    stage = catalogue.find(id)
    path = script(stage.chapter)
    if path == FILE and id not in progress.passed():
        print(f"{FILE} has not passed {id} yet: what follows runs the course's own.")
        return stage.version
    return path


def as_one_rank(chapter: int, layout: "Layout", *, vocabulary: int, **options: int) -> "Trace":
    """A step of your script as rank 0 of `layout`, with options of its command line; of the course's own until yours
    has a `program`."""
    # a second of imports, which no other cell needs
    from course_exercises.authoring import traced_script

    path = script(chapter)
    if "program" not in traced_script.defined_in(path):
        path = versions.version(chapter)
        print(f"{FILE} has no program yet: this is the course's own.")
    return traced_script.as_one_rank(path, layout, vocabulary=vocabulary, **options)


def _copy(version: Path) -> None:
    """All at once: another notebook may be reading it."""
    FILE.parent.mkdir(exist_ok=True)
    part = FILE.with_name(f".{os.getpid()}.py")
    shutil.copyfile(version, part)
    part.replace(FILE)
