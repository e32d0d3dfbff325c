"""Threads that call as well, and code that torch.compile has taken over."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from course_utils.hardware import device
from tests.reports.corpus import PASSES, report


@report(
    "NVIDIA/nccl#1192",
    "pytorch/pytorch#175145",
    says=("broadcast", "all_reduce", "rank 0", "rank 1"),
)
def thread_in_another_order(rank):
    t = torch.ones(2, device=device())
    log = threading.Thread(target=lambda: dist.broadcast(t, src=1))  # <- here
    if rank == 0:
        log.start()
        time.sleep(1)
    dist.all_reduce(torch.ones(4, device=device()))  # <- here
    if rank == 1:
        log.start()
    log.join()


@report("pytorch/pytorch#115861", says=PASSES)
def objects_gathered_by_a_pool(rank):
    def gather():
        out = [None, None]
        dist.gather_object(rank, out if rank == 0 else None)
        return out

    with ThreadPoolExecutor(max_workers=1) as pool:
        out = pool.submit(gather).result()
    assert rank or out == [0, 1]


@report("KempnerInstitute/KempnerForge#104", says=("barrier", "all_gather", "rank 0", "rank 1"))
def saves_in_the_background(rank):
    t = torch.ones(1, device=device())

    def save():
        time.sleep(1 - rank)
        dist.all_gather([torch.empty_like(t) for _ in range(2)], t)  # <- here

    thread = threading.Thread(target=save)
    thread.start()
    time.sleep(0.5)
    dist.barrier()  # <- here
    thread.join()


@report(
    "pytorch/pytorch#130935",
    "pytorch/pytorch#155558",
    says=("all_reduce", "rank 0", "rank 1 finished"),
)
def compiled_branch(rank):
    @torch.compile(backend="eager")
    def step(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    x = torch.ones(2, device=device())
    if rank == 0:
        step(x).sum().item()  # <- here


@report("pytorch/pytorch#108780", says=PASSES)
def compiled_on_all(rank):
    @torch.compile(backend="eager")
    def step(x):
        return funcol.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    assert step(torch.ones(2, device=device())).tolist() == [5, 5]
