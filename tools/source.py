"""Reads a chapter's source (solutions/NN_topic.py) and refuses what would break its notebooks."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jupytext
import predictions

IGNORE_OUTPUT = "nbval-ignore-output"
CELLS_PER_IGNORED = 8  # at most one code cell in eight may have its output ignored
ANSWER_KEYS = {"grade_id", "solution"}
CHECK_KEYS = {"grade_id", "grade", "points", "locked"}

HEADER = re.compile(r"^\s*# ?%%(\s.*)?$")
MARKER = re.compile(r"^\s*### (BEGIN|END) SOLUTION$")
# nbgrader takes any line with these words for a marker, so no other spelling may stand in a source
LOOSE_MARKER = re.compile(r"(BEGIN|END) SOLUTION")
NBVAL_COMMENT = re.compile(r"^\s*#+\s*(NBVAL|PYTEST_VALIDATE)_[A-Z_]+\s*$", re.MULTILINE)
EVERY_LOOP = ("optimizer.zero_grad()", "loss.backward()", "optimizer.step()")  # tells nothing
EXERCISE_ID = re.compile(r"^\d+\.\d+$")


class SourceError(Exception):
    """What is wrong in a source: one 'file:line: sentence' a problem, each on its own line."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass
class Cell:
    """One cell of a source; `line` is the line of the file on which its text starts."""

    kind: str  # "code" or "markdown"
    source: str
    line: int
    tags: list[str] = field(default_factory=list)
    nbgrader: dict = field(default_factory=dict)  # the short form that the author wrote

    @property
    def is_answer(self) -> bool:
        return bool(self.nbgrader.get("solution"))

    @property
    def is_check(self) -> bool:
        return bool(self.nbgrader.get("grade"))

    @property
    def ignored(self) -> bool:
        return IGNORE_OUTPUT in self.tags

    def for_learners(self) -> str:
        """The text without what the learner is to find: an answer, or predictions."""
        if self.is_answer:
            return learner_text(self.source)
        return predictions.opened(self.source) if predictions.TAG in self.tags else self.source

    def lines(self) -> list[tuple[int, str]]:
        """The text line by line, each with its number in the file."""
        return list(enumerate(self.source.split("\n"), self.line))


Problem = tuple[int, str]  # line number, sentence


def read_source(path: Path) -> list[Cell]:
    """Return the cells of a py:percent file; raise SourceError with every problem found."""
    text = path.read_text(encoding="utf-8")
    cells, problems = _parse(text)
    for rule in RULES:
        problems += rule(cells)
    if problems:
        raise SourceError([f"{path}:{line}: {sentence}" for line, sentence in sorted(problems)])
    return cells


def _parse(text: str) -> tuple[list[Cell], list[Problem]]:
    parsed = jupytext.reads(text, fmt="py:percent").cells
    lines = text.split("\n")
    headers = [number for number, line in enumerate(lines, 1) if HEADER.match(line)]
    if len(headers) != len(parsed):
        first = headers[0] if headers else 1
        sentence = (
            f"{len(headers)} lines start a cell with '# %%', but jupytext reads {len(parsed)} "
            "cells: nothing may stand before the first one, and no text may contain such a line."
        )
        return [], [(first, sentence)]
    cells, problems = [], []
    for header, found in zip(headers, parsed, strict=True):
        cell, cell_problems = _cell(found, header, lines)
        cells.append(cell)
        problems += cell_problems
    return cells, problems


def _cell(found, header: int, lines: list[str]) -> tuple[Cell, list[Problem]]:
    start = header + 1
    while start < len(lines) and not lines[start - 1].strip():
        start += 1
    metadata = {k: v for k, v in found.metadata.items() if k != "lines_to_next_cell"}
    tags, nbgrader = metadata.pop("tags", []), metadata.pop("nbgrader", {})
    problems = []
    if metadata or not isinstance(tags, list) or not isinstance(nbgrader, dict):
        sentence = "a cell's header holds only [markdown], tags=[...] and nbgrader={...} as JSON."
        problems.append((header, sentence))
        tags, nbgrader = [], {}
    if found.cell_type not in ("code", "markdown"):
        problems.append((header, f"a {found.cell_type} cell: use code or [markdown]."))
    return Cell(found.cell_type, found.source, start, tags, nbgrader), problems


# --- rules: each yields (line, sentence) -------------------------------------------------------


def _tags(cells: list[Cell]) -> Iterator[Problem]:
    for cell in cells:
        for tag in cell.tags:
            if tag == "nbval-skip":
                yield (
                    cell.line,
                    "the tag nbval-skip hides a cell from the tests: every cell is tested.",
                )
            elif tag not in (IGNORE_OUTPUT, predictions.TAG):
                sentence = f"the only tags are {IGNORE_OUTPUT} and {predictions.TAG}."
                yield cell.line, f"unknown tag {tag!r}: {sentence}"
        if cell.kind == "code" and NBVAL_COMMENT.search(cell.source):
            yield (
                cell.line,
                f"a comment steers nbval: use the tag {IGNORE_OUTPUT} in the header instead.",
            )


def _ignored_share(cells: list[Cell]) -> Iterator[Problem]:
    code = [cell for cell in cells if cell.kind == "code"]
    ignored = [cell for cell in code if cell.ignored]
    allowed = len(code) // CELLS_PER_IGNORED
    if len(ignored) > max(1, allowed):  # the first cell of every chapter describes the machine
        sentence = (
            f"{len(ignored)} of {len(code)} code cells are {IGNORE_OUTPUT}; one in "
            f"{CELLS_PER_IGNORED} may be: print claims that hold on every machine."
        )
        yield ignored[-1].line, sentence


def _code(cells: list[Cell]) -> Iterator[Problem]:
    for cell in cells:
        if cell.kind != "code":
            continue
        if not cell.source.strip():
            yield cell.line, "an empty code cell."
        elif cell.source.rstrip().endswith(";"):
            number = cell.line + cell.source.rstrip().count("\n")
            yield number, "a cell ends with ';', which nbval does not respect: use plt.show()."


def _predictions(cells: list[Cell]) -> Iterator[Problem]:
    """What a learner is to predict is written out, and open in the learner's copy."""
    for cell in cells:
        if cell.kind != "code" or cell.is_answer:
            continue
        try:
            found = predictions.predictions(cell.source)
        except SyntaxError:  # a magic; Python's own mistakes show when the cell runs
            found = []
        if found and predictions.TAG not in cell.tags:
            yield (
                cell.line,
                f'the values of `predicted` would be given away: add tags=["{predictions.TAG}"].',
            )
        elif predictions.TAG in cell.tags and not found:
            sentence = (
                f"the tag {predictions.TAG} without a prediction, such as a value of a dict that "
                "is written out and named predicted."
            )
            yield cell.line, sentence


def _markers(cells: list[Cell]) -> Iterator[Problem]:
    for cell in cells:
        opened = None
        for number, line in cell.lines():
            if not LOOSE_MARKER.search(line):
                continue
            marker = MARKER.match(line)
            if not marker:
                yield (
                    number,
                    "a marker is a line of its own: '### BEGIN SOLUTION' or '### END SOLUTION'.",
                )
            elif not cell.is_answer:
                yield (
                    number,
                    'a solution marker outside an answer cell (nbgrader={..., "solution": true}).',
                )
            elif marker[1] == "BEGIN":
                if opened:
                    yield (
                        number,
                        f"BEGIN SOLUTION again, before the END SOLUTION of line {opened}.",
                    )
                if not line.startswith(" "):
                    sentence = (
                        "the answer must stand inside a function: "
                        "at top level the learner's copy would stop here."
                    )
                    yield number, sentence
                opened = number
            elif not opened:
                yield number, "END SOLUTION without a BEGIN SOLUTION before it."
            else:
                opened = None
        if opened:
            yield opened, "BEGIN SOLUTION without an END SOLUTION in the same cell."
        if cell.is_answer and not LOOSE_MARKER.search(cell.source):
            yield (
                cell.line,
                "an answer cell without '### BEGIN SOLUTION' and '### END SOLUTION'.",
            )


def _exercises(cells: list[Cell]) -> Iterator[Problem]:
    """Every answer has an id and is followed by its check; every check has its answer."""
    seen: dict[str, int] = {}
    answers: dict[str, Cell] = {}
    checked = set()
    for cell in cells:
        if not cell.nbgrader:
            continue
        grade_id = cell.nbgrader.get("grade_id", "")
        if grade_id in seen:
            yield cell.line, f"the id {grade_id!r} is already used in line {seen[grade_id]}."
            continue
        seen[grade_id] = cell.line
        exercise = grade_id.removesuffix("-check")
        if cell.is_answer:
            yield from _answer(cell, grade_id)
            answers[grade_id] = cell
        elif exercise not in answers:
            yield (
                cell.line,
                f"the check {grade_id!r} has no answer cell {exercise!r} before it.",
            )
        else:
            yield from _check(cell, exercise, answers[exercise])
            checked.add(exercise)
    for grade_id, cell in answers.items():
        if grade_id not in checked:
            yield (
                cell.line,
                f"the answer {grade_id!r} has no check cell '{grade_id}-check' after it.",
            )


def _answer(cell: Cell, grade_id: str) -> Iterator[Problem]:
    if set(cell.nbgrader) != ANSWER_KEYS or not EXERCISE_ID.match(grade_id):
        sentence = (
            'an answer\'s header is nbgrader={"grade_id": "3.1", "solution": true}, '
            "with the chapter and the number of the exercise."
        )
        yield cell.line, sentence
    try:
        ast.parse(learner_text(cell.source))
    except SyntaxError as error:
        yield (
            cell.line + (error.lineno or 1) - 1,
            f"without its answer the cell is not valid Python ({error.msg}).",
        )


def _check(cell: Cell, exercise: str, answer: Cell) -> Iterator[Problem]:
    points = cell.nbgrader.get("points")
    if (
        set(cell.nbgrader) != CHECK_KEYS
        or cell.nbgrader["locked"] is not True
        or cell.nbgrader["grade_id"] != f"{exercise}-check"
        or not isinstance(points, int)
        or points < 1
    ):
        sentence = (
            f'a check\'s header is nbgrader={{"grade_id": "{exercise}-check", "grade": true, '
            '"points": 2, "locked": true}, with a positive number of points.'
        )
        yield cell.line, sentence
    call = re.fullmatch(rf'check\("{re.escape(exercise)}", (\w+)\)', cell.source.strip())
    if not call:
        yield (
            cell.line,
            f'the check cell must be exactly check("{exercise}", NAME).',
        )
    elif not re.search(
        rf"^(?:def|async def|class) {call[1]}\b|^{call[1]}\s*=", answer.source, re.MULTILINE
    ):
        yield (
            cell.line,
            f"the answer cell of {exercise} (line {answer.line}) does not define {call[1]}.",
        )


def _leaks(cells: list[Cell]) -> Iterator[Problem]:
    """An answer is leaked if what makes it an answer can be read elsewhere in the learner's copy.

    Ordinary lines (`for parameter in model.parameters():`) occur in any chapter, so one line is
    not enough, unless it is the whole answer: see `leaked_line`.
    """
    for answer in cells:
        if not answer.is_answer:
            continue
        for cell in cells:
            text = learner_text(cell.source) if cell.is_answer else cell.source
            found = leaked_line(answer.source, text)
            if found is not None:
                place = cell.line + found
                sentence = (
                    f"this gives away the answer {answer.nbgrader.get('grade_id')!r} of line "
                    f"{answer.line}: the same lines stand between its solution markers."
                )
                yield place, sentence


RULES = [_tags, _ignored_share, _code, _predictions, _markers, _exercises, _leaks]


# --- the learner's copy of a cell --------------------------------------------------------------


def learner_text(source: str) -> str:
    """The text of an answer cell with each solution replaced by `raise NotImplementedError`."""
    kept, inside = [], False
    for line in source.split("\n"):
        marker = MARKER.match(line)
        if marker and marker[1] == "BEGIN":
            kept.append(line[: len(line) - len(line.lstrip())] + "raise NotImplementedError")
            inside = True
        elif marker:
            inside = False
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def solution_lines(source: str) -> list[str]:
    """The telling lines between the markers: no blank line, comment, or line that any code has."""
    lines, inside = [], False
    for line in source.split("\n"):
        marker = MARKER.match(line)
        if marker:
            inside = marker[1] == "BEGIN"
        elif inside and _telling(_squeeze(line)):
            lines.append(_squeeze(line))
    return lines


def _squeeze(line: str) -> str:
    return re.sub(r"\s+", " ", line.split("  #")[0]).strip()


def _telling(line: str) -> bool:
    ordinary = line.startswith(("#", "import ", "from ", '"""')) or line.endswith(":")
    return len(line) >= 10 and not ordinary and line not in EVERY_LOOP


def leaked_line(answer: str, text: str) -> int | None:
    """Index of the first line of `text` that gives an answer cell's solution away, or None.

    Given away means: half of the solution's telling lines, or three of them in a row.
    """
    wanted = solution_lines(answer)
    squeezed = enumerate(map(_squeeze, text.split("\n")))
    lines = [(i, line) for i, line in squeezed if line and not line.endswith(":")]
    hits = [i for i, line in lines if any(telling in line for telling in wanted)]
    shown = {telling for telling in wanted if any(telling in line for _, line in lines)}
    if hits and (2 * len(shown) >= len(wanted) or _three_in_a_row(wanted, lines)):
        return hits[0]
    return None


def _three_in_a_row(wanted: list[str], lines: list[tuple[int, str]]) -> bool:
    texts = [line for _, line in lines]
    return any(
        all(telling in line for telling, line in zip(wanted[j : j + 3], texts[i : i + 3]))
        for j in range(len(wanted) - 2)
        for i in range(len(texts) - 2)
    )
