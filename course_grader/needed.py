"""A submission's cells as statements, and which of them an answer needs.

What a cell does to a name counts as what makes it: methods that are added in a later cell, entries
of a table, calls that register something, files that are written and imported. So every statement
is kept that binds or changes a name that the answer needs. What only shows something, or runs
ranks, is left out, and the feedback says so.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from IPython.core.inputtransformer2 import TransformerManager

import course_utils
from course_utils.lesson.statements import CodeCell, binds_of, uses_of

NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)  # what reading a cell may raise
_TRANSPARENT = re.compile(r"\s*%%(?:time|timeit|capture|prun)\b.*\n?")
_FILE = re.compile(r"\s*%%(?:writefile|file)\s+(?:-a\s+)?(\S+)")
_OTHER_MAGIC = re.compile(r"\s*%%\w")
_SOME_FILE = re.compile(r"(?:.*/)?(?:(\w+)\.py|([\w-]+\.\w*[A-Za-z]\w*))$", re.DOTALL)
_SHOWS = {"print", "help", "repr", "len", "display", "dir", "type", "id", "check", "hint", "launch"}
_SHOWING = ("matplotlib", "IPython", "ipywidgets")
_SETS = {
    *("manual_seed", "seed", "set_default_dtype", "set_default_device", "setrecursionlimit"),
    *("insert", "append", "extend", "update", "setdefault", "chdir", "putenv", "reload"),
    *("makedirs", "mkdir"),
    *("filterwarnings", "simplefilter", "set_printoptions", "use_deterministic_algorithms"),
}
_ADDS = {"append", "appendleft", "extend", "insert", "update", "setdefault", "add"}
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_BINDS_ANYTHING = {"exec", "eval", "globals", "locals", "vars", "get_ipython"}


@dataclass(frozen=True, eq=False)
class Statement:
    """A top-level statement of a submission.

    number: its place among all. binds, uses: names; a file that a cell writes is "file:NAME".
    """

    node: ast.stmt
    cell: CodeCell
    number: int

    @property
    def line(self) -> int:
        """In its cell."""
        return self.node.lineno

    @cached_property
    def _names(self) -> tuple[frozenset[str], frozenset[str]]:
        return _names_of(self.node)

    @property
    def binds(self) -> frozenset[str]:
        """The global names that it binds or deletes."""
        return self._names[0]

    @property
    def uses(self) -> frozenset[str]:
        """The global names that it reads, also in the functions that it defines."""
        return self._names[1]

    @cached_property
    def changes(self) -> frozenset[str]:
        """The names whose object it may change, not counting calls of functions; for a function or a
        class that it defines, when that is called."""
        return frozenset(_changed(ast.walk(self.node)))

    @cached_property
    def changes_now(self) -> frozenset[str]:
        """Those of them that it may change when it is executed itself."""
        return frozenset(_changed(_executed_now(self.node)))


def statements_of(
    cells: list[CodeCell],
) -> tuple[list[Statement], list[tuple[CodeCell, Exception]]]:
    """The statements of all cells, and the cells that are no Python with the reason."""
    found: list[Statement] = []
    broken = []
    for cell in cells:
        try:
            for node in parse(cell).body:
                found.append(Statement(node, cell, len(found)))
        except NO_PYTHON as error:
            broken.append((cell, error))
    return found, broken


def parse(cell: CodeCell) -> ast.Module:
    """The cell's code as IPython reads it. Raises SyntaxError and its like."""
    source = cell.source
    if match := _FILE.match(source):
        return ast.parse(
            f"get_ipython().run_cell_magic('writefile', {match[1]!r}, {_rest(source)!r})"
        )
    if match := _TRANSPARENT.match(source):
        source = "\n" * source[: match.end()].count("\n") + source[match.end() :]
    elif _OTHER_MAGIC.match(source):
        return ast.Module([], [])  # a script, for example, whose names are not the notebook's
    tree = ast.parse(TransformerManager().transform_cell(source))
    tree.body = [_timed(node) for node in tree.body]
    return tree


def _rest(source: str) -> str:
    return source.lstrip().partition("\n")[2]


def _timed(node: ast.stmt) -> ast.stmt:
    """For `%time x = 1`, the statement that is timed."""
    match node:
        case ast.Expr(ast.Call(ast.Attribute(_, "run_line_magic"), [ast.Constant("time"), code])):
            inner = ast.parse(code.value).body
            if len(inner) == 1:
                return ast.fix_missing_locations(ast.copy_location(inner[0], node))
    return node


def _names_of(node: ast.stmt) -> tuple[frozenset[str], frozenset[str]]:
    try:
        source = ast.unparse(node)
        binds = set(binds_of(source) | _declared_global(symtable.symtable(source, "cell", "exec")))
        uses = set(uses_of(source))
    except NO_PYTHON:  # such as a top-level await, or an expression too deep to be written
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        binds = {n.id for n in names if not isinstance(n.ctx, ast.Load)}
        uses = {n.id for n in names if isinstance(n.ctx, ast.Load)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.AugAssign) and isinstance(inner.target, ast.Name):
            uses |= binds & {inner.target.id}  # not where it is a function's own
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            if len(inner.value) < 200 and (file := _SOME_FILE.match(inner.value)):
                binds.add(f"file:{file[1] or file[2]}")
                uses.add(f"file:{file[1] or file[2]}")  # what reads it, or adds to it
        elif isinstance(inner, ast.Attribute) and ast.unparse(inner.value) == "__main__":
            uses.add(inner.attr)
        elif isinstance(inner, ast.Import):
            uses |= {f"file:{alias.name.split('.')[0]}" for alias in inner.names}
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            uses.add(f"file:{inner.module.split('.')[0]}")
    return frozenset(binds), frozenset(uses)


def _declared_global(table: symtable.SymbolTable) -> set[str]:
    """What functions bind that say `global`."""
    found = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_declared_global() and symbol.is_assigned()
    }
    return found.union(*(_declared_global(child) for child in table.get_children()))


def _changed(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Roots of what is assigned to or deleted, receivers of methods, arguments of setattr."""
    for inner in nodes:
        if isinstance(inner, (ast.Attribute, ast.Subscript)):
            adds = isinstance(inner, ast.Attribute) and inner.attr in _ADDS  # map(TABLE.append, x)
            if adds or not isinstance(inner.ctx, ast.Load):
                yield from _root(inner)
        elif isinstance(inner, ast.Call):
            if isinstance(inner.func, ast.Attribute):
                yield from _root(inner.func.value)
            elif isinstance(inner.func, ast.Name) and inner.func.id in ("setattr", "delattr"):
                yield from (name for argument in inner.args[:1] for name in _root(argument))


def _executed_now(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement but the bodies of the functions that it defines with `def`: of those
    only decorators and default values are executed."""
    todo = [node]
    while todo:
        inner = todo.pop()
        yield inner
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += [
                *inner.decorator_list,
                *inner.args.defaults,
                *filter(None, inner.args.kw_defaults),
            ]
        else:
            todo += ast.iter_child_nodes(inner)


def _root(node: ast.AST) -> Iterator[str]:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    if isinstance(node, ast.Name):
        yield node.id


class Needed:
    """Which statements the names of an answer need, and which were left out.

    kept: in their order. optional: those kept only because a name is handed to a function that
    may change it; they may be given up. anything: whether one of them may bind any name. skipped: those that mention the answer and were left out.
    """

    def __init__(self, statements: list[Statement], names: frozenset[str], own: set[int]):
        self._statements = statements
        self._own = own
        self._imports = {
            name: module for s in statements for name, module in _imported(s.node).items()
        }
        bound = frozenset().union(*(s.binds for s in statements))
        # What is no object of the submission: whoever writes super().__init__() changes no `super`.
        self._not_data = set(self._imports) | (set(vars(builtins)) - bound)
        self._functions: dict[str, list[Statement]] = {}
        for s in statements:
            if name := _function_in(s.node):
                self._functions.setdefault(name, []).append(s)
        self.names = set(names)
        self._kept: dict[int, bool] = {}
        while self._grow():
            pass
        self.kept = [statements[number] for number in sorted(self._kept)]
        self.anything = any(_binds_anything(s.node) for s in self.kept)
        self.optional = {number for number, optional in self._kept.items() if optional}
        self.skipped = [
            s for s in statements if s.number not in self._kept and s.uses & names and not _asks(s)
        ]

    @property
    def _data(self) -> set[str]:
        """The names needed so far whose objects are the submission's own."""
        return self.names - self._not_data

    def _grow(self) -> bool:
        """Keeps what the names need so far. Returns whether that was more than before."""
        before = len(self._kept)
        for statement in self._statements:
            if not self._kept.get(statement.number, True):
                continue  # needed already
            if how := self._wanted(statement):
                self._kept[statement.number] = how == "optional"
                if not statement.binds & self.names:  # it changes something; what changes it?
                    self.names |= statement.binds
                self.names |= statement.uses
        return len(self._kept) > before

    def _wanted(self, statement: Statement) -> str | None:
        if statement.binds & self.names or _binds_anything(statement.node):
            return "needed"
        if statement.number in self._own and not self._shows(statement.node):
            return "needed"
        own = statement.changes_now
        if own & self._data and not self._shows(statement.node):
            return "needed"
        if own & set(self._imports) and self._sets_up(statement.node):
            return "needed"
        if isinstance(statement.node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            decorated = {
                n.id
                for d in statement.node.decorator_list
                for n in ast.walk(d)
                if isinstance(n, ast.Name)
            }
            own = decorated & self.names - set(self._imports)
            # An __init_subclass__ of its bases may register it, and a decorator may call it.
            bases = getattr(statement.node, "bases", [])
            asked = decorated | {base.id for base in bases if isinstance(base, ast.Name)}
            called = statement.node.decorator_list and statement.changes & self._data
            return "needed" if own or called or any(map(self._changes_needed, asked)) else None
        if self._shows(statement.node) or isinstance(statement.node, (ast.Import, ast.ImportFrom)):
            return None
        called = {c.func.id for c in _calls(statement.node) if isinstance(c.func, ast.Name)}
        if any(self._changes_needed(name) for name in called):
            return "needed"
        handed = {
            argument.id
            for call in _calls(statement.node)
            if not (isinstance(call.func, ast.Name) and call.func.id in _SHOWS)
            for argument in (*call.args, *(k.value for k in call.keywords))
            if isinstance(argument, ast.Name)
        }
        may_change = handed & self._data or any(map(self._changes_needed, handed))
        return "optional" if may_change else None

    def _changes_needed(self, name: str) -> bool:
        """Whether a function of the submission changes, or binds, one of the names."""
        own = self._functions.get(name, [])
        data = self._data
        return any((s.changes | s.binds - {name}) & data for s in own)

    def _sets_up(self, node: ast.stmt) -> bool:
        """Whether it changes a module: nn.Module.f = f, torch.manual_seed(0), sys.path.append(x)."""
        if isinstance(node, ast.Expr):
            call = node.value
            return (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in _SETS
            )
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []
        return any(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets)

    def _shows(self, node: ast.stmt) -> bool:
        """Whether it only shows something or runs ranks, and changes no name that is needed."""
        if isinstance(node, ast.Expr):
            value = node.value
            if isinstance(value, _COMPREHENSIONS):
                return all(map(self._shows_by, _calls(value)))
            return not isinstance(value, ast.Call) or self._shows_by(value)
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            return isinstance(node.value, ast.Call) and self._shows_by(node.value)
        if isinstance(node, (ast.For, ast.While, ast.With, ast.If)):
            return all(self._shows(inner) for inner in (*node.body, *getattr(node, "orelse", [])))
        return isinstance(node, (ast.Pass, ast.Assert))

    def _shows_by(self, call: ast.Call) -> bool:
        [name] = list(_root(call.func)) or [""]
        if name == "get_ipython":
            return True
        if isinstance(call.func, ast.Name) and name in _SHOWS:
            return True
        package = self._imports.get(name, "").split(".")[0]
        return package in _SHOWING or course_utils.is_of_the_course(package)


def _function_in(node: ast.stmt) -> str | None:
    """The name of the function or class that a statement defines."""
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return name
        case ast.Assign([ast.Name(name)], ast.Lambda()):
            return name
    return None


def _calls(node: ast.AST) -> list[ast.Call]:
    return [inner for inner in ast.walk(node) if isinstance(inner, ast.Call)]


def _asks(statement: Statement) -> bool:
    """Whether it is a check or a hint, which nobody misses."""
    call = statement.node.value if isinstance(statement.node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name)


def _imported(node: ast.stmt) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {(a.asname or a.name.split(".")[0]): a.name for a in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return {}


def _binds_anything(node: ast.stmt) -> bool:
    """Whether only its execution tells what it binds: `from math import *`, exec(...)."""
    if isinstance(node, ast.ImportFrom):
        return node.names[0].name == "*"
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return False
    called = {c.func.id for c in _calls(node) if isinstance(c.func, ast.Name)}
    return bool(called & (_BINDS_ANYTHING - {"get_ipython"})) or _runs_a_file(node)


def _runs_a_file(node: ast.stmt) -> bool:
    """%run helpers.py, %env NAME=1, %cd folder"""
    for call in _calls(node):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "run_line_magic":
            first = call.args[0].value if isinstance(call.args[0], ast.Constant) else ""
            return first in ("run", "env", "cd", "set_env", "load_ext")
    return False


def names_in(value: ast.expr) -> frozenset[str]:
    """The global names that an expression reads."""
    return _names_of(ast.Expr(value))[1]


def is_builtin(name: str) -> bool:
    """Whether Python itself knows the name."""
    return hasattr(builtins, name)
