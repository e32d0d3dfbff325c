"""The chapters of the course, each with its notebooks: a lesson, and what goes beyond it.

The sources are `solutions/NN_topic.py`, the lesson, and `solutions/NN_topic_further.py`, where there
is one. Both are one chapter: their exercises are numbered through, and a mention of the chapter
means the lesson. Whoever lists chapters asks here. A learner's copy of the course has no sources:
there the notebooks take their place.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FURTHER = "_further"
MINUTES = Path("course_exercises") / "minutes.json"  # under the root: what the builder has computed
_SOURCE = re.compile(r"(\d\d)_\w+")


@dataclass(frozen=True)
class Chapter:
    """A chapter by its number (3) and the source of its lesson; `further` is None where the lesson
    is all of it."""

    number: int
    lesson: Path
    further: Path | None

    @property
    def title(self) -> str:
        """The lesson's name, "03_ddp"."""
        return self.lesson.stem

    @property
    def sources(self) -> list[Path]:
        """The sources of its notebooks, the lesson's first."""
        return [self.lesson, *([self.further] if self.further else [])]

    @property
    def notebooks(self) -> list[str]:
        """The names of its notebooks, "03_ddp" and "03_ddp_further"."""
        return [source.stem for source in self.sources]


def chapters(root: Path = ROOT) -> list[Chapter]:
    """All chapters, in their order."""
    written = list((root / "solutions").glob("*.py")) or _notebooks(root)
    sources = sorted(path for path in written if _SOURCE.fullmatch(path.stem))
    further = {p.stem.removesuffix(FURTHER): p for p in sources if is_further(p.stem)}
    lessons = [path for path in sources if not is_further(path.stem)]
    return [Chapter(int(p.stem[:2]), p, further.get(p.stem)) for p in lessons]


def chapter(number: int | str, root: Path = ROOT) -> Chapter:
    """A chapter by its number, 3 or "03". Raises LookupError where there is none."""
    if str(number).isdigit():
        for found in chapters(root):
            if found.number == int(number):
                return found
    raise LookupError(f"There is no source of chapter {str(number)!r} in {root / 'solutions'}.")


def minutes(title: str, root: Path = ROOT) -> list[int]:
    """How long a chapter's lesson takes to read and run, and what goes beyond it, if it is there;
    empty where nobody has built it."""
    kept = _minutes(root)
    found = [kept[name] for name in (title, title + FURTHER) if name in kept]
    return [row["read"] + row["run"] for row in found if "read" in row]


def _notebooks(root: Path) -> list[Path]:
    """The course's own notebooks: a learner may keep others beside them."""
    return [root / "notebooks" / f"{name}.ipynb" for name in _minutes(root)]


def _minutes(root: Path) -> dict[str, dict]:
    path = root / MINUTES
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def is_further(name: str) -> bool:
    """Whether a notebook of this name goes beyond a lesson."""
    return name.endswith(FURTHER)
