"""Each rank's record of its collective calls, for the kernel to compare.

Ranks must make the same calls in the same order. When they do not, gloo hangs, aborts the process
or, worst, adds up the wrong bytes (float32 against int32 runs through). PyTorch can check that
itself (TORCH_DISTRIBUTED_DEBUG=DETAIL), but by messages of its own before each call, for which each
rank waits: an asynchronous all-reduce no longer overlaps with anything (one whose partner came 0.2
s late held its caller for those 0.2 s), small calls take about three times as long, every timeline
of the course would show the check, and in torch 2.14.1 the construction of DistributedDataParallel
crashes under it. So a rank only notes what it is about to call; the kernel reads all notes when a
rank has failed, when nothing moves, and at the end. A note takes microseconds, sends nothing and
outlives the rank, because it is in a file.

The notes are taken where all calls pass (see `intercept`): also those that
DistributedDataParallel makes from C++.
"""

import contextlib
import functools
import inspect
import json
import math
import os
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from course_utils.comm.collectives import OPERATORS, POINT_TO_POINT, Operator
from course_utils.launch.story.frames import Frame, is_own

# A ring of notes, the newest 256 calls of a rank, 1024 bytes each; its groups, which count to the
# end, however many calls come after them; and what its host waits behind.
_SLOTS, _GROUPS, _SIZE = 256, 64, 1024
_PENDING = _SLOTS + _GROUPS
_SHOWN = 40  # calls that have begun or are queued, at most: so many fit

NEW_GROUP = "new_group"
DESTROY = "destroy_process_group"


@dataclass(frozen=True)
class NotedCall:
    """One call of one rank.

    number:     which call of this rank it is, from 0
    world:      the world in which it was made: "" for launch's own, else a name that its ranks share
    group:      the group's name in that world
    members:    the ranks of the group; those of another world only as far as they are known
    index:      counts the collectives of the group, or the messages between one pair of ranks
    kind:       its name in torch.distributed
    peer:       the root, the destination or the source
    tag:        of a message
    operation:  of a reduction: "SUM"
    tensors:    ("float32", (2, 3)) each, where they have to look the same on all ranks
    asked:      the ranks with which new_group was called
    splits:     the rows that all_to_all_single sends to each member, and those that it expects
    where:      the learner's line
    handling:   the exception that this rank was handling when it made the call
    limited:    it fails by itself before the launch's time is up, so that the rank goes on

    Ranks are those of the launch, also where a rank has formed another world.
    """

    number: int
    world: str
    group: str
    members: tuple[int, ...]
    index: int
    kind: str
    peer: int | None = None
    tag: int | None = None
    operation: str | None = None
    tensors: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    asked: tuple[int, ...] | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    where: Frame | None = None
    handling: "Handled | None" = None
    limited: bool = False

    def __str__(self) -> str:
        return self.in_words()

    def in_words(self, in_detail: bool = False) -> str:
        """Returns "all_reduce of float32 [3]"; in detail "all_reduce with SUM of float32 [3]"."""
        words = [self.kind]
        if in_detail and self.operation:
            words.append(f"with {self.operation}")
        if in_detail and self.splits:
            sent, expected = map(list, self.splits)
            words.append(f"sends {sent} rows to ranks {list(self.members)}, and expects {expected}")
        if self.tensors:
            shown = [f"{dtype} {list(shape)}" for dtype, shape in self.tensors[:3]]
            more = ["..."] if len(self.tensors) > 3 else []
            words.append("of " + ", ".join(shown + more))
        if self.asked is not None:
            words.append(f"of ranks {list(self.asked)}")
        if self.peer is not None:
            words.append(f"{'to' if self.kind in ('send', 'reduce') else 'from'} rank {self.peer}")
        return " ".join(words)


@dataclass(frozen=True)
class Handled:
    """An exception that a rank handles: `except`, `finally` or a `with` that ends."""

    type: str
    text: str
    where: Frame | None


class Recorder:
    """In a rank: notes each call in a file before it is made.

    called: gets the number of the call, its group's name and what it returned, if it is given.
    """

    def __init__(self, path: str, limit: float, called: Callable | None = None):
        self._limit = limit  # of the launch, in seconds
        self._called = called
        self._file = os.open(path, os.O_WRONLY)
        self._lock = threading.Lock()  # a learner's threads may call too
        self._number = 0
        self._groups = 0
        self._counts = Counter()
        self._world = None  # the default group of the newest note
        # A rank that destroys its groups is still connected: else the others would fail in words
        # that differ from run to run.
        self._kept = []
        self._world_name = ""

    def begin(self) -> None:
        """To be called when launch's own world is there."""
        self._world = dist.group.WORLD
        self._kept.append(self._world)
        # Every way to make a group passes here: new_group, new_subgroups, a device mesh.
        make, signature = c10d._new_group_with_tag, inspect.signature(c10d._new_group_with_tag)

        def make_on_record(*args, **kwargs):
            self._hear_group(signature.bind(*args, **kwargs).arguments)
            made = make(*args, **kwargs)
            self._kept.append(made)
            return made

        c10d._new_group_with_tag = make_on_record

        forget = c10d._unregister_all_process_groups

        def forget_on_record():  # what destroy_process_group does last
            with contextlib.suppress(Exception), self._lock:
                self._write(self._destroyed(), self._number % _SLOTS)
            forget()

        c10d._unregister_all_process_groups = forget_on_record

    def on_call(self, name: str, arguments: dict) -> Callable[[object], None] | None:
        """To be called before each call, as a listener of `intercept`."""
        if (operator := OPERATORS.get(name)) is None:
            return None
        # A call that PyTorch can make must not fail here.
        with contextlib.suppress(Exception), self._lock:
            note = self._note(operator, arguments)
            self._write(note, self._number % _SLOTS)
            if self._called:
                return functools.partial(self._called, note["number"], note["group"])
        return None

    def publish(self, pending: dict) -> None:
        """Notes what this rank's host waits behind, as `host_waits.follow` says it."""
        if pending:
            pending = pending | {name: pending[name][:_SHOWN] for name in ("begun", "queued")}
        os.pwrite(self._file, json.dumps(pending).encode().ljust(_SIZE), _PENDING * _SIZE)

    def _note(self, operator: Operator, given: dict) -> dict:
        kind, alike = operator.function, operator.alike
        group = dist.ProcessGroup.unbox(given["process_group"])
        members = dist.get_process_group_ranks(group)
        peer = next((given[name] for name in ("root_rank", "dst", "src") if name in given), None)
        note = {
            "group": group.group_name,
            "members": members,
            "kind": kind,
            "peer": None if peer is None else members[peer],
            "tag": given.get("tag"),
            "operation": _operation(given.get("reduce_op")),
            "tensors": None if alike is None else _looks(given[alike]),
            "splits": _splits(given, len(members)) if kind == "all_to_all_single" else None,
            "limited": _seconds(group, given) < self._limit,
        }
        meeting = (kind, note["peer"], note["tag"]) if kind in POINT_TO_POINT else ()
        return self._completed(note, meeting)

    def _hear_group(self, given):
        if given.get("use_local_synchronization"):
            return  # only the members make such a group
        with contextlib.suppress(Exception), self._lock:
            everyone = list(range(dist.get_world_size()))
            asked = given.get("ranks")
            note = {
                "group": NEW_GROUP,
                "members": everyone,
                "kind": NEW_GROUP,
                "asked": everyone if asked is None else sorted(asked),
            }
            self._write(self._completed(note, ()), _SLOTS + self._groups % _GROUPS)
            self._groups += 1

    def _destroyed(self):
        return {
            "number": self._number,
            "world": self._world_name,
            "me": None,
            "group": DESTROY,
            "members": [],
            "index": 0,
            "kind": DESTROY,
            "where": place(),
            "handling": _handled(sys.exception()),
        }

    def _completed(self, note, meeting):
        if dist.group.WORLD is not self._world:
            self._world, self._world_name = dist.group.WORLD, _agreed_name(self._number)
            self._kept.append(self._world)
        meeting = (self._world_name, note["group"], *note["members"], *meeting)
        self._counts[meeting] += 1
        return note | {
            "number": self._number,
            "world": self._world_name,
            "me": dist.get_rank(),
            "index": self._counts[meeting],
            "where": place(),
            "handling": _handled(sys.exception()),
        }

    def _write(self, note, slot):
        text = json.dumps(note).encode()
        if len(text) > _SIZE and note["handling"]:
            note["handling"] = None
            text = json.dumps(note).encode()
        os.pwrite(self._file, text[:_SIZE].ljust(_SIZE), slot * _SIZE)
        self._number += 1


def _agreed_name(number):
    """A name for the present world that no other world has, and that all its ranks find without
    waiting for each other: the first that comes writes it into the world's store."""
    mine = f"{os.getpid()}-{number}"
    return c10d._get_default_store().compare_set("course_utils/world", "", mine).decode()


def _seconds(group, given):
    """How long the call waits at most, as far as its backend tells.

    `monitored_barrier`, `work.wait(limit)` and calls of a group with a shorter timeout fail by
    themselves, and the program may go on.
    """
    milliseconds = given.get("timeout", -1)
    if milliseconds > 0:
        return milliseconds / 1000
    with contextlib.suppress(AttributeError, RuntimeError):
        backend = group._get_backend(group._device_types[0])
        return backend.options._timeout.total_seconds()
    return math.inf


def _operation(boxed):
    return None if boxed is None else dist.ReduceOp.RedOpType(boxed.op()).name


def _handled(error):
    """The exception that this rank is handling: its type, its text and the learner's line."""
    if error is None:
        return None
    own = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_own(frame.f_code.co_filename)
    ]
    text = "".join(traceback.format_exception_only(error)).strip()
    return [type(error).__name__, text[:200], own[-1] if own else None]


def _looks(tensors):
    """Data type and shape of each tensor, as lists; a long list is cut."""
    flat = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if flat and isinstance(flat[0], (list, tuple)):
        flat = [tensor for part in flat for tensor in part]
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in flat[:8]]


def _splits(given, ranks):
    """The rows that go to each rank, and those that are expected from each; None where PyTorch
    refuses them by itself, since they do not add up."""
    sides = []
    for side in "input", "output":
        rows, sizes = len(given[side]), list(given[f"{side}_split_sizes"])
        sides.append(sizes or [rows // ranks] * ranks)
        if sum(sides[-1]) != rows:
            return None
    return sides


def place() -> list | None:
    """The learner's line that makes a call just now: file, line, function."""
    frame = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]


def prepare(path: str) -> None:
    """In the kernel: makes an empty record, at its full size, so that a full disk shows now."""
    with open(path, "wb") as file:
        file.write(b" " * ((_SLOTS + _GROUPS + 1) * _SIZE))


def read(paths: list[str]) -> list[list[NotedCall]]:
    """In the kernel: the newest calls of each rank, oldest first, by rank."""
    records = [_notes(path) for path in paths]
    numbers = {  # a rank's number in a world, as the launch counts
        (note["world"], note["me"]): rank for rank, notes in enumerate(records) for note in notes
    }
    return [[_call(note, numbers) for note in notes] for notes in records]


def read_pending(path: str) -> dict:
    """In the kernel: what a rank's host waits behind, as it has published it; {} if it does not."""
    with open(path, "rb") as file:
        file.seek(_PENDING * _SIZE)
        with contextlib.suppress(ValueError):  # it has never waited, or is writing just now
            return json.loads(file.read())
    return {}


def _notes(path):
    notes = []
    with open(path, "rb") as file:
        for _ in range(_PENDING):
            slot = file.read(_SIZE)
            if slot[:1] == b" ":
                continue  # no call yet; of hundreds of slots a short program fills a few
            with contextlib.suppress(ValueError):  # one that was too long
                notes.append(json.loads(slot))
    return sorted(notes, key=lambda note: note["number"])


def _call(note, numbers):
    note = dict(note)
    world, _ = note["world"], note.pop("me")

    def rank(number):
        return number if world == "" else numbers.get((world, number))

    def ranks(members):
        return tuple(r for r in map(rank, members) if r is not None)

    tensors, where, handling = note.get("tensors"), note["where"], note["handling"]
    note["members"] = ranks(note["members"])
    if note.get("peer") is not None:
        note["peer"] = rank(note["peer"])
    if note.get("asked") is not None:
        note["asked"] = ranks(note["asked"])
    if tensors is not None:
        note["tensors"] = tuple((dtype, tuple(shape)) for dtype, shape in tensors)
    if splits := note.get("splits"):
        all_known = len(note["members"]) == len(splits[0])  # else nobody can tell whose is whose
        note["splits"] = tuple(map(tuple, splits)) if all_known else None
    if handling:
        kind, text, place = handling
        note["handling"] = Handled(kind, text, Frame(*place) if place else None)
    note["where"] = Frame(*where) if where else None
    return NotedCall(**note)
