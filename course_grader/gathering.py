"""From what an instructor has, folders and archives as they come out of an LMS, to notebooks.

An archive is unpacked member by member into a temporary folder: what would land outside, or is no
notebook, is left out, so that one strange archive touches nobody else's work. What was in an archive
that lies in a folder was handed in when the archive was; one that the instructor names holds a class,
and does not say when.
"""

import re
import stat
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from course_grader import lms
from course_grader.limits import NOTEBOOK

_MOST_BYTES_OF_ALL = 2 << 30  # of the notebooks in one archive, unpacked
_MOST_MEMBERS = 10_000
_MOST_NOTEBOOKS = 40  # of one student's archive; the course has 23
_MOST_TIMES = 100  # as large as packed; a notebook of a few MB becomes some ten times smaller
_FROM = 1 << 20  # bytes
_NESTED = "{} is an archive inside of an archive; unpack the outer one, and grade its folder."
_CROWDED = f"{{}} has more than {_MOST_MEMBERS:,} members; unpack it, and grade its folder."
# what a browser or a mail program calls a notebook, and archives of other kinds
_ALMOST = re.compile(r"\.ipynb(\.\w+)?$|\.(7z|rar|tgz|tar(\.\w+)?)$", re.IGNORECASE)
_OTHER = "{} is neither a notebook (.ipynb) nor a zip archive; rename it, or unpack it."
_ALONE = "No notebook (.ipynb) was handed in, only {}."
_NAMED = 5  # so many files, of those that came in place of a notebook


@dataclass(frozen=True)
class Found:
    """A notebook, or what came in its place.

    path: where it lies. name: what the instructor knows it by: the last part of what was typed, `typed`,
    stands before `inside`, which was not. when: when it was handed in, in seconds, where that is known.
    archive: the student's own, where it comes from one. reason: why it cannot be graded, else empty.
    """

    path: Path
    name: str
    inside: PurePosixPath
    typed: str = ""
    when: float | None = None
    archive: str = ""
    reason: str = ""

    def refused(self, sentence: str) -> "Found":
        """The same with a reason."""
        return replace(self, reason=sentence)


def notebooks(names: list[str], folder: Path) -> Iterator[Found]:
    """The notebooks in files, folders and zip archives, in order, then what came in place of one;
    archives are unpacked into `folder`. Raises ValueError with a sentence where there is nothing."""
    for name in names:
        path = Path(name)
        if path.is_dir():
            found = list(_in_folder(path, folder))
        elif path.suffix.lower() == ".zip":
            found = list(_in_archive(Found(path, name, PurePosixPath()), folder))
        else:
            found = [Found(path, name, PurePosixPath(path.name), when=_time_of(path))]
        if not found:
            raise ValueError(f"There is no notebook (.ipynb) in {path}.")
        a_class = path.is_dir() or path.suffix.lower() == ".zip"
        typed = path.resolve().name if a_class else ""
        yield from (replace(one, typed=typed) for one in _with_a_notebook(found))


def _time_of(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _with_a_notebook(found: list[Found]) -> Iterator[Found]:
    """Those that are notebooks; of a student without one, a line that names what came in its place."""
    others: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        if one.reason == _ALONE:
            others[lms.key(one.inside)].append(one)
        else:
            yield one
    with_one = {lms.key(one.inside) for one in found if one.reason != _ALONE}
    for key, files in others.items():
        if key not in with_one:
            names = ", ".join(one.inside.name for one in files[:_NAMED])
            more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
            yield files[0].refused(_ALONE.format(names + more))


def _in_folder(path: Path, folder: Path) -> Iterator[Found]:
    for file in sorted(path.rglob("*")):
        inside = PurePosixPath(*file.relative_to(path).parts)
        kind = file.suffix.strip().lower()
        one = Found(file, str(file), inside)
        if not _is_wanted(inside):
            continue
        if file.is_symlink() and file.is_dir():
            yield one.refused(f"{file.name} is a link to a folder; name that folder.")
        elif kind == ".ipynb":
            yield replace(one, when=_time_of(file))
        elif kind == ".zip" and file.is_file():
            yield from _of_a_student(replace(one, when=_time_of(file)), folder)
        elif file.is_file():
            yield one.refused(_why_other(file.name))


def _of_a_student(archive: Found, folder: Path) -> Iterator[Found]:
    found = [
        replace(one, archive=archive.name)
        for one in _in_archive(archive, folder)
        if one.reason != _ALONE
    ]
    name = archive.path.name
    if not found:
        yield archive.refused(f"{name} holds no notebook (.ipynb).")
    yield from found[:_MOST_NOTEBOOKS]
    if len(found) > _MOST_NOTEBOOKS:
        yield archive.refused(f"{name} holds {len(found)} notebooks; {_MOST_NOTEBOOKS} are graded.")


def _why_other(name: str) -> str:
    return _OTHER.format(name) if _ALMOST.search(name) else _ALONE


def _is_wanted(path: PurePosixPath) -> bool:
    """Not what JupyterLab, Windows and macOS leave beside the files of their users."""
    left = {".ipynb_checkpoints", "__MACOSX", "Thumbs.db", "desktop.ini"}
    return not left & set(path.parts) and not path.name.startswith("._") and path.name[:1] != "."


def _in_archive(archive: Found, folder: Path) -> Iterator[Found]:
    """What is in an archive; its members lie below `inside`."""
    left = _MOST_BYTES_OF_ALL
    try:
        with zipfile.ZipFile(archive.path) as opened:
            for member in opened.infolist()[:_MOST_MEMBERS]:
                inside = PurePosixPath(member.filename.replace("\\", "/"))
                name = f"{archive.name}/{inside}"
                parts = (part for part in inside.parts if part != "/")
                one = replace(archive, name=name, inside=archive.inside.joinpath(*parts))
                kind = inside.suffix.strip().lower()
                if member.is_dir() or not _is_wanted(inside):
                    continue
                if kind == ".zip":
                    yield one.refused(_NESTED.format(inside))
                elif kind == ".ipynb":
                    left -= member.file_size
                    yield _unpacked(opened, member, inside, one, folder, left)
                else:
                    yield one.refused(_why_other(inside.name))
            if len(opened.infolist()) > _MOST_MEMBERS:
                yield _whole(archive, _CROWDED.format(archive.path.name))
    except Exception as error:  # noqa: BLE001 - zipfile raises of all kinds for what is damaged
        said = getattr(error, "strerror", None) or error
        yield _whole(archive, f"{archive.path.name} is no archive that can be read: {said}.")


def _whole(archive, reason):
    inside = archive.inside if archive.inside.parts else PurePosixPath(archive.path.name)
    return replace(archive, inside=inside, reason=reason)


def _unpacked(opened, member, inside, one, folder, left):
    if inside.is_absolute() or ".." in inside.parts:
        return one.refused(f"{inside} would land outside of its folder; hand in a notebook.")
    if stat.S_ISLNK(member.external_attr >> 16):
        return one.refused(f"{inside} is a link; hand in the notebook itself.")
    if member.file_size > NOTEBOOK:
        return one.refused(f"{inside} is too large: {member.file_size / 1e6:.0f} MB.")
    if member.file_size > max(_FROM, _MOST_TIMES * member.compress_size):
        size = f"{member.file_size / 1e6:.0f} MB of {member.compress_size / 1e3:.0f} kB"
        return one.refused(f"{inside} would become {size}, as no notebook does.")
    if left < 0:
        most = f"{_MOST_BYTES_OF_ALL / 1e6:.0f} MB"
        return one.refused(f"the notebooks before it have {most} already; hand in only yours.")
    try:
        with opened.open(member) as packed:
            content = packed.read(NOTEBOOK + 1)
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(dir=folder), inside.name)
        place.write_bytes(content)
    except Exception as error:  # noqa: BLE001 - as above; and a name may be too long for a file
        said = getattr(error, "strerror", None) or error
        return one.refused(f"{inside} cannot be unpacked: {said}.")
    return replace(one, path=place)
