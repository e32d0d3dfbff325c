"""The rooms of course_utils, packages and modules, import one way: none reaches itself again."""

import ast
from collections import defaultdict
from pathlib import Path

import course_utils

PACKAGE = Path(course_utils.__file__).parent
# a notebook that knows of no cluster runs on the one that COURSE_CLUSTER names, so launch looks there
EXCEPTION = ("launch", "cluster")

# What each of the lower rooms may use; what stands above them may use all of these.
ALLOWED = {
    "hardware": {"columns", "gpu_sharing", "host_waits"},
    "intercept": set(),
    "strict": {"host_waits", "intercept"},
    "launch": {
        *("collectives", "gpu_sharing", "hardware", "host_waits", "intercept", "strict"),
        "versions",
    },
    "cluster": {"launch"},
    "trace": {"collectives", "hardware", "intercept", "rings"},
    "sources": {"chapters"},
    "authoring": {"collectives", "hardware", "intercept", "launch", "sources", "strict"},
}


def _imported(path: Path) -> set[str]:
    """The rooms that a file imports, on its first lines or later."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("course_utils.")}
    return found


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached, ahead = set(), [start]
    while ahead:
        new = imports[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def _rooms() -> dict[str, set[str]]:
    """What each room imports from the others."""
    imports = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        imports[room] |= _imported(path) - {room}
    imports[EXCEPTION[0]].remove(EXCEPTION[1])
    return imports


def test_the_lower_rooms_use_what_they_may():
    imports = _rooms()
    for room, allowed in ALLOWED.items():
        assert imports[room] <= allowed, room


def test_no_room_reaches_itself_again():
    imports = _rooms()
    circles = {room for room in list(imports) if room in _reached(room, imports)}
    assert circles == set()
    assert "checks" not in _reached("exercises", imports)  # what is written knows no learner
