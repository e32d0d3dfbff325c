"""Kills at random while ranks of two hosts compute, for `soak_hosts.py --kills`.

Whom and how follows from the seed: a rank, an engine (with the agent in it), the controller, the kernel
or the cable; by kill -9, or by SIGSTOP and, 15 seconds later, SIGCONT. A cable is pulled and plugged in
again. What launch says must be a RankFailure or HostLost; 20 seconds after the disturbance is over
no rank may be left on any host, nothing that a killed engine had started, and no folder of the launch.
Then another launch must be right, on the same cluster after a rank was disturbed, on a new one otherwise.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from course_hosts.two_hosts import TwoHosts
from tests.support.leftovers import living

RANKS, FROZEN, GONE, PATIENCE = 4, 15, 20, 180  # seconds, but for the first
VICTIMS = ("rank", "engine", "controller", "kernel", "cable")

KERNEL = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from course_hosts import hosts; from course_utils.launch import RankFailure, launch

def trains(rank, folder):
    Path(folder, f"rank-{rank}").write_text(str(os.getpid()))
    while not Path(folder, "enough").exists():
        total = torch.ones(1000)
        dist.all_reduce(total)
        time.sleep(0.01)

def adds(rank):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()

if __name__ == "__main__":
    for line in sys.stdin:
        try:
            if folder := line.strip():
                said = launch(trains, 4, folder, timeout=20)
            else:
                said = launch(adds, 4)
        except (RankFailure, hosts.HostLost) as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)
"""


class Kernel:
    """A process that launches over the cluster as it is told."""

    def __init__(self, file: str, folder: Path):
        program = folder / "kernel.py"
        program.write_text(KERNEL)
        self.process = psutil.Popen(
            [sys.executable, program],
            env=os.environ | {"COURSE_CLUSTER": file, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, folder: Path | str) -> None:
        print(folder, file=self.process.stdin, flush=True)

    def said(self):
        """What the launch returned or said; None where the kernel is no more."""
        line = self.process.stdout.readline()
        return json.loads(line) if line else None


class Soak:
    """One cluster after the other, each as long as it can be used."""

    def __init__(self, seed: int, folder: Path):
        self._chance, self._folder = random.Random(seed), folder
        self._cluster = contextlib.ExitStack()
        self.two = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._cluster.close()

    def disturb(self, number: int) -> tuple[str, list[str]]:
        """What was done, in words, and what was wrong afterwards."""
        if self.two is None:
            self.two = self._cluster.enter_context(TwoHosts())
            self._kernel = Kernel(self.two.file, self._folder)
            self._cluster.callback(self._end_kernel)
        (folder := self._folder / f"launch-{number}").mkdir()
        self._kernel.begin(folder)
        ranks = _wait(lambda: _started(folder), "the ranks")
        time.sleep(self._chance.uniform(0, 1))
        victim = self._chance.choice(VICTIMS)
        frozen = victim != "cable" and self._chance.random() < 0.4
        process = self._process(victim, ranks)
        below = process.children(recursive=True) if victim == "engine" and not frozen else []
        words = f"{victim} {'frozen' if frozen else 'pulled' if victim == 'cable' else 'killed'}"
        self._harm(process, frozen)
        killed_kernel = victim == "kernel" and not frozen
        wrong = [] if killed_kernel else self._judge(self._kernel.said(), words)
        wrong += self._left([*ranks, *below])
        if victim != "rank":
            self._cluster.close()
            self.two = None
        else:
            self._kernel.begin("")
            if (said := self._kernel.said()) != [6.0] * RANKS:
                wrong.append(f"the next launch: {said}")
        wrong += [f"{path} is left" for path in self._folder.glob("course-*")]
        return words, wrong

    def _process(self, victim, ranks):
        return {
            "rank": self._chance.choice(ranks),
            "engine": self._chance.choice(self.two.engines),
            "controller": self.two.controller,
            "kernel": self._kernel.process,
            "cable": None,
        }[victim]

    def _harm(self, process, frozen):
        if process is None:
            self.two.fall_silent()
            time.sleep(FROZEN)
            self.two.come_back()
        elif frozen:
            group = [process, *process.children()] if process == self.two.controller else [process]
            for each in group:
                each.suspend()
            time.sleep(FROZEN)
            for each in group:
                with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                    each.resume()
        else:
            process.send_signal(signal.SIGKILL)

    def _judge(self, said, words):
        if isinstance(said, str) and said.startswith(("RankFailure: ", "HostLost: ")):
            return []
        return [f"{words}: launch said {said!r}"]

    def _left(self, processes):
        end = time.monotonic() + GONE
        while (left := [p for p in processes if living(p)]) and time.monotonic() < end:
            time.sleep(0.1)
        return [f"{GONE} s later {each} is left" for each in left]

    def _end_kernel(self):
        self._kernel.process.kill()
        self._kernel.process.wait()


def _started(folder):
    texts = [path.read_text() for path in folder.glob("rank-*")]
    if len(texts) == RANKS and all(texts):
        return [psutil.Process(int(text)) for text in texts]
    return None


def _wait(condition, what):
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {what} in vain")
        time.sleep(0.05)
    return found


def run(kills: int, seed: int) -> Iterator[str]:
    """Disturbs as often; yields what was wrong."""
    with (
        tempfile.TemporaryDirectory(prefix="soak-hosts-") as folder,
        Soak(seed, Path(folder)) as soak,
    ):
        for number in range(1, kills + 1):
            words, wrong = soak.disturb(number)
            print(f"{number:3}  {words}: {'; '.join(wrong) or 'ok'}", flush=True)
            yield from wrong
