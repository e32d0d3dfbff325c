"""Ends ranks and jobs, and removes folders, when the kernel itself is killed.

`launch` cleans up after itself in every case but one: when its own process is killed, nothing
of it runs any more. The ranks cannot see to it either, because a rank may sit in C code that
holds Python's lock. So a small process of its own, which imports nothing big, holds the list of
what has to go, and acts when the kernel's end of its pipe closes.

This file is run as that program, and imported by the kernel for `janitor`, its remote control.
"""

import atexit
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack

JOB = "COURSE_JOB"  # environment variable of each process of a job
_PATIENCE = 1.0  # seconds for the fork server to end by itself
_JOB_PATIENCE = 10.0  # seconds for the processes of a job to be gone
_PAUSE = 0.1  # seconds between two looks at all processes
# In a row that find nobody: a process shows no environment while it becomes another program.
_LOOKS = 3


class Janitor:
    """The kernel's side: tells the janitor's process what to end and what it may forget."""

    def __init__(self):
        self._process = None
        self._owner = None
        self._held = []
        self._lock = threading.RLock()  # a garbage collection may end ranks anywhere

    def keep(self, what: str, which: int | str) -> None:
        """From now on, `which` goes when this process dies.

        what: "rank", or what else leads a group of processes, or "server" with a process id, "folder"
        with its path, "job" with the name that its processes have as their COURSE_JOB.
        A job is for processes that start others out of sight of this one. Only a system with /proc and
        pidfds (Linux 5.3) shows who belongs to it; elsewhere the janitor does nothing for a job.
        """
        with self._lock:
            if self._owner not in (None, os.getpid()):
                self._held.clear()  # in a fork: they are the parent's
            if (what, which) not in self._held:
                self._held.append((what, which))
                self._tell("keep", what, which)

    def keep_with(self, opened: ExitStack, what: str, which: int | str) -> None:
        """`which` goes when this process dies before `opened` is closed."""
        self.keep(what, which)
        opened.callback(self.forget, what, which)

    def forget(self, what: str, which: int | str) -> None:
        """`which` is gone already."""
        with self._lock:
            if self._owner == os.getpid():
                self._held.remove((what, which))
                self._tell("forget", what, which)

    def _tell(self, verb, what, which):
        try:
            if self._owner != os.getpid():  # first use, or a fork of the process that used it
                raise BrokenPipeError
            self._write(verb, what, which)
        except BrokenPipeError:
            self._start()

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is not for the janitor
        )
        self._owner = os.getpid()
        atexit.register(self._stop, self._process)
        for what, which in self._held:
            self._write("keep", what, which)

    def _write(self, verb, what, which):
        # Unbuffered and shorter than a pipe's atomic size: a line arrives whole or not at all.
        os.write(self._process.stdin.fileno(), f"{verb} {what} {which}\n".encode())

    def _stop(self, process):
        if self._owner == os.getpid() and process is self._process:
            process.stdin.close()
            process.wait(5)
            self._owner = None  # nothing more is told to it


janitor = Janitor()


def _renew_lock():
    """In a fork: who held it is not there."""
    janitor._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _lines():
    """Yields the kernel's lines until the kernel is gone."""
    kernel, rest = os.getppid(), b""
    # The pipe stays open if the kernel has forked children that live on; then its death shows
    # in the number of this process's parent.
    while os.getppid() == kernel:
        if select.select([0], [], [], 0.25)[0]:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            yield from (line.decode() for line in lines)


class _Process:
    """A process that is held by its number and, where there are pidfds, by one of those: a number
    may belong to another process by now."""

    def __init__(self, number):
        self._number = int(number)
        self._fd, self._gone = None, False
        try:
            self._fd = os.pidfd_open(self._number)
        except ProcessLookupError:
            self._gone = True  # whoever has its number later is a stranger
        except (AttributeError, OSError):
            pass

    def send(self, signal_number):
        if self._gone:
            raise ProcessLookupError
        if self._fd is None:
            os.kill(self._number, signal_number)
        else:
            signal.pidfd_send_signal(self._fd, signal_number)

    def end(self):
        try:
            self._prepare()
            self.send(signal.SIGKILL)
        except ProcessLookupError:
            pass

    def close(self):
        if self._fd is not None:
            os.close(self._fd)


class _Rank(_Process):
    def _prepare(self):
        self.send(0)  # its number is its own as long as this succeeds
        try:
            os.killpg(self._number, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has no group of its own yet; macOS refuses a group that is all zombies


class _Server(_Process):
    def _prepare(self):
        """It ends with all below it, if it can."""
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            self.send(0)
            time.sleep(0.01)


class _Job:
    """This user's processes with the job's name in their environment, whoever their parent is now."""

    def __init__(self, name):
        self._entry = f"{JOB}={name}".encode()

    def end(self):
        if not (os.path.isdir("/proc/self") and hasattr(os, "pidfd_open")):
            return
        end, looks = time.monotonic() + _JOB_PATIENCE, 0
        while looks < _LOOKS and time.monotonic() < end:
            killed = [self._kill(int(name)) for name in os.listdir("/proc") if name.isdecimal()]
            looks = 0 if any(killed) else looks + 1
            time.sleep(_PAUSE)

    def _kill(self, number):
        """Whether it belonged to the job. The pidfd comes first: if the number goes to another process
        after that, the signal does not."""
        try:
            fd = os.pidfd_open(number)
        except OSError:  # it has just ended
            return False
        try:
            if self._entry not in _environment(number):
                return False
            signal.pidfd_send_signal(fd, signal.SIGKILL)
            return True
        except OSError:  # it has ended, or is another user's
            return False
        finally:
            os.close(fd)

    def close(self):
        pass


def _environment(number):
    """The entries of a process of this user's, as it was started; none of a zombie."""
    with open(f"/proc/{number}/environ", "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            return []
        return file.read().split(b"\0")


class _Folder:
    def __init__(self, path):
        self._path = path

    def end(self):
        shutil.rmtree(self._path, ignore_errors=True)

    def close(self):
        pass


_KINDS = {"rank": _Rank, "server": _Server, "job": _Job, "folder": _Folder}


def main():
    held = {}
    for line in _lines():
        verb, what, which = line.split(" ", 2)
        if verb == "keep":
            held[what, which] = _KINDS[what](which)
        else:
            held.pop((what, which)).close()
    # ranks first, then the folders in which they write
    for each in reversed(held.values()):
        each.end()


if __name__ == "__main__":
    main()
