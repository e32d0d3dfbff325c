"""The checks of chapter 09: checkpoint files, an elastic sampler, a complete state, the interval
between checkpoints, and the limits of an elastic run.

Nothing here depends on when something happens. A save is torn at a byte: the rank lowers the limit
on the size of its files, and the system ends it when it writes beyond. Order is read from recorded
calls: of `os.fsync`, of a rename, of a collective.

Nothing that shapes a result belongs to a rank, here and in `cluster/train.py`: order, dropout in the
chapter, and the count of used samples belong to the global batch and to the checkpoint.
"""
