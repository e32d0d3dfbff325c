"""torchrun agents on this machine that play nodes: started, disturbed, and ended for certain.

    with Nodes(folder, "scratch/elastic_train.py") as nodes:
        nodes.start("A")
        nodes.start("B")
        nodes.train(ranks=2, first=0, until=5)  # all workers wait at a gate: nothing has to be timed
        nodes.kill_worker("B")
        nodes.train(ranks=2, first=3, until=20)

Chapter 09 has its nodes from here, and the tests of `cluster/` what their runs are made of. All
processes of a job carry its name in their environment, also those whose parent has died; none of
them survives the block, or this process, however it ends. The rendezvous store lives in this process, as a cluster's lives on a
machine that does not train: an agent that hosts it takes it along when it is killed.
"""

import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist

from course_utils.launch.keepers.janitor import JOB, janitor
from course_utils.lesson.terminal import loopback, store_on

PATIENCE = 600  # seconds for one thing to happen on a machine that is very busy
TIMING = {
    "is_host": 0,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 8,  # a busy machine must not look like a dead node
    "last_call_timeout": 2,  # how long to wait for more than the least number of nodes
}

# --- processes ----------------------------------------------------------------------------------


def processes_of(job: str) -> list[psutil.Process]:
    """The living processes that carry a job's name, whoever their parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB) == job and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # has just ended, or is another user's
            continue
    return found


def end_job(job: str) -> None:
    """kill -9 to all processes of a job, also to those that one of them is just starting."""
    deadline = time.monotonic() + PATIENCE
    while left := processes_of(job):
        if time.monotonic() > deadline:
            raise TimeoutError(f"These processes of job {job} cannot be ended: {left}.")
        for process in left:
            kill(process)
        gone_within(left, 10)


def job_of(opened: ExitStack) -> str:
    """A name for a job whose processes end when `opened` is closed, and when this process is killed."""
    job = uuid.uuid4().hex
    janitor.keep_with(opened, "job", job)
    opened.callback(end_job, job)
    return job


@contextmanager
def no_survivors() -> Iterator[str]:
    """Gives a name for a job; ends, by their ids, all processes that carry it."""
    with ExitStack() as opened:
        yield job_of(opened)


def gone_within(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Waits for processes to end; returns those that did not."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


def kill(process: psutil.Process) -> bool:
    """kill -9; returns whether there was anybody to kill."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


def command_of(process: psutil.Process) -> list[str]:
    """The words with which a process was started; none where it has ended."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# --- what agents need ---------------------------------------------------------------------------


def environment(job: str, interface: str) -> dict[str, str]:
    """For small models: one thread a rank; gloo on one network interface. The agents play hosts, and
    would all take the same GPUs."""
    return os.environ | {
        JOB: job,
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # the store of the workers dies with them
    }


def torchrun(nodes: str, workers: int, max_restarts: int, endpoint: str) -> list[str]:
    """An agent's command as far as it is the same on all nodes and in all attempts."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", nodes, "--nproc-per-node", str(workers)),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint),
        *("--max-restarts", str(max_restarts)),
    ]


def rendezvous(job: str, timing: dict[str, int], address: str = "127.0.0.1") -> list[str]:
    """The rest of the options: this node's address, and the round in which it signs."""
    said = ",".join(f"{key}={value}" for key, value in timing.items())
    return ["--local-addr", address, "--rdzv-id", job, "--rdzv-conf", said]


class Gate:
    """A file with the number of steps that ranks may do, and behind it the worker group that may do
    them, where it is for one alone."""

    EVERY_STEP = 10**9

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open_to(0)

    def open_to(self, steps: int, group: str = "") -> None:
        """Whoever reads finds the old number or the new one."""
        self.steps = steps
        partial = self.path.with_suffix(".partial")
        partial.write_text(f"{steps} {group}".strip())
        partial.rename(self.path)

    def open(self) -> None:
        self.open_to(self.EVERY_STEP)


class Agents:
    """The agents of one job, by name, and their workers, which run `program`."""

    def __init__(self, folder: Path, program: str | Path) -> None:
        self.folder, self.program, self._opened = folder, str(program), ExitStack()
        self.id = job_of(self._opened)
        folder.mkdir(parents=True, exist_ok=True)
        self.gate = Gate(folder / "gate")
        self.agents: dict[str, psutil.Popen] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self._opened.close()

    def launch_agent(
        self, name: str, command: list[str], variables: dict[str, str], cwd: Path | None = None
    ) -> None:
        """Starts an agent; what it and its workers print goes to agent-NAME.log in the folder."""
        with (self.folder / f"agent-{name}.log").open("ab") as log:
            self.agents[name] = psutil.Popen(
                command, env=variables, stdout=log, stderr=log, cwd=cwd
            )

    def events(self) -> list[dict]:
        """What the workers, or the members, have noted, in the order of time."""
        diaries = [path.read_text() for path in (self.folder / "events").iterdir()]
        lines = [line for diary in diaries for line in diary.split("\n")[:-1]]  # finished ones
        return sorted(map(json.loads, lines), key=lambda event: event["time"])

    def _wait(self, condition: Callable[[], Any], what: str) -> Any:
        """What `condition` returns when it is true. Raises TimeoutError when that will not be."""
        deadline = time.monotonic() + PATIENCE
        while True:
            hopeless = self._hopeless()  # first: what those that have ended noted last still counts
            if found := condition():
                return found
            if hopeless or time.monotonic() > deadline:
                raise TimeoutError(
                    f"Waited for {what} in vain: read {self.folder}/agent-*.log{hopeless}."
                )
            time.sleep(0.1)

    def _hopeless(self) -> str:
        """Why nothing can come any more, in words; nothing while it can."""
        raise NotImplementedError

    def workers(self, name: str) -> list[psutil.Process]:
        """The worker processes below an agent; none while it has just ended them."""
        try:
            children = self.agents[name].children()
        except psutil.NoSuchProcess:
            return []
        return [child for child in children if self.program in command_of(child)]

    def kill_agent(self, name: str) -> None:
        """kill -9 to the agent alone; its workers are told by Linux, or find out."""
        agent = self.agents.pop(name)
        kill(agent)
        agent.wait()

    def kill_node(self, name: str) -> None:
        """kill -9 to the agent and its workers, as when a host loses its power."""
        with suppress(psutil.NoSuchProcess):
            self.agents[name].suspend()  # it must not start a worker between the two kills
        workers = self.workers(name)
        self.kill_agent(name)
        for worker in workers:
            kill(worker)


# --- the nodes of chapter 09 ----------------------------------------------------------------------


class Worker:
    """A worker's side of a job whose nodes are `Nodes`: it waits at the gate, and keeps a diary."""

    def __init__(self, folder: Path) -> None:
        """The process group is initialised; rank 0 names the worker group."""
        self.folder, self.node = folder, os.environ["NODE"]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        name = torch.tensor(time.time_ns())
        dist.broadcast(name, 0)
        self.group = str(name.item())
        self._diary = folder / "events" / f"{self.node}-{os.getpid()}.jsonl"

    def note(self, event: str, step: int, at: float | None = None) -> None:
        """A line of the diary; `at` in seconds since 1970, where it is not now."""
        line = {"event": event, "time": at or time.time(), "node": self.node, "step": step}
        line |= {"group": self.group, "rank": self.rank, "ranks": self.ranks}
        with self._diary.open("a") as diary:
            print(json.dumps(line), file=diary)

    def wait_at_gate(self, step: int) -> None:
        """Waits until this worker group may go on from `step`."""
        noted = False
        while True:
            until, *only = (self.folder / "gate").read_text().split()
            if step < int(until) and only in ([], [self.group]):
                return
            if not noted:
                self.note("held", step)
                noted = True
            time.sleep(0.05)


class Nodes(Agents):
    """Nodes with one worker each (`capstone` has more), at least one of them and at most two. Prints what happens, as a
    table that grows.

    groups: the names of the worker groups that trained, in their order.
    happened: (when, "start" or "kill", node), in seconds since 1970.
    """

    def __init__(self, folder: Path, program: str) -> None:
        """Empties the folder. `program` is run with it as its argument, and makes a `Worker`."""
        shutil.rmtree(folder, ignore_errors=True)
        super().__init__(folder, program)
        (folder / "events").mkdir()
        self.groups: list[str] = []
        self.happened: list[tuple[float, str, str]] = []
        self._store = store_on(0)
        print("members   restarts   steps")

    def start(self, node: str) -> None:
        """Starts a node's agent, which starts its worker."""
        endpoint = f"127.0.0.1:{self._store.port}"
        command = torchrun("1:2", 1, 5, endpoint) + rendezvous(self.id, TIMING)
        variables = environment(self.id, loopback()) | {"NODE": node}
        self.launch_agent(node, [*command, self.program, str(self.folder)], variables)
        self._note("start", node, "its agent starts")

    def kill_worker(self, node: str) -> None:
        """kill -9 to the worker of a node, whose agent lives."""
        self._note("kill", node, "kill -9, its worker")
        for worker in self.workers(node):
            kill(worker)

    def kill_node(self, node: str) -> None:
        """kill -9 to a node; the other one goes on, into a collective."""
        self._note("kill", node, "kill -9, all its processes")
        super().kill_node(node)
        group = self.groups[-1]
        step = max(event["step"] for event in self.events() if event["group"] == group)
        self.gate.open_to(step + 1, group)

    def _note(self, kind: str, node: str, what: str) -> None:
        self.happened.append((time.time(), kind, node))
        print(f"{'':22}node {node}: {what}", flush=True)

    def train(self, ranks: int, first: int, until: int | None = None) -> None:
        """Waits for a new group of `ranks` workers that goes on at step `first`, and lets it go to
        step `until`, or to its end where that is None. Raises TimeoutError where none comes."""
        group = self._wait(lambda: self._held(ranks, first), f"{ranks} workers at step {first}")
        members = sorted({e["node"] for e in self.events() if e["group"] == group})
        print(f"{' '.join(members):10}{len(self.groups):<11}", end="", flush=True)
        self.gate.open_to(self.gate.EVERY_STEP if until is None else until, group)
        shown = first

        def over() -> bool:
            nonlocal shown
            if until is None:
                ended = all(agent.poll() is not None for agent in self.agents.values())
            else:
                ended = bool(self._held(ranks, until))
            done = max(e["step"] for e in self.events() if e["group"] == group)
            print(*(f" {step}" for step in range(shown, done)), sep="", end="", flush=True)
            shown = done
            return ended

        self._wait(over, f"{ranks} workers at {'their end' if until is None else f'step {until}'}")
        print(flush=True)
        self.groups.append(group)

    def _held(self, ranks: int, step: int) -> str | None:
        """A new worker group of which all `ranks` workers are held at `step`."""
        wanted = ("held", ranks, step)
        held = [e for e in self.events() if (e["event"], e["ranks"], e["step"]) == wanted]
        counts = Counter(e["group"] for e in held if e["group"] not in self.groups)
        return next((group for group, count in counts.items() if count == ranks), None)

    def _hopeless(self) -> str:
        ended = all(agent.poll() is not None for agent in self.agents.values())
        return " (all agents have ended)" if ended else ""
