"""class.toml, beside the roster: what an instructor decides, for a class and for a student.

examples/class.toml shows all that it may hold.
"""

import datetime
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_exercises.checks import catalogue

NAME = "class.toml"
_DAY = 86400  # seconds
_KEYS = ("free_days", "penalty", "due", "extension", "days_late", "mark", "regrade")


@dataclass(frozen=True)
class Late:
    """Begun days after the due time, the share of the points that is left, and both in a sentence."""

    days: int = 0
    left: float = 1.0
    why: str = ""


@dataclass(frozen=True)
class Rules:
    """What class.toml holds; due times are in seconds, chapters are numbers, students are ids."""

    free_days: int = 0
    penalty: float = 0.1
    due: dict[int, float] = field(default_factory=dict)
    extension: dict[str, dict[int, float]] = field(default_factory=dict)  # the new due time
    days_late: dict[str, dict[int, int]] = field(default_factory=dict)
    mark: dict[str, dict[str, tuple[float, str]]] = field(default_factory=dict)
    regrade: dict[str, str] = field(default_factory=dict)

    def late(self, id: str, chapter: int, when: float | None, by_canvas: bool | None) -> Late:
        """How late a submission is. What Canvas packs has the time of the packing; it says only whether
        a file is late (None: it is not from Canvas)."""
        extended = self.extension.get(id, {}).get(chapter)
        due = extended or self.due.get(chapter)
        if due is None:
            return Late(why="Canvas calls it late." if by_canvas else "")
        if (days := self.days_late.get(id, {}).get(chapter)) is not None:
            why = f"{_days(days)} late, as your instructor has decided"
        elif by_canvas is not None:
            days = int(by_canvas and not extended)
            why = f"Canvas calls it late{', which counts as one day' if days else ''}"
        else:
            days = 0 if when is None else max(0, -int(-(when - due) // _DAY))
            why = f"It came on {_time(when or 0)}, {_days(days)} late"
        if not days and not by_canvas:
            return Late()
        costs = min(1.0, self.penalty * max(0, days - self.free_days))
        due_on = f"It was due on {_time(due)}{', with an extension' if extended else ''}"
        free = f"{_days(self.free_days)} free, " if self.free_days else ""
        taken = f" {free}{costs:.0%} of the points taken off." if days else ""
        return Late(days, 1 - costs, f"{why}. {due_on}.{taken}")


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _days(number: int) -> str:
    return f"{number} day{'' if number == 1 else 's'}"


def read(path: Path, students: Collection[str]) -> Rules:
    """Reads class.toml; without one nothing is late. Raises ValueError with a sentence."""
    if not path.exists():
        return Rules()
    try:
        return _rules(tomllib.loads(path.read_text(encoding="utf-8")), students)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _rules(found: dict, students: Collection[str]) -> Rules:
    if unknown := found.keys() - set(_KEYS):
        raise ValueError(f"{min(unknown)} is not known; there are {', '.join(_KEYS)}.")
    free, penalty = found.get("free_days", 0), found.get("penalty", 0.1)
    if not _whole(free):
        raise ValueError(f"free_days is {free!r}; it is a whole number of days, 0 or more.")
    if type(penalty) not in (int, float) or not 0 <= penalty <= 1:
        raise ValueError(f"penalty is {penalty!r}; it is a share of the points, from 0 to 1.")
    due = {_chapter(c): _seconds(when, "due", c) for c, when in _table(found, "due").items()}

    def each(key: str, known: Callable[[str], Any], value: Callable[[Any, str, str], Any]) -> dict:
        """A table for each student: what `known` and `value` make of its lines."""
        tables = {}
        for id in _table(found, key):
            if id not in students:
                raise ValueError(f"[{key}.{id}]: nobody in the roster has the id {id}.")
            lines = _table(found[key], id)
            tables[id] = {known(k): value(given, f"{key}.{id}", k) for k, given in lines.items()}
        return tables

    def extended(when: Any, where: str, chapter: str) -> float:
        if (before := due.get(int(chapter))) is None:
            raise ValueError(f'{where}."{chapter}" extends nothing: [due] has no "{chapter}".')
        until = before + when * _DAY if _whole(when) else _seconds(when, where, chapter)
        if until < before:
            raise ValueError(f'{where}."{chapter}" is before the time that is due for all.')
        return until

    def late(days: Any, where: str, chapter: str) -> int:
        if not _whole(days):
            raise ValueError(f'{where}."{chapter}" is {days!r}; it is a whole number of days.')
        if int(chapter) not in due:
            raise ValueError(f'{where}."{chapter}" costs nothing: [due] has no "{chapter}".')
        return days

    regrade = _table(found, "regrade")
    for exercise, reason in regrade.items():
        if not _exercise(exercise) or not _text(reason):
            raise ValueError(f'regrade."{exercise}" needs a reason, as a text.')
    return Rules(
        *(free, penalty, due),
        each("extension", _chapter, extended),
        each("days_late", _chapter, late),
        each("mark", _exercise, _mark),
        regrade,
    )


def _table(found: dict, key: str) -> dict:
    if not isinstance(table := found.get(key, {}), dict):
        raise ValueError(f"{key} is no table: write its name in brackets, above its lines.")  # noqa: TRY004
    return table


def _whole(days: Any) -> bool:
    return type(days) is int and days >= 0


def _text(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason.strip())


def _chapter(text: str) -> int:
    if not text.isdecimal() or int(text) not in catalogue.chapters():
        raise ValueError(f'There is no chapter {text!r} with exercises; say "03".')
    return int(text)


def _exercise(id: str) -> str:
    try:
        return catalogue.find(id).id
    except LookupError as error:
        raise ValueError(error.args[0]) from None


def _seconds(when: Any, where: str, chapter: str) -> float:
    if isinstance(when, datetime.datetime):
        return when.timestamp()
    if isinstance(when, datetime.date):
        return datetime.datetime.combine(when, datetime.time(23, 59, 59)).timestamp()
    raise ValueError(f'{where}."{chapter}" is {when!r}; it is a time like 2026-03-01T12:00:00.')


def _mark(given: Any, where: str, exercise: str) -> tuple[float, str]:
    most = catalogue.find(exercise).points
    points, reason = (
        given.get(key) if isinstance(given, dict) else None for key in ("points", "reason")
    )
    if not _text(reason):
        raise ValueError(f'{where}."{exercise}" needs {{ points = {most}, reason = "..." }}.')
    if type(points) not in (int, float) or not 0 <= points <= most:
        raise ValueError(f'{where}."{exercise}": points is {points!r}; it has {most}.')
    return float(points), reason
