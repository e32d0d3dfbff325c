"""A process group that goes on when a member dies, and takes in new ones, on this machine.

    with Members(folder, "scratch/member.py") as members:
        members.start("a", "b", "c")
        members.train(until=5)  # all wait at a gate in step 5: nothing has to be timed
        members.kill("b")
        members.train(until=10)
        members.start("d")
        members.train(until=20)
    members.events()

Chapter 09 has its members from here. Who belongs to the group is a list in a store of this process, with a number; a
member builds the group anew with each list that names it. All processes end with the block, and with this
process, however it ends. Needs PyTorch 2.14; what an older one shows, a run of a newer one has left
(tests/modules/record_growing.py wrote it).
"""

import json
import shutil
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from course_hosts.nodes import PATIENCE, Agents, environment
from course_utils.comm import private, versions
from course_utils.lesson.terminal import loopback, store_on

RECORDED = Path(__file__).with_suffix(".json")
SAMPLES = 24  # of a step, of all members together
_EVER = 10_000  # members that one job may have
_TICK = 0.05  # seconds between two looks
_MEETING = timedelta(
    seconds=5
)  # for so long a member waits for one that has died since it was called


def why_not() -> str:
    """Why a group cannot grow here, in a sentence; empty where it can."""
    if not versions.older_than("2.14"):
        return ""
    return (
        f"A process group can grow from PyTorch 2.14 on, and here is {versions.installed()}: what follows shows "
        "what was recorded with 2.14.1."
    )


def recorded() -> list[dict]:
    """The events of a run of chapter 09's program with PyTorch 2.14.1 (`Members.events`)."""
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of a step: inputs (SAMPLES, 6) and targets (SAMPLES, 1)."""
    dice = torch.Generator().manual_seed(step)
    inputs = torch.randn(SAMPLES, 6, generator=dice)
    return inputs, inputs.sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1, generator=dice)


class Member:
    """A member's side: its process group, the gate, and a diary. One process is the member."""

    def __init__(self, folder: str, name: str) -> None:
        """Says that it is ready; it is in no group yet."""
        self.folder, self.name, self._list = Path(folder), name, 0
        self._diary = self.folder / "events" / f"{name}-{time.time_ns()}.jsonl"
        port = int((self.folder / "store").read_text())
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False)
        self._own = self._store.add("members", 1)  # tells processes apart, and is no rank
        store = dist.PrefixStore("group", self._store)
        place = {"store": store, "rank": self._own, "world_size": _EVER}
        dist.init_process_group("gloo", enable_reconfigure=True, **place)
        self.note("ready", 0)

    def meet(self) -> None:
        """Waits for a list that is new and names this member, and builds the process group with all that
        it names; ranks follow its order."""
        while True:
            self._store.wait([f"list {self._list + 1}"], timedelta(seconds=PATIENCE))
            self._list += 1
            names = self._store.get(f"list {self._list}").decode().split()
            if self.called() or self.name not in names:
                continue
            try:
                self._build([f"{self._list} {name}" for name in names])
                return
            except RuntimeError:  # one of them has died meanwhile, or came too late
                self._store.set(f"again {self._list}", "")

    def _build(self, keys):
        # Alone first, which closes the connections of the group before: a member that has not seen the
        # list may wait there for this one, and no process has died to tell it.
        alone = _EVER * self._list + self._own
        private.reconfigure(alone, [private.handle_of_group()], timeout=_MEETING).wait()
        own = f"{self._list} {self.name}"
        self._store.set(own, private.handle_of_group())
        self._wait_for(keys)
        handles = [self._store.get(key).decode() for key in keys]
        private.reconfigure(self._list, handles, timeout=_MEETING).wait()

    def _wait_for(self, keys):
        while not self._store.check(keys):
            if self.called():
                raise RuntimeError("There is a newer list.")
            time.sleep(_TICK)

    def called(self) -> bool:
        """Whether there is a newer list than that of the group."""
        return self._store.check([f"list {self._list + 1}"])

    def note(self, event: str, step: int, **more: object) -> None:
        """A line of the diary."""
        line = {"event": event, "member": self.name, "step": step, "time": time.time(), **more}
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
        """Notes how it ends, and waits: one that is gone would disturb the others' last step."""
        self.note("end", step, parameters=parameters.tolist())
        self.wait_at_gate(step)


class Members(Agents):
    """Members of one group. `program` is run with the folder and the member's name as its arguments, and makes a
    `Member`."""

    def __init__(self, folder: Path, program: str | Path) -> None:
        """Empties the folder."""
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(folder, program)
        (folder / "events").mkdir()
        self._store, self._lists = store_on(0), 0
        (folder / "store").write_text(str(self._store.port))

    def start(self, *names: str) -> None:
        """Starts members, and calls all together when each of them is ready."""
        for name in names:
            command = [sys.executable, self.program, str(self.folder), name]
            self.launch_agent(name, command, environment(self.id, loopback()))
        self._wait(lambda: set(names) <= self._who("ready", 0), f"members {names} to be ready")
        self._call()

    def kill(self, name: str) -> None:
        """kill -9; the others are called together."""
        self.kill_agent(name)
        self._call()

    def _call(self):
        self._lists += 1
        self._store.set(f"list {self._lists}", " ".join(sorted(self.agents)))

    def train(self, until: int) -> None:
        """Lets all that live go on to step `until`, and waits until they are held there."""
        self.gate.open_to(until)
        living = set(self.agents)
        self._wait(lambda: living <= self._who("held", until), f"members {living} at step {until}")

    def _wait(self, condition, what):
        return super()._wait(lambda: self._call_again() or condition(), what)

    def _call_again(self):
        """Where those that were called could not meet."""
        if self._store.check([f"again {self._lists}"]):
            self._call()

    def _who(self, event, step):
        found = [e for e in self.events() if (e["event"], e["step"]) == (event, step)]
        return {each["member"] for each in found}

    def _hopeless(self):
        ended = [name for name, each in self.agents.items() if each.poll() is not None]
        return f" ({ended[0]} has ended)" if ended else ""
