"""Takes an answer out of a submission, with what it needs, and executes that; nothing else.

The answer is the text with the exercise's grade id, else what defines its name. What a cell that was
deleted defined comes from the course's source; a cell that raises ends there, as in a kernel.

Whatever passes in the notebook from top to bottom is to pass here: statements are executed as in
the notebook's kernel, in the module `__main__`, magics and shell commands by IPython itself.
tests/grade/honest_styles.py holds the ways in which people write. Only the worker uses this: even
to parse a submission is not the grader's own business.
"""

import ast
import asyncio
import inspect
import re
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from course_exercises.authoring.guard import Deadline, TimeIsUp
from course_exercises.sources.answers import grade_id_of
from course_grader.needed import Needed, Statement, is_builtin, names_in, statements_of
from course_utils.lesson import statements
from course_utils.lesson.statements import CodeCell, show_in_tracebacks

SECONDS = 60.0  # for all statements together
_SECONDS_OF_AN_OPTIONAL = 5.0


@dataclass(frozen=True)
class Asked:
    """What a worker knows of an exercise: less than its check does."""

    id: str
    name: str
    parameters: tuple[str, ...] | None


class NoAnswer(Exception):
    """Says in one sentence why there is nothing to check."""


class Answer:
    """The code of an answer.

    provided: what the course's own source binds, in place of what the submission does not.
    own: the answer itself, and what it needs of the submission.
    value: the expression that is checked: the name, or what stands in the call of `check`.
    skipped: sentences for what mentions the answer and is not executed.
    missing: what to say where only the execution tells whether there is an answer; else empty.
    """

    def __init__(
        self,
        provided: list[statements.Statement],
        own: Needed,
        value: ast.expr,
        broken: list[str],
        missing: str,
    ):
        self._missing = missing
        self._provided = provided
        self._own = own
        self._value = value
        self.skipped = broken + [
            f"{s.cell.filename}, line {s.line} (it shows or runs something, and changes nothing)"
            for s in own.skipped
        ]

    def execute(self) -> tuple[Any, list[BaseException]]:
        """The answer, and what was raised on the way there: as in a kernel, a cell that raises
        ends, and the next one is executed all the same.

        Raises the first of these errors where there is no answer, NoAnswer, and TimeIsUp.
        """
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        namespace = vars(main)
        sys.path.insert(0, "")  # as in a kernel, modules may lie in the working folder
        if any("get_ipython" in s.uses for s in self._own.kept):
            _start_ipython(main)
        with Deadline(SECONDS) as deadline:
            for statement in self._provided:
                statements.execute(statement, namespace)
            errors = self._execute_own(namespace, deadline)
            try:
                code = compile(ast.Expression(self._value), "<the call of check>", "eval")
                return eval(code, namespace), errors
            except NameError:
                if self._missing:
                    raise NoAnswer(self._missing) from None
                if errors:
                    raise errors[0] from None
                raise

    def _execute_own(self, namespace, deadline):
        errors: list[BaseException] = []
        ended = None
        for statement in self._own.kept:
            if statement.number in self._own.optional:
                self._try(statement, namespace, deadline)
            elif statement.cell is not ended:
                try:
                    _execute(statement, namespace)
                except TimeIsUp:
                    raise
                except BaseException as error:  # noqa: BLE001 - a submission may raise anything
                    errors.append(error)
                    ended = statement.cell
        return errors

    def _try(self, statement, namespace, deadline):
        """Executes what may be of no matter; what it cannot do in time is left out."""
        with deadline.paused():
            try:
                with Deadline(_SECONDS_OF_AN_OPTIONAL):
                    _execute(statement, namespace)
            except BaseException as error:  # noqa: BLE001 - a submission may raise anything
                why = "it takes too long" if isinstance(error, TimeIsUp) else type(error).__name__
                self.skipped.append(f"{statement.cell.filename}, line {statement.line} ({why})")


def find(
    exercise: Asked, cells: list[CodeCell], provided: list[CodeCell], texts: Iterable[str]
) -> Answer:
    """The answer to an exercise as it is when its check is called in a kernel. `provided` are the
    course's own cells; `texts` are the grade ids of text cells. Executes nothing. Raises NoAnswer.
    """
    for cell in cells:
        show_in_tracebacks(cell)
    found, broken = statements_of(cells)
    end = _end(exercise, cells, found)
    counted = {id(cell) for cell in cells[:end]}
    value = _checked(exercise, cells[: end + 1], found)
    before = [s for s in found if id(s.cell) in counted]
    names = names_in(value)
    own = {s.number for s in before if s.cell.grade_id == grade_id_of(exercise.id)}
    needed = Needed(before, names, own)
    missing = ""
    if isinstance(value, ast.Name) and not names & frozenset().union(*(s.binds for s in before)):
        missing = _what_is_missing(exercise, cells, broken, texts)
        if not needed.anything:
            raise NoAnswer(missing)
    unread = [
        f"{cell.filename} (this is not Python)"
        for cell, _ in broken
        if any(re.search(rf"\b{name}\b", cell.source) for name in names)
    ]
    of_the_course = _of_the_course(provided, _missing(needed, found))
    return Answer(of_the_course, needed, value, unread, missing)


def _end(exercise: Asked, cells: list[CodeCell], found: list[Statement]) -> int:
    """How many cells count: those before the last check, if the answer is among them; else those up
    to the answer's own cell; else, where its metadata is lost, all."""
    grade_id, call = grade_id_of(exercise.id), rf"\bcheck\(\s*['\"]{re.escape(exercise.id)}['\"]"
    places = {id(cell): i for i, cell in enumerate(cells)}
    defining = sorted({places[id(s.cell)] for s in found if exercise.name in s.binds})
    checks = [
        i
        for i, cell in enumerate(cells)
        if cell.grade_id == f"{grade_id}-check" or re.search(call, cell.source)
    ]
    if after := [i for i in checks if not defining or i > defining[0]]:
        return after[-1]
    marked = [i for i in defining if cells[i].grade_id == grade_id]
    return marked[-1] + 1 if marked else len(cells)


def _checked(exercise: Asked, cells: list[CodeCell], found: list[Statement]) -> ast.expr:
    """What the last call of `check` checks, where that is another expression than the name."""
    counted = {id(cell) for cell in cells[-1:]}
    for statement in found:
        if id(statement.cell) in counted:
            match statement.node:
                case ast.Expr(ast.Call(ast.Name("check"), [ast.Constant(exercise.id), value], [])):
                    return value
    return ast.Name(
        exercise.name, ast.Load(), lineno=1, col_offset=0, end_lineno=1, end_col_offset=0
    )


def _what_is_missing(
    exercise: Asked,
    cells: list[CodeCell],
    broken: list[tuple[CodeCell, Exception]],
    texts: Iterable[str],
) -> str:
    grade_id, name = grade_id_of(exercise.id), exercise.name
    for cell, error in broken:
        if cell.grade_id == grade_id or re.search(rf"\b(def|class)\s+{name}\b", cell.source):
            line = getattr(error, "lineno", None)
            place = f"{cell.filename}, line {line}" if line else cell.filename
            return f"{place}: this is not Python ({getattr(error, 'msg', error)})."
    if grade_id in texts:
        return "the cell of the answer is a text cell; turn it into a code cell."
    unread = {id(cell) for cell, _ in broken}
    for cell in cells:
        if cell.grade_id == grade_id and id(cell) not in unread:
            return f"{cell.filename}: the cell of the answer does not define {name}."
    return f"the cell of the answer is missing, and no other cell defines {name}."


def _missing(needed: Needed, found: list[Statement]) -> frozenset[str]:
    bound = frozenset().union(*(s.binds for s in found))
    own = {name for name in needed.names - bound if not name.startswith("file:")}
    return frozenset(name for name in own if not is_builtin(name))


def _of_the_course(cells: list[CodeCell], names: frozenset[str]) -> list[statements.Statement]:
    """What the chapter itself binds to the names, with what that needs; never an answer."""
    if not names:
        return []
    own = [s for cell in cells for s in statements.statements_of(cell)]
    return [own[i] for i in sorted(statements.closure(own, set(), names))]


def _execute(statement: Statement, namespace: dict[str, Any]) -> None:
    """Runs one statement; raises what it raises. A cell may await."""
    tree = ast.Module([statement.node], [])
    flag = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(tree, statement.cell.filename, "exec", flags=flag)
    coroutine = eval(code, namespace)
    if inspect.iscoroutine(coroutine):
        asyncio.run(coroutine)


def _start_ipython(main: types.ModuleType) -> None:
    """The shell that executes magics and shell commands."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config({"HistoryManager": {"enabled": False}})
    InteractiveShell.instance(user_module=main, user_ns=vars(main), config=config)
