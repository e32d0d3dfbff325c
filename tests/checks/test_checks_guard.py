"""guard: code of a learner that hangs, floods or changes its process."""

import itertools
import os
import queue
import random
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

from course_exercises.authoring.guard import Deadline, TimeIsUp, undisturbed
from course_utils.comm import fair


def spin():
    while True:
        pass


def spin_and_swallow():
    while True:
        try:
            while True:
                pass
        except Exception:  # noqa: BLE001, S110 - what a learner may write
            pass


def swallow_once():
    try:
        spin()
    except:  # noqa: E722 - what a learner may write
        spin()


def tensors():
    t = torch.eye(50)
    while True:
        t = t @ t


IN_A_THREAD = """
import threading
from course_exercises.authoring import forbidden
from course_exercises.authoring.guard import Deadline

def run():
    with Deadline(5):
        pass

thread = threading.Thread(target=run)
thread.start()
thread.join()
with forbidden.called(run) as names:
    run()
print(names)
"""

IN_A_TRACE = """
import torch
from torch import nn

import course_planner as estimate
from course_exercises.authoring.guard import Deadline, TimeIsUp

def program(mesh, layout):
    model = nn.Sequential(*[nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(6)])
    return lambda: model(torch.randn(2, 16, 64)).sum().backward()

ended = 0
for number in range(20):
    try:
        with Deadline(0.01 + 0.002 * number):
            while True:
                estimate.trace(program, estimate.Layout(dp=8))
    except TimeIsUp:
        ended += 1
print(ended)
"""


HANGS = [spin, spin_and_swallow, swallow_once, tensors]
WAITS = [lambda: time.sleep(60), lambda: queue.Queue().get(), lambda: threading.Event().wait()]


@pytest.mark.parametrize("hang", HANGS + WAITS)
def test_a_hang_is_ended(hang):
    with pytest.raises(TimeIsUp), Deadline(0.2):
        hang()


@pytest.mark.parametrize("hang", HANGS)
def test_a_hang_outside_the_main_thread_is_ended(hang):
    ended = []

    def work():
        try:
            with Deadline(0.2):
                hang()
        except TimeIsUp:
            ended.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert ended == [True]


def test_nothing_comes_after_the_end():
    for _ in range(200):
        try:
            with Deadline(0.0005):
                for _ in range(2000):
                    pass
        except TimeIsUp:
            pass
    time.sleep(0.6)  # an alarm left behind would ring here


def test_paused_time_does_not_count():
    with Deadline(0.2) as deadline, deadline.paused():
        time.sleep(0.4)
    with pytest.raises(TimeIsUp), Deadline(0.2) as deadline:
        with deadline.paused():
            time.sleep(0.1)
        spin()


def test_time_without_a_processor_does_not_count(monkeypatch):
    """A machine so busy that this thread gets a tenth of a processor; and one that does not say it."""
    own = Path(f"/proc/{os.getpid()}/task/{threading.get_native_id()}")
    begin = time.monotonic()

    def schedule(file):
        passed = (time.monotonic() - begin) * 1e9
        return f"{passed / 10:.0f} {passed * 9 / 10:.0f} 1" if file.parent == own else "0 0 0"

    monkeypatch.setattr(Path, "read_text", schedule)
    assert _seconds_until_the_end() > 0.8

    monkeypatch.setattr(fair, "_threads", lambda pid: ())
    monkeypatch.setattr(time, "process_time", lambda: time.monotonic() / 10)
    assert _seconds_until_the_end() > 0.8


def _seconds_until_the_end():
    started = time.monotonic()
    with pytest.raises(TimeIsUp), Deadline(0.1):
        spin()
    return time.monotonic() - started


def test_what_the_check_itself_does_counts_a_tenth():
    def work():
        sum(itertools.repeat(1, 10**8))

    with Deadline(60) as deadline:
        sum(itertools.repeat(1, 10**8))  # in the frame that has the deadline, as a check's own line
        spent = 60 - deadline.left
    with Deadline(60) as deadline:
        work()
        assert 0 < spent < (60 - deadline.left) / 3


def test_the_clock_sees_children_and_delays_that_are_told_late(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        threads = dict(fair._threads(os.getpid()))
        child.communicate(b"\n")
    (childs,) = (name for name in threads if f"/{child.pid}/" in name)
    monkeypatch.setattr(fair, "_threads", lambda pid: threads.items())
    clock = fair.FairClock()
    time.sleep(0.05)
    assert clock.passed() >= 0.05
    ran, delayed = threads[childs]
    threads[childs] = ran, delayed + 0.05  # ready to run all the time, as one hears afterwards
    assert clock.passed() < 0


def test_the_state_of_the_kernel_comes_back():
    torch.manual_seed(3)
    random.seed(3)
    expected = (torch.rand(3), random.random())
    torch.manual_seed(3)
    random.seed(3)
    before = (os.getcwd(), dict(os.environ), torch.get_num_threads(), sys.stdout)
    with undisturbed():
        assert torch.get_num_threads() == 1
        torch.manual_seed(9)
        random.seed(9)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        os.environ["COURSE_TEST"] = "1"
        os.environ.pop("PATH")
        os.chdir("/")
    assert (os.getcwd(), dict(os.environ), torch.get_num_threads(), sys.stdout) == before
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert torch.is_grad_enabled()


def test_the_state_comes_back_after_an_error():
    with pytest.raises(ValueError), undisturbed():
        torch.set_default_dtype(torch.float64)
        raise ValueError
    assert torch.get_default_dtype() == torch.float32


def test_inside_the_state_is_known():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), undisturbed():
            assert torch.tensor(1.0).dtype == torch.float32
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_prints_and_warnings_are_kept_apart(capsys):
    with undisturbed() as printed:
        print("one")
        print("two", file=sys.stderr)
        warnings.warn("three", stacklevel=1)
    assert printed.lines() == ["one", "two"]
    assert capsys.readouterr() == ("", "")


def test_a_flood_of_prints_is_cut():
    with undisturbed() as printed:
        for _ in range(10_000):
            print("x" * 100)
    assert sum(map(len, printed.lines())) <= 2000


def test_after_a_deadline_in_a_thread_a_profiler_still_works():
    """Python 3.11 hung in it: an exception that was taken back was looked for at every call."""
    command = [sys.executable, "-c", IN_A_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['run']\n", done.stderr


def test_a_trace_is_ended_where_it_does_not_end_the_process(tmp_path):
    """C++ that called Python back ends the process over an exception: one in thirteen traces did."""
    (tmp_path / "mine.py").write_text(IN_A_TRACE)
    command = [sys.executable, tmp_path / "mine.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "20\n", done.stderr
