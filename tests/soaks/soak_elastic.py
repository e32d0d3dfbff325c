"""Kills and freezes workers, agents and whole nodes of a printed command, and proves that nothing was lost.

    python -m tests.soaks.soak_elastic --command local --kills 25 [--seed 1]
    python -m tests.soaks.soak_elastic --command slurm --kills 25 [--seed 1]

local    the command in docs/hosts.md: one agent with two workers
slurm    what cluster/slurm.sbatch starts on each of two nodes: two agents with a worker each

The commands are taken from there. An agent that is killed or that gives up is started again, as a
person or a scheduler would do: one that is killed just after a meeting makes the others close the
rendezvous for good (torch 2.14.1). A killed node may stay away until the other has gone on alone. What is
frozen gets SIGSTOP, and SIGCONT after 30 s. In the end the run must hold every sample once per
epoch, have the parameters of a run that nobody disturbed, and leave no process.

What is disturbed, where and when follows from the seed, which is printed; how far the processes have
come by then does not.
"""

import argparse
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from course_hosts.nodes import processes_of
from tests.support.elastic_runs import (
    EventLog,
    check_samples,
    difference,
    formed,
    undisturbed,
)
from tests.support.printed_commands import PrintedRun, commands, slurm_command

SAMPLES, BATCH, STEPS_PER_EPOCH, SAVE_EVERY = 100, 16, 7, 2
MORE = 5  # most steps from one kill to the next
FROZEN = 30  # seconds
FREEZES = 0.25  # share of the disturbances that are no kill
STAYS_AWAY = 0.5  # share of the killed nodes that the other one has to do without for a while
WHAT = ["worker", "agent", "node"]  # a node is an agent and its workers
WHEN = ["starting", "training"]
AGENTS = {"local": 1, "slurm": 2}


class Soak:
    def __init__(self, run: PrintedRun, chance: random.Random) -> None:
        self.run, self.chance = run, chance
        self.counts = Counter()
        self.steps = 0  # the gate is open for as many, and a few more

    def disturb(self) -> None:
        what, when = self.chance.choice(WHAT), self.chance.choice(WHEN)
        how = "frozen" if self.chance.random() < FREEZES else "killed"
        name = self.chance.choice(sorted(self.run.agents))
        getattr(self, when)(name)
        if how == "frozen":
            self.freeze(what, name)
        else:
            self.kill(what, name)
        self.counts[f"{what} {how}"] += 1
        self.counts[when] += 1

    def freeze(self, what: str, name: str) -> None:
        workers = self.run.workers(name)
        self.chance.shuffle(workers)
        agent = [self.run.agents[name]]
        processes = {"worker": workers[:1], "agent": agent, "node": [*agent, *workers]}
        self.run.freeze(processes[what], FROZEN)

    def kill(self, what: str, name: str) -> None:
        if what == "worker":
            self.run.kill_worker(name, self.chance.randrange(2 // len(self.run.agents)))
        elif what == "agent":
            self.run.kill_agent(name)
        else:
            self.run.kill_node(name)
        if what == "node" and self.run.agents and self.chance.random() < STAYS_AWAY:
            self.train_without_it()
        if name not in self.run.agents:
            self.run.start_agent(name)

    def train_without_it(self) -> None:
        """The other agent goes on alone; a host that was lost is not back at once."""
        lost = time.time_ns()
        before = EventLog(self.run.folder)
        done = [step["step"] for name in before.incarnations for step in before.of(name, "step")]
        self.steps = max([self.steps, *done]) + 1
        self.run.gate.open_to(self.steps)

        def alone() -> bool:
            log = EventLog(self.run.folder)
            return any(
                formed(name) > lost and log.world(name) == 1 and log.of(name, "step")
                for name in log.incarnations
            )

        self.run.wait(alone, "a step of the other agent alone")
        self.counts["stayed away"] += 1

    # --- when; the sleeps wait for nothing: they make the kill hit at any moment ---

    def starting(self, name: str) -> None:
        """While a worker imports, joins, reads the checkpoint, or has just begun."""
        self.run.wait(lambda: self.run.workers(name), f"a worker of {name}")
        time.sleep(self.chance.uniform(0, 5))

    def training(self, name: str) -> None:
        """After some more steps: between two, in a step, or in a save."""
        self.steps += self.chance.randint(1, MORE)
        self.run.gate.open_to(self.steps + MORE)
        self.run.wait_for_step(self.steps)
        time.sleep(self.chance.uniform(0, 0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", choices=AGENTS, required=True)
    parser.add_argument("--kills", type=int, default=25, help="and freezes")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-elastic-"))
    if options.command == "local":
        command = shlex.split(commands("docs/hosts.md")[0])
    else:
        command = slurm_command(folder)
    print(
        f"{options.kills} kills and freezes, --seed {options.seed}: {shlex.join(command)}",
        flush=True,
    )
    steps = MORE * (2 * options.kills + 2)  # so that it does not end before the last kill
    epochs = -(-steps // STEPS_PER_EPOCH)
    model = (
        f"--samples {SAMPLES} --batch {BATCH} --width 16 --layers 1 --epochs {epochs} "
        f"--save-every {SAVE_EVERY}"
    ).split()
    undisturbed(folder / "undisturbed", ["--data", "data/MNIST/raw", *model])
    agents = "ab"[: AGENTS[options.command]]
    start = time.monotonic()
    with PrintedRun(
        command, folder / "killed", model, workers=2 // len(agents), supervised=True
    ) as run:
        soak = Soak(run, random.Random(options.seed))
        for name in agents:
            run.start_agent(name)
        for number in range(1, options.kills + 1):
            soak.disturb()
            print(
                f"{number:3d}  {time.monotonic() - start:5.0f} s  {dict(soak.counts)}", flush=True
            )
        run.gate.open()
        run.wait_until_done()
        left = processes_of(run.id)
    print(f"agents that gave up and were started again: {run.given_up}")
    report(folder, epochs, len(left), time.monotonic() - start)
    shutil.rmtree(folder)


def report(folder: Path, epochs: int, left: int, seconds: float) -> None:
    log = EventLog(folder / "killed")
    check_samples(folder / "killed", SAMPLES, BATCH, epochs)
    done = sum(len(log.of(name, "step")) // log.world(name) for name in log.incarnations)
    committed = len(log.committed())
    worlds = Counter(log.worlds())
    apart = difference(folder / "undisturbed", folder / "killed")
    print(f"seconds: {seconds:.0f}")
    print(f"groups that trained: {worlds[1]} of one rank, {worlds[2]} of two")
    print(f"steps: {committed} in the final parameters, {done - committed} done again after a kill")
    print(f"samples: each of {SAMPLES} used once in each of {epochs} epochs")
    print(f"largest difference from the undisturbed parameters: {apart:.1e}")
    print(f"processes left: {left}")
    if apart > 1e-5 or left:
        sys.exit("FAILED")
    print("ok")


if __name__ == "__main__":
    main()
