"""Gets code out of a notebook or its source without running the rest of it.

`load_answer("3.4")` finds the cell that checks exercise 3.4, collects the statements that its
answer needs (imports, functions, constants of earlier cells, found by name), executes those and
returns the function or class. `load_code(5, "Stage")` does the same for what a chapter defines
under this name, in its lesson or beyond it. Tests, benchmarks and the grader use these, never a
second copy.

A call for its effect, such as `torch.manual_seed(0)`, is not executed: a constant that is made
from random numbers brings its own generator.
"""

import ast
import builtins
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from course_exercises.sources import chapters
from course_utils.lesson.statements import (
    CodeCell,
    Statement,
    closure,
    execute,
    parse,
    show_in_tracebacks,
    statements_of,
    uses_of,
)

_HEADER = re.compile(r"# %%(?:\s|$)(.*)")


def load_answer(
    exercise_id: str, path: Path | str | None = None, *, source: str | None = None
) -> Any:
    """Returns the answer to an exercise: what its check cell passes to `check`.

    `path` is a py:percent source or a notebook; without it, the source that asks for it.
    `source` takes the place of the code in the answer's cell.
    Raises LookupError where file or exercise do not exist, and what the code itself raises.
    """
    path = Path(path) if path else source_of(exercise_id)
    cells = list(_cells(path))
    if source is not None:
        own_id = grade_id_of(exercise_id)
        cells = [replace(c, source=source) if c.grade_id == own_id else c for c in cells]
    index, answer = _checked_expression(cells, exercise_id, path)
    statements = [s for cell in cells[:index] for s in statements_of(cell)]
    own = {i for i, s in enumerate(statements) if s.cell.grade_id == grade_id_of(exercise_id)}
    namespace = _namespace(statements, own, uses_of(ast.unparse(answer)), path)
    return eval(compile(ast.Expression(answer), str(path), "eval"), namespace)


def load_code(chapter: int, name: str) -> Any:
    """Returns what the sources of a chapter bind to `name`: a function, a class, a constant.

    Raises LookupError where there is no such chapter or name, and what the code itself raises.
    """
    for path in sources_of(str(chapter)):
        statements = [s for cell in _cells(path) for s in statements_of(cell)]
        if any(name in statement.binds for statement in statements):
            return _namespace(statements, set(), frozenset([name]), path)[name]
    raise LookupError(f"Chapter {chapter} binds no {name!r}.")


def _namespace(
    statements: list[Statement], own: set[int], names: frozenset[str], path: Path
) -> dict[str, Any]:
    """Executes the statements `own` and those that bind `names`, with all that they need."""
    namespace: dict[str, Any] = {"__name__": path.stem, "__builtins__": builtins}
    for i in sorted(closure(statements, own, names)):
        execute(statements[i], namespace)
    return namespace


def grade_id_of(exercise_id: str) -> str:
    """nbgrader's id of an exercise's answer; its ids have no dots."""
    return exercise_id.replace(".", "-")


def source_of(exercise_id: str) -> Path:
    """The source of the notebook that asks for an exercise, or in a learner's copy that notebook.
    Raises LookupError where there is none."""
    sources = sources_of(exercise_id.split(".")[0])
    id = re.compile(f'"grade_id": "{exercise_id.replace(".", "[.-]")}-check"')
    asking = (path for path in sources if id.search(path.read_text(encoding="utf-8")))
    return next(asking, sources[0])


def sources_of(chapter: str) -> list[Path]:
    """The sources of a chapter, its lesson's first. Raises LookupError where there is none."""
    return chapters.chapter(chapter).sources


def _cells(path: Path) -> Iterator[CodeCell]:
    return percent_cells(path) if path.suffix == ".py" else _notebook_cells(path)


def percent_cells(path: Path) -> Iterator[CodeCell]:
    """The code cells of a py:percent source."""
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if _HEADER.fullmatch(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        header = _HEADER.fullmatch(lines[start])[1]
        if not header.startswith("["):
            found = re.search(r'"grade_id":\s*"([^"]+)"', header)
            source = "\n".join(lines[start + 1 : end])
            yield CodeCell(source, grade_id_of(found[1]) if found else "", str(path), start + 1)


def _notebook_cells(path: Path) -> Iterator[CodeCell]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            grade_id = cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "")
            found = CodeCell(source, grade_id, f"{path.name}, cell {number}", 0)
            show_in_tracebacks(found)
            yield found


def _checked_expression(
    cells: list[CodeCell], exercise_id: str, path: Path
) -> tuple[int, ast.expr]:
    """The index of the cell that calls check("3.4", answer), and the expression `answer`."""
    for index, cell in enumerate(cells):
        if cell.grade_id != f"{grade_id_of(exercise_id)}-check":
            continue
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check":
                return index, node.args[1]
    raise LookupError(f"{path} has no cell that checks exercise {exercise_id!r}.")
