"""What PyTorch's flight recorder has written on a cluster, a file a rank, told as launch tells it.

Each entry becomes a call on record (its fields: torch.distributed.flight_recorder, FlightRecorder.hpp).
"""

import io
import json
import math
import pickle
import re
from pathlib import Path
from typing import NamedTuple

import torch

from course_utils.launch.story import diagnosis, frames
from course_utils.launch.story.calls import NotedCall, Record
from course_utils.launch.story.frames import Frame
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.states import State, grouped, names

_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_reduce_barrier": "barrier",
}
_LIBRARY = re.compile(r"/lib/python3[^/]*/|\.(cpp|h|cu)$")  # wherever it lies on the cluster
_NO_LINES = (
    "The dumps have no lines of the program: JSON never has, a pickle unless told otherwise."
)
_SILENT = "A dump has no root, reduce operation or tag, and nothing after a rank's last call."


class _Plain(pickle.Unpickler):
    """For what somebody else has written: to load more than plain data could run a program."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a dump is plain data")


class _Entry(NamedTuple):
    call: NotedCall
    order: int  # among the collectives of its group
    done: bool


class _Dump(Record):
    """Of one rank, in the place of its record."""

    def __init__(self, entries: list[_Entry]):
        super().__init__("")
        self._entries = entries

    def new(self):
        yield from (("call", entry.call) for entry in self._entries)


def explained(paths: list[Path]) -> str:
    """Returns why the ranks stood still, as far as these files tell. Raises OSError, and ValueError for a
    file that is no dump, or whose name does not end with the rank's number."""
    dumps = {}
    for path in paths:
        rank, dump = _read(path)
        if rank in dumps:
            raise ValueError(f"{path} is the second file of rank {rank}: give one file a rank.")
        dumps[rank] = dump
    raw = [entry for entries, _ in dumps.values() for entry in entries]
    members = [rank for _, groups in dumps.values() for ranks in groups.values() for rank in ranks]
    world = range(1 + max([*dumps, *members]))
    late = {rank for rank, (entries, _) in dumps.items() if entries and entries[0]["record_id"]}
    entries = {rank: _entries(rank, *dump, world) for rank, dump in dumps.items()}
    entries = _comparable(entries, late)
    meetings = Meetings([""] * len(world))
    meetings.records = [_Dump(entries.get(rank, [])) for rank in world]
    meetings.update()
    states = _states(world, entries, meetings)
    told = [str(diagnosis.of_dumps(meetings, states) or _nothing(states))]
    if late:
        told.append(f"The first calls of {names(sorted(late))} had no room (TORCH_FR_BUFFER_SIZE).")
    return "\n".join([*told, *([] if any(e.get("frames") for e in raw) else [_NO_LINES]), _SILENT])


def _read(path):
    """The rank; its entries, and the members of its groups."""
    if not (number := re.search(r"(\d+)(\.\w+)?$", path.name)):
        raise ValueError(
            f"the name of a dump ends with its rank (nccl_trace_rank_3), not so {path}."
        )
    data = path.read_bytes()
    try:
        dump = json.loads(data) if data.startswith(b"{") else _Plain(io.BytesIO(data)).load()
        groups = {name: json.loads(each["ranks"]) for name, each in dump["pg_config"].items()}
        if not all("is_p2p" in each for each in dump["entries"]):
            raise ValueError("its entries are of an older PyTorch")
        return int(number[1]), (dump["entries"], groups)
    except Exception as error:  # noqa: BLE001 - what is no pickle raises anything
        raise ValueError(f"{path} is no dump of PyTorch's flight recorder: {error}.") from None


def _entries(rank, raw, groups, world):
    done, found = set(map(_place, filter(_is_done, raw))), []
    for number, each in enumerate(raw):
        name, description = each["process_group"]
        members = tuple(groups.get(name, world if description == "default_pg" else ()))
        kind, _, ends = each["profiling_name"].partition(":")[2].partition(" ")
        if kind == "coalesced" or not members:  # gloo only tells the members of the first group
            continue
        peer = members[int(re.split("->|<-", ends)[1])] if ends else None
        where, through = _way(each.get("frames", ()))
        about = {"tensors": _tensors(kind, each), "where": where, "through": through}
        kind = _NAMES.get(kind, kind)
        call = NotedCall(number, -1, "", rank, name, members, kind, peer, **about)
        found.append(_Entry(call, each["collective_seq_id"], _place(each) in done))
    return found


def _place(entry):
    """The same for the calls of a batch and for the entry behind them, which has its state."""
    which = "p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"
    return entry["process_group"][0], which, entry[which]


def _is_done(entry):
    by_gloo = entry["profiling_name"].startswith("gloo:")  # it has no state but "scheduled"
    return entry["state"] == "completed" or (by_gloo and entry["retired"])


def _tensors(kind, entry):
    """Type and number of elements of each, where they have to be the same on all ranks."""
    if "all_to_all" in kind or "barrier" in kind or "_v" in kind:
        return None
    side = "output" if "scatter" in kind or kind == "recv" else "input"
    types = [str(getattr(torch, t.lower(), t)) for t in entry[f"{side}_dtypes"]]
    sizes = [(math.prod(size),) for size in entry[f"{side}_sizes"]]
    return tuple((t.removeprefix("torch."), size) for t, size in zip(types, sizes))


def _way(stack):
    """The program's innermost line, and the function of PyTorch through which it has called."""
    through = ""
    for each in stack:
        file, function = each["filename"], each["name"]
        if frames.is_own(file) and not _LIBRARY.search(file):
            return Frame(file, each["line"], function), through
        through = frames.passes_through(file, function) or through
    return None, ""


def _comparable(entries, late):
    """Of a group, the collectives from where all recorders have them. Messages count from the beginning
    only: none of ranks whose recorder begins `late`."""
    begins = {}
    for rank, mine in entries.items():
        for call, order, _ in mine[::-1]:  # of a batch, which has one number, a part may be left
            begins[call.group, rank] = order + (rank in late)

    def has_all(call, order):
        if call.is_message:
            return not {call.me, call.peer} & late
        return order >= max(begins.get((call.group, rank), 0) for rank in call.members)

    return {rank: [each for each in mine if has_all(*each[:2])] for rank, mine in entries.items()}


def _states(world, entries, meetings):
    found, lacked = {}, set()
    for rank, mine in entries.items():
        waiting = {entry.call.number: entry.call for entry in mine if not entry.done}
        lacking = [waiting[n] for n in meetings.lacking(rank) if n in waiting]
        for call in [*lacking, *waiting.values()][:1]:
            found[rank] = State(
                f"was waiting in {call}", _path(call), str(call), call.through, call
            )
            lacked |= meetings.lacks(rank, call)
    for rank in set(world) - found.keys():
        if not entries.get(rank):
            found[rank] = State("made no call that is known" if rank in entries else "left no dump")
            continue
        last = entries[rank][-1].call
        words = (
            "did not make that call; its last was" if rank in lacked else "was done with its last,"
        )
        found[rank] = State(f"{words} {last}", _path(last))
    return dict(sorted(found.items()))


def _path(call):
    return [call.where] if call.where else []


def _nothing(states):
    told = [f"{sentence}, {each.where.place}" for sentence, each in grouped(states) if each.where]
    return "\n  ".join(["all calls that the dumps hold have ended, and match.", *told])
