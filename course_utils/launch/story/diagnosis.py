"""Who failed first and why: from what the ranks did to one message for a learner."""

from collections.abc import Callable
from dataclasses import dataclass

from course_utils.comm import private
from course_utils.launch.story import matching
from course_utils.launch.story.calls import KEY, NEW_GROUP, NotedCall
from course_utils.launch.story.failure import RankFailure
from course_utils.launch.story.frames import Frame
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.states import State, alike, grouped, learners, names, signal_name
from course_utils.launch.story.states import states as states_of
from course_utils.launch.story.view import START, Rank, note_calls

_SAME = "Every rank of a group has to make the same collective calls, in the same order,\nwith "
_SAME_CALLS = _SAME + "tensors of the same shape and data type."
_SAME_OPERATION = _SAME + "the same reduce operation."
_ALL_GROUPS = "Every rank has to make every group, also those that it is not in, in the same order."
_SAME_SPLITS = "In an all-to-all a rank has to expect from each other one as many rows as that one\nsends to it."
_SAME_PARTS = "A rank has to expect from each other one as much as that one hands over."
_SAME_ROOT = "All ranks of a group have to name the same src, or the same dst."
_SAME_STEPS = "Ranks that finished have called there before: all have to make equally many steps."
_GROUPS_IN_ORDER = (
    "These calls are in different groups: all ranks have to use groups in the same order."
)
_BOTH_ENDS = "Every send needs a recv on the other rank, and every recv a send."
_SAME_TAG = "A message has to be sent and received with the same tag."
_FACING = {
    "send": "Two ranks that both send first may wait for each other: let one of them receive first, or start\n"
    "both messages together with dist.batch_isend_irecv.",
    "recv": "Where both receive first, nobody sends: let one of them send first, or start both messages\n"
    "together with dist.batch_isend_irecv.",
}
_OWED = {
    "send": "finished without receiving it",
    "recv": "finished without sending it",
    KEY: "finished without setting it",
}
_SET_KEY = "A key of the store has to be set by another rank, under the same name."
_ALONE = (
    "DistributedDataParallel's forward communicates too. On one rank alone, as for an evaluation on\n"
    "rank 0, call model.module(x)."
)
_BATCHES = (
    "Where ranks have different numbers of batches, stop at the smallest number, or train in\n"
    "`with model.join():`. A decision to stop has to be the same on all ranks."
)
_THROUGH = {
    "forward": _ALONE,
    "backward": _BATCHES,
    private.FSDP_FORWARD: "The forward of a sharded model gathers its parameters: it is a call of all ranks.",
}
_ALL_ENTER = "{function} is a call of all ranks, also of those that do not need its result."
_NCCL_MISMATCH = "NCCL does not compare: without this check the ranks wait for ever, or go on with wrong numbers."
_NCCL_STUCK = "NCCL says nothing: after the group's timeout (10 minutes by default) its watchdog ends the process."
_HEADLINES = {
    "stuck": "a rank waits for a call that no other rank will make.",
    "unproven": "a rank waits, and for long nothing has moved. It is not proven that none can go on, since other\n"
    "threads or processes may still act.",
    "dumped": "ranks stood in calls that had not ended.",
    "late": "ranks still waited when the time was up (timeout={seconds} seconds).",
}
_DROPPED = (
    "Rank {rank} has called isend, and nobody has called the wait() of what it returned; a message that\n"
    "nobody keeps may never leave:"
)
# What PyTorch says where the parts of a checkpoint do not fit.
_PLAN = "Failed to validate global plan"
_SAME_KEYS = (
    "Every rank has to save its part of each sharded tensor, under the same key: do the ranks' state_dicts\n"
    "have the same keys?"
)
# What gloo says where a message comes that another call was to receive.
_SIZE = "Received data size doesn't match expected size"
_ANOTHERS = (
    "What came does not match what this rank was to receive: a message was left out, or it took one that\n"
    "was meant for a later recv."
)
_SAME_TIME = 0.05  # seconds within which nobody can say which rank failed first
_SAME_SIZE = "What one rank sends needs the size and data type of what the other one expects."
_ORPHANED = (
    "the process from which all ranks are started was killed, and the ranks ended with it.\n"
    "The system does this when memory runs out. Run the cell again; a new one has been started."
)
_PICKLE = {
    "unpack": "could not rebuild the function or its arguments.",
    "receive": "returned a value that could not be rebuilt in the notebook.",
}
_SIGNALS = {
    "SIGKILL": "ended from outside; the system does this when memory runs out",
    "SIGSEGV": "it used memory that is not its own",
    "SIGBUS": "it used memory that does not exist",
    "SIGABRT": "a library gave up",
    "SIGFPE": "an arithmetic error in C code",
    "SIGTERM": "asked to end from outside",
}


def explain(
    reason: str, ranks: list[Rank], meetings: Meetings, limit: float, nccl: bool = False
) -> RankFailure | None:
    """Returns the failure behind `reason`, which is what Supervision.watch returned, or "orphaned" when the fork
    server was killed; None if there is none. Asks the living ranks where they are.

    limit: the seconds that ended the call, if the time was up; nccl: say what NCCL would do
    """
    if reason == "orphaned":
        return RankFailure(_ORPHANED, kind="signal")
    note_calls(ranks, meetings)
    mismatch, unmet = meetings.mismatch(), meetings.unmet()
    if reason == "finished" and not (mismatch or unmet):
        return None
    story = _Story(ranks, meetings, states_of(ranks, meetings), limit, nccl)
    if mismatch:
        return story.mismatch(mismatch)
    if reason == "finished":
        return story.unanswered(unmet)
    if reason == "failed":
        return story.failed()
    return story.stuck(reason) if story.waiting else story.late()


def of_dumps(meetings: Meetings, states: dict[int, State]) -> RankFailure | None:
    """The same from what was left of ranks, and from what each of them did; None if no call stood still."""
    story = _Story([], meetings, states, 0.0, nccl=False)
    if mismatch := meetings.mismatch():
        return story.mismatch(mismatch)
    return story.stuck("dumped") if story.waiting else None


@dataclass
class _Story:
    """What there is to tell of a call that failed."""

    ranks: list[Rank]
    meetings: Meetings
    states: dict[int, State]
    limit: float
    nccl: bool

    @property
    def waiting(self) -> dict[int, State]:
        return {number: each for number, each in self.states.items() if each.waits_in}

    def mismatch(self, meeting: dict[int, NotedCall]) -> RankFailure:
        odd, made = matching.odd_one(meeting), meeting.values()
        kinds = {call.kind for call in made}
        uneven = all(call.splits for call in made) and (
            len(set(map(str, made))) == 1 or kinds != {"all_gather"}
        )
        in_detail = len(kinds) == 1 and (uneven or len({call.operation for call in made}) > 1)
        types = {call.dtype for call in made}

        def told(call):
            of = f", of {call.dtype}" if in_detail and len(types) > 1 else ""
            return call.in_words(in_detail) + of

        lines = ["the ranks' calls do not match.", *_each(meeting, told)]
        lines += [*self._apart(meeting), _rule(made)]
        if {call.through for call in made} > {"forward"}:
            lines.append(_ALONE)
        if self.nccl:
            lines.append(_NCCL_MISMATCH)
        return self._missed(meeting, lines, odd, "mismatch", meeting[odd].where)

    def unanswered(self, unmet: dict[int, NotedCall]) -> RankFailure:
        """All ranks have finished, and a call of one was never met; nobody waited for it."""
        first = min(unmet)
        lines = ["a call lacks its partner, and no rank has waited for it."]
        for rank, call in unmet.items():
            lines += [f"  rank {rank}: {call}", *_quote(call.where)]
            for other in sorted(self.meetings.lacks(rank, call) - {None}):
                lines.append(f"  rank {other} {_owed(call)}")
        lines += [*self._apart(unmet), *_advice([(call, "") for call in unmet.values()])]
        return self._missed(unmet, lines, first, "mismatch", unmet[first].where)

    def _apart(self, calls: dict[int, NotedCall]) -> list[str]:
        """Where the ways of ranks parted, if their lines tell; these calls are told already."""
        parted = self.meetings.apart(calls)
        if not parted or all(call == calls.get(rank) for rank, (call, _) in parted.items()):
            return self._swallowed()
        told = {}
        for rank, (call, absent) in parted.items():
            never = f" ({names(sorted(absent))} never called there)" if absent else ""
            told[rank] = f"{call.kind}, {''.join(_quote(call.where)).strip()}{never}"
        lines = ["Before, they made their calls at the same lines. The first that they did not:"]
        lines += [f"  {names(ranks)}: {words}" for words, ranks in alike(told).items()]
        return lines + self._swallowed()

    def _swallowed(self):
        """The newest exception that some ranks have caught, and others not: calls may be left out for it."""
        for number, each in self._noted():
            if not each.thread:
                place = f" ({each.where.place})" if each.where else ""
                return [f"Before, rank {number} caught {each.text}{place}"]
        return []

    def _noted(self, of_all=False):
        """Exceptions after which ranks went on, each with its rank, the newest first; `of_all`: also those that all
        have met, and for which none of them misses another."""
        noted = {number: record.caught for number, record in enumerate(self.meetings.records)}
        everywhere = set.intersection(*({each.where for each in mine} for mine in noted.values()))
        for number, mine in noted.items():
            for each in reversed(mine):
                if of_all or each.where not in everywhere:
                    yield number, each

    def _missed(self, made: dict[int, NotedCall], lines, rank, kind, where) -> RankFailure:
        """Ranks have missed each other in these calls; what one had raised before is the cause of that."""
        if (first := _raised_first(made)) is not None:
            then = f"After that it called {made[first].kind}, in an except or finally block:"
            return self._after(first, made[first].handling, then, lines)
        for number, each in self._noted(of_all=not made):
            if each.thread:
                then = f"That has ended its thread {each.thread}, and the others went on:"
                return self._after(number, each, then, lines)
        return self._failure(lines, rank, kind, where)

    def _after(self, rank, error, then, lines) -> RankFailure:
        told = [f"rank {rank} raised {error.text}", *_quote(error.where), then, *lines]
        return self._failure(told, rank, "exception", error.where, error.type)

    def failed(self) -> RankFailure:
        """Of all ranks that failed, the first that did not fail because of another one."""
        first = self._first()
        if self.states[first.number].consequence and (destroyed := self._destroyed()):
            return destroyed
        report = first.report or {}
        ended = "lost" if first.lost else "signal" if first.code and first.code < 0 else "exit"
        kind = report.get("kind", ended)
        own = self.states[first.number]
        lines = [f"rank {first.number} {_headline(first, kind, own)}", *_quotes(own.path)]
        lines += [*_members(report), *_causes(report), *self._crossed(first.number)]
        lines += self._others(first.number)
        if _PLAN in own.text:
            lines.append(_SAME_KEYS)
        if any(_SIZE in each for each in first.output.aborts):
            lines.append(_ANOTHERS)
        error = report["type"] if kind == "exception" else None
        return self._failure(lines, first.number, kind, own.where, error)

    def _crossed(self, number):
        """If what the rank raised came out of a collective call that had met those of other functions."""
        call, where = self.meetings.newest(number), self.states[number].where
        if call is None or call.is_message or where is None or call.where != where:
            return []
        met = self.meetings.met(number, call)
        if len({each.through for each in met.values()}) == 1:
            return []
        told = _each(met, lambda each: each.through or each.kind)
        return ["Before that it met the others in calls that do not match:", *told, _SAME_CALLS]

    def _first(self):
        """Of the ranks that failed by themselves the first in time; of those that failed alike, or at about the same
        time, the one with the lowest number, so that the message is always the same."""
        failed = [rank for rank in self.ranks if rank.failed]
        causes = [rank for rank in failed if not self.states[rank.number].consequence] or failed
        earliest = min(causes, key=lambda rank: rank.ended_at)
        its = str(self.states[earliest.number])

        def as_early(rank):
            late = rank.ended_at - earliest.ended_at
            return late < _SAME_TIME or str(self.states[rank.number]) == its

        return next(filter(as_early, causes))

    def _destroyed(self) -> RankFailure | None:
        """What there is to say of the first rank that did nothing more after destroy_process_group, if another one
        has needed it in the world that it left."""
        missed = {n for n, each in self.states.items() if each.consequence or each.call}
        needed = {n: call.world for n in missed if (call := self.meetings.newest(n))}
        for rank in self.ranks:
            call = self.meetings.has_left(rank.number)
            others = (world for number, world in needed.items() if number != rank.number)
            if call and not rank.failed and call.world in others:
                lines = [
                    f"rank {rank.number} called destroy_process_group while other ranks still communicated.",
                    *_quote(call.where),
                    *self._others(rank.number),
                    "It closes the connections: all ranks have to be done before any rank calls it.",
                ]
                return self._failure(lines, rank.number, "mismatch", call.where)
        return None

    def stuck(self, reason: str) -> RankFailure:
        """Ranks wait for a call that another one has not made."""
        living = [self.states[rank.number] for rank in self.ranks if rank.living]
        busy = [each for each in living if not each.words.startswith("was waiting")]
        if reason == "late" and any(each.call is None for each in busy):
            return self.late()
        if destroyed := self._destroyed():
            return destroyed
        waiting = self.waiting
        for number, each in self.states.items():
            if each.words == "finished":
                each.words = self._finished_without(number)
        lines = [_HEADLINES[reason].format(seconds=f"{self.limit:g}")]
        for sentence, each in grouped(self.states):
            now = sentence.replace("was waiting", "waits").replace("were waiting", "wait")
            lines += [f"  {now}", *_quote(each.where)]
        lines += self._apart({number: each.call for number, each in waiting.items()})
        lines += _advice([(each.call, self._through(number)) for number, each in waiting.items()])
        lines += self._order(waiting)
        if self.nccl:
            lines.append(_NCCL_STUCK)
        made = {number: each.call for number, each in waiting.items() if each.call}
        lines += self._dropped(made)
        first = min(waiting)
        return self._missed(made, lines, first, "timeout", self.states[first].where)

    def _order(self, waiting):
        """What has to hold where the calls that wait are right, and come too often or in another order."""
        calls = {n: each.call for n, each in waiting.items() if each.call and each.call.tensors}
        lacks = {n: self.meetings.lacks(n, call) for n, call in calls.items()}
        groups = {(call.world, call.group) for call in calls.values()}
        if len(groups) > 1 and all(who & calls.keys() for who in lacks.values()):
            return [_GROUPS_IN_ORDER]
        finished = {rank.number for rank in self.ranks if rank.finished}
        for number, call in calls.items():
            advised = call.is_message or self._through(number) in _THROUGH
            ended = call.where and lacks[number] <= finished
            if ended and not advised and self.meetings.been_there(lacks[number], call):
                return [_SAME_STEPS]
        return []

    def _through(self, number):
        """The function that has made the call of a rank that waits. Who lacks in DDP's forward has not called it at
        all, or has been there before and had a batch less."""
        each = self.states[number]
        if each.through == "forward" and each.call:
            lacks = self.meetings.lacks(number, each.call)
            return "backward" if self.meetings.been_there(lacks, each.call) else "forward"
        return each.through

    def _dropped(self, made):
        """Messages that were sent and do not come: gloo forgets one whose Work nobody keeps."""
        for rank, call in made.items():
            sent = self.meetings.met(rank, call).get(call.peer)
            if sent and call.kind == "recv":
                return [_DROPPED.format(rank=call.peer), *_quote(sent.where)]
        return []

    def _finished_without(self, number):
        """What a rank that has finished owes to one that waits."""
        for waits, each in self.waiting.items():
            if each.call is None:
                return "finished without calling it"
            if number in self.meetings.lacks(waits, each.call):
                return _owed(each.call)
        return "finished"

    def late(self) -> RankFailure:
        """The time was up while a rank was busy, or did what nobody knows."""
        living = [rank.number for rank in self.ranks if rank.living]
        running = [number for number in living if not self.states[number].waits_in]
        first = (running or living)[0]
        own = self.states[first]
        start = "" if self.ranks[first].joined else f", and {START:g} to start"
        lines = [
            f"rank {first} {own.words} when the time was up (timeout={self.limit:g} seconds{start}).",
            *_quotes(own.path),
            *self._others(first),
        ]
        lacking = {}
        for number in living:
            call = self.states[number].call
            if call and (lacks := sorted(self.meetings.lacks(number, call) - {None})):
                lacking[number] = str(call), names(lacks), call.where
        for (call, lacks, where), who in alike(lacking).items():
            its = "Its newest call" if who == [first] else f"The newest call of {names(who)}"
            lines += [f"{its}, {call}, lacks {lacks}:", *_quote(where)]
        return self._missed({}, lines, first, "timeout", own.where)

    def _others(self, but):
        rest = {number: each for number, each in self.states.items() if number != but}
        told = [
            f"{sentence} ({each.where.place})" if each.where else sentence
            for sentence, each in grouped(rest)
        ]
        lines = [f"Meanwhile {'; '.join(told)}."] if told else []
        own = {number: each.text for number, each in rest.items() if not each.consequence}
        texts = alike(
            {n: text for n, text in own.items() if text not in ("", self.states[but].text)}
        )
        return lines + [f"  {names(who)}: {_shortened(text, 300)}" for text, who in texts.items()]

    def _failure(self, lines, rank, kind, where, error=None) -> RankFailure:
        return RankFailure(
            "\n".join(lines),
            rank,
            kind,
            line=where.line if where else None,
            error=error,
            ranks=[str(each) for each in self.states.values()],
            details=[(each.traceback, each.locals) for each in self.states.values()],
        )


def _each(calls: dict[int, NotedCall], words: Callable[[NotedCall], str]) -> list[str]:
    """What the ranks called, a line for those that called the same at the same line of the learner's."""
    told = alike({rank: (words(call), call.where) for rank, call in calls.items()})
    return [
        line
        for (said, where), ranks in told.items()
        for line in (f"  {names(ranks)}: {said}", *_quote(where))
    ]


def _raised_first(made: dict[int, NotedCall]) -> int | None:
    """The rank that made its call in an except or finally block, if others did not: what it had raised is the cause
    of all that follows."""
    handling = [rank for rank, call in made.items() if call.handling]
    same = len({made[rank].handling.type for rank in handling}) == 1
    return handling[0] if handling and not (same and len(handling) == len(made) > 1) else None


def _owed(call):
    """What a rank that has finished owes to a call that lacks it."""
    return _OWED.get(call.kind, "finished without calling it")


def _advice(waiting: list[tuple[NotedCall | None, str]]) -> list[str]:
    """What has to hold for calls that lack their partner, each with the function that has made it."""
    known = [call for call, _ in waiting if call is not None]
    messages = [call for call in known if call.is_message]
    lines = []
    if messages:
        lines.append(_BOTH_ENDS)
        if any(call.tag for call in messages):
            lines.append(_SAME_TAG)
        if len(messages) > 1 and len({call.kind for call in messages}) == 1:
            lines.append(_FACING[messages[0].kind])
    if any(call.kind == KEY for call in known):
        lines.append(_SET_KEY)
    if len(known) < len(waiting) or any(not c.is_message and c.kind != KEY for c in known):
        lines.append(_SAME_CALLS)
    for call, through in waiting:
        if through in _THROUGH:
            lines.append(_THROUGH[through])
        elif through.startswith("_") or through in ("", "wait"):
            continue
        elif call and not call.is_message and call.kind != through:
            lines.append(_ALL_ENTER.format(function=through))
    return list(dict.fromkeys(lines))


def _rule(meeting):
    """What the calls of a meeting have not kept."""
    kinds = {call.kind for call in meeting}
    if all(call.is_message for call in meeting):
        return _SAME_SIZE
    if kinds == {NEW_GROUP}:
        return _ALL_GROUPS
    same_type = len({call.dtype for call in meeting}) == 1
    if same_type and kinds in ({"all_to_all_single"}, {"all_to_all"}):
        return _SAME_SPLITS
    if len({(call.kind, call.tensors) for call in meeting}) == 1 < len({c.peer for c in meeting}):
        return _SAME_ROOT
    if not same_type or len(set(map(str, meeting))) > 1:
        return _SAME_CALLS
    return _SAME_PARTS if all(call.splits for call in meeting) else _SAME_OPERATION


def _headline(rank, kind, own):
    if kind == "lost":
        return f"{own.words}."
    if kind == "exit":
        return f"{own.words} before it returned."
    if kind == "signal":
        meaning = _SIGNALS.get(signal_name(-rank.code), "the signal ended it")
        return "\n  ".join([f"{own.words}: {meaning}.", *rank.output.aborts])
    text = _shortened(rank.report["text"])
    if kind == "exception":
        return f"raised {text}"
    what = rank.report["what"]
    return f"{_PICKLE.get(what, f'returned what cannot be pickled: {what}.')}\n  {text}"


def _quotes(path: list[Frame]) -> list[str]:
    """The learner's own lines, outermost first; the middle of a long path is left out."""
    shown = path if len(path) <= 4 else [path[0], *path[-3:]]
    return [f"    {frame.place}, in {frame.function}:  {frame.source}" for frame in shown]


def _quote(where: Frame | None) -> list[str]:
    return _quotes([where] if where else [])


def _members(report) -> list[str]:
    """A line for each exception of a group."""
    told = []
    for text, stack in report.get("members", []):
        path = learners(stack)
        told.append(f"  with {_shortened(text)}{f' ({path[-1].place})' if path else ''}")
    return told


def _causes(report) -> list[str]:
    """What the exception was raised from, or what its rank was handling, each with its lines."""
    words = {"caused": "which was caused by", "handled": "while it handled"}
    told = []
    for link, text, stack in report.get("causes", []):
        told += [f"{words[link]} {_shortened(text)}", *_quotes(learners(stack))]
    return told


def _shortened(text, limit=1500):
    return text if len(text) <= limit else text[:limit] + " ..."
