"""What the functions that a check runs on its ranks have in common."""

import contextlib
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from course_utils.hardware import device


def come_late(rank: int) -> None:
    """Rank 0 is early: if it does not wait for a result, it reads one that has not arrived."""
    if rank > 0:
        time.sleep(0.05)


def finish_device_work() -> None:
    """Waits until this rank's GPU, if it has one, has done what it was told."""
    if device().type == "cuda":
        torch.cuda.current_stream().synchronize()


@contextlib.contextmanager
def waits() -> Iterator[list[dist.Work]]:
    """Yields a list of the calls that somebody has waited for, or asked after, meanwhile."""
    asked: list[dist.Work] = []
    plain = {name: getattr(dist.Work, name) for name in ("wait", "is_completed")}

    def noting(method):
        def noted(work, *args, **kwargs):
            asked.append(work)
            return method(work, *args, **kwargs)

        return noted

    for name, method in plain.items():
        setattr(dist.Work, name, noting(method))
    try:
        yield asked
    finally:
        for name, method in plain.items():
            setattr(dist.Work, name, method)
