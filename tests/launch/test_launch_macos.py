"""Repairs for macOS, where nobody has run the course: what macOS does, told to this system."""

import os
import subprocess
import sys

import psutil
import pytest
import torch.distributed as dist

from course_utils.launch import RankFailure
from course_utils.launch.keepers import server
from tests.support.leftovers import nothing_left
from tests.support.on_gloo import launch


def one_waits(rank):
    if rank == 0:
        dist.barrier()


def test_a_group_of_zombies_may_not_be_killed(monkeypatch, tmp_path):
    def refused(pid, number):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "killpg", refused)
    with nothing_left(tmp_path), pytest.raises(RankFailure, match="barrier"):
        launch(one_waits, 2)


@pytest.mark.parametrize("limit", [-1, 2**63 - 1, 256])
def test_files_are_closed_whatever_the_limit_is(limit):
    program = f"""
import os
os.sysconf = lambda name: {limit}
from course_utils.launch.keepers import forks
kept, closed = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_RDONLY)
forks.close_files_but([kept])
os.fstat(kept)
try:
    os.fstat(closed)
except OSError:
    print("closed")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "closed\n", done.stderr


def test_objective_c_is_told_before_the_fork_server_imports_anything():
    server.ensure_running()
    told = psutil.Process(server._server.pid).environ()
    assert told["OBJC_DISABLE_INITIALIZE_FORK_SAFETY"] == "YES"
    assert "OBJC_DISABLE_INITIALIZE_FORK_SAFETY" not in os.environ
