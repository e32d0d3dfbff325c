"""What one notebook may ask of a learner: the minutes of a lesson, when one first writes, and the
lines of a cell."""

from collections.abc import Iterator

from minutes import Minutes, first_written
from source import Cell, Problem

from course_exercises.sources.chapters import is_further

LESSON = 60  # minutes to read and run one
FIRST = 30  # minutes for chapter 00, exercises and all
WRITTEN = 1 / 3  # of the lesson, after which the first exercise has stood
LINES, SCRIPT, LONG, LONG_CELLS = 20, 60, 30, 2


def problems(name: str, cells: list[Cell], minutes: Minutes) -> Iterator[Problem]:
    """What is too much in the source `name`: a line of it, and a sentence."""
    yield from _time(name, minutes)
    yield from _writing(name, cells)
    yield from _lines(cells)


def _time(name: str, minutes: Minutes) -> Iterator[Problem]:
    if minutes.lesson > LESSON and not is_further(name):
        sentence = (
            f"this lesson takes {minutes.lesson} minutes to read and run, and {LESSON} are what a "
            f"learner finishes: move what not everybody needs to solutions/{name}_further.py."
        )
        yield 1, sentence
    whole = minutes.lesson + minutes.exercises
    if name.startswith("00_") and whole > FIRST:
        sentence = (
            f"the first chapter takes {whole} minutes with its exercises, and {FIRST} are what "
            "somebody has who looks whether the course is for them."
        )
        yield 1, sentence


def _writing(name: str, cells: list[Cell]) -> Iterator[Problem]:
    if name[:1].isdigit() and not is_further(name) and first_written(cells) > WRITTEN:
        yield 1, "a learner writes nothing in its first third: put an exercise where its idea is."


def _lines(cells: list[Cell]) -> Iterator[Problem]:
    """An exercise's stub is not counted: most of it is the text that says what to do."""
    long = 0
    for cell in cells:
        if cell.kind != "code" or cell.is_answer:
            continue
        lines = [line for line in cell.source.split("\n") if line.strip()]
        script = lines[0].startswith("%%writefile")
        most = SCRIPT if script else LINES
        if not script and LINES < len(lines) <= LONG and long < LONG_CELLS:
            long += 1
        elif len(lines) > most:
            advice = (
                f"a script has at most {SCRIPT}."
                if script
                else f"a cell holds one idea, in at most {LINES} lines; {LONG_CELLS} of a notebook "
                f"may have {LONG}. Cut it, or move what draws or manages to course_utils."
            )
            yield cell.line, f"this cell has {len(lines)} lines, and {advice}"
