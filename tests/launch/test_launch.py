"""What launch promises when all goes well, and what it says before any rank starts."""

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils import hardware
from course_utils.launch import RankFailure
from course_utils.launch.keepers import server
from course_utils.launch.ranks import output, packing
from course_utils.launch.ranks import rank as rank_module
from course_utils.launch.ranks.arguments import OwnPart
from course_utils.launch.story import stillness
from tests.support import memory_held
from tests.support.leftovers import nothing_left
from tests.support.on_gloo import launch


def total(rank, start=0):
    t = torch.tensor(float(rank + start))
    dist.all_reduce(t)
    return t.item()


# --- the function, its arguments and its results ----------------------------------------------


@pytest.mark.parametrize("nprocs", [1, 2, 3])
def test_results_come_by_rank(nprocs):
    assert launch(lambda rank: (rank, dist.get_rank(), dist.get_world_size()), nprocs) == [
        (rank, rank, nprocs) for rank in range(nprocs)
    ]


def test_arguments_follow_the_rank():
    assert launch(total, 3, 10) == [33.0, 33.0, 33.0]


def test_keyword_arguments_follow():
    def told(rank, start, *, lr, momentum=0.9):
        return rank + start, lr, momentum

    assert launch(told, 2, 10, lr=0.1) == [(10, 0.1, 0.9), (11, 0.1, 0.9)]


def test_each_rank_gets_its_own_part_of_an_argument():
    parts = {"part": OwnPart([1, 2]), "same": 5}
    assert launch(lambda rank, a, **given: (a, given), 2, OwnPart("ab"), **parts) == [
        ("a", {"part": 1, "same": 5}),
        ("b", {"part": 2, "same": 5}),
    ]


def test_closure_and_class_of_a_cell():
    factor = 3

    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    results = launch(lambda rank: Pair(rank, factor * rank), 2)
    assert [(r.a, r.b) for r in results] == [(0, 0), (1, 3)]
    assert all(type(result) is Pair for result in results)


@pytest.mark.parametrize("nprocs", [np.int64(2), torch.tensor(2)], ids=["numpy", "torch"])
def test_whole_numbers_of_other_libraries(nprocs):
    assert launch(total, nprocs) == [1.0, 1.0]


def test_tensors_arrive_as_they_were():
    def values(rank):
        weight = torch.arange(6.0).reshape(2, 3).requires_grad_()
        loss = (weight * 2).sum()
        shared = torch.zeros(4)
        return {
            "transposed": weight.detach().T,
            "loss": loss,
            "views": (shared[:2], shared[2:]),
            "empty": torch.empty(0, 3),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "tokens": torch.tensor([50_000], dtype=torch.uint16),
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "state": torch.nn.Linear(2, 1).state_dict(),
        }

    for got in launch(values, 2):
        assert torch.equal(got["transposed"], torch.arange(6.0).reshape(2, 3).T)
        assert got["loss"].item() == 30 and got["loss"].requires_grad
        first, second = got["views"]
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        assert got["empty"].shape == (0, 3)
        assert got["half"].dtype == torch.bfloat16
        assert got["tokens"].dtype == torch.uint16 and got["tokens"].tolist() == [50_000]
        assert isinstance(got["parameter"], torch.nn.Parameter)
        assert list(got["state"]) == ["weight", "bias"]
        got["state"]["bias"] += 1  # the memory is the receiver's own


def test_a_large_tensor_does_not_pass_through_the_pickle_stream():
    tensor = torch.arange(25_000_000, dtype=torch.int32)  # 100 MB
    stream, *buffers = packing.pack({"tensor": tensor})
    assert len(stream) < 1000
    assert [memoryview(buffer).nbytes for buffer in buffers] == [100_000_000]
    assert buffers[0].obj.ctypes.data == tensor.data_ptr()  # not even copied

    (got,) = launch(lambda rank, t: t + 1, 1, tensor)
    assert torch.equal(got, tensor + 1)


def test_module_with_its_tied_weights():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    for got in launch(lambda rank, m: m, 2, model):
        assert got[1].weight is got[0].weight


# --- the world of a rank ------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_connects_ranks_on_gpus_leaves_no_message_behind(ranks):
    def connected(rank):
        rank_module._connect_pairs(torch.device("cpu"))
        got = torch.empty(1)
        if ranks > 1:
            sent = dist.isend(torch.tensor([rank + 10.0]), (rank + 1) % ranks)
            dist.recv(got, (rank - 1) % ranks)
            sent.wait()
        return got.item() if ranks > 1 else 10.0

    assert launch(connected, ranks) == [(rank - 1) % ranks + 10.0 for rank in range(ranks)]


def test_rank_is_ready_to_communicate(monkeypatch, tmp_path):
    def world(rank):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "COLOUR")
        return {
            "environment": [os.environ.get(name) for name in names],
            "folder": os.getcwd(),
            "threads": torch.get_num_threads(),
            "device": hardware.device().type,
            "backend": dist.get_backend(),
            "path": sys.path,
        }

    monkeypatch.setenv("COLOUR", "blue")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    torch.set_num_threads(torch.get_num_threads())  # what the kernel has set is not inherited
    for rank, got in enumerate(launch(world, 2)):
        assert got["environment"] == [str(rank), str(rank), "2", "2", "blue"]
        assert got["folder"] == str(tmp_path)
        assert got["threads"] == max(1, hardware.cores() // 2)
        assert (got["device"], got["backend"]) == ("cpu", "gloo")
        assert got["path"][0] == str(tmp_path / "lib")


def test_each_call_has_fresh_processes():
    def count(rank):
        torch.launched = getattr(torch, "launched", 0) + 1
        return os.getpid(), torch.launched

    first, second = launch(count, 2), launch(count, 2)
    assert [n for _, n in first + second] == [1, 1, 1, 1]
    assert len({pid for pid, _ in first + second}) == 4


def test_ranks_listen_on_this_machine_only(monkeypatch):
    # What a cluster needs, and what must not reach the ranks: an address that others can reach.
    for interface, addresses_of in psutil.net_if_addrs().items():
        if any(a.family == socket.AF_INET and a.address[:4] != "127." for a in addresses_of):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)

    def addresses(rank):
        total(rank)
        dist.new_group([0, 1])
        found = [c for c in psutil.Process().net_connections("inet") if c.status == "LISTEN"]
        dist.barrier()
        return [c.laddr.ip for c in found]

    for found in launch(addresses, 2):
        assert set(found) <= {"127.0.0.1", "::1"}


def test_rank_may_start_processes_and_they_end_with_it(tmp_path):
    def helper(rank):
        return subprocess.Popen(["sleep", "1000"]).pid

    with nothing_left(tmp_path):
        pids = launch(helper, 2)
    deadline = time.monotonic() + 2
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _runs(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_an_interrupt_is_not_for_the_ranks():
    def work(rank):
        os.kill(os.getpid(), signal.SIGINT)
        return rank

    assert launch(work, 2) == [0, 1]


def test_data_loader_workers_in_a_rank():
    def load(rank):
        data = torch.utils.data.TensorDataset(torch.arange(4))
        return [int(x) for (x,) in torch.utils.data.DataLoader(data, num_workers=2)]

    assert launch(load, 2) == [[0, 1, 2, 3]] * 2


def test_private_memory_at_start_is_small():
    if not memory_held.told():
        pytest.skip("only Linux tells a process's private memory")
    assert max(launch(lambda rank: memory_held.private(), 2)) < 40 * 1024  # kB


# --- several calls, and calls within calls ----------------------------------------------------


def test_two_calls_at_once_from_threads():
    results = {}

    def call(start):
        results[start] = launch(total, 2, start)

    threads = [threading.Thread(target=call, args=[start]) for start in (0, 10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: [1.0] * 2, 10: [21.0] * 2, 20: [41.0] * 2}


def test_launch_inside_launch_is_refused():
    with pytest.raises(RankFailure, match="launch was called inside a rank") as caught:
        launch(lambda rank: launch(total, 2), 2)
    assert caught.value.error == "RuntimeError"


def test_a_fork_server_that_was_killed_is_replaced():
    launch(total, 1)
    for pause in (0, 0.2):  # it is dying; it is dead
        os.kill(server._server.pid, signal.SIGKILL)
        time.sleep(pause)
        assert launch(total, 2) == [1.0, 1.0]


# --- what ranks print -----------------------------------------------------------------------------


def test_output_is_marked_and_in_rank_order(capsys):
    def speak(rank):
        time.sleep(0.2 * (2 - rank))  # the last rank is the first to print
        print("hello")
        print("from", rank, file=sys.stderr)
        print("two\nlines")

    launch(speak, 3)
    expected = [
        f"[rank {rank}] {line}"
        for rank in range(3)
        for line in ("hello", f"from {rank}", "two", "lines")
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_output_of_rank_0_is_live(capsys):
    seen = []

    def look():
        time.sleep(0.05)
        while not done.is_set():
            seen.append(capsys.readouterr().out)
            time.sleep(0.02)

    def speak(rank):
        print("started")
        time.sleep(1.5)
        print("ended")

    done = threading.Event()
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        launch(speak, 1)
    finally:
        done.set()
        watcher.join()
    assert "[rank 0] started\n" in seen


def test_half_a_line_before_death_and_lines_from_c(capsys):
    def speak(rank):
        print("one")
        os.write(1, b"two\n")
        ctypes.CDLL(None).printf(b"three\n")
        os.system("echo four")
        print("half a l", end="")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)

    with pytest.raises(RankFailure):
        launch(speak, 2)
    lines = ["one", "two", "three", "four", "half a l"]
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {line}" for rank in range(2) for line in lines
    ]


def test_enormous_output_is_cut_in_the_middle(capsys):
    def flood(rank):
        line = "x" * 99 + "\n"
        for i in range(1000):
            sys.stdout.write(f"{i}\n" + 1000 * line)
        print("the end")

    launch(flood, 2)
    text = capsys.readouterr().out
    first, second = text.split("[rank 0] the end\n")
    assert first.startswith("[rank 0] 0\n[rank 0] x")
    assert second.startswith("[rank 1] 0\n[rank 1] x") and second.endswith("[rank 1] the end\n")
    for part, rank in ((first, 0), (second, 1)):
        notes = [line for line in part.splitlines() if "left out" in line]
        assert len(notes) == 1 and notes[0].startswith(f"[rank {rank}] ... 99,")
        assert output.LIMIT / 2 < len(part) < 2 * output.LIMIT


def test_output_of_one_endless_line():
    shown = output.Output(0, "", live=False)
    for _ in range(100):
        shown.add(b"y" * 50_000)
    assert len(shown._end) <= 4 * output.LIMIT  # what cannot be shown is not kept either


def test_output_without_a_newline_is_not_copied_for_each_piece(capsys):
    shown = output.Output(0, "", live=False)
    start, end = shown._start, shown._end
    for _ in range(output.LIMIT):
        shown.add(b"abcd" * 5)
    assert shown._start is start and shown._end is end  # they have grown in place
    shown.finish()
    text = capsys.readouterr().out
    assert "... 3,800,000 bytes left out ...\n" in text and len(text) < 2 * output.LIMIT


def test_output_that_is_not_text(capsys):
    launch(lambda rank: os.write(1, b"caf\xe9\nna\xc3\xafve\n"), 1)
    assert capsys.readouterr().out == "[rank 0] caf\ufffd\n[rank 0] naïve\n"


def test_output_without_what_differs_in_every_run(capsys):
    def speak(rank):
        os.write(1, b"/tmp/ipykernel_4711/123.py:3: UserWarning: mind this\n")
        os.write(2, b"[W1121 02:35:43.936201674 reducer.cpp:15] Warning: and this\n")
        os.write(2, b"[rank0]:[W1121 02:35:43.936201674 ProcessGroupNCCL.cpp:4] and on a GPU\n")

    launch(speak, 1)
    assert capsys.readouterr().out == (
        "[rank 0] cell:3: UserWarning: mind this\n[rank 0] [W reducer.cpp:15] Warning: and this\n"
        "[rank 0] [W ProcessGroupNCCL.cpp:4] and on a GPU\n"
    )


def test_gloo_does_not_say_which_rank_aborted_first(capsys):
    shown = output.Output(0, "", live=False)
    shown.add(b"mine\nterminate called after throwing an instance of 'gloo::EnforceNotMet'\n")
    shown.finish()
    assert shown.aborts == ["terminate called after throwing an instance of 'gloo::EnforceNotMet'"]
    assert capsys.readouterr().out == "[rank 0] mine\n"


# --- what launch says before any rank starts ----------------------------------------------------


@pytest.mark.parametrize("nprocs", [0, -1, 65])
def test_number_of_ranks_out_of_range(nprocs):
    with pytest.raises(
        ValueError, match=f"nprocs is the number of ranks, from 1 to 64, not {nprocs}"
    ):
        launch(total, nprocs)


@pytest.mark.parametrize("nprocs", [1.5, "2", None, True])
def test_number_of_ranks_of_the_wrong_type(nprocs):
    with pytest.raises(TypeError, match="nprocs is the number of ranks, a whole number from 1"):
        launch(total, nprocs)


def test_function_without_a_rank():
    with pytest.raises(TypeError, match=r"launch calls forgetful\(rank\), but it is defined as"):

        def forgetful():
            pass

        launch(forgetful, 2)


def test_function_with_too_few_arguments():
    with pytest.raises(TypeError, match=r"launch calls total\(rank, argument 1, argument 2\)"):
        launch(total, 2, 1, 2)


def test_keyword_that_the_function_does_not_know():
    with pytest.raises(TypeError) as caught:
        launch(total, 2, strat=1)
    assert str(caught.value).startswith("launch calls total(rank, strat=...), but it is defined as")
    assert "unexpected keyword argument 'strat'" in str(caught.value)
    assert str(caught.value).endswith("timeout, rules, backend, debug are launch's own.")


def test_keyword_of_launch_that_is_also_the_functions():
    def waits(rank, timeout=1):
        return timeout

    with pytest.raises(TypeError, match="timeout= is launch's own, and waits has a parameter of"):
        launch(waits, 2, timeout=30)
    assert launch(waits, 2, 5, timeout=30) == [5, 5]
    assert launch(waits, 2) == [1, 1]


def test_class_instead_of_a_function():
    with pytest.raises(TypeError, match="Linear is a class"):
        launch(torch.nn.Linear, 2)


def test_result_instead_of_a_function():
    with pytest.raises(TypeError, match="pass the function itself"):
        launch(None, 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), 1e10, 10**400])
def test_timeout_out_of_range(timeout):
    with pytest.raises(ValueError, match="positive number of seconds"):
        launch(total, 2, timeout=timeout)


def test_argument_that_cannot_be_pickled():
    with pytest.raises(RankFailure, match=r"argument 2\['lock'\] \(lock\) cannot be pickled") as e:
        launch(lambda rank, a, b: 0, 2, 1, {"lock": threading.Lock()})
    assert e.value.kind == "pickle" and e.value.rank is None


def test_keyword_argument_that_cannot_be_pickled():
    with pytest.raises(RankFailure, match=r"argument b\['lock'\] \(lock\) cannot be pickled"):
        launch(lambda rank, a, b: 0, 2, 1, b={"lock": threading.Lock()})


def test_temporary_folder_that_cannot_be_written(monkeypatch, tmp_path):
    launch(total, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(OSError, match="launch cannot write to the temporary folder"):
        launch(total, 2)


def test_too_few_open_files():
    launch(total, 1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 20, limits[1]))
    try:
        with pytest.raises(
            OSError, match="launch needs 36 open files for 2 ranks; this process has"
        ):
            launch(total, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert launch(total, 2) == [1.0, 1.0]


def test_as_many_open_files_as_launch_says(tmp_path, monkeypatch):
    launch(total, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 24 + 8 * 6, limits[1]))
    try:
        with nothing_left(tmp_path):
            assert launch(total, 8) == [28.0] * 8
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_working_folder_that_was_deleted(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError, match="has been deleted; go to another one"):
        launch(total, 2)


def test_import_path_with_something_else_than_text(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, 3, None])
    assert launch(total, 2) == [1.0, 1.0]


class _Unpackable:
    def __init__(self, end):
        self.end = end

    def __setstate__(self, state):
        state["end"]()


@pytest.mark.parametrize(
    ("end", "kind", "says"),
    [
        (os.abort, "signal", "was killed by SIGABRT"),
        (lambda: os._exit(7), "exit", "ended with exit code 7 before it returned"),
        (lambda: 1 / 0, "pickle", "could not rebuild the function or its arguments"),
    ],
    ids=["aborts", "exits", "raises"],
)
def test_rank_that_dies_as_it_unpacks_its_arguments(end, kind, says):
    with pytest.raises(RankFailure, match=says) as caught:
        launch(lambda rank, argument: 0, 2, _Unpackable(end))
    assert (caught.value.kind, caught.value.rank) == (kind, 0)


def test_argument_that_contains_itself_and_a_lock():
    circle = []
    circle += [circle, threading.Lock()]
    with pytest.raises(RankFailure, match=r"argument 1\[1\] \(lock\) cannot be pickled"):
        launch(lambda rank, a: 0, 2, circle)


def test_argument_that_is_too_deep():
    deep = [threading.Lock()]
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RankFailure, match="its parts lie too deep in each other"):
        launch(lambda rank, a: 0, 2, deep)


def test_a_rank_that_forks_delivers_once():
    def work(rank):
        os.fork()
        return rank

    assert launch(work, 2) == [0, 1]


def test_alarms_end_with_the_function():
    """An alarm that goes off while the rank delivers its result does not take it away. One that goes
    off a moment earlier is an exception of the function."""

    def work(rank):
        def alarm(*_):
            raise RuntimeError("too late")

        result = torch.ones(10_000_000)
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        return result

    try:
        assert [got.sum().item() for got in launch(work, 2)] == [10_000_000] * 2
    except RankFailure as failure:
        assert failure.error == "RuntimeError" and "too late" in str(failure)


def test_a_call_with_a_limit_of_its_own_may_go_on(monkeypatch):
    """The rank waits for one that has finished, asleep; then its call fails, and it goes on."""
    for name, seconds in (("_AGAIN", 0.2), ("_BRIEFLY", 0.1), ("TICK", 0.05)):
        monkeypatch.setattr(stillness, name, seconds)

    def waits(rank, how):
        limit = timedelta(seconds=1.5)
        group = dist.new_group([0, 1], timeout=limit if how == "group" else None)
        if rank == 0:
            with contextlib.suppress(RuntimeError):
                if how == "barrier":
                    dist.monitored_barrier(timeout=limit)
                elif how == "group":
                    dist.all_reduce(torch.ones(1), group=group)
                else:
                    dist.irecv(torch.ones(1), 1).wait(limit)
        return rank

    for how in ("barrier", "group", "wait"):
        assert launch(waits, 2, how) == [0, 1]


def test_full_temporary_folder(monkeypatch, tmp_path):
    launch(total, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with nothing_left(tmp_path):
        try:
            # No file may grow beyond this, as on a disk that is full.
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
            with pytest.raises(OSError, match="free some space"):
                launch(total, 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert launch(total, 2) == [1.0, 1.0]


def test_no_warning_comes_from_launch():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch(total, 2)


def test_a_rank_starts_processes_as_the_kernel_does():
    methods = launch(lambda rank: multiprocessing.get_start_method(), 1)
    assert methods == [multiprocessing.get_start_method()]
