"""Who failed first and why, in words for a learner."""

import re
import signal
from collections import defaultdict
from dataclasses import dataclass

from course_utils.launch import calls, frames, packing
from course_utils.launch.calls import Call
from course_utils.launch.failure import RankFailure
from course_utils.launch.frames import Frame
from course_utils.launch.process import Rank

_SAME_CALLS = (
    "Every rank of a group has to make the same collective calls, in the same order, with "
    "tensors of the same shape and data type."
)
_SAME_MESSAGES = "Every send needs a recv on the other rank, and every recv a send."
_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset|refused)|[Bb]roken pipe|[Ss]ocket closed|remote process exited"
)
_SIGNALS = {
    "SIGKILL": "ended from outside; the system does this when memory runs out",
    "SIGSEGV": "an access to memory that is not the process's",
    "SIGBUS": "an access to memory that does not exist",
    "SIGABRT": "a library gave up; the lines that it printed say why",
    "SIGFPE": "an arithmetic error in C code",
    "SIGTERM": "asked to end",
}


@dataclass
class State:
    """What a rank did when the call ended: in words, and the learner's line where it was."""

    words: str
    where: Frame | None = None
    waits_in: str | None = None
    consequence: bool = False  # it failed because another rank was gone

    def __str__(self):
        return f"{self.words} ({self.where.place})" if self.where else self.words


def explain(reason: str, ranks: list[Rank], timeout: float) -> RankFailure | None:
    """Returns the failure that `reason`, as Supervision.watch gives it, comes down to; None if
    there is none."""
    records = [calls.read(rank.record) for rank in ranks]
    mismatch = _first_mismatch(records)
    if reason == "finished" and not mismatch:
        return None
    states = [_state(rank, record) for rank, record in zip(ranks, records)]
    if mismatch:
        return _mismatch(mismatch, states, records)
    if reason == "failed":
        return _failed(ranks, states)
    if reason == "stuck":
        return _stuck(ranks, states, records)
    return _late(ranks, states, timeout)


# --- what each rank did ---------------------------------------------------------------------


def _state(rank, record):
    if rank.finished:
        return State("finished")
    if rank.report:
        return _reported(rank.report, record)
    if rank.code is not None:
        return _dead(rank)
    return _alive(rank, record)


def _reported(report, record):
    where = _innermost(report)
    if report["kind"] == "exit":
        return State(f"called sys.exit({report['code']!r})", where)
    if report["kind"] == "pickle":
        return State("could not send its result" if report["what"] != "unpack" else "did not start")
    if _LOST_CONNECTION.search(report["text"]) and report["type"] in (
        "RuntimeError",
        "DistBackendError",
        "DistNetworkError",
    ):
        call = record[-1].kind if record else "a collective"
        return State(f"lost its connection in {call}", where, consequence=True)
    return State(f"raised {report['type']}", where)


def _dead(rank):
    if rank.code >= 0:
        return State(f"ended with exit code {rank.code}")
    return State(f"was killed by {_signal_name(-rank.code)}", rank.last_words().own)


def _alive(rank, record):
    stacks = rank.where()
    if stacks is None:
        return State("was starting" if rank.main_thread is None else "did not answer")
    if not stacks.collective:
        return State("was running", stacks.own)
    call = _call_behind(stacks, record)
    return State(f"waits in {call}", stacks.own, waits_in=call)


def _call_behind(stacks, record):
    """Names the call in which a rank waits, with its peer if it is a send or a recv."""
    name, last = stacks.collective, record[-1] if record else None
    if last and last.kind in ("send", "recv") and name in (last.kind, "wait"):
        return f"{last.kind} {'to' if last.kind == 'send' else 'from'} rank {last.peer}"
    if last and (name == "wait" or name.startswith("_")):
        return last.kind
    return name


def _innermost(report):
    own = frames.own([Frame(*frame) for frame in report.get("frames", [])])
    return own[-1] if own else None


def _signal_name(number):
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --- collective calls that do not match -----------------------------------------------------


def _first_mismatch(records: list[list[Call]]) -> dict[int, Call] | None:
    """Returns the calls, by rank, at the first point where ranks did not do the same."""
    by_point = defaultdict(dict)
    for rank, record in enumerate(records):
        for call in record:
            by_point[_point(rank, call)][rank] = call
    for calls_by_rank in by_point.values():
        if not _match(list(calls_by_rank.values())):
            return dict(sorted(calls_by_rank.items()))
    return None


def _point(rank, call):
    """Calls with the same point meet each other."""
    if call.kind == "send":
        return call.group, rank, call.peer, call.tag, call.index
    if call.kind == "recv":
        return call.group, call.peer, rank, call.tag, call.index
    return call.group, call.index


def _match(meeting):
    first = meeting[0]
    if first.kind in ("send", "recv"):
        return all(_contents(call) == _contents(first) for call in meeting)
    return all(call.signature == first.signature for call in meeting)


def _contents(call):
    """What a message holds: a tensor may arrive in one of another shape."""
    return [(dtype, _elements(shape)) for dtype, shape in call.tensors]


def _elements(shape):
    count = 1
    for size in shape:
        count *= size
    return count


def _mismatch(meeting, states, records):
    odd = _odd_one(meeting)
    lines = [
        f"rank {rank}: {call}" + (f"\n    {_quote(call.where)}" if call.where else "")
        for rank, call in meeting.items()
    ]
    kinds = {call.kind for call in meeting.values()}
    rule = _SAME_MESSAGES if kinds == {"send", "recv"} else _SAME_CALLS
    if kinds == {"send", "recv"}:
        rule = "What a rank sends has to have the size and data type of what the other expects."
    headline = "the ranks' calls do not match."
    if _swapped(meeting, records):
        headline = "the ranks make the same calls in different orders."
    where = meeting[odd].where
    return RankFailure(
        "\n".join([headline, *(f"  {line}" for line in lines), rule]),
        odd,
        "mismatch",
        line=where.line if where else None,
        ranks=[str(state) for state in states],
    )


def _odd_one(meeting):
    """The rank that differs from most; of two, the second."""
    signatures = [call.signature for call in meeting.values()]
    return min(reversed(meeting), key=lambda rank: signatures.count(meeting[rank].signature))


def _swapped(meeting, records):
    """True if each rank made the other's call too, elsewhere."""
    wanted = {call.signature for call in meeting.values()}
    groups = {call.group for call in meeting.values()}
    return all(
        wanted <= {call.signature for call in records[rank] if call.group in groups}
        for rank in meeting
    )


# --- ranks that failed, wait or run ---------------------------------------------------------


def _failed(ranks, states):
    failed = [rank for rank in ranks if rank.failed]
    causes = [rank for rank in failed if not states[rank.number].consequence] or failed
    first = causes[0]
    report = first.report or {}
    kind = report.get("kind") or ("exit" if first.code >= 0 else "signal")
    state = states[first.number]
    own = frames.own([Frame(*frame) for frame in report.get("frames", [])])
    path = own or ([state.where] if state.where else [])
    return RankFailure(
        "\n".join(
            [f"rank {first.number} {_headline(first, report, state)}", *_path(path)]
            + _others(states, [first.number])
        ),
        first.number,
        kind,
        line=path[-1].line if path else None,
        error=report["type"] if kind == "exception" else None,
        ranks=[str(state) for state in states],
    )


def _headline(rank, report, state):
    kind = report.get("kind")
    if kind == "exception":
        return f"raised {_shortened(report['text'])}"
    if kind == "pickle":
        return _not_packed(report)
    if rank.code is not None and rank.code < 0:
        meaning = _SIGNALS.get(_signal_name(-rank.code))
        return state.words + (f" ({meaning})." if meaning else ".")
    return state.words + " before it returned."


def _not_packed(report):
    if report["what"] == "unpack":
        return f"cannot rebuild the function or its arguments.\n  {report['text']}"
    if report["what"] == "receive":
        return f"returned a value that cannot be rebuilt here.\n  {report['text']}"
    return f"returned a value that cannot be pickled: {report['what']}.\n  {report['text']}"


def _stuck(ranks, states, records):
    waiting = [rank.number for rank in ranks if states[rank.number].waits_in]
    first = waiting[0]
    for number, state in enumerate(states):
        if state.words == "finished":
            state.words = _without(states[first].waits_in, number)
    where = states[first].where
    groups = _grouped(states)
    messages = all(states[n].waits_in.split()[0] in ("send", "recv") for n in waiting)
    return RankFailure(
        "\n".join(
            ["the ranks wait for each other, and none can go on.", *(f"  {g}" for g in groups)]
            + [_SAME_MESSAGES if messages else _SAME_CALLS]
        ),
        first,
        "timeout",
        line=where.line if where else None,
        ranks=[str(state) for state in states],
    )


def _without(call, number):
    if call == f"send to rank {number}":
        return "finished without receiving it"
    if call == f"recv from rank {number}":
        return "finished without sending it"
    return "finished without calling it" if " " not in call else "finished"


def _late(ranks, states, timeout):
    living = [rank.number for rank in ranks if rank.living]
    running = [number for number in living if not states[number].waits_in]
    first = (running or living)[0]
    state = states[first]
    return RankFailure(
        "\n".join(
            [
                f"rank {first} {state.words} when the time was up (timeout={timeout:g} seconds).",
                *_path([state.where] if state.where else []),
            ]
            + _others(states, [first])
        ),
        first,
        "timeout",
        line=state.where.line if state.where else None,
        ranks=[str(state) for state in states],
    )


# --- words ----------------------------------------------------------------------------------


def _path(own: list[Frame]) -> list[str]:
    """The learner's own lines that led there, as Python shows them, the last one innermost."""
    shown = own if len(own) <= 4 else [own[0], *own[-3:]]
    return [f"  {_quote(frame)}" for frame in shown]


def _quote(frame):
    return f"{frame.place}, in {frame.function}:  {frame.source}".rstrip(": ")


def _others(states, but):
    groups = _grouped(
        [state for n, state in enumerate(states) if n not in but],
        [n for n in range(len(states)) if n not in but],
    )
    return [f"Meanwhile {'; '.join(groups)}."] if groups else []


def _grouped(states, numbers=None):
    """ "ranks 0 and 2 wait in barrier (cell line 7)" for each group in the same state."""
    by_words = defaultdict(list)
    for number, state in zip(numbers or range(len(states)), states):
        by_words[str(state)].append(number)
    return [_plural(ranks, words) for words, ranks in by_words.items()]


def _plural(numbers, words):
    if len(numbers) == 1:
        return f"rank {numbers[0]} {words}"
    for one, many in (("waits", "wait"), ("was ", "were "), ("its ", "their ")):
        words = words.replace(one, many, 1)
    names = ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
    return f"ranks {names} {words}"


def _shortened(text, limit=1500):
    return text if len(text) <= limit else text[:limit] + " ..."


# --- before any rank starts -----------------------------------------------------------------


def not_packed(fn, args) -> RankFailure:
    """Explains which argument, or which variable of the function, cannot be pickled."""
    for number, value in enumerate(args, start=1):
        found = packing.culprit(f"argument {number}", value)
        if found:
            return _unsendable(*found)
    name = getattr(fn, "__name__", "the function")
    for variable, value in _variables(fn).items():
        found = packing.culprit(f"the variable {variable}", value)
        if found:
            return _unsendable(f"{found[0]}, which {name} uses,", found[1])
    return _unsendable(name, packing.culprit(name, fn)[1])


def _unsendable(what, error):
    return RankFailure(
        f"{what} cannot be pickled, so it cannot be sent to the ranks.\n"
        f"  {type(error).__name__}: {_shortened(str(error), 300)}\n"
        "Create it inside of the function, on each rank.",
        kind="pickle",
    )


def _variables(fn):
    import inspect

    try:
        found = inspect.getclosurevars(fn)
        return {**found.nonlocals, **found.globals}
    except TypeError:
        return {}
