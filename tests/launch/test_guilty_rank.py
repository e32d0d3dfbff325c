"""Each kind of fault with the guilty rank 0, 1 and the last one: what is said must not depend on its number.

The programs are run at the same time, from threads, which launch allows.
"""

import inspect
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from course_utils.launch import RankFailure
from tests.support.on_gloo import launch

RANKS = 3
HERE = "# <- here"
TABLE: dict[str, tuple[Callable, tuple[str, ...]]] = {}


def says(*words: str):
    """Registers a program whose failure has to have these words, with {guilty} and {other} in them, and
    to quote its line that ends with HERE."""

    def register(fn):
        TABLE[fn.__name__] = fn, words
        return fn

    return register


def ones(*size: int) -> torch.Tensor:
    return torch.ones(*(size or (1,)))


def other(guilty: int) -> int:
    return (guilty + 1) % RANKS


@says(
    "rank {guilty} raised OSError: disk full",
    "After that it called barrier, in an except or finally",
)
def raises_and_goes_on_in_finally(rank, guilty):
    try:
        if rank == guilty:
            raise OSError("disk full")  # <- here
        dist.all_reduce(ones())
    finally:
        dist.barrier()


@says(
    "rank {guilty} raised RuntimeError: no config, which was caused by KeyError: 'shards'",
    "After that it called barrier, in an except or finally",
)
def raises_from_another_and_goes_on(rank, guilty):
    try:
        if rank == guilty:
            try:
                {}["shards"]
            except KeyError as error:
                raise RuntimeError("no config") from error  # <- here
        dist.all_reduce(ones())
    finally:
        dist.barrier()


class TakesLongToTell:
    """What an error says. It is asked for after it was raised, and the other ranks raise before it is told."""

    def __str__(self):
        dist.distributed_c10d._get_default_store().set("raised", "yes")
        be_busy(0.2)
        return "corrupt shard"


def be_busy(seconds):
    """A rank that sleeps is not waited for, after another has failed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@says("rank {guilty} raised ValueError: corrupt shard", "RuntimeError: no data")
def raises_first(rank, guilty):
    if rank == guilty:
        raise ValueError(TakesLongToTell())  # <- here
    dist.distributed_c10d._get_default_store().wait(["raised"])
    be_busy(0.1)
    raise RuntimeError("no data")


@says("rank {guilty} called sys.exit(3)")
def exits(rank, guilty):
    if rank == guilty:
        sys.exit(3)  # <- here
    dist.barrier()


@says("rank {guilty} was killed by SIGKILL")
def is_killed(rank, guilty):
    if rank == guilty:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@says("wait in all_reduce", "rank {guilty} finished without calling it")
def leaves_out_a_call(rank, guilty):
    if rank != guilty:
        dist.all_reduce(ones())  # <- here


@says("rank {guilty} waits in full_tensor", "finished without calling it", "is a call of all ranks")
def gathers_a_shard_alone(rank, guilty):
    model = fully_shard(nn.Linear(8, 8))
    if rank == guilty:
        model.weight.full_tensor()  # <- here


@says("rank {guilty} waits in full_tensor", "finished without calling it")
def reads_a_dtensor_alone(rank, guilty):
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,))
    tensor = distribute_tensor(ones(6), mesh, [Shard(0)])
    if rank == guilty:
        tensor.mean().full_tensor()  # <- here


@says("rank {guilty} waits in the broadcast of Distributed", "finished without", "model.module(x)")
def evaluates_alone(rank, guilty):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    if rank == guilty:
        model.eval()(ones(8, 4))  # <- here


@says("wait in the all_reduce of backward", "rank {guilty} finished without", "model.join()")
def has_a_batch_less(rank, guilty):
    model = DistributedDataParallel(nn.Linear(2, 1))
    for _ in range(4 - (rank == guilty)):
        loss = model(ones(1, 2)).sum()
        loss.backward()  # <- here


@says("the ranks' calls do not match", "rank {guilty}: all_reduce of int32 [4]")
def adds_other_numbers_long_ago(rank, guilty):
    dist.all_reduce(ones(4).to(torch.int32 if rank == guilty else torch.float32))  # <- here
    for _ in range(300):
        dist.all_reduce(ones())


@says("rank {guilty}: all_to_all_single sends [1, 1, 1] rows", "of int32")
def exchanges_other_numbers(rank, guilty):
    rows = ones(RANKS).to(torch.int32 if rank == guilty else torch.float32)
    dist.all_to_all_single(torch.empty_like(rows), rows)  # <- here


@says("rank {guilty}: broadcast of float32 [1] from rank {guilty}", "name the same src")
def broadcasts_its_own(rank, guilty):
    dist.broadcast(ones(), guilty if rank == guilty else other(guilty))  # <- here


@says(
    "rank {guilty}: all_reduce of float32 [1]", "finished without calling it", "no rank has waited"
)
def calls_and_does_not_wait(rank, guilty):
    if rank == guilty:
        dist.all_reduce(ones(), async_op=True)  # <- here


@says("rank {guilty}: send of float32 [1] to rank {other}", "finished without receiving it")
def sends_to_nobody(rank, guilty):
    if rank == guilty:
        dist.isend(ones(), other(guilty))  # <- here


@says("rank {other} waits in recv from rank {guilty}", "rank {guilty} finished without sending it")
def leaves_out_a_send_of_a_batch(rank, guilty):
    here, left = ones(), ones()
    works = [dist.irecv(left, (rank - 1) % RANKS)]
    works += [dist.isend(here, other(rank))] if rank != guilty else []
    for work in works:
        work.wait()  # <- here


@says("rank {guilty} finished without calling it", "called there before: all have")
def stops_a_step_early(rank, guilty):
    for step in range(3):
        if (rank, step) == (guilty, 2):
            break
        dist.all_reduce(ones())  # <- here


@says("wait in all_reduce", "different groups: all ranks have")
def uses_its_groups_in_another_order(rank, guilty):
    groups = [dist.new_group(), dist.new_group()]
    for group in groups[:: -1 if rank == guilty else 1]:
        dist.all_reduce(ones(), group=group)


@says("rank {guilty} waits in the store for 'ready'", "finished without setting it")
def waits_for_a_key(rank, guilty):
    if rank == guilty:
        dist.distributed_c10d._get_default_store().wait(["ready"])  # <- here


@says("The first that they did not", "rank {guilty}: barrier", "(rank {guilty} never called there)")
def leaves_out_one_of_many(rank, guilty):
    if rank != guilty:
        dist.barrier()
    dist.barrier()
    dist.all_reduce(ones())  # <- here


@says("rank {guilty} waits in recv from rank {other}", "finished without sending it")
def waits_in_a_thread(rank, guilty):
    if rank == guilty:
        thread = threading.Thread(target=lambda: dist.recv(ones(), other(guilty)))  # <- here
        thread.start()
        thread.join()


@says("rank {guilty} called destroy_process_group while other ranks still communicated")
def leaves_early(rank, guilty):
    dist.barrier()
    if rank == guilty:
        dist.destroy_process_group()  # <- here
    else:
        dist.all_reduce(ones())


@says("wait in init_process_group", "rank {guilty} finished without calling it")
def makes_no_second_world(rank, guilty):
    dist.destroy_process_group()
    if rank != guilty:
        dist.init_process_group("gloo")  # <- here


@says("wait in all_reduce", "rank {guilty} finished")
def makes_no_call_in_the_second_world(rank, guilty):
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    if rank != guilty:
        dist.all_reduce(ones())  # <- here


@says("rank {other} was killed by SIGABRT", "does not match what this rank was to receive")
def leaves_another_message_to_who_takes_any(rank, guilty):
    if rank == other(guilty):
        dist.recv(ones(2))  # <- here
        dist.recv(ones(300_000))
    elif rank != guilty:
        dist.send(ones(300_000), other(guilty))


@says("rank {guilty} was running when the time was up", "all_reduce of float32 [1], lacks")
def asks_again_and_again(rank, guilty):
    if rank == guilty:
        work = dist.all_reduce(ones(), async_op=True)
        while not work.is_completed():
            time.sleep(0.01)  # <- here


@says("newest call of rank {guilty}, barrier, lacks", "was waiting in barrier")
def meets_none_since_others_look_for_a_file(rank, guilty):
    while rank != guilty and not os.path.exists("/nowhere/ready"):
        time.sleep(0.01)
    dist.barrier()  # <- here


@says(
    "rank {guilty} raised LookupError: page 7",
    "has ended its thread feeder",
    "rank {guilty} finished without calling it",
    "wait in all_reduce, in a thread",
)
def raises_in_a_thread(rank, guilty):
    def work():
        if rank == guilty:
            raise LookupError("page 7")  # <- here
        dist.all_reduce(ones(), group=group)

    group = dist.new_group()
    thread = threading.Thread(target=work, name="feeder")
    thread.start()
    dist.barrier()
    thread.join()


@says("rank {guilty} raised LookupError: page 7", "ended its thread feeder", "for another thread")
def raises_in_the_thread_that_feeds_it(rank, guilty):
    def feed():
        if rank == guilty:
            raise LookupError("page 7")  # <- here
        pages.put(7)

    pages = queue.Queue()
    threading.Thread(target=feed, name="feeder").start()
    pages.get()
    dist.barrier()


@says(
    "Before, rank {guilty} caught LookupError: page 7 (test_guilty_rank", "all_reduce, in a thread"
)
def raises_in_a_pool_that_nobody_asks(rank, guilty):
    def work():
        if rank == guilty:
            raise LookupError("page 7")
        dist.all_reduce(ones(), group=group)

    group = dist.new_group()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work)


@says("no other rank will make", "rank {guilty} waits at a socket", "wait in barrier")
def is_not_answered(rank, guilty):
    server = socket.create_server(("127.0.0.1", 0))
    address = [server.getsockname()]
    dist.broadcast_object_list(address, src=other(guilty))
    if rank == guilty:
        socket.create_connection(address[0]).recv(1)  # <- here
    dist.barrier()


@says("rank {guilty} waits at a socket", "wait in barrier")
def is_not_called(rank, guilty):
    server = socket.create_server(("127.0.0.1", 0))
    if rank == guilty:
        server.accept()  # <- here
    dist.barrier()


# what is said when half of the limit has passed, or all of it
LONG = (
    "makes_no_second_world",
    "asks_again_and_again",
    "meets_none_since_others_look_for_a_file",
    "raises_in_the_thread_that_feeds_it",
    "is_not_called",
)
CASES = [(name, guilty) for name in TABLE for guilty in range(RANKS)]


@pytest.fixture(scope="module")
def failures() -> dict:
    def provoke(case):
        name, guilty = case
        limit = {"timeout": 6.0} if name in LONG else {}
        with pytest.raises(RankFailure) as caught:
            launch(TABLE[name][0], RANKS, guilty, **limit)
        return caught.value

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(CASES, pool.map(provoke, CASES)))


@pytest.mark.parametrize(("name", "guilty"), CASES)
def test_what_is_said_does_not_depend_on_the_rank(name, guilty, failures):
    fn, words = TABLE[name]
    message = str(failures[name, guilty])
    for each in words:
        assert each.format(guilty=guilty, other=other(guilty)) in message, message
    lines = [line.strip() for line in inspect.getsource(fn).splitlines() if HERE in line]
    assert not lines or any(line in message for line in lines), message
