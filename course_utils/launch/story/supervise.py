"""The kernel's loop: until all ranks have delivered, one has failed or none can move any more."""

import selectors
import time
from collections.abc import Callable

from course_utils.comm.fair import longest_delay
from course_utils.launch.story.held import Turns
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.stillness import TICK, Stillness
from course_utils.launch.story.view import START, Rank

_SETTLE = 2.0  # seconds at most that the others get to fail too, or to come to rest
_COMPUTES = 0.05  # of the time: a rank that uses more of a processor computes


class Supervision:
    """Watches the ranks of one call.

    still: seconds at most in which nothing goes on: no rank makes a call, and not all of them compute
    whole: seconds at most for the call
    on_tick: is called several times a second
    """

    def __init__(
        self,
        ranks: list[Rank],
        meetings: Meetings,
        still: float,
        whole: float,
        on_tick: Callable[[], None],
    ):
        self._ranks, self._meetings = ranks, meetings
        self._still, self._whole = still, whole
        self._on_tick = on_tick
        self._delayed = 0.0  # the seconds by which the end was put off
        self._end = self._last = time.monotonic() + START + still
        self._mark = 0.0, {}  # when the ranks were looked at, and how they were
        self.limit = still  # the one of the two that ends the call

    def watch(self) -> str:
        """Returns why watching ended: 'finished', 'failed', 'stuck', 'unproven' (stuck, as far as can be seen) or
        'late'."""
        with selectors.DefaultSelector() as self._selector:
            for rank in self._ranks:
                for source, read in rank.listen():
                    self._selector.register(source, selectors.EVENT_READ, read)
            return self._watch()

    def _watch(self):
        turns = Turns(self._ranks)
        stillness = Stillness(self._ranks, self._meetings, self._still / 2)
        begun = False
        while True:
            self._read_in_time()
            self._on_tick()
            if not begun and all(rank.joined for rank in self._ranks):
                begun = True
                self._renew()
                for rank in self._ranks:
                    rank.begin()
            if turns.serve():  # all others wait, however long
                stillness.begin()
                self._renew()
                continue
            if any(rank.failed for rank in self._ranks):
                self._settle()
                return "failed"
            if all(rank.finished for rank in self._ranks):
                return "finished"
            if reason := stillness.found():
                return reason
            if begun:
                self._go_on(stillness.looks)
            if time.monotonic() >= self._end and not self._put_off():
                return "late"

    def _renew(self):
        now = time.monotonic()
        self._end, self._last = now + self._still, now + self._whole

    def _go_on(self, looks):
        """Puts the end off, where the ranks go on."""
        now = time.monotonic()
        before, then = self._mark
        if then.keys() != looks.keys():
            self._mark = now, looks
        elif now - before >= 1.0 and looks:
            enough = _COMPUTES * (now - before)
            calls = any(looks[rank][1] != then[rank][1] for rank in looks)
            if calls or all(r.finished or looks[r][0] - then[r][0] > enough for r in looks):
                self._end = min(now + self._still, self._last)
                self.limit = self._still if self._end < self._last else self._whole
            self._mark = now, looks

    def _put_off(self):
        """Whether the ranks were ready to run and a busy machine had no processor for them: that time does not count
        against the limit."""
        delay = longest_delay(rank.pid for rank in self._ranks if rank.pid and rank.code is None)
        more, self._delayed = delay - self._delayed, max(delay, self._delayed)
        self._later(max(0.0, more))
        return more > 0.1

    def _later(self, seconds):
        self._end += seconds
        self._last += seconds

    def _read_in_time(self):
        """Reads for a moment. Time in which this process was stopped, as on a laptop that is closed, does not count
        against the limit: the ranks may have waited for it."""
        start = time.monotonic()
        self._read(min(TICK, self._end - start))
        took = time.monotonic() - start
        if took > 4 * TICK:
            self._later(took)

    def _read(self, patience):
        for key, _ in self._selector.select(max(0.0, patience)):
            if not key.data():
                self._selector.unregister(key.fileobj)

    def _settle(self):
        """After a failure: what the others do now belongs to its story, and must not depend on which of them was a
        little faster."""
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
