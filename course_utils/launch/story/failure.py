"""What a learner sees when a rank does not deliver its result."""


class RankFailure(RuntimeError):
    """A rank failed. `str(failure)` is a message for a learner.

    rank:   the rank that failed first; None if the call never reached the ranks
    kind:   'exception', 'exit', 'signal', 'timeout', 'mismatch', 'pickle' or 'lost'
    line:   line number in the learner's cell or file, None where there is none
    error:  name of the exception's type ("ZeroDivisionError"), None for the other kinds
    ranks:  a state in words for each rank, by rank
    """

    def __init__(self, message, rank=None, kind="exception", line=None, error=None, ranks=()):
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.line = line
        self.error = error
        self.ranks = list(ranks)

    def __reduce__(self):
        return RankFailure, (
            str(self), self.rank, self.kind, self.line, self.error, self.ranks
        )  # fmt: skip

    def _render_traceback_(self):
        # IPython shows an exception exactly as this method renders it: the message alone,
        # without the frames of this package.
        return [f"RankFailure: {self}"]
