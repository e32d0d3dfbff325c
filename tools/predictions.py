"""Opens the predictions of a cell: filled in in the source and the solved copy, `...` for learners.

A prediction is a value of a dict that is written out in a cell with the tag "prediction", in an
assignment to a name that begins with "predicted".
"""

import ast
from collections.abc import Iterator

TAG = "prediction"


def opened(source: str) -> str:
    """The text of a cell with `...` in place of each prediction."""
    text = source.encode()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    for value in reversed(predictions(source)):  # from the end, so that the places before it hold
        begin = starts[value.lineno - 1] + value.col_offset
        end = starts[value.end_lineno - 1] + value.end_col_offset
        text = text[:begin] + b"..." + text[end:]
    return text.decode()


def predictions(source: str) -> list[ast.expr]:
    """The predicted values of a cell, in their order; SyntaxError if it is no Python."""
    found = [
        value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and _names_a_prediction(node.targets)
        for value in _values(node.value)
    ]
    return sorted(found, key=lambda value: (value.lineno, value.col_offset))


def only_compares(source: str) -> bool:
    """Whether a cell is a call of `compare` and nothing else."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # a magic
        return False
    call = body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "compare"


def _names_a_prediction(targets: list[ast.expr]) -> bool:
    return all(isinstance(t, ast.Name) and t.id.startswith("predicted") for t in targets)


def _values(node: ast.expr) -> Iterator[ast.expr]:
    """The values of the dicts in an expression, and not those of a dict that is a value itself."""
    if isinstance(node, ast.Dict):
        yield from node.values
    else:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from _values(child)
