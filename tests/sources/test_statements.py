"""Which names a statement binds and which it reads, the same under every Python."""

import pytest

from course_utils.lesson.statements import CodeCell, statements_of

CASES = {
    "x = [name for name in table]": ({"x"}, {"table"}),
    "x = {key: of(value) for key, value in table.items()}": ({"x"}, {"table", "of"}),
    "x = {name: [part for part in name.parts] for name in table}": ({"x"}, {"table"}),
    "x = [name for name in table] + [name]": ({"x"}, {"table", "name"}),
    "name = {name for name in name.parts}": ({"name"}, {"name"}),
    "for name in table:\n    x = name": ({"name", "x"}, {"table", "name"}),
    "def f(x):\n    return [y + z for y in x]": ({"f"}, {"z"}),
    "f = lambda x: [y + z for y in x]": ({"f"}, {"z"}),
    "class A(B):\n    c = [d for d in range(e)]": ({"A"}, {"B", "range", "e"}),
    "total += [x for x in more][0]": ({"total"}, {"total", "more"}),
}


@pytest.mark.parametrize("source", CASES)
def test_what_is_bound_and_what_is_read(source: str) -> None:
    [statement] = statements_of(CodeCell(source, "", "cell", 0))
    assert (statement.binds, statement.uses) == CASES[source]
