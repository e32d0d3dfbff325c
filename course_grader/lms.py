"""What an LMS says in the names under which it hands out submissions.

    Canvas   lovelaceada_[LATE_]1815_90210_03_ddp.ipynb     the user's number, the file's number
    Moodle   Ada Lovelace_1815_assignsubmission_file_/...   the participant's number

Only the first part of a path counts, in which the LMS has written: a student chooses what follows, and
often the name in front. So a name may hold several numbers; roster.py refuses what could be two students.
"""

import re
import unicodedata
from pathlib import PurePosixPath

_CANVAS = re.compile(r"_(?:LATE_)?(?=(\d+)_\d+_)")  # overlapping: "x_17_5_99_1000_y" has four
_CANVAS_PREFIX = re.compile(r".*?_(?:LATE_)?\d+_\d+_")
_MOODLE = re.compile(r"_(\d+)_assignsubmission_")
_MOODLE_PREFIX = re.compile(r".*?_\d+_assignsubmission_[a-z]+_?")
_LATE = re.compile(r"_LATE_\d+_\d+_")


def first(inside: PurePosixPath) -> str:
    """The part of a path that tells whose it is; an umlaut is one character, as macOS has it not."""
    return unicodedata.normalize("NFC", inside.parts[0] if inside.parts else "")


def ids(part: str) -> list[str]:
    """The numbers that Moodle or Canvas may have written, in their order; none where neither has."""
    return _MOODLE.findall(part) or _CANVAS.findall(part)


def plain(part: str) -> list[str]:
    """Where neither has: all that may be an id, "ada" and "ada_03" of ada_03_ddp.ipynb."""
    words = part.split("_")
    return ["_".join(words[:n]) for n in range(1, len(words))]


def key(inside: PurePosixPath) -> str:
    """What the submissions of one student have in common, without a roster."""
    return next(iter(ids(first(inside))), first(inside))


def late(inside: PurePosixPath) -> bool | None:
    """Whether Canvas says so; None where it has not written the name."""
    part = first(inside)
    by_canvas = not _MOODLE.search(part) and _CANVAS.search(part)
    return bool(_LATE.search(part)) if by_canvas else None


def for_feedback(inside: PurePosixPath) -> str:
    """The name under which Moodle and Canvas take a page back; "" for what comes from neither."""
    for prefix in (_MOODLE_PREFIX, _CANVAS_PREFIX):
        if found := prefix.match(first(inside)):
            return f"{found[0].removesuffix('_')}_feedback.html"
    return ""
