"""A call of launch against the usual ways to start ranks

Every candidate starts fresh processes, forms a gloo group of them, which meets once in a barrier,
and ends them. By hand means: os.fork from a process that has imported torch, and
init_process_group over a file; nothing can be faster, and nothing of what launch adds is there. A
cold launch is the first of its process.
"""

import contextlib
import importlib.util
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile

import torch.distributed as dist
import torch.multiprocessing as mp

from course_utils.launch import launch
from tests.benchmarks.measuring import Spread, met, print_table, ratios, side_by_side

WARM, COLD, SPAWN, BY_HAND = "launch, warm", "launch, cold", "mp.spawn", "by hand (os.fork)"
ACCELERATE, PARALLEL = "accelerate notebook_launcher", "ipyparallel"
WORLD_SIZES = (2, 4)
QUICK_ROUNDS, SLOW_ROUNDS = 20, 5


def main() -> None:
    quick = {n: side_by_side(_quick(n), QUICK_ROUNDS) for n in WORLD_SIZES}
    slow = {n: side_by_side(_slow(n), SLOW_ROUNDS) for n in WORLD_SIZES}
    for n in WORLD_SIZES:
        _print_times(n, quick[n], slow[n])
    _print_memory()
    for n in WORLD_SIZES:
        floor = ratios(quick[n], to=BY_HAND)[WARM].median
        spawn = ratios(slow[n], to=WARM)[SPAWN].median
        print(
            f"- {n} ranks, warm launch at least 15 times faster than mp.spawn: {met(spawn >= 15)}"
        )
        print(f"- {n} ranks, warm launch at most 1.5 times by hand: {met(floor <= 1.5)}")
    print(flush=True)


# --- the candidates: each starts n ranks that form a group, and returns when they are gone -----


def _quick(n):
    candidates = {WARM: lambda: _launch(n), BY_HAND: lambda: _by_hand(n)}
    if importlib.util.find_spec("accelerate"):
        candidates[ACCELERATE] = lambda: _accelerate(n)
    return candidates


def _slow(n):
    candidates = {WARM: lambda: _launch(n), COLD: lambda: _cold_launch(n), SPAWN: lambda: _spawn(n)}
    if importlib.util.find_spec("ipyparallel"):
        candidates[PARALLEL] = lambda: _ipyparallel(n)
    return candidates


def _launch(n):
    launch(lambda rank: dist.barrier(), n)  # by value, as the functions of a cell


_COLD = """
import time
import torch
start = time.perf_counter()
import torch.distributed as dist
from course_utils.launch import launch
launch(lambda rank: dist.barrier(), {n})
print(time.perf_counter() - start)
"""


def _cold_launch(n):
    # The kernel has imported torch anyway; only the rest is the cost of the first call.
    script = [sys.executable, "-c", _COLD.format(n=n)]
    return float(subprocess.run(script, check=True, capture_output=True, text=True).stdout)


def _group(rank, n, store):
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    dist.barrier()


def _loopback():
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _spawn(n):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_group, (n, f"{folder}/store"), nprocs=n)


def _by_hand(n):
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(n):
            pid = os.fork()
            if pid == 0:
                try:
                    _group(rank, n, f"{folder}/store")
                finally:
                    os._exit(0)
            ranks.append(pid)
        for pid in ranks:
            os.waitpid(pid, 0)


def _accelerate(n):
    from accelerate import notebook_launcher

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        notebook_launcher(_group_from_environment, num_processes=n, use_port=port)


def _group_from_environment():
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback()
    dist.init_process_group("gloo")
    dist.barrier()


def _ipyparallel(n):
    import ipyparallel

    with (
        tempfile.TemporaryDirectory() as folder,
        ipyparallel.Cluster(n=n, log_level=40) as cluster,
    ):
        view = cluster[:]
        view.scatter("rank", range(n), flatten=True, block=True)
        view.apply_sync(_group_of_engine, ipyparallel.Reference("rank"), n, f"{folder}/store")


def _group_of_engine(rank, n, store):
    from tests.benchmarks.bench_launch import _group

    _group(rank, n, store)


# --- the tables ---------------------------------------------------------------------------------


def _print_times(n, quick, slow):
    rows = []
    for seconds in (quick, slow):
        for name, ratio in ratios(seconds, to=WARM).items():
            if name == WARM and seconds is slow:
                continue
            rows.append([name, Spread.of(seconds[name]), "1" if name == WARM else ratio])
    print_table([f"{n} ranks", "seconds", "times a warm launch"], rows)


def _private_memory():
    """Private memory of this process in MB (Private_* of /proc/self/smaps_rollup)."""
    with open("/proc/self/smaps_rollup") as file:
        kilobytes = [int(line.split()[1]) for line in file if line.startswith("Private_")]
    return sum(kilobytes) / 1024


def _memory_of_launched(rank):
    return _private_memory()


def _memory_of_spawned(rank, n, store, answers):
    _group(rank, n, store)
    answers.put(_private_memory())


def _print_memory():
    if not os.path.exists("/proc/self/smaps_rollup"):
        print("Private memory is told by Linux only.\n")
        return
    launched = max(launch(_memory_of_launched, 2))
    with tempfile.TemporaryDirectory() as folder:
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        mp.spawn(_memory_of_spawned, (2, f"{folder}/store", answers), nprocs=2)
        spawned = max(answers.get() for _ in range(2))
    print_table(
        ["private memory of a rank at its start", "MB"],
        [[WARM, f"{launched:.0f}"], [SPAWN, f"{spawned:.0f}"]],
    )
    print(f"- under 40 MB of private memory a rank: {met(launched < 40)}")
