"""A call of launch against the usual ways to start ranks

Every candidate starts fresh processes, forms a gloo group of them, which meets once in a barrier,
and ends them. Every candidate has a process of its own, and a minute for a call: one that hangs is a
row that says so. By hand means: os.fork from a process that has imported torch, and
init_process_group over a file; nothing can be faster, and nothing of what launch adds is there. Over
two engines means two that are there already and play hosts. A cold launch is the first of its process.
A call of Ranks is one of ranks that are there already.
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

from course_utils.launch import Ranks, launch
from course_utils.launch.ranks import elsewhere
from course_utils.lesson.terminal import loopback
from tests.benchmarks.apart import Apart, serve
from tests.benchmarks.measuring import Spread, met, print_table, ratios, side_by_side
from tests.support import memory_held

WARM, COLD, SPAWN, BY_HAND = "launch, warm", "launch, cold", "mp.spawn", "by hand (os.fork)"
ACCELERATE, PARALLEL = "accelerate notebook_launcher", "ipyparallel"
TWO_HOSTS, RANKS = "launch, over two engines", "a call of Ranks"
WORLD_SIZES = (2, 4)
QUICK_ROUNDS, SLOW_ROUNDS = 20, 5


def main() -> None:
    quick = {n: _measured(n, _QUICK, QUICK_ROUNDS) for n in WORLD_SIZES}
    slow = {n: _measured(n, _SLOW, SLOW_ROUNDS) for n in WORLD_SIZES}
    for n in WORLD_SIZES:
        _print_times(n, quick[n], slow[n])
    _print_memory()
    for n in WORLD_SIZES:
        _print_target(n, quick[n], WARM, BY_HAND, "warm launch at most 1.5 times by hand", 1.5)
        _print_target(
            n, quick[n], TWO_HOSTS, WARM, "over two engines at most 3 times a warm launch", 3
        )
        _print_target(n, quick[n], RANKS, WARM, "a call of Ranks at most 0.1 warm launches", 0.1)
        _print_target(n, slow[n], SPAWN, WARM, "mp.spawn at least 15 warm launches", 15)
    print(flush=True)


def _measured(n, names, rounds):
    """Seconds of each candidate in each round, and what became of those that hung."""
    candidates = {
        name: Apart("tests.benchmarks.bench_launch", name, str(n))
        for name in names
        if importlib.util.find_spec(_NEEDS.get(name, "torch"))
    }
    try:
        seconds = side_by_side(candidates, rounds)
    finally:
        for candidate in candidates.values():
            candidate.close()
    return seconds, {name: c.reason for name, c in candidates.items() if c.reason}


def _print_target(n, measured, name, to, words, target):
    seconds, _ = measured
    if not {name, to} <= seconds.keys():
        print(f"- {n} ranks, {words}: not measured")
        return
    ratio = ratios(seconds, to=to)[name].median
    print(f"- {n} ranks, {words}: {met(ratio >= target if name == SPAWN else ratio <= target)}")


# --- the candidates: each starts n ranks that form a group, and returns when they are gone -----


def _launch(n):
    launch(lambda rank: dist.barrier(), n)  # by value, as the functions of a cell


_engines = contextlib.ExitStack()
_ranks = {}  # by their number


def _call_of_ranks(n):
    if n not in _ranks:
        _ranks[n] = _engines.enter_context(Ranks(n))
    _ranks[n](lambda rank: dist.barrier())


def _launch_over_two(n):
    from course_hosts.cluster import cluster

    if not elsewhere.starts():
        _engines.enter_context(cluster(2))
    _launch(n)


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
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=n)
    dist.barrier()


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
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
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


_CANDIDATES = {
    WARM: _launch,
    RANKS: _call_of_ranks,
    COLD: _cold_launch,
    SPAWN: _spawn,
    TWO_HOSTS: _launch_over_two,
    BY_HAND: _by_hand,
    ACCELERATE: _accelerate,
    PARALLEL: _ipyparallel,
}
_QUICK = (WARM, RANKS, BY_HAND, TWO_HOSTS, ACCELERATE)
_SLOW = (WARM, COLD, SPAWN, PARALLEL)
_NEEDS = {ACCELERATE: "accelerate", PARALLEL: "ipyparallel", TWO_HOSTS: "ipyparallel"}


# --- the tables ---------------------------------------------------------------------------------


def _print_times(n, quick, slow):
    rows = []
    for (seconds, hung), part in ((quick, _QUICK), (slow, _SLOW)):
        shares = ratios(seconds, to=WARM) if WARM in seconds else {}
        for name in part:
            if name in hung:
                rows.append([name, hung[name], ""])
            elif name in seconds and not (name == WARM and seconds is slow[0]):
                share = "1" if name == WARM else shares.get(name, "")
                rows.append([name, Spread.of(seconds[name]), share])
    print_table([f"{n} ranks", "seconds", "times a warm launch"], rows)


def _memory_of_launched(rank):
    return memory_held.private() / 1024


def _memory_of_spawned(rank, n, store, answers):
    _group(rank, n, store)
    answers.put(memory_held.private() / 1024)


def _print_memory():
    if not memory_held.told():
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


if __name__ == "__main__":
    _, _name, _n = sys.argv
    with _engines:
        serve(lambda: _CANDIDATES[_name](int(_n)))
