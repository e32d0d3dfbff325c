"""The calls on record, as the kernel reads them.

A rank's record is a text that only grows (`recorder`). A line with a description in JSON is followed, for each call
that fits it, by a line with its number among the descriptions. A call is read once, however many there are.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from typing import NamedTuple

from course_utils.comm.collectives import POINT_TO_POINT
from course_utils.launch.story.frames import Frame

WORLD = "init_process_group"
NEW_GROUP = "new_group"
DESTROY = "destroy_process_group"
KEY = "wait for a key of the store"
_TRIED = 4096  # bytes that a new record gets and loses again, so that a full disk shows now


class Handled(NamedTuple):
    """An exception that a rank handles: `except`, `finally` or a `with` that ends; or that has ended one of its
    threads, whose name is `thread`."""

    type: str
    text: str
    where: Frame | None
    thread: str = ""


class NotedCall(NamedTuple):
    """One call of one rank. Ranks are numbered as in the world in which it was made."""

    number: int  # which call of this rank it is, from 0
    index: int  # from 0: of the group's collectives, or of the messages from one rank to another
    world: str  # "" for launch's own, else a name that its ranks share
    me: int  # the caller
    group: str  # its name in that world
    members: tuple[int, ...]  # the ranks of the group
    kind: str  # its name in torch.distributed
    peer: int | None = None  # the root, the destination or the source
    tag: int | None = None  # of a message
    operation: str | None = None  # of a reduction: "SUM"
    # ("float32", (2, 3)) each, where they have to look the same on all ranks.
    tensors: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    # What is sent to each member and what is expected from each, where that has to fit: rows, or numbers if there are
    # no rows.
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtype: str | None = None  # of what is sent
    asked: tuple[int, ...] | None = None  # the ranks with which new_group was called
    where: Frame | None = None  # the learner's line
    through: str = ""  # PyTorch's function that made it: "full_tensor", "backward", DDP's "forward"
    handling: Handled | None = None  # the exception that the rank was handling when it called
    limited: bool = False  # it fails by itself before the launch's time is up, and the rank goes on

    def __str__(self) -> str:
        return self.in_words()

    @property
    def is_message(self) -> bool:
        return self.kind in POINT_TO_POINT

    def in_words(self, in_detail: bool = False) -> str:
        """Returns "all_reduce of float32 [3]"; in detail "all_reduce with SUM of float32 [3]"."""
        words = [self.kind]
        if in_detail and self.operation:
            words.append(f"with {self.operation}")
        if in_detail and self.splits:
            sent, expected = map(list, self.splits)
            unit = "rows" if self.kind == "all_to_all_single" else "numbers"
            words.append(
                f"sends {sent} {unit} to ranks {list(self.members)}, and expects {expected}"
            )
        elif self.tensors:
            shown = [f"{dtype} {list(shape)}" for dtype, shape in self.tensors[:3]]
            more = ["..."] if len(self.tensors) > 3 else []
            words.append("of " + ", ".join(shown + more))
        if self.asked is not None:
            words.append(f"of ranks {list(self.asked)}")
        if self.peer is not None:
            words.append(f"{'to' if self.kind in _TO else 'from'} rank {self.peer}")
        return " ".join(words)


_TO = ("send", "reduce", "gather")


def path(folder: str, number: int) -> str:
    """The record of the rank with this number."""
    return os.path.join(folder, f"calls-{number}")


def prepare(path: str) -> None:
    """Makes an empty record."""
    with open(path, "wb") as file:
        file.write(b" " * _TRIED)
        file.flush()
        file.truncate(0)


def give_up(record: int | str) -> None:
    """Marks a record, by its path or descriptor, as one that is not complete: a full disk lets that pass."""
    os.chmod(record, 0o400)


def given_up(path: str) -> bool:
    """Whether that was done."""
    return not os.stat(path).st_mode & 0o200


class Record:
    """In the kernel: one rank's record, read on from where it was read to before."""

    def __init__(self, path: str):
        self._path = path
        self._read = 0
        self._descriptions: list[NotedCall] = []
        self._calls = 0
        # What the rank's host waits behind, as `host_waits.follow` publishes it; {} if it does not.
        self.pending: dict = {}
        self.caught: list[Handled] = []  # also what has ended a thread; once for each line
        self.gave_up = False  # a wait with a limit has failed: a call may rightly lack its partner
        self.complete = True  # False if the rank could not write all

    def new(self) -> Iterator[tuple[str, NotedCall | int]]:
        """Yields ("call", a call without its index), ("refused", the number of a call that raised) or ("over", the
        number of a wait that has ended)."""
        for line in self._lines():
            mark, rest = line[:1], line[1:]
            if mark == b"{":
                self._descriptions.append(_description(json.loads(line)))
            elif mark == b"!":
                yield "refused", int(rest)
            elif mark == b".":
                yield "over", int(rest)
            elif mark == b"?":
                self.gave_up = True
            elif mark == b"~":
                self.pending = json.loads(rest)
            elif mark == b"^":
                self.caught.append(_handled(json.loads(rest)))
            else:
                yield "call", self._descriptions[int(line)]._replace(number=self._calls)
                self._calls += 1

    def _lines(self):
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            if given_up(self._path):
                self.complete = False
                return []
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(newline)
            return whole.split(b"\n") if newline else []
        return []


def _description(note):
    note = {name: _tuples(value) for name, value in note.items()}
    where = Frame(*note["where"]) if note.get("where") else None
    about = {"where": where, "handling": _handled(note.get("handling"))}
    return NotedCall(number=-1, index=-1, **note | about)


def _tuples(value):
    """What was a tuple before JSON."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _handled(note):
    if not note:
        return None
    kind, text, place, *thread = note
    return Handled(kind, text, Frame(*place) if place else None, *thread)
