"""Ranks on other hosts, as the kernel sees them: what it knows of them, and how it hears.

Between the kernel and the agent of each host (`agent`) stands an engine, which carries calls:

    ask(host, method, *args)      begins one; returns a question
    answer(question, patience)    its answer, after at most so many seconds
    lost                          the exceptions with which `answer` says that the host does not

A thread for each host asks its agent what has happened, again and again, and puts it into a queue for the
kernel's loop, which finds it as it finds what its own ranks have to say.
"""

import functools
import itertools
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from course_utils.comm.interrupts import uninterrupted
from course_utils.launch.keepers import server
from course_utils.launch.ranks import elsewhere, job, packing
from course_utils.launch.ranks.output import Output
from course_utils.launch.story import calls, stacks
from course_utils.launch.story.view import Rank

PATIENCE = 10.0  # seconds without an answer after which a host is lost
_START = 150.0  # seconds that an agent may take for what it does once: its fork server has 120
_TICK = 0.25  # seconds that an agent waits for something to happen; at first, and at the end, less:
_FIRST, _GROWS = 0.005, 0.2  # a question that the kernel has meanwhile waits for so long
_LOST = 255


class Engine(Protocol):
    """What carries calls to agents."""

    lost: tuple[type[BaseException], ...]

    def ask(self, host: int, method: str, *args: Any) -> Any: ...

    def answer(self, question: Any, patience: float) -> Any: ...


class FarHost:
    """A host, through the agent there; `name` is for people, `toward` an address that it reaches."""

    tick = 2 * _TICK

    def __init__(self, engine: Engine, number: int, name: str, toward: str):
        self._engine, self._number, self._toward = engine, number, toward
        self.name = name
        self.lost = False
        self.ranks: list[FarRank] = []
        self._poller = None
        self._state = {}

    def call(self, method: str, *args: Any, patience: float = PATIENCE) -> Any:
        """The agent's answer. Raises HostLost where none comes."""
        return self.answer(self.ask(method, *args), patience)

    def ask(self, method: str, *args: Any) -> Any:
        if self.lost:
            raise HostLost(self)
        with self._or_lost():
            return self._engine.ask(self._number, method, *args)

    def answer(self, question: Any, patience: float = PATIENCE) -> Any:
        with self._or_lost():
            return self._engine.answer(question, patience)

    @contextmanager
    def _or_lost(self):
        try:
            yield
        except self._engine.lost:
            self.lost = True
            raise HostLost(self) from None

    # ---- a launch ----

    def prepare(self, call: job.Launch, numbers: range, folder: str) -> Any:
        self.ranks = [FarRank(number, self, folder) for number in numbers]
        self._folder, self._events, self._poller = folder, queue.SimpleQueue(), None
        self._state = {}
        return self.ask("prepare", call, numbers.start, len(numbers), self._toward)

    def listen(self) -> socket.socket:
        """Begins to poll; what it returns can be read when something has happened."""
        self._bell, theirs = socket.socketpair()
        self._bell.setblocking(False)
        self._poller = _Poller(self, theirs)
        return self._bell

    def enqueue(self, events: list[tuple], state: dict) -> None:
        """For the kernel's thread, which calls `dispatch`."""
        self._events.put((events, state))

    def dispatch(self) -> bool:
        """Hands the events that have come to their ranks."""
        with suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        with suppress(queue.Empty):
            while True:
                events, state = self._events.get_nowait()
                self._state = state
                for event in events:
                    self._dispatch(*event)
        return True

    def _dispatch(self, kind, which, what):
        if kind == "figure":
            Path(self._folder, which).write_bytes(what)
        elif kind == "lost":
            for rank in self.ranks:
                rank.mark_lost(what)
        else:
            self.ranks[which - self.ranks[0].number].on_event(kind, what)

    def known(self, rank: "FarRank") -> tuple:
        """Its activity, whether it handles signals, and its calls made, as they were a moment ago."""
        return self._state.get(rank.number, ((0.0, True), True, 0))

    def end(self) -> Callable[[], None]:
        """Ends the ranks, and returns what waits for that. A host that is lost ends them by itself, when
        its lease runs out."""
        if self._poller is not None:
            self._poller.stop()
            self._bell.close()
        with suppress(HostLost):
            question = self.ask("end")
            return lambda: self._ended(question)
        return lambda: None

    def _ended(self, question):
        with suppress(HostLost):
            self.answer(question, _START)

    # ---- what the kernel asks any host (`view.Host`) ----

    def stacks(self, ranks: list[Rank]) -> list[str]:
        try:
            found, self._state = self.call("stacks", {r.number: r.main_thread for r in ranks})
        except HostLost:
            return [""] * len(ranks)
        return [found[rank.number] for rank in ranks]

    def bring_records(self) -> Callable[[], None]:
        with suppress(HostLost):
            question = self.ask("records", [os.stat(rank.record).st_size for rank in self.ranks])
            return lambda: self._write_records(question)
        return lambda: None

    def _write_records(self, question):
        with suppress(HostLost):
            for rank, more in zip(self.ranks, self.answer(question)):  # none, if it has ended them
                if more is None:
                    calls.give_up(rank.record)
                else:
                    with open(rank.record, "ab") as record:
                        record.write(more)

    def orphaned(self) -> bool:
        with suppress(HostLost):
            return self.call("orphaned")
        return False

    def drain(self) -> None:
        """Takes all that the ranks have printed and delivered until now."""
        if self._poller is None:
            return  # it has not begun
        self._poller.stop()
        with suppress(HostLost):
            self.dispatch()
            events, state = self.call("poll", 0.0)
            self.enqueue(events, state)
        self.dispatch()


class HostLost(RuntimeError):
    """A host does not answer any more."""

    def __init__(self, host: FarHost):
        super().__init__(
            f"host {host.name} does not answer any more. Leave the cluster's block, look after the "
            "host, and begin the block again; with COURSE_CLUSTER, restart the kernel."
        )


class _Poller:
    """A thread that asks an agent what has happened, until it is stopped or the host is lost."""

    def __init__(self, host: FarHost, bell: socket.socket):
        self._host, self._bell = host, bell
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._poll, name=f"polls {host.name}", daemon=True)
        self._thread.start()

    def _poll(self):
        patience = _FIRST
        while not self._stopped.is_set():
            try:
                events, state = self._host.call("poll", patience)
            except HostLost:
                events, state = [("lost", None, "which does not answer any more")], {}
            except Exception as error:  # noqa: BLE001 - nobody else would hear of it
                events, state = [("lost", None, f"whose agent failed with {error}")], {}
            if any(kind == "lost" for kind, *_ in events):
                self._stopped.set()
            self._host.enqueue(events, state)
            self._ring()
            patience = _FIRST if events else min(_TICK, patience * (1 + _GROWS))

    def _ring(self):
        with suppress(OSError):  # nobody listens any more
            self._bell.send(b"!")

    def stop(self) -> None:
        """Returns when nothing more will come; may be called again."""
        self._stopped.set()
        self._thread.join()
        self._bell.close()


class _ReceivedBytes:
    """Bytes that have come from a rank, to be read as from its channel."""

    def __init__(self):
        self._bytes = bytearray()

    def add(self, data: bytes) -> None:
        self._bytes += data

    def recv_into(self, room: memoryview) -> int:
        if not self._bytes:
            raise BlockingIOError
        count = min(len(room), len(self._bytes))
        room[:count] = self._bytes[:count]
        del self._bytes[:count]
        return count


class FarRank(Rank):
    """A rank on another host."""

    def __init__(self, number: int, host: FarHost, folder: str):
        output = Output(number, folder, live=number == 0)
        super().__init__(number, host, folder, output)
        self._received = _ReceivedBytes()
        self._messages = packing.messages(self._received)

    def listen(self) -> Iterable[tuple[Any, Callable[[], bool]]]:
        if self is not self.host.ranks[0]:
            return ()
        bell = self.host.listen()
        return ((bell, self.host.dispatch),)

    def begin(self) -> None:
        if self is self.host.ranks[0]:
            with suppress(HostLost):
                self.host.ask("begin")

    def on_event(self, kind: str, what: Any) -> None:
        if kind == "output":
            self.output.add(what)
        elif kind == "end":
            self.end(what)
        else:
            self._received.add(what)
            while parts := next(self._messages):
                self.on_message(packing.message(parts))

    def mark_lost(self, why: str) -> None:
        """Nobody knows of it any more."""
        if self.living:
            self.lost = why
            self.end(_LOST)

    def read_output(self) -> bool:
        if self is self.host.ranks[0]:
            self.host.drain()
        return False

    def activity(self) -> tuple[float, bool]:
        return self.host.known(self)[0]

    def handles_signals(self) -> bool:
        return self.host.known(self)[1]

    def calls_made(self) -> int:
        return self.host.known(self)[2]

    def last_words(self) -> stacks.Stacks:
        try:
            text = self.host.call("last_words", self.number)
        except HostLost:
            text = ""
        return stacks.Stacks(text, self.main_thread)


_one_call = threading.Lock()


def choose(hosts: list[FarHost]) -> AbstractContextManager[None]:
    """Launches go over these hosts in this block."""
    return elsewhere.started_by(functools.partial(start, hosts))


def start(
    all_hosts: list[FarHost], opened: ExitStack, call: job.Launch, packed: list[list]
) -> list[Rank]:
    """The ranks of a call on the hosts, until `opened` is closed: as many on each, as far as that can be,
    and those of a host in a row."""
    for host in all_hosts:
        if host.lost:
            raise HostLost(host)
    # An agent has the ranks of one call: what another thread launches waits.
    opened.enter_context(_one_call)
    folder = job.temporary_folder(opened, range(call.nprocs))
    places = _divided(call.nprocs, len(all_hosts))
    hosts = all_hosts[: len(places)]
    opened.callback(_end, hosts)
    questions = [host.prepare(call, numbers, folder) for host, numbers in zip(hosts, places)]
    ready = [host.answer(q, _START) for host, q in zip(hosts, questions)]
    backends = {each["backend"] for each in ready}
    if len(backends) > 1:
        raise RuntimeError(
            "the hosts' ranks would have different backends "
            f'({", ".join(sorted(backends))}): call launch with backend="gloo".'
        )
    settings = call.for_ranks() | {
        "variables": _set_in_this_kernel(),
        "directory": os.getcwd(),
        "path": server.import_path(),
    }
    questions = [
        host.ask("start", settings, *_once(packed[n.start : n.stop]), ready[0]["store"])
        for host, n in zip(hosts, places)
    ]
    for host, question in zip(hosts, questions):
        host.answer(question, _START)
    return [rank for host in hosts for rank in host.ranks]


@uninterrupted()  # an agent that is not told would keep its ranks
def _end(hosts):
    for wait in [host.end() for host in hosts]:
        wait()


def _divided(ranks, hosts):
    edges = [ranks * n // hosts for n in range(hosts + 1)]
    return [range(a, b) for a, b in itertools.pairwise(edges) if a < b]


def _once(packed):
    """Messages without repetition, as bytes, and for each rank which of them is its own."""
    different = {id(parts): parts for parts in packed}
    order = list(different)
    return [list(map(bytes, parts)) for parts in different.values()], [
        order.index(id(parts)) for parts in packed
    ]


def _set_in_this_kernel():
    """Environment variables that were set, or changed, since this process began, where the system
    tells; else none: what a host has is its own."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    before = dict(os.fsdecode(entry).partition("=")[::2] for entry in entries)
    return {name: value for name, value in os.environ.items() if before.get(name) != value}
