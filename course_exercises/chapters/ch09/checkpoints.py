"""Exercise 9.1, `Checkpoints`: what it asks for, and how it is checked."""

import contextlib
import itertools
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import described, following
from course_exercises.chapters.ch09.shared import Raised
from course_utils.comm import intercept
from course_utils.launch import RankFailure

_AT_RENAME = 1e9  # a file's time of change, in seconds, by which it is seen that nobody wrote later


@dataclass(frozen=True)
class _Event:
    """A recorded call: "fsync" or "rename" of a file with so many bytes, or a "collective"; "to one
    rank" is one in which the others do not wait for rank 0."""

    kind: str
    file: int = 0
    size: int = 0
    folder: str = ""  # in which it stands


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _load(checkpoints) -> Any:
    """What `load` returns, or how it fails."""
    try:
        return checkpoints.load()
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - that it fails, is what is reported
        return Raised(f"{type(error).__name__}: {error}")


def _save(checkpoints, folder: Path, step: int, state: dict) -> list[Path]:
    """Saves, and returns the files that this has made."""
    before = {(path, path.stat().st_ino) for path in _files(folder)}
    checkpoints.save(step, state)
    return [path for path in _files(folder) if (path, path.stat().st_ino) not in before]


def _in_order(rank, answer, folder, states, ages) -> tuple:
    """What a folder gives that is not there, and what is the latest of `states`. The files' times
    follow `ages`, in seconds: a folder that was copied has any times."""
    checkpoints = answer(folder, len(states))
    first = _load(checkpoints)
    for (step, state), age in zip(states.items(), ages, strict=True):
        for path in _save(checkpoints, folder, step, state):
            os.utime(path, (1e9 - age, 1e9 - age))
    return first, _load(checkpoints)


def _folder_of(file: str | os.PathLike, beside: int | None) -> str:
    """The folder of a file whose name may be relative to the descriptor of a folder."""
    parent = Path(file).parent if beside is None else Path(f"/proc/self/fd/{beside}", file).parent
    return str(parent.resolve())


@contextlib.contextmanager
def _recorded() -> Iterator[list[_Event]]:
    """Within the block, calls that put bytes on the disk, name a file or wait for others."""
    events: list[_Event] = []

    def noting(kind: str, original: Callable) -> Callable:
        def call(*args, **kwargs):
            file = args[0] if args else kwargs.get("src", kwargs.get("fd"))
            file = file.fileno() if hasattr(file, "fileno") else file
            beside = kwargs.get("src_dir_fd")  # the folder that a name may be relative to
            found = os.stat(file, dir_fd=beside)
            place = _folder_of(file, beside) if kind == "rename" else ""
            events.append(_Event(kind, found.st_ino, found.st_size, place))
            if kind == "rename":
                os.utime(
                    file, (_AT_RENAME, _AT_RENAME), dir_fd=beside
                )  # whoever writes to it now changes that
            return original(*args, **kwargs)

        return call

    def on_call(name: str, given: dict) -> None:
        kind = described(name, given)[0]
        one_way = kind in ("reduce", "gather", "recv") or given.get("root_rank", 0) != 0
        events.append(_Event("to one rank" if one_way else "collective"))

    kinds = {"fsync": "fsync", "fdatasync": "fsync", "replace": "rename", "rename": "rename"}
    kinds["link"] = "rename"  # gives a file its name at once, too
    with contextlib.ExitStack() as stack:
        for name, kind in kinds.items():
            if hasattr(os, name):
                patch = mock.patch.object(os, name, noting(kind, getattr(os, name)))
                stack.enter_context(patch)
        stack.enter_context(intercept.listening(on_call))
        yield events


@dataclass(frozen=True)
class _Saved:
    """What a rank did in a save, and the (inode, bytes, time of change) of the files in its folder."""

    events: list[_Event]
    files: list[tuple[int, int, float]]
    unwaited: list[str]  # the calls for which it has not waited


def _saved_once(rank, answer, folders, state) -> _Saved:
    checkpoints = answer(folders[rank], 2)
    with following() as sent, _recorded() as events:
        checkpoints.save(1, state)
    found = [path.stat() for path in _files(folders[rank])]
    files = [(stat.st_ino, stat.st_size, stat.st_mtime) for stat in found]
    return _Saved(events, files, sent.unwaited)


def _shared(rank, answer, folder, states) -> Any:
    """What each rank loads after all have saved."""
    checkpoints = answer(folder, 2)
    for step, state in states.items():
        checkpoints.save(step, state)
    return _load(checkpoints)


def _brings_an_object(rank, answer, folder) -> bool:
    """Whether `load` makes an object of a class, as it would run any code in a file."""
    checkpoints = answer(folder, 2)
    try:
        checkpoints.save(1, {"object": Path("anything")})
        _, state = answer(folder, 2).load()
        return isinstance(state["object"], Path)
    except NotImplementedError:
        raise
    except Exception:  # noqa: BLE001 - refused, on whatever way
        return False


def _cut(content: bytes, weights: bytes) -> bytes:
    return content[: len(content) // 2]


def _emptied(content: bytes, weights: bytes) -> bytes:
    return b""


def _one_bit(content: bytes, weights: bytes) -> bytes:
    """A bit of a weight flipped; somewhere in the middle where the weights stand in another form."""
    start = content.find(weights)
    place = len(content) // 2 if start < 0 else start + len(weights) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def _after_damage(rank, answer, folder, states, damage, count) -> tuple:
    """What a new object loads after the `count` latest checkpoints were damaged, and what the one
    that has saved them does."""
    checkpoints = answer(folder, len(states))
    saved = [(state, _save(checkpoints, folder, step, state)) for step, state in states.items()]
    for state, files in saved[len(saved) - count :]:
        for path in files:
            path.write_bytes(damage(path.read_bytes(), state["weights"].numpy().tobytes()))
    return _load(answer(folder, len(states))), _load(checkpoints)


def _after_a_bit(rank, answer, folder, state) -> Any:
    """What is loaded first that was never saved, of step 5 and 6, as one bit of the latter changes: in
    each byte of the state's rate, wherever the files of the two differ, at the start and at the end."""
    whole, files = [], []
    for step in (5, 6):
        files += _save(answer(folder, 2), folder, step, state)
        whole.append((step, state))
    other, content = (path.read_bytes() for path in (files[0], files[-1]))
    rate = content.find(struct.pack(">d", state["rate"]))  # as pickle writes it
    traces = [i for i, pair in enumerate(zip(other, content, strict=False)) if len({*pair}) > 1]
    places = [*range(8), *range(len(content) - 8, len(content)), *traces[:100]]
    for place in [*places, *(range(rate, rate + 8) if rate >= 0 else [])]:
        changed = bytes([content[place] ^ 1])
        files[-1].write_bytes(content[:place] + changed + content[place + 1 :])
        got = _load(answer(folder, 2))
        if not any(same(got, one, tolerance=0) for one in whole):
            return got
    return whole[0]


def _left_by_load(rank, answer, folder, states) -> bool:
    """Whether all files are there after `load` has passed over a damaged one."""
    _after_damage(rank, answer, folder, states, _cut, 0)
    before = _files(folder)
    before[0].write_bytes(_cut(before[0].read_bytes(), b""))
    before[-1].write_bytes(_cut(before[-1].read_bytes(), b""))
    _load(answer(folder, len(states)))
    return set(_files(folder)) == set(before)


def _case_folder(parent: str, case: int) -> Path:
    return Path(parent, f"run-{case}", "checkpoints")


def _one_by_one(rank, answer, parent, cases) -> list:
    """What the function of each case gives for what follows it there, in a folder of its own that may
    not be there yet."""
    return [
        function(rank, answer, _case_folder(parent, i), *case)
        for i, (function, *case) in enumerate(cases)
    ]


def _each(answer, *cases: tuple) -> list:
    """The same, on one rank, in folders that nobody needs later."""
    with tempfile.TemporaryDirectory() as parent:
        [got] = run(_one_by_one, 1, answer, parent, cases)
    return got


def _prepared(rank, answer, folder, keep, states) -> int:
    """Saves all, and returns the bytes of the latest file."""
    checkpoints = answer(folder, keep)
    for step, state in states.items():
        files = _save(checkpoints, folder, step, state)
    return max((path.stat().st_size for path in files), default=0)


def _killed(rank, answer, folder, keep, step, state, size) -> None:
    """Saves, in a process that the system kills when a file grows beyond `size` bytes."""
    import resource  # not on Windows, where this is not called

    checkpoints = answer(folder, keep)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core file of this death
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    checkpoints.save(step, state)


class _Dead(BaseException):
    """A process that is dead does nothing more."""


@contextlib.contextmanager
def _dies_at(call: int) -> Iterator[None]:
    """Within the block, the process dies before this call of those that name, keep or remove a
    file, counted from 0: none of them does anything from then on."""
    counter = itertools.count()

    def mortal(original: Callable) -> Callable:
        def made(*args, **kwargs):
            if next(counter) >= call:
                raise _Dead
            return original(*args, **kwargs)

        return made

    with contextlib.ExitStack() as stack:
        for name in ("fsync", "replace", "rename", "link", "unlink", "remove"):
            stack.enter_context(mock.patch.object(os, name, mortal(getattr(os, name))))
        yield


def _dies(rank, answer, folder, call, earlier, step, state) -> Any:
    """What is loaded after a save has died at this call."""
    for before, content in earlier.items():
        answer(folder, 1).save(before, content)
    with contextlib.suppress(_Dead), _dies_at(call):
        answer(folder, 1).save(step, state)
    return _load(answer(folder, 1))


def _loaded(rank, answer, folder, keep) -> Any:
    return _load(answer(folder, keep))


def _remaining(rank, answer, folder, keep, states) -> tuple[int, Any]:
    """How many files remain after these saves, and what is loaded then."""
    checkpoints = answer(folder, keep)
    for step, state in states.items():
        checkpoints.save(step, state)
    return len(_files(folder)), _load(checkpoints)


def _saved_again(rank, answer, folder, step, states) -> tuple[int, Any]:
    """The same, where one step was saved several times."""
    for state in states:
        report = _remaining(rank, answer, folder, 3, {step: state})
    return report


def _remaining_after_restart(rank, answer, folder, keep, earlier, states) -> tuple[int, Any]:
    """The same, where another object has saved the `earlier` checkpoints in this folder."""
    _remaining(rank, answer, folder, keep, earlier)
    return _remaining(rank, answer, folder, keep, states)


def _remaining_after_damage(rank, answer, folder, keep, earlier, states) -> tuple[int, Any]:
    """The same, where the latest of `earlier` checkpoints in this folder was damaged before."""
    _after_damage(rank, answer, folder, earlier, _cut, 1)
    return _remaining(rank, answer, folder, keep, states)


def _save_torn(answer, folder: Path, keep: int, step: int, state: dict, size: int) -> None:
    """Lets a save of `state` be killed when half of its `size` bytes are written."""
    try:
        run(_killed, 1, answer, folder, keep, step, state, size // 2)
    except RankFailure as failure:
        if failure.kind != "signal":
            raise
    else:
        cut = any(path.stat().st_size == size // 2 for path in _files(folder))
        raise Wrong(
            "short-write" if cut else None,
            expected=f"a save that writes about {size} bytes, as the one before",
            got=f"one that wrote {'' if cut else 'less than '}{size // 2}",
        )


def _state(draw) -> dict:
    return {
        "weights": draw.tensor(draw.integer(1200, 1800)),
        "rate": draw.number(0, 1),
        "counts": [draw.integer(1, 99), draw.integer(1, 99)],
        "inner": {"name": "momentum", "none": None, "values": draw.tensor(3)},
        "step": draw.integer(10**7, 10**8),  # somebody else's, the scheduler's perhaps
    }


def _states(draw, *steps: int) -> dict[int, dict]:
    return {step: _state(draw) for step in steps}


def _is_checkpoint(states: dict[int, dict], *steps: int) -> Callable[[Any], bool]:
    """Whether what came is the checkpoint of one of these steps."""
    return lambda got: any(same(got, (step, states[step])) for step in steps)


def _failed(got: Any) -> bool:
    return isinstance(got, Raised)


checkpoints = Exercise(
    "9.1",
    "Checkpoints",
    points=2,
    minutes=30,
    kind="core",
    parameters=("folder",),
    hints=[
        (
            "Which file is open for writing while you save? If the process dies now, has that file "
            "a name that `load` would look at?"
        ),
        (
            "`torch.save` also writes into an `io.BytesIO`, so you have all bytes before any of them "
            "is on the disk: enough for a checksum with `hashlib`, which can stand in front of them. "
            "Which ranks do this, and which of them wait?"
        ),
        (
            "On rank 0: write checksum and bytes under another name, flush, fsync, rename; then "
            "remove whatever is not among the newest up to this step. On all ranks: a barrier. To "
            "load, go through the steps from the highest down, as numbers, and take the first file "
            "whose bytes give the checksum that it carries."
        ),
    ],
    misconceptions={
        "nothing-there": "A run that starts for the first time has no checkpoint, and `load` has to "
        "say so with None. The folder may not even exist.",
        "folder-missing": "The folder is not there at first, and a parent of it may be missing too: make it, "
        "with `parents=True` and `exist_ok=True`.",
        "not-found": "A checkpoint was saved, and `load` finds none. Does it look for the names that `save` "
        "gives?",
        "zero-is-none": "The checkpoint of step 0 is not found. 0 counts as false, and is not larger than "
        "a 0 to begin with: ask whether something is None.",
        "sorted-as-text": "You take the highest name as text, and step-9 comes after step-10. Compare "
        "numbers, or write them with as many digits each.",
        "too-few-digits": "Step 1,000,000 counts as earlier than step 999,999: where a number has "
        "more digits than you wrote, names no longer sort as the steps do. Compare numbers, or "
        "write many more digits.",
        "newest-by-time": "You take the file that was changed last. A folder that was copied or "
        "restored has any times; the step is what counts.",
        "state-only": "`load` returns two things: the step, and the state.",
        "step-of-the-state": "The step that you return stands in the state. What the state has "
        "under this key is its owner's affair: give back the step with which `save` was called.",
        "two-files": "There is a second file beside the checkpoint. A kill between the two leaves one "
        "without the other: put checksum and step into the file itself, or into its name.",
        "every-rank-writes": "Other ranks than 0 write too. In a folder that all share, they write "
        "the same file at the same time.",
        "returns-early": "Nothing lets the other ranks know that rank 0 has finished the file: after "
        "the rename it makes no collective call. They would return before the checkpoint is there.",
        "one-way": "A `reduce` or a `gather` to rank 0 lets rank 0 wait for the others, and the others for "
        "nobody: they would return before the checkpoint is there. Take a call from which nobody "
        "returns before rank 0 has made it.",
        "not-waited": "With `async_op=True` a call comes back at once, and nobody waits: the other "
        "ranks would return before the checkpoint is there. Call `wait()` on what it returned.",
        "one-rank-waits": "Rank 0 waits in a collective that the others never call. What is inside "
        "`if rank == 0` is called by rank 0 only, a barrier too.",
        "load-not-on-all": "`load` leaves by two ways, and only one of them passes the collective: "
        "some ranks wait there for others that have returned.",
        "loads-on-one-rank": "Not every rank gets the checkpoint. All of them have to go on from it.",
        "no-fallback": "The latest file is damaged, and you stop there. Pass it over, and try the one "
        "before.",
        "load-removes": "`load` takes a file away. What a rank cannot read just now may be whole for "
        "another one, or a moment later, and what is damaged may be of use to a person: pass it over, "
        "and leave the folder as it is.",
        "one-step-back": "You look at one file before the latest, not at two. Go back until one is "
        "whole, or none is left.",
        "byte-unnoticed": "One bit of a weight has changed, and you load it. `torch.load` does not "
        "check the bytes of a tensor: compare a checksum of your own.",
        "partly-protected": "One bit has changed, and you load what was never saved: your checksum does "
        "not cover everything. The step and the numbers beside the tensors can change as well; take "
        "it over all bytes that you read.",
        "from-memory": "You return what this object remembers, and the file is damaged by now. The "
        "next process has the files alone, and so has another rank: read them each time.",
        "short-write": "The system took a part of the bytes only, and you went on as if all were "
        "written. `os.write`, and `write` of a file without a buffer, say how many they took: fewer where the "
        "disk is full, and never more than 2 GB on Linux. Write the rest as well, or leave that to a "
        "file with a buffer.",
        "in-place": "A save that was killed has destroyed the checkpoint that had this step before. "
        "Write under another name, and rename when all is written.",
        "dies-between": "A save that was killed between two of its calls has left no checkpoint: "
        "what was there was removed before the new file had its name. `os.replace` takes the place "
        "of an old file at once, so nothing has to go before it.",
        "from-another-folder": "The file is written in another folder and moved from there. If "
        "that lies on another disk, as a folder for temporary files may, the move is a copy, and a "
        "kill leaves a part of it. Write it in the folder of the checkpoints.",
        "takes-the-torn": "What a killed save has left is taken for a checkpoint.",
        "deletes-first": "A save that was killed has left no checkpoint: the old one was removed "
        "before the new one was there.",
        "never-deletes": "More files remain than `keep`. A long run fills the disk.",
        "saved-twice": "A step that is saved again has two files now. Which of them `load` takes depends "
        "on their names; the earlier one has to go.",
        "deletes-too-much": "Fewer files remain than `keep`.",
        "leftovers": "What a killed save has left still lies in the folder after the next save.",
        "own-files-only": "You remove what this object has saved. After a restart there is another "
        "object, and what the one before has saved stays for ever: look at what is in the folder.",
        "later-stays": "A file of a later step than the one just saved remains. Who saves step 15 has "
        "gone back to there, and `load` would bring the step 20 that was given up.",
        "keeps-later": "A file of a later step counts as one of those to keep, and one that had to "
        "stay was removed for it. Only steps up to the one just saved count.",
        "makes-any-object": "`load` makes whatever object the file asks for, and that can run any "
        "code. Read with `weights_only=True`.",
        "never-renamed": "The checkpoint's file has had its name since before it had its bytes: it was written "
        "or copied there. A copy is written piece by piece as well, and a kill leaves a part of it. Only "
        "a rename, `os.replace`, within the same folder, is whole or not at all.",
        "written-after-rename": "The file is written to after the rename. A kill at that moment leaves a torn "
        "one under the name that `load` reads: write all of it first, rename, and leave it alone.",
        "no-fsync": "The bytes are not yet on the disk when the file gets its name: there is no "
        "`os.fsync` before. After a power failure the name may stand for an empty file.",
        "fsync-unflushed": "`os.fsync` comes while bytes are still in Python's buffer: it knows only "
        "those that the system has. Call `flush()` first.",
    },
    failures=dict.fromkeys(
        ("FileNotFoundError", "Parent directory", "FileExistsError"), "folder-missing"
    ),
    at_home=True,
)


@checkpoints.requires("what was saved comes back, and the highest step is the latest")
def what_was_saved_comes_back(answer, draw):
    step = draw.integer(20, 80)
    cases = [
        (_in_order, _states(draw, draw.choice((9, 99)), 100), (1, 0)),
        (_in_order, _states(draw, 999_999, 1_000_000), (1, 0)),
        (_in_order, _states(draw, step, step + 1), (0, 1)),
        (_in_order, _states(draw, 0), (0,)),
    ]
    slugs = "sorted-as-text", "too-few-digits", "newest-by-time", None
    for (_, states, _), (first, latest), slug in zip(
        cases, _each(answer, *cases), slugs, strict=True
    ):
        if first is not None:
            raise Wrong("nothing-there", expected="None where no folder is", got=first)
        *earlier, last = states
        likely = {
            "zero-is-none": last == 0 and latest is None,
            "not-found": latest is None,
            "state-only": any(same(latest, state) for state in states.values()),
            "step-of-the-state": same(latest, (states[last]["step"], states[last])),
            slug: _is_checkpoint(states, *earlier),  # of one step there is none
        }
        expect(latest, (last, states[last]), what="load()", likely=likely)


@checkpoints.requires(
    "rank 0 alone writes one file, and the others wait for it",
    failures={"timeout": "one-rank-waits"},
)
def rank_0_alone_writes_one_file(answer, draw):
    ranks = draw.choice((2, 3))
    # each rank has a folder of its own here, so that who writes cannot get into another's way
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, f"of-rank-{rank}") for rank in range(ranks)]
        saved = run(_saved_once, ranks, answer, folders, _state(draw))
    for rank, other in enumerate(saved[1:], start=1):
        if other.files:
            raise Wrong("every-rank-writes", expected=f"no file written by rank {rank}", got="one")
    written = len(saved[0].files)
    likely = {"two-files": written > 1}
    expect(written, 1, what="files written by rank 0", likely=likely)
    kinds = [event.kind for event in saved[0].events]
    renamed = max((i for i, kind in enumerate(kinds) if kind == "rename"), default=-1)
    after = kinds[renamed + 1 :]
    if "collective" not in after:
        one_way = "to one rank" in after
        slug, got = ("one-way", "one to one rank") if one_way else ("returns-early", "none")
        raise Wrong(slug, expected="a collective call in which all wait for rank 0", got=got)
    for rank, each in enumerate(saved):
        if each.unwaited:
            got = f"rank {rank} does not wait for its {each.unwaited[0]}"
            raise Wrong("not-waited", expected="a wait() for every call", got=got)


@checkpoints.requires(
    "every rank loads the same one", failures={"timeout": "load-not-on-all"}, needs_earlier=True
)
def every_rank_loads_the_same(answer, draw):
    ranks, step = draw.choice((2, 3)), draw.integer(3, 8)
    states = _states(draw, step, step + 1)
    with tempfile.TemporaryDirectory() as folder:
        first = run(_loaded, ranks, answer, Path(folder), 2)
        latest = run(_shared, ranks, answer, Path(folder), states)
    expect(first, [None] * ranks, each="rank", what="load() without a checkpoint")
    likely = {"loads-on-one-rank": None in latest}
    expected = [(step + 1, states[step + 1])] * ranks
    expect(latest, expected, each="rank", what="load()", likely=likely)


@checkpoints.requires(
    "after a save, the newest up to this step remain, and nothing else", needs_earlier=True
)
def after_a_save(answer, draw):
    keeps = draw.choice((2, 3)), 1
    plain = [_states(draw, *range(1, keep + 3)) for keep in keeps]
    millionth = _states(draw, 999_998, 999_999, 1_000_000)
    again = [_state(draw) for _ in range(3)]
    restarted = _states(draw, 1, 2), _states(draw, 3, 4)
    back = _states(draw, 10, 20, 15)
    damaged = _states(draw, 10, 20), _states(draw, 15)
    *remaining, after_million, saved_again, after_restart, after_back, after_damage = _each(
        answer,
        *((_remaining, keep, states) for keep, states in zip(keeps, plain, strict=True)),
        (_remaining, 2, millionth),
        (_saved_again, 7, again),
        (_remaining_after_restart, 2, *restarted),
        (_remaining, 2, back),
        (_remaining_after_damage, 1, *damaged),
    )
    for keep, (count, _) in zip(keeps, remaining, strict=True):
        likely = {"never-deletes": count > keep, "deletes-too-much": count < keep}
        expect(count, keep, what=f"files after {keep + 2} saves with keep={keep}", likely=likely)
    what, likely = "files after steps 999,998 to 1,000,000 with keep=2", {"too-few-digits": True}
    expect(after_million[0], 2, what=what, likely=likely)
    what = "files and load() after step 7 was saved three times"
    expect(saved_again, (1, (7, again[-1])), what=what, likely={"saved-twice": True})
    what, likely = "files after a restart with keep=2", {"own-files-only": after_restart[0] > 2}
    expect(after_restart[0], 2, what=what, likely=likely)
    what = "files and load() after steps 10, 20 and 15 were saved, with keep=2"
    likely = {"later-stays": after_back[0] > 2, "keeps-later": True}
    expect(after_back, (2, (15, back[15])), what=what, likely=likely)
    what = "files and load() after step 20 was damaged and 15 saved, with keep=1"
    likely = {"later-stays": after_damage[0] > 1, "keeps-later": True}
    expect(after_damage, (1, (15, damaged[1][15])), what=what, likely=likely)


@checkpoints.requires("a damaged one is passed over", needs_earlier=True)
def a_damaged_one_is_passed_over(answer, draw):
    damages = (_cut, 1), (_emptied, 1), (_one_bit, 1), (_cut, 2), (_one_bit, 3)
    cases = [(_after_damage, _states(draw, 5, 6, 7), *damage) for damage in damages]
    small = _state(draw) | {"weights": draw.tensor(3)}  # so that there are few bytes
    *loaded, left, after_bit = _each(
        answer, *cases, (_left_by_load, _states(draw, 5, 6)), (_after_a_bit, small)
    )
    for (_, states, damage, count), (got, own) in zip(cases, loaded, strict=True):
        whole = 7 - count
        mistakes = {
            "one-step-back": count > 1 and (got is None or _failed(got)),
            "byte-unnoticed": damage is _one_bit and not _failed(got) and got is not None,
            "no-fallback": True,
        }
        expected = (whole, states[whole]) if whole in states else None
        what = f"load() after damage to {count} of 3"
        expect(got, expected, what=what, likely=mistakes)
        expect(own, expected, what=f"{what}, by who saved them", likely={"from-memory": True})
    expect(left, True, what="all files there after load()", likely={"load-removes": True})
    mistakes = {"no-fallback": after_bit is None or _failed(after_bit), "partly-protected": True}
    expect(after_bit, (5, small), what="load() after one bit of step 6 changed", likely=mistakes)


@checkpoints.requires(
    "a save that is killed destroys nothing, also of the same step", needs_earlier=True
)
def a_save_that_is_killed_destroys_nothing(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):  # Windows cannot kill at a byte
        return
    keeps, steps, slugs = (2, 1), (5, 6), ("in-place", "deletes-first")
    cases = [(_prepared, keep, _states(draw, 4, 5)) for keep in keeps]
    with tempfile.TemporaryDirectory() as parent:
        [sizes] = run(_one_by_one, 1, answer, parent, cases)
        for i, (keep, step, size) in enumerate(zip(keeps, steps, sizes, strict=True)):
            _save_torn(answer, _case_folder(parent, i), keep, step, _state(draw), size)
        [loaded] = run(_one_by_one, 1, answer, parent, [(_loaded, keep) for keep in keeps])
    for (_, _, states), got, slug in zip(cases, loaded, slugs, strict=True):
        mistakes = {"takes-the-torn": _failed(got), slug: True}
        expect(got, (5, states[5]), what="load() after the kill", likely=mistakes)


@checkpoints.requires("a save may end between any two of its calls", needs_earlier=True)
def a_save_may_end_between_any_two(answer, draw):
    calls, new = range(5), _state(draw)  # as many as write, sync, rename, remove
    befores = [_states(draw, *steps) for steps in ((4,), (5,), (6,), ())]
    cases = [(_dies, call, before, 5, new) for before in befores for call in calls]
    for (_, call, before, *_), got in zip(cases, _each(answer, *cases), strict=True):
        old = next(iter(before.items()), None)
        if not (same(got, old) or same(got, (5, new))):
            likely = {"takes-the-torn": _failed(got) or not before, "dies-between": True}
            expect(
                got, old, what=f"load() after a save that died before call {call}", likely=likely
            )


@checkpoints.requires("the next save removes what a killed one has left", needs_earlier=True)
def the_next_save_removes_what_a_killed(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):
        return
    after = _states(draw, 4)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        [size] = run(_prepared, 1, answer, folder, 2, _states(draw, 1, 2))
        _save_torn(answer, folder, 2, 3, _state(draw), size)
        [(count, got)] = run(_remaining, 1, answer, folder, 2, after)
    expect(count, 2, what="files after the kill and the next save", likely={"leftovers": count > 2})
    expect(got, (4, after[4]), what="load()")


@checkpoints.requires("the bytes are on the disk before the file gets its name", needs_earlier=True)
def the_bytes_are_on_the_disk_before(answer, draw):
    # so few bytes that Python's buffer holds them all until somebody flushes it
    state = _state(draw) | {"weights": draw.tensor(draw.integer(50, 90))}
    with tempfile.TemporaryDirectory() as place:
        [saved] = run(_saved_once, 1, answer, [Path(place)], state)
    for inode, size, changed in saved.files:
        own = [event for event in saved.events if event.file == inode]
        named = next((i for i, event in enumerate(own) if event.kind == "rename"), None)
        if named is None:
            got = "a file that had its name while its bytes were written"
            raise Wrong("never-renamed", expected="a file that a rename gave its name", got=got)
        if changed != _AT_RENAME:
            got = "one that was written to again"
            raise Wrong(
                "written-after-rename", expected="a file left alone after its rename", got=got
            )
        if not Path(own[named].folder).is_relative_to(Path(place).resolve()):
            got = "one that comes from another folder"
            raise Wrong("from-another-folder", expected="a rename within the folder", got=got)
        synced = [event.size for event in own[:named] if event.kind == "fsync"]
        if size not in synced:
            slug = "fsync-unflushed" if synced else "no-fsync"
            got = f"os.fsync with {synced[-1]} bytes" if synced else "no os.fsync of it"
            raise Wrong(slug, expected=f"os.fsync with all {size} bytes, then the rename", got=got)


@checkpoints.requires("load makes tensors, numbers and the like, and nothing else")
def load_makes_tensors(answer, draw):
    with tempfile.TemporaryDirectory() as folder:
        [brings] = run(_brings_an_object, 1, answer, Path(folder))
    if brings:
        raise Wrong("makes-any-object", expected="an object in the file refused", got="the object")
