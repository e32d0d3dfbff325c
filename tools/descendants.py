"""Runs commands that leave nothing: all that a command has started ends with it, and its time counts.

Fork servers, engines and janitors leave the session, and their parents die before them. On Linux
this process takes the place of init for them (prctl(2), PR_SET_CHILD_SUBREAPER): it can end them, and
their processor time is part of its children's. Elsewhere it ends those that it finds in time.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from course_utils.comm.fair import FairClock
from course_utils.comm.interrupts import uninterrupted

_SET_CHILD_SUBREAPER = 36  # <sys/prctl.h>
PATIENCE = 20  # seconds for fixtures that stop what they have started
GRACE = 5  # seconds for janitors, which go by themselves when their kernel has gone
POLL = 0.05
LOOK = 1.0  # seconds between two looks at the clock, which asks all threads


def adopt() -> None:
    """From now on, an orphan among the descendants is a child of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def processor_seconds() -> float:
    """What all descendants that have ended have used, user and system."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def call(command: list[str], seconds: float, folder: Path) -> int:
    """Run `command` until it ends, or for `seconds`, without those in which a busy machine had no
    processor for it; return its exit status. Whether it ends or is ended here, none of its descendants
    is left."""
    process = subprocess.Popen(command, cwd=folder, start_new_session=True)
    try:
        if _ended(process, seconds):
            return process.returncode
        print(f"\n{' '.join(command)}\nwas still running at its limit, and was ended.")
        return 1
    finally:
        with uninterrupted(), uninterrupted(signal.SIGTERM):  # who asks twice waits for the end too
            _end(process)


def _ended(process: subprocess.Popen, seconds: float) -> bool:
    """Whether the process ends before its time is up."""
    clock, looked = FairClock(), time.monotonic()
    while process.returncode is None and seconds > 0:
        _reap(process)
        time.sleep(POLL)
        if time.monotonic() - looked > LOOK:
            seconds, looked = seconds - clock.passed(), time.monotonic()
    return process.returncode is not None


def _end(process: subprocess.Popen) -> None:
    """End the process, and first politely; then its descendants, those in other sessions too."""
    left = psutil.Process().children(recursive=True)  # where nobody adopts, they are lost with it
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        _ended(process, PATIENCE)
    graceful = time.monotonic() + GRACE
    while left := _living({*left, *psutil.Process().children(recursive=True)}):
        if time.monotonic() > graceful:
            for each in left:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        _reap(process)
        time.sleep(POLL)
    _reap(process)


def _living(processes: set[psutil.Process]) -> set[psutil.Process]:
    found = set()
    for each in processes:
        with contextlib.suppress(psutil.Error):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.add(each)
    return found


def _reap(process: subprocess.Popen) -> None:
    """Take the status of each child that has ended: of the process, and of adopted orphans."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == process.pid:
                process.returncode = os.waitstatus_to_exitcode(status)
            if not pid:
                return
