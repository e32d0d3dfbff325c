"""Ends ranks and jobs, and removes folders, when the kernel itself is killed.

`launch` cleans up after itself in every case but one: when its own process is killed, nothing of it runs any more. The
ranks cannot see to it either, because a rank may sit in C code that holds Python's lock. So a small process of its own,
which imports nothing big, holds the list of what has to go, and acts when the kernel's end of its pipe closes.

This file is run as that program, and imported by the kernel for `janitor`, its remote control.
"""

import atexit
import glob
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress

JOB = "COURSE_JOB"  # environment variable of each process of a job
_PATIENCE = 1.0  # seconds for the fork server to end by itself
_JOB_PATIENCE = 10.0  # seconds for the processes of a job to be gone
_PAUSE = 0.1  # seconds between two looks at all processes
# In a row that find nobody: a process shows no environment while it becomes another program.
_LOOKS = 3


class Handle:
    """A process that may end, and whose number another process may then have: a signal reaches
    this one or none, where the system has pidfds."""

    def __init__(self, process: int):
        self.pid, self._gone, self._fd = process, False, None
        try:
            self._fd = os.pidfd_open(process)
        except ProcessLookupError:
            self._gone = True
        except (AttributeError, OSError):
            pass  # no pidfds here

    def send(self, number: int) -> bool:
        """Sends a signal; False if the process is gone. Number 0 only asks."""
        if self._gone:
            return False
        try:
            if self._fd is None:
                os.kill(self.pid, number)
            else:
                signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            self._gone = True
        return not self._gone

    def kill_group(self) -> None:
        """Ends the process and the group that it leads."""
        if self.send(0):  # else its number may be another process's by now
            # It may lead none yet; macOS refuses a group that is all zombies.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.send(signal.SIGKILL)

    def close(self) -> None:
        """To be called when the process is known to have ended, too: nothing is sent any more."""
        self._gone = True
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class Janitor:
    """The kernel's side: tells the janitor's process what to end and what it may forget."""

    def __init__(self):
        # a garbage collection may end ranks anywhere
        self._process, self._held, self._lock = None, [], threading.RLock()

    def keep(self, what: str, which: int | str) -> None:
        """From now on, `which` goes when this process dies.

        what: "rank", or what else leads a group of processes, or "server" with a process id, "folder"
        with its path, "job" with the name that its processes have as their COURSE_JOB.
        A job is for processes that start others out of sight of this one. Only a system with /proc and
        pidfds (Linux 5.3) shows who belongs to it; elsewhere the janitor does nothing for a job.
        """
        with self._lock:
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
            if (what, which) in self._held:  # a fork of this process holds nothing of its parent's
                self._held.remove((what, which))
                self._tell("forget", what, which)

    def _tell(self, *words):
        if self._process is not None:
            with suppress(BrokenPipeError):  # somebody has ended it
                self._write(*words)
                return
        self._start()

    def _start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the terminal is not for the janitor
        )
        atexit.register(self._stop, self._process)
        # A copy: the end of ranks, by a garbage collection, may come here.
        for what, which in list(self._held):
            self._write("keep", what, which)

    def _write(self, *words):
        # Unbuffered and shorter than a pipe's atomic size: a line arrives whole or not at all.
        os.write(self._process.stdin.fileno(), f"{' '.join(map(str, words))}\n".encode())

    def _stop(self, process):
        if process is self._process:  # a fork of this process has the parent's to stop, too
            process.stdin.close()
            process.wait(5)
            self.__init__()  # nothing more is told to it


janitor = Janitor()
os.register_at_fork(after_in_child=janitor.__init__)  # what was held is the parent's


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


def _end_server(server):
    """It ends with all below it, if it can."""
    end = time.monotonic() + _PATIENCE
    while server.send(0) and time.monotonic() < end:
        time.sleep(0.01)
    server.send(signal.SIGKILL)


def _end_job(name):
    """Ends this user's processes with the job's name in their environment, whoever their parent is now."""
    entry = f"{JOB}={name}".encode()
    end, looks = time.monotonic() + _JOB_PATIENCE, 0
    while looks < _LOOKS and time.monotonic() < end:
        killed = [_kill_if_of(entry, int(path[6:])) for path in glob.glob("/proc/[0-9]*")]
        looks = 0 if any(killed) else looks + 1
        time.sleep(_PAUSE)


def _kill_if_of(entry, number):
    """Whether the process belonged to the job. The handle comes first: if the number goes to another
    process after that, the signal does not."""
    process = Handle(number)
    try:
        known = process._fd is not None and entry in _environment(number)
        return known and process.send(signal.SIGKILL)
    except OSError:  # it has ended, or is another user's
        return False
    finally:
        process.close()


def _environment(number):
    """The entries of a process of this user's, as it was started; none of a zombie."""
    with open(f"/proc/{number}/environ", "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.getuid():
            return []
        return file.read().split(b"\0")


_ENDS = {
    "rank": Handle.kill_group,
    "server": _end_server,
    "job": _end_job,
    "folder": lambda path: shutil.rmtree(path, ignore_errors=True),
}


def main():
    held = {}
    for line in _lines():
        verb, what, which = line.split(" ", 2)
        if verb == "keep":
            held[what, which] = Handle(int(which)) if what in ("rank", "server") else which
        elif isinstance(known := held.pop((what, which), None), Handle):
            known.close()
    # ranks first, then the folders in which they write
    for (what, _), each in reversed(held.items()):
        _ENDS[what](each)


if __name__ == "__main__":
    main()
