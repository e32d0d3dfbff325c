"""A rank as the kernel sees it: its process, its three channels, its end."""

import contextlib
import os
import re
import signal
import socket
import sys
from pathlib import Path

import psutil

from course_utils.launch import family, packing, rank, server, stacks
from course_utils.launch.janitor import janitor
from course_utils.launch.output import Output

START = 60.0  # seconds that ranks get to start, beyond a launch's limit: a busy machine is no fault

# What handles signals in every rank: faulthandler, the request for stacks, and the C library with
# the two real-time signals below those that it offers. A bit for each, as in /proc.
_OWN_HANDLERS = sum(
    1 << (number - 1)
    for number in (
        signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, stacks.ASK, 32, 33
    )
)  # fmt: skip


class Rank:
    """The process of one rank.

    report:  what the rank has delivered (a dict with the key "kind"), None before
    code:    its exit code once it is dead (negative: the number of a signal), None before
    """

    def __init__(self, number: int, record: str):
        self.number = number
        self.report = None
        self.code = None
        self.main_thread = None  # known when the rank is ready to be asked for its stacks
        self.joined = False  # true when it is connected to all others, and waits to begin
        self.record = record
        self.output = Output(number, os.path.dirname(record), live=number == 0)
        with contextlib.ExitStack() as opened:
            self.channel, theirs = map(opened.enter_context, socket.socketpair())
            self.printed, printing = map(opened.enter_context, server.context.Pipe(duplex=False))
            self.stacks, stacking = map(opened.enter_context, server.context.Pipe(duplex=False))
            ends = (theirs, printing, stacking)
            self.process = server.start(rank.main, (number, *ends), number)
            janitor.keep("rank", self.process.pid)
            self._handle = family.Handle(self.process.pid)
            self._activity = _activity(self.process.pid)
            opened.pop_all()
        for end in ends:
            end.close()
        os.set_blocking(self.printed.fileno(), False)

    def give(self, parts: list) -> None:
        """Sends the rank a message; a rank that has died already shows it in other ways."""
        with contextlib.suppress(ConnectionError):
            packing.send(self.channel, parts)

    def listen(self) -> None:
        """After all has been given: messages of the rank are read piece by piece."""
        self.channel.setblocking(False)
        self._inbox = packing.Inbox(self.channel)

    def begin(self) -> None:
        """Lets the rank call the learner's function: all ranks are connected."""
        with contextlib.suppress(OSError):
            self.channel.send(b"b")

    def read_message(self) -> bool:
        """Takes what has arrived from the rank; False when nothing more can come."""
        try:
            while self._inbox.read():
                message = self._unpacked(self._inbox.parts)
                if message["kind"] == "ready":
                    self.main_thread = message["main_thread"]
                elif message["kind"] == "joined":
                    self.joined = True
                else:
                    self.report = message
                self._inbox = packing.Inbox(self.channel)
        except BlockingIOError:
            return True
        except (EOFError, ConnectionError):
            return False
        return True

    def _unpacked(self, parts):
        try:
            return packing.unpack(parts)
        except Exception as error:  # noqa: BLE001 - what a rank could send may not be rebuilt
            return {"kind": "pickle", "what": "receive", "text": f"{type(error).__name__}: {error}"}

    def read_output(self) -> bool:
        """Takes what the rank has printed; False when nothing more can come."""
        try:
            data = os.read(self.printed.fileno(), 1 << 18)
        except BlockingIOError:
            return True
        self.output.add(data)
        return bool(data)

    def read_end(self) -> bool:
        """Takes note of the rank's death."""
        while self.read_message() and self.report is None and self._pending():
            pass
        self.process.join()
        self._handle.forget()
        self.code = self.process.exitcode
        return False

    def _pending(self):
        try:
            return bool(self.channel.recv(1, socket.MSG_PEEK))
        except (BlockingIOError, ConnectionError):
            return False

    @property
    def finished(self) -> bool:
        return self.report is not None and self.report["kind"] == "result"

    @property
    def failed(self) -> bool:
        return not self.finished and (self.report is not None or self.code is not None)

    @property
    def living(self) -> bool:
        """Neither finished nor failed."""
        return self.report is None and self.code is None

    def activity(self) -> tuple[float, bool]:
        """Processor time used so far in seconds, and whether the rank sleeps now."""
        if self._activity is None:
            return 0.0, True
        try:
            times = self._activity.cpu_times()
            # macOS calls every process running.
            asleep = sys.platform != "linux" or self._activity.status() == psutil.STATUS_SLEEPING
            return times.user + times.system, asleep
        except psutil.Error:
            return 0.0, True

    def handles_signals(self) -> bool:
        """Whether the rank may have a handler for a signal that is not there in every rank."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return True  # a system that does not tell
        caught = int(re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)[1], 16)
        return bool(caught & ~_OWN_HANDLERS)

    def calls_made(self) -> int:
        """A number that changes with each collective call of the rank."""
        return os.stat(self.record).st_mtime_ns

    def send_signal(self, number: int) -> None:
        """Sends the rank a signal, if it lives."""
        self._handle.send(number)

    def last_words(self) -> stacks.Stacks:
        """The stack that a rank wrote when it crashed."""
        return stacks.Stacks(stacks.drain(self.stacks), self.main_thread)

    def kill(self) -> None:
        """Ends the rank and its group; nothing that it does can delay that."""
        if self._handle.send(0):  # else its number may be another process's by now
            # It has no group of its own before main; macOS refuses a group that is all zombies.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self._handle.send(signal.SIGKILL)

    def close(self) -> None:
        """After kill: waits for the end and frees what the kernel holds of the rank."""
        janitor.forget("rank", self.process.pid)
        self._handle.close()
        server.end(self.process)
        for channel in (self.channel, self.printed, self.stacks):
            channel.close()


def _activity(pid):
    with contextlib.suppress(psutil.Error):  # it has ended already
        return psutil.Process(pid)


def where(ranks: list[Rank]) -> dict[Rank, stacks.Stacks | None]:
    """Asks the ranks where they are, all at once; None for one that cannot answer."""
    able = [each for each in ranks if each.main_thread is not None and each.code is None]
    texts = stacks.ask([(each.stacks, each.send_signal, each.main_thread) for each in able])
    found = dict.fromkeys(ranks)
    for each, text in zip(able, texts):
        found[each] = stacks.Stacks(text, each.main_thread) if text else None
    return found
