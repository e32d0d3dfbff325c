"""What the functions that a check runs on its ranks have in common."""

import time

import torch

from course_utils.hardware import device


def come_late(rank: int) -> None:
    """Rank 0 is early: if it does not wait for a result, it reads one that has not arrived."""
    if rank > 0:
        time.sleep(0.05)


def finish_device_work() -> None:
    """Waits until this rank's GPU, if it has one, has done what it was told."""
    if device().type == "cuda":
        torch.cuda.current_stream().synchronize()
