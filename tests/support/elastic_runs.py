"""Runs of cluster/train.py under torchrun agents on this machine, which tests disturb.

    with ElasticRun(folder, options, nodes="1:2") as run:
        run.start_agent("a")
        run.gate.open_to(5)                   # steps wait for the gate: nothing has to be timed
        run.wait_for_step(5)
        run.kill_worker("a")
        run.gate.open()
        run.wait_until_done()
    check_samples(folder, samples=100, batch=16, epochs=2)

Leaving the block kills what still runs. What starts and ends agents and their processes is in
course_hosts/nodes.py, of which chapter 09 makes its nodes too.
"""

import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from course_hosts.nodes import (
    PATIENCE,
    Agents,
    end_job,
    environment,
    gone_within,
    kill,
    loopback,
    processes_of,
    rendezvous,
    store_on,
    torchrun,
)

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "cluster" / "train.py"
GATED = Path(__file__).resolve().with_name("gated_train.py")
DO_NOT_START_AGAIN = (2, 78)  # exit codes of agent.py


@dataclass
class Host:
    """Where an agent runs: on this machine, unless `prefix` is a command that enters another host."""

    address: str = "127.0.0.1"
    interface: str = loopback()
    prefix: tuple[str, ...] = ()
    has_store: bool = False  # its agent hosts the rendezvous store; otherwise this process does


class ElasticRun(Agents):
    """The agents of one run, by name; `options` are those of train.py, without --checkpoints."""

    def __init__(
        self,
        folder: Path,
        options: list[str],
        nodes: str,
        workers: int = 1,
        monitor_interval: float = 0.1,
        timeout: int = 60,
        hosts: dict[str, Host] | None = None,
        supervised: bool = False,
    ) -> None:
        """With `supervised`, agents that fail are started again, as a cluster's scheduler does.

        torchrun survives the death of an agent, but not at every moment: if one dies just after the
        agents have met, the others wait for its ranks in vain, give up, and close the rendezvous.
        """
        super().__init__(folder, GATED)
        self.timeout = timeout  # seconds after which a rank gives up on the others
        self.patience = PATIENCE
        self._hosts, self._supervised = hosts or {}, supervised
        self.given_up = 0  # agents that failed and had to be started again
        self.job_restarts = 0  # that the supervision had to do
        self._disturbed = 0  # when the last kill or start began, in nanoseconds since 1970
        self._let_on: list[set[str]] = []  # groups that were apart, and were let on
        self._store = None
        self._endpoint = self._find_store()
        self._torchrun = [
            *torchrun(nodes, workers, max_restarts=1000, endpoint=self._endpoint),
            *("--monitor-interval", str(monitor_interval)),
        ]
        self._script = [
            *(str(GATED), "--checkpoints", str(folder), *options),
            *("--timeout", str(timeout), "--grace", "5", "--log-samples"),
        ]

    def _find_store(self) -> str:
        for host in self._hosts.values():
            if host.has_store:
                return f"{host.address}:29400"
        self._store = store_on(0)
        return f"127.0.0.1:{self._store.port}"

    # --- doing ---

    def start_agent(self, name: str) -> None:
        host = self._hosts.get(name, Host())
        timing = {
            "is_host": int(host.has_store),
            "read_timeout": 20,
            "join_timeout": PATIENCE,
            "last_call_timeout": 1,  # how long to wait for more than the least number of nodes
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 10,  # a busy machine must not look like a dead one
        }
        command = [
            *(*host.prefix, *self._torchrun),
            *rendezvous(f"{self.id}-{self.job_restarts}", timing, host.address),
            *self._script,
        ]
        self._start(name, command, environment(self.id, host.interface))

    def _start(self, name: str, command: list[str], variables: dict[str, str]) -> None:
        self._disturbed = time.time_ns()
        variables |= {"GATE": str(self.gate.path), "LEAVE_AT_GATE": "yes"}
        self.launch_agent(name, command, variables, cwd=ROOT)

    def kill_worker(self, name: str, number: int = 0) -> None:
        """kill -9 to a worker of the agent, which may be about to start one."""

        def killed() -> bool:
            self._disturbed = time.time_ns()
            return any(kill(worker) for worker in self.workers(name)[number:][:1])

        self.wait(killed, f"a worker of {name}")

    def kill_agent(self, name: str) -> None:
        self._disturbed = time.time_ns()
        super().kill_agent(name)

    def freeze(self, processes: list[psutil.Process], seconds: float) -> None:
        """SIGSTOP, and SIGCONT after some time; some of them may have ended by then."""
        self._disturbed = time.time_ns()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        time.sleep(seconds)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def began(self, pid: int) -> float:
        """When a worker's Python began, in seconds since 1970."""
        return float(self.gate.path.with_name(f"began-{pid}").read_text())

    # --- waiting ---

    def wait(self, condition, what: str):
        """Returns the first true value of `condition()`; raises if an agent has failed."""
        deadline = time.monotonic() + self.patience
        while not (value := condition()):
            failed = [name for name, agent in self.agents.items() if agent.poll()]
            final = [name for name in failed if self.agents[name].poll() in DO_NOT_START_AGAIN]
            if failed and self._supervised and not final:
                self._start_again(failed)
                failed = []
            if failed or time.monotonic() > deadline:
                raise AssertionError(f"waited for {what}; failed: {failed}\n{self._logs()}")
            time.sleep(0.05)
        return value

    def _start_again(self, failed: list[str]) -> None:
        self.given_up += len(failed)
        if self._is_over():
            for name in failed:
                self.agents.pop(name)
            return
        if self._store is not None or any(self._found_closed(name) for name in failed):
            # The store outlives the agent that has failed, and with it the closed rendezvous: the
            # whole job begins again, under another id.
            self.job_restarts += 1
            failed = list(self.agents)
            end_job(self.id)
            for name in failed:
                self.agents.pop(name).poll()
        for name in failed:
            self.start_agent(name)

    def _found_closed(self, name: str) -> bool:
        """Whether the agent has found the rendezvous closed, in a store that is still there.

        A host that was cut off closes it when it gives up at the moment at which it is back.
        """
        log = (self.folder / f"agent-{name}.log").read_text()
        return log.rstrip().endswith("RendezvousClosedError")

    def _is_over(self) -> bool:
        """Whether the agent with the store has ended well: it took the store along, and nobody has
        anything left to do. Another agent may not have said goodbye yet, and then it fails."""
        return any(
            host.has_store and name in self.agents and self.agents[name].poll() == 0
            for name, host in self._hosts.items()
        )

    def wait_for_step(self, step: int, world: int | None = None) -> None:
        """Waits until a group (of `world` ranks) has done `step`, or a later one, on all its ranks.

        If a group of another size has done it, the right one can only do it again, so let the gate
        be at a step that is not saved.
        """

        def done() -> bool:
            log = EventLog(self.folder)
            if any(
                world in (None, log.world(name)) and log.last_step(name) >= step
                for name in log.incarnations
            ):
                return True
            if world is not None and world > 1:
                self._let_groups_meet(log)
            return False

        self.wait(done, f"step {step} on {world or 'any number of'} ranks")

    def wait_for_group(self, world: int) -> None:
        """Waits for a group of this many ranks that is younger than the last kill or start.

        All of its ranks have resumed by then.
        """

        def together() -> bool:
            log = EventLog(self.folder)
            newest = max(log.incarnations, default="0-")
            if formed(newest) > self._disturbed and len(log.of(newest, "resume")) == world:
                return True
            self._let_groups_meet(log)
            return False

        self.wait(together, f"a group of {world} ranks")

    def _let_groups_meet(self, log: "EventLog") -> None:
        """Opens the gate by a save, once for groups that train beside each other.

        An agent that was taken for dead, because it was slow, trains on in a group of its own. Its
        ranks find out at their next save, so the gate has to let them come to one.
        """
        groups = self._groups_at_work(log)
        if len(groups) > 1 and groups not in self._let_on:
            self._let_on.append(groups)
            self.gate.open_to(self.gate.steps + 2)

    def _groups_at_work(self, log: "EventLog") -> set[str]:
        """The incarnations that the agents' workers are in; none while one of them is starting."""
        of_worker = {
            start["pid"]: name
            for name in log.incarnations
            for start in log.of(name, "start")
            if log.of(name, "resume")
        }
        groups = [
            {of_worker.get(worker.pid) for worker in self.workers(name)} for name in self.agents
        ]
        found = set().union(*groups)
        return found if all(groups) and None not in found else set()

    def wait_until_done(self) -> None:
        """Waits until every agent has ended well, and no process of the run is left.

        A worker that was still importing when its agent was killed has nobody who tells it; it
        waits for a group that does not come, and gives up.
        """
        self.wait(lambda: all(a.poll() == 0 for a in self.agents.values()), "the end of the run")
        left = gone_within(processes_of(self.id), 2 * PATIENCE)  # a --timeout, and to be scheduled
        assert not left, f"processes left: {left}"

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("agent-*.log"))
        return "\n".join(f"{log.name}: ...{log.read_text()[-3000:]}" for log in logs)


def formed(incarnation: str) -> int:
    """When a group was formed, in nanoseconds since 1970: its name begins with it."""
    return int(incarnation.split("-")[0], 16)


class EventLog:
    """What the ranks of all incarnations noted, from the files under `folder`/events.

    A kill can leave the last line of a file torn, and a later incarnation may do a step again that
    an earlier one did and never saved: `committed` leaves out what the final parameters do not hold.
    """

    def __init__(self, folder: Path) -> None:
        self.incarnations: dict[str, list[dict]] = defaultdict(list)
        for path in sorted((folder / "events").glob("*.jsonl")):
            for line in path.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    event = json.loads(line)
                    self.incarnations[event["incarnation"]].append(event)

    def of(self, incarnation: str, kind: str) -> list[dict]:
        return [event for event in self.incarnations[incarnation] if event["event"] == kind]

    def world(self, incarnation: str) -> int:
        return self.of(incarnation, "start")[0]["world"]

    def ranks_of(self, incarnation: str, step: int) -> list[dict]:
        """The events of a step, one for each rank that has done it."""
        return [event for event in self.of(incarnation, "step") if event["step"] == step]

    def last_step(self, incarnation: str) -> int:
        """The last step that all of its ranks have done; 0 if there is none."""
        ranks = Counter(event["step"] for event in self.of(incarnation, "step"))
        world = self.world(incarnation)
        return max((step for step, number in ranks.items() if number == world), default=0)

    def worlds(self) -> list[int]:
        """The number of ranks of each incarnation that did a step, in the order of their starts."""
        return [self.world(name) for name in sorted(self.incarnations) if self.of(name, "step")]

    def committed(self) -> list[list[int]]:
        """The samples of each step that the final parameters hold, in the order of the steps."""
        name = max(name for name in self.incarnations if self.of(name, "done"))
        last, steps = self.of(name, "done")[0]["step"], []
        while name is not None:  # backwards, from each incarnation to the one it resumed
            resumed = self.of(name, "resume")[0]
            for step in range(last, resumed["step"], -1):
                ranks = self.ranks_of(name, step)
                assert len(ranks) == self.world(name), f"step {step} of {name}: {ranks}"
                steps.append([sample for rank in ranks for sample in rank["samples"]])
            name, last = resumed["of"], resumed["step"]
        return steps[::-1]


def check_samples(folder: Path, samples: int, batch: int, epochs: int) -> None:
    """Raises unless each epoch used every sample once, in batches of the same size."""
    steps = EventLog(folder).committed()
    sizes = ([batch] * (samples // batch) + [samples % batch] * (samples % batch > 0)) * epochs
    assert [len(step) for step in steps] == sizes
    per_epoch = len(sizes) // epochs
    for epoch in range(epochs):
        used = [s for step in steps[epoch * per_epoch : (epoch + 1) * per_epoch] for s in step]
        assert sorted(used) == list(range(samples)), f"epoch {epoch}: a sample lost or used twice"


def undisturbed(folder: Path, options: list[str]) -> None:
    """The same training as one process that nobody disturbs."""
    command = [sys.executable, str(TRAIN), "--checkpoints", str(folder), *options]
    run = subprocess.run(
        command,
        cwd=ROOT,  # as the printed commands are run: their paths begin there
        check=False,
        env=environment("", Host().interface),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


def difference(one: Path, other: Path) -> float:
    """The largest difference between the final parameters of two runs."""
    first, second = (
        torch.load(folder / "parameters.pt", weights_only=True) for folder in (one, other)
    )
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)
