"""Each rank's record of its collective calls, for the kernel to compare.

Ranks must make the same calls in the same order. When they do not, gloo hangs, aborts the
process or, worst, adds up the wrong bytes. PyTorch can check that itself
(TORCH_DISTRIBUTED_DEBUG=DETAIL), but by messages of its own before each call, for which each rank
waits: an asynchronous all-reduce no longer overlaps with anything, small calls take several times
as long, every timeline of the course would show the check, and in torch 2.14.1 the construction
of DistributedDataParallel crashes under it. So a rank only notes what it is about to call; the
kernel reads all notes when a rank has failed, when nothing moves, and at the end. A note takes
microseconds, sends nothing and outlives the rank, because it is in a file.

The notes are taken where all calls pass (see `intercept`): also those that
DistributedDataParallel makes from C++.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from course_utils.launch.frames import Frame, is_own

# A ring of notes: the newest 256 calls of a rank, 1024 bytes each.
_SLOTS, _SIZE = 256, 1024

# The dispatcher's name of each call: its name in torch.distributed, and the argument whose
# tensors must look the same on every rank (None: they may differ).
_KINDS = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce_coalesced", "tensors"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "allgather_": ("all_gather", "input_tensors"),
    "_allgather_base_": ("all_gather_into_tensor", "input_tensor"),
    "allgather_coalesced_": ("all_gather_coalesced", "input_list"),
    "allgather_into_tensor_coalesced_": ("all_gather_into_tensor_coalesced", "inputs"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "reduce_scatter_": ("reduce_scatter", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", "outputs"),
    "alltoall_": ("all_to_all", None),
    "alltoall_base_": ("all_to_all_single", None),
    "barrier": ("barrier", None),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Call:
    """One call of one rank. `index` counts the collectives of its group, or the messages
    between one pair of ranks; `peer` is the root, the destination or the source, globally."""

    number: int
    group: str
    members: tuple[int, ...]
    index: int
    kind: str
    peer: int | None
    tag: int | None
    tensors: tuple[tuple[str, tuple[int, ...]], ...] | None  # ("float32", (2, 3)) each
    where: Frame | None

    def __str__(self) -> str:
        words = [self.kind]
        if self.tensors:
            shown = [f"{dtype} {list(shape)}" for dtype, shape in self.tensors[:3]]
            more = ["..."] if len(self.tensors) > 3 else []
            words.append("of " + ", ".join(shown + more))
        if self.peer is not None:
            words.append(f"{'to' if self.kind in ('send', 'reduce') else 'from'} rank {self.peer}")
        return " ".join(words)


class Recorder:
    """In a rank: notes each call in a file before it is made."""

    def __init__(self, path: str):
        self._file = os.open(path, os.O_WRONLY)
        self._number = 0
        self._counts = Counter()

    def hear(self, name: str, arguments: dict) -> None:
        """To be called before each call, as a listener of `intercept`."""
        if name not in _KINDS:
            return
        with contextlib.suppress(Exception):  # a call that PyTorch can make must not fail here
            self._write(self._note(*_KINDS[name], arguments))

    def _note(self, kind, tensors, given):
        group = dist.ProcessGroup.unbox(given["process_group"])
        members = dist.get_process_group_ranks(group)
        peer = next((given[name] for name in ("root_rank", "dst", "src") if name in given), None)
        peer = None if peer is None else members[peer]
        meeting = (group.group_name,)
        if kind in POINT_TO_POINT:
            meeting = (group.group_name, kind, peer, given.get("tag"))
        self._counts[meeting] += 1
        return [
            self._number,
            group.group_name,
            members,
            self._counts[meeting],
            kind,
            peer,
            given.get("tag"),
            None if tensors is None else _looks(given[tensors]),
            _place(),
        ]

    def _write(self, note):
        text = json.dumps(note).encode()[:_SIZE].ljust(_SIZE)
        os.pwrite(self._file, text, self._number % _SLOTS * _SIZE)
        self._number += 1


def _looks(tensors):
    """Data type and shape of each tensor, as lists; a long list is cut."""
    flat = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    if flat and isinstance(flat[0], (list, tuple)):
        flat = [tensor for part in flat for tensor in part]
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in flat[:8]]


def _place():
    """The learner's line that made this call: file, line, function."""
    frame = sys._getframe(1)
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    return frame and [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]


def prepare(path: str) -> None:
    """In the kernel: makes an empty record, at its full size, so that a full disk shows now."""
    with open(path, "wb") as file:
        file.write(b" " * (_SLOTS * _SIZE))


def read(path: str) -> list[Call]:
    """In the kernel: the newest calls of a rank, oldest first."""
    calls = []
    with open(path, "rb") as file:
        while note := file.read(_SIZE):
            if note.isspace():
                break
            try:
                calls.append(_call(*json.loads(note)))
            except ValueError:
                pass  # a note that was too long
    return sorted(calls, key=lambda call: call.number)


def _call(number, group, members, index, kind, peer, tag, tensors, where):
    looks = None if tensors is None else tuple((dtype, tuple(shape)) for dtype, shape in tensors)
    frame = Frame(*where) if where else None
    return Call(number, group, tuple(members), index, kind, peer, tag, looks, frame)
