"""What a learner sees when a rank does not deliver its result."""


class RankFailure(RuntimeError):
    """A rank failed. `str(failure)` is a message for a learner.

    rank:   the rank that failed first; None if the call never reached the ranks
    kind:   'exception', 'exit', 'signal', 'timeout', 'mismatch', 'pickle' or 'lost'
    line:   line number in the learner's cell or file, None where there is none
    error:  name of the exception's type ("ZeroDivisionError"), None for the other kinds
    ranks:  a state in words for each rank, by rank
    """

    def __init__(
        self, message, rank=None, kind="exception", line=None, error=None, ranks=(), details=()
    ):
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.line = line
        self.error = error
        self.ranks = list(ranks)
        self._details = list(details)  # of each rank: its traceback, its variables

    def traceback(self, rank: int) -> str:
        """What Python would have printed of this rank's exception: all frames, also those of libraries, its causes,
        notes and members. Of a rank that was waiting or running, its stack at that time, as far as it is known; of
        any other, its state in words. Raises IndexError for no rank."""
        state = f"rank {rank} {self.ranks[rank]}\n"
        return (self._details[rank][0] if self._details else "") or state

    def locals(self, rank: int) -> dict[str, str]:
        """The variables of a rank that raised, at the learner's line, by name: each in words of at most 200
        characters, a tensor's shape, type and values. Raises IndexError for no rank."""
        return dict(self._details[rank][1]) if self._details else {}

    def _render_traceback_(self):
        # IPython shows an exception exactly as this method renders it: the message alone, without the frames of this
        # package.
        return [f"RankFailure: {self}"]
