"""Prints the versions that this environment has of what a learner needs: requirements-lock.txt.

.venv/bin/python tools/lock.py > requirements-lock.txt

They are pip's constraints. So a package that another system does without stands there for nothing.
"""

import importlib.metadata as installed
import platform
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

COURSE = "course-utils"
HEAD = """\
# What a learner needs, in the versions of one environment: Python {python}, {system}.
# docs/releases.md says how a class pins its term with this list, and how the list is refreshed."""


def needed(name: str, extras: set[str]) -> list[tuple[str, frozenset[str]]]:
    """The packages that an installed one asks for on this machine, each with its own extras."""
    asked = map(Requirement, installed.requires(name) or [])
    return [
        (canonicalize_name(each.name), frozenset(each.extras))
        for each in asked
        if not each.marker or any(each.marker.evaluate({"extra": x}) for x in {"", *extras})
    ]


def closure(name: str) -> set[str]:
    """All packages that one needs, directly or through others, without itself."""
    waiting, seen = [(name, frozenset())], set()
    while waiting:
        package = waiting.pop()
        if package not in seen:
            seen.add(package)
            waiting += needed(*package)
    return {each for each, _ in seen} - {name}


def main() -> int:
    """Print the list; return the exit status."""
    print(HEAD.format(python=platform.python_version(), system=platform.system()))
    for name in sorted(closure(COURSE)):
        print(f"{name}=={installed.version(name).partition('+')[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
