"""Ranks that wait for ever or do not end: found, told apart from ranks that are slow.

The rows of the fault table that take seconds run at the same time, from threads, which launch
allows; `soak_launch.py` runs them one by one.
"""

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from fault_table import FAULTS
from leftovers import nothing_left
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from course_utils.launch import RankFailure, launch, supervise

HANGS = {fault.fn.__name__: fault for fault in FAULTS if fault.kind == "timeout"}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What launch raised for each hang, and after how many seconds."""
    folder = tmp_path_factory.mktemp("hangs")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        with nothing_left(folder), ThreadPoolExecutor(4) as pool:
            outcomes = pool.map(_provoke, HANGS.values())
            return dict(zip(HANGS, outcomes))
    finally:
        tempfile.tempdir = before


def _provoke(fault):
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        launch(fault.fn, fault.nprocs, timeout=fault.timeout)
    return caught.value, time.monotonic() - start


@pytest.mark.parametrize("name", HANGS)
def test_hang(name, failures):
    failure, seconds = failures[name]
    HANGS[name].check(failure)
    assert seconds < 45  # of a limit of 60: found, not waited for (about 5 on an idle machine)


def test_next_launch_works_after_hangs(failures):
    assert launch(_sum_of_ranks, 2) == [1, 1]


def _sum_of_ranks(rank):
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return total.item()


@pytest.fixture
def impatient(monkeypatch):
    """Makes launch take ranks for stuck far sooner, so that a mistake shows in seconds."""
    monkeypatch.setattr(supervise, "_STILL", 0.4)
    monkeypatch.setattr(supervise, "_BRIEFLY", 0.2)
    monkeypatch.setattr(supervise, "_TICK", 0.1)


def _sleeps_before_the_barrier(rank):
    if rank == 1:
        time.sleep(2.5)
    dist.barrier()
    return rank


def _computes_before_the_barrier(rank):
    if rank == 1:
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)
    dist.barrier()
    return rank


def _waits_for_a_thread(rank):
    """The other thread sleeps and then makes the call that the rest waits for."""
    group = dist.new_group([0, 1])
    if rank == 1:
        thread = threading.Thread(target=_late_barrier, args=[group])
        thread.start()
    if rank == 0:
        dist.barrier(group)
    dist.barrier()
    if rank == 1:
        thread.join()
    return rank


def _late_barrier(group):
    time.sleep(2.5)
    dist.barrier(group)


def _all_sleep(rank):
    time.sleep(2.5)
    return rank


def _always_in_a_call(rank):
    """Wherever one looks, both ranks are in the same call, but in another one each time."""
    end = time.monotonic() + 2.5
    again = torch.ones(1_000_000)
    while again[0] > 0:
        again.fill_(float(time.monotonic() < end))
        dist.all_reduce(again, op=dist.ReduceOp.MIN)
    return rank


def _many_small_calls(rank):
    end = torch.tensor(time.monotonic() + 2.5, dtype=torch.float64)
    dist.broadcast(end, 0)
    again = torch.tensor(1)
    while again:
        again.fill_(time.monotonic() < end.item())
        dist.broadcast(again, 0)
        time.sleep(0.05)
    return rank


@pytest.mark.parametrize(
    "fn",
    [
        _sleeps_before_the_barrier,
        _computes_before_the_barrier,
        _waits_for_a_thread,
        _all_sleep,
        _always_in_a_call,
        _many_small_calls,
    ],
    ids=lambda fn: fn.__name__.strip("_"),
)
def test_slow_is_not_stuck(fn, impatient):
    assert launch(fn, 2) == [0, 1]


def _uneven_batches(rank):
    """DDP with Join: the rank that is done shadows the calls that the other's backward makes."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    with Join([model]):
        for _ in range(3 + 2 * rank):
            model(torch.ones(1, 4)).sum().backward()
    return rank


def test_join_is_no_mismatch():
    assert launch(_uneven_batches, 3) == [0, 1, 2]
