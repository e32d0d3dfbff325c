"""Thousands of launches in one process, which has to stay as it was.

    python -m tests.soaks.soak_kernel --launches 2000

A quarter of them fails, each in a way of the fault table that is seen at once, drawn by seed. Before
and after: memory, open files, processes, listening ports, and what lies in the temporary folder. The exit code is 1 if there is more of anything, or 20 MB more memory.
"""

import argparse
import contextlib
import gc
import io
import random
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from course_utils.launch import RankFailure
from tests.support.fault_table import FAULTS
from tests.support.on_gloo import launch

_AT_ONCE = [fault for fault in FAULTS if fault.kind != "timeout"]
_MEMORY = 20  # MB


def _sum(rank):
    total = torch.tensor(rank)
    dist.all_reduce(total)
    return total.item()


def _state(folder: Path) -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    below = [p for p in me.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    return {
        "MB of memory": me.memory_info().rss // 2**20,
        "open files": me.num_fds(),
        "processes": len(below),
        "zombies": len(me.children(recursive=True)) - len(below),
        "listening ports": sum(c.status == psutil.CONN_LISTEN for c in me.net_connections("inet")),
        "in the temporary folder": len(list(folder.iterdir())),
    }


def _launch(draw: random.Random) -> None:
    if draw.random() < 0.75:
        world = draw.choice([1, 2, 3])
        assert launch(_sum, world) == [sum(range(world))] * world
        return
    fault = draw.choice(_AT_ONCE)
    try:
        launch(fault.fn, fault.nprocs)
    except RankFailure as failure:
        fault.check(failure)
    else:
        raise AssertionError(f"{fault.fn.__name__}: launch returned")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    launch(_sum, 2)
    folder = Path(tempfile.mkdtemp(prefix="soak-kernel-"))
    tempfile.tempdir = str(folder)
    wrong = 0
    for number in range(options.launches):
        if number == min(50, options.launches // 4):
            before = _state(folder)  # what is only imported or cached once is there by now
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                _launch(draw)
        except AssertionError as error:
            wrong += 1
            print(f"launch {number}: {error}", flush=True)
    after = _state(folder)
    for what, count in before.items():
        print(f"{what}: {count} before, {after[what]} after")
        wrong += after[what] > count + (_MEMORY if what.startswith("MB") else 0)
    print(f"{options.launches} launches: {wrong} complaints")
    shutil.rmtree(folder)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
