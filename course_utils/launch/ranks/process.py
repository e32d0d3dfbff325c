"""A rank on this machine: its process, its three channels, its end."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil

from course_utils.comm.events import note
from course_utils.launch.keepers import server
from course_utils.launch.keepers.janitor import Handle, janitor
from course_utils.launch.ranks import packing
from course_utils.launch.ranks.output import Output
from course_utils.launch.story import stacks
from course_utils.launch.story.view import Rank

# What handles signals in every rank: faulthandler, the request for stacks, and the C library with
# the two real-time signals below those that it offers. A bit for each, as in /proc.
_CRASHES = signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL
_OWN_HANDLERS = sum(1 << (number - 1) for number in (*_CRASHES, stacks.ASK, 32, 33))


class Here:
    """This machine, as a host of ranks."""

    name = None
    tick = 0.05

    def stacks(self, ranks: list["RankProcess"]) -> list[str]:
        return stacks.ask([(each.stacks, each.handle.send, each.main_thread) for each in ranks])

    def bring_records(self) -> Callable[[], None]:
        return lambda: None  # they are where the ranks write them

    def orphaned(self) -> bool:
        return server.died()


_here = Here()


class RankProcess(Rank):
    """The process of one rank."""

    def __init__(self, number: int, folder: str):
        super().__init__(number, _here, folder, Output(number, folder, live=number == 0))
        with contextlib.ExitStack() as opened:
            self.channel, theirs = map(opened.enter_context, socket.socketpair())
            self.printed, printing = map(opened.enter_context, multiprocessing.Pipe(duplex=False))
            self.stacks, stacking = map(opened.enter_context, multiprocessing.Pipe(duplex=False))
            ends = (theirs, printing, stacking)
            self.process = server.start(number, *(end.fileno() for end in ends))
            self.pid = self.process.pid
            note("forked", f"rank {number} is process {self.pid}")
            janitor.keep("rank", self.pid)
            self.handle = Handle(self.pid)
            self._activity = None
            with contextlib.suppress(psutil.Error):  # it has ended already
                self._activity = psutil.Process(self.pid)
            opened.pop_all()
        for end in ends:
            end.close()
        os.set_blocking(self.printed.fileno(), False)
        self._messages = packing.messages(self.channel)

    def give(self, parts: list) -> None:
        """Sends the rank a message; a rank that has died already shows it in other ways."""
        with contextlib.suppress(ConnectionError):
            packing.send(self.channel, parts)

    def call(self, parts: list) -> None:
        """Gives the rank its next call, and forgets what it has said and printed in the last one."""
        self.report = self.ended_at = None
        self.joined = False
        self.output = Output(self.number, self.folder, live=self.number == 0)
        self.channel.setblocking(True)
        self.give(parts)

    def answer(self, line: str) -> None:
        self.give(packing.pack(line))

    def listen(self) -> Iterable[tuple[Any, Callable[[], bool]]]:
        self.channel.setblocking(False)  # messages of the rank are read piece by piece
        return (
            (self.channel, self.read_message),
            (self.printed, self.read_output),
            (self.process.sentinel, self.read_end),
        )

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            self.channel.send(b"b")

    def read_message(self) -> bool:
        """Takes what has arrived from the rank; False when nothing more can come."""
        try:
            while parts := next(self._messages):
                self.on_message(packing.message(parts))
        except (EOFError, ConnectionError, StopIteration):  # the last: one of the others was before
            return False
        return True

    def read_output(self) -> bool:
        try:
            data = os.read(self.printed.fileno(), 1 << 18)
        except BlockingIOError:
            return True
        self.output.add(data)
        return bool(data)

    def read_end(self) -> bool:
        """Takes note of the rank's death."""
        self.read_message()
        self.end(self.process.wait())
        self.handle.close()
        note("died", f"rank {self.number}, exit code {self.code}")
        return False

    def activity(self) -> tuple[float, bool]:
        with contextlib.suppress(psutil.Error):
            if process := self._activity:
                times = process.cpu_times()
                # macOS calls every process running.
                asleep = sys.platform != "linux" or process.status() == psutil.STATUS_SLEEPING
                return times.user + times.system, asleep
        return 0.0, True

    def handles_signals(self) -> bool:
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return True  # a system that does not tell
        caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
        return bool(caught & ~_OWN_HANDLERS)

    def calls_made(self) -> int:
        return os.stat(self.record).st_size

    def last_words(self) -> stacks.Stacks:
        return stacks.Stacks(stacks.drain(self.stacks), self.main_thread)

    def kill(self) -> None:
        """Ends the rank and its group; nothing that it does can delay that."""
        self.handle.kill_group()

    def close(self) -> None:
        """After kill: waits for the end and frees what the kernel holds of the rank."""
        janitor.forget("rank", self.pid)
        self.handle.close()
        if self.code is None:
            self.process.wait()
        for channel in (self.process.sentinel, self.channel, self.printed, self.stacks):
            channel.close()
