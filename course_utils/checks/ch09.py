"""The checks of chapter 09: checkpoint files, an elastic sampler, a complete state, the interval
between checkpoints, and the limits of an elastic run.

Nothing here depends on when something happens. A save is torn at a byte: the rank lowers the limit
on the size of its files, and the system ends it when it writes beyond. Order is read from recorded
calls: of `os.fsync`, of a rename, of a collective.
"""

import contextlib
import io
import itertools
import math
import os
import random
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils import intercept
from course_utils.checks import Exercise, Wrong, expect, expect_type, run, same
from course_utils.hardware import device
from course_utils.launch import RankFailure

# ---- 9.1 Checkpoints -----------------------------------------------------------------------------


_AT_RENAME = 1e9  # a file's time of change, in seconds, by which it is seen that nobody wrote later


@dataclass(frozen=True)
class _Raised:
    """What came instead of a checkpoint."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Event:
    """A recorded call: "fsync" or "rename" of a file with so many bytes, or a "collective"."""

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
        return _Raised(f"{type(error).__name__}: {error}")


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


@contextlib.contextmanager
def _recorded() -> Iterator[list[_Event]]:
    """Within the block, calls that put bytes on the disk, name a file or wait for others."""
    events: list[_Event] = []

    def noting(kind: str, original: Callable) -> Callable:
        def call(file, *args, **kwargs):
            found = os.stat(file)
            place = str(Path(file).resolve().parent) if kind == "rename" else ""
            events.append(_Event(kind, found.st_ino, found.st_size, place))
            if kind == "rename":
                os.utime(file, (_AT_RENAME, _AT_RENAME))  # whoever writes to it now changes that
            return original(file, *args, **kwargs)

        return call

    kinds = {"fsync": "fsync", "fdatasync": "fsync", "replace": "rename", "rename": "rename"}
    kinds["link"] = "rename"  # gives a file its name at once, too
    with contextlib.ExitStack() as stack:
        for name, kind in kinds.items():
            if hasattr(os, name):
                patch = mock.patch.object(os, name, noting(kind, getattr(os, name)))
                stack.enter_context(patch)
        collective = _Event("collective")
        stack.enter_context(intercept.listening(lambda name, given: events.append(collective)))
        yield events


def _saved_once(rank, answer, folders, state) -> tuple[list[_Event], list[tuple[int, int, float]]]:
    """The events of a save, and the (inode, bytes, time of change) of the files in this rank's folder."""
    checkpoints = answer(folders[rank], 2)
    with _recorded() as events:
        checkpoints.save(1, state)
    found = [path.stat() for path in _files(folders[rank])]
    return events, [(stat.st_ino, stat.st_size, stat.st_mtime) for stat in found]


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
        _, state = checkpoints.load()
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


def _after_damage(rank, answer, folder, states, damage, count) -> Any:
    """What is loaded after the `count` latest checkpoints were damaged."""
    checkpoints = answer(folder, len(states))
    saved = [(state, _save(checkpoints, folder, step, state)) for step, state in states.items()]
    for state, files in saved[len(saved) - count :]:
        for path in files:
            path.write_bytes(damage(path.read_bytes(), state["weights"].numpy().tobytes()))
    return _load(answer(folder, len(states)))


def _case_folder(parent: str, case: int) -> Path:
    return Path(parent, f"run-{case}", "checkpoints")


def _one_by_one(rank, function, answer, parent, cases) -> list:
    """What `function` gives for each case, in a folder of its own that may not be there yet."""
    return [function(rank, answer, _case_folder(parent, i), *case) for i, case in enumerate(cases)]


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
        raise Wrong(
            expected=f"a save that writes about {size} bytes, as the one before",
            got=f"one that wrote less than {size // 2}",
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
    return isinstance(got, _Raised)


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
        "one-rank-waits": "Rank 0 waits in a collective that the others never call. What is inside "
        "`if rank == 0` is called by rank 0 only, a barrier too.",
        "load-not-on-all": "`load` leaves by two ways, and only one of them passes the collective: "
        "some ranks wait there for others that have returned.",
        "loads-on-one-rank": "Not every rank gets the checkpoint. All of them have to go on from it.",
        "no-fallback": "The latest file is damaged, and you stop there. Pass it over, and try the one "
        "before.",
        "one-step-back": "You look at one file before the latest, not at two. Go back until one is "
        "whole, or none is left.",
        "byte-unnoticed": "One bit of a weight has changed, and you load it. `torch.load` does not "
        "check the bytes of a tensor: compare a checksum of your own.",
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
        "keeps-later": "A damaged file of a later step counts as one of those to keep, and the one "
        "just saved had to go for it. Only steps up to this one count.",
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
def _(answer, draw):
    step = draw.integer(20, 80)
    cases = [
        (_states(draw, draw.choice((9, 99)), 100), (1, 0)),
        (_states(draw, 999_999, 1_000_000), (1, 0)),
        (_states(draw, step, step + 1), (0, 1)),
    ]
    with tempfile.TemporaryDirectory() as parent:
        [loaded] = run(_one_by_one, 1, _in_order, answer, parent, cases)
    slugs = "sorted-as-text", "too-few-digits", "newest-by-time"
    for (states, _), (first, latest), slug in zip(cases, loaded, slugs, strict=True):
        if first is not None:
            raise Wrong("nothing-there", expected="None where no folder is", got=first)
        earlier, last = states
        likely = {
            "not-found": latest is None,
            "state-only": any(same(latest, state) for state in states.values()),
            "step-of-the-state": same(latest, (states[last]["step"], states[last])),
            slug: _is_checkpoint(states, earlier),
        }
        expect(latest, (last, states[last]), what="load()", likely=likely)


@checkpoints.requires(
    "rank 0 alone writes one file, and the others wait for it",
    failures={"timeout": "one-rank-waits"},
)
def _(answer, draw):
    ranks = draw.choice((2, 3))
    # each rank has a folder of its own here, so that who writes cannot get into another's way
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, f"of-rank-{rank}") for rank in range(ranks)]
        (events, files), *others = run(_saved_once, ranks, answer, folders, _state(draw))
    for rank, (_, written) in enumerate(others, start=1):
        if written:
            raise Wrong("every-rank-writes", expected=f"no file written by rank {rank}", got="one")
    likely = {"two-files": len(files) > 1}
    expect(len(files), 1, what="files written by rank 0", likely=likely)
    kinds = [event.kind for event in events]
    renamed = max((i for i, kind in enumerate(kinds) if kind == "rename"), default=-1)
    if "collective" not in kinds[renamed + 1 :]:
        raise Wrong(
            "returns-early", expected="a collective call after the file is there", got="none"
        )


@checkpoints.requires(
    "every rank loads the same one", failures={"timeout": "load-not-on-all"}, needs_earlier=True
)
def _(answer, draw):
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
def _(answer, draw):
    keep = draw.choice((2, 3))
    states = _states(draw, *range(1, keep + 3))
    with tempfile.TemporaryDirectory() as folder:
        [(count, _)] = run(_remaining, 1, answer, Path(folder), keep, states)
    likely = {"never-deletes": count > keep, "deletes-too-much": count < keep}
    expect(count, keep, what=f"files after {keep + 2} saves with keep={keep}", likely=likely)
    again = [_state(draw) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        [got] = run(_saved_again, 1, answer, Path(folder), 7, again)
    what = "files and load() after step 7 was saved three times"
    expect(got, (1, (7, again[-1])), what=what, likely={"saved-twice": True})
    earlier, last = _states(draw, 10, 20), _states(draw, 15)
    with tempfile.TemporaryDirectory() as folder:
        [got] = run(_remaining_after_damage, 1, answer, Path(folder), 1, earlier, last)
    what = "files and load() after step 20 was damaged and 15 saved, with keep=1"
    expect(got, (1, (15, last[15])), what=what, likely={"keeps-later": True})


@checkpoints.requires("a damaged one is passed over", needs_earlier=True)
def _(answer, draw):
    damages = (_cut, 1), (_emptied, 1), (_one_bit, 1), (_cut, 2), (_one_bit, 3)
    cases = [(_states(draw, 5, 6, 7), *damage) for damage in damages]
    with tempfile.TemporaryDirectory() as parent:
        [loaded] = run(_one_by_one, 1, _after_damage, answer, parent, cases)
    for (states, damage, count), got in zip(cases, loaded, strict=True):
        whole = 7 - count
        mistakes = {
            "one-step-back": count > 1 and (got is None or _failed(got)),
            "byte-unnoticed": damage is _one_bit and not _failed(got) and got is not None,
            "no-fallback": True,
        }
        expected = (whole, states[whole]) if whole in states else None
        expect(got, expected, what=f"load() after damage to {count} of 3", likely=mistakes)


@checkpoints.requires(
    "a save that is killed destroys nothing, also of the same step", needs_earlier=True
)
def _(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):  # Windows cannot kill at a byte
        return
    keeps, steps, slugs = (2, 1), (5, 6), ("in-place", "deletes-first")
    cases = [(keep, _states(draw, 4, 5)) for keep in keeps]
    with tempfile.TemporaryDirectory() as parent:
        [sizes] = run(_one_by_one, 1, _prepared, answer, parent, cases)
        for i, (keep, step, size) in enumerate(zip(keeps, steps, sizes, strict=True)):
            _save_torn(answer, _case_folder(parent, i), keep, step, _state(draw), size)
        [loaded] = run(_one_by_one, 1, _loaded, answer, parent, [(keep,) for keep in keeps])
    for (_, states), got, slug in zip(cases, loaded, slugs, strict=True):
        mistakes = {"takes-the-torn": _failed(got), slug: True}
        expect(got, (5, states[5]), what="load() after the kill", likely=mistakes)


@checkpoints.requires("a save may end between any two of its calls", needs_earlier=True)
def _(answer, draw):
    calls, new = range(5), _state(draw)  # as many as write, sync, rename, remove
    befores = [_states(draw, *steps) for steps in ((4,), (5,), ())]
    cases = [(call, before, 5, new) for before in befores for call in calls]
    with tempfile.TemporaryDirectory() as parent:
        [loaded] = run(_one_by_one, 1, _dies, answer, parent, cases)
    for (call, before, *_), got in zip(cases, loaded, strict=True):
        old = next(iter(before.items()), None)
        if not (same(got, old) or same(got, (5, new))):
            likely = {"takes-the-torn": _failed(got) or not before, "dies-between": True}
            expect(
                got, old, what=f"load() after a save that died before call {call}", likely=likely
            )


@checkpoints.requires("the next save removes what a killed one has left", needs_earlier=True)
def _(answer, draw):
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


@checkpoints.requires("the bytes are on the disk before the file gets its name")
def _(answer, draw):
    # so few bytes that Python's buffer holds them all until somebody flushes it
    state = _state(draw) | {"weights": draw.tensor(draw.integer(50, 90))}
    with tempfile.TemporaryDirectory() as place:
        [(events, files)] = run(_saved_once, 1, answer, [Path(place)], state)
    for inode, size, changed in files:
        own = [event for event in events if event.file == inode]
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
def _(answer, draw):
    with tempfile.TemporaryDirectory() as folder:
        [brings] = run(_brings_an_object, 1, answer, Path(folder))
    if brings:
        raise Wrong("makes-any-object", expected="an object in the file refused", got="the object")


# ---- 9.2 ElasticSampler --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Order:
    """The arguments of a sampler, beside rank and world size."""

    samples: int
    global_batch: int
    seed: int

    def sizes(self) -> list[int]:
        """The samples of each step of an epoch."""
        return [
            min(self.global_batch, self.samples - i)
            for i in range(0, self.samples, self.global_batch)
        ]


def _samplers(answer, order: _Order, world_size: int, epoch: int = 0) -> list:
    """The samplers of all ranks, at the beginning of an epoch."""
    made = [
        answer(order.samples, order.global_batch, rank, world_size, order.seed)
        for rank in range(world_size)
    ]
    for sampler in made if epoch else []:
        sampler.set_epoch(epoch)
    return made


def _steps(samplers: list, draw, count: int | None = None) -> tuple[list, list]:
    """The lists of all ranks in each of the next `count` steps, [step][rank], and the state that
    each rank would save at the end of the last of them. Every rank has its own random numbers."""
    lists, states = [], []
    for sampler in samplers:
        torch.manual_seed(draw.seed())
        random.seed(draw.seed())
        np.random.seed(draw.seed())
        lists.append([])
        expect_type(sampler, torch.utils.data.Sampler)
        for batch in sampler if count != 0 else []:
            expect_type(batch, (list, tuple), likely="not-lists")
            lists[-1].append([int(index) for index in batch])
            if len(lists[-1]) == count:
                states.append(sampler.state_dict())
                break
            if len(lists[-1]) > 1000:
                raise Wrong("never-ends", expected="an end of the epoch", got="a thousand steps")
        else:
            states.append(sampler.state_dict())
    if len({len(own) for own in lists}) > 1:
        counts = [len(own) for own in lists]
        raise Wrong("steps-differ", expected="as many steps on each rank", got=counts)
    return [list(step) for step in zip(*lists, strict=True)], states


def _together(steps: list) -> list[list[int]]:
    """The samples of each step, of all ranks together, in ascending order."""
    return [sorted(index for own in step for index in own) for step in steps]


def _twice(indices: list) -> bool:
    return len(set(indices)) < len(indices)


def _flat(steps: list[list[int]]) -> list[int]:
    return [index for step in steps for index in step]


def _whole_epoch(answer, order: _Order, draw, epoch: int = 0) -> list[list[int]]:
    """The samples of each step, of one rank that nothing disturbs."""
    return _together(_steps(_samplers(answer, order, 1, epoch), draw)[0])


def _order(draw, multiple_of: int = 1, rest: int = 1) -> _Order:
    """An order of six steps, the last of them with `rest` samples."""
    batch = multiple_of * (draw.integer(6, 8) if multiple_of == 1 else 1)
    return _Order(5 * batch + rest, batch, draw.integer(1, 999))


def _loaded_into(samplers: list, state: dict) -> list:
    """The samplers, each after it has loaded what a file holds of `state`."""
    for sampler in samplers:
        sampler.load_state_dict(_through_file(state))
    return samplers


def _through_file(state: Any) -> Any:
    """What comes back from a file; raises Wrong where it cannot be read as it should."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    try:
        return torch.load(file, weights_only=True)
    except Exception as error:  # noqa: BLE001 - it refuses in many ways
        expected = "a state that torch.load(..., weights_only=True) reads"
        raise Wrong("not-plain", expected=expected, got=type(error).__name__) from None


sampler = Exercise(
    "9.2",
    "ElasticSampler",
    points=3,
    minutes=30,
    kind="core",
    parameters=("samples", "global_batch", "rank", "world_size", "seed"),
    hints=[
        (
            "Take the world size away: what would one rank do in each step? Which of its samples are "
            "yours when there are three?"
        ),
        (
            "Two numbers say where all ranks together are: the epoch, and how many samples of it have "
            "been used. Neither of them knows how many ranks there were."
        ),
        (
            "Draw a permutation of all samples from a generator of your own, seeded with seed and "
            "epoch. As long as samples are left, cut the next global batch off, move the position by "
            "its length, then yield every world-size-th of the piece, beginning at your rank."
        ),
    ],
    misconceptions={
        "not-lists": "Each step yields one list of integers, neither a single index nor a tensor: this "
        "is a batch sampler.",
        "never-ends": "The iteration does not end with the epoch.",
        "not-shuffled": "The samples come in the order of their numbers.",
        "drops-last": "The rest that fills no whole batch is dropped: those samples are never seen "
        "in this epoch.",
        "padded": "Samples come twice to make all lists equally long. The lists may differ by one.",
        "starts-late": "After `set_epoch` an epoch lacks its first samples: go back to position 0.",
        "own-order": "The ranks draw different orders, so they take the same samples in one step. "
        "Neither the rank nor the process's own random numbers may have a say in it.",
        "global-batch-changes": "With more ranks a step has more samples. `global_batch` is what all "
        "ranks take together.",
        "remainder-lost": "Where the ranks do not divide the global batch, you leave the remainder "
        "out of every step.",
        "batches-differ": "The samples of a step depend on the number of ranks. Cut the order into "
        "steps first, then each step between the ranks.",
        "uneven": "Lengths differ by more than one: a share rounded down leaves one rank the whole "
        "remainder, a share rounded up leaves the last ranks little or nothing.",
        "steps-differ": "The ranks do not make the same number of steps, and a collective of one "
        "would wait for ever. A rank with nothing to do yields an empty list.",
        "same-order": "Every epoch has the same order. `set_epoch` has to reach the random numbers.",
        "seed-ignored": "Another seed gives the same order.",
        "global-random": "You change the process's global random state: dropout would get other "
        "numbers. Use a `torch.Generator` of your own.",
        "not-plain": "The state does not pass `torch.load(..., weights_only=True)`. Two numbers are "
        "enough.",
        "from-zero": "After loading, the epoch starts from its beginning: what was used is used again.",
        "epoch-lost": "The position comes back, the epoch does not: the rest is that of another "
        "order, in which some samples come again and others never.",
        "one-behind": "A state that is saved within a step does not include that step: its samples "
        "come a second time. Move the position before you yield.",
        "one-ahead": "The state says that steps were made that nobody has seen: their samples are "
        "never used. Move the position as the lists are handed out.",
        "reshuffles": "The rest of the epoch is drawn anew after loading. No sample is lost, but the "
        "steps are others than in a run that nothing disturbed.",
        "end-forgotten": "A state that is saved at the end of an epoch says that the epoch is still to "
        "come, and a resumed run makes it a second time. `set_epoch` goes back to the start, the end "
        "of the iteration does not.",
        "set-epoch-resets": "A resumed loop calls `set_epoch` with the epoch that it has just loaded, "
        "and your position is gone. In the epoch under way it changes nothing.",
        "position-kept": "A new epoch begins in the middle: `set_epoch` has to go back to the start.",
        "never-goes-back": "`set_epoch` does nothing for an epoch before the one under way. A run that makes an "
        "epoch again goes to its beginning, too.",
        "position-per-rank": "The position counts the samples of one rank. It means another place as "
        "soon as there are more ranks or fewer: count those of all ranks together.",
        "restores-rank": "After loading, ranks have the same rank, or the old world size: the state "
        "brings them along. They belong to the process, not to the run.",
        "states-differ": "The ranks' states differ, so it matters which of them is saved.",
        "state-moves": "A state that was handed out or loaded changes as the sampler goes on: it is the "
        "very dict in which the sampler counts. Hand out a copy, and take in the numbers.",
    },
    at_home=True,
)


@sampler.requires("one rank gets every sample once, in steps of the global batch")
def _(answer, draw):
    order = _order(draw, rest=draw.integer(2, 5))
    for epoch in (0, draw.integer(1, 9)):
        steps, _ = _steps(_samplers(answer, order, 1, epoch), draw)
        got = [len(step[0]) for step in steps]
        full = order.sizes()[:-1]
        mistakes = {
            "drops-last": got == full,
            "padded": got == [*full, order.global_batch],
            "starts-late": epoch > 0 and sum(got) < order.samples,
        }
        expect(got, order.sizes(), what=f"samples of each step, epoch {epoch}", likely=mistakes)
        flat = _flat(_together(steps))
        expect(sorted(flat), list(range(order.samples)), what=f"all samples of epoch {epoch}")
    if _flat([step[0] for step in steps]) == list(range(order.samples)):
        raise Wrong("not-shuffled", expected="an order drawn from the seed", got="0, 1, 2, ...")


@sampler.requires("any number of ranks makes the same steps, shared out evenly")
def _(answer, draw):
    divides, remainder = draw.sample((2, 3, 4), 2), draw.choice(((3, 10), (4, 10), (5, 12)))
    more_than_samples = draw.choice(((5, 3), (6, 4)))
    pairs = [*((world_size, 12) for world_size in divides), remainder, more_than_samples]
    for world_size, batch in pairs:
        order = _order(draw, multiple_of=batch, rest=world_size - 1)
        _check_shares(answer, order, world_size, draw)


def _check_shares(answer, order: _Order, world_size: int, draw) -> None:
    alone = _whole_epoch(answer, order, draw)
    steps, _ = _steps(_samplers(answer, order, world_size), draw)
    got = _together(steps)
    share, remainder = divmod(order.global_batch, world_size)
    mistakes = {
        "own-order": [len(step) for step in got] == order.sizes() and _twice(_flat(got[:-1])),
        "global-batch-changes": len(got[0]) >= 2 * order.global_batch - 1,
        "remainder-lost": remainder and len(got[0]) == share * world_size,
        "padded": _twice(_flat(got)),
        "drops-last": len(got) == len(alone) - 1,
        "batches-differ": True,
    }
    expect(got, alone, each="step", what=f"with {world_size} ranks", likely=mistakes)
    for step in steps:
        lengths = [len(own) for own in step]
        if max(lengths) - min(lengths) > 1:
            raise Wrong("uneven", expected="lengths that differ by at most one", got=lengths)


@sampler.requires("seed and epoch decide the order, and nothing else")
def _(answer, draw):
    order = _order(draw)
    first = _whole_epoch(answer, order, draw)
    expect(_whole_epoch(answer, order, draw), first, what="the same epoch of the same seed")
    if _whole_epoch(answer, order, draw, epoch=1) == first:
        raise Wrong("same-order", expected="another order in epoch 1", got="that of epoch 0")
    other = _Order(order.samples, order.global_batch, order.seed + 1000)
    if _whole_epoch(answer, other, draw) == first:
        raise Wrong("seed-ignored", expected="another order for another seed", got="the same")


@sampler.requires("the global random states are left alone")
def _(answer, draw):
    [alone] = _samplers(answer, _order(draw), 1, epoch=2)
    before = _global_random_states()
    list(alone)
    if not same(_global_random_states(), before):
        raise Wrong("global-random", expected="the random states as before", got="others")


def _global_random_states() -> list:
    return [torch.get_rng_state(), list(random.getstate()[1]), np.random.get_state()[1].tolist()]


@sampler.requires("a resumed epoch goes on where it was, and the next one is whole")
def _(answer, draw):
    order, epoch, done = _order(draw), draw.integer(2, 5), draw.integer(2, 3)
    whole = _whole_epoch(answer, order, draw, epoch)
    _, [state] = _steps(_samplers(answer, order, 1, epoch), draw, done)
    other_rest = _flat(_whole_epoch(answer, order, draw)[done:])
    mistakes = {
        "from-zero": lambda got: got in (whole, _whole_epoch(answer, order, draw)),
        "one-behind": lambda got: got == whole[done - 1 :],
        "one-ahead": lambda got: got == whole[len(whole) - len(got) :],
        "reshuffles": lambda got: sorted(_flat(got)) == sorted(_flat(whole[done:])),
        "epoch-lost": lambda got: sorted(_flat(got)) == sorted(other_rest),
    }
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    got = _together(_steps(resumed, draw)[0])
    expect(got, whole[done:], each="step", what="after loading", likely=mistakes)
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    resumed[0].set_epoch(epoch)
    got = _together(_steps(resumed, draw)[0])
    likely = {"set-epoch-resets": True}
    what = f"after loading and set_epoch({epoch})"
    expect(got, whole[done:], each="step", what=what, likely=likely)
    resumed[0].set_epoch(epoch + 1)
    got = _together(_steps(resumed, draw)[0])
    likely = {"position-kept": lambda got: len(got) < len(whole)}
    following = _whole_epoch(answer, order, draw, epoch + 1)
    expect(got, following, each="step", what="the next epoch", likely=likely)
    resumed[0].set_epoch(epoch)
    got = _together(_steps(resumed, draw)[0])
    likely = {"never-goes-back": True}
    expect(got, whole, each="step", what=f"after set_epoch({epoch}), once more", likely=likely)
    _, [state] = _steps(_samplers(answer, order, 1, epoch), draw)
    resumed = _loaded_into(_samplers(answer, order, 1), state)
    got = _together(_steps(resumed, draw)[0])
    if got == whole:
        expected = "no step that was made before"
        raise Wrong("end-forgotten", expected=expected, got=f"all of epoch {epoch} once more")
    _check_states_stay(answer, order, draw)


def _check_states_stay(answer, order: _Order, draw) -> None:
    """Raises Wrong where a state changes as the sampler that gave it, or took it, goes on."""
    gave, took = _samplers(answer, order, 1), _samplers(answer, order, 1)
    _, [state] = _steps(gave, draw, 1)
    saved = _through_file(state)
    _steps(gave, draw, 1)
    took[0].load_state_dict(state)
    _steps(took, draw, 1)
    expect(state, saved, what="the state, two steps later", likely={"state-moves": True})


@sampler.requires("resumed on other numbers of ranks, every sample comes once", needs_earlier=True)
def _(answer, draw):
    for batch in (12, 7, 3):
        sizes = draw.sample((1, 2, 3, 4 if batch > 3 else 5), 4)
        order, epoch = _order(draw, multiple_of=batch, rest=2), draw.integer(1, 5)
        whole = _whole_epoch(answer, order, draw, epoch)
        samplers, states = _samplers(answer, order, sizes[0], epoch), []
        for done, next_size in enumerate([*sizes[1:], None]):
            # the last of them makes all steps that are left
            steps, next_states = _steps(samplers, draw, 1 if next_size else None)
            expected = whole[done : done + 1] if next_size else whole[done:]
            what = f"with {len(samplers)} ranks, resumed {done} times"
            _expect_steps_together(steps, expected, what)
            if any(not same(state, states[0]) for state in states):
                raise Wrong("states-differ", expected="the same state on each rank", got=states)
            states = next_states
            if next_size:
                samplers = _samplers(answer, order, next_size)
                samplers = _loaded_into(samplers, draw.choice(states))


def _expect_steps_together(steps: list, expected: list, what: str) -> None:
    """Compares what the ranks take together after a change of their number."""
    got = _together(steps)
    pairs = list(zip(got, expected, strict=False))
    mistakes = {
        # ranks that take the same, or parts that are nobody's
        "restores-rank": any(_twice(own) or set(own) < set(whole) for own, whole in pairs),
        "position-per-rank": True,
    }
    expect(got, expected, each="step", what=what, likely=mistakes)


# ---- 9.3 TrainingState ---------------------------------------------------------------------------


class _Cursor:
    """A sampler whose `load_state_dict` draws random numbers, as one that shuffles again would."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def next(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        torch.randperm(5)
        self.position = state["position"]


@dataclass(frozen=True)
class _Job:
    """All parts of a training, and the data that it looks at."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    sampler: _Cursor
    data: torch.Tensor

    def parts(self) -> tuple:
        return self.model, self.optimizer, self.scheduler, self.sampler

    def step(self) -> float:
        """One step with random numbers of all three generators; returns the loss."""
        x = self.data.roll(self.sampler.next(), 0)
        x = x + torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float() + random.gauss(0, 0.1)
        loss = self.model(x.to(next(self.model.parameters()).device)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


def _data(draw) -> torch.Tensor:
    return draw.tensor(draw.integer(6, 9), draw.integer(3, 6))


def _job(seed: int, data: torch.Tensor) -> _Job:
    """A model with buffers, dropout and a frozen parameter; an optimizer with two groups."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = nn.Sequential(
        nn.Linear(data.shape[1], 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.3),
        nn.Linear(6, 6),
        nn.Linear(6, 2),
    )
    model[3].weight.requires_grad_(False)
    groups = [{"params": list(model[:2].parameters()), "lr": 0.05}]
    groups += [{"params": [p for p in model[2:].parameters() if p.requires_grad]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    return _Job(model, optimizer, scheduler, _Cursor(), data)


def _random_numbers() -> dict[str, list[float]]:
    """The next numbers of each generator; an uneven count of normal ones, which come in pairs."""
    numbers = {
        "Python": [random.random() for _ in range(3)],
        "Python's normal": [random.gauss(0, 1)],
        "numpy": np.random.rand(3).tolist(),
        "numpy's normal": [float(np.random.normal())],
        "PyTorch": torch.rand(3).tolist(),
    }
    if torch.cuda.is_available():
        numbers["PyTorch on the GPU"] = torch.rand(3, device="cuda").tolist()
    return numbers


def _numbers_ahead() -> dict[str, list[float]]:
    """The next numbers of each generator, which are still the next ones afterwards."""
    python, numpys = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        numbers = _random_numbers()
    random.setstate(python)
    np.random.set_state(numpys)
    return numbers


def _copied(state: Any) -> Any:
    """A copy that shares no memory with what the training goes on to change."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@dataclass(frozen=True)
class _Resumed:
    """A run that was saved after some steps, what it was at that moment, and the one that has
    loaded it."""

    second: _Job
    states: list[dict]  # of model, optimizer, scheduler and sampler when they were saved
    numbers: dict  # that the first run would have drawn next, had nobody saved it
    numbers_saved: dict  # that it draws next
    numbers_early: dict  # that it would have drawn when the answer was made
    numbers_loaded: dict
    rng_evolved: list[float]  # PyTorch's, if loading had used some of them after they were restored


def _resumed(answer, draw) -> _Resumed:
    data, seeds = _data(draw), [draw.seed(), draw.seed()]
    early = _job(seeds[0], data)
    early.step()
    numbers_early = _random_numbers()
    first = _job(seeds[0], data)
    first.step()
    made = answer(*first.parts())  # as a script does, before the steps that it saves
    for _ in range(draw.integer(3, 4)):
        first.step()
    np.random.normal()  # one of a pair, so that numpy keeps the other
    if first.sampler.position % 2:
        random.gauss(0, 1)
    random.gauss(0, 1)
    numbers = _numbers_ahead()
    saved = _through_file(made.state_dict())
    states = [_copied(part.state_dict()) for part in first.parts()]
    rng = torch.get_rng_state()
    numbers_saved = _random_numbers()
    torch.set_rng_state(rng)
    torch.randperm(5)
    evolved = torch.rand(3).tolist()
    second = _job(seeds[1], data)
    for _ in range(2):
        second.step()
    answer(*second.parts()).load_state_dict(saved)
    loaded = _random_numbers()
    return _Resumed(second, states, numbers, numbers_saved, numbers_early, loaded, evolved)


training_state = Exercise(
    "9.3",
    "TrainingState",
    points=3,
    minutes=30,
    kind="core",
    parameters=("model", "optimizer", "scheduler", "sampler"),
    hints=[
        (
            "List everything that a training step reads and that an earlier step has changed. The "
            "weights are one entry of that list."
        ),
        (
            "Each of the four parts has `state_dict` and `load_state_dict`. For the random numbers "
            "there are `random.getstate`, `np.random.get_state` and `torch.get_rng_state`, each with "
            "its counterpart. Which of these give something that is no tensor, number or tuple?"
        ),
        (
            "Put the four states and the generators' into one dict, numpy's words as a list of "
            "integers and with all that stands behind them. Take the names from inside a DDP wrapper. "
            "Load the parts first and the random states last, because loading may draw numbers."
        ),
    ],
    misconceptions={
        "not-plain": "`torch.load(..., weights_only=True)` refuses what you saved: there is an object "
        "in it, an array for instance. Save its numbers as a list or a tensor.",
        "model-lost": "The weights are not those that were saved.",
        "buffers-lost": "The parameters come back, the buffers do not. BatchNorm's running mean is "
        "no parameter, but `model.state_dict()` has it.",
        "optimizer-lost": "The optimizer starts anew. Its momenta are as much a part of the next step "
        "as the weights.",
        "scheduler-lost": "The scheduler starts anew: the learning rate falls at the wrong steps.",
        "sampler-lost": "The sampler starts anew: samples come again.",
        "python-lost": "Python's random numbers are others than in the undisturbed run.",
        "numpy-lost": "numpy's random numbers are others than in the undisturbed run.",
        "torch-lost": "PyTorch's random numbers are others than in the undisturbed run: dropout "
        "leaves out other values.",
        "gpu-lost": "A GPU has a generator of its own, and its state does not come back: save "
        "`torch.cuda.get_rng_state()` where there is a GPU.",
        "half-a-pair": "Normally distributed numbers are made in pairs, and the second of a pair waits "
        "in the state. Save all that `get_state` returns.",
        "taken-early": "The random states are those of the moment when `TrainingState` was made. It is "
        "made once and saved often: ask the generators in `state_dict`.",
        "save-draws": "A save changes the random numbers of the run that goes on: it seeds a generator or "
        "draws from one. `state_dict` only reads their states.",
        "random-first": "PyTorch's random state is restored too early: what is loaded after it draws "
        "numbers. Restore the generators last.",
        "not-strict": "The state of another model is loaded without a word, and the weights stay as "
        "they were made. Do not use `strict=False`.",
        "module-prefix": "A state that was saved under DistributedDataParallel does not fit the plain "
        "model, or the other way round: the wrapper puts `module.` in front of every name.",
        "wrapped-only": "You take `.module` of every model, and a plain one has none.",
        "own-module": "A model may have a part of its own that is called `module`. What is to be taken off is "
        "DistributedDataParallel alone: ask `isinstance(model, DistributedDataParallel)`.",
    },
    failures={"no attribute 'module'": "wrapped-only"},
    at_home=True,
)


@training_state.requires("torch.load(..., weights_only=True) reads the state")
def _(answer, draw):
    job = _job(draw.seed(), _data(draw))
    job.step()
    state = answer(*job.parts()).state_dict()
    expect_type(state, dict)
    _through_file(state)


def _requires_part(index: int, text: str, slug: str) -> None:
    """Adds the requirement that a part comes back."""

    @training_state.requires(text, needs_earlier=True)
    def _(answer, draw):
        resumed = _resumed(answer, draw)
        got = _copied(resumed.second.parts()[index].state_dict())
        mistakes = {
            "buffers-lost": index == 0 and _parameters_fit(resumed),
            slug: True,
        }
        expect(got, resumed.states[index], likely=mistakes)


def _parameters_fit(resumed: _Resumed) -> bool:
    own = resumed.second.model.named_parameters()
    return all(same(parameter, resumed.states[0][name]) for name, parameter in own)


_requires_part(0, "the model comes back, with its buffers", "model-lost")
_requires_part(1, "the optimizer comes back", "optimizer-lost")
_requires_part(2, "the scheduler comes back", "scheduler-lost")
_requires_part(3, "the sampler comes back", "sampler-lost")


@training_state.requires("the next random numbers are those that would have come")
def _(answer, draw):
    resumed = _resumed(answer, draw)
    slugs = {
        "Python": "python-lost",
        "Python's normal": "half-a-pair",
        "numpy": "numpy-lost",
        "numpy's normal": "half-a-pair",
        "PyTorch": "torch-lost",
        "PyTorch on the GPU": "gpu-lost",
    }
    for name, numbers in resumed.numbers.items():
        what, likely = f"{name} numbers after a save", {"save-draws": True}
        expect(resumed.numbers_saved[name], numbers, what=what, likely=likely)
    for name, numbers in resumed.numbers.items():
        mistakes = {
            "taken-early": resumed.numbers_early[name],
            "random-first": resumed.rng_evolved if name == "PyTorch" else False,
            slugs[name]: True,
        }
        expect(resumed.numbers_loaded[name], numbers, what=f"{name} numbers", likely=mistakes)
    if not torch.cuda.is_available():
        _check_gpus_state(answer, draw)


class _PretendedGPU:
    """The state of a GPU's generator, on a machine that has no GPU, and what was put in its place."""

    def __init__(self, state: torch.Tensor) -> None:
        self.state = state
        self.restored: list[torch.Tensor] = []

    def get(self, device: Any = None) -> torch.Tensor:
        return self.state.clone()

    def set(self, state: torch.Tensor, device: Any = None) -> None:
        self.restored.append(state)

    @contextlib.contextmanager
    def visible(self) -> Iterator[None]:
        """Within the block torch.cuda has this GPU, as far as random states go."""
        functions = {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "get_rng_state": self.get,
            "get_rng_state_all": lambda: [self.get()],
            "set_rng_state": self.set,
            "set_rng_state_all": lambda states: [self.set(state) for state in states],
        }
        with contextlib.ExitStack() as stack:
            for name, function in functions.items():
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
            yield


def _check_gpus_state(answer, draw) -> None:
    """A GPU's generator is saved, and what was saved comes back to it."""
    job = _job(draw.seed(), _data(draw))
    gpu = _PretendedGPU(draw.integers(16, low=0, high=255).to(torch.uint8))
    made = answer(*job.parts())
    with gpu.visible():
        made.load_state_dict(_through_file(made.state_dict()))
    what = "the random states that go back to the GPU"
    expect(gpu.restored, [gpu.state], what=what, likely={"gpu-lost": True})


@training_state.requires("a resumed run is the run that nothing disturbed", needs_earlier=True)
def _(answer, draw):
    data, seed = _data(draw), draw.seed()
    undisturbed = _job(seed, data)
    losses = [undisturbed.step() for _ in range(9)]
    first = _job(seed, data)
    got = [first.step() for _ in range(4)]
    saved = _through_file(answer(*first.parts()).state_dict())
    second = _job(draw.seed(), data)
    answer(*second.parts()).load_state_dict(saved)
    got += [second.step() for _ in range(5)]
    expect(got, losses, each="step", what="the loss")
    expected = dict(undisturbed.model.state_dict())
    expect(dict(second.model.state_dict()), expected, what="the model at the end")


@training_state.requires("the state of another model is refused", needs_earlier=True)
def _(answer, draw):
    job = _job(draw.seed(), _data(draw))
    saved = _through_file(answer(*job.parts()).state_dict())
    other = nn.Sequential()
    for i, part in enumerate(job.model):
        other.add_module(f"layer{i}", part)
    try:
        answer(other, *job.parts()[1:]).load_state_dict(saved)
    except Exception:  # noqa: BLE001 - whatever the parts raise
        return
    raise Wrong("not-strict", expected="an exception: the names do not fit", got="none")


class _WithAModule(nn.Module):
    """A model of which a part has the name that DDP's wrapper has for the whole."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.module, self.head = part, nn.Linear(3, 2)


def _check_own_module(answer, draw) -> None:
    data = _data(draw)
    jobs = [_job(draw.seed(), data) for _ in range(2)]
    models = [_WithAModule(job.model) for job in jobs]
    states = [answer(m, *job.parts()[1:]) for m, job in zip(models, jobs, strict=True)]
    try:
        states[1].load_state_dict(_through_file(states[0].state_dict()))
    except RuntimeError as error:
        got = f"RuntimeError: {error}"
        raise Wrong("own-module", expected="a state that fits", got=got) from None
    got, expected = (dict(model.state_dict()) for model in reversed(models))
    expect(got, expected, likely={"own-module": True})


def _across_a_wrapper(rank, answer, seeds, data) -> list:
    """The model's names and values after a state went from DDP to a plain model and back, and what
    they should be."""
    reports = []
    for wrapped in (0, 1):
        jobs = [_job(seed, data) for seed in seeds]
        models = [job.model.to(device()) for job in jobs]
        models[wrapped] = DDP(models[wrapped])
        saved = answer(models[0], *jobs[0].parts()[1:]).state_dict()
        try:
            answer(models[1], *jobs[1].parts()[1:]).load_state_dict(_copied(saved))
        except RuntimeError as error:
            reports.append(_Raised(f"RuntimeError: {error}"))
        else:
            reports.append([dict(job.model.state_dict()) for job in jobs])
    return reports


@training_state.requires(
    "a state fits with and without DistributedDataParallel", needs_earlier=True
)
def _(answer, draw):
    seeds, data = [draw.seed(), draw.seed()], _data(draw)
    [reports] = run(_across_a_wrapper, 1, answer, seeds, data)
    for what, report in zip(("from DDP to plain", "from plain to DDP"), reports, strict=True):
        if isinstance(report, _Raised):
            raise Wrong("module-prefix", expected=f"a state that fits, {what}", got=report)
        saved, loaded = report
        expect(loaded, saved, what=what, likely={"module-prefix": True})
    _check_own_module(answer, draw)


# ---- 9.4 best_interval ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Cluster:
    """The arguments of `best_interval`, and what follows from them; times in seconds."""

    nodes: int
    node_mtbf_hours: float
    save: float
    recovery: float
    step: float

    def arguments(self) -> tuple:
        return self.nodes, self.node_mtbf_hours, self.save, self.recovery, self.step

    @property
    def mtbf(self) -> float:
        return 3600 * self.node_mtbf_hours / self.nodes

    def lost(self, steps: int) -> float:
        seconds = steps * self.step
        return self.save / seconds + (seconds / 2 + self.recovery) / self.mtbf

    @property
    def ideal(self) -> float:
        """The best interval in steps, before it is made whole."""
        return math.sqrt(2 * self.save * self.mtbf) / self.step

    @property
    def steps(self) -> int:
        return min(max(1, math.floor(self.ideal)), math.ceil(self.ideal), key=self.lost)


def _cluster(draw, nodes: int) -> _Cluster:
    """One that has a failure every few hours and saves every few hundred steps."""
    hours = nodes * draw.number(20, 30)
    save = draw.number(50, 60)
    return _Cluster(nodes, hours, save, save * draw.number(20, 30), draw.number(5, 6))


def _with_ideal(draw, steps: float) -> _Cluster:
    """One whose best interval, before it is made whole, is `steps`."""
    nodes, hours, save = draw.integer(5, 9), draw.number(300, 500), draw.number(20, 30)
    seconds = math.sqrt(2 * save * 3600 * hours / nodes)
    return _Cluster(nodes, hours, save, draw.number(50, 60), seconds / steps)


def _answered(answer, cluster: _Cluster) -> tuple:
    """The answer's pair; raises Wrong where it is none."""
    got = answer(*cluster.arguments())
    expect_type(got, (tuple, list))
    if len(got) != 2:
        raise Wrong(expected="a pair: steps and share", got=got)
    if isinstance(got[0], float) and isinstance(got[1], int):
        raise Wrong("swapped", expected="a pair: steps and share", got=got)
    return tuple(got)


def _close_to(value: float) -> Callable[[Any], bool]:
    return lambda got: abs(got - value) <= 1.01


def _expect_steps(got: Any, cluster: _Cluster) -> None:
    c = cluster
    mistakes = {
        "not-whole": lambda got: abs(got - c.steps) <= 1.01 and got != int(got),
        "rounded": _close_to(c.steps),
        "recovery-in-mtbf": _close_to(math.sqrt(2 * c.save * (c.mtbf + c.recovery)) / c.step),
        "save-subtracted": lambda got: any(
            abs(got - (math.sqrt(2 * c.save * mtbf) - c.save) / c.step) <= 1.01
            for mtbf in (c.mtbf, c.mtbf + c.recovery)
        ),
        "nodes-forgotten": _close_to(c.ideal * math.sqrt(c.nodes)),
        "nodes-multiply": _close_to(c.ideal * c.nodes),
        "hours": lambda got: (
            min(abs(got * 60 / c.ideal - 1), abs(got * 60**0.5 / c.ideal - 1)) < 0.1
        ),
        "no-half": _close_to(c.ideal / math.sqrt(2)),
        "recovery-in-interval": _close_to(math.sqrt(2 * (c.save + c.recovery) * c.mtbf) / c.step),
        "in-seconds": _close_to(c.ideal * c.step),
        "not-rooted": _close_to(c.ideal**2 * c.step),
    }
    expect(got, c.steps, what="steps", likely=mistakes)
    if isinstance(got, float):
        raise Wrong("not-whole", expected=f"the integer {c.steps}", got=got)


interval = Exercise(
    "9.4",
    "best_interval",
    points=2,
    minutes=15,
    kind="first",
    parameters=("nodes", "node_mtbf_hours", "save", "recovery", "step"),
    hints=[
        (
            "Write the lost share as a function of the number of steps first. Which of its terms "
            "grow with it, and which shrink?"
        ),
        (
            "With ten nodes, each of which lasts a thousand hours, something fails every hundred. "
            "At the minimum of a sum `a / T + b * T` both terms are equal."
        ),
        (
            "Find the mean time between failures of the job in seconds. The best interval is the root "
            "of twice this time the duration of a save; divide by a step's duration. Of the two whole "
            "numbers beside it, at least 1, take the one at which your function is smaller."
        ),
    ],
    misconceptions={
        "nodes-forgotten": "Your interval is that of one node. The job stops with the first node "
        "that fails, so its mean time between failures is a node's divided by the nodes.",
        "nodes-multiply": "With more nodes you save more rarely. More nodes fail more often.",
        "hours": "Units are mixed: a save and a step are given in seconds, a node's time between "
        "failures in hours of 3,600 of them.",
        "no-half": "Your interval is too short by the root of 2: a failure costs half an interval on "
        "average, not a whole one.",
        "recovery-in-interval": "The recovery has got into the interval. It costs the same however "
        "often you save; it belongs into the share only.",
        "recovery-in-mtbf": "You add the recovery to the time between failures. Daly (2006) does so; here L of "
        "section 3 is asked, in which the recovery is a term that the interval does not change.",
        "save-subtracted": "You subtract the save from the interval, as Daly (2006) does, who counts it as a part "
        "of the interval. L of section 3 does not: its minimum is at the root alone.",
        "in-seconds": "That is the interval in seconds. Asked are steps.",
        "not-rooted": "The root is missing.",
        "not-whole": "A checkpoint comes after a whole number of steps: return an integer.",
        "zero-steps": "Where a single step takes longer than the ideal interval, a checkpoint after "
        "each step is the best that can be had: 1, not 0.",
        "rounded": "Of the two whole numbers beside the ideal you take the one that loses more, because "
        "you round, or because you compare other shares than those of L.",
        "search-ends": "Your interval is far too short where the best one has very many steps: do you search "
        "among the first so many? The ideal interval has a formula.",
        "never-one": "One step between two checkpoints is allowed, and here the best.",
        "swapped": "First the steps, then the share.",
        "interval-in-steps": "The interval in L is a time. Your share takes the number of steps for it.",
        "share-of-one-node": "Your share counts the failures of one node, not those of the job.",
        "share-at-ideal": "The share is that of the interval before it was made whole. Return what the "
        "whole number of steps loses.",
        "recovery-per-save": "Your share counts a recovery with every save. One comes with every failure: divide "
        "it by the job's mean time between failures.",
        "of-all-time": "That is the lost time as a share of all time, work and losses. L is a share of the "
        "work's time.",
        "no-saving": "The share lacks what the saves cost.",
        "no-recovery": "The share lacks what the recoveries cost.",
        "whole-interval": "The share counts a whole interval per failure. On average it is half.",
        "kept-not-lost": "That is the share which is kept.",
        "percent": "The share is a number from 0 to 1, not percents.",
    },
)


@interval.requires("one node: the interval that loses least, in steps")
def _(answer, draw):
    cluster = _cluster(draw, 1)
    steps, _ = _answered(answer, cluster)
    _expect_steps(steps, cluster)


@interval.requires("many nodes fail more often than one")
def _(answer, draw):
    for nodes in (draw.integer(3, 9), draw.integer(100, 900)):
        cluster = _cluster(draw, nodes)
        steps, _ = _answered(answer, cluster)
        _expect_steps(steps, cluster)
    cluster = _with_ideal(draw, draw.number(150_000, 200_000))
    steps, _ = _answered(answer, cluster)
    expect(steps, cluster.steps, what="steps", likely={"search-ends": steps < 0.9 * cluster.steps})


@interval.requires("the share that this interval loses", needs_earlier=True)
def _(answer, draw):
    for nodes in (1, draw.integer(3, 9)):
        cluster = _cluster(draw, nodes)
        _, share = _answered(answer, cluster)
        seconds = cluster.steps * cluster.step
        expected = cluster.lost(cluster.steps)
        in_steps = replace(cluster, step=1).lost(cluster.steps)
        one_node = replace(cluster, nodes=1).lost(cluster.steps)
        mistakes = {
            "interval-in-steps": in_steps,
            "share-of-one-node": one_node if cluster.nodes > 1 else False,
            "recovery-per-save": expected
            + cluster.recovery / seconds
            - cluster.recovery / cluster.mtbf,
            "of-all-time": expected / (1 + expected),
            "no-saving": expected - cluster.save / seconds,
            "no-recovery": expected - cluster.recovery / cluster.mtbf,
            "whole-interval": expected + seconds / 2 / cluster.mtbf,
            "kept-not-lost": 1 - expected,
            "percent": 100 * expected,
        }
        expect(share, expected, what="the share", likely=mistakes)


@interval.requires("long steps: at least one of them", failures={"ZeroDivisionError": "zero-steps"})
def _(answer, draw):
    cluster = _with_ideal(draw, draw.number(0.2, 0.4))
    steps, _ = _answered(answer, cluster)
    likely = {"zero-steps": lambda got: got == 0, "never-one": lambda got: got > 1}
    expect(steps, 1, what="steps", likely=likely)


@interval.requires("of two whole numbers the better one", needs_earlier=True)
def _(answer, draw):
    # a little above the root of 1 * 2, where both lose the same, and below the middle
    beside_one = draw.number(1.1, 1.35), draw.number(1.43, 1.48)
    for ideal in (*beside_one, draw.number(4.1, 4.3), draw.number(4.6, 4.9)):
        cluster = _with_ideal(draw, ideal)
        steps, share = _answered(answer, cluster)
        likely = {"rounded": steps in (math.floor(ideal), math.ceil(ideal))}
        expect(steps, cluster.steps, what="steps", likely=likely)
        likely = {"share-at-ideal": cluster.lost(cluster.ideal)}
        expect(share, cluster.lost(steps), what="the share", likely=likely)


# ---- 9.5 elastic_limits --------------------------------------------------------------------------

limits = Exercise(
    "9.5",
    "elastic_limits",
    points=1,
    minutes=10,
    kind="first",
    parameters=("available", "fits", "useful", "losses", "joins", "new_code"),
    hints=[
        "When can the run not go on? When has one more node nothing to do?",
        (
            "Which events use up a restart? torchrun's agent counts failures of workers; when nodes "
            "wait to come in, it restarts them without counting."
        ),
        (
            "The minimum is what the model needs, the maximum the smaller of what you may get and "
            "what has work, the restarts the expected losses. For new code minimum and maximum are "
            "both what the model needs, and there is no restart."
        ),
    ],
    misconceptions={
        "minimum-too-low": "The run would start on fewer nodes than hold the model, and run out of "
        "memory.",
        "minimum-too-high": "The run stops as soon as a node is lost, though those that are left "
        "hold the model.",
        "maximum-without-work": "The run would take in nodes for which there is no work: the global "
        "batch has no sample for their ranks.",
        "maximum-not-there": "The maximum is above what the run may ever get.",
        "maximum-too-low": "The run leaves nodes unused that it may have, and that have work.",
        "joins-counted": "Joins are counted as restarts. torchrun restarts the workers for them "
        "without counting.",
        "joins-subtracted": "Nodes that join make up for no restart: each loss costs one, whoever comes "
        "later.",
        "no-restarts": "Without restarts the first loss ends the run.",
        "one-restart-more": "One restart too many: the first start is none, so that as many losses need as "
        "many restarts.",
        "restarts-fixed": "The number of restarts does not follow from the losses.",
        "new-code-restarts": "New code fails because of a bug. A restart repeats it, and hides where "
        "it came from.",
        "new-code-large": "New code runs on more nodes than hold the model: more logs to read, and "
        "no more to learn.",
    },
)


def _check_limits(answer, available: int, fits: int, useful: int, losses: int, joins: int) -> None:
    got = answer(available, fits, useful, losses, joins, False)
    expect_type(got, (tuple, list))
    maximum = min(available, useful)

    def differs(index: int, fits_mistake: Callable[[int], bool]) -> Callable[[Any], bool]:
        return lambda got: fits_mistake(got[index])

    mistakes = {
        "minimum-too-low": differs(0, lambda minimum: minimum < fits),
        "minimum-too-high": differs(0, lambda minimum: minimum > fits),
        "maximum-without-work": differs(1, lambda most: most > useful),
        "maximum-not-there": differs(1, lambda most: most > available),
        "maximum-too-low": differs(1, lambda most: most < maximum),
        "joins-counted": differs(2, lambda restarts: joins and restarts == losses + joins),
        "joins-subtracted": differs(2, lambda n: joins and 0 < n == losses - joins),
        "no-restarts": differs(2, lambda restarts: restarts == 0),
        "one-restart-more": differs(2, lambda restarts: restarts == losses + 1),
        "restarts-fixed": True,
    }
    expected = (fits, maximum, losses)
    expect(tuple(got), expected, what="minimum, maximum, restarts", likely=mistakes)


@limits.requires("sharded over everything that you have")
def _(answer, draw):
    nodes, losses = draw.integer(10, 20), draw.integer(5, 9)
    _check_limits(answer, nodes, nodes, 4 * nodes, losses, losses - 1)


@limits.requires("spare nodes beside those that have work")
def _(answer, draw):
    fits = draw.integer(2, 4)
    useful = fits + draw.integer(2, 4)
    for losses in (draw.integer(5, 9), 1, 0):
        joins = draw.integer(1, 3)
        _check_limits(answer, useful + draw.integer(1, 3), fits, useful, losses, joins)


@limits.requires("nodes that come and go")
def _(answer, draw):
    fits = draw.integer(2, 4)
    available = fits + draw.integer(20, 40)
    losses = draw.integer(100, 200)
    _check_limits(answer, available, fits, 2 * available, losses, losses - draw.integer(2, 9))


@limits.requires("new code")
def _(answer, draw):
    fits = draw.integer(2, 4)
    available, useful = fits + draw.integer(5, 9), fits + draw.integer(5, 9)
    got = answer(available, fits, useful, draw.integer(5, 9), draw.integer(5, 9), True)
    expect_type(got, (tuple, list))
    mistakes = {
        "minimum-too-low": lambda got: got[0] < fits,
        "new-code-large": lambda got: got[1] > fits,
        "new-code-restarts": lambda got: got[2] > 0,
    }
    expect(tuple(got), (fits, fits, 0), what="minimum, maximum, restarts", likely=mistakes)
