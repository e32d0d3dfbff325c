"""Who failed first and why: from what the ranks did to one message for a learner."""

from collections import defaultdict

from course_utils.comm.collectives import POINT_TO_POINT
from course_utils.launch.story import calls, frames, matching
from course_utils.launch.story.calls import NotedCall
from course_utils.launch.story.failure import RankFailure
from course_utils.launch.story.frames import Frame
from course_utils.launch.story.states import State, grouped, names, signal_name
from course_utils.launch.story.states import states as states_of
from course_utils.launch.story.view import START, Rank
from course_utils.launch.story.view import records as records_of

_SAME_CALLS = (
    "Every rank of a group has to make the same collective calls, in the same order,\nwith "
    "tensors of the same shape and data type."
)
_SAME_OPERATION = (
    "Every rank of a group has to make the same collective calls, in the same order,\nwith "
    "the same reduce operation."
)
_ALL_GROUPS = "Every rank has to make every group, also those that it is not in, in the same order."
_SAME_SPLITS = (
    "In all_to_all_single a rank has to expect from each other one as many rows as that one\n"
    "sends to it."
)
_BOTH_ENDS = "Every send needs a recv on the other rank, and every recv a send."
_SAME_TAG = "A message has to be sent and received with the same tag."
_UNEVEN = "all_to_all_single"
_SAME_SIZE = "What one rank sends needs the size and data type of what the other one expects."
_ORPHANED = (
    "the process from which all ranks are started was killed, and the ranks ended with it.\n"
    "The system does this when memory runs out. Run the cell again; a new one has been started."
)
_SIGNALS = {
    "SIGKILL": "ended from outside; the system does this when memory runs out",
    "SIGSEGV": "it used memory that is not its own",
    "SIGBUS": "it used memory that does not exist",
    "SIGABRT": "a library gave up",
    "SIGFPE": "an arithmetic error in C code",
    "SIGTERM": "asked to end from outside",
}


def explain(reason: str, ranks: list[Rank], timeout: float) -> RankFailure | None:
    """Returns the failure behind `reason`, which is what Supervision.watch returned, or
    "orphaned" when the fork server was killed; None if there is none. Asks the living ranks where
    they are."""
    if reason == "orphaned":
        return RankFailure(_ORPHANED, kind="signal")
    records = records_of(ranks)
    mismatch = matching.first_mismatch(records)
    if reason == "finished" and not mismatch:
        return None
    states = states_of(ranks, records)
    if mismatch:
        return _mismatch(mismatch, states)
    if reason == "failed":
        return _failed(ranks, states, records)
    if reason == "stuck" and any(each.waits_in for each in states.values()):
        return _stuck(ranks, states, records)
    return _late(ranks, states, timeout)


def _mismatch(meeting: dict[int, NotedCall], states):
    odd = matching.odd_one(meeting)
    alike = defaultdict(list)
    kinds = {call.kind for call in meeting.values()}
    operations = {call.operation for call in meeting.values()}
    in_detail = len(kinds) == 1 and (len(operations) > 1 or kinds == {_UNEVEN})
    for rank, call in meeting.items():
        alike[call.in_words(in_detail), call.where].append(rank)
    lines = ["the ranks' calls do not match."]
    for (words, where), numbers in alike.items():
        lines += [f"  {names(numbers)}: {words}", *_quotes([where] if where else [])]
    lines.append(_rule(meeting.values()))
    if first := _raised_first(meeting):
        return _after_exception(first, meeting[first], lines, states)
    return _failure(lines, odd, "mismatch", meeting[odd].where, states)


def _raised_first(made: dict[int, NotedCall]) -> int | None:
    """The rank that made its call in an except or finally block, if others did not: what it had
    raised is the cause of all that follows."""
    handling = [rank for rank, call in made.items() if call.handling]
    alike = len({made[rank].handling.type for rank in handling}) == 1
    return handling[0] if handling and not (alike and len(handling) == len(made) > 1) else None


def _after_exception(rank, call, lines, states):
    first = call.handling
    told = [
        f"rank {rank} raised {first.text}",
        *_quotes([first.where] if first.where else []),
        f"After that it called {call.kind}, in an except or finally block:",
        *lines,
    ]
    return _failure(told, rank, "exception", first.where, states, first.type)


def _rule(meeting):
    """What the calls of a meeting have not kept."""
    kinds = {call.kind for call in meeting}
    if kinds <= set(POINT_TO_POINT):
        return _SAME_SIZE
    if kinds == {calls.NEW_GROUP}:
        return _ALL_GROUPS
    if kinds == {_UNEVEN}:
        return _SAME_SPLITS
    return _SAME_OPERATION if len({str(call) for call in meeting}) == 1 else _SAME_CALLS


def _failed(ranks, states, records):
    """Of all ranks that failed, the first that did not fail because of another one."""
    failed = [rank for rank in ranks if rank.failed]
    first = next((rank for rank in failed if not states[rank.number].consequence), failed[0])
    if states[first.number].consequence and (left := _left(ranks, records)):
        return _destroyed(*left, states)
    report = first.report or {}
    kind = report.get("kind") or _kind_of_end(first)
    own = states[first.number]
    lines = [f"rank {first.number} {_headline(first, own)}", *_quotes(own.path)]
    lines += [*_members(report), *_causes(report), *_others(states, first.number)]
    error = report["type"] if kind == "exception" else None
    return _failure(lines, first.number, kind, own.where, states, error)


def _left(ranks, records) -> tuple[int, Frame | None] | None:
    """The first rank that did nothing more after destroy_process_group, and that line."""
    for number, record in enumerate(records):
        if record and record[-1].kind == calls.DESTROY and not ranks[number].failed:
            return number, record[-1].where
    return None


def _destroyed(number, where, states):
    lines = [
        f"rank {number} called destroy_process_group while other ranks still communicated.",
        *_quotes([where] if where else []),
        *_others(states, number),
        "It closes the connections: all ranks have to be done before any rank calls it.",
    ]
    return _failure(lines, number, "mismatch", where, states)


def _kind_of_end(rank):
    if rank.lost:
        return "lost"
    return "exit" if rank.code >= 0 else "signal"


def _headline(rank, own):
    if rank.lost:
        return f"{own.words}."
    if rank.report is None and rank.code >= 0:
        return f"{own.words} before it returned."
    if rank.report is None:
        meaning = _SIGNALS.get(signal_name(-rank.code), "the signal ended it")
        return "\n  ".join([f"{own.words}: {meaning}.", *rank.output.aborts])
    kind, text = rank.report["kind"], _shortened(rank.report["text"])
    if kind == "exception":
        return f"raised {text}"
    if kind == "exit":
        return f"{own.words} before it returned."
    what = rank.report["what"]
    if what == "unpack":
        return f"could not rebuild the function or its arguments.\n  {text}"
    if what == "receive":
        return f"returned a value that could not be rebuilt in the notebook.\n  {text}"
    return f"returned what cannot be pickled: {what}.\n  {text}"


def _stuck(ranks, states, records):
    if left := _left(ranks, records):
        return _destroyed(*left, states)
    waiting = {number: each for number, each in states.items() if each.waits_in}
    first = min(waiting)
    for number, each in states.items():
        if each.words == "finished":
            each.words = _finished_without(waiting, number)
    lines = ["the ranks wait for each other, and none can go on."]
    for sentence, each in grouped(states):
        lines += [f"  {_now(sentence)}", *_quotes([each.where] if each.where else [])]
    messages = all(each.waits_in.split()[0] in POINT_TO_POINT for each in waiting.values())
    lines.append(_BOTH_ENDS if messages else _SAME_CALLS)
    if messages and any(each.call and each.call.tag for each in waiting.values()):
        lines.append(_SAME_TAG)
    made = {number: each.call for number, each in waiting.items() if each.call}
    if raised := _raised_first(made):
        return _after_exception(raised, made[raised], lines, states)
    return _failure(lines, first, "timeout", states[first].where, states)


def _finished_without(waiting, number):
    """What a rank that has finished owes to one that waits."""
    for each in waiting.values():
        if each.waits_in == f"send to rank {number}":
            return "finished without receiving it"
        if each.waits_in in (f"recv from rank {number}", "recv from any rank"):
            return "finished without sending it"
        collective = each.call is None or each.call.kind not in POINT_TO_POINT
        if collective and (each.call is None or number in each.call.members):
            return "finished without calling it"
    return "finished"


def _late(ranks, states, timeout):
    living = [rank.number for rank in ranks if rank.living]
    running = [number for number in living if not states[number].waits_in]
    first = (running or living)[0]
    own = states[first]
    start = "" if ranks[first].joined else f", and {START:g} to start"
    lines = [
        f"rank {first} {own.words} when the time was up (timeout={timeout:g} seconds{start}).",
        *_quotes(own.path),
        *_others(states, first),
    ]
    return _failure(lines, first, "timeout", own.where, states)


def _failure(lines, rank, kind, where, states: dict[int, State], error=None):
    return RankFailure(
        "\n".join(lines),
        rank,
        kind,
        line=where.line if where else None,
        error=error,
        ranks=[str(each) for each in states.values()],
        tracebacks=[each.traceback for each in states.values()],
        variables=[each.locals for each in states.values()],
    )


def _quotes(path: list[Frame]) -> list[str]:
    """The learner's own lines, outermost first; the middle of a long path is left out."""
    shown = path if len(path) <= 4 else [path[0], *path[-3:]]
    return [f"    {frame.place}, in {frame.function}:  {frame.source}" for frame in shown]


def _members(report) -> list[str]:
    """A line for each exception of a group."""
    told = []
    for text, stack in report.get("members", []):
        path = _learners(stack)
        told.append(f"  with {_shortened(text)}{f' ({path[-1].place})' if path else ''}")
    return told


def _causes(report) -> list[str]:
    """What the exception was raised from, or what its rank was handling, each with its lines."""
    words = {"caused": "which was caused by", "handled": "while it handled"}
    told = []
    for link, text, stack in report.get("causes", []):
        told += [f"{words[link]} {_shortened(text)}", *_quotes(_learners(stack))]
    return told


def _learners(stack):
    return frames.own([Frame(*frame) for frame in stack])


def _others(states, but):
    rest = grouped({number: each for number, each in states.items() if number != but})
    told = [
        f"{sentence} ({each.where.place})" if each.where else sentence for sentence, each in rest
    ]
    return [f"Meanwhile {'; '.join(told)}."] if told else []


def _now(sentence):
    return sentence.replace("was waiting", "waits").replace("were waiting", "wait")


def _shortened(text, limit=1500):
    return text if len(text) <= limit else text[:limit] + " ..."
