"""PyTorch's private names: they stand in one file, and what it says of one that is gone is true."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from course_hosts import growing
from course_utils.comm import private
from tests.modules.without_names import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "course_utils/comm/private.py"
# Names of Python, of other libraries, and of objects of ours that another file has made.
OTHERS = re.compile(
    r"^(os|sys|argparse|atexit|threading|functools|client|FigureManager|exercise|task|obj)\.\w+$|\._replace$"
)
OPERATORS = re.compile(r"^(aten|torch\.ops)\.")
IN_TEXT = re.compile(r"^torch(\.\w+)*\._\w")
# What is seen where a name is gone, if that is not the sentence.
SEEN = {
    r"returned \[tensor\(\[2": (
        *("skip", "strategy", "set_strategy", "start_batch", "end_batch", "forget_compiled"),
        *("new_group", "end_groups", "default_store"),
    ),
    "no other rank will make": ("backend", "device_types", "timeout"),
    "could not( be)? rebuil[dt]": ("autograd_functions", "new_dtypes", "rebuild_tensor"),
    "SystemError": ("run_backward",),
    "Couldn't swap": ("apply_to_module",),
    "before anybody has waited": ("reducer_waits",),
}


def names_in(path: Path) -> Iterator[str]:
    """The private names in a file but its own, each with its line."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    own = {getattr(node, "name", None) for node in nodes}
    own |= {
        n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
    }
    own |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        found = []
        if isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if is_private(node.attr) and node.attr not in own:
                found = [] if OTHERS.search(name) or OPERATORS.search(name) else [name]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            found = [each.name for each in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [node.value] if IN_TEXT.search(node.value) else []
        for name in found:
            parts = name.split(".")
            if any(map(is_private, parts)) and parts[0] != "matplotlib":
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def test_private_names_of_pytorch_stand_in_one_file():
    files = [path for path in sorted(ROOT.glob("course_*/**/*.py")) if path != HOME]
    assert len(files) > 200
    assert [name for path in files for name in names_in(path)] == []


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    command = [sys.executable, "-m", "tests.modules.without_names"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def test_each_name_has_a_program():
    names = {
        name for name, value in vars(private).items() if isinstance(value, private.Name | list)
    }
    assert PROGRAMS.keys() == names


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_seen_where_a_name_is_gone(name, said):
    if name in ("handle_of_group", "reconfigure") and growing.why_not():
        pytest.skip(growing.why_not())
    sentence = "The course uses [\\w.]+_gone, which PyTorch .* does not have: use one of 2.11 to"
    seen = next((pattern for pattern, names in SEEN.items() if name in names), sentence)
    assert re.search(seen, said[name]), said[name]
