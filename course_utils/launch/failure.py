"""What a learner sees when a rank does not deliver its result."""


class RankFailure(RuntimeError):
    """A rank failed. `str(failure)` is a message for a learner.

    rank:   the rank that failed first
    kind:   'exception', 'exit', 'signal', 'timeout', 'mismatch' or 'pickle'
    line:   line number in the learner's cell or file, or None
    error:  name of the exception's type ("ZeroDivisionError"), or None
    ranks:  a state in words for each rank
    """

    def __init__(self, message, rank, kind, line=None, error=None, ranks=()):
        super().__init__(message)
        self.rank = rank
        self.kind = kind
        self.line = line
        self.error = error
        self.ranks = list(ranks)

    def _render_traceback_(self):
        # IPython shows an exception exactly as this method renders it: the message alone,
        # without the stack of the helper package.
        return [f"RankFailure: {self}"]
