"""A rank as it sees itself: it joins the group, runs a function, reports, and waits for the next one.

Every rank is ended by the kernel, also when all went well. Until then it keeps its connections
open, so that a rank which is done, or has failed, does not make the others fail too.
"""

import builtins
import collections
import ctypes
import functools
import linecache
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import traceback
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist

from course_utils import hardware
from course_utils.comm import host_waits, intercept, private
from course_utils.comm.events import note
from course_utils.hardware import gpu_sharing
from course_utils.launch.keepers import family, sockets
from course_utils.launch.ranks import arguments, debugger, figures, output, packing, report, script
from course_utils.launch.story import calls, stacks
from course_utils.launch.story.frames import is_own
from course_utils.launch.story.recorder import Recorder, place

# Signals of the system about the process itself, and the one that asks for stacks.
_LEFT_ALONE = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP, signal.SIGSEGV, signal.SIGBUS,
    signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS, stacks.ASK,
}  # fmt: skip

inside = False  # True in the process of a rank
_recorder = None  # of this rank


def main(rank, channel, printing, stacking):
    """The whole life of a rank's process. Never returns."""
    try:
        os.setsid()  # a process group of its own, which the kernel can end as a whole
        family.adopt_orphans()
        family.die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the kernel's to handle
        output.redirect(printing)
        main_thread = stacks.answer_with_stacks(stacking)
        job = packing.unpack(packing.receive(channel))
        _adopt(job, rank)
        debugger.install(channel if job["debug"] else None)
        packing.send(channel, packing.pack({"kind": "ready", "main_thread": main_thread}))
        begin = functools.partial(_begin, job, rank)
        while True:
            packing.send(channel, _work(rank, channel, begin))
            begin = _begin_again
    except (ConnectionError, EOFError):
        pass  # the kernel is gone
    except BaseException:  # noqa: BLE001 - what is no learner's doing shows itself too
        traceback.print_exc()
    finally:
        os._exit(1)  # nothing that the learner or a library has registered can hang here


def _adopt(job, rank):
    """Makes this process look like the kernel: environment, folder, import path."""
    global inside
    inside = True
    on_this_host = isinstance(job["store"], str)  # on several, launch's store is at that place
    address, port = ("127.0.0.1", job["port"]) if on_this_host else job["store"]
    os.environ.clear()
    os.environ |= job["environment"] | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - job["first"]),
        "WORLD_SIZE": str(job["nprocs"]),
        "LOCAL_WORLD_SIZE": str(len(job["devices"])),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    os.chdir(job["directory"])
    sys.path[:] = job["path"]
    sys.argv[:] = job["argv"]
    sockets.use(job["sockets"])  # they go with the folder of the launch
    multiprocessing.current_process().authkey = job["authkey"]  # for a manager of the kernel's
    multiprocessing.set_start_method(job["start_method"], force=True)
    torch.set_num_threads(job["threads"])
    script.install()
    if not job["script"]:  # Python tells a script itself that there is no more to read
        builtins.input = _no_keyboard


def _no_keyboard(*_):
    raise RuntimeError(
        "a rank has no keyboard: ask in the cell, and pass the answer to launch as an argument"
    )


def _work(rank, channel, begin):
    """Waits for a call, and returns the rank's report of it, packed."""
    sources, *call = packing.receive(channel)
    linecache.cache.update(pickle.loads(sources))
    try:
        fn, args, kwargs = packing.unpack(call)
    except BaseException as error:  # noqa: BLE001 - unpickling runs anybody's code
        return packing.pack(report.described("pickle", error) | {"what": "unpack"})
    calm_down = _silencer()
    try:
        begin()
        # A rank that ends early would make others fail that are still connecting, in random words.
        packing.send(channel, packing.pack({"kind": "joined"}))
        if not channel.recv(1):
            raise EOFError("the kernel is gone")
        result = _result(functools.partial(fn, rank, *args, **kwargs), calm_down)
    except BaseException as error:  # noqa: BLE001 - whatever the learner's code raises
        try:
            calm_down()  # if a handler has raised before that
        except BaseException:  # noqa: BLE001, S110 - one that was called already
            pass
        error = _from_the_function(error)
        debugger.post_mortem(error)
        if isinstance(error, SystemExit):
            return packing.pack(report.described("exit", error) | {"code": error.code})
        return packing.pack(report.described("exception", error))
    return _packed(result)


def _result(call, calm_down):
    process = os.getpid()
    figures.begin()
    try:
        try:
            result = call()
        finally:
            debugger.stop_tracing()
        figures.show_open()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            hardware.settle()  # what the function has left to the device
        return result
    finally:
        calm_down()
        if os.getpid() != process:  # call has forked it, and ends here too: it is no rank
            if error := sys.exception():
                traceback.print_exception(error)
            os._exit(error is not None)


def _begin(job, rank):
    """Before the first call."""
    recorder = Recorder(calls.path(job["folder"], rank), job["limit"])
    _set_debug_level()
    if job["script"]:  # it makes its world itself, or none
        numbers = {"rank": rank, "world_size": job["nprocs"]}
        made = functools.partial(_put_on_record, recorder, job["rules"])
        script.expect(_store(job), numbers, job["patience"], recorder, made)
    else:
        _join_group(job, rank, recorder)
    # Ranks are forks of one process: they would all draw the same numbers, and a broadcast that is
    # missing would not show. For a CUDA that has not started, torch.manual_seed keeps a stack of
    # calls: a tenth of what starting a rank costs.
    on_gpu = job["devices"][0].type == "cuda"
    draw = torch.manual_seed if on_gpu else torch.default_generator.manual_seed
    draw(int.from_bytes(os.urandom(8)) >> 1)
    numpy.random.seed(list(os.urandom(16)))
    random.seed()
    note("joined", f"rank {rank}")


def _begin_again():
    """Before a later one."""
    script.begin_call()
    _recorder.seen.clear()


def _from_the_function(error):
    """The newest error that has passed a line of the learner: a handler of a signal, such as a
    DataLoader's for its workers, may have raised another on the way out of the function."""
    at = error
    while at is not None:
        if any(is_own(f.filename) for f in traceback.extract_tb(at.__traceback__)):
            return at
        at = at.__context__
    return error


def _silencer():
    """Returns a call after which no alarm and no handler of a signal, such as a DataLoader's for its
    workers, raises anything in what is left to do. It is a single step of the interpreter, which
    calls handlers between its steps only."""
    numbers = signal.valid_signals() - _LEFT_ALONE
    for number in numbers:  # from the call before, they are silent
        if (handler := signal.getsignal(number)) is not None:
            signal.signal(number, handler)
    rest = [signal.SIG_DFL if n == signal.SIGCHLD else signal.SIG_IGN for n in numbers]
    silence = ctypes.CDLL(None).signal
    return lambda: collections.deque(map(silence, numbers, rest), maxlen=0)


def _join_group(job, rank, recorder):
    backend, device = job["backend"], job["devices"][rank - job["first"]]
    gpu = device if device.type == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)
        if job["sharing"] > 1:
            torch.cuda.set_per_process_memory_fraction(gpu_sharing.MEMORY / job["sharing"])
    if job["rules"]:
        backend, gpu = job["rules"], arguments.rules_called(job["rules"]).install()
    store = _store(job)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=job["nprocs"],
        timeout=timedelta(seconds=job["patience"]),
        device_id=gpu,
    )
    if gpu and gpu.type == "cuda":
        _connect_pairs(gpu)
    _put_on_record(recorder, job["rules"])
    script.offer(store)


def _put_on_record(recorder, rules):
    """All calls from now on: the world is there."""
    global _recorder
    _recorder = recorder
    intercept.listen(_refuse_impossible)  # before it is on record
    queued = host_waits.called if dist.get_backend() == "nccl" else None
    if queued:
        if not rules:
            _wait_in_python()
        host_waits.follow(recorder.publish, place)
    recorder.begin(queued)


def _refuse_impossible(name, given):
    """Refuses a message to, or from, a rank that is not there, in the line that makes the call.

    `dist.send(tensor, rank + 1)` on the last rank is the usual slip. Gloo takes the call and waits for
    ever; for a message of a rank to itself it fails in words about connections.
    """
    if name not in ("send", "recv_"):
        return
    group = dist.ProcessGroup.unbox(given["process_group"])
    peer = given["dst" if name == "send" else "src"]  # as the group counts
    if not 0 <= peer < group.size():
        raise ValueError(
            f"there is no rank {peer}: the ranks of the group are 0 to {group.size() - 1}"
        )
    if peer == group.rank():
        raise ValueError(f"rank {dist.get_rank()} names itself as the other end of a message")


def _set_debug_level():
    """PyTorch has read it in the process that this one is forked from. INFO costs nothing, and says the
    names of parameters where PyTorch else says their numbers."""
    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()
        logging.getLogger(private.FSDP_LOG).setLevel(logging.NOTSET)
    else:
        dist.set_debug_level(dist.DebugLevel.INFO)


def _connect_pairs(device):
    """Sends a number from each rank to each other one.

    With NCCL two ranks of a communicator connect when their first message is called, and the host
    stays in that call, in C, until the other side is there: two ranks that first post what they
    receive, or that both send, would stop in their first calls only, and nobody could say why.
    """
    me, ranks = dist.get_rank(), dist.get_world_size()
    rooms = torch.zeros(ranks, device=device)
    messages = [
        dist.P2POp(call, rooms[place : place + 1], peer)
        for peer in range(ranks)
        if peer != me
        for call, place in ((dist.isend, me), (dist.irecv, peer))
    ]
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()


def _store(job):
    """Where the ranks meet: a file on their host, or a port of one of their hosts."""
    if isinstance(job["store"], str):
        return dist.FileStore(job["store"], job["nprocs"])
    with output.silent():  # it warns of each host that no name is known of
        return dist.TCPStore(*job["store"], is_master=False)


def _wait_in_python():
    """The driver would spin in C, for as long as another rank lets this one wait."""

    def done():
        return torch.cuda.current_stream().query()

    host_waits.read_here(done, lambda tensor: tensor.is_cuda)
    synchronize = torch.cuda.synchronize

    def synchronize_in_python(device=None):
        host_waits.all_awaited()
        host_waits.until(done)
        synchronize(device)

    torch.cuda.synchronize = synchronize_in_python


def _packed(result):
    try:
        return packing.pack({"kind": "result", "result": result})
    except Exception:  # noqa: BLE001 - whatever an object's pickling raises is explained
        what, error = packing.culprit("the return value", result) or ("the return value", None)
        return packing.pack({"kind": "pickle", "what": what, "text": report.text(error)})
