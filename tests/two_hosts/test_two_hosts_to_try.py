"""The two hosts of chapter 09, and of whoever tries a cluster on one machine."""

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")

from course_hosts import hosts, network_hosts
from course_hosts.cluster import cluster
from course_hosts.two_hosts import TwoHosts
from course_utils.launch import RankFailure, launch
from tests.support import network_turns

WHY_NOT = network_hosts.why_not()


def adds(rank: int) -> tuple[float, str]:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item(), os.readlink("/proc/self/ns/net")


def waits(rank: int, folder: str) -> None:
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    if rank < 2:
        dist.all_reduce(torch.ones(1))
    time.sleep(1000)


def _of_two(process: psutil.Process) -> bool:
    """Whether it is no other: the fork server and the janitor stay for the next test."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:  # a child that an earlier test has not waited for has ended
        return False
    return any(each in words for each in ("ipyparallel.controller", "ipyparallel.engine", "sleep"))


@pytest.fixture(params=["a network of its own", "engines"])
def two(request, monkeypatch, tmp_path):
    own = request.param == "a network of its own"
    if own and WHY_NOT:
        pytest.skip(f"two hosts: {WHY_NOT}")
    if not own:
        monkeypatch.setattr(network_hosts, "why_not", lambda: "this test wants none")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with network_turns.changed(), TwoHosts() as two:
        assert own == two.about.startswith("The second host is a network namespace")
        processes = [p for p in psutil.Process().children(recursive=True) if _of_two(p)]
        assert processes
        yield two
    assert not psutil.wait_procs(processes, 20)[1]
    assert not list(tmp_path.glob("course-hosts-*"))


def test_a_host_falls_silent_is_named_and_comes_back(two, tmp_path):
    (folder := tmp_path / "began").mkdir()

    def silence():
        while not all(folder.joinpath(f"rank-{n}").exists() for n in range(4)):
            time.sleep(0.05)
        two.fall_silent()

    with cluster(two.client) as names:
        results = launch(adds, 4)
        assert [total for total, _ in results] == [6.0] * 4
        spaces = [space for _, space in results]
        assert spaces[0] == spaces[1] and spaces[2] == spaces[3]
        assert (spaces[0] != spaces[2]) == two.about.startswith("The second host")
        (thread := threading.Thread(target=silence)).start()
        with pytest.raises(RankFailure) as caught:
            launch(waits, 4, str(folder))
        thread.join()
        assert str(caught.value).startswith(f"rank 2 was on host {names[1]}, which does not answer")
        with pytest.raises(hosts.HostLost):
            launch(adds, 4)
    two.come_back()
    with cluster(two.client):
        assert [total for total, _ in launch(adds, 4)] == [6.0] * 4


def test_closing_it_twice_is_closing_it(two):
    two.fall_silent()
    two.close()
    two.close()
    two.come_back()  # nothing is there


@pytest.mark.skipif(bool(WHY_NOT), reason=f"two hosts: {WHY_NOT}")
def test_no_cable_is_left_where_a_process_outlives_the_block():
    with network_turns.changed():
        with TwoHosts() as two:
            inside = f"--net=/proc/{two.engines[1].pid}/ns/net"
            outlives = psutil.Popen(["nsenter", inside, "sleep", "infinity"])
            while outlives.name() != "sleep":
                time.sleep(0.05)
        left = set(psutil.net_if_addrs())
        outlives.kill()
        outlives.wait()
        assert two._here.cable not in left
        two.come_back()  # nothing is there


KERNEL = """
import time
from course_hosts.two_hosts import TwoHosts

two = TwoHosts()
print(two.about, flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(bool(WHY_NOT), reason=f"two hosts: {WHY_NOT}")
def test_a_kernel_that_is_killed_leaves_no_process_and_no_cable(tmp_path):
    with network_turns.changed():  # no cable is left
        kernel = psutil.Popen(
            [sys.executable, "-c", KERNEL],
            env=os.environ | {"TMPDIR": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert kernel.stdout.readline().startswith("The second host is a network namespace")
        started = kernel.children(recursive=True)
        kernel.kill()
        kernel.communicate()
        left = psutil.wait_procs(started, 20)[1]
        for process in left:
            process.kill()
        assert len(started) >= 5  # the janitor, the host's holder, the controller and two engines
        assert not left and not list(tmp_path.glob("course-hosts-*"))
