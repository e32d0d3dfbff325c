"""From what an instructor has, folders and archives as they come out of an LMS, to notebooks.

An archive is unpacked member by member into a temporary folder: what would land outside, or is no
notebook, is left out, so that one strange archive touches nobody else's work. What was in an archive
that lies in a folder was handed in when the archive was; one that the instructor names holds a class,
and does not say when.
"""

import os
import re
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MOST_BYTES = 50 << 20  # of a member of an archive
_MOST_BYTES_OF_ALL = 2 << 30  # of the notebooks in one archive, unpacked
_MOST_MEMBERS = 10_000
_MOST_TIMES = 100  # as large as packed; a notebook of a few MB becomes some ten times smaller
_FROM = 1 << 20  # bytes
_UNKNOWN = 0.0  # when something was handed in
_NESTED = "{} is an archive inside of an archive; unpack the outer one, and grade its folder."
_CROWDED = f"{{}} has more than {_MOST_MEMBERS:,} members; unpack it, and grade its folder."
# what a browser or a mail program calls a notebook, and archives of other kinds
_ALMOST = re.compile(r"\.ipynb(\.\w+)?$|\.(7z|rar|tgz|tar(\.\w+)?)$", re.IGNORECASE)
_OTHER = "{} is neither a notebook (.ipynb) nor a zip archive; rename it, or unpack it."


@dataclass(frozen=True)
class Found:
    """A notebook: `path` is where it lies, `name` what the instructor knows it by. `reason` says why
    it cannot be graded, else it is empty."""

    path: Path
    name: str
    reason: str = ""


def notebooks(names: list[str], folder: Path) -> Iterator[Found]:
    """The notebooks in files, folders and zip archives, in order; archives are unpacked into
    `folder`. Raises ValueError with a sentence where a folder or archive holds none."""
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = list(_in_folder(path, folder))
        elif path.suffix.lower() == ".zip":
            found = list(_in_archive(path, str(path), folder, _UNKNOWN))
        else:
            found = [Found(path, str(path))]
        if not found:
            raise ValueError(f"There is no notebook (.ipynb) in {path}.")
        yield from found


def _in_folder(path: Path, folder: Path) -> Iterator[Found]:
    for file in sorted(path.rglob("*")):
        if not _is_wanted(PurePosixPath(*file.relative_to(path).parts)):
            continue
        if file.suffix.lower() == ".ipynb":
            yield Found(file, str(file))
        elif file.suffix.lower() == ".zip" and file.is_file():
            inside = list(_in_archive(file, str(file), folder, file.stat().st_mtime))
            yield from inside or [
                Found(file, str(file), f"{file.name} holds no notebook (.ipynb).")
            ]
        elif file.is_symlink() and file.is_dir():
            yield Found(file, str(file), f"{file.name} is a link to a folder; name that folder.")
        elif _ALMOST.search(file.name):
            yield Found(file, str(file), _OTHER.format(file.name))


def _is_wanted(path: PurePosixPath) -> bool:
    """Not what JupyterLab and macOS leave beside the files of their users."""
    left = {".ipynb_checkpoints", "__MACOSX"}
    return not left & set(path.parts) and not path.name.startswith("._")


def _in_archive(path: Path, name: str, folder: Path, changed: float) -> Iterator[Found]:
    left = _MOST_BYTES_OF_ALL
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist()[:_MOST_MEMBERS]:
                inside = PurePosixPath(member.filename.replace("\\", "/"))
                if member.is_dir() or not _is_wanted(inside):
                    continue
                if inside.suffix.lower() == ".zip":
                    yield Found(path, f"{name}/{inside}", _NESTED.format(inside))
                elif inside.suffix.lower() == ".ipynb":
                    left -= member.file_size
                    found = _unpacked(archive, member, inside, name, folder, left)
                    if not found.reason:
                        os.utime(found.path, (changed, changed))
                    yield found
                elif _ALMOST.search(inside.name):
                    yield Found(path, f"{name}/{inside}", _OTHER.format(inside))
            if len(archive.infolist()) > _MOST_MEMBERS:
                yield Found(path, name, _CROWDED.format(path.name))
    except Exception as error:  # noqa: BLE001 - zipfile raises of all kinds for what is damaged
        yield Found(path, name, f"{path.name} is no archive that can be read: {error}.")


def _unpacked(archive, member, inside, name, folder, left):
    known = f"{name}/{inside}"
    if inside.is_absolute() or ".." in inside.parts:
        return Found(
            folder, known, f"{inside} would land outside of its folder; hand in a notebook."
        )
    if stat.S_ISLNK(member.external_attr >> 16):
        return Found(folder, known, f"{inside} is a link; hand in the notebook itself.")
    if member.file_size > _MOST_BYTES:
        return Found(folder, known, f"{inside} is too large: {member.file_size / 1e6:.0f} MB.")
    if member.file_size > max(_FROM, _MOST_TIMES * member.compress_size):
        size = f"{member.file_size / 1e6:.0f} MB of {member.compress_size / 1e3:.0f} kB"
        return Found(folder, known, f"{inside} would become {size}, as no notebook does.")
    if left < 0:
        return Found(
            folder,
            known,
            f"the notebooks before it have {_MOST_BYTES_OF_ALL / 1e6:.0f} MB already; hand in only yours.",
        )
    try:
        with archive.open(member) as packed:
            content = packed.read(_MOST_BYTES + 1)
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=folder), inside.name)
        place.write_bytes(content)
    except Exception as error:  # noqa: BLE001 - as above; and a name may be too long for a file
        said = getattr(error, "strerror", None) or error
        return Found(folder, known, f"{inside} cannot be unpacked: {said}.")
    return Found(place, known)
