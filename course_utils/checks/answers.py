"""Gets code out of a notebook or its source without running the rest of it.

`load_answer("3.4")` finds the cell that checks exercise 3.4, collects the statements that its
answer needs (imports, functions, constants of earlier cells, found by name), executes those and
returns the function or class. `load_code(5, "Stage")` does the same for what a chapter defines
under this name. Tests, benchmarks and the grader use these, never a second copy.

A call for its effect, such as `torch.manual_seed(0)`, is not executed: a constant that is made
from random numbers brings its own generator.
"""

import ast
import builtins
import json
import linecache
import re
import symtable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_utils.checks import catalogue

_HEADER = re.compile(r"# %%(?:\s|$)(.*)")
_CELL_MAGIC = re.compile(r"\s*(# )?%%\w")  # in a source behind a comment sign: # %%writefile


@dataclass(frozen=True)
class _Cell:
    source: str
    grade_id: str  # "3-4", "3-4-check", or ""; nbgrader's ids have no dots
    filename: str
    line_before: int  # lines of the file before the cell's first


@dataclass(frozen=True)
class _Statement:
    """A top-level statement, the names it binds and the global names it uses."""

    node: ast.stmt
    cell: _Cell
    binds: frozenset[str]
    uses: frozenset[str]


def load_answer(exercise_id: str, path: Path | str | None = None) -> Any:
    """Returns the answer to an exercise: what its check cell passes to `check`.

    `path` is a py:percent source or a notebook; without it, the chapter's file in solutions/.
    Raises LookupError where file or exercise do not exist, and what the code itself raises.
    """
    path = Path(path) if path else _source(exercise_id)
    cells = list(_percent_cells(path) if path.suffix == ".py" else _notebook_cells(path))
    index, answer = _checked_expression(cells, exercise_id, path)
    statements = [s for cell in cells[:index] for s in _statements(cell)]
    own = {i for i, s in enumerate(statements) if s.cell.grade_id == _grade_id(exercise_id)}
    namespace = _namespace(statements, own, _uses(ast.unparse(answer)), path)
    return eval(compile(ast.Expression(answer), str(path), "eval"), namespace)


def load_code(chapter: int, name: str) -> Any:
    """Returns what the source of a chapter binds to `name`: a function, a class, a constant.

    Raises LookupError where there is no such chapter or name, and what the code itself raises.
    """
    path = _source(str(chapter))
    statements = [s for cell in _percent_cells(path) for s in _statements(cell)]
    if not any(name in statement.binds for statement in statements):
        raise LookupError(f"{path} binds no {name!r}.")
    return _namespace(statements, set(), frozenset([name]), path)[name]


def _namespace(
    statements: list[_Statement], own: set[int], names: frozenset[str], path: Path
) -> dict[str, Any]:
    """Executes the statements `own` and those that bind `names`, with all that they need."""
    namespace: dict[str, Any] = {"__name__": path.stem, "__builtins__": builtins}
    for i in sorted(_closure(statements, own, names)):
        _execute(statements[i], namespace)
    return namespace


def _grade_id(exercise_id: str) -> str:
    return exercise_id.replace(".", "-")


def _source(exercise_id: str) -> Path:
    folder = catalogue.root() / "solutions"
    chapter = exercise_id.split(".")[0]
    found = sorted(folder.glob(f"{int(chapter):02d}_*.py")) if chapter.isdigit() else []
    if not found:
        raise LookupError(f"There is no source of chapter {chapter!r} in {folder}.")
    return found[0]


def _percent_cells(path: Path) -> Iterator[_Cell]:
    lines = path.read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(lines) if _HEADER.fullmatch(line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        header = _HEADER.fullmatch(lines[start])[1]
        if not header.startswith("["):
            found = re.search(r'"grade_id":\s*"([^"]+)"', header)
            source = "\n".join(lines[start + 1 : end])
            yield _Cell(source, _grade_id(found[1]) if found else "", str(path), start + 1)


def _notebook_cells(path: Path) -> Iterator[_Cell]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    for number, cell in enumerate(notebook["cells"], start=1):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            filename = f"{path.name}, cell {number}"
            lines = source.splitlines(keepends=True)
            linecache.cache[filename] = (len(source), None, lines, filename)
            grade_id = cell.get("metadata", {}).get("nbgrader", {}).get("grade_id", "")
            yield _Cell(source, grade_id, filename, 0)


def _checked_expression(cells: list[_Cell], exercise_id: str, path: Path) -> tuple[int, ast.expr]:
    """The index of the cell that calls check("3.4", answer), and the expression `answer`."""
    for index, cell in enumerate(cells):
        if cell.grade_id != f"{_grade_id(exercise_id)}-check":
            continue
        for node in ast.walk(_parse(cell)):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check":
                return index, node.args[1]
    raise LookupError(f"{path} has no cell that checks exercise {exercise_id!r}.")


def _parse(cell: _Cell) -> ast.Module:
    if _CELL_MAGIC.match(cell.source):
        return ast.Module([], [])  # a script, for example, whose names are not the chapter's
    try:
        tree = ast.parse(cell.source)
    except SyntaxError:
        # magics and shell commands are no Python
        plain = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell.source)
        try:
            tree = ast.parse(plain)
        except SyntaxError:
            return ast.Module([], [])
    return ast.increment_lineno(tree, cell.line_before)


def _statements(cell: _Cell) -> Iterator[_Statement]:
    for node in _parse(cell).body:
        if not isinstance(node, ast.Expr):  # a call for its effect: a plot, a run, a print
            source = ast.unparse(node)
            uses = _uses(source)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                uses |= {node.target.id}  # TABLE |= {...} needs the TABLE before it
            yield _Statement(node, cell, _binds(source), uses)


def _binds(source: str) -> frozenset[str]:
    top = symtable.symtable(source, "cell", "exec")
    return frozenset(s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported())


def _uses(source: str) -> frozenset[str]:
    return frozenset(_global_names(symtable.symtable(source, "cell", "exec")))


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def _closure(statements: list[_Statement], own: set[int], names: frozenset[str]) -> set[int]:
    """The indices of the statements that bind `names`, with all that these need in turn."""
    needed: set[int] = set()
    waiting = [(name, len(statements)) for name in names]
    for i in own:
        needed.add(i)
        waiting += [(name, i) for name in statements[i].uses]
    while waiting:
        name, before = waiting.pop()
        binding = [i for i, s in enumerate(statements) if name in s.binds]
        if not binding:
            continue  # a builtin, or a name that only fails when it is used
        # the last one before its use; a function may also use what a later statement binds
        i = max((i for i in binding if i < before), default=binding[-1])
        if i not in needed:
            needed.add(i)
            waiting += [(name, i) for name in statements[i].uses]
    return needed


def _execute(statement: _Statement, namespace: dict[str, Any]) -> None:
    tree = ast.Module([statement.node], [])
    exec(compile(tree, statement.cell.filename, "exec"), namespace)  # noqa: S102 - the very job
