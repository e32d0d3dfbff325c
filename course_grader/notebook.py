"""Runs a submission's notebook as JupyterLab does, and tells what is bound to an answer then.

All code cells up to the exercise's last check are run in their order, in IPython's own shell, and each has
its time. An error ends its cell only. What the last call of `check` was handed is the answer, else what its
name is bound to. What a cell that was deleted defined comes from the course's source.

Whatever passes in the notebook from top to bottom is to pass here: tests/grade/honest_styles.py holds the
ways in which people write. What starts ranks waits until it is needed (standins.py). Where the answer does
not pass and a cell of the learner's own was not run to its end for that, or for its time, the notebook is
run once more, thoroughly. Only the worker uses this: even to parse a submission is not the grader's own
business.
"""

import asyncio
import builtins
import contextlib
import dis
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from IPython.core.compilerop import CachingCompiler
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.inputtransformer2 import TransformerManager
from IPython.core.interactiveshell import InteractiveShell
from traitlets import Type
from traitlets.config import Config

from course_exercises.authoring.guard import Deadline, TimeIsUp
from course_exercises.sources.answers import grade_id_of
from course_grader import standins
from course_utils.launch.story import frames
from course_utils.lesson import statements
from course_utils.lesson.statements import CodeCell

SECONDS = 60.0  # for all cells together
SECONDS_OF_A_CELL = 10.0
_SECONDS_OF_THE_COURSES = (
    1.0  # for a cell as the chapter has it, of which hardly any answer needs much
)
_THOROUGH = 100.0  # for all cells, and for each
_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # what reading a cell may raise


@dataclass(frozen=True)
class Asked:
    """What a worker knows of an exercise: less than its check does."""

    id: str
    name: str
    parameters: tuple[str, ...] | None


class NoAnswer(Exception):
    """Says in one sentence why there is nothing to check."""


class Notebook:
    """A notebook and its shell; until `run`, nothing of a submission is executed.

    provided: the course's own cells; texts: the grade ids of text cells.
    skipped: sentences for what was not run to its end, which matters for a cell of the learner's own, or
    where that uses what would have been bound.
    """

    def __init__(
        self,
        asked: Asked,
        cells: list[CodeCell],
        provided: list[CodeCell],
        texts: Iterable[str],
        thorough: bool,
    ):
        self._asked, self._cells, self._texts, self._thorough = asked, cells, set(texts), thorough
        self._checked: list[Any] = []
        self._raised: list[tuple[CodeCell, BaseException]] = []
        self.skipped: list[str] = []
        if not any(map(self._mentions, cells)):
            raise NoAnswer(self._what_is_missing())
        lesson = {_as_in_notebook(cell.source) for cell in provided}
        self._own = [cell for cell in cells if cell.source.strip() not in lesson]
        self._lesson = [s for cell in provided for s in statements.statements_of(cell)]
        words = frozenset(re.findall(r"\w+", "\n".join(cell.source for cell in self._own)))
        needed = statements.closure(self._lesson, set(), words)  # also by a helper's helper
        self._own_words = words.union(*(self._lesson[number].binds for number in needed))
        self._seconds = _THOROUGH if thorough else SECONDS
        self._over = False
        standins.install(self._note_checked, self._may_run)
        self._shell = _Shell.instance(config=Config({"HistoryManager": {"enabled": False}}))
        frames.is_cell = lambda file: False  # here a cell has a number that stays, so it is told
        self._shell.builtin_trap.__enter__()  # an answer may call `display` when it is checked, too
        self._namespace = self._shell.user_ns
        sys.modules["__main__"] = self._shell.user_module
        sys.path.insert(0, "")  # as in a kernel, modules may lie in the working folder
        os.environ["PIP_NO_INDEX"] = "1"  # without a network it would try for a long time

    def run(self) -> Any:
        """The answer. Raises NoAnswer where there is none, or what its cell has raised."""
        last, mentioned = self._ends()
        self._provide()
        self._loop = asyncio.new_event_loop()
        for cell in self._cells[: last + 1]:
            self._run(cell)
        if not self._checked and self._asked.name not in self._namespace:
            for cell in self._cells[last + 1 : mentioned + 1]:
                self._run(cell)
        self.end()
        if self._checked:
            return self._checked[-1]
        if self._asked.name in self._namespace:
            return self._namespace[self._asked.name]
        for cell, error in self._raised:
            if self._asked.name in _binds(cell):
                raise error
        raise NoAnswer(self._what_is_missing())

    def end(self) -> None:
        """No cell is run any more: what starts ranks starts them at once."""
        self._over = True

    @property
    def errors(self) -> list[BaseException]:
        """What the learner's own cells have raised."""
        return [error for _, error in self._raised]

    def _ends(self) -> tuple[int, int]:
        """The places of the last cell that checks the exercise and of the last that mentions it."""
        mentioned = [i for i, cell in enumerate(self._cells) if self._mentions(cell)]
        checks = [i for i in mentioned if self._checks(self._cells[i])]
        return [*mentioned, *checks][-1], mentioned[-1]

    def _checks(self, cell):
        id = re.escape(self._asked.id)
        call = rf"""(?<!hint\()['"]{id}['"]|\bcheck\(\s*(exercise_id\s*=\s*)?{id}\b"""
        return cell.grade_id == f"{self._grade_id}-check" or re.search(call, cell.source)

    def _mentions(self, cell):
        name = rf"\b{self._asked.name}\b"
        own = cell.grade_id == self._grade_id
        return own or self._checks(cell) or re.search(name, cell.source)

    @property
    def _grade_id(self):
        return grade_id_of(self._asked.id)

    def _provide(self):
        """Executes what the chapter itself binds to names that the submission uses and never binds, with
        what that needs; never an answer."""
        uses, binds = set(), set(vars(builtins))
        for cell in self._cells:
            with contextlib.suppress(*_NO_PYTHON):  # the shell will say so
                uses |= statements.uses_of(_transformed(cell))
            binds |= _binds(cell)
        with contextlib.suppress(TimeIsUp), Deadline(SECONDS_OF_A_CELL):
            for number in sorted(statements.closure(self._lesson, set(), frozenset(uses - binds))):
                with contextlib.suppress(Exception, standins.NotRun):  # who misses it, says so
                    statements.execute(self._lesson[number], self._namespace)

    def _run(self, cell):
        """Runs one cell; what it raises ends it."""
        self._shell.cell = cell
        usual = SECONDS_OF_A_CELL if cell in self._own else _SECONDS_OF_THE_COURSES
        left = min(self._seconds, _THOROUGH if self._thorough else usual)
        if left <= 0:
            self._skip(cell, "there was no time left")
            return
        deadline = Deadline(left)
        task = self._loop.create_task(self._shell.run_source(cell.source))
        try:
            with deadline:
                error = self._loop.run_until_complete(task)
        except BaseException as raised:  # noqa: BLE001 - a submission may raise anything
            error = raised
            task.cancel()  # else it would go on while the next cell waits
        self._seconds -= left - max(0.0, deadline.left)
        if isinstance(error, TimeIsUp):
            self._skip(cell, f"it was still running after {left:.0f} seconds")
        elif error is not None and cell in self._own:
            self._raised.append((cell, error))

    def _skip(self, cell, why):
        if cell in self._own or _binds(cell) & self._own_words:
            self.skipped.append(f"{cell.filename} ({why})")

    def _note_checked(self, exercise_id, answer):
        if exercise_id == self._asked.id:
            self._checked.append(answer)

    def _may_run(self):
        """Whether ranks may be started: the cells have run, or the statement that asks is the learner's own,
        or binds what that uses, and there is time."""
        cell, line = self._shell.cell, self._shell.line
        matters = cell in self._own or bool(self._shell.binds & self._own_words)
        if self._over or (matters and self._thorough):
            return True
        said = (
            f"{cell.filename}, line {line} (it starts ranks, or needs what they return)"
            if cell
            else ""
        )
        if matters and said not in self.skipped:
            self.skipped.append(said)
        return False

    def _what_is_missing(self) -> str:
        name = self._asked.name
        for cell, error in self._raised:
            own = re.search(rf"\b(def|class)\s+{name}\b", cell.source)
            if isinstance(error, SyntaxError) and (own or cell.grade_id == self._grade_id):
                line = getattr(error, "lineno", None)
                place = f"{cell.filename}, line {line}" if line else cell.filename
                return f"{place}: this is not Python ({getattr(error, 'msg', error)})."
        if self._grade_id in self._texts:
            return "the cell of the answer is a text cell; turn it into a code cell."
        for cell in self._cells:
            if cell.grade_id == self._grade_id:
                return f"{cell.filename}: the cell of the answer does not define {name}."
        return f"the cell of the answer is missing, and no other cell defines {name}."


def _as_in_notebook(source: str) -> str:
    """A chapter's cell; its source has a magic in its first line as a comment."""
    return source.strip().removeprefix("# ") if source.startswith("# %%") else source.strip()


def _transformed(cell: CodeCell) -> str:
    return TransformerManager().transform_cell(cell.source)


def _binds(cell: CodeCell) -> frozenset[str]:
    try:
        return statements.binds_of(_transformed(cell))
    except _NO_PYTHON:
        return frozenset()


class _Compiler(CachingCompiler):
    """Calls a cell what a learner calls it."""

    filename = ""

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        return self.filename


class _Shell(InteractiveShell):
    """IPython's shell, which shows nothing."""

    compiler_class = Type(_Compiler)
    display_pub_class = Type(CapturingDisplayPublisher)
    cell: CodeCell | None = None  # the one that runs; of its statement, the line and what it binds
    line = 0
    binds: frozenset[str] = frozenset()

    async def run_source(self, source: str) -> BaseException | None:
        """Runs a cell in a running event loop, as a kernel does; returns what it raises."""
        self.compile.filename = self.cell.filename
        transformed, broken = source, None
        try:
            transformed = self.transform_cell(source)
        except Exception:  # noqa: BLE001 - the shell says what it is, as in a kernel
            broken = sys.exc_info()
        result = await self.run_cell_async(
            source,
            store_history=True,
            transformed_cell=transformed,
            preprocessing_exc_tuple=broken,
        )
        await asyncio.sleep(0)  # tasks go on between cells, too
        return result.error_before_exec or result.error_in_exec

    async def run_code(self, code_obj: Any, result: Any = None, *, async_: bool = False) -> bool:
        """One statement; one that needs what was not run does not end its cell."""
        stored = ("STORE_NAME", "STORE_GLOBAL")
        self.line = min((line for *_, line in code_obj.co_lines() if line), default=0)
        self.binds = frozenset(
            i.argval for i in dis.get_instructions(code_obj) if i.opname in stored
        )
        failed = await super().run_code(code_obj, result, async_=async_)
        if result is not None and isinstance(result.error_in_exec, standins.NotRun):
            result.error_in_exec = None
            return False
        return failed

    def showtraceback(self, *_: Any, **__: Any) -> None:
        pass

    showsyntaxerror = showtraceback

    def enable_gui(self, gui: str | None = None) -> None:
        """For `%matplotlib`: there is no event loop of a window."""
