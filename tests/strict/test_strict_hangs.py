"""Hangs on a device whose calls return at once: the host stops elsewhere, later or never, and the
failure is told as on the CPU. Under NCCL's rules, for want of a GPU."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_utils.comm import host_waits
from course_utils.hardware import device, settle
from course_utils.launch import RankFailure, launch
from tests.support.fault_table import FAULTS
from tests.support.needing_rules import needs_rules

_SHOWN = (
    *(
        "skips_a_collective",
        "waits_for_an_asynchronous_call",
        "skips_backward",
        "has_one_batch_less",
    ),
    *("skips_in_a_smaller_group", "receives_without_a_send", "both_receive_first"),
    *("has_a_heartbeat", "leaves_a_smaller_group"),
)
pytestmark = needs_rules
ROWS = {fault.fn.__name__: fault for fault in FAULTS if fault.fn.__name__ in _SHOWN}


def on_device(rank: int, fn) -> object:
    torch.set_default_device(device())
    return fn(rank)


@pytest.mark.parametrize("name", ROWS)
def test_a_hang_is_told_as_on_the_cpu(name):
    row = ROWS[name]
    with pytest.raises(RankFailure) as caught:
        launch(on_device, row.nprocs, row.fn, rules="nccl")
    row.check(caught.value)


def ones() -> Tensor:
    return torch.ones(2, device=device())


def reads_ten_lines_later(rank: int) -> float:
    total = ones()
    for _ in range(1 + rank):
        dist.all_reduce(total)
    sum(range(1000))
    return (total + 1).sum().item()


def never_reads(rank: int) -> None:
    for _ in range(1 + rank):
        dist.all_reduce(ones())


def both_send_first(rank: int) -> None:
    dist.send(ones(), 1 - rank)
    dist.recv(ones(), 1 - rank)


def groups_crosswise(rank: int) -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups[:: 1 - 2 * rank]:
        dist.all_reduce(ones(), group=group)


def batches_without_partner(rank: int) -> None:
    op = dist.P2POp(dist.irecv, ones(), 1 - rank)
    for work in dist.batch_isend_irecv([op]):
        work.wait()


def looks_slowly(rank: int) -> None:
    """As on a busy machine: between two looks whether it goes on, its stack is another one."""
    look = host_waits._publish_pending
    host_waits._publish_pending = lambda: time.sleep(0.05) or look()
    both_send_first(rank)


HANGS = {
    reads_ten_lines_later: ("finished without calling it", "rank 1 waits in all_reduce"),
    never_reads: ("finished without calling it", "rank 1 waits in all_reduce"),
    both_send_first: ("rank 0 waits in send to rank 1", "rank 1 waits in send to rank 0"),
    looks_slowly: ("rank 0 waits in send to rank 1", "rank 1 waits in send to rank 0"),
    groups_crosswise: ("ranks 0 and 1 wait in all_reduce",),
    batches_without_partner: ("rank 0 waits in recv from rank 1", "Every send needs a recv"),
}


@pytest.mark.parametrize("program", HANGS)
def test_what_no_host_waits_in_is_found(program):
    with pytest.raises(RankFailure) as caught:
        launch(program, 2, rules="nccl", timeout=50)
    assert all(words in str(caught.value) for words in HANGS[program]), str(caught.value)
    assert "no other rank will make" in str(caught.value)


# ---- a group with a time limit -------------------------------------------------------------------


def barrier_of_a_hurried_group(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(20)
    dist.barrier(group)  # here


def read_too_late(rank: int) -> list:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(20)
    total = ones()
    dist.all_reduce(total, group=group)  # here
    return total.tolist()


def steps_of_ddp(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    layer = nn.Linear(2, 1).to(device())
    model = nn.parallel.DistributedDataParallel(layer, process_group=group)
    if rank == 0:
        time.sleep(20)
    model(ones()).sum().backward()  # here


def never_read(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(20)
    dist.broadcast(ones(), 0, group=group)  # here


def caught_and_repeated(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        time.sleep(20)
    with pytest.raises(dist.DistBackendError, match="OpType=BARRIER"):
        dist.barrier(group)
    dist.barrier(group)  # here


@pytest.mark.parametrize(
    ("program", "operation"),
    [
        (barrier_of_a_hurried_group, "BARRIER"),
        (read_too_late, "ALLREDUCE"),
        (never_read, "BROADCAST"),
        (steps_of_ddp, "ALLREDUCE"),
        (caught_and_repeated, "BARRIER"),
    ],
)
def test_the_watchdog_names_the_call_that_took_too_long(program, operation):
    with pytest.raises(RankFailure) as caught:
        launch(program, 2, rules="nccl", timeout=30)
    said = str(caught.value)
    assert caught.value.rank == 1
    assert f"WorkNCCL(OpType={operation}, Timeout(ms)=1000) ran for 1000 milliseconds" in said
    assert "# here" in said
    assert "unbound_buffer" not in said
    assert "timeout caused pair closure" not in said


# ---- right programs ------------------------------------------------------------------------------


def goes_on_at_once(rank: int) -> list:
    """Rank 1 calls when rank 0 has come back from its call: gloo would wait for ever."""
    total, store = ones(), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["called"])
    dist.all_reduce(total)
    if rank == 0:
        store.set("called", "")
    return total.tolist()


def waits_behind_a_slow_one(rank: int) -> list:
    """Longer than a hang takes to be found."""
    total = ones()
    dist.all_reduce(total)
    if rank:
        time.sleep(6)
    dist.all_reduce(total)
    return total.tolist()


def settles(rank: int) -> list:
    """What was awaited has ended then; what was not, such as a message that comes later, may be on
    its way."""
    total, store = ones(), dist.distributed_c10d._get_default_store()
    group = dist.new_group([0, 1])
    later = dist.irecv(ones(), 1) if rank == 0 else None
    dist.all_reduce(total, group=group)
    settle()
    if rank == 0:
        store.set("settled", "")
        later.wait()
    else:
        store.wait(["settled"])
        dist.send(ones(), 0)
    return total.tolist()


def gives_up(rank: int) -> list:
    """A wait with a limit ends the communicator's calls: the device is free, and a rank can finish."""
    total = ones()
    if rank == 0:
        with pytest.raises(RuntimeError, match="timed out"):
            dist.all_reduce(total, async_op=True).wait(timedelta(seconds=1))
    return ones().tolist()


@pytest.mark.parametrize(
    ("program", "result"),
    [
        (goes_on_at_once, [2.0, 2.0]),
        (waits_behind_a_slow_one, [4.0, 4.0]),
        (settles, [2.0, 2.0]),
        (gives_up, [1.0, 1.0]),
    ],
)
def test_right_programs_go_on(program, result):
    assert launch(program, 2, rules="nccl") == [result] * 2


# ---- a GPU's host waits in Python ----------------------------------------------------------------


def reads(rank: int) -> list[str]:
    """With the CPU in the part of the GPU: which ways to read a value wait for the stream."""
    asked, value = [], torch.ones(1)

    def ended() -> bool:
        asked.append(True)
        return True

    host_waits.read_here(ended, lambda tensor: tensor is value)
    ways = {
        "item": lambda: value.item(),
        "float": lambda: float(value),
        "if": lambda: bool(value),
        "cpu": lambda: value.cpu(),
        "to": lambda: value.to("cpu"),
        "print": lambda: repr(value),
        "tolist": lambda: value.tolist(),
        "equal": lambda: torch.equal(value, value),
        "another dtype": lambda: value.to(torch.float64),
        "a sum": lambda: value + value,
    }
    waited = []
    for name, way in ways.items():
        asked.clear()
        way()
        waited += [name] if asked else []
    return waited


def test_a_gpus_host_waits_where_a_value_is_read():
    [waited] = launch(reads, 1)
    assert waited == ["item", "float", "if", "cpu", "to", "print", "tolist", "equal"]
