"""Exercise 9.1, `Checkpoints`: what it asks for, and how it is checked."""

import contextlib
import itertools
import os
import signal
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import (
    described,
    following,
    kill_in_a_write,
    must_have_waited,
)
from course_exercises.chapters.ch09.shared import Raised
from course_utils.comm import intercept
from course_utils.launch import RankFailure

_AT_RENAME = 1e9  # a file's time of change, in seconds, by which it is seen that nobody wrote later

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
        "nothing-there": "At first there is no checkpoint, and perhaps no folder, nor the one above it. Make the "
        "folder with `parents=True` and `exist_ok=True`, and let `load` return None.",
        "not-latest": "`load` returns the highest step for which `save` was called, step 0 too, and the state of this "
        "step. Look for the names that `save` gives, and compare the steps as numbers: as text step-9 comes after "
        "step-10, and the files of a folder that was copied have any times.",
        "rank-0s-part": "Rank 0 alone writes, since all ranks see the same folder. But all of them load, since all of "
        "them go on from the checkpoint.",
        "returns-early": "The other ranks return before the file is there. After the rename rank 0 has to make a "
        "collective call from which nobody returns before it: a barrier, or a broadcast from rank 0. In a `reduce` "
        "or `gather` to rank 0 the others wait for nobody.",
        "other-files": "After a save the folder holds the checkpoint of this step and the `keep` - 1 before it, one "
        "file each, and nothing else. A checksum stands in the file itself. An earlier run may have left files, or a "
        "killed save, or a run that went further, whose later steps do not count as those to keep: look into the folder "
        "each time, and compare the steps as numbers.",
        "no-fallback": "A file is damaged. Pass it over and leave it where it is, and go back until one is whole or "
        "none is left. Read the files each time: what this object remembers, the next process does not know.",
        "bit-unnoticed": "One bit has changed, and you load what was never saved: `torch.load` does not notice. "
        "Compare a checksum of your own, and take it over all that you read: the step and the numbers beside the "
        "tensors can change as well.",
        "torn": "A save that is killed can destroy what was there, or leave a part of a file where `load` finds it. "
        "Write all of it under another name, one that `load` does not look for, in the same folder; then let "
        "`os.replace` give it its name, and write to it no more. Writing in place, a copy, and a move from another "
        "disk are done piece by piece.",
        "removed-first": "A save that ends half-way leaves no checkpoint: what was there was removed before the new "
        "file had its name. Remove what is too much afterwards. `os.replace` takes the place of an old file at once.",
        "no-fsync": "When the file gets its name, its bytes may not be on the disk yet: after a power failure it may "
        "be empty. `flush()` hands them to the system and `os.fsync` to the disk, in this order; then comes the "
        "rename.",
    },
    at_home=True,
)


# ---- what is saved, and what is loaded ------------------------------------------------------------


def _state(draw, size: int = 1500) -> dict:
    return {
        "weights": draw.tensor(draw.integer(4 * size // 5, 6 * size // 5)),
        "rate": draw.number(0, 1),
        "counts": [draw.integer(1, 99), draw.integer(1, 99)],
        "inner": {"name": "momentum", "none": None, "values": draw.tensor(3)},
        "step": draw.integer(10**7, 10**8),  # somebody else's, the scheduler's perhaps
    }


def _states(draw, *steps: int) -> dict[int, dict]:
    return {step: _state(draw) for step in steps}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def _save(checkpoints, folder: Path, step: int, state: dict) -> list[Path]:
    """Saves, and returns the files that this has made."""
    before = {(path, path.stat().st_ino) for path in _files(folder)}
    checkpoints.save(step, state)
    return [path for path in _files(folder) if (path, path.stat().st_ino) not in before]


def _load(checkpoints) -> Any:
    """What `load` returns, or how it fails."""
    try:
        return checkpoints.load()
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - that it fails, is what is reported
        return Raised(f"{type(error).__name__}: {error}")


# ---- what becomes of a folder ---------------------------------------------------------------------


def _cut(content: bytes, weights: bytes) -> bytes:
    return content[: len(content) // 2]


def _emptied(content: bytes, weights: bytes) -> bytes:
    return b""


def _one_bit(content: bytes, weights: bytes) -> bytes:
    """A bit of a weight flipped; somewhere in the middle where the weights stand in another form."""
    start = content.find(weights)
    place = len(content) // 2 if start < 0 else start + len(weights) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def _damage(count: int, how: Callable[[bytes, bytes], bytes], saved: list) -> None:
    """Damages the files of the latest saves; `how` gets a file's bytes and those of its weights."""
    for state, files in saved[-count:]:
        for path in filter(Path.exists, files):
            path.write_bytes(how(path.read_bytes(), state["weights"].numpy().tobytes()))


def _age(seconds: tuple[int, ...], saved: list) -> None:
    """Gives the files of each save another time of change: a folder that was copied has any times."""
    for age, (_, files) in zip(seconds, saved, strict=True):
        for path in filter(Path.exists, files):
            os.utime(path, (1e9 - age, 1e9 - age))


@dataclass(frozen=True)
class _Found:
    """What there is after all that became of a folder."""

    files: int
    loaded: Any  # by a new object
    by_the_saver: Any
    left: bool  # whether all files are there after that


def _lived(rank, answer, folder, *history) -> _Found:
    """What there is after a history: `(keep, states)` are saves by one object, anything else a function
    of what was saved so far, a list of states and their files."""
    checkpoints, keep, saved = None, 2, []
    for event in history:
        if callable(event):
            event(saved)
            continue
        keep, states = event
        checkpoints = answer(folder, keep)
        for step, state in states.items():
            saved.append((state, _save(checkpoints, folder, step, state)))
    before = _files(folder)
    loaded, by_the_saver = _load(answer(folder, keep)), checkpoints and _load(checkpoints)
    return _Found(len(before), loaded, by_the_saver, before == _files(folder))


def _each_lived(rank, answer, parent, histories) -> list[_Found]:
    """The same of each history, in a folder of its own that is not there yet."""
    return [
        _lived(rank, answer, Path(parent, f"run-{i}", "checkpoints"), *history)
        for i, history in enumerate(histories)
    ]


def _found(answer, *histories: tuple) -> list[_Found]:
    with tempfile.TemporaryDirectory() as parent:
        [found] = run(_each_lived, 1, answer, parent, histories)
    return found


@checkpoints.requires(
    "what was saved comes back, and the highest step is the latest",
    failures=dict.fromkeys(
        ("FileNotFoundError", "Parent directory", "FileExistsError"), "nothing-there"
    ),
)
def what_was_saved_comes_back(answer, draw):
    step = draw.integer(20, 80)
    saves = [
        (_states(draw, draw.choice((9, 99)), 100), (1, 0)),
        (_states(draw, 999_999, 1_000_000), (1, 0)),
        (_states(draw, step, step + 1), (0, 1)),
        (_states(draw, 0), (0,)),
    ]
    histories = [((len(states), states), partial(_age, ages)) for states, ages in saves]
    first, *found = _found(answer, (), *histories)
    if first.loaded is not None:
        got = first.loaded
        raise Wrong("nothing-there", expected="None where no checkpoint is", got=got)
    for (states, _), each in zip(saves, found, strict=True):
        last = max(states)
        others = [*states.values(), *states.items(), (states[last]["step"], states[last]), None]
        likely = {"not-latest": lambda got, others=others: any(same(got, one) for one in others)}
        what = f"load() after steps {', '.join(map(str, states))}"
        expect(each.by_the_saver, (last, states[last]), what=what, likely=likely)


# ---- ranks, and the order of calls ----------------------------------------------------------------


@dataclass(frozen=True)
class _Event:
    """A recorded call: "fsync" or "rename" of a file with so many bytes, or a "collective"; "to one
    rank" is one in which the others do not wait for rank 0."""

    kind: str
    file: int = 0
    size: int = 0
    folder: str = ""  # in which it stands


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


@checkpoints.requires(
    "rank 0 alone writes one file, and the others wait for it",
    failures={"timeout": "not-every-rank"},
)
def rank_0_alone_writes_one_file(answer, draw):
    ranks = draw.choice((2, 3))
    # each rank has a folder of its own here, so that who writes cannot get into another's way
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent, f"of-rank-{rank}") for rank in range(ranks)]
        saved = run(_saved_once, ranks, answer, folders, _state(draw))
    for rank, other in enumerate(saved[1:], start=1):
        if other.files:
            raise Wrong("rank-0s-part", expected=f"no file written by rank {rank}", got="one")
    written = len(saved[0].files)
    likely = {"other-files": written > 1}
    expect(written, 1, what="files written by rank 0", likely=likely)
    kinds = [event.kind for event in saved[0].events]
    renamed = max((i for i, kind in enumerate(kinds) if kind == "rename"), default=-1)
    after = kinds[renamed + 1 :]
    if "collective" not in after:
        got = "one to one rank" if "to one rank" in after else "none after the rename"
        raise Wrong("returns-early", expected="a collective call that waits for rank 0", got=got)
    must_have_waited([each.unwaited for each in saved])


def _shared(rank, answer, folder, states) -> Any:
    """What each rank loads after all have saved."""
    checkpoints = answer(folder, 2)
    for step, state in states.items():
        checkpoints.save(step, state)
    return _load(checkpoints)


@checkpoints.requires(
    "every rank loads the same one", failures={"timeout": "not-every-rank"}, needs_earlier=True
)
def every_rank_loads_the_same(answer, draw):
    ranks, step = draw.choice((2, 3)), draw.integer(3, 8)
    states = _states(draw, step, step + 1)
    with tempfile.TemporaryDirectory() as folder:
        first = [found.loaded for found in run(_lived, ranks, answer, Path(folder))]
        latest = run(_shared, ranks, answer, Path(folder), states)
    expect(first, [None] * ranks, each="rank", what="load() without a checkpoint")
    expected, likely = [(step + 1, states[step + 1])] * ranks, {"rank-0s-part": None in latest}
    expect(latest, expected, each="rank", what="load()", likely=likely)


@checkpoints.requires(
    "after a save, the newest up to this step remain, and nothing else", needs_earlier=True
)
def after_a_save(answer, draw):
    millionth, back = _states(draw, 999_998, 999_999, 1_000_000), _states(draw, 10, 20, 15)
    again, after_damage = [_states(draw, 7) for _ in range(3)], _states(draw, 15)
    plain = {keep: _states(draw, *range(1, keep + 3)) for keep in (draw.choice((2, 3)), 1)}
    restarted = (2, _states(draw, 1, 2)), (2, _states(draw, 3, 4))
    damaged = (2, _states(draw, 10, 20)), partial(_damage, 1, _cut), (1, after_damage)
    cases = [  # what has happened, how many files remain, and what is loaded
        *(
            (f"{keep + 2} saves with keep={keep}", ((keep, states),), keep, None)
            for keep, states in plain.items()
        ),
        ("steps 999,998 to 1,000,000 with keep=2", ((2, millionth),), 2, None),
        (
            "step 7, saved three times",
            [(3, states) for states in again],
            1,
            (7, again[-1][7]),
        ),
        ("a restart with keep=2", restarted, 2, None),
        ("steps 10, 20 and 15 with keep=2", ((2, back),), 2, (15, back[15])),
        ("step 20 damaged, then 15 with keep=1", damaged, 1, (15, after_damage[15])),
    ]
    found = _found(answer, *(history for _, history, *_ in cases))
    for (what, _, files, loaded), each in zip(cases, found, strict=True):
        likely = {"other-files": True}
        expect(each.files, files, what=f"files after {what}", likely=likely)
        if loaded:
            expect(each.by_the_saver, loaded, what=f"load() after {what}", likely=likely)


def _after_a_bit(rank, answer, folder, state) -> Any:
    """What is loaded first that was never saved, of step 5 and 6, as one bit of the latter changes: in
    each byte of the state's rate, wherever the files of the two differ, at the start and at the end."""
    whole, files = [(5, state), (6, state)], []
    for step, _ in whole:
        files += _save(answer(folder, 2), folder, step, state)
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


@checkpoints.requires("a damaged one is passed over", needs_earlier=True)
def a_damaged_one_is_passed_over(answer, draw):
    damages = {
        "the latest is cut short": (1, _cut),
        "the latest is emptied": (1, _emptied),
        "a bit of the latest changed": (1, _one_bit),
        "the latest two of three are cut short": (2, _cut),
        "a bit of all three changed": (3, _one_bit),
    }
    saves = [_states(draw, 5, 6, 7) for _ in damages]
    events = [partial(_damage, *damage) for damage in damages.values()]
    histories = [((3, states), damaged) for states, damaged in zip(saves, events, strict=True)]
    found, passed_over = _found(answer, *histories), {"no-fallback": True}
    for (what, (count, how)), states, each in zip(damages.items(), saves, found, strict=True):
        step, what = 7 - count, f"load() when {what}"
        expected = (step, states[step]) if step in states else None
        likely = {"bit-unnoticed": how is _one_bit and _is_loaded(each.loaded), **passed_over}
        expect(each.loaded, expected, what=what, likely=likely)
        what = f"{what}, by the one that has saved them"
        expect(each.by_the_saver, expected, what=what, likely=passed_over)
        expect(each.left, True, what="all files there after load()", likely=passed_over)
    small = _state(draw, size=3)  # so that there are few bytes
    with tempfile.TemporaryDirectory() as folder:
        [got] = run(_after_a_bit, 1, answer, Path(folder), small)
    what, likely = "load() after one bit of step 6 changed", {"bit-unnoticed": _is_loaded(got)}
    expect(got, (5, small), what=what, likely=likely | passed_over)


def _is_loaded(got: Any) -> bool:
    return got is not None and not isinstance(got, Raised)


# ---- saves that end half-way ----------------------------------------------------------------------


def _killed(rank, answer, folder, keep, states, step, state) -> int:
    """Saves `states` and then `state`, in a process that the system kills when a file has half as many
    bytes as the latest: it returns them if that kills nothing."""
    checkpoints = answer(folder, keep)
    for earlier, content in states.items():
        files = _save(checkpoints, folder, earlier, content)
    half = max((path.stat().st_size for path in files), default=0) // 2
    kill_in_a_write(half)
    checkpoints.save(step, state)
    return half


def _found_after_a_kill(answer, folder, draw, keep, states, step, *history) -> _Found:
    """What there is in the folder after a save of `step` was killed, and after a history behind that."""
    try:
        [half] = run(_killed, 1, answer, folder, keep, states, step, _state(draw))
    except RankFailure as failure:
        if failure.kind != "signal":
            raise
    else:
        expected = "all bytes written, or an exception: `os.write` says how many it took"
        raise Wrong(expected=expected, got=f"a save that has ended after {half} bytes or fewer")
    return run(_lived, 1, answer, folder, *history)[0]


@checkpoints.requires(
    "a save that is killed destroys nothing, also of the same step", needs_earlier=True
)
def a_save_that_is_killed_destroys_nothing(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):  # Windows cannot kill at a byte
        return
    for keep, step in ((1, 6), (2, 5)):  # with one to keep, what was removed first is gone
        states = _states(draw, 4, 5)
        with tempfile.TemporaryDirectory() as folder:
            found = _found_after_a_kill(answer, Path(folder), draw, keep, states, step)
        what = f"load() after a save of step {step} was killed"
        likely = {"removed-first": found.loaded is None, "torn": True}
        expect(found.loaded, (5, states[5]), what=what, likely=likely)


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


def _each_dies(rank, answer, parent, cases) -> list:
    """What is loaded after a save has died at a call, for each case in a folder of its own."""
    loaded = []
    for i, (call, earlier, step, state) in enumerate(cases):
        folder = Path(parent, f"run-{i}")
        for before, content in earlier.items():
            answer(folder, 1).save(before, content)
        with contextlib.suppress(_Dead), _dies_at(call):
            answer(folder, 1).save(step, state)
        loaded.append(_load(answer(folder, 1)))
    return loaded


@checkpoints.requires("a save may end between any two of its calls", needs_earlier=True)
def a_save_may_end_between_any_two(answer, draw):
    calls, new = range(5), _state(draw)  # as many as write, sync, rename, remove
    cases = [
        (call, before, 5, new)
        for before in (_states(draw, *steps) for steps in ((4,), (5,), (6,), ()))
        for call in calls
    ]
    with tempfile.TemporaryDirectory() as parent:
        [loaded] = run(_each_dies, 1, answer, parent, cases)
    for (call, before, *_), got in zip(cases, loaded, strict=True):
        old = next(iter(before.items()), None)
        if not same(got, old) and not same(got, (5, new)):
            likely = {"torn": not before or isinstance(got, Raised), "removed-first": True}
            what = f"load() after a save that died before call {call}"
            expect(got, old, what=what, likely=likely)


@checkpoints.requires("the next save removes what a killed one has left", needs_earlier=True)
def the_next_save_removes_what_a_killed(answer, draw):
    if not hasattr(signal, "SIGXFSZ"):
        return
    before, history = _states(draw, 1, 2), [(2, _states(draw, 4)), partial(_damage, 1, _cut)]
    with tempfile.TemporaryDirectory() as folder:
        found = _found_after_a_kill(answer, Path(folder), draw, 2, before, 3, *history)
    likely = {"other-files": True}
    expect(found.files, 2, what="files after the kill and the next save", likely=likely)
    # what the killed save has left does not count as one of those to keep
    what = "load() after that, with the file of the next save damaged"
    expect(found.loaded, (2, before[2]), what=what, likely=likely)


@checkpoints.requires("the bytes are on the disk before the file gets its name", needs_earlier=True)
def the_bytes_are_on_the_disk_before(answer, draw):
    # so few bytes that Python's buffer holds them all until somebody flushes it
    state = _state(draw, size=70)
    with tempfile.TemporaryDirectory() as place:
        [saved] = run(_saved_once, 1, answer, [Path(place)], state)
    for inode, size, changed in saved.files:
        own = [event for event in saved.events if event.file == inode]
        named = next((i for i, event in enumerate(own) if event.kind == "rename"), None)
        got = None
        if named is None:
            got = "a file that had its name while its bytes were written"
        elif changed != _AT_RENAME:
            got = "a file that was written to after it had its name"
        elif not Path(own[named].folder).is_relative_to(Path(place).resolve()):
            got = "a file that comes from another folder, and perhaps from another disk"
        if got:
            raise Wrong("torn", expected="a whole file renamed within the folder", got=got)
        synced = [event.size for event in own[:named] if event.kind == "fsync"]
        if size not in synced:
            got = f"os.fsync with {synced[-1]} bytes" if synced else "no os.fsync of it"
            expected = f"os.fsync with all {size} bytes, then the rename"
            raise Wrong("no-fsync", expected=expected, got=got)


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


@checkpoints.requires("load makes tensors, numbers and the like, and nothing else")
def load_makes_tensors(answer, draw):
    with tempfile.TemporaryDirectory() as folder:
        [brings] = run(_brings_an_object, 1, answer, Path(folder))
    if brings:
        expected = "a file refused that asks for an object, as `weights_only=True` does"
        raise Wrong(expected=expected, got="the object, whose making can run any code")
