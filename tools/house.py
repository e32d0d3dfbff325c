"""Prints the picture of the house: its rooms, and which imports which.

python tools/house.py          prints it
python tools/house.py write    puts it into CONTRIBUTING.md

A room is a package, or a folder of scripts. A package whose modules all lie in packages of its own is
no room but a house of them. A room stands one floor above the highest that it imports.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = "CONTRIBUTING.md"
BEGIN, END = "<!-- house -->\n```text\n", "```\n<!-- end of house -->"
SCRIPTS = ("solutions", "tools", "cluster")
_FACES = ("__init__.py", "__main__.py")


@dataclass
class Room:
    """A room by its path under the root, "course_utils/launch", and the files in it."""

    name: str
    files: list[Path] = field(default_factory=list)

    @property
    def lines(self) -> int:
        return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in self.files)

    @cached_property
    def imported(self) -> set[str]:
        """What its files import, on their first lines or later, by its whole name."""
        return {name for path in self.files for name in imported(path)}


def imported(path: Path) -> Iterator[str]:
    """The names that a file imports: "course_utils.launch.launch"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def rooms(root: Path = ROOT) -> dict[str, Room]:
    """All rooms of the house, by name."""
    found = []
    for package in sorted(path.parent for path in root.glob("course_*/__init__.py")):
        direct = sorted(package.glob("*.py"))
        if any(path.name not in _FACES for path in direct):
            found.append(Room(package.name, sorted(package.rglob("*.py"))))
            continue
        for inner in sorted(path.parent for path in package.glob("*/__init__.py")):
            found.append(Room(f"{package.name}/{inner.name}", sorted(inner.rglob("*.py"))))
        found += [Room(f"{package.name}/{p.stem}", [p]) for p in direct if p.name == "__main__.py"]
    found += [Room(name, sorted((root / name).glob("*.py"))) for name in SCRIPTS]
    return {room.name: room for room in found}


def arrows(house: dict[str, Room], root: Path = ROOT) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    return {
        room.name: {to for name in room.imported for to in _rooms_of(name, house, root)}
        - {room.name}
        for room in house.values()
    }


def _rooms_of(name, house, root):
    """The room that an imported name lies in; of a house's own face, the rooms that it hands on."""
    package, _, rest = name.partition(".")
    if package in house:
        return {package}
    if f"{package}/{rest.partition('.')[0]}" in house:
        return {f"{package}/{rest.partition('.')[0]}"}
    face = root / package / "__init__.py"
    if not package.startswith("course_") or not face.exists():
        return set()
    return {to for each in imported(face) for to in _rooms_of(each, house, root)}


def floors(arrows: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room, from 1. Raises ValueError for a circle."""
    found: dict[str, int] = {}
    while len(found) < len(arrows):
        ready = [r for r, below in arrows.items() if r not in found and below <= found.keys()]
        if not ready:
            raise ValueError(f"these import each other: {', '.join(arrows.keys() - found.keys())}")
        found |= {r: 1 + max((found[to] for to in arrows[r]), default=0) for r in ready}
    return found


def picture(root: Path = ROOT) -> str:
    """The house as text, its top floor first."""
    house = rooms(root)
    drawn = arrows(house, root)
    floor = floors(drawn)
    count = sum(map(len, drawn.values()))
    lines = [
        f"{len(house)} rooms, {count} arrows",
        "",
        "floor  room                      lines  imports",
    ]
    for name in sorted(house, key=lambda name: (-floor[name], name)):
        below = ", ".join(sorted(map(_short, drawn[name])))
        lines.append(
            f"{floor[name]:5}  {name:24}{_rounded(house[name].lines):7,}  {below}".rstrip()
        )
    return "\n".join(lines) + "\n"


def _short(name):
    return name.rpartition("/")[2].removeprefix("course_")


def _rounded(lines):
    """To its first digit: a picture that a page shows need not change with every line."""
    return round(lines, 1 - len(str(lines)))


def page(root: Path = ROOT) -> str:
    """CONTRIBUTING.md with the picture as it is now."""
    text = (root / PAGE).read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no place for the picture, from {BEGIN!r} to {END!r}")
    return f"{before}{begin}{picture(root)}{end}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        (ROOT / PAGE).write_text(page(), encoding="utf-8")
    else:
        print(picture(), end="")
