"""What each rank did when a call ended, in words and with the learner's line."""

import re
import signal
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from course_utils.launch.story import frames, threads
from course_utils.launch.story.calls import KEY, NotedCall
from course_utils.launch.story.frames import Frame
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.stacks import waits
from course_utils.launch.story.view import Rank, at_sockets, where

_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Ss]ocket closed|remote process exited"
)
_COMMUNICATION_ERRORS = ("RuntimeError", "DistBackendError", "DistNetworkError")


@dataclass
class State:
    """What one rank did."""

    words: str  # "finished", "was waiting in all_reduce", ...
    path: list[Frame] = field(default_factory=list)  # the learner's lines, innermost last
    waits_in: str | None = None  # the communication in which it waits, in words
    through: str = ""  # the function of PyTorch that has called that: "full_tensor", "backward"
    call: NotedCall | None = None  # that communication's record, if there is one
    text: str = ""  # what it raised
    consequence: bool = False  # it failed because another rank was gone, or had failed
    traceback: str = ""  # its exception's, or its stack, as text
    locals: dict[str, str] = field(default_factory=dict)  # in words, at the line that raised

    @property
    def where(self) -> Frame | None:
        return self.path[-1] if self.path else None

    def __str__(self):
        return f"{self.words} ({self.where.place})" if self.where else self.words


def states(ranks: list[Rank], meetings: Meetings) -> dict[int, State]:
    """Returns what each rank did, by rank; asks those that live, all at once."""
    asleep, found = at_sockets(ranks), where([rank for rank in ranks if rank.living])
    known = {}
    for rank in ranks:
        at = found.get(rank)
        each = known[rank.number] = _state(rank, meetings, at, rank in asleep)
        if rank.report:
            each.traceback = rank.report.get("traceback", "")
            each.locals = rank.report.get("locals", {})
        elif at:
            each.traceback = frames.as_text(at.main[::-1])
    return known


def _state(rank, meetings, stacks, at_socket):
    if rank.finished:
        return State("finished")
    if rank.report:
        return _reported(rank.report, meetings.newest(rank.number))
    if rank.lost:
        return State(f"was on host {rank.host.name}, {rank.lost}")
    if rank.code is not None:
        return _dead(rank)
    if not rank.joined:
        return State("was starting")
    if stacks is None:
        return State("was stopped")
    return _living(rank, meetings, stacks, at_socket)


def signal_name(number: int) -> str:
    """Returns "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def grouped(states: dict[int, State]) -> list[tuple[str, State]]:
    """Returns ("ranks 0 and 2 were waiting in barrier", their state) for each group of ranks that did the same at the
    same line."""
    groups = alike({rank: str(each) for rank, each in states.items()}).values()
    return [(_sentence(ranks, states[ranks[0]].words), states[ranks[0]]) for ranks in groups]


def alike(told: dict[int, Hashable]) -> dict[Hashable, list[int]]:
    """Returns the ranks of which the same is told, by what that is."""
    groups = defaultdict(list)
    for rank, each in told.items():
        groups[each].append(rank)
    return groups


def learners(stack: list[tuple]) -> list[Frame]:
    """Returns the learner's own lines of a stack in a report."""
    return frames.own([Frame(*frame) for frame in stack])


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


def _reported(report, newest):
    path = learners(report.get("frames", []))
    if report["kind"] == "exit":
        return State(f"called sys.exit({report['code']!r})", path)
    if report["kind"] == "pickle":
        return State(
            "did not start" if report["what"] == "unpack" else "could not return its value"
        )
    if report["type"] in _COMMUNICATION_ERRORS and _LOST_CONNECTION.search(report["text"]):
        call = newest.kind if newest else "a collective"
        return State(f"lost its connection in {call}", path, consequence=True)
    follows = report.get("follows", False)
    return State(f"raised {report['type']}", path, text=report["text"], consequence=follows)


def _dead(rank):
    if rank.code >= 0:
        return State(f"ended with exit code {rank.code}")
    last = rank.last_words()
    words = f"was killed by {signal_name(-rank.code)}"
    return State(words, last.own_path, traceback=frames.as_text(last.main[::-1]))


def _living(rank, meetings, stacks, at_socket):
    # After destroy_process_group it may be making another world.
    call = None if meetings.has_left(rank.number) else meetings.newest(rank.number)
    lacking = meetings.lacking(rank.number)
    path, name, thread = stacks.own_path, waits(stacks.main), ""
    stands = call is not None and call.number in lacking
    idle = threads.idle(stacks.main)
    if idle and (other := next(filter(waits, stacks.threads.values()), None)):
        path = frames.own(other[::-1]) or path
        name, thread = waits(other), ", in a thread that its main thread waits for"
        its = next((n for n, each in lacking.items() if each.kind == name), None)
        call = meetings.numbered(rank.number, its) or call
    if not name and not (name == "" and stands and rank.activity()[1]):
        words = "was waiting at a socket" if at_socket else "was running"
        words = "was waiting for another thread" if idle else words
        return State(words, path, call=call if stands else None)
    before = ""
    if call and (pending := meetings.records[rank.number].pending):
        # The line that waits for the call, not the one where the host needs the result.
        call = meetings.numbered(rank.number, pending["behind"]) or call
        line = Frame(*pending["where"]) if pending["where"] else call.where
        together = next((unit for unit in pending["begun"] if call.number in unit), [])
        first = next(iter(lacking), call.number)
        if first in together:  # of a batch, which ends as one
            call = meetings.numbered(rank.number, first)
        elif call.number not in lacking and lacking:
            # What is called later waits in the queue behind it.
            before = f", before its {call.kind}"
            call = meetings.numbered(rank.number, first)
            line = call.where
        path = [line] if line else path
    elif name == "wait" and lacking and not stands and not thread:
        # For one that it made earlier: its newest has met all that it needs.
        call = meetings.numbered(rank.number, next(iter(lacking)))
    waits_in = _in_words(name, call)
    return State(f"was waiting in {waits_in}{before}{thread}", path, waits_in, name, call)


def _in_words(name, call):
    """Names what a rank waits in: by its record, and by the function that has called it."""
    if call is None:
        return name.lstrip("_")
    if call.kind == KEY:
        return f"the store for {call.group!r}"
    if call.is_message:
        whom = "any rank" if call.peer is None else f"rank {call.peer}"
        tag = f" with tag {call.tag}" if call.tag else ""
        through = f", in {name}" if name not in _NO_NAMES and name.strip("_i") != call.kind else ""
        return f"{call.kind} {'to' if call.kind == 'send' else 'from'} {whom}{tag}{through}"
    if name == "backward":
        return f"the {call.kind} of backward"
    if name == "forward":
        return f"the {call.kind} of DistributedDataParallel's forward"
    return call.kind if name in _NO_NAMES or name.startswith("_") else name


_NO_NAMES = ("", "wait", "send", "recv", "isend", "irecv")
