"""The side of a rank: a process that joins the group, runs the function, reports and waits."""

import linecache
import os
import signal
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from course_utils.launch import packing


def main(rank, channel, output):
    """Entry point of a rank's process."""
    os.setsid()  # own process group: the parent can end a rank with all that it started
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    _write_to(output)
    try:
        message = _work(rank, channel)
        packing.send(channel, message)
        _flush()
        channel.recv(1)  # peers may still need this rank's sockets: leave when the parent says so
    except (OSError, EOFError):
        pass  # the parent is gone
    os._exit(0)  # no destructor of the learner's or of a library's can hang the end


def _write_to(output):
    for fd in (1, 2):
        os.dup2(output.fileno(), fd)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _flush():
    sys.stdout.flush()
    sys.stderr.flush()


def _work(rank, channel):
    """Returns the message for the parent, packed."""
    job = packing.unpack(packing.receive(channel))
    call = packing.receive(channel)
    _adopt(job, rank)
    try:
        fn, args = packing.unpack(call)
        _join_group(job, rank)
        result = fn(rank, *args)
    except SystemExit as error:
        return packing.pack({"kind": "exit", "code": error.code, "frames": _frames(error)})
    except BaseException as error:
        return packing.pack(_described(error))
    try:
        return packing.pack({"kind": "result", "result": result})
    except Exception as error:
        return packing.pack({"kind": "pickle", "text": str(error), "type": type(result).__name__})


def _adopt(job, rank):
    """Makes this process look like the kernel: environment, folder, import path, sources."""
    os.environ.clear()
    os.environ.update(job["environ"])
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job["nprocs"]),
        LOCAL_WORLD_SIZE=str(job["nprocs"]),
    )
    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    linecache.cache.update(job["sources"])
    torch.set_num_threads(job["threads"])


def _join_group(job, rank):
    device = job["devices"][rank]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        job["backend"],
        store=dist.FileStore(os.path.join(job["folder"], "store"), job["nprocs"]),
        rank=rank,
        world_size=job["nprocs"],
        timeout=timedelta(seconds=job["patience"]),
        device_id=device if device.type == "cuda" else None,
    )


def _described(error):
    return {
        "kind": "exception",
        "type": type(error).__name__,
        "text": str(error),
        "frames": _frames(error),
    }


def _frames(error):
    return [
        (f.filename, f.lineno, f.name, f.line) for f in traceback.extract_tb(error.__traceback__)
    ]
