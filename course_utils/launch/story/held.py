"""In the kernel: ranks that a debugger holds talk through the cell, one at a time."""

import time

from course_utils.launch.story.view import Rank

_ALONE = 1.0  # seconds after its answer in which a rank that has not asked again keeps its turn


class Turns:
    """Whose turn it is."""

    def __init__(self, ranks: list[Rank]):
        self._ranks = ranks
        self._turn = None
        self._answered = 0.0

    def serve(self) -> bool:
        """Lets the learner answer the rank whose turn it is, if it asks. True as long as a debugger holds a rank."""
        held = [rank for rank in self._ranks if rank.held and rank.living]
        asking = [rank for rank in held if rank.asks is not None]
        # It may have stepped into a call for which it needs another rank that is held.
        waits = self._turn not in asking and time.monotonic() - self._answered > _ALONE
        if asking and (self._turn not in held or waits):
            self._turn = asking[0]
        if self._turn in asking:
            self._answer(self._turn)
        return bool(held)

    def _answer(self, rank):
        for each in self._ranks:
            each.read_output()
        text, rank.asks = rank.asks, None
        *lines, prompt = text.split("\n")
        for line in lines:
            print(f"[rank {rank.number}] {line}")
        try:
            line = input(f"[rank {rank.number}] {prompt}") + "\n"
        except (EOFError, NotImplementedError):  # no more lines; nobody to ask, as in nbconvert
            line = ""
        rank.answer(line)
        self._answered = time.monotonic()
