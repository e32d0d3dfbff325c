"""The fork server leaves when nobody needs it, and is back for the next launch."""

import multiprocessing
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from course_utils.launch.keepers import janitor, server
from tests.support.on_gloo import launch


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(server, "IDLE", 0)
    server.ensure_running()


def _sum(rank):
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def _running():
    return server._server and server._server.pid


def test_an_idle_fork_server_leaves_and_is_back_for_the_next_launch():
    before = _running()
    server.leave_if_idle()
    assert _running() is None
    assert not psutil.pid_exists(before)
    assert ("server", before) not in janitor.janitor._held
    assert not server.died()  # it has left, which is no failure of a launch
    assert launch(_sum, 2) == [2, 2]
    assert _running() not in (None, before)


def test_it_stays_while_a_launch_goes_on(tmp_path):
    def wait(rank, folder):
        (folder / "running").touch()
        while not (folder / "done").exists():
            time.sleep(0.01)

    def leave_meanwhile():
        while not (tmp_path / "running").exists():
            time.sleep(0.01)
            server.leave_if_idle()
        server.leave_if_idle()
        (tmp_path / "done").touch()

    other = threading.Thread(target=leave_meanwhile)
    other.start()
    launch(wait, 1, tmp_path)
    other.join()
    assert psutil.pid_exists(_running())


def test_a_process_of_the_learner_has_a_fork_server_of_its_own():
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        server.leave_if_idle()
        assert _running() is None and process.is_alive()
    finally:
        process.kill()
        process.join()


def test_a_launch_that_comes_as_it_leaves_finds_another():
    """Each launch begins at another point of the leaving, which goes on without a pause."""
    stop = threading.Event()

    def leave_always():
        while not stop.wait(0.001):
            server.leave_if_idle()

    thread = threading.Thread(target=leave_always)
    thread.start()
    try:
        for _ in range(3):
            assert launch(_sum, 2) == [2, 2]
    finally:
        stop.set()
        thread.join()


def test_the_thread_that_preloads_looks_after_it(monkeypatch):
    monkeypatch.setattr(server, "_LOOK", 0.05)
    looks = threading.Event()
    monkeypatch.setattr(server, "leave_if_idle", looks.set)
    threading.Thread(target=server._keep, daemon=True).start()
    assert looks.wait(60)
