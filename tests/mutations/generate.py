"""Makes mutants of an answer: its source with one small change, as a tired learner makes it.

`mutants(source)` changes only what stands between the solution's markers, and there no docstring, no
type hint, no f-string and nothing inside a `raise`. Mutants that compile to the same code as the
answer, or as an earlier mutant, are left out. Of more than `MOST`, every n-th is taken in the order
of the lines, so that the choice is even and the same in every run.

What is changed:

    arithmetic        + - * / // % **; an in-place operator also becomes a plain assignment
    comparison        < <= > >= == != is in; and, or; a condition is negated, a `not` dropped
    constants         True, False; numbers one up, 1 also to 0
    ranks             rank + 1, 0; world size + 1, - 1
    reduce operations SUM, AVG, MAX; all_reduce without one gets MAX
    dropped           statements, keyword arguments, calls such as detach, clone, contiguous, sorted
    swapped           two arguments, the two values of a return, min and max, break and continue
    ends              of ranges and slices, one up; those of ranges also one down
"""

import ast
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

MOST = 40
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"

_ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_COMPARISON = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_RANKS = {"rank", "get_rank"}
_WORLD_SIZES = {"world_size", "get_world_size", "stages"}
_REDUCTIONS = {"SUM": "MAX", "AVG": "SUM", "MAX": "SUM", "MIN": "MAX"}
_REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
_OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor"}
_OTHER_FUNCTION |= {"floor": "ceil"}
_PASSES_ITS_ARGUMENT = {"sorted", "reversed", "set", "abs", "round", "copy", "deepcopy"}
_PASSES_ITSELF = {"detach", "clone", "contiguous", "copy", "to", "float", "double", "flatten"}
_UNSEEN = (ast.JoinedStr, ast.arguments, ast.Raise)


@dataclass(frozen=True)
class Mutant:
    """A changed source; `before` and `after` are the text that was replaced and its place-taker,
    with the rest of their lines, stripped; `line` counts from 1 in the source."""

    source: str
    line: int
    before: str
    after: str


def mutants(source: str) -> list[Mutant]:
    """Returns at most `MOST` mutants of an answer's cell, in the order of its lines."""
    made = every_mutant(source)
    if len(made) <= MOST:
        return made
    return [made[i * len(made) // MOST] for i in range(MOST)]


def every_mutant(source: str) -> list[Mutant]:
    """Returns all mutants of an answer's cell that differ, in the order of its lines."""
    seen = {_code_key(compile(source, "", "exec"))}
    changes = sorted(_changes(source), key=lambda change: (change[0].lineno, change[0].col_offset))
    made = []
    for node, text in changes:
        mutant = _spliced(source, node, text)
        key = mutant and _code_key(compile(mutant.source, "", "exec"))
        if key and key not in seen:
            seen.add(key)
            made.append(mutant)
    return made


def _changes(source: str) -> Iterator[tuple[ast.AST, str]]:
    """Pairs of a node and the text that takes its place."""
    inside = _solution_lines(source)
    for node, parent in _nodes(ast.parse(source), None):
        if getattr(node, "lineno", None) in inside:
            for make in _MAKERS:
                for text in make(node, parent):
                    yield node, text


def _solution_lines(source: str) -> set[int]:
    inside, lines = False, set()
    for number, line in enumerate(source.splitlines(), start=1):
        if line.strip() in (BEGIN, END):
            inside = line.strip() == BEGIN
        elif inside:
            lines.add(number)
    return lines


def _nodes(node: ast.AST, parent: ast.AST | None) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """All nodes that may be changed, each with the one around it."""
    yield node, parent
    if isinstance(node, _UNSEEN):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child, node)


def _arithmetic(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        if isinstance(node.op, ast.Mod):
            yield _text(node.left)
        if type(node.op) in _ARITHMETIC:
            yield _text(_with(node, op=_ARITHMETIC[type(node.op)]()))
    if isinstance(node, ast.AugAssign):
        yield _text(ast.Assign([node.target], node.value, lineno=0))
        if type(node.op) in _ARITHMETIC:
            yield _text(_with(node, op=_ARITHMETIC[type(node.op)]()))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
        yield _text(node.operand)


def _comparison(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            ops = [*node.ops[:i], _COMPARISON[type(op)](), *node.ops[i + 1 :]]
            yield _text(_with(node, ops=ops))
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _text(_with(node, op=other))
    elif _is_condition(node, parent) and not isinstance(node, ast.UnaryOp):
        yield _text(ast.UnaryOp(ast.Not(), node))


def _is_condition(node: ast.AST, parent: ast.AST | None) -> bool:
    if isinstance(parent, (ast.If, ast.IfExp, ast.While)):
        return parent.test is node
    return isinstance(parent, ast.comprehension) and node in parent.ifs


def _constants(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if not isinstance(node, ast.Constant) or isinstance(node.value, (str, bytes)):
        return
    if isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node.value, (int, float)):
        yield repr(node.value + 1)
        if node.value == 1:
            yield "0"


def _ranks(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if isinstance(parent, ast.Call) and parent.func is node:
        return
    name = _name(node.func if isinstance(node, ast.Call) else node)
    if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del)):
        return
    if name in _RANKS:
        yield from (f"{_text(node)} + 1", "0")
    if name in _WORLD_SIZES:
        yield from (f"{_text(node)} + 1", f"{_text(node)} - 1")


def _reductions(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and _name(node.value) == "ReduceOp":
        yield _text(_with(node, attr=_REDUCTIONS[node.attr]))
    if not isinstance(node, ast.Call) or _name(node.func) not in _REDUCING:
        return
    if not any(keyword.arg == "op" for keyword in node.keywords):
        maximum = ast.keyword("op", ast.parse("dist.ReduceOp.MAX", mode="eval").body)
        yield _text(_with(node, keywords=[maximum, *node.keywords]))


def _drops(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if _can_go(node, parent):
        yield "pass"
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        yield _text(_with(node, keywords=[k for k in node.keywords if k is not keyword]))
    name = _name(node.func)
    if isinstance(node.func, ast.Attribute) and name in _PASSES_ITSELF:
        yield _text(node.func.value)
    if name in _PASSES_ITS_ARGUMENT and node.args:
        yield _text(node.args[0])


def _can_go(node: ast.AST, parent: ast.AST | None) -> bool:
    """Whether a statement can be dropped without a name being missing for sure."""
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, (ast.Constant, ast.Yield, ast.YieldFrom))
    if isinstance(node, ast.Return):
        return not isinstance(parent, ast.FunctionDef)
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets)
    return isinstance(node, (ast.AugAssign, ast.Delete, ast.Raise, ast.Break, ast.Continue))


def _swaps(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Break):
        yield "continue"
    if isinstance(node, ast.Continue):
        yield "break"
    if isinstance(parent, ast.Return) and isinstance(node, ast.Tuple) and len(node.elts) == 2:
        yield _text(_with(node, elts=node.elts[::-1]))
    if not isinstance(node, ast.Call):
        return
    name = _name(node.func)
    if name in _OTHER_FUNCTION:
        yield _text(_with(node, func=_renamed(node.func, _OTHER_FUNCTION[name])))
    starred = any(isinstance(argument, ast.Starred) for argument in node.args[:2])
    if len(node.args) >= 2 and not starred and name not in ("min", "max"):
        yield _text(_with(node, args=[node.args[1], node.args[0], *node.args[2:]]))


def _ends(node: ast.AST, parent: ast.AST | None) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        return  # numbers are changed anyway
    if isinstance(parent, ast.Call) and _name(parent.func) == "range":
        yield from (f"{_text(node)} + 1", f"{_text(node)} - 1") if node in parent.args else ()
    if isinstance(parent, ast.Slice):
        yield f"{_text(node)} + 1"


_MAKERS: list[Callable[[ast.AST, ast.AST | None], Iterator[str]]]
_MAKERS = [_arithmetic, _comparison, _constants, _ranks, _reductions, _drops, _swaps, _ends]


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def _with(node: ast.AST, **fields) -> ast.AST:
    """A node like this one, but for some fields."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _name(node: ast.AST | None) -> str:
    """The last part of a dotted name, or nothing."""
    return getattr(node, "attr", None) or getattr(node, "id", "")


def _renamed(node: ast.AST, name: str) -> ast.AST:
    return _with(node, **{"attr" if isinstance(node, ast.Attribute) else "id": name})


def _spliced(source: str, node: ast.AST, text: str) -> Mutant | None:
    """The source with other text where the node stands; in brackets where it needs them."""
    lines = source.splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    head = lines[first].encode()[: node.col_offset].decode()
    tail = lines[last].encode()[node.end_col_offset :].decode()

    def around(text: str) -> str:
        return "".join([*lines[:first], head, text, tail, *lines[last + 1 :]])

    changed = around(text)
    if isinstance(node, ast.expr):
        in_brackets = around(f"({text})")
        if _tree(changed) != _tree(in_brackets):
            changed, text = in_brackets, f"({text})"
    if _tree(changed) is None:
        return None
    before = " ".join("".join(lines[first : last + 1]).split())
    return Mutant(changed, node.lineno, before, " ".join(f"{head}{text}{tail}".split()))


def _tree(source: str) -> str | None:
    try:
        compile(source, "", "exec")
        return ast.dump(ast.parse(source))
    except SyntaxError:
        return None


def _code_key(code: types.CodeType) -> tuple:
    """What two codes that do the same have in common, wherever they stand."""
    constants = tuple(
        _code_key(c) if isinstance(c, types.CodeType) else (type(c), repr(c))
        for c in code.co_consts
    )
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars
