"""The ways in which a rank can fail, and what the learner has to get for each.

One table for two users: the tests run each row once, `soak_launch.py` runs all of them again and
again. Each row's function is written as a learner would write it in a cell; the line that the
failure has to name carries the comment `# <- here`.
"""

import ctypes
import inspect
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from course_utils.launch import RankFailure
from tests.support import reference_page

HERE = "# <- here"
FAULTS: list["Fault"] = []
_EXIT = "before it returned"
_ALL = "Every rank of a group has to make the same collective calls"
_BOTH = "Every send needs a recv"


@dataclass(frozen=True)
class Fault:
    """What `launch(fn, nprocs)` has to raise: its fields, and words of its message."""

    fn: Callable
    nprocs: int
    kind: str
    rank: int | None
    says: tuple[str, ...]
    error: str | None = None
    timeout: float = 60.0

    @property
    def lines(self) -> list[int | None]:
        """The numbers of the lines that the failure may name."""
        lines, first = inspect.getsourcelines(self.fn)
        return [first + i for i, line in enumerate(lines) if HERE in line] or [None]

    def check(self, failure: RankFailure) -> None:
        """Compares what `launch` has raised with this row."""
        message = str(failure)
        got = (failure.kind, failure.rank, failure.error)
        assert got == (self.kind, self.rank, self.error), message
        assert failure.line in self.lines, message
        for words in self.says:
            assert words in message, f"{words!r} is not in: {message}"
        for ours in ("course_utils", "site-packages", "Traceback"):
            assert ours not in message
        assert reference_page.tells(message), f"no row of the quick reference tells: {message}"
        assert len(failure.ranks) == (0 if self.rank is None else self.nprocs)


def fault(nprocs, kind, rank, *says, error=None, timeout=60.0):
    """Registers the function below it as a row of the table."""

    def register(fn):
        FAULTS.append(Fault(fn, nprocs, kind, rank, says, error, timeout))
        return fn

    return register


# --- a rank raises ----------------------------------------------------------------------------


@fault(
    2,
    "exception",
    1,
    "rank 1 raised ValueError: no data for this rank",
    'raise ValueError("no data',
    "barrier",
    error="ValueError",
)
def raises(rank):
    if rank == 1:
        raise ValueError("no data for this rank")  # <- here
    dist.barrier()


@fault(
    2,
    "exception",
    1,
    "ZeroDivisionError",
    "in share:  return total / ranks",
    "share(10, 0)",
    error="ZeroDivisionError",
)
def raises_in_nested_function(rank):
    def share(total, ranks):
        return total / ranks  # <- here

    if rank == 1:
        share(10, 0)
    dist.barrier()


@fault(
    2,
    "exception",
    0,
    "ArithmeticError: no gradient",
    'raise ArithmeticError("no gradient")',
    ".backward()",
    error="ArithmeticError",
)
def raises_in_backward(rank):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("no gradient")  # <- here

    x = torch.ones(3, requires_grad=True)
    Doubled.apply(x).sum().backward()


@fault(
    2,
    "exception",
    0,
    "rank 0 raised RuntimeError",
    "y.sum().backward()",
    "rank 1 was waiting in barrier",
    error="RuntimeError",
)
def overwrites_what_backward_needs(rank):
    y = torch.ones(3, requires_grad=True).exp()
    if rank == 0:
        y += 1
        y.sum().backward()  # <- here
    dist.barrier()


@fault(
    3,
    "exception",
    0,
    "rank 0 raised KeyError: 'weights'",
    "ranks 1 and 2 raised KeyError",
    error="KeyError",
)
def all_raise(rank):
    raise KeyError("weights")  # <- here


@fault(2, "exception", 0, "rank 0 raised", "dist.all_reduce([1, 2, 3])", error="TypeError")
def no_text_of_ours(rank):
    dist.all_reduce([1, 2, 3])  # <- here


@fault(
    2,
    "exception",
    1,
    "rank 1 raised ValueError: no data",
    "After that it called barrier, in an except or finally block",
    "rank 0: all_reduce of float32 [3]",
    error="ValueError",
)
def meets_the_others_in_except(rank):
    try:
        if rank == 1:
            raise ValueError("no data")  # <- here
        dist.all_reduce(torch.ones(3))
    except ValueError:
        dist.barrier()


class _LosesAWorker(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(3)


@fault(
    2,
    "exception",
    1,
    "rank 1 raised RuntimeError: a worker process of the DataLoader has ended",
    "for _ in DataLoader",
    "rank 0 was waiting in barrier",
    error="RuntimeError",
)
def loses_a_worker_of_its_loader(rank):
    if rank == 1:
        for _ in DataLoader(_LosesAWorker(), num_workers=2):  # <- here
            pass
    dist.barrier()


@fault(2, "exception", 0, "a rank has no keyboard: ask in the cell", error="RuntimeError")
def asks_for_input(rank):
    input("name? ")  # <- here


@fault(2, "exception", 0, "a rank has no keyboard for a debugger", error="RuntimeError")
def starts_the_debugger(rank):
    breakpoint()  # noqa: T100  # <- here


# --- a rank exits or is killed ------------------------------------------------------------------


@fault(2, "exit", 0, "called sys.exit(3)", _EXIT, "sys.exit(3)  #")
def calls_sys_exit(rank):
    if rank == 0:
        sys.exit(3)  # <- here
    dist.barrier()


@fault(2, "exit", 1, "rank 1 ended with exit code 3", _EXIT, "lost its")
def calls_os_exit(rank):
    if rank == 1:
        os._exit(3)
    dist.barrier()


@fault(2, "exit", 1, "rank 1 ended with exit code 0", _EXIT)
def exits_with_zero(rank):
    if rank == 1:
        os._exit(0)
    dist.barrier()


@fault(
    3, "signal", 1, "rank 1 was killed by SIGKILL", "ranks 0 and 2 lost their connection in barrier"
)
def is_killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@fault(2, "signal", 1, "rank 1 was killed by SIGSEGV", "ctypes.string_at(0)")
def uses_bad_memory(rank):
    if rank == 1:
        ctypes.string_at(0)  # <- here
    dist.barrier()


@fault(2, "signal", 1, "rank 1 was killed by SIGABRT", "os.abort()")
def aborts(rank):
    if rank == 1:
        os.abort()  # <- here
    dist.barrier()


# --- a rank that does not come ------------------------------------------------------------------


@fault(
    4,
    "timeout",
    0,
    "ranks 0, 2 and 3 wait in all_reduce",
    "dist.all_reduce(t)",
    "rank 1 finished without calling it",
    _ALL,
)
def skips_a_collective(rank):
    t = torch.ones(3)
    if rank != 1:
        dist.all_reduce(t)  # <- here


@fault(2, "timeout", 0, "rank 0 waits in all_reduce", "rank 1 finished without calling it", _ALL)
def all_reduce_under_if_rank_0(rank):
    loss = torch.ones(())
    dist.barrier()
    if rank == 0:
        dist.all_reduce(loss)  # <- here
        print("loss", loss.item())


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in all_reduce",
    "work.wait()",
    "rank 1 finished without calling it",
)
def waits_for_an_asynchronous_call(rank):
    t = torch.ones(3)
    if rank == 0:
        work = dist.all_reduce(t, async_op=True)
        work.wait()  # <- here


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in the all_reduce of backward",
    "rank 1 finished without calling it",
)
def skips_backward(rank):
    model = DistributedDataParallel(torch.nn.Linear(3, 3))
    if rank == 0:
        model(torch.ones(2, 3)).sum().backward()  # <- here


@fault(
    3,
    "timeout",
    2,
    "rank 0 finished without calling it",
    "rank 1 finished\n",
    "rank 2 waits in all_reduce",
)
def skips_in_a_smaller_group(rank):
    group = dist.new_group([0, 2])
    if rank == 2:
        dist.all_reduce(torch.ones(3), group=group)  # <- here


@fault(
    2,
    "timeout",
    1,
    "rank 0 finished without calling it",
    "rank 1 waits in the broadcast of DistributedDataParallel's forward",
    "model.join()",
)
def has_one_batch_less(rank):
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    for _ in range(1 + rank):
        model(torch.ones(1, 2)).sum().backward()  # <- here


@fault(
    2, "timeout", 0, "rank 0 waits in send to rank 1", "rank 1 finished without receiving it", _BOTH
)
def sends_without_a_receive(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)  # <- here


@fault(
    2, "timeout", 0, "rank 0 waits in recv from rank 1", "rank 1 finished without sending it", _BOTH
)
def receives_without_a_send(rank):
    if rank == 0:
        dist.recv(torch.ones(3), 1)  # <- here


@fault(
    2, "timeout", 0, "rank 0 waits in recv from any rank", "rank 1 finished without sending", _BOTH
)
def receives_from_anyone_without_a_send(rank):
    if rank == 0:
        dist.recv(torch.ones(3))  # <- here


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in recv from rank 1",
    "rank 1 waits in recv from rank 0",
    _BOTH,
    "Where both receive first, nobody sends",
)
def both_receive_first(rank):
    t = torch.ones(3)
    dist.recv(t, 1 - rank)  # <- here
    dist.send(t, 1 - rank)


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in recv from rank 1 with tag 2",
    "rank 1 waits in send to rank 0 with tag 1",
    _BOTH,
    "sent and received with the same tag",
)
def different_tags(rank):
    if rank == 0:
        dist.recv(torch.ones(3), 1, tag=2)  # <- here
    else:
        dist.send(torch.ones(3), 0, tag=1)


@fault(
    4,
    "timeout",
    0,
    "ranks 0, 1 and 2 wait in all_reduce",
    "rank 3 finished without calling it",
)
def has_its_own_use_for_sigusr1(rank):
    handler = (signal.SIG_DFL, signal.SIG_IGN, lambda *_: None, signal.SIG_DFL)[rank]
    signal.signal(signal.SIGUSR1, handler)
    if rank != 3:
        dist.all_reduce(torch.ones(3))  # <- here


@fault(
    2, "timeout", 0, "rank 0 waits in recv from rank 1", "rank 1 finished without sending it", _BOTH
)
def has_a_heartbeat(rank):
    beats = []

    def beat():
        while True:
            beats.append(f"{time.time():.1f}")
            time.sleep(0.1)

    threading.Thread(target=beat, daemon=True).start()
    if rank == 0:
        dist.recv(torch.ones(3), 1)  # <- here


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in barrier",
    "rank 1 finished without calling it",
)
def has_an_idle_pool(rank):
    pool = ThreadPoolExecutor(2)
    pool.submit(len, "abc").result()
    if rank == 0:
        dist.barrier()  # <- here


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in all_reduce, in a thread that its main thread waits for",
    "rank 1 finished without calling it",
    _ALL,
)
def joins_a_thread_that_waits(rank):
    def add():
        dist.all_reduce(torch.ones(3))  # <- here

    if rank == 0:
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in recv from rank 1 with tag 2, in a thread",
    "rank 1 waits in send to rank 0 with tag 1",
    _BOTH,
)
def waits_for_the_result_of_a_thread(rank):
    with ThreadPoolExecutor(1) as pool:
        if rank == 0:
            pool.submit(dist.recv, torch.ones(3), 1, tag=2).result()  # <- here
    if rank == 1:
        dist.send(torch.ones(3), 0, tag=1)


@fault(
    2,
    "timeout",
    0,
    "rank 0 waits in monitored_barrier",
    "rank 1 finished without calling it",
)
def monitored_barrier_under_if_rank_0(rank):
    if rank == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=300))  # <- here


@fault(
    2,
    "exception",
    1,
    "rank 1 raised ValueError: no data",
    "After that it called all_gather, in an except or finally block",
    "a rank waits for a call that no other rank will make.",
    "rank 0 finished without calling it",
    error="ValueError",
)
def waits_after_an_exception(rank):
    try:
        if rank == 1:
            raise ValueError("no data")  # <- here
    finally:
        if rank == 1:
            dist.all_gather([torch.ones(1)] * 2, torch.ones(1))


@fault(
    2,
    "mismatch",
    1,
    "rank 1 called destroy_process_group while other ranks still communicated",
    "rank 0 was waiting in all_reduce",
    "all ranks have to be done before any rank calls it",
)
def leaves_before_the_others(rank):
    dist.barrier()
    if rank == 1:
        dist.destroy_process_group()  # <- here
    else:
        dist.all_reduce(torch.ones(3))


@fault(
    3,
    "mismatch",
    2,
    "rank 2 called destroy_process_group while other ranks still communicated",
    "rank 0 finished; rank 1 was waiting in recv from rank 2",
)
def leaves_a_smaller_group(rank):
    group = dist.new_group([1, 2])
    if rank == 2:
        dist.destroy_process_group()  # <- here
    if rank == 1:
        dist.recv(torch.ones(3), 2, group=group)


@fault(
    3,
    "exception",
    0,
    "rank 0 raised",
    "get_world_size()",
    "ranks 1 and 2 finished",
    error="ValueError",
)
def goes_on_after_it_has_left(rank):
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        dist.get_world_size()  # <- here


# --- messages to a rank that is not there ---------------------------------------------------------


@fault(
    2,
    "exception",
    1,
    "there is no rank 2: the ranks of the group are 0 to 1",
    "dist.send(torch.ones(3), rank + 1)",
    error="ValueError",
)
def sends_past_the_end(rank):
    if rank == 0:
        dist.send(torch.ones(3), rank + 1)
    else:
        dist.recv(torch.ones(3), rank - 1)
        dist.send(torch.ones(3), rank + 1)  # <- here


@fault(
    3,
    "exception",
    2,
    "there is no rank 2: the ranks of the group are 0 to 1",
    error="ValueError",
)
def counts_as_the_world_does(rank):
    group = dist.new_group([1, 2])
    if rank == 2:
        dist.recv(torch.ones(3), group=group, group_src=rank)  # <- here


@fault(
    2,
    "exception",
    0,
    "rank 0 names itself as the other end of a message",
    "rank 1 was waiting in recv from rank 0",
    error="ValueError",
)
def receives_from_itself(rank):
    dist.recv(torch.ones(3), 0)  # <- here


# --- calls that do not match --------------------------------------------------------------------


@fault(
    2,
    "mismatch",
    1,
    "rank 0: all_reduce of float32 [3]",
    "rank 1: broadcast of float32 [3] from rank 0",
    _ALL,
)
def different_collectives(rank):
    t = torch.ones(3)
    if rank == 0:
        dist.all_reduce(t)
    else:
        dist.broadcast(t, 0)  # <- here


@fault(
    3,
    "mismatch",
    2,
    "rank 0: all_reduce of float32 [3]",
    "rank 1: all_reduce of float32 [4]",
    "rank 2",
)
def different_shapes(rank):
    dist.all_reduce(torch.ones(3 + rank))  # <- here


@fault(
    2,
    "mismatch",
    1,
    "rank 0: all_reduce of float32 [10]",
    "rank 1: all_reduce of float32 [1000000]",
)
def very_different_shapes(rank):
    dist.all_reduce(torch.ones(10 ** (1 + 5 * rank)))  # <- here


@fault(
    2,
    "mismatch",
    1,
    "rank 0: all_to_all_single sends [3, 1] rows to ranks [0, 1], and expects [3, 1]",
    "rank 1: all_to_all_single sends [2, 2] rows to ranks [0, 1], and expects [2, 2]",
    "has to expect from each other one as many rows as that one",
)
def splits_that_contradict_each_other(rank):
    splits = [3 - rank, 1 + rank]
    dist.all_to_all_single(torch.ones(4), torch.ones(4), splits, splits)  # <- here


@fault(
    3,
    "mismatch",
    1,
    "ranks 0 and 2: all_reduce of float32 [3]",
    "rank 1: all_reduce of float64 [3]",
)
def different_dtypes(rank):
    dtype = torch.float64 if rank == 1 else torch.float32
    dist.all_reduce(torch.ones(3, dtype=dtype))  # <- here


@fault(
    3, "mismatch", 1, "ranks 0 and 2: all_reduce of float32 [3]", "rank 1: all_reduce of int32 [3]"
)
def different_dtypes_of_one_size(rank):
    dtype = torch.int32 if rank == 1 else torch.float32
    dist.all_reduce(torch.ones(3, dtype=dtype))  # <- here


@fault(
    2,
    "mismatch",
    1,
    "rank 0: all_reduce of float32",
    "dist.all_reduce(a)",
    "rank 1: broadcast of float32",
)
def different_orders(rank):
    a, b = torch.ones(3), torch.ones(3)
    if rank == 1:
        dist.broadcast(b, 0)  # <- here
        dist.all_reduce(a)
    else:
        dist.all_reduce(a)
        dist.broadcast(b, 0)


@fault(
    2,
    "mismatch",
    1,
    "rank 0: broadcast of float32 [3] from rank 0",
    "rank 1: broadcast",
    "from rank 1",
)
def different_roots(rank):
    dist.broadcast(torch.ones(3), src=rank)  # <- here


@fault(
    2,
    "mismatch",
    1,
    "rank 0: send of float32 [3] to rank 1",
    "rank 1: recv of float32 [2] from rank 0",
)
def receives_less_than_was_sent(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(2), 0)  # <- here


@fault(
    3,
    "mismatch",
    1,
    "ranks 0 and 2: all_reduce with SUM of float32 [3]",
    "rank 1: all_reduce with MAX of float32 [3]",
    "the same reduce operation",
)
def different_operations(rank):
    operation = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM
    dist.all_reduce(torch.ones(3), op=operation)  # <- here


@fault(
    4,
    "mismatch",
    3,
    "ranks 0 and 1: new_group of ranks [0, 1]",
    "ranks 2 and 3: new_group of ranks [2, 3]",
    "Every rank has to make every group",
)
def each_half_makes_its_own_group(rank):
    half = [0, 1] if rank < 2 else [2, 3]
    group = dist.new_group(half)  # <- here
    dist.all_reduce(torch.ones(3), group=group)


@fault(
    4,
    "mismatch",
    0,
    "rank 0: new_group of ranks [0, 2]",
    "ranks 1, 2 and 3: new_group of ranks [0, 1]",
    "Every rank has to make every group",
)
def finishes_although_its_groups_are_crossed(rank):
    rows, columns = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    groups = {}
    for ranks in columns + rows if rank == 0 else rows + columns:
        groups[tuple(ranks)] = dist.new_group(ranks)  # <- here
    for ranks in sorted(groups):
        if rank in ranks:
            dist.all_reduce(torch.tensor(10**rank), group=groups[ranks])


# --- endless work -------------------------------------------------------------------------------


@fault(
    2,
    "timeout",
    1,
    "rank 1 was running when the time was up (timeout=2",
    "barrier",
    timeout=2.0,
)
def loops_in_python(rank):
    if rank == 1:
        # On one line: a loop of two is found in the one or the other.
        [one for one in itertools.repeat(1) if not one]  # <- here
    dist.barrier()


@fault(2, "timeout", 1, "rank 1 was running when the time was up", "multi_dot", timeout=3.0)
def multiplies_for_minutes(rank):
    if rank == 1:
        a = torch.ones(6000, 6000)
        torch.linalg.multi_dot([a] * 60)  # <- here
    dist.barrier()


@fault(
    2,
    "timeout",
    1,
    "rank 1 was running when the time was up",
    "sum(itertools.repeat(1))",
    timeout=2.0,
)
def loops_in_c(rank):
    if rank == 1:
        sum(itertools.repeat(1))  # <- here
    dist.barrier()


@fault(2, "timeout", 1, "rank 1 was running when the time was up", "time.sleep(1000)", timeout=2.0)
def sleeps(rank):
    if rank == 1:
        time.sleep(1000)  # <- here
    dist.barrier()


@fault(2, "timeout", 1, "rank 1 was stopped when the time was up", "barrier", timeout=2.0)
def stops_itself(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


# --- what cannot be pickled ---------------------------------------------------------------------


@fault(2, "pickle", 0, "the return value['locks'][0] (lock)", "cannot pickle '_thread.lock' object")
def returns_a_lock(rank):
    return {"loss": 1.0, "locks": [threading.Lock()]}


@fault(2, "pickle", 0, "the return value[1] (lock)", "cannot pickle '_thread.lock' object")
def returns_a_lock_in_a_circle(rank):
    circle = []
    circle += [circle, threading.Lock()]
    return circle


@fault(2, "pickle", 0, "the return value (list)", "its parts lie too deep in each other")
def returns_a_lock_far_down(rank):
    value = [threading.Lock()]
    for _ in range(100_000):
        value = [value]
    return value


@fault(2, "pickle", 0, "the return value['model'] (Distributed", "return model.module")
def returns_a_wrapped_model(rank):
    return {"model": DistributedDataParallel(torch.nn.Linear(2, 2))}


@fault(2, "pickle", 0, "the return value (DTensor)", "return x.to_local()")
def returns_a_dtensor(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    return distribute_tensor(torch.ones(4), mesh, [Shard(0)])


@fault(2, "pickle", 0, "the return value (generator)")
def returns_a_generator(rank):
    yield rank


def _closure():
    lock = threading.Lock()

    @fault(2, "pickle", None, "lock, used in uses_a_lock, (lock) cannot be")
    def uses_a_lock(rank):
        with lock:
            return rank

    return uses_a_lock


_closure()
