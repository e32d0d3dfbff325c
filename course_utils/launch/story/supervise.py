"""The kernel's loop: until all ranks have delivered, one has failed or none can move any more."""

import selectors
import time
from collections.abc import Callable

from course_utils.comm.fair import longest_delay
from course_utils.launch.story import calls, matching, stacks, threads
from course_utils.launch.story.view import START, Rank, records, where

_TICK = 0.25  # seconds between two looks at how the ranks are
_BRIEFLY = 0.5  # seconds without any movement after which the ranks' calls are compared
_STILL = 2.0  # seconds without any movement after which stacks are asked for, and asked again
_SETTLE = 2.0  # seconds at most that the others get to fail too, or to come to rest


class Supervision:
    """Watches the ranks of one call, and calls `on_tick` several times a second meanwhile."""

    def __init__(self, ranks: list[Rank], timeout: float, on_tick: Callable[[], None]):
        self._ranks = ranks
        self._on_tick = on_tick
        self._timeout = timeout
        self._delayed = 0.0  # the seconds by which the end was put off
        self._end = time.monotonic() + START + timeout
        self._selector = selectors.DefaultSelector()

    def __enter__(self):
        for rank in self._ranks:
            for source, read in rank.listen():
                self._selector.register(source, selectors.EVENT_READ, read)
        return self

    def __exit__(self, *exception):
        self._selector.close()

    def watch(self) -> str:
        """Returns why watching ended: 'finished', 'failed', 'stuck' or 'late'."""
        stillness = Stillness(self._ranks)
        begun = False
        while True:
            self._read_in_time()
            self._on_tick()
            if not begun and all(rank.joined for rank in self._ranks):
                begun = True
                self._end = time.monotonic() + self._timeout
                for rank in self._ranks:
                    rank.begin()
            if any(rank.failed for rank in self._ranks):
                self._settle()
                return "failed"
            if all(rank.finished for rank in self._ranks):
                return "finished"
            if stillness.found():
                return "stuck"
            if time.monotonic() >= self._end and not self._put_off():
                return "late"

    def _put_off(self):
        """Whether the ranks were ready to run and a busy machine had no processor for them: that time
        does not count against the limit."""
        delay = longest_delay(rank.pid for rank in self._ranks if rank.pid and rank.code is None)
        more, self._delayed = delay - self._delayed, max(delay, self._delayed)
        self._end += max(0.0, more)
        return more > 0.1

    def _read_in_time(self):
        """Reads for a moment. Time in which this process was stopped, as on a laptop that is
        closed, does not count against the limit: the ranks may have waited for it."""
        start = time.monotonic()
        self._read(min(_TICK, self._end - start))
        took = time.monotonic() - start
        if took > 4 * _TICK:
            self._end += took

    def _read(self, patience):
        for key, _ in self._selector.select(max(0.0, patience)):
            if not key.data():
                self._selector.unregister(key.fileobj)

    def _settle(self):
        """After a failure: what the others do now belongs to its story, and must not depend on
        which of them was a little faster."""
        end = time.monotonic() + _SETTLE
        before, quiet, tick = None, 0, max(rank.host.tick for rank in self._ranks)
        while time.monotonic() < end and quiet < 3:
            time.sleep(tick)
            self._read(0)
            if not any(rank.living for rank in self._ranks):
                return
            now = [rank.activity() for rank in self._ranks if rank.living]
            resting = now == before and all(sleeping for _, sleeping in now)
            quiet = quiet + 1 if resting else 0
            before = now


class Stillness:
    """Tells when the ranks wait for each other and nothing can ever wake them.

    A slow rank must never be taken for a stuck one. So for each rank that lives, those that have
    finished included, all of this has to hold, twice in a row over two seconds:

    * it has used next to no processor time, although it was seen asleep: a rank that gets no
      processor on a busy machine is never asleep, and one that was stopped gives no answer;
    * it has made no new call;
    * its main thread is in a communication, waits for a thread that is, or waits for its end
      because it has finished;
    * the call in which it waits has no limit of its own, after which it would go on;
    * some call on record lacks that of another rank (`matching.all_will_end`); or, if it waits for
      its device, where calls stand in queues, no call that has begun has met all that it needs
      (`matching.none_can_end`);
    * no other thread can move it on: `threads` says what has to be shown for each;
    * all stacks that wait end at the same lines as before.

    A rank that computes, sleeps in time.sleep, reads a file or waits for another process has
    another stack. What only another rank can end, no rank will end, if this holds for all.

    Once, and after half a second, is enough where the records alone prove it: each rank that has
    not finished waits, with its main thread only, in the call that it has made last, and that call
    lacks one of another rank. Then none will make another, and no message is on its way.
    """

    def __init__(self, ranks: list[Rank]):
        self._ranks = ranks
        self._looked = 0.0
        self._stacks = None
        self._asked_at = None  # how far the records were when the ranks were asked for a proof
        self._restart()

    def found(self) -> bool:
        """True when no rank can move any more; to be called every _TICK seconds or so."""
        now = time.monotonic()
        if now - self._looked < _TICK:
            return False
        # If this very process was held up, the ranks may have been held up as well.
        held_up = now - self._looked > 4 * _TICK
        self._looked = now
        if held_up or self._moved(now):
            self._stacks = None
            self._restart()
        elif now - self._since >= _BRIEFLY and not self._compared:
            self._compared = True
            # Groups that do not fit may still let the ranks come to an end, and what they print.
            made = records(self._ranks)
            mismatch = matching.first_mismatch(made, groups=False)
            return mismatch is not None or self._proven(made)
        elif now - self._since >= _STILL:
            return self._stuck()
        return False

    def _restart(self):
        self._since = time.monotonic()
        self._compared = False
        self._asleep = set()
        self._start = self._look()

    def _look(self):
        """Processor seconds and number of the last call of each rank that lives."""
        looks = {}
        for rank in self._ranks:
            if rank.code is None:
                seconds, sleeping = rank.activity()
                looks[rank] = seconds, rank.calls_made()
                if sleeping:
                    self._asleep.add(rank)
        return looks

    def _moved(self, now):
        looks, allowed = self._look(), 0.02 + 0.05 * (now - self._since)
        return looks.keys() != self._start.keys() or any(
            seconds - self._start[rank][0] > allowed or calls_made != self._start[rank][1]
            for rank, (seconds, calls_made) in looks.items()
        )

    def _stuck(self):
        before, self._stacks = self._stacks, self._resting()
        self._restart()  # answering has cost the ranks some processor time
        if self._stacks is None or self._stacks != before:
            return False
        made = records(self._ranks)
        if self._limited(made):
            return False
        if pending := self._pending():
            return matching.none_can_end(made, pending)
        return not matching.all_will_end(made)

    def _proven(self, records):
        made = {rank: calls_made for rank, (_, calls_made) in self._start.items()}
        waiting = [rank for rank in made if not rank.finished]
        if made == self._asked_at or not all(
            records[rank.number] and matching.lacks_a_call(records, rank.number) for rank in waiting
        ):
            return False
        self._asked_at = made
        resting = self._resting()
        return (
            resting is not None
            and all(rank.calls_made() == before for rank, before in made.items())
            and all(
                _in_its_last_call(rank, found, records) if rank in waiting else not found
                for rank, found in resting.items()
            )
        )

    def _limited(self, records):
        """Whether a call in which a rank waits will fail by itself, so that the rank goes on."""
        waiting = [(records[rank.number], at) for rank, at in self._stacks.items()]
        return any(call.limited for record, at in waiting for call in record[-max(1, len(at)) :])

    def _pending(self):
        """What the ranks that live wait behind, by rank."""
        found = {rank.number: calls.read_pending(rank.record) for rank in self._stacks}
        return {number: pending for number, pending in found.items() if pending}

    def _resting(self):
        """The stacks of all threads that wait, by rank, if no thread of any rank can go on."""
        ranks = list(self._start)
        if not self._asleep.issuperset(ranks):
            return None
        found = {}
        for rank, at in where(ranks).items():
            found[rank] = at and threads.resting(at, rank.finished, rank.handles_signals())
            if found[rank] is None:
                return None
        return found


def _in_its_last_call(rank, waiting, records):
    """Whether nothing of this rank waits but its main thread, and that in the rank's last call."""
    last = records[rank.number][-1]
    stack = waiting.get(rank.main_thread, [])
    return len(waiting) == 1 and not last.limited and stacks.called(stack) == last.kind
