"""When ranks wait for each other and nothing can ever wake them.

The records decide: some call lacks that of another rank, which will never make it. A slow rank must never be taken
for a stuck one, so each rank that lives has to rest: it uses next to no processor time although it was seen asleep
(one that gets no processor is not asleep), makes no call, and its stacks say that it waits (`threads.rest`) in a call
that has no limit of its own.
"""

import time

from course_utils.launch.story import stacks, threads
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.view import Rank, at_sockets, note_calls, where

TICK = 0.25  # seconds between two looks at how the ranks are
_BRIEFLY = 0.5  # seconds without any movement after which records and stacks are asked
_AGAIN = 2.0  # seconds after which they are asked again
_READ = 5.0  # seconds after which the records of ranks that move are read, so that none grows long


class Stillness:
    """Watches how the ranks of a call move.

    patience: seconds of stillness after which ranks that may yet move by themselves are given up
    """

    def __init__(self, ranks: list[Rank], meetings: Meetings, patience: float):
        self._ranks, self._meetings, self._patience = ranks, meetings, patience
        self._looked = self._read_at = 0.0
        self.begin()

    def begin(self) -> None:
        """To be called when the ranks have moved in a way that is not seen here."""
        self._quiet_since = time.monotonic()
        self._rest = None  # how all rested when they were asked last
        self._wait = _BRIEFLY
        self._restart()

    def _restart(self):
        self._since = time.monotonic()
        self._asleep = set()
        self._start = self._look()

    def _look(self):
        """Processor seconds and number of the last call of each rank that lives."""
        self.looks = {}
        for rank in self._ranks:
            if rank.code is None:
                seconds, sleeping = rank.activity()
                self.looks[rank] = seconds, rank.calls_made()
                if sleeping:
                    self._asleep.add(rank)
        return self.looks

    def found(self) -> str | None:
        """'stuck' when no rank can move any more, 'unproven' when none has for long and this cannot be shown; to be
        called every TICK or so."""
        now = time.monotonic()
        if now - self._looked < TICK:
            return None
        # If this very process was held up, the ranks may have been held up as well.
        held_up = now - self._looked > 4 * TICK
        self._looked = now
        if held_up or self._moved(now):
            self.begin()
            if now - self._read_at > _READ:
                self._read()
        elif now - self._since >= self._wait:
            self._wait = _AGAIN
            return self._judge(now)
        return None

    def _moved(self, now):
        looks, allowed = self._look(), 0.02 + 0.05 * (now - self._since)
        return looks.keys() != self._start.keys() or any(
            seconds - self._start[rank][0] > allowed or calls_made != self._start[rank][1]
            for rank, (seconds, calls_made) in looks.items()
        )

    def _read(self):
        self._read_at = self._looked
        note_calls(self._ranks, self._meetings)

    def _judge(self, now):
        before, self._rest = self._rest, None
        self._read()
        # Groups that do not fit may still let the ranks come to an end, and what they print.
        if self._meetings.mismatch(groups=False):
            return "stuck"
        calls = {rank: made for rank, (_, made) in self._start.items()}
        lacking = self._somebody_lacks()
        if self._asleep.issuperset(calls):
            self._rest = self._how_they_rest()
        self._restart()  # answering has cost the ranks some processor time
        if self._rest is None or calls != {rank: made for rank, (_, made) in self._start.items()}:
            return None
        if not (lacking and all(rest.proven for rest in self._rest.values())):
            return "unproven" if now - self._quiet_since >= self._patience else None
        # A message may be on its way to who waits for an earlier call than its last.
        sure = all(rank.finished or self._in_its_last_call(rank) for rank in self._rest)
        return "stuck" if sure or self._rest == before else None

    def _somebody_lacks(self):
        """Whether a call lacks another's; of ranks that wait for a device with queues, whether none that has begun
        has met all that it needs."""
        records = {rank.number: self._meetings.records[rank.number] for rank in self._start}
        if pending := {number: each.pending for number, each in records.items() if each.pending}:
            return self._meetings.none_can_end(pending)
        return any(map(self._meetings.lacking, records))

    def _how_they_rest(self):
        """How each rank rests; None if one of them does not, or waits in a call with a limit."""
        found, asleep = {}, at_sockets(self._start)
        for rank, at in where(list(self._start)).items():
            lacks, handlers = bool(self._meetings.lacking(rank.number)), rank.handles_signals()
            rest = at and threads.rest(at, rank.finished, handlers, lacks, asleep.get(rank))
            newest = rest and self._meetings.latest(rank.number, max(1, len(rest.waiting)))
            if rest is None or any(call.limited for call in newest):
                return None
            found[rank] = rest
        return found

    def _in_its_last_call(self, rank):
        """Whether nothing of this rank waits but its main thread, and that in the rank's last call, which lacks
        another's."""
        waiting, last = self._rest[rank].waiting, self._meetings.newest(rank.number)
        return (
            waiting.keys() == {rank.main_thread}
            and last is not None
            and bool(self._meetings.lacks(rank.number, last))
            and stacks.called(waiting[rank.main_thread]) == last.kind
        )
