"""What ranks of a chapter import sooner or later, for the process from which they are forked."""

from pathlib import Path

_CHAPTERS = Path(__file__).with_name("chapters")


def names() -> list[str]:
    """The modules, as they are imported."""
    exercises = [
        f"{__package__}.{_CHAPTERS.name}.{file.parent.name}.{file.stem}"
        for file in sorted(_CHAPTERS.glob("ch*/*.py"))
    ]
    lessons = ["course_utils.lesson.mnist", "course_utils.lesson.models", "course_utils.trace"]
    return [*lessons, *exercises]
