"""What each rank did when a call ended, in words and with the learner's line."""

import re
import signal
from collections import defaultdict
from dataclasses import dataclass, field

from course_utils.comm.collectives import POINT_TO_POINT
from course_utils.launch.story import frames, threads
from course_utils.launch.story.calls import DESTROY, NotedCall, read_pending
from course_utils.launch.story.frames import Frame
from course_utils.launch.story.stacks import collective
from course_utils.launch.story.view import Rank, where

_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Ss]ocket closed|remote process exited"
)
_COMMUNICATION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError")


@dataclass
class State:
    """What one rank did.

    words:        "finished", "was waiting in all_reduce", ...
    path:         the learner's own lines that led there, innermost last
    call:         the communication in which the rank waits, with its record if there is one
    consequence:  it failed because another rank was gone
    traceback:    its exception's, or its stack, as text
    locals:       the variables at the line that raised, in words
    """

    words: str
    path: list[Frame] = field(default_factory=list)
    waits_in: str | None = None
    call: NotedCall | None = None
    consequence: bool = False
    traceback: str = ""
    locals: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> Frame | None:
        return self.path[-1] if self.path else None

    def __str__(self):
        return f"{self.words} ({self.where.place})" if self.where else self.words


def states(ranks: list[Rank], records: list[list[NotedCall]]) -> dict[int, State]:
    """Returns what each rank did, by rank; asks those that live, all at once."""
    found = where([rank for rank in ranks if rank.living])
    known = {
        rank.number: _state(rank, record, found.get(rank)) for rank, record in zip(ranks, records)
    }
    for rank in ranks:
        if rank.report:
            known[rank.number].traceback = rank.report.get("traceback", "")
            known[rank.number].locals = rank.report.get("locals", {})
        elif stacks := found.get(rank):
            known[rank.number].traceback = frames.as_text(stacks.main[::-1])
    return known


def _state(rank, record, stacks):
    record = [call for call in record if call.kind != DESTROY]
    if rank.finished:
        return State("finished")
    if rank.report:
        return _reported(rank.report, record)
    if rank.lost:
        return State(f"was on host {rank.host.name}, {rank.lost}")
    if rank.code is not None:
        return _dead(rank)
    return _living(rank, record, stacks)


def signal_name(number: int) -> str:
    """Returns "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grouped(states: dict[int, State]) -> list[tuple[str, State]]:
    """Returns ("ranks 0 and 2 were waiting in barrier", their state) for each group of ranks
    that did the same at the same line."""
    groups = defaultdict(list)
    for rank, each in states.items():
        groups[str(each)].append(rank)
    return [
        (_sentence(ranks, states[ranks[0]].words), states[ranks[0]]) for ranks in groups.values()
    ]


def names(ranks: list[int]) -> str:
    """Returns "rank 1", "ranks 0 and 1" or "ranks 0, 1 and 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _sentence(ranks, words):
    if len(ranks) > 1:
        for one, many in (("was ", "were "), ("its ", "their ")):
            words = words.replace(one, many, 1)
    return f"{names(ranks)} {words}"


def _reported(report, record):
    path = frames.own([Frame(*frame) for frame in report.get("frames", [])])
    if report["kind"] == "exit":
        return State(f"called sys.exit({report['code']!r})", path)
    if report["kind"] == "pickle":
        return State(
            "did not start" if report["what"] == "unpack" else "could not return its value"
        )
    if report["type"] in _COMMUNICATION_ERRORS and _LOST_CONNECTION.search(report["text"]):
        call = record[-1].kind if record else "a collective"
        return State(f"lost its connection in {call}", path, consequence=True)
    return State(f"raised {report['type']}", path)


def _dead(rank):
    if rank.code >= 0:
        return State(f"ended with exit code {rank.code}")
    last = rank.last_words()
    words = f"was killed by {signal_name(-rank.code)}"
    return State(words, last.own_path, traceback=frames.as_text(last.main[::-1]))


def _living(rank, record, stacks):
    if not rank.joined:
        return State("was starting")
    if stacks is None:
        return State("was stopped")
    path, waits_in, thread = stacks.own_path, stacks.collective, ""
    if waits_in and (behind := _behind(rank, record)):
        # The line that waits for the call, not the one where the host needs the result.
        call, line = behind
        path, record = [line] if line else path, [call]
    if not waits_in and (waited_for := threads.waited_for(stacks)):
        path = frames.own(waited_for[::-1]) or path
        waits_in, thread = collective(waited_for), ", in a thread that its main thread waits for"
    if not waits_in:
        return State("was running", path)
    last = record[-1] if record else None
    name = _wait_in_words(waits_in, last)
    tag = f" with tag {last.tag}" if last and last.tag and name.startswith(last.kind) else ""
    return State(f"was waiting in {name}{tag}{thread}", path, waits_in=name, call=last)


def _behind(rank, record):
    """The call behind which the host of a rank waits for its device, if it does, and the learner's
    line that waits for it."""
    pending = read_pending(rank.record)
    call = next((call for call in record if call.number == pending.get("behind")), None)
    return call and (call, Frame(*pending["where"]) if pending["where"] else call.where)


def _wait_in_words(name, last):
    """Names what a rank waits in: from its stack, with details from its last recorded call."""
    if last is None:
        return name.lstrip("_")
    if last.kind in POINT_TO_POINT and name in (last.kind, "wait"):
        whom = "any rank" if last.peer is None else f"rank {last.peer}"
        return f"{last.kind} {'to' if last.kind == 'send' else 'from'} {whom}"
    if name == "backward":
        return f"the {last.kind} of backward"
    return last.kind if name == "wait" or name.startswith("_") else name
