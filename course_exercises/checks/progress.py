"""The learner's progress: what was passed, on this machine, and what can be done with it.

It survives restarts of the kernel, goes to another machine as one file, and can be reset; then the
old state is kept aside, so that nothing is ever lost. It is the learner's own and never a grade.
`record` and `passed`, which `check` and the map use, never raise; the others raise OSError or
LookupError with a sentence for the learner.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from course_exercises.authoring.framework import Exercise
from course_exercises.checks import catalogue, progress_file
from course_exercises.sources import chapters as sources
from course_exercises.sources.answers import source_of


def sentence(error: LookupError | OSError) -> str:
    """What stands in the way, in words."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}." if error.filename else f"{error.strerror}."
    return str(error.args[0])


def record(exercise: Exercise, passed: bool) -> None:
    """Notes that a check ran. An exercise once passed stays passed."""
    try:
        path = progress_file.location()
        with progress_file.locked(path):
            entries = progress_file.mended(path)
            entry = entries.setdefault(exercise.id, {"passed": False, "tries": 0})
            entry["passed"] = entry["passed"] or passed
            entry["tries"] += 1
            progress_file.write(path, entries)
    except OSError as error:
        print(f"(Your progress was not saved: {sentence(error)})")


def passed() -> set[str]:
    """The ids of the exercises that were passed."""
    try:
        path = progress_file.location()
        entries, untouched = progress_file.read(path)
        if not untouched:
            with progress_file.locked(path):
                entries = progress_file.mended(path)
        return _passed_in(entries)
    except OSError as error:
        print(f"(Your progress cannot be read: {sentence(error)})")
        return set()


def _passed_in(entries: progress_file.Entries) -> set[str]:
    return {id for id, entry in entries.items() if entry["passed"]}


# ---- the map -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chapter:
    """A chapter on the map, and which of its exercises were passed."""

    title: str  # "03_ddp"
    exercises: list[Exercise]
    passed: set[str]

    @property
    def complete(self) -> bool:
        return bool(self.exercises) and self.earned == self.points

    @property
    def points(self) -> int:
        return sum(exercise.points for exercise in self.exercises)

    @property
    def earned(self) -> int:
        return sum(exercise.points for exercise in self.exercises if exercise.id in self.passed)


def chapters() -> list[Chapter]:
    """The chapters of the course with what was passed of them."""
    done, everything = passed(), catalogue.exercises()
    found = []
    for title in _titles():
        number = str(int(title.split("_")[0]))
        own = [exercise for exercise in everything if exercise.id.split(".")[0] == number]
        found.append(Chapter(title, own, done))
    return found


def progress_text() -> str:
    """The map of the course in words: chapters with the minutes of their lesson and of what goes
    beyond it, exercises, points, and what comes next."""
    course = chapters()
    lines = [f"{sum(c.earned for c in course)} of {sum(c.points for c in course)} points"]
    for chapter in course:
        points = f"{chapter.earned} of {chapter.points}" if chapter.exercises else "no exercises"
        minutes = " + ".join(map(str, sources.minutes(chapter.title)))
        title = f"{chapter.title}, {minutes} minutes" if minutes else chapter.title
        lines += ["", f"{title:<50} {points}"]
        for exercise in chapter.exercises:
            mark = "x" if exercise.id in chapter.passed else " "
            title = f"{exercise.id} {exercise.name}"
            lines.append(f"  [{mark}] {title:<44} {exercise.points}")
    todo = [e for chapter in course for e in chapter.exercises if e.id not in chapter.passed]
    if todo:
        lines += ["", f"next: {todo[0].id} {todo[0].name}, in {_notebook_of(todo[0])}"]
    return "\n".join(lines)


def _notebook_of(exercise: Exercise) -> str:
    """The notebook that asks for it, or its chapter where that notebook is not there."""
    try:
        return source_of(exercise.id).stem
    except (LookupError, OSError):
        return f"chapter {exercise.id.split('.')[0]}"


def _titles() -> list[str]:
    found = {chapter.number: chapter.title for chapter in sources.chapters()}
    return sorted({f"{n:02d}" for n in catalogue.chapters() if n not in found} | {*found.values()})


# ---- reset, export, import -----------------------------------------------------------------------


def reset(what: object) -> str:
    """Forgets one exercise ("3.1"), one chapter (3) or "all"; returns what was done, in words.

    The state before is kept in a file of its own, which `import_from` reads.
    """
    name, chosen = _chosen(what)
    path = progress_file.location()
    with progress_file.locked(path):
        entries = progress_file.mended(path)
        left = {id: entry for id, entry in entries.items() if not chosen(id)}
        if left == entries:
            return f"There is nothing to reset: no check of {name} has run yet."
        kept = progress_file.keep_aside(path, before="reset")
        progress_file.write(path, left)
    return (
        f"Reset: {name}. What was there before is kept in {kept}; "
        f'import_progress("{kept}") brings it back.'
    )


def _chosen(what: object) -> tuple[str, Callable[[str], bool]]:
    """The name of what is to be reset, and whether an exercise's id belongs to it."""
    word = str(what).strip().lower()
    if word == "all":
        return "the whole course", lambda id: True
    if re.fullmatch(r"[0-9]+\.[0-9]+", word):
        exercise = catalogue.find(word)
        return f"{exercise.id} {exercise.name}", lambda id: id == exercise.id
    number = re.fullmatch(r"([0-9]{1,2})(_\w+)?", word)
    if number and int(number[1]) in catalogue.chapters():
        chapter = str(int(number[1]))
        return f"chapter {chapter}", lambda id: id.split(".")[0] == chapter
    raise LookupError(
        f'reset takes an exercise ("3.1"), a chapter (3) or "all"; there is no chapter or exercise '
        f"{str(what)[:60]!r}."
    )


def export(target: Path | str) -> str:
    """Writes the progress into one new file, to take away; returns what was done, in words."""
    target, path = _path(target), progress_file.location()
    if target.exists():
        raise OSError(f"{target} exists already: choose another name, or delete it first.")
    if not target.parent.is_dir():
        raise OSError(f"There is no folder {target.parent}: create it, or choose another one.")
    with progress_file.locked(path):
        entries = progress_file.mended(path)
    progress_file.write(target, entries)
    return f"Your progress, {_count(entries)}, is now also in {target}."


def import_from(source: Path | str) -> str:
    """Adds the progress in an exported file to the one here; returns what was done, in words.

    What was passed in one of them is passed. The state before is kept in a file of its own.
    """
    source, path = _path(source), progress_file.location()
    if not source.exists():
        raise OSError(f"There is no file {source}: name the file that was exported.")
    taken, untouched = progress_file.read(source)
    if not taken and not untouched:
        raise OSError(f"{source} holds no progress that can be read; yours is as it was.")
    with progress_file.locked(path):
        entries = progress_file.mended(path)
        merged = {id: _merged(id, entries, taken) for id in {**entries, **taken}}
        kept = ""
        if merged != entries and path.exists():
            backup = progress_file.keep_aside(path, before="import")
            kept = f" What was here before is kept in {backup}."
        progress_file.write(path, merged)
    doubt = "" if untouched else " It was damaged or changed by hand: this is what can be read."
    return f"Taken from {source}: {_count(taken)}.{doubt} Here it is now {_count(merged)}.{kept}"


def _merged(id: str, *files: progress_file.Entries) -> dict:
    found = [entries[id] for entries in files if id in entries]
    return {
        "passed": any(entry["passed"] for entry in found),
        "tries": max(entry["tries"] for entry in found),
    }


def _path(name: Path | str) -> Path:
    if not isinstance(name, (str, Path)) or not str(name).strip() or "\0" in str(name):
        raise OSError(f'Name a file, such as "my_progress.json", not {name!r}.')
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError:
        raise OSError(f"{str(name)!r} names a user; your home folder is ~/.") from None


def _count(entries: progress_file.Entries) -> str:
    count = len(_passed_in(entries))
    return f"{count} exercise{'' if count == 1 else 's'} passed"
