"""What is left when a call of launch ends, however it ends: no process, no socket, no signal to a
process that is not ours any more."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from course_utils.launch import RankFailure
from course_utils.launch.keepers import server
from course_utils.launch.keepers.janitor import Handle
from course_utils.launch.ranks import rank
from tests.support.leftovers import nothing_left
from tests.support.on_gloo import launch

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers and pidfds")


def _number(rank):
    return rank


def _gone(pids, seconds=20):
    end = time.monotonic() + seconds
    while alive := [pid for pid in pids if _lives(pid)]:
        assert time.monotonic() < end, f"left behind: {alive}"
        time.sleep(0.02)


def _lives(pid):
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def _leave_processes(folder):
    """Starts processes that leave their group, their session or their parent, and notes them."""
    forever = ["sleep", "1000"]
    pids = [
        subprocess.Popen(forever, start_new_session=True).pid,
        subprocess.Popen(forever, process_group=0).pid,
        int(subprocess.check_output(["sh", "-c", "setsid sleep 1000 >&- & echo $!"])),
    ]
    Path(folder, str(os.getpid())).write_text(" ".join(map(str, pids)))


def _leave_and_return(rank, folder):
    _leave_processes(folder)
    dist.barrier()


def _leave_and_die(rank, folder):
    _leave_processes(folder)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@LINUX
@pytest.mark.parametrize("work", [_leave_and_return, _leave_and_die])
def test_processes_that_detach_themselves_end_too(work, tmp_path):
    with contextlib.suppress(RankFailure):
        launch(work, 2, str(tmp_path))
    pids = [int(pid) for file in tmp_path.iterdir() for pid in file.read_text().split()]
    assert len(pids) == 6
    _gone(pids, seconds=2)


def test_what_another_launch_has_started_stays(tmp_path):
    def work(rank, folder):
        orphan = int(subprocess.check_output(["sh", "-c", "setsid sleep 1000 >&- & echo $!"]))
        Path(folder, "started").touch()
        while not Path(folder, "checked").exists():
            time.sleep(0.01)
        return psutil.Process(orphan).status()

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(launch, work, 1, str(tmp_path))
        while not (tmp_path / "started").exists():
            time.sleep(0.01)
        assert launch(_number, 2) == [0, 1]
        (tmp_path / "checked").touch()
        assert future.result() == [psutil.STATUS_SLEEPING]


KERNEL = """
import itertools, os
from course_utils.launch import launch; from course_utils.launch.keepers import janitor

def work(rank):
    print(os.getpid(), janitor_of_the_kernel, flush=True)
    sum(itertools.repeat(1))  # holds Python's lock for ever

launch(lambda rank: 0, 1)
janitor_of_the_kernel = janitor.janitor._process.pid
launch(work, 1)
"""


@LINUX
def test_kernel_and_janitor_killed_together(tmp_path):
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    rank, janitor = map(int, kernel.stdout.readline().removeprefix("[rank 0] ").split())
    below = [child.pid for child in psutil.Process(kernel.pid).children(recursive=True)]
    assert rank in below and janitor in below
    os.kill(janitor, signal.SIGKILL)
    kernel.kill()
    kernel.communicate()
    _gone(below)


class _Broken(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index == 3:
            raise ValueError("row 3 is damaged")
        return torch.ones(1000)


def test_data_loader_that_fails_leaves_no_socket(tmp_path, monkeypatch):
    launch(_number, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with nothing_left(tmp_path), pytest.raises(RankFailure, match="row 3 is damaged"):
        launch(lambda rank: list(DataLoader(_Broken(), num_workers=2)), 2)


@LINUX
def test_signals_go_to_handles_and_not_to_numbers(monkeypatch):
    """A number may belong to another process as soon as the fork server has taken note of the end
    of a rank. (The group of a rank is only named while the rank's own number cannot be reused.)"""
    sent = []
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    group = os.killpg
    reaped = set()

    def killpg(pid, number):
        assert pid not in reaped
        group(pid, number)

    monkeypatch.setattr(os, "killpg", killpg)
    wait = server.Process.wait

    def waited(process):
        reaped.add(process.pid)
        return wait(process)

    monkeypatch.setattr(server.Process, "wait", waited)
    with pytest.raises(RankFailure):
        launch(lambda rank: os._exit(3), 2)
    assert launch(_number, 2) == [0, 1]
    assert not reaped.intersection(pid for pid, _ in sent) and len(reaped) == 4


def test_handle_of_a_process_that_is_gone():
    child = subprocess.Popen(["sleep", "1000"])
    handle = Handle(child.pid)
    assert handle.send(0)
    child.kill()
    child.wait()
    assert not handle.send(signal.SIGTERM)
    handle.close()
    late = Handle(child.pid)
    assert not late.send(0)
    late.close()


# --- the fork server ------------------------------------------------------------------------------


def _server():
    return server._server.pid


def test_a_fork_server_that_was_stopped_goes_on():
    launch(_number, 1)
    for _ in range(2):
        os.kill(_server(), signal.SIGSTOP)
        assert launch(_number, 2) == [0, 1]
    assert launch(lambda rank, pid: os.kill(pid, signal.SIGSTOP) or rank, 2, _server()) == [0, 1]


def test_a_fork_server_that_is_killed_during_a_run():
    def work(rank, pid):
        dist.barrier()
        if rank == 0:
            os.kill(pid, signal.SIGKILL)
        time.sleep(1000)

    launch(_number, 1)
    killed = _server()
    with pytest.raises(RankFailure, match="the process from which all ranks are started") as caught:
        launch(work, 2, killed)
    assert (caught.value.kind, caught.value.rank) == ("signal", None)
    assert not psutil.pid_exists(killed)  # not even as a zombie
    assert launch(_number, 2) == [0, 1]


_WAY_OUT = """
try:
    try:
        fn()
    finally:
        1 / 0  # as a handler of a signal may do
except ZeroDivisionError as error:
    caught = error
"""


def test_an_error_on_the_way_out_of_the_function_hides_none():
    def fails():
        raise KeyError("weights")

    for fn, error in ((fails, KeyError), (int, ZeroDivisionError)):
        names = {"fn": fn}
        exec(compile(_WAY_OUT, rank.__file__, "exec"), names)  # noqa: S102
        assert isinstance(rank._from_the_function(names["caught"]), error)


def test_an_interrupt_while_the_fork_server_is_stopped(tmp_path, monkeypatch):
    launch(_number, 1)
    wait = server.connection.wait

    def wait_and_interrupt(*args):
        monkeypatch.setattr(server.connection, "wait", wait)
        os.kill(os.getpid(), signal.SIGINT)
        return wait(*args)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with nothing_left(tmp_path), pytest.raises(KeyboardInterrupt):
        os.kill(_server(), signal.SIGSTOP)
        monkeypatch.setattr(server.connection, "wait", wait_and_interrupt)
        launch(lambda rank: time.sleep(1000), 2)
    assert launch(_number, 2) == [0, 1]


def test_an_interrupt_of_ranks_while_the_fork_server_is_stopped(tmp_path, monkeypatch):
    def work(rank, server, kernel):
        dist.barrier()
        if rank == 0:
            os.kill(server, signal.SIGSTOP)
            os.kill(kernel, signal.SIGINT)
        time.sleep(1000)

    launch(_number, 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with nothing_left(tmp_path), pytest.raises(KeyboardInterrupt):
        launch(work, 2, _server(), os.getpid())
    assert launch(_number, 2) == [0, 1]


# --- randomness -----------------------------------------------------------------------------------


def test_each_rank_of_each_launch_draws_its_own_numbers():
    def draw(rank):
        return (
            torch.nn.Linear(2, 2).weight.sum().item(),
            numpy.random.rand(),
            random.random(),
        )

    for of_one_kind in zip(*launch(draw, 2), *launch(draw, 2), strict=True):
        assert len(set(of_one_kind)) == 4


def test_ranks_that_seed_draw_the_same_numbers():
    def draw(rank):
        torch.manual_seed(3)
        return torch.rand(1).item()

    assert len(set(launch(draw, 2) + launch(draw, 1))) == 1
