"""The course's own versions of the learner's script, in `course_exercises/mine/`: train_03.py is what chapter 3 asks for."""

from pathlib import Path

_VERSIONS = Path(__file__).parents[1] / "mine"


def version(chapter: int, further: bool = False) -> Path:
    """The course's own version of the script after a chapter, the newest that is not later; of its further notebook."""
    if further:
        return _VERSIONS / f"train_{chapter:02}_further.py"
    versions = [p for p in sorted(_VERSIONS.glob("train_[0-9][0-9].py")) if _chapter(p) <= chapter]
    return versions[-1]


def before(chapter: int, further: bool = False) -> Path:
    """The version from which the stage of a chapter, or of its further notebook, starts."""
    return version(max(2, chapter if further else chapter - 1))


def is_own(path: Path) -> bool:
    """Whether a file is one of the course's own versions."""
    return path.read_text() in {each.read_text() for each in _VERSIONS.glob("train_*.py")}


def _chapter(path: Path) -> int:
    return int(path.stem.removeprefix("train_"))
