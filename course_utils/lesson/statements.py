"""A notebook's code as statements: the names that each binds and those that it needs.

So that one definition can be executed with all that it needs, and nothing else.
"""

import ast
import linecache
import re
import symtable
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

# In a source behind a comment sign: # %%writefile. Below some, the cell's code is executed as usual.
_CELL_MAGIC = re.compile(r"\s*(# )?%%(?!(?:time|capture|prun)\b)\w")


@dataclass(frozen=True)
class CodeCell:
    """A code cell."""

    source: str
    grade_id: str  # "3-4", "3-4-check", or ""; nbgrader's ids have no dots
    filename: str
    line_before: int  # lines of the file before the cell's first


@dataclass(frozen=True)
class Statement:
    """A top-level statement, the names it binds and the global names it uses."""

    node: ast.stmt
    cell: CodeCell
    binds: frozenset[str]
    uses: frozenset[str]


def show_in_tracebacks(cell: CodeCell) -> None:
    """Lets tracebacks quote the lines of a cell that is in no file of its own."""
    lines = cell.source.splitlines(keepends=True)
    linecache.cache[cell.filename] = (len(cell.source), None, lines, cell.filename)


def parse(cell: CodeCell) -> ast.Module:
    """The cell's code without magics and shell commands; empty where it is no Python at all."""
    if _CELL_MAGIC.match(cell.source):
        return ast.Module([], [])  # a script, for example, whose names are not the chapter's
    for source in (cell.source, re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", cell.source)):
        with suppress(SyntaxError):
            return ast.increment_lineno(ast.parse(source), cell.line_before)
    return ast.Module([], [])


@cache
def statements_of(cell: CodeCell) -> tuple[Statement, ...]:
    """The cell's top-level statements, but for calls for their effect: a plot, a run, a print.

    A chapter's cells are asked for again with each of its answers, so they are kept.
    """
    found = []
    for node in parse(cell).body:
        if not isinstance(node, ast.Expr):
            source = ast.unparse(node)
            uses = uses_of(source)
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                uses |= {node.target.id}  # TABLE |= {...} needs the TABLE before it
            found.append(Statement(node, cell, binds_of(source), uses))
    return tuple(found)


def binds_of(source: str) -> frozenset[str]:
    """The global names that a piece of code binds at its top level."""
    top = symtable.symtable(source, "cell", "exec")
    bound = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}
    return frozenset(bound - _only_in_comprehensions(source))


def uses_of(source: str) -> frozenset[str]:
    """The global names that a piece of code reads."""
    names = set(_global_names(symtable.symtable(source, "cell", "exec")))
    return frozenset(names - _only_in_comprehensions(source))


def _only_in_comprehensions(source: str) -> set[str]:
    """The names that only comprehensions at the top level have, such as x in [x for x in values].
    From Python 3.12 on, symtable counts them as names of the module (PEP 709)."""
    inside: set[str] = set()
    outside: set[str] = set()

    def visit(node: ast.AST, own: frozenset[str]) -> None:
        if isinstance(node, ast.Name):
            (inside if node.id in own else outside).add(node.id)
        for part in getattr(node, "generators", []):
            own |= {n.id for n in ast.walk(part.target) if isinstance(n, ast.Name)}
        for child in ast.iter_child_nodes(node):
            visit(child, own)

    visit(ast.parse(source), frozenset())
    return inside - outside


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _global_names(child)


def closure(statements: list[Statement], own: set[int], names: frozenset[str]) -> set[int]:
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


def execute(statement: Statement, namespace: dict[str, Any]) -> None:
    """Runs one statement; raises what it raises."""
    tree = ast.Module([statement.node], [])
    exec(compile(tree, statement.cell.filename, "exec"), namespace)  # noqa: S102 - the very job
