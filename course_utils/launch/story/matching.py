"""What the records prove: which calls meet, which of these do not match, and whose call lacks whom.

The n-th collective of a group meets the n-th of the group's other ranks; the n-th send from one rank to another meets
the n-th recv. All ranks of a world make all its groups: the n-th new_group of a rank meets the n-th of the others.
Calls that have met and match are forgotten, so there may be any number of them.

The ranks of a world of the learner's own agree on its name without waiting, in its store; here their numbers are
translated into the launch's.
"""

import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from course_utils.launch.story.calls import DESTROY, KEY, NEW_GROUP, NotedCall, Record

_RECENT = 256  # calls of a rank that are kept although they have met


class Meetings:
    """The calls of all ranks, as far as they are on record."""

    def __init__(self, paths: list[str]):
        self.records = [Record(path) for path in paths]
        # Of each rank: its latest calls, and by their numbers those that have not met, with who is there.
        self._recent = [deque(maxlen=_RECENT) for _ in paths]
        self._unmet = [{} for _ in paths]
        self._open: dict[tuple, dict[int, NotedCall]] = {}  # what has not met, by (stream, index)
        self._inboxes: dict[tuple, dict[str, deque]] = {}  # of those that receive from any rank
        self._made: Counter = Counter()  # calls by (stream, rank)
        # The first meeting that does not match; under True, the first of new_group.
        self._wrong: dict[bool, dict[int, NotedCall]] = {}
        self._refused: dict[int, NotedCall] = {}  # by rank its newest call, if PyTorch refused it
        self._ranks: dict[tuple, int] = {}  # by (world, number in that world)
        self._there: dict = defaultdict(set)  # the ranks that have called at a line
        self._apart: dict[tuple, dict[int, NotedCall]] = {}  # by stream: see `apart`

    def update(self) -> None:
        """Takes in what the ranks have noted since."""
        for rank, record in enumerate(self.records):
            events = list(record.new())
            refused = {number for event, number in events if event == "refused"}
            for event, what in events:
                if event != "call":
                    self._take_back(rank, what)
                elif what.number in refused:
                    index = self._made[_stream(rank, what), rank]
                    self._refused[rank] = what._replace(index=index)
                else:
                    self._add(rank, what)

    def _add(self, rank, call):
        stream = _stream(rank, call)
        call = call._replace(index=self._made[stream, rank])
        self._made[stream, rank] += 1
        self._recent[rank].append(call)
        self._refused.pop(rank, None)
        if call.kind == KEY:
            self._unmet[rank][call.number] = call, {}
        elif call.kind != DESTROY:
            self._ranks[call.world, call.me] = rank
            self._there[call.where].add(rank)
            inbox = self._inbox(call)
            if inbox is None:
                self._meet(rank, call, stream)
            else:
                self._deliver(rank, call, inbox)

    def _meet(self, rank, call, stream):
        met = self._open.setdefault((stream, call.index), {})
        met[rank] = call
        self._unmet[rank][call.number] = call, met
        if len(met) == (2 if call.is_message else len(call.members)):
            del self._open[stream, call.index]
            for other, its in met.items():
                del self._unmet[other][its.number]
            self._compare(stream, met)

    def _compare(self, stream, met):
        if not _match(met.values()):
            groups = call_of(met).kind == NEW_GROUP
            self._wrong[groups] = min(self._wrong.get(groups, met), met, key=_when)
        if not call_of(met).is_message:
            if len({call.where for call in met.values()}) == 1:
                self._apart.pop(stream, None)
            else:
                self._apart.setdefault(stream, met)

    def _inbox(self, call):
        """Where the messages to a rank are counted that has received from any rank: nobody can tell which of them
        came from whom. None for all other calls."""
        if not call.is_message:
            return None
        to = call.world, call.group, call.me if call.kind == "recv" else call.peer
        if to not in self._inboxes and call.kind == "recv" and call.peer is None:
            inbox = self._inboxes[to] = {"send": deque(), "recv": deque()}
            for point, met in list(self._open.items()):
                for rank, earlier in met.items():
                    if earlier.is_message and self._inbox(earlier) is inbox:
                        self._open.pop(point, None)
                        self._deliver(rank, earlier, inbox)
        return self._inboxes.get(to)

    def _deliver(self, rank, call, inbox):
        inbox[call.kind].append((rank, call.number))
        self._unmet[rank][call.number] = call, {rank: call}
        while inbox["send"] and inbox["recv"]:
            for side in inbox.values():
                who, number = side.popleft()
                self._unmet[who].pop(number, None)

    def _take_back(self, rank, number):
        """A call that PyTorch refused was not made; a wait for a key that is over is none any more."""
        call = self._numbered(rank, number)
        if call is None:
            return
        with contextlib.suppress(ValueError):  # it was long ago
            self._recent[rank].remove(call)
        stream = _stream(rank, call)
        self._made[stream, rank] -= 1
        _, met = self._unmet[rank].pop(number, (None, {}))
        met.pop(rank, None)
        if not met:
            self._open.pop((stream, call.index), None)

    def begin_call(self) -> None:
        """Forgets what tells of the calls of `Ranks` before: what was caught, and where the ways parted."""
        self.update()
        self._apart.clear()
        for record in self.records:
            record.caught.clear()

    @property
    def complete(self) -> bool:
        """False if a rank could not note all of its calls, and nothing is proven."""
        return all(record.complete for record in self.records)

    def mismatch(self, groups: bool = True) -> dict[int, NotedCall] | None:
        """The first calls that meet and do not match, by rank; None if all match.

        groups: whether groups that were made in different orders count, which may go well by luck.
        """
        might = {}  # what PyTorch has refused, with whom it would have met
        for rank, call in self._refused.items():
            at = _stream(rank, call), call.index
            might.setdefault(at, dict(self._open.get(at, {})))[rank] = call
        wrong = [met for met in (*might.values(), *self._open.values()) if not _match(met.values())]
        wrong = [met for met in wrong if groups or call_of(met).kind != NEW_GROUP]
        wrong += [met for of_groups, met in self._wrong.items() if groups or not of_groups]
        if not wrong or not self.complete:
            return None
        first = min(wrong, key=_when)
        return {rank: self._in_launch(first[rank]) for rank in sorted(first)}

    def lacks(self, rank: int, call: NotedCall) -> set[int | None]:
        """The ranks without whose next call this one of `rank` cannot end; None stands for one of a world of the
        learner's own that is not known. Empty if it has met all that it needs."""
        if not self.complete:
            return set()
        call, met = self._unmet[rank].get(call.number, (None, {}))
        if call is None:
            return set()
        if call.kind == KEY:
            return set(range(len(self.records))) - {rank}
        one = call.is_message and call.peer is not None
        return self._in_world(call, [call.peer] if one else call.members) - {rank} - met.keys()

    def _in_world(self, call, numbers):
        """The ranks with these numbers in the call's world, as the launch counts; None for one that is not known,
        because it has made no call there."""
        if call.world == "":
            return set(numbers)
        return {self._ranks.get((call.world, number)) for number in numbers}

    def lacking(self, rank: int) -> dict[int, NotedCall]:
        """The calls of a rank, by number, that lack another's."""
        return {
            n: call for n, (call, _) in sorted(self._unmet[rank].items()) if self.lacks(rank, call)
        }

    def unmet(self) -> dict[int, NotedCall]:
        """Of each rank its first call that lacks another's; also one for which nobody waits. None where a rank has
        given a call up."""
        found = {}
        if any(record.gave_up for record in self.records):
            return found
        for rank in range(len(self.records)):
            for call in self.lacking(rank).values():
                # A group that others did not make may be good all the same.
                if call.kind != NEW_GROUP and not call.limited and self.lacks(rank, call) - {None}:
                    found.setdefault(rank, self._in_launch(call))
        return found

    def apart(self, ranks: Iterable[int]) -> dict[int, tuple[NotedCall, set[int]]] | None:
        """The first of the latest meetings in a row that ranks made at different lines, if one of these ranks took
        part: where a rank left out a call, or took another branch. By rank its call, and the ranks of the group that
        never called at that line. A meeting whose lines no two ranks share is a branch that was meant, such as that
        of a root."""
        for met in self._apart.values():
            there = {rank: self._there[call.where] for rank, call in met.items()}
            if any(len(each) > 1 for each in there.values()) and set(ranks) & met.keys():
                return {
                    rank: (self._in_launch(met[rank]), met.keys() - there[rank])
                    for rank in sorted(met)
                }
        return None

    def been_there(self, ranks: set[int], call: NotedCall) -> bool:
        """Whether one of these ranks has called anything at the line of a call."""
        return bool(ranks & self._there[call.where])

    def met(self, rank: int, call: NotedCall) -> dict[int, NotedCall]:
        """A recent call of `rank`, and those that have met it, by rank."""
        call = self._numbered(rank, call.number)
        at = call and (_stream(rank, call), call.index)
        return {
            other: self._in_launch(its)
            for other, recent in enumerate(self._recent)
            for its in recent
            if (_stream(other, its), its.index) == at
        }

    def newest(self, rank: int) -> NotedCall | None:
        """The newest call of a rank, but for those that leave a group."""
        made = [call for call in self._recent[rank] if call.kind != DESTROY]
        return self._in_launch(made[-1]) if made else None

    def has_left(self, rank: int) -> NotedCall | None:
        """The call with which a rank left its groups, if that was its last one."""
        return next((last for last in self.latest(rank, 1) if last.kind == DESTROY), None)

    def latest(self, rank: int, count: int) -> list[NotedCall]:
        """The last calls of a rank."""
        return list(self._recent[rank])[-count:]

    def numbered(self, rank: int, number: int | None) -> NotedCall | None:
        """The call with this number, if it is recent or has not met."""
        call = self._numbered(rank, number)
        return call and self._in_launch(call)

    def _numbered(self, rank, number):
        recent = (call for call in self._recent[rank] if call.number == number)
        return self._unmet[rank].get(number, (next(recent, None), None))[0]

    def none_can_end(self, pending: dict[int, dict]) -> bool:
        """True if nothing that ranks wait behind will ever end unless one of them makes another call.

        pending: for each rank that waits for a device with queues, what `host_waits.follow` publishes. A
        call that has begun ends when all ranks that it needs have begun theirs. What a rank does that
        does not wait is not known: there, what has been called counts as begun.
        """
        begun, waiting = Counter(self._made), []
        for rank, here in pending.items():
            for number in here["queued"]:
                if call := self._numbered(rank, number):
                    begun[_stream(rank, call), rank] -= 1
            waiting += [(rank, [self._numbered(rank, n) for n in unit]) for unit in here["begun"]]
        return not any(
            all(self._has_begun(rank, call, begun) for call in unit if call)
            for rank, unit in waiting
        )

    def _has_begun(self, rank, call, begun):
        needed = self._in_world(call, [call.peer] if call.is_message else call.members) - {rank}
        return all(begun[_stream(rank, call), other] > call.index for other in needed)

    def _in_launch(self, call):
        """The call with the numbers of its ranks in the launch; those that are not known are left out."""
        if call.world == "":
            return call
        known = {me: rank for (world, me), rank in self._ranks.items() if world == call.world}

        def ranks(numbers):
            return numbers and tuple(known[number] for number in numbers if number in known)

        return call._replace(
            members=ranks(call.members), asked=ranks(call.asked), peer=known.get(call.peer)
        )


def call_of(met: dict[int, NotedCall]) -> NotedCall:
    """Any of the calls of a meeting."""
    return next(iter(met.values()))


def _when(met):
    first = min(met)
    return met[first].number, first


def _stream(rank, call):
    """Of what a call is the n-th: those of one stream meet in their order."""
    group = call.world, call.group, call.members
    if call.kind in (KEY, DESTROY):
        return *group, rank
    if not call.is_message:
        return group
    ends = (call.me, call.peer) if call.kind == "send" else (call.peer, call.me)
    return *group, *ends, call.tag


def odd_one(calls: dict[int, NotedCall]) -> int:
    """Returns the rank whose call differs from most others; of two, the second."""
    signatures = [_signature(call) for call in calls.values()]
    return min(reversed(calls), key=lambda rank: signatures.count(_signature(calls[rank])))


def _match(calls):
    return len(set(map(_signature, calls))) == 1 and all(
        _fit(call, other) for call in calls for other in calls if call.splits and other.splits
    )


def _fit(call, other):
    """Whether the one sends as much to the other as that one expects from it."""
    sent, expected = call.splits[0], other.splits[1]
    return sent[call.members.index(other.me)] == expected[call.members.index(call.me)]


def _signature(call):
    """What has to be equal where calls meet. In collectives shapes count, as under DETAIL, even where the number of
    elements agrees; between send and recv only that number and the data type."""
    if call.is_message:
        return tuple((dtype, math.prod(shape)) for dtype, shape in call.tensors)
    what = call.dtype if call.splits else call.tensors
    return call.kind, call.peer, call.operation, what, call.asked
