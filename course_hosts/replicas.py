"""Replicas of a model that train together through torchft, on this machine: started, killed, started again.

    with Replicas(folder, "scratch/replica.py") as replicas:
        replicas.start(0, 1)
        replicas.train(until=5)  # both wait at a gate in step 5: nothing has to be timed
        replicas.kill(1)
        replicas.train(until=10)
    replicas.events()

Chapter 09 has its replicas from here. Needs torchft: pip install "course-utils[torchft]", for Linux on
x86-64. Where it is not, `recorded()` has what a run left (tests/modules/record_replicas.py wrote it).
The mean is the script's own: torchft 0.2.0's DDP wrapper raises where gloo loses a partner, and so the
survivor would end. Its HTTP transport listens on all interfaces; the one over the process group does
not. All processes end with the block, and with this process, however it ends.
"""

import importlib.util
import json
import re
import shutil
import sys
import time
from pathlib import Path
from urllib.request import urlopen

import torch

from course_hosts.nodes import PATIENCE, Agents, environment, store_on
from course_utils.lesson.terminal import loopback

RECORDED = Path(__file__).with_suffix(".json")
_TICK = 0.05  # seconds between two looks
_STATUS = re.compile(r"\[(\d+)/\d+ participants healthy\]\[(\d+) heartbeating\]")
_LIGHTHOUSE = """
import sys, time
from pathlib import Path
from torchft.coordination import LighthouseServer
lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
partial = Path(sys.argv[1], "lighthouse.partial")
partial.write_text("http://127.0.0.1:" + lighthouse.address().rpartition(":")[2])
partial.rename(partial.with_suffix(""))
while True:
    time.sleep(1000)
"""


def why_not() -> str:
    """Why replicas cannot train here, in a sentence; empty where they can."""
    if importlib.util.find_spec("torchft"):
        return ""
    return (
        'torchft is not installed here (pip install "torchft>=0.2,<0.3", for Linux on x86-64): what '
        "follows shows what was recorded with torchft 0.2.0."
    )


def recorded() -> list[dict]:
    """The events of a run of chapter 09's program with torchft 0.2.0 (`Replicas.events`)."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def batch(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A replica's own 8 samples of a step: inputs (8, 6) and targets (8, 1)."""
    dice = torch.Generator().manual_seed(100 * step + replica)
    inputs = torch.randn(8, 6, generator=dice)
    return inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(8, 1, generator=dice)


class Member:
    """A replica's side: what its manager is told, the gate, and a diary. One process is the replica."""

    def __init__(self, folder: str, replica: str) -> None:
        self.folder, self.replica = Path(folder), int(replica)
        self._diary = self.folder / "events" / f"{replica}-{time.time_ns()}.jsonl"
        self._store = store_on(0)

    def place(self) -> dict:
        """Options of torchft's Manager that say where it is. It listens on this machine alone: by itself
        it listens on all interfaces, to whoever calls (torchft 0.2.0, manager.py)."""
        from torchft import manager

        while not (lighthouse := _address(self.folder)):
            time.sleep(_TICK)
        every_interface = manager.ManagerServer
        manager.ManagerServer = lambda **own: every_interface(**own | {"bind": "127.0.0.1:0"})
        return {
            "rank": 0,
            "world_size": 1,
            "replica_id": str(self.replica),
            "hostname": "127.0.0.1",
            "store_addr": "127.0.0.1",
            "store_port": self._store.port,
            "lighthouse_addr": lighthouse,
        }

    def note(self, event: str, step: int, **more: object) -> None:
        """A line of the diary."""
        line = {"event": event, "replica": self.replica, "step": step, "time": time.time(), **more}
        with self._diary.open("a") as diary:
            print(json.dumps(line), file=diary)

    def wait_at_gate(self, step: int) -> None:
        """Waits until it may go on from `step`."""
        noted = False
        while step >= int((self.folder / "gate").read_text()):
            if not noted:
                self.note("held", step)
                noted = True
            time.sleep(_TICK)

    def leave(self, step: int, parameters: torch.Tensor) -> None:
        """Notes how it ends, and waits: one that is gone would disturb the other's last step."""
        self.note("end", step, parameters=parameters.tolist())
        self.wait_at_gate(step)


class Replicas(Agents):
    """Replicas behind a lighthouse of their own. `program` is run with the folder and the replica's
    number as its arguments, and makes a `Member`."""

    def __init__(self, folder: Path, program: str | Path) -> None:
        """Empties the folder, and starts the lighthouse."""
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(folder, program)
        (folder / "events").mkdir()
        self._launch("lighthouse", "-c", _LIGHTHOUSE, str(folder))

    def _launch(self, name, *arguments):
        self.launch_agent(name, [sys.executable, *arguments], environment(self.id, loopback()))

    def start(self, *replicas: int) -> None:
        """Starts replicas; returns when each is ready for its first step, or, where others train
        already, has asked to join them."""
        for replica in replicas:
            self._launch(str(replica), self.program, str(self.folder), str(replica))
        living, asking = len(self.agents) - 1, len(replicas) if self.gate.steps else 0
        self._wait(lambda: self._are_registered(living, asking), f"replicas {replicas} to be heard")

    def kill(self, replica: int) -> None:
        """kill -9."""
        self.kill_agent(str(replica))

    def train(self, until: int) -> None:
        """Lets all that live go on to step `until`, and waits until they are held there."""
        self.gate.open_to(until)
        living = {int(name) for name in self.agents if name != "lighthouse"}
        self._wait(lambda: living <= self._held(until), f"replicas {living} at step {until}")

    def _held(self, step):
        held = [e for e in self.events() if (e["event"], e["step"]) == ("held", step)]
        return {event["replica"] for event in held}

    def _are_registered(self, living, asking):
        """Whether the lighthouse hears so many, and so many wait for an answer: its page says so."""
        if not (address := _address(self.folder)):
            return False
        with urlopen(f"{address}/status", timeout=PATIENCE) as page:
            waiting, registered = map(int, _STATUS.search(page.read().decode()).groups())
        return registered >= living and waiting >= asking

    def _hopeless(self):
        ended = [name for name, each in self.agents.items() if each.poll() is not None]
        return f" ({ended[0]} has ended)" if ended else ""


def _address(folder):
    """The lighthouse's, or None where it is not there yet."""
    file = folder / "lighthouse"
    return file.read_text() if file.exists() else None
