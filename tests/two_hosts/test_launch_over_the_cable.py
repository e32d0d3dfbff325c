"""launch over two hosts that have nothing in common but a cable and the files."""

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from course_hosts.network_hosts import two_hosts, why_not

pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")
pytestmark = pytest.mark.skipif(bool(reason := why_not()), reason=f"two hosts: {reason}")

KERNEL = """
import json, os, sys, time
from pathlib import Path
import ipyparallel, torch
import torch.distributed as dist
from course_hosts.cluster import cluster, with_engines
from course_hosts import hosts; from course_utils.launch import RankFailure, launch

def adds(rank):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item(), os.readlink("/proc/self/ns/net")

def skips(rank):
    if rank != 3:
        dist.all_reduce(torch.ones(1))

def waits(rank, folder):
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    if rank < 2:
        dist.all_reduce(torch.ones(1))
    time.sleep(1000)

def tell(*args):
    print(json.dumps(args), flush=True)

if __name__ == "__main__":
    folder = sys.argv[1]
    def connect():
        return ipyparallel.Client(f"{folder}/security/ipcontroller-client.json")

    with with_engines(connect, 2, 120) as client, cluster(client) as names:
        tell(names)
        tell(launch(adds, 4))
        for fn, args in ((skips, ()), (waits, (folder,))):
            try:
                launch(fn, 4, *args)
            except RankFailure as failure:
                tell(str(failure), failure.kind, failure.rank)
        try:
            launch(adds, 4)
        except hosts.HostLost as lost:
            tell(str(lost))
"""


@pytest.fixture
def cluster_of_two(tmp_path):
    """The two hosts, and the kernel's program on the first, with an engine on each."""
    (tmp_path / "kernel.py").write_text(KERNEL)
    files = tmp_path / "security"
    with two_hosts() as network, contextlib.ExitStack() as running:

        def start(host, *command, **options):
            process = psutil.Popen(
                [*host.prefix, sys.executable, *map(str, command)],
                stdout=subprocess.PIPE,
                stderr=(tmp_path / "said").open("ab"),
                text=True,
                **options,
            )
            running.callback(process.wait, 60)
            running.callback(process.terminate)
            return process

        controller = ["--ip", network["a"].address, "--location", network["a"].address]
        encrypted = "--IPController.enable_curve=True"
        folder = f"--profile-dir={tmp_path}"
        start(network["a"], "-m", "ipyparallel.controller", *controller, encrypted, folder)
        wait_for(lambda: (files / "ipcontroller-engine.json").exists(), 60)
        for number, host in enumerate(network.values()):  # in this order, whichever is first
            file = f"--file={files / 'ipcontroller-engine.json'}"
            start(host, "-m", "ipyparallel.engine", file, folder, f"--IPEngine.id={number}")
        yield network, start(network["a"], tmp_path / "kernel.py", tmp_path, cwd=tmp_path)


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def test_the_same_cell_over_two_hosts_and_what_its_failures_say(cluster_of_two, tmp_path):
    network, kernel = cluster_of_two

    def told():
        line = kernel.stdout.readline()
        assert line, (tmp_path / "said").read_text()
        return json.loads(line)

    [names] = told()
    [results] = told()
    assert [total for total, _ in results] == [6.0] * 4
    spaces = [space for _, space in results]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]

    message, kind, _ = told()
    assert kind == "timeout"
    assert "ranks 0, 1 and 2 wait in all_reduce" in message
    assert "rank 3 finished without calling it" in message

    wait_for(lambda: len([f for f in tmp_path.glob("rank-*") if f.read_text()]) == 4, 60)
    ranks = [psutil.Process(int(Path(f).read_text())) for f in sorted(tmp_path.glob("rank-*"))]
    network["b"].cut_off()
    message, kind, rank = told()
    assert (kind, rank) == ("lost", 2), message
    assert f"rank 2 was on host {names[1]}, which does not answer any more" in message
    assert "ranks 0 and 1 were waiting in all_reduce" in message
    [message] = told()  # the next launch says it at once
    assert names[1] in message
    assert not psutil.wait_procs(ranks, timeout=20)[1]
