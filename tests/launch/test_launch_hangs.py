"""Ranks that wait for ever or do not end: found, told apart from ranks that are slow.

The rows of the fault table that take seconds run at the same time, from threads, which launch
allows; `soak_launch.py` runs them one by one.
"""

import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from course_utils.launch import RankFailure
from course_utils.launch.ranks import launching
from course_utils.launch.story import diagnosis, stacks, stillness, supervise
from course_utils.launch.story.frames import Frame
from tests.support.fault_table import FAULTS
from tests.support.leftovers import nothing_left
from tests.support.on_gloo import launch

HANGS = {fault.fn.__name__: fault for fault in FAULTS if fault.kind == "timeout"}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """What launch raised for each hang, and after how many seconds."""
    folder = tmp_path_factory.mktemp("hangs")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        assert launch(_sum_of_ranks, 1) == [0]  # the fork server's own start is no hang's
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


def _receives_or(starts_to_send):
    """Rank 1 waits in recv for what a thread of rank 0 will send; what starts the thread differs.
    None of the threads has a line of this file while it waits."""

    def work(rank):
        if rank == 0:
            starts_to_send()
        x = torch.zeros(1)
        if rank == 1:
            dist.recv(x, 0)
        dist.barrier()
        return rank

    return work


def _a_timer_will_send():
    threading.Timer(2.5, dist.send, (torch.ones(1), 1)).start()


def _an_executor_will_send():
    pool = ThreadPoolExecutor(1)
    pool.submit(time.sleep, 2.5)
    pool.submit(dist.send, torch.ones(1), 1)


def _a_thread_will_send_when_told():
    told = threading.Event()
    threading.Timer(2.5, told.set).start()

    def wait_and_send():
        told.wait()
        dist.send(torch.ones(1), 1)

    threading.Thread(target=wait_and_send).start()


def _a_thread_counts_to_ten():
    def count_and_send():
        for _ in range(10):
            time.sleep(0.25)
        dist.send(torch.ones(1), 1)

    threading.Thread(target=count_and_send).start()


def _a_process_will_tell():
    """A child process writes into a pipe after a while; a thread of the rank then sends."""
    child = subprocess.Popen(["sh", "-c", "sleep 2.5; echo now"], stdout=subprocess.PIPE)

    def read_and_send():
        child.stdout.read()
        dist.send(torch.ones(1), 1)

    threading.Thread(target=read_and_send).start()


def _returns_and_sends_later(rank):
    """Rank 0 has returned its result when its timer sends what rank 1 waits for."""
    if rank == 0:
        _a_timer_will_send()
    else:
        dist.recv(torch.zeros(1), 0)
    return rank


def _loads_in_processes(rank):
    """The workers of a DataLoader take their time."""
    if rank == 1:
        list(DataLoader(_SlowData(), num_workers=1))
    dist.barrier()
    return rank


class _SlowData(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(2.5)
        return index


def _computes_in_c(rank):
    """Holds Python's lock, and no thread of the rank can run any Python."""
    if rank == 1:
        sum(itertools.repeat(1, 100_000_000))
    dist.barrier()
    return rank


def _is_stopped_for_a_while(rank):
    if rank == 1:
        subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    return rank


def _joins_a_slow_thread(rank):
    """Both main threads wait for threads; one of these sleeps before it calls."""
    thread = threading.Thread(
        target=_late_barrier if rank else dist.barrier, args=[dist.group.WORLD]
    )
    thread.start()
    thread.join()
    return rank


def _joins_with_a_limit(rank):
    """The thread waits for what the main thread sends when it is tired of waiting."""
    if rank == 0:
        thread = threading.Thread(target=dist.recv, args=[torch.ones(1), 1])
        thread.start()
        thread.join(2.5)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)
    return rank


def _an_alarm_sends(rank):
    """A signal's handler sends, in the main thread, which waits for a thread."""
    if rank == 0:
        thread = threading.Thread(target=dist.recv, args=[torch.ones(1), 1])
        thread.start()
        signal.signal(signal.SIGALRM, lambda *_: dist.send(torch.ones(1), 1))
        signal.setitimer(signal.ITIMER_REAL, 2.5)
        thread.join()
    else:
        dist.recv(torch.ones(1), 0)
        dist.send(torch.ones(1), 0)
    return rank


def _a_process_wakes_the_main_thread(rank):
    """The main thread waits for one that reads what a child process writes."""
    if rank == 0:
        child = subprocess.Popen(["sh", "-c", "sleep 2.5; echo now"], stdout=subprocess.PIPE)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(child.stdout.read).result()
    dist.barrier()
    return rank


SLOW = {
    "joins_a_slow_thread": _joins_a_slow_thread,
    "joins_with_a_limit": _joins_with_a_limit,
    "an_alarm_sends": _an_alarm_sends,
    "a_process_wakes_the_main_thread": _a_process_wakes_the_main_thread,
    "sleeps": _sleeps_before_the_barrier,
    "computes": _computes_before_the_barrier,
    "computes_in_c": _computes_in_c,
    "is_stopped_for_a_while": _is_stopped_for_a_while,
    "loads_in_processes": _loads_in_processes,
    "waits_for_a_thread": _waits_for_a_thread,
    "all_sleep": _all_sleep,
    "always_in_a_call": _always_in_a_call,
    "many_small_calls": _many_small_calls,
    "a_timer_will_send": _receives_or(_a_timer_will_send),
    "an_executor_will_send": _receives_or(_an_executor_will_send),
    "a_thread_will_send_when_told": _receives_or(_a_thread_will_send_when_told),
    "a_thread_counts_to_ten": _receives_or(_a_thread_counts_to_ten),
    "a_process_will_tell": _receives_or(_a_process_will_tell),
    "returns_and_sends_later": _returns_and_sends_later,
}


@pytest.fixture(scope="module")
def outcomes(failures):
    """What each slow function ended with, while launch takes ranks for stuck far sooner than it
    does, so that a mistake shows in seconds."""
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(5) as pool:
        for name, seconds in (("_AGAIN", 0.4), ("_BRIEFLY", 0.2), ("TICK", 0.1)):
            patch.setattr(stillness, name, seconds)
        return dict(zip(SLOW, pool.map(_outcome, SLOW.values())))


def _outcome(fn):
    try:
        return launch(fn, 2)
    except RankFailure as failure:
        return str(failure)


@pytest.mark.parametrize("name", SLOW)
def test_slow_is_not_stuck(name, outcomes):
    assert outcomes[name] == [0, 1]


def _leaves_the_others_alone(rank):
    if rank != 1:
        dist.barrier()


def _receive_from_each_other(rank):
    dist.recv(torch.ones(1), 1 - rank)


@pytest.mark.parametrize("program", [_leaves_the_others_alone, _receive_from_each_other])
def test_what_the_records_prove_needs_no_second_look(program, monkeypatch):
    monkeypatch.setattr(stillness, "_AGAIN", 1000.0)
    with pytest.raises(RankFailure, match="a rank waits for a call that no other rank will make"):
        launch(program, 2, timeout=20)


def _seen(rank):
    """How this rank's stacks look from within, in its own wait and in that of a call."""
    seen, wait = [], dist.Work.wait

    def look(work):
        frames = traceback.extract_stack()[:-1]  # what lies above is the wait in C
        seen.append(stacks.called([Frame(f.filename, f.lineno, f.name) for f in reversed(frames)]))
        return wait(work)

    dist.Work.wait = look
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    return seen


def test_a_wait_for_an_older_call_is_told_from_a_call_that_waits():
    """The older one may end, and the rank go on: that is no proof."""
    assert launch(_seen, 2) == [["all_reduce", None]] * 2


def test_time_in_which_the_kernel_stood_still_does_not_count(monkeypatch):
    """As with a laptop that was closed: the results lie there when the limit has passed."""
    read = supervise.Supervision._read

    def read_after_a_pause(supervision, patience):
        monkeypatch.setattr(supervise.Supervision, "_read", read)
        time.sleep(2.5)
        read(supervision, patience)

    monkeypatch.setattr(supervise.Supervision, "_read", read_after_a_pause)
    assert launch(lambda rank: rank, 2, timeout=2.0) == [0, 1]


def test_time_in_which_a_rank_had_no_processor_does_not_count(monkeypatch):
    """As on a busy machine; here it is said of a rank that sleeps for longer than the limit."""
    monkeypatch.setattr(supervise, "longest_delay", lambda pids: 100.0 * len(list(pids)))
    assert launch(lambda rank: time.sleep(1.5), 1, timeout=0.5) == [None]


def _sleeps(rank):
    time.sleep(4)
    return rank


def _computes(rank, seconds=4):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(1000))
    return rank


def _calls_now_and_then(rank):
    for _ in range(8):
        time.sleep(0.5)
        dist.barrier()
    return rank


def _calls_for_ever(rank):
    while True:
        _calls_now_and_then(rank)


def test_ranks_that_go_on_have_more_time_than_those_that_stand_still(monkeypatch):
    monkeypatch.setattr(launching, "_STILL", 2.0)
    assert launch(_computes, 2) == launch(_calls_now_and_then, 2) == [0, 1]
    with pytest.raises(RankFailure, match=r"running when the time was up \(timeout=2 seconds\)"):
        launch(_sleeps, 2)
    with pytest.raises(RankFailure, match=r"when the time was up \(timeout=2 seconds\)"):
        launch(_calls_for_ever, 2, timeout=2.0)  # a limit of one's own is for both
    monkeypatch.setattr(launching, "_WHOLE", 3.0)
    with pytest.raises(RankFailure, match=r"when the time was up \(timeout=3 seconds\)"):
        launch(_computes, 2, 600)


def test_the_limits_are_those_that_the_page_and_the_docstring_tell():
    page = (Path(__file__).parents[2] / "docs" / "deciding.md").read_text(encoding="utf-8")
    assert (launching._STILL, launching._WHOLE) == (60.0, 600.0)
    assert "nothing has gone on for 60 s, or the launch has taken ten minutes" in page
    assert "stand still for a minute" in launching.launch.__doc__


class _SlowToUnpack:
    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return time.sleep, (self.seconds,)


def test_the_time_that_ranks_take_to_start_does_not_count():
    """As on a busy machine; here they unpack an argument for longer than the limit."""
    assert launch(lambda rank, _: rank, 2, _SlowToUnpack(1.5), timeout=1.0) == [0, 1]


def test_ranks_that_never_start_are_ended(monkeypatch):
    for module in supervise, diagnosis:
        monkeypatch.setattr(module, "START", 0.5)
    with pytest.raises(RankFailure) as caught:
        launch(lambda rank, _: rank, 2, _SlowToUnpack(1000), timeout=1.0)
    words = "rank 0 was starting when the time was up (timeout=1 seconds, and 0.5 to start)"
    assert words in str(caught.value)


def test_the_group_waits_longer_than_a_kernel_that_was_stopped_for_hours():
    def limit(rank):
        world = dist.group.WORLD
        return world._get_backend(world._device_types[0]).options._timeout.total_seconds()

    assert launch(limit, 1)[0] > 3600


def _uneven_batches(rank):
    """DDP with Join: the rank that is done shadows the calls that the other's backward makes."""
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    with Join([model]):
        for _ in range(3 + 2 * rank):
            model(torch.ones(1, 4)).sum().backward()
    return rank


def test_join_is_no_mismatch():
    assert launch(_uneven_batches, 3) == [0, 1, 2]


def _two_worlds(rank):
    """Pairs that form a world of their own, one after the other, with calls of another shape."""
    folder = os.environ["FOLDER"]
    dist.barrier()
    totals = []
    for turn, (mine, place) in enumerate([divmod(rank, 2), (rank % 2, rank // 2)]):
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/{turn}-{mine}", 2)
        dist.init_process_group("gloo", store=store, rank=place, world_size=2)
        total = torch.full((1 + mine,), rank)
        dist.all_reduce(total, op=(dist.ReduceOp.SUM, dist.ReduceOp.MAX)[mine])
        totals += total.tolist()
        dist.new_group([mine])
    return totals


def test_worlds_of_different_members_are_no_mismatch(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    # world {0, 1}: 0 + 1; {2, 3}: max of 2 and 3, twice; {0, 2}: 0 + 2; {1, 3}: 3, twice
    assert launch(_two_worlds, 4) == [[1, 2], [1, 3, 3], [3, 3, 2], [3, 3, 3, 3]]


def _mismatch_in_a_world(rank):
    folder = os.environ["FOLDER"]
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{rank % 2}", 2)
    dist.init_process_group("gloo", store=store, rank=rank // 2, world_size=2)
    dist.broadcast(torch.ones(3), src=1 if rank == 3 else 0)


def test_a_mismatch_in_a_world_names_ranks_of_the_launch(tmp_path, monkeypatch):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    with pytest.raises(RankFailure) as caught:
        launch(_mismatch_in_a_world, 4)
    assert caught.value.rank == 3
    assert "rank 1: broadcast of float32 [3] from rank 1\n" in str(caught.value)
    assert "rank 3: broadcast of float32 [3] from rank 3\n" in str(caught.value)


def _mesh(rank):
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    total = torch.tensor(10**rank)
    dist.all_reduce(total, group=mesh["data"].get_group())
    dist.new_subgroups(2)
    mine = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    dist.barrier(mine)
    return total.item()


def test_meshes_and_local_groups_are_no_mismatch():
    assert launch(_mesh, 4) == [101, 1010, 101, 1010]


def test_who_reads_or_writes_a_checkpoints_files_waits_for_no_rank():
    def stack(file, function):
        folder = "/x/site-packages/torch/distributed"
        return [Frame(f"{folder}/{file}", 1, function), Frame("mine.py", 2, "save")]

    assert stacks.waits(stack("distributed_c10d.py", "broadcast")) == "broadcast"
    assert stacks.waits(stack("checkpoint/filesystem.py", "finish")) is None


def test_parts_of_a_reduce_scatter_may_differ_in_size():
    def right(rank):
        part = torch.empty(rank + 1)
        dist.reduce_scatter(part, [torch.ones(1), torch.ones(2)])
        return part.tolist()

    def wrong(rank):
        dist.reduce_scatter(torch.empty(1), [torch.ones(1), torch.ones(1 + rank)])

    assert launch(right, 2) == [[2], [2, 2]]
    with pytest.raises(RankFailure, match="rank 1: reduce_scatter of float32 .1., float32 .2."):
        launch(wrong, 2)
