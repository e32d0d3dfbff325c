"""The file that holds a learner's progress: found, read, written, and mended where it is damaged.

The file is $COURSE_PROGRESS, else .course/progress.json in the project's folder, else (where that
folder is somebody else's) one in the user's own state folder: no two users share one. It holds an entry for each exercise that was
tried, {"3.1": {"passed": true, "tries": 4}}, and a checksum of all entries. A damaged or hand-edited
file is kept aside and explained; what can still be read of it stays.

Functions here raise OSError, with a sentence as its `strerror` or text; `progress` prints it.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock
import platformdirs

from course_exercises.sources.chapters import ROOT

Entries = dict[str, dict]

_LARGEST = 1_000_000  # bytes: a hundred times what the whole course needs
_WAIT_FOR_LOCK = 3.0  # seconds


def location() -> Path:
    """The file that holds the progress."""
    if os.environ.get("COURSE_PROGRESS"):
        return Path(os.environ["COURSE_PROGRESS"]).expanduser()
    folder = ROOT / ".course"
    if _writable(folder) and _own(folder):
        return folder / "progress.json"
    own = platformdirs.user_state_path("parallelism-course", appauthor=False)
    return own / "progress.json"


def _writable(folder: Path) -> bool:
    return os.access(_existing(folder), os.W_OK)


def _own(folder: Path) -> bool:
    """A folder that a group may write is its owner's: the others have their own file."""
    return not hasattr(os, "getuid") or _existing(folder).stat().st_uid == os.getuid()


def _existing(folder: Path) -> Path:
    return folder if folder.exists() else folder.parent


def read(path: Path) -> tuple[Entries, bool]:
    """The sound entries by exercise id, and whether the file is as it was written."""
    text = _text(path)
    if text is None:
        return {}, True
    try:
        content = json.loads(text)
        entries = content["exercises"]
        sound = {id: entry for id, entry in entries.items() if _is_sound(id, entry)}
        untouched = len(sound) == len(entries) and content["checksum"] == _checksum(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        sound, untouched = {}, False
    return sound, untouched


def _text(path: Path) -> str | None:
    """What the file holds, None where there is none. A pipe or a device is never opened: reading
    it could wait for ever, and mending it would move it away."""
    if not path.exists():
        return None
    if not path.is_file():
        raise OSError(f"{path} is not a file.")
    if path.stat().st_size > _LARGEST:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


def _is_sound(id: str, entry: object) -> bool:
    return (
        re.fullmatch(r"[0-9]{1,2}\.[0-9]{1,2}", id) is not None
        and isinstance(entry, dict)
        and set(entry) == {"passed", "tries"}
        and type(entry["passed"]) is bool
        and type(entry["tries"]) is int
        and entry["tries"] >= 0
    )


def mended(path: Path) -> Entries:
    """The entries; a file that is not as it was written is put aside, explained and replaced."""
    sound, untouched = read(path)
    if not untouched:
        backup = _free_name(path, "damaged")
        os.replace(path, backup)
        write(path, sound)
        count = f"{len(sound)} exercise{'' if len(sound) == 1 else 's'}"
        what = f"What can be read of it, {count}, is kept" if sound else "It starts anew"
        print(f"(Your progress file was damaged or changed by hand. {what}. Old file: {backup})")
    return sound


def keep_aside(path: Path, before: str) -> Path:
    """Copies the file to a new name beside it, before something is done to it."""
    return Path(shutil.copy2(path, _free_name(path, f"before-{before}")))


def _free_name(path: Path, word: str) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.{word}-{number}")).exists():
        number += 1
    return name


def write(path: Path, entries: Entries) -> None:
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


def _checksum(entries: Entries) -> str:
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other kernels out while this one reads and writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _acquire(path.with_name(path.name + ".lock")):
        yield


def _acquire(file: Path) -> filelock.BaseFileLock:
    try:
        try:
            return filelock.FileLock(file, _WAIT_FOR_LOCK).acquire()
        except NotImplementedError:  # a cluster's file system may not know flock
            return filelock.SoftFileLock(file, _WAIT_FOR_LOCK).acquire()
    except filelock.Timeout:
        raise OSError(f"another kernel holds {file}.") from None
