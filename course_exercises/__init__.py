"""The exercises, what they are written with, and the learner's side of them: `check`, `hint`, progress.

    chapters    the exercises, a folder a chapter
    authoring   what they are written with
    sources     code out of the notebooks, and which notebooks there are
    checks      check, hint, progress and points

A cell says `from course_exercises import check, hint`. They are imported when they are asked for: a
rank that runs an exercise imports this package too, and needs none of them.
"""

from pathlib import Path
from typing import Any

__all__ = [
    "check",
    "examine",
    "export_progress",
    "hint",
    "import_progress",
    "mine",
    "play",
    "progress_text",
    "reset",
]


def preloaded() -> list[str]:
    """The modules that ranks of a chapter import sooner or later."""
    chapters = Path(__file__).with_name("chapters")
    exercises = [
        f"{__name__}.chapters.{file.parent.name}.{file.stem}"
        for file in sorted(chapters.glob("ch*/*.py"))
    ]
    lessons = ["course_utils.lesson.mnist", "course_utils.lesson.models", "course_utils.trace"]
    return [*lessons, *exercises]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from course_exercises import checks

    return getattr(checks, name)
