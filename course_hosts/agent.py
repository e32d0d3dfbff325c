"""A host's side of a launch over several hosts: one agent a host, in the process of an engine.

The engine (ipyparallel's, say) carries calls of `serve` and nothing else. The ranks are not the engine's:
they are forked here, as on one machine, and everything that they need lies here. What they print and
deliver is handed on as bytes when the kernel asks for it.

An agent has a lease: from whom it has heard nothing for long, for them it ends its ranks. So none is
left when the kernel, the engine's controller or the cable is gone.
"""

import contextlib
import hashlib
import os
import platform
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

import course_utils
from course_utils import hardware
from course_utils.launch.keepers import server
from course_utils.launch.ranks import job, packing
from course_utils.launch.ranks.process import RankProcess
from course_utils.launch.story import calls, frames, stacks

LEASE = 12.0  # seconds without a word from the kernel after which ranks are ended
_LOOK = 1.0  # seconds between two looks at the lease
_MOST = 1 << 25  # bytes of a rank that one answer carries


class _HostedRanks:
    """The ranks on this host of the launch that goes on.

    interface: through which the hosts see each other; address: this host's there.
    """

    def __init__(self, call: job.Launch, first: int, ranks: int, toward: str):
        self._call = call
        self.first, self.ranks = first, []
        self.address, self._interface = _own_end(toward)
        self.placement = call.placement(ranks)
        self._figures, self._store = set(), None
        with contextlib.ExitStack() as opened:
            self._folder = job.temporary_folder(opened, range(first, first + ranks))
            server.hold(opened)
            self._selector = opened.enter_context(selectors.DefaultSelector())
            self._opened = opened.pop_all()

    def open_store(self) -> tuple[str, int]:
        """Makes the store in which all ranks of the launch meet; returns its address and port."""
        listening = socket.create_server((self.address, 0))  # TCPStore would take all interfaces
        port, listening = listening.getsockname()[1], listening.detach()  # the store closes it
        own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening}
        self._store = dist.TCPStore(self.address, port, **own)
        return self.address, port

    def start(self, settings: dict, calls: list[list], which: list[int], store: tuple[str, int]):
        here = job.on_this_host(self._opened, self._call, self.placement, self._folder)
        here |= {"first": self.first, "store": store}
        here["environment"] |= settings.pop("variables")
        # Where hosts share their files, the kernel's folder and its modules are here too.
        if not os.path.isdir(settings["directory"]):
            del settings["directory"]
        shared = [entry for entry in settings.pop("path") if os.path.exists(entry)]
        here["path"] = [*(entry for entry in shared if entry not in here["path"]), *here["path"]]
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            here["environment"][name] = self._interface
        packed = packing.pack(here | settings)
        for number, own in enumerate(which, self.first):
            rank = RankProcess(number, self._folder)
            self.ranks.append(rank)
            rank.give(packed)
            rank.give(calls[own])
        for rank in self.ranks:
            rank.channel.setblocking(False)
            for source, kind in (
                (rank.channel, "message"),
                (rank.printed, "output"),
                (rank.process.sentinel, "end"),
            ):
                self._selector.register(source, selectors.EVENT_READ, (rank, kind))

    def poll(self, patience: float) -> list[tuple]:
        """What has happened: ("figure", name, bytes), ("message" or "output", rank, bytes), and ("end",
        rank, exit code). Waits until something has, for `patience` seconds at most."""
        ready = [key for key, _ in self._selector.select(patience)]
        happened = []
        # What a rank has printed before a message, or before its end, goes before it.
        for kind in ("output", "message", "end"):
            for key in ready:
                if key.data[1] == kind:
                    happened += self._read(key)
        return [*self._new_figures(), *happened]

    def _read(self, key):
        rank, kind = key.data
        if kind == "end":
            self._selector.unregister(key.fileobj)
            rank.end(rank.process.wait())
            rest = [*self._bytes(rank, "output")[0], *self._bytes(rank, "message")[0]]
            return [*rest, ("end", rank.number, rank.code)]
        found, more = self._bytes(rank, kind)
        if not more:
            self._selector.unregister(key.fileobj)
        return found

    def _bytes(self, rank, kind):
        """What has come, and whether more can come."""
        source = rank.channel if kind == "message" else rank.printed
        data, more = bytearray(), True
        try:
            while more and len(data) < _MOST:
                piece = os.read(source.fileno(), 1 << 20)
                data, more = data + piece, bool(piece)
        except BlockingIOError:
            pass
        except ConnectionError:
            more = False
        return ([(kind, rank.number, bytes(data))] if data else []), more

    def _new_figures(self):
        new = {path for path in Path(self._folder).glob("*.png")} - self._figures
        self._figures |= new
        return [("figure", path.name, path.read_bytes()) for path in sorted(new)]

    def state(self) -> dict[int, tuple]:
        """Of each rank that lives: its activity, whether it handles signals, and its calls so far."""
        return {
            rank.number: (rank.activity(), rank.handles_signals(), rank.calls_made())
            for rank in self.ranks
            if rank.code is None
        }

    def end(self) -> None:
        """Ends all ranks, and leaves nothing."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.close()
        self._store = None
        self._opened.close()


_hosted: _HostedRanks | None = None
_lock = threading.RLock()
_last_contact = time.monotonic()


def serve(method: str, *args: Any) -> Any:
    """What the engine calls."""
    global _last_contact
    with _lock:
        _last_contact = time.monotonic()
        try:
            return _METHODS[method](*args)
        finally:
            _last_contact = time.monotonic()


def _about():
    """What has to be the same on all hosts, and what the kernel has to know of this one."""
    return {
        "versions": versions(),
        "name": socket.gethostname(),
        "network": _network(),
        "libraries": frames.LIBRARIES,
    }


def versions() -> dict[str, str]:
    """Versions that have to be the same where ranks of one launch are."""
    files = [path for each in course_utils.PACKAGES for path in sorted(each.rglob("*.py"))]
    texts = b"".join(path.read_bytes() for path in files)
    return {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "PyTorch": torch.__version__,
        "the course": hashlib.sha256(texts).hexdigest()[:8],
    }


def _equipment():
    """For the doctor: cores, bytes of memory in all and free, GPUs by name, and seconds since 1970."""
    here, memory = hardware.machine(), psutil.virtual_memory()
    return {
        "cores": here.cores,
        "memory": (memory.total, memory.available),
        "gpus": here.torch_gpus,
        "names": here.names,
        "clock": time.time(),
    }


def _network():
    """A name for what this process sees of the network: two containers of a host have two."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/net")
    return ""


def _prepare(call, first, ranks, toward):
    global _hosted
    _end()
    _hosted = _HostedRanks(call, first, ranks, toward)
    _watch()
    return {
        "backend": _hosted.placement.backend,
        "store": _hosted.open_store() if first == 0 else None,  # the first host's is everybody's
    }


def _start(settings, calls, which, store):
    _hosted.start(settings, calls, which, store)


def _begin():
    for rank in _hosted.ranks:
        rank.begin()


def _poll(patience):
    if _hosted is None:
        why = f"which has ended it: it had heard nothing from here for {LEASE:g} seconds"
        return [("lost", None, why)], {}
    return _hosted.poll(patience), _hosted.state()


def _stacks(numbers):
    if _hosted is None:  # ended since, as _poll says
        return dict.fromkeys(numbers, ""), {}
    ranks = [rank for rank in _hosted.ranks if rank.number in numbers]
    for rank in ranks:
        rank.main_thread = numbers[rank.number]
    found = ranks[0].host.stacks(ranks)
    return dict(zip([rank.number for rank in ranks], found, strict=True)), _hosted.state()


def _records(read: list[int]):
    """What the ranks' records have beyond these sizes; None for one that is not complete."""
    return [
        None if calls.given_up(rank.record) else Path(rank.record).read_bytes()[size:]
        for rank, size in zip(_hosted.ranks if _hosted else [], read)
    ]


def _last_words(number):
    if _hosted is None:
        return ""
    rank = _hosted.ranks[number - _hosted.first]
    return stacks.drain(rank.stacks)


def _orphaned():
    return server.died()


def _end():
    global _hosted
    if _hosted is not None:
        ended, _hosted = _hosted, None
        ended.end()


_METHODS = {
    "about": _about,
    "equipment": _equipment,
    "prepare": _prepare,
    "start": _start,
    "begin": _begin,
    "poll": _poll,
    "stacks": _stacks,
    "records": _records,
    "last_words": _last_words,
    "orphaned": _orphaned,
    "end": _end,
}


def _watch():
    threading.Thread(target=_end_when_unheard, args=(_hosted,), name="lease", daemon=True).start()


def _end_when_unheard(hosted):
    while _hosted is hosted:
        time.sleep(_LOOK)
        # A call that goes on is a word from the kernel.
        if time.monotonic() - _last_contact > LEASE and _lock.acquire(blocking=False):
            try:
                if _hosted is hosted and time.monotonic() - _last_contact > LEASE:
                    _end()
            finally:
                _lock.release()


def _own_end(toward):
    """The address from which this host reaches that one, and the interface that has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((toward, 9))  # nothing is sent
        address = probe.getsockname()[0]
    for interface, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return address, interface
    raise OSError(f"no interface of {socket.gethostname()} has the address {address}")
