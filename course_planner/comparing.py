"""Traced ranks beside each other, as `launch` compares real ones, and beside what a plan expects."""

from collections.abc import Iterator, Mapping

from course_planner.descriptions import Layout, Model
from course_planner.fake import Trace
from course_planner.traffic import Call as Row
from course_planner.traffic import traffic
from course_utils.launch.story import diagnosis
from course_utils.launch.story.calls import NotedCall, Record
from course_utils.launch.story.frames import Frame, is_own
from course_utils.launch.story.matching import Meetings
from course_utils.trace import Call

FREE = ("all_to_all", "barrier")  # ranks may hand over different sizes
HAIR = 1e-3  # of all bytes: less is a loss's or a norm's few numbers, which no plan has


def mismatch(traces: Mapping[int, Trace]) -> str | None:
    """Why the calls of these ranks do not meet, in `launch`'s words; None where they do.

    Only what several of them take part in can be compared: of a collective those that were traced, of
    a message both ends.
    """
    meetings = Meetings([""] * (max(traces) + 1))
    for rank in traces:
        meetings.records[rank] = _Record(list(_noted(rank, traces)))
    failure = diagnosis.explain("finished", [], meetings, limit=0.0)
    return failure and str(failure)


class _Record(Record):
    """Of one rank, in the place of what a real one writes."""

    def __init__(self, calls: list[NotedCall]) -> None:
        super().__init__("")
        self._noted = calls

    def new(self) -> Iterator[tuple[str, NotedCall]]:
        yield from (("call", call) for call in self._noted)
        self._noted = []


def _noted(rank: int, traces: Mapping[int, Trace]) -> Iterator[NotedCall]:
    trace = traces[rank]
    rows = zip(trace.record.calls, trace.groups, trace.lines, strict=True)
    for number, (call, group, line) in enumerate(rows):
        members = tuple(sorted(set(call.ranks) & traces.keys()))
        if len(members) < 2:
            continue
        sizes = None if call.op in FREE else ((call.dtype, (call.elements,)),)
        where = Frame(*line) if line and is_own(line[0]) else None
        about = {"peer": _peer(rank, call), "tensors": sizes, "where": where}
        yield NotedCall(number, -1, "", rank, group, members, call.op, **about)


def _peer(rank: int, call: Call) -> int | None:
    if call.op in ("send", "recv"):
        return next(other for other in call.ranks if other != rank)
    return call.root


def unplanned(
    trace: Trace, model: Model, layout: Layout, seq: int, stage: int
) -> dict[tuple[str, str, str], tuple[list[int], list[int]]]:
    """The calls that the plan of a step does not have, or has otherwise: by group, call and pass, the
    number and the bytes sent, traced and planned."""
    both = [_sums(trace.calls), _sums(traffic(model, layout, seq, stage))]
    most = max(sum(sent for _, sent in sums.values()) for sums in both)
    found = {}
    for key in dict.fromkeys([*both[0], *both[1]]):
        first, second = (sums.get(key, [0, 0]) for sums in both)
        if first != second and max(first[1], second[1]) > HAIR * most:
            found[key] = first, second
    return found


def _sums(calls: list[Row]) -> dict[tuple[str, str, str], list[int]]:
    sums: dict[tuple[str, str, str], list[int]] = {}
    for call in calls:
        row = sums.setdefault((call.group, call.op, call.when), [0, 0])
        row[0] += call.calls
        row[1] += call.sent
    return sums
