"""graded.jsonl: what the checks have said of each submission, a line each, written as soon as it is graded.

A run that was ended goes on after the last line: what is graded already, the same bytes under the same
variant, is not graded again, but for the exercises that class.toml names under [regrade].
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from course_grader.limits import NOTEBOOK
from course_grader.marks import Grade, Mark

NAME = "graded.jsonl"
_AGAIN = "Grade it again."  # a mark that says so (checking.py) is none


class Record:
    """The record in a folder, which is made; without a folder there is none. Raises ValueError where
    it cannot be written."""

    def __init__(self, folder: Path | None, regrade: Mapping[str, str]):
        self._regrade = regrade
        self._known: dict[tuple[str, str, str], dict] = {}
        self._path = folder and folder / NAME
        if folder:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._path.open("a").close()
                self._read()
            except OSError as error:
                raise ValueError(
                    f"{folder} cannot be the folder of the results: {error.strerror}."
                ) from None

    def _read(self):
        text = self._path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
                self._known[_key(Path(entry["file"]), entry["digest"], entry["variant"])] = entry
            except (ValueError, LookupError):
                continue  # the last line of a run that was killed while it wrote

    def marks(self, path: Path, variant: str) -> dict[str, Mark]:
        """The marks that a submission has already, by exercise."""
        if not self._known:  # then no file need be read for it
            return {}
        unknown = {"exercises": [], "regraded": {}}
        entry = self._known.get(_key(path, _digest(path), variant), unknown)
        return {
            mark["exercise"]: Mark(**mark)
            for mark in entry["exercises"]
            if self._regrade.get(id := mark["exercise"]) in (None, entry["regraded"].get(id))
            and not (mark["status"] == "stopped" and _AGAIN in mark["feedback"])
        }

    def add(self, grade: Grade, path: Path, variant: str) -> None:
        """Writes a line for a grade that has marks, unless it is there."""
        if not self._path or grade.reason:
            return
        ids = {mark.exercise for mark in grade.exercises}
        regraded = {id: reason for id, reason in self._regrade.items() if id in ids}
        key = _key(path, _digest(path), variant)
        before = self._known.get(key, {})
        entry = {
            "file": grade.path,
            "digest": key[1],
            "variant": variant,
            "chapter": grade.chapter,
            "regraded": before.get("regraded", {}) | regraded,
            "exercises": [mark.described() for mark in grade.exercises],
        }
        if before | {"file": ""} != entry | {"file": ""}:
            self._known[key] = entry
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


def _key(path: Path, digest: str, variant: str) -> tuple[str, str, str]:
    """With the file's name, which the feedback tells."""
    return path.name, digest, variant


def _digest(path: Path) -> str:
    """Nothing for a file that cannot be graded either."""
    try:
        if not path.is_file() or path.stat().st_size > NOTEBOOK:
            return ""
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
