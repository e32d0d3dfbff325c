"""Ends ranks and removes folders when the kernel itself is killed.

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

_PATIENCE = 1.0  # seconds for the fork server to end by itself


class Janitor:
    """The kernel's side: tells the janitor's process what to end and what it may forget."""

    def __init__(self):
        self._process = None
        self._owner = None
        self._held = []
        self._lock = threading.Lock()

    def keep(self, what: str, which: int | str) -> None:
        """From now on, `which` goes when this process dies.

        what: "rank", or what else leads a group of processes, or "server" with a process id, "folder" or
        "socket" with a folder's path.
        """
        with self._lock:
            if (what, which) not in self._held:
                self._held.append((what, which))
                self._tell("keep", what, which)

    def forget(self, what: str, which: int | str) -> None:
        """`which` is gone already."""
        with self._lock:
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
        if self._owner == os.getpid():
            for what, which in self._held:
                if what == "socket":  # multiprocessing removes that itself
                    self._write("forget", what, which)
            process.stdin.close()
            process.wait(5)


janitor = Janitor()


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
        self._number = number
        try:
            self._fd = os.pidfd_open(number)
        except (AttributeError, OSError):
            self._fd = None

    def send(self, signal_number):
        if self._fd is None:
            os.kill(self._number, signal_number)
        else:
            signal.pidfd_send_signal(self._fd, signal_number)

    def end(self, what):
        try:
            if what == "server":  # it ends with all below it, if it can
                self._wait()
            self.send(0)  # its number is its own as long as this succeeds
            if what == "rank":
                self._end_group()
            self.send(signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _end_group(self):
        try:
            os.killpg(self._number, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # it has no group of its own yet; macOS refuses a group that is all zombies

    def _wait(self):
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            self.send(0)
            time.sleep(0.01)

    def close(self):
        if self._fd is not None:
            os.close(self._fd)


def _remove(what, which, process):
    if process:
        process.end(what)
    else:
        shutil.rmtree(which, ignore_errors=True)


def main():
    held = {}
    for line in _lines():
        verb, what, which = line.split(" ", 2)
        if verb == "keep":
            held[what, which] = _Process(int(which)) if what in ("rank", "server") else None
        elif process := held.pop((what, which)):
            process.close()
    # ranks first, then the folders in which they write
    for (what, which), process in reversed(held.items()):
        _remove(what, which, process)


if __name__ == "__main__":
    main()
