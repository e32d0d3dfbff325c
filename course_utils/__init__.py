"""Helpers for the course. Where it cannot run, a sentence says so before anything else is imported."""

from pathlib import Path

from course_utils.comm import versions

versions.refuse_unsupported()

# The course's packages, wherever they are: this one, and those that lie beside it.
PACKAGES = sorted(
    file.parent for file in Path(__file__).resolve().parents[1].glob("course_*/__init__.py")
)
_NAMES = {folder.name for folder in PACKAGES}


def is_of_the_course(module: str) -> bool:
    """Whether a module of this name is the course's."""
    return module.split(".")[0] in _NAMES
