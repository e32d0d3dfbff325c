"""The side of the kernel: start the ranks, collect what they say, end them."""

import linecache
import multiprocessing
import os
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from multiprocessing import forkserver, spawn

from course_utils import hardware
from course_utils.launch import packing, rank
from course_utils.launch.failure import RankFailure

_context = multiprocessing.get_context("forkserver")
_NAME = "course_utils rank"
_original_preparation = spawn.get_preparation_data


def _preparation(name):
    # multiprocessing would run the learner's script a second time in each rank to make its
    # functions importable; cloudpickle sends them by value.
    data = _original_preparation(name)
    if name.startswith(_NAME):
        data.pop("init_main_from_path", None)
        data.pop("init_main_from_name", None)
    return data


spawn.get_preparation_data = _preparation


def preload():
    """Starts, in the background, the fork server that imports torch once for all ranks."""
    _context.set_forkserver_preload(["course_utils.launch.rank"])
    threading.Thread(target=_start_server, daemon=True).start()


def _start_server():
    try:
        forkserver.ensure_running()
    except OSError:
        pass  # the first launch meets the same error and explains it


def launch(fn, nprocs: int, *args, timeout: float = 60.0) -> list:
    """Runs fn(rank, *args) in `nprocs` fresh processes that form a process group.

    Returns the list of what the ranks returned, indexed by rank; tensors come back on the CPU.
    Raises RankFailure when a rank raises, ends, dies or waits for ever.
    """
    folder = tempfile.mkdtemp(prefix="course-launch-")
    ranks = []
    try:
        call = packing.pack((fn, args))
        job = packing.pack(_job(nprocs, folder, timeout))
        for i in range(nprocs):
            ranks.append(_Rank(i))
        for r in ranks:
            packing.send(r.channel, job)
            packing.send(r.channel, call)
        _collect(ranks, time.monotonic() + timeout)
        _raise_first_failure(ranks)
        return [r.message["result"] for r in ranks]
    finally:
        for r in ranks:
            r.end()
        shutil.rmtree(folder, ignore_errors=True)


def _job(nprocs, folder, timeout):
    placement = hardware.placement(nprocs)
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {
        "nprocs": nprocs,
        "folder": folder,
        "backend": placement.backend,
        "devices": placement.devices,
        "environ": {
            **os.environ,
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
        },
        "cwd": os.getcwd(),
        "path": [p or os.getcwd() for p in sys.path],
        "sources": {name: entry for name, entry in linecache.cache.items() if "ipykernel" in name},
        "threads": max(1, hardware.cores() // nprocs),
        "patience": timeout + 60,
    }


class _Rank:
    """A rank as the parent sees it."""

    def __init__(self, number):
        self.number = number
        self.message = None
        self.finished = False
        self.text = b""
        self.channel, theirs = socket.socketpair()
        self.output, writer = _context.Pipe(duplex=False)
        self.process = _context.Process(
            target=rank.main, args=(number, theirs, writer), name=f"{_NAME} {number}"
        )
        self.process.start()
        theirs.close()
        writer.close()

    def end(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.join()
        self.process.close()
        self.channel.close()
        self.output.close()


def _collect(ranks, deadline):
    with selectors.DefaultSelector() as selector:
        for r in ranks:
            selector.register(r.channel, selectors.EVENT_READ, (r, _read_message))
            selector.register(r.output, selectors.EVENT_READ, (r, _read_output))
        while not all(r.finished for r in ranks):
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                r, read = key.data
                if not read(r):
                    selector.unregister(key.fileobj)
            failed = any(r.finished and (r.message or {}).get("kind") != "result" for r in ranks)
            if failed or time.monotonic() >= deadline:
                break
    for r in ranks:
        while r.output.poll(0.01) and _read_output(r):
            pass
    for r in ranks[1:]:
        _show(r, r.text.decode(errors="replace"))


def _read_message(r):
    try:
        r.message = packing.unpack(packing.receive(r.channel))
    except (EOFError, OSError):
        r.process.join(1)
    r.finished = True
    return False


def _read_output(r):
    data = os.read(r.output.fileno(), 1 << 16)
    if r.number == 0:
        *lines, r.text = (r.text + data).split(b"\n")
        for line in lines:
            _show(r, line.decode(errors="replace"))
    else:
        r.text += data
    return bool(data)


def _show(r, text):
    for line in text.splitlines():
        print(f"[rank {r.number}] {line}")


def _raise_first_failure(ranks):
    states = [_state(r) for r in ranks]
    for r in ranks:
        if r.finished and r.message is None:
            code = r.process.exitcode
            kind = "signal" if code is not None and code < 0 else "exit"
            raise RankFailure(f"rank {r.number} {states[r.number]}", r.number, kind, ranks=states)
    for r in ranks:
        if r.finished and r.message["kind"] != "result":
            kind, line = r.message["kind"], _own_line(r.message.get("frames", []))
            where = f"\n  line {line[1]}: {line[3]}" if line else ""
            raise RankFailure(
                f"rank {r.number} {states[r.number]}{where}",
                r.number,
                kind,
                line=line[1] if line else None,
                error=r.message.get("type") if kind == "exception" else None,
                ranks=states,
            )
    for r in ranks:
        if not r.finished:
            raise RankFailure(f"rank {r.number} did not finish", r.number, "timeout", ranks=states)


def _state(r):
    if not r.finished:
        return "was still running"
    if r.message is None:
        code = r.process.exitcode
        return f"ended with exit code {code}" if code >= 0 else f"killed by signal {-code}"
    if r.message["kind"] == "result":
        return "finished"
    if r.message["kind"] == "exception":
        return f"raised {r.message['type']}: {r.message['text']}"
    return str({k: v for k, v in r.message.items() if k != "frames"})


def _own_line(frames):
    own = [f for f in frames if "site-packages" not in f[0] and "course_utils" not in f[0]]
    return own[-1] if own else None
