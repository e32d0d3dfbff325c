"""A rank as the kernel sees it, wherever it is, and the host that it is on."""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import psutil

from course_utils.comm.events import note
from course_utils.launch.story import calls, stacks
from course_utils.launch.story.matching import Meetings

START = 60.0  # seconds that ranks get to start, beyond a launch's limit: a busy machine is no fault


class Host(Protocol):
    """What the kernel asks a host about the ranks on it."""

    name: str | None  # None: the kernel's own
    tick: float  # seconds after which what is known of its ranks is new

    def stacks(self, ranks: list["Rank"]) -> list[str]:
        """What each of these ranks answers when it is asked where it is; "" for one that does not."""

    def bring_records(self) -> Callable[[], None]:
        """Begins to bring the records of all its ranks to their `record`; returns what waits for that."""

    def orphaned(self) -> bool:
        """Whether the process from which the host's ranks are forked has died."""


class Rank:
    """What is known of one rank."""

    pid: int | None = None  # of a rank on this machine
    code: int | None = None  # its exit code once it is dead (negative: the number of a signal)
    report: dict | None = None  # what it has delivered
    ended_at: float | None = None  # when it raised, or else was heard of; of time.monotonic()
    held = False  # a debugger has it, and the learner has not let it go
    asks: str | None = None  # what its debugger has written, if it waits for the learner's answer
    lost: str | None = None  # why nobody knows of it any more, said of its host
    main_thread: str | None = None  # known when the rank is ready to be asked for its stacks
    joined = False  # true when it is connected to all others, and waits to begin

    def __init__(self, number: int, host: Host, folder: str, output: Any):
        self.number = number
        self.host = host  # where it is
        self.folder = folder  # of the launch
        self.record = calls.path(folder, number)  # of its calls, as the kernel has it
        self.output = output  # what it has printed

    def on_message(self, message: dict) -> None:
        """Takes a message of the rank."""
        if message["kind"] == "ready":
            self.main_thread = message["main_thread"]
        elif message["kind"] == "joined":
            self.joined = True
        elif message["kind"] in ("asks", "left"):
            self.held = message["kind"] == "asks"
            self.asks = message["text"] if self.held else None
        else:
            self.report = message
            # What it raised it tells a while later, on a busy machine; another host has its own clock.
            raised_at = message.get("raised_at") if self.host.name is None else None
            self.ended_at = self.ended_at or raised_at or time.monotonic()
            note("delivered", f"rank {self.number}, {message['kind']}")

    def end(self, code: int) -> None:
        """Takes note of its death."""
        self.code = code
        self.ended_at = self.ended_at or time.monotonic()

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

    # What depends on where the rank is, and each kind of rank has to say.

    def listen(self) -> Iterable[tuple[Any, Callable[[], bool]]]:
        """What to wait for, and what to call when something is there; that returns False when nothing more can come.
        To be called when all has been given."""

    def begin(self) -> None:
        """Lets the rank call the learner's function: all ranks are connected."""

    def answer(self, line: str) -> None:
        """Gives its debugger, which asks, a line; "" is the end of all lines."""

    def read_output(self) -> bool:
        """Takes what the rank has printed; False when nothing more can come."""

    def activity(self) -> tuple[float, bool]:
        """Processor time used so far in seconds, and whether the rank sleeps now."""

    def handles_signals(self) -> bool:
        """Whether the rank may have a handler for a signal that is not there in every rank."""

    def calls_made(self) -> int:
        """A number that changes with each collective call of the rank."""

    def last_words(self) -> stacks.Stacks:
        """The stack that a rank wrote when it crashed."""


def where(ranks: list[Rank]) -> dict[Rank, stacks.Stacks | None]:
    """Asks the ranks where they are, all of a host at once; None for one that cannot answer."""
    found = dict.fromkeys(ranks)
    able = [each for each in ranks if each.main_thread is not None and each.code is None]
    for host in dict.fromkeys(each.host for each in able):
        here = [each for each in able if each.host is host]
        for each, text in zip(here, host.stacks(here), strict=True):
            found[each] = stacks.Stacks(text, each.main_thread) if text else None
    return found


def at_sockets(ranks: Iterable[Rank]) -> dict[Rank, bool]:
    """Those of the ranks, on this machine, whose main thread sleeps in a call of the system until another one of them
    sends to its socket, or until somebody connects. True where only the main thread of a rank can end that: nothing
    that a rank has started holds the other end, and no signal has a handler."""
    processes, sockets, found = [], {}, {}
    for rank in (each for each in ranks if each.pid and each.code is None):
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(rank.pid))
            sockets[rank] = processes[-1].net_connections("inet")
    theirs = {each.laddr for mine in sockets.values() for each in mine}
    for rank, mine in sockets.items():
        # If it runs, or the system does not tell, it may end.
        with contextlib.suppress(OSError, ValueError, psutil.Error):
            # The call's number, and its arguments, of which the first is what it reads from or accepts at.
            _, first, *_ = Path(f"/proc/{rank.pid}/syscall").read_text().split()
            here = next((each for each in mine if each.fd == int(first, 16)), None)
            if here and (not here.raddr or here.raddr in theirs):
                alone = not any(process.children() for process in processes)
                found[rank] = bool(here.raddr) and alone and not rank.handles_signals()
    return found


def note_calls(ranks: list[Rank], meetings: Meetings) -> None:
    """Brings the records of all ranks here, and takes in what is new."""
    for wait in [host.bring_records() for host in dict.fromkeys(each.host for each in ranks)]:
        wait()
    meetings.update()
