"""What a person sees of a launch while it goes on, and of which nothing is left at its end.

The newest line of each rank, of a progress bar what stands there now, and after some seconds a line that counts. What
is stored of a cell, and what a file or a pipe gets, is what `output` writes only, so that it is the same in every run.
"""

import contextlib
import math
import os
import re
import sys
import time

from course_utils.launch.ranks import cells
from course_utils.launch.story import states
from course_utils.launch.story.matching import Meetings
from course_utils.launch.story.view import Rank

_SOON = 0.3  # seconds after which lines are shown
_LONG = 3  # seconds after which they are counted
_PAUSE = 0.25  # seconds between two changes
_WIDTH = 100  # characters of a line
# what names a figure, colours, what moves the cursor, and what is not one character for a browser
_NOT_SHOWN = re.compile(r"\x1efigure .*|\x1b\[[\d;?]*[A-Za-z]|[^ -\uffff]")


class View:
    """Shows how the ranks of a launch are, if somebody watches; whatever it meets on the way, the
    launch goes on without it."""

    def __init__(self, ranks: list[Rank], meetings: Meetings):
        self._ranks, self._meetings = ranks, meetings
        self._start = time.monotonic()
        self._due = math.inf
        self._count, self._counted = "", 0
        self._earlier = {rank: meetings.newest(rank.number) for rank in ranks}  # of another call's
        self._made = {}  # the number of each rank's last call, when it was counted
        with contextlib.suppress(Exception):
            if place := cells.here() or _Terminal.here(ranks):
                self._place = place
                self._due = self._start + _SOON

    def tick(self) -> None:
        """Shows what is new; to be called several times a second."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = math.inf
        with contextlib.suppress(Exception):
            newest = [(r.number, _NOT_SHOWN.sub("", r.output.newest).strip()) for r in self._ranks]
            lines = [f"[rank {number}] {line[:_WIDTH]}" for number, line in newest if line]
            if (seconds := int(now - self._start)) >= _LONG and seconds > self._counted:
                self._count, self._counted = " · ".join([f"{seconds} s", *self._doing()]), seconds
            self._place.show(lines, self._count)
            self._due = now + _PAUSE

    def close(self) -> None:
        """Takes away what is shown."""
        self._due = math.inf
        with contextlib.suppress(Exception):
            self._place.hide()

    def _doing(self):
        yield f"{sum(rank.joined for rank in self._ranks)} of {len(self._ranks)} ready"
        # A record on another host would have to be brought, and that of a busy rank says nothing for long.
        near = {rank: rank.calls_made() for rank in self._ranks if rank.pid}
        still = [rank for rank, made in near.items() if self._made.get(rank) == made]
        self._made = near
        self._meetings.update()
        told = {}
        for rank in still:
            newest = self._meetings.newest(rank.number)
            if rank.finished or newest != self._earlier[rank]:
                told[rank.number] = "finished" if rank.finished else f"last called {newest.kind}"
        for what, numbers in states.alike(told).items():
            yield f"{states.names(numbers)} {what}"


class _Terminal:
    """The rest of the row in which the cursor stands, and stays."""

    _shown = ""

    @classmethod
    def here(cls, ranks):
        """None where nobody sees it."""
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            place = cls()
            for rank in ranks:
                rank.output.before_writing = place.hide
            return place
        return None

    def show(self, lines, count):
        text = "  ".join(filter(None, [count, *lines]))
        if text != self._shown:
            self._write(f"\x1b7\x1b[?7l\x1b[K{text}\x1b[?7h\x1b8")  # never into the next row
        self._shown = text

    def hide(self):
        if self._shown:
            self._write("\x1b[K")
        self._shown = ""

    def _write(self, text):
        sys.stdout.write(text)
        sys.stdout.flush()
