"""Jobs of the janitor: who belongs to one by its environment ends with a kernel that is killed, and
nobody else."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from course_utils.launch.keepers import janitor
from course_utils.launch.keepers.janitor import JOB
from tests.support.leftovers import living

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc and pidfds are Linux's")

# Starts a detached process for each job that it is told to, and then is killed.
KERNEL = """
import json, os, subprocess, sys
from contextlib import ExitStack
from course_utils.launch.keepers.janitor import JOB, janitor

def start(job):
    command = ["sh", "-c", "setsid sleep 1000 >&- & echo $!"]
    return int(subprocess.check_output(command, env=os.environ | {JOB: job}))

kept, done, *others = sys.argv[1:]
with ExitStack() as opened:
    janitor.keep_with(opened, "job", done)
janitor.keep("job", kept)
print(json.dumps([start(job) for job in (kept, kept, done, *others)]), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def started():
    """Processes that end with the test."""
    processes = []
    yield processes
    for process in processes:
        if living(process):
            process.kill()


def sleeper(started, job, **options):
    process = psutil.Popen(["sleep", "1000"], env=os.environ | {JOB: job}, **options)
    started.append(process)
    return process


def wait_until_it_sleeps(process):
    while process.name() != "sleep":
        time.sleep(0.01)


def test_a_number_that_was_given_back_is_nobodys(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    held = janitor.Handle(process.pid)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a stranger may have the number now"))
    assert not held.send(signal.SIGKILL)


def test_a_fork_while_another_thread_tells_the_janitor_can_tell_it_too():
    program = """
import os, sys, tempfile
from course_utils.launch.keepers.janitor import janitor
with janitor._lock:  # as a thread that does not exist in the fork
    child = os.fork()
    if not child:
        with tempfile.TemporaryDirectory() as folder:
            janitor.keep("folder", folder)
            janitor.forget("folder", folder)
        sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            assert process.wait(timeout=60) == 7
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_job_ends_with_a_killed_kernel_and_the_jobs_of_others_go_on(started):
    jobs = [f"{os.getpid()}-{name}" for name in ("kept", "done", "kept2", "other")]
    kernel = psutil.Popen(
        [sys.executable, "-c", KERNEL, *jobs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started += [psutil.Process(number) for number in json.loads(kernel.stdout.readline())]
    [janitor_of_it] = [p for p in kernel.children() if "janitor.py" in " ".join(p.cmdline())]
    kernel.kill()
    kernel.communicate()
    assert not psutil.wait_procs([janitor_of_it], 20)[1]  # it has done what it does
    assert [living(process) for process in started] == [False, False, True, True, True]


def test_only_processes_of_the_same_user_end(started):
    if os.geteuid() != 0:
        pytest.skip("another user's process needs root")
    own, another = sleeper(started, "users"), sleeper(started, "users", user=65534)
    for process in (own, another):
        wait_until_it_sleeps(process)
    janitor._end_job("users")
    assert (living(own), living(another)) == (False, True)


def test_a_process_that_shows_no_environment_for_a_moment_ends_too(started, monkeypatch):
    """As long as it becomes another program."""
    process, looks, read = sleeper(started, "moment"), [], janitor._environment
    wait_until_it_sleeps(process)

    def reads(number):
        if number == process.pid:
            looks.append(number)
        return [] if len(looks) == 1 else read(number)

    monkeypatch.setattr(janitor, "_environment", reads)
    janitor._end_job("moment")
    assert not living(process)


def test_a_signal_goes_to_the_process_that_was_looked_at_or_to_none(started, monkeypatch):
    """The process ends as the janitor looks, and another one of the job has its number."""
    process, held, sent = sleeper(started, "before"), [], []
    pidfd_open, kill = os.pidfd_open, os.kill

    def opens(number):
        held.append(number)
        return pidfd_open(number)

    def reads(number):
        assert held[-1] == number  # by a pidfd, which stays the old process's
        if number != process.pid:
            return []
        kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        return [f"{JOB}=after".encode()]

    monkeypatch.setattr(os, "pidfd_open", opens)
    monkeypatch.setattr(janitor, "_environment", reads)
    monkeypatch.setattr(os, "kill", lambda *call: sent.append(call))
    janitor._end_job("after")
    assert process.pid in held and not sent


def test_where_no_process_can_be_held_nothing_is_done(started, monkeypatch):
    process = sleeper(started, "unheld")
    monkeypatch.delattr(os, "pidfd_open")
    janitor._end_job("unheld")
    assert living(process)
