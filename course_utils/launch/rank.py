"""A rank as it sees itself: it joins the group, runs the function, reports, and waits for its end.

Every rank is ended by the kernel, also when all went well. Until then it keeps its connections
open, so that a rank which is done, or has failed, does not make the others fail too.
"""

import linecache
import multiprocessing
import os
import signal
import sys
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from course_utils import intercept
from course_utils.launch import output, packing, peers, stacks
from course_utils.launch.calls import Recorder

inside = False  # True in the process of a rank


def main(rank, channel, printing, stacking):
    """The whole life of a rank's process. Never returns."""
    try:
        os.setsid()  # a process group of its own, which the kernel can end as a whole
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's to handle
        output.redirect(printing)
        main_thread = stacks.answer_with_stacks(stacking)
        job = packing.unpack(packing.receive(channel))
        call = packing.receive(channel)
        _adopt(job, rank)
        packing.send(channel, packing.pack({"kind": "ready", "main_thread": main_thread}))
        packing.send(channel, _work(job, rank, call))
        channel.recv(1)  # until the end
    except (ConnectionError, EOFError):
        pass  # the kernel is gone
    except BaseException:  # noqa: BLE001 - what is no learner's doing shows itself too
        traceback.print_exc()
    finally:
        os._exit(0)  # nothing that the learner or a library has registered can hang here


def _adopt(job, rank):
    """Makes this process look like the kernel: environment, folder, import path, sources."""
    global inside
    inside = True
    os.environ.clear()
    os.environ.update(job["environment"])
    for name, value in (
        ("RANK", rank),
        ("LOCAL_RANK", rank),
        ("WORLD_SIZE", job["nprocs"]),
        ("LOCAL_WORLD_SIZE", job["nprocs"]),
    ):
        os.environ[name] = str(value)
    os.chdir(job["directory"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    linecache.cache.update(job["sources"])
    # else the fork server's own, for which semaphores are kept on a list that is never cleared
    multiprocessing.set_start_method(job["start_method"], force=True)
    torch.set_num_threads(job["threads"])


def _work(job, rank, call):
    """Returns the rank's report, packed."""
    try:
        fn, args = packing.unpack(call)
    except BaseException as error:  # noqa: BLE001 - unpickling runs anybody's code
        return packing.pack({"kind": "pickle", "what": "unpack", "text": _text(error)})
    try:
        _join_group(job, rank)
        result = fn(rank, *args)
    except SystemExit as error:
        return packing.pack(_described("exit", error) | {"code": error.code})
    except BaseException as error:  # noqa: BLE001 - whatever the learner's code raises
        return packing.pack(_described("exception", error))
    return _packed(result)


def _join_group(job, rank):
    device = job["devices"][rank]
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
    intercept.listen(peers.refuse_impossible)  # before it is on record
    recorder = Recorder(os.path.join(job["folder"], f"calls-{rank}"))
    intercept.listen(recorder.hear)
    dist.init_process_group(
        job["backend"],
        store=dist.FileStore(os.path.join(job["folder"], "store"), job["nprocs"]),
        rank=rank,
        world_size=job["nprocs"],
        timeout=timedelta(seconds=job["patience"]),
        device_id=gpu,
    )
    recorder.begin()


def _packed(result):
    try:
        return packing.pack({"kind": "result", "result": result})
    except Exception:  # noqa: BLE001 - whatever an object's pickling raises is explained
        what, error = packing.culprit("the return value", result) or ("the return value", None)
        return packing.pack({"kind": "pickle", "what": what, "text": _text(error)})


def _described(kind, error):
    return {
        "kind": kind,
        "type": type(error).__name__,
        "text": _text(error),
        "frames": [
            (f.filename, f.lineno, f.name) for f in traceback.extract_tb(error.__traceback__)
        ],
    }


def _text(error):
    return "".join(traceback.format_exception_only(error)).strip()
