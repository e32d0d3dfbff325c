"""The learner's progress, in one small local file that survives kernel restarts.

The file is $COURSE_PROGRESS, else .course/progress.json in the project's folder, else (where that
cannot be written) one in the user's own state folder. A damaged or hand-edited file is explained
and kept aside; what can still be read of it is kept. Nothing here ever raises in a notebook.
"""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from course_utils.checks import catalogue
from course_utils.checks.framework import Exercise

_LOCK_IS_STALE_AFTER = 10.0
_WAIT_FOR_LOCK = 3.0


def record(exercise: Exercise, passed: bool) -> None:
    """Notes that a check ran. An exercise once passed stays passed."""
    try:
        path = location()
        with _locked(path):
            entries = _repaired(path)
            entry = entries.setdefault(exercise.id, {"passed": False, "tries": 0})
            entry["passed"] = entry["passed"] or passed
            entry["tries"] += 1
            _write(path, entries)
    except OSError as error:
        print(f"(Your progress was not saved: {error.strerror or error}.)")


def passed() -> set[str]:
    """The ids of the exercises that were passed."""
    try:
        path = location()
        entries, untouched = _read(path)
        if not untouched:
            with _locked(path):
                entries = _repaired(path)
        return {id for id, entry in entries.items() if entry["passed"]}
    except OSError as error:
        print(f"(Your progress cannot be read: {error.strerror or error}.)")
        return set()


def progress_map() -> None:
    """Prints the chapters, their exercises and the points that you have."""
    done = passed()
    everything = catalogue.exercises()
    earned = sum(e.points for e in everything if e.id in done)
    print(f"{earned} of {sum(e.points for e in everything)} points")
    for title in _chapter_titles():
        chapter = int(title.split("_")[0])
        own = [e for e in everything if int(e.id.split(".")[0]) == chapter]
        print(f"\n{title}" + ("" if own else "   (no exercises)"))
        for e in own:
            mark, points = ("x", e.points) if e.id in done else (" ", 0)
            print(f"  [{mark}] {e.id} {e.name:<40} {points} of {e.points}")


def location() -> Path:
    """The file that holds the progress."""
    if os.environ.get("COURSE_PROGRESS"):
        return Path(os.environ["COURSE_PROGRESS"]).expanduser()
    folder = catalogue.root() / ".course"
    if _writable(folder):
        return folder / "progress.json"
    return _state_folder() / "progress.json"


def _writable(folder: Path) -> bool:
    existing = folder if folder.exists() else folder.parent
    return os.access(existing, os.W_OK)


def _state_folder() -> Path:
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = home / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_STATE_HOME", home / ".local" / "state"))
    return base / "parallelism-course"


def _chapter_titles() -> list[str]:
    titles = {p.stem for p in (catalogue.root() / "solutions").glob("[0-9][0-9]_*.py")}
    found = {int(title.split("_")[0]) for title in titles}
    titles |= {f"{chapter:02d}" for chapter in catalogue.chapters() if chapter not in found}
    return sorted(titles)


def _read(path: Path) -> tuple[dict[str, dict], bool]:
    """The sound entries by exercise id, and whether the file is as it was written."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}, True
    try:
        content = json.loads(text)
        entries = content["exercises"]
        sound = {id: entry for id, entry in entries.items() if _is_sound(entry)}
        untouched = len(sound) == len(entries) and content["checksum"] == _checksum(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound, untouched = {}, False
    return sound, untouched


def _is_sound(entry: object) -> bool:
    return (
        isinstance(entry, dict)
        and set(entry) == {"passed", "tries"}
        and isinstance(entry["passed"], bool)
        and isinstance(entry["tries"], int)
        and entry["tries"] >= 0
    )


def _repaired(path: Path) -> dict[str, dict]:
    """The entries; a file that is not as it was written is put aside, explained and replaced."""
    sound, untouched = _read(path)
    if not untouched:
        number = 1
        while (backup := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        os.replace(path, backup)
        _write(path, sound)
        count = f"{len(sound)} exercise{'' if len(sound) == 1 else 's'}"
        what = f"What can be read of it, {count}, is kept" if sound else "It starts anew"
        print(f"(Your progress file was damaged or changed by hand. {what}. Old file: {backup})")
    return sound


def _write(path: Path, entries: dict[str, dict]) -> None:
    """Writes all or nothing: to a file beside it, which then takes its place."""
    content = {"exercises": entries, "checksum": _checksum(entries)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _checksum(entries: dict) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps other kernels out while this one reads and writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(path.name + ".lock")
    end = time.monotonic() + _WAIT_FOR_LOCK
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > _LOCK_IS_STALE_AFTER:
                    lock.unlink()  # its owner died between taking and leaving it
            if time.monotonic() > end:
                raise OSError(f"another kernel holds {lock}") from None
            time.sleep(0.02)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            lock.unlink()
