# %% [markdown]
# # 9. Elastic training: machines fail, the training goes on
#
# While Llama 3 405B was trained on 16,384 GPUs, the job was interrupted 466 times in 54 days, 419 times without
# warning ([Llama 3 paper](https://arxiv.org/abs/2407.21783), section 3.3.4). No run of that size gets through without
# failures. It has to go on after each of them.
#
# In this chapter you kill processes for real: first a worker, then a whole node. In the end the parameters are those
# of an undisturbed run, and every sample was used exactly once per epoch. Training that goes on with the machines
# that are there is called **elastic**. Your own script learns it too.
#
# `09_elastic_further` is about why a worker died, loaders that run ahead, ranks that hang, a group that needs no
# restart, and several hosts. Both notebooks kill processes with signals and need Linux or macOS.

# %% tags=["nbval-ignore-output"]
import io
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch09
from course_utils.launch import RankFailure, launch
from course_utils.lesson import explore, mnist
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.predictions import compare
from course_utils.lesson.terminal import run_in_terminal, scratch

torch.set_num_threads(1)  # a model as small as this one loses time with more
hardware.report()

# %% [markdown]
# ## 1. The factory: the night shift
#
# The factory has two sites with two buildings each, and works for weeks without a pause. At night a machine breaks,
# or a whole site loses its power, and nobody can be called. Three things let the night shift go on by itself:
#
# * Each site has a **foreman**, who watches its buildings. If one of them stops, he sees to it that a new shift
#   begins.
# * In a **register** all foremen sign in before a shift. It says which sites take part, and gives each building its
#   number.
# * A **safe** belongs to neither site. From time to time the state of the work is put there: the blueprint, the
#   records of earlier changes, and the place in the list of material.
#
# A new shift opens the safe and goes on from there. What was done after the last entry is lost, and is done again.

# %%
ch09.two_sites()
plt.show()

# %% [markdown]
# *The foremen agree in the register. What is in the safe survives both sites.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | site, foreman | **node**, **agent** | a machine, and the process `torchrun` on it, which starts and watches the ranks there, its **workers** |
# | all buildings of a shift | **worker group** | all workers that train together |
# | register | **rendezvous** | where agents agree on who takes part and which worker has which rank |
# | signing again now and then | **keep-alive** | an agent that is silent for too long is struck off |
# | at least, at most | `--nnodes 1:2` | the **minimum** to start with and the **maximum** to take |
# | safe | **checkpoint** | the state on a disk that outlives the machine |

# %% [markdown]
# ## 2. The smallest real run: a worker dies, the work is done
#
# In its first life, rank 1 of this script kills itself as the Linux kernel kills a process that takes too much
# memory: with the signal SIGKILL (`kill -9`), which no program can catch. Rank 0 is well and waits, as in a
# collective.
#
# `torchrun --max-restarts 1` starts two workers. Rank 1 dies. **Predict** how many workers torchrun starts after
# that.

# %% tags=["prediction"]
predicted = {"workers started after the death": 2}

# %%
for name in ("two_lives", "elastic_parts", "elastic_files", "elastic_train"):
    (scratch() / f"{name}.py").unlink(missing_ok=True)

# %%
# %%writefile scratch/two_lives.py
"""Rank 1 dies in its first life. In the second life each rank prints what it was told."""

import os
import signal

NAMES = "RANK WORLD_SIZE LOCAL_RANK GROUP_RANK TORCHELASTIC_RESTART_COUNT"

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # as a rank that waits for another one
print(*(f"{name}={os.environ.get(name)}" for name in NAMES.split()))

# %%
rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "night"]
torchrun = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *rendezvous]
options = ["--nproc-per-node", "2", "--max-restarts", "1"]
printed = run_in_terminal(*torchrun, *options, scratch() / "two_lives.py", timeout=250)
print("told to the workers:", *sorted(printed.splitlines()), sep="\n")

# %%
compare(
    predicted,
    {"workers started after the death": len(printed.splitlines())},
    likely={
        "As if the dead one alone were replaced. The other one still waits in a collective of the old group.": {
            "workers started after the death": 1
        },
    },
)

# %% [markdown]
# `python -m torch.distributed.run` is what the command `torchrun` runs: it is the agent. It saw that a worker had
# died, stopped the other one, and started both again: a worker group starts and ends as a whole. With
# `--max-restarts 0`, the default, the job would have failed.
#
# A worker learns what it needs from its environment
# ([torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), "Environment Variables"):
#
# | variable | meaning |
# |---|---|
# | `RANK`, `WORLD_SIZE` | this worker's number, and how many there are; both can differ after a restart |
# | `LOCAL_RANK` | its number on the node: which GPU to take |
# | `GROUP_RANK` | the node's number |
# | `TORCHELASTIC_RESTART_COUNT` | how often this agent has restarted its workers after a failure |

# %% [markdown]
# ## 3. Predict, then measure: what failures cost
#
# ### How good machines have to be
#
# A job needs all its nodes. Llama 3 ran on 16,384 GPUs in servers of eight, and something failed every 3.1 hours: 419
# times in 54 days. Suppose that servers fail independently. **Predict** how many days a single server lasts on
# average until it fails.

# %% tags=["prediction"]
predicted = {"days until a server fails": 264}

# %%
M = 54 * 24 * 60 / 419  # minutes between two failures of the job
measured = {"days until a server fails": round(M * 16_384 / 8 / 60 / 24)}

# %%
compare(
    predicted,
    measured,
    likely={
        "That is one GPU. A server has eight, and fails with any of them.": {
            "days until a server fails": 2112
        },
    },
)

# %% [markdown]
# A server that fails less than twice a year makes a job that fails every three hours. If each of $n$ nodes fails once
# in a time $m$ on average, the **mean time between failures** (MTBF) of the job is $M = m/n$.
#
# ### How often to save
#
# After a failure the run goes on from its last checkpoint. On average a failure comes in the middle between two
# checkpoints, so it costs half an interval of work, and the recovery on top. If you save seldom, you lose much work
# at every failure. If you save often, you spend your time on saving.
#
# Suppose that you save at the best interval. Then the cluster grows to four times as many servers of the same kind,
# and a save takes one minute as before. **Predict** the factor by which the best interval changes, and the factor for
# the time that saves and lost work take together.

# %% tags=["prediction"]
predicted = {"best interval": 0.5, "saves and lost work": 2.0}


# %%
def lowest_point(mtbf, save=1.0):
    """The best interval in minutes, and the share of time that it costs, found by trying."""
    shares = {}
    for interval in (tenths / 10 for tenths in range(1, 2000)):
        shares[interval] = save / interval + interval / 2 / mtbf
    best = min(shares, key=shares.get)
    return best, shares[best]


before, after = lowest_point(M), lowest_point(M / 4)
measured = dict(zip(predicted, (round(b / a, 1) for a, b in zip(before, after))))

# %%
compare(
    predicted,
    measured,
    likely={
        "As if it followed the time between failures. Saving four times as often would cost four times as much.": {
            "best interval": 0.25
        },
        "As if each failure lost as much as before. The interval is half as long.": {
            "saves and lost work": 4.0
        },
    },
)

# %% [markdown]
# Four times as many failures come, and each loses half as much work: the loss doubles. With an interval $\tau$
# between two checkpoints, $C$ for a save and $R$ for a recovery, the time that is lost for each unit of work kept
# is, to first order,
#
# $$L(\tau) = \frac{C}{\tau} + \frac{\tau/2 + R}{M}, \qquad \text{lowest at} \qquad \tau^* = \sqrt{2\,C\,M} .$$
#
# The first term is paid once in every interval, the second once in every $M$. The formula for $\tau^*$ is that of
# Young (1974); Daly (2006) has the next terms. A recovery moves the curve up and not sideways.

# %%
for save in (0.1, 1, 10):
    best, share = lowest_point(M, save)
    print(f"a save of {save:3} min: best every {best:2.0f} min, saves and lost work {share:3.0%}")

# %% [markdown]
# The paper does not say how long a save took; the three times are assumptions. An asynchronous save
# (`dcp.async_save`) copies the state to the host's memory and writes it while the training goes on. Then $C$ is only
# the time of the copy.

# %% [markdown]
# ### 9.4 How many steps between two checkpoints (2 points)
#
# Two things stand between $L(\tau)$ and a number for your script. You know how long *one node* lasts, in hours, and
# not how long the job does. And a checkpoint is made after a whole number of steps: of the two numbers beside the
# ideal one, one loses less.


# %% nbgrader={"grade_id": "9.4", "solution": true}
def best_interval(
    nodes: int, node_mtbf_hours: float, save: float, recovery: float, step: float
) -> tuple[int, float]:
    """Returns the number of steps between two checkpoints that loses least, and the share it loses.

    Each of `nodes` nodes fails every `node_mtbf_hours` hours on average, independently of the others,
    and the job with the first of them. `save`, `recovery` and `step` are the seconds that a save, a
    recovery and a training step take. At least one step lies between two checkpoints. The share is L
    of section 3 (Young 1974) for this number of steps: 0.05 where 5 % of the work's time is lost.
    """
    ### BEGIN SOLUTION
    job_mtbf = 3600 * node_mtbf_hours / nodes

    def lost(steps: int) -> float:
        return save / (steps * step) + (steps * step / 2 + recovery) / job_mtbf

    ideal = math.sqrt(2 * save * job_mtbf) / step
    steps = min(max(1, math.floor(ideal)), math.ceil(ideal), key=lost)
    return steps, lost(steps)
    ### END SOLUTION


# %% nbgrader={"grade_id": "9.4-check", "grade": true, "points": 2, "locked": true}
check("9.4", best_interval)

# %% [markdown]
# ## 4. By hand, then with PyTorch: an agent, a checkpoint, a run that goes on
#
# ### An agent by hand
#
# An agent is a loop: start the workers, look at them now and then, and when one has died, stop all of them and start
# again. It has to be all, because the others wait for the dead one in a collective. (Since PyTorch 2.14 a group can
# also take in new members: `09_elastic_further`.)


# %%
def start_workers(program, workers, life):
    """Starts them; each learns from its environment who it is."""
    own = {"WORLD_SIZE": str(workers), "TORCHELASTIC_RESTART_COUNT": str(life)}
    variables = [os.environ | own | {"RANK": str(rank)} for rank in range(workers)]
    command, quiet = [sys.executable, program], subprocess.DEVNULL
    return [subprocess.Popen(command, env=each, stdout=quiet) for each in variables]


def who_died(group):
    """A sentence about the first worker that ended badly, or None."""
    for rank, worker in enumerate(group):
        if worker.poll() not in (None, 0):
            return f"worker {rank} ended with code {worker.returncode}"


# %%
def supervise(program, workers, max_restarts):
    """Runs `workers` copies of a program until all end well. Prints what happens."""
    for life in range(max_restarts + 1):
        group = start_workers(program, workers, life)
        try:
            while not who_died(group) and any(worker.poll() is None for worker in group):
                time.sleep(0.02)  # the monitor interval
            death = who_died(group)
        finally:
            for worker in group:
                worker.kill()
                worker.wait()
        print(f"life {life}: {death or 'all workers ended well'}")
        if not death:
            return


supervise("scratch/two_lives.py", workers=3, max_restarts=2)

# %% [markdown]
# The code -9 means that signal 9, SIGKILL, has ended the process. On one node torchrun does the same. Two things are
# missing: the new life has to know what the old one knew, and agents on several nodes have to agree.
#
# ### What a checkpoint has to hold
#
# A checkpoint has to hold everything on which the next step depends. The next cells train a small network for 12
# steps and save after 6. Then the run is resumed several times, and each time one part of the checkpoint is not used.

# %%
images, labels = mnist.tensors(train=True, limit=480)
images = images.flatten(1)


def new_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_steps(run, position, count):
    """`count` steps of 40 rows each, from step `position` on. Returns their losses."""
    losses = []
    for step in range(position, position + count):
        rows = slice(40 * step, 40 * step + 40)
        run["optimizer"].zero_grad()
        loss = cross_entropy(run["model"](images[rows]), labels[rows])
        loss.backward()
        for part in ("optimizer", "scheduler"):
            run[part].step()
        losses.append(loss.item())
    return losses


# %%
undisturbed = new_run()
train_steps(undisturbed, 0, 6)
saved = {name: part.state_dict() for name, part in undisturbed.items()}
saved |= {"position": 6, "random numbers": torch.get_rng_state()}
on_disk = io.BytesIO()  # unlike `saved`, it does not change when the training goes on
torch.save(saved, on_disk)
train_steps(undisturbed, 6, 6)
expected = flat(undisturbed["model"].parameters())


def resumed_without(left_out):
    """Parameters and last loss after six more steps from the checkpoint."""
    run, state = new_run(), torch.load(io.BytesIO(on_disk.getvalue()), weights_only=True)
    for name in run.keys() - {left_out}:
        run[name].load_state_dict(state[name])
    if left_out != "random numbers":
        torch.set_rng_state(state["random numbers"])
    last = train_steps(run, 0 if left_out == "position" else state["position"], 6)[-1]
    return flat(run["model"].parameters()), last


# %%
for left_out in ("nothing", *saved):
    parameters, last = resumed_without(left_out)
    compared = check_equal if left_out == "nothing" else largest_difference
    difference = compared(expected, [parameters])
    print(f"left out: {left_out:15} largest difference {difference!s:6} loss {last:.3f}")

# %% [markdown]
# A complete checkpoint has five parts: **model, optimizer, scheduler, position in the data, random numbers**. With
# all five the run cannot be told from one that was never stopped.
#
# The loss does not show it. Without the scheduler it is lower than in the complete run, and without the position,
# on samples that were seen before, it is lowest of all. Only the comparison with an undisturbed run tells.

# %% [markdown]
# ### 9.3 All that a run needs to go on (3 points)
#
# A resume is complete if the resumed run cannot be told from one that was never disturbed. Model, optimizer and
# scheduler have a `state_dict`, and here the sampler has one too. The random numbers come from three generators:
# PyTorch's for dropout, and numpy's and Python's for whatever prepares the data. On a GPU, PyTorch has a fourth.
#
# All this goes through `torch.load(..., weights_only=True)`. It makes tensors, numbers, strings, and lists, tuples
# and dicts of them. It refuses objects of other classes, because an unpickler that makes any object also runs any
# code. `np.random.get_state()` holds an array, so you have to find another form for it.
#
# The random states are those of one rank. If the ranks draw different numbers, put the states of all ranks into the
# checkpoint, for instance with `all_gather_object`. That is exact only for the same number of ranks.

# %% nbgrader={"grade_id": "9.3", "solution": true}
import random
from typing import Any

import numpy as np
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class TrainingState:
    """Everything that decides how a training goes on, as one dict.

    `sampler` is any object with `state_dict` and `load_state_dict`, as the others are. `model` may be
    wrapped in DistributedDataParallel on one side of a restart and not on the other: the names in the
    state are always those of the model inside.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler, sampler: Any
    ) -> None:
        ### BEGIN SOLUTION
        self.model = model.module if isinstance(model, DDP) else model
        self.others = {"optimizer": optimizer, "scheduler": scheduler, "sampler": sampler}
        ### END SOLUTION

    def state_dict(self) -> dict:
        """Returns the states of model, optimizer, scheduler and sampler, and of the random numbers.

        Those are the global generators of Python, numpy and PyTorch, the latter's on the GPU too
        where there is one. What `torch.save` writes of it, `torch.load(..., weights_only=True)` reads.
        """
        ### BEGIN SOLUTION
        algorithm, words, *rest = np.random.get_state()
        generators = {
            "python": random.getstate(),
            "numpy": (algorithm, words.tolist(), *rest),
            "torch": torch.get_rng_state(),
            "gpu": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }
        parts = {name: part.state_dict() for name, part in self.others.items()}
        return {"model": self.model.state_dict(), **parts, "generators": generators}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        """Puts everything back to `state`, whatever random numbers it uses itself on the way.

        Raises what the parts raise, for instance where `state` is that of another model.
        """
        ### BEGIN SOLUTION
        self.model.load_state_dict(state["model"])
        for name, part in self.others.items():
            part.load_state_dict(state[name])
        generators = state["generators"]
        random.setstate(generators["python"])
        np.random.set_state(generators["numpy"])
        torch.set_rng_state(generators["torch"])
        if generators["gpu"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(generators["gpu"])
        ### END SOLUTION


# %% nbgrader={"grade_id": "9.3-check", "grade": true, "points": 3, "locked": true}
check("9.3", TrainingState)

# %% [markdown]
# ### What must not depend on a rank
#
# After a failure there may be fewer ranks, or more, and a rank may get another number. What becomes of the position
# in the data?
#
# An epoch has 480 samples and a step takes 48. Two ranks share them, as with a `DistributedSampler`: each takes every
# second sample and counts its own, 144 after 6 steps. Then one of them dies. The other one goes on alone. It skips
# the 144 samples that it has counted, and does the 4 steps that are left of the epoch. **Predict** how many samples
# of the epoch are used twice.

# %% tags=["prediction"]
predicted = {"used twice": 144}

# %%
SAMPLES, BATCH = 480, 48
order = torch.arange(SAMPLES)  # stands for the shuffled order of the epoch
before, left = order[: 6 * BATCH], 4 * BATCH
skipped = {"global count": 6 * BATCH, "its own count": 3 * BATCH, "no count": 0}
counts = {
    name: torch.bincount(torch.cat([before, order[skip:][:left]]), minlength=SAMPLES)
    for name, skip in skipped.items()
}
measured = {"used twice": (counts["its own count"] == 2).sum().item()}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if its count were that of both ranks. They had used 288 samples.": {"used twice": 0},
        "That happens if it begins at the first sample.": {"used twice": 192},
    },
)

# %%
ch09.uses(counts)
plt.show()

# %% [markdown]
# *Orange samples are used a second time, and as many never. Only a position in the global order is right.*
#
# Nothing fails, and on samples that were seen before the loss even looks better. So nothing that shapes the result
# may belong to a rank:
#
# * **The order of samples** belongs to the epoch, and a **global batch**, all samples of one step, to the step. A
#   rank takes a share of it.
# * **The gradient** is the sum over the batch, divided by the number of its samples. The mean of the ranks' means
#   differs from it when shares differ in size.
# * **Random numbers**, such as those of dropout, are drawn for the whole batch on every rank, and each rank takes its
#   rows. A large model derives a seed from step and sample.
# * **The learning rate** belongs to the step.
#
# The next script follows these rules. It writes out SGD with momentum, so the whole state is in one dict. `used`
# counts how often each sample went into the parameters. As a part of the state, it goes back with the parameters.

# %%
# %%writefile scratch/elastic_parts.py
"""What the elastic training is made of. The notebook and every worker import this file."""

import math

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

ROWS, BATCH, EPOCHS, EVERY = 480, 48, 2, 3  # a checkpoint after every 3 steps
PER_EPOCH = ROWS // BATCH
STEPS = EPOCHS * PER_EPOCH


def rows_of_step(step):
    """The rows of the global batch of `step`, an int64 tensor, the same on every rank."""
    epoch, place = divmod(step, PER_EPOCH)
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    return shuffled.split(BATCH)[place]


def learning_rate(step):
    return 0.05 * (1 + math.cos(math.pi * step / STEPS))


def new_state(device="cpu"):
    """Everything that the next step depends on."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        "hidden": (0.05 * torch.randn(784, 32, generator=generator)).to(device),
        "output": (0.2 * torch.randn(32, 10, generator=generator)).to(device),
    }
    return {
        "step": 0,  # gives the position in the data and the learning rate, too
        "weights": weights,
        "momentum": {name: torch.zeros_like(weight) for name, weight in weights.items()},
        "random": generator.get_state(),
        "used": torch.zeros(EPOCHS, ROWS, dtype=torch.int64, device=device),
    }


def train_step(state, images, labels, rank=0, ranks=1):
    """One step on the global batch, of which this rank computes its share; changes `state`."""
    step, weights, device = state["step"], state["weights"], images.device
    generator = torch.Generator()
    generator.set_state(state["random"])
    keep = torch.rand(BATCH, 32, generator=generator) > 0.2  # dropout of the whole batch
    share = torch.arange(BATCH).tensor_split(ranks)[rank]  # this rank's places in the batch
    rows = rows_of_step(step)[share].to(device)

    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    hidden = torch.relu(images[rows] @ leaves["hidden"]) * keep[share].to(device) / 0.8
    loss = cross_entropy(hidden @ leaves["output"], labels[rows], reduction="sum") / BATCH
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    used = torch.bincount(rows, minlength=ROWS)
    if ranks > 1:
        for part in (*gradients, used):
            dist.all_reduce(part)

    for name, gradient in zip(leaves, gradients):
        state["momentum"][name].mul_(0.9).add_(gradient)
        weights[name].sub_(learning_rate(step) * state["momentum"][name])
    state["used"][step // PER_EPOCH] += used
    state["random"] = generator.get_state()
    state["step"] = step + 1


# %% [markdown]
# Train two epochs in one process, and then on 2, 3 and 5 ranks. The 48 samples of a step are no multiple of 5.

# %%
import cloudpickle

if "scratch" not in sys.path:
    sys.path.insert(0, "scratch")
sys.modules.pop("elastic_parts", None)  # you may have changed the file
import elastic_parts as parts

cloudpickle.register_pickle_by_value(parts)  # sends its functions along to the ranks


def train_on_ranks(rank, ranks):
    device = hardware.device()
    state = parts.new_state(device)
    for _ in range(parts.STEPS):
        parts.train_step(state, images.to(device), labels.to(device), rank, ranks)
    return flat(state["weights"].values()), state["used"].cpu()


# %%
alone = parts.new_state()
for _ in range(parts.STEPS):
    parts.train_step(alone, images, labels)
one_process = flat(alone["weights"].values())

for ranks in (2, 3, 5):
    parameters, used = zip(*launch(train_on_ranks, ranks, ranks, timeout=250))
    difference, wrong = check_equal(one_process, parameters), (used[0] != 1).sum().item()
    print(f"{ranks} ranks: largest difference {difference}, samples not used once: {wrong}")

# %% [markdown]
# ### 9.2 A sampler that does not care how many ranks there are (3 points)
#
# `DistributedSampler` gives rank $r$ of $n$ the samples $r$, $r + n$, $r + 2n$ and so on, and fills up with samples
# that come twice. When it is stopped and started again with another $n$, nobody can say which samples have been used.
# Think the other way round. There is one order of all samples in an epoch, drawn from seed and epoch alone, and a
# position in it. Each step takes the next `global_batch` of them, and only that piece is shared out among the ranks
# that happen to be there.
#
# You write a **batch sampler**: it yields lists of indices, as a `DataLoader` takes them for its argument
# `batch_sampler`. A list counts as used as soon as it is handed out, so the state that is saved at the end of a step
# includes this step. (With `num_workers` above 0 a loader asks for lists ahead of the training. Then the training
# loop has to count: `09_elastic_further`, section 3.)

# %% nbgrader={"grade_id": "9.2", "solution": true}
from collections.abc import Iterator

from torch.utils.data import Sampler


class ElasticSampler(Sampler[list[int]]):
    """Shares out one order of the samples 0 to `samples` - 1, `global_batch` of them a step.

    The order of an epoch depends on `seed` and the epoch only, and the global random state is left
    alone. The ranks' lists of a step together are the same samples for every world size, each of
    them once; their lengths differ by at most one, so a list may be empty. The last step of an epoch
    has what is left over.
    """

    def __init__(
        self, samples: int, global_batch: int, rank: int, world_size: int, seed: int = 0
    ) -> None:
        """Starts at the beginning of epoch 0."""
        ### BEGIN SOLUTION
        self.samples, self.global_batch, self.seed = samples, global_batch, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = self.position = 0
        ### END SOLUTION

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of `epoch`; for the current epoch, even at its end, it changes nothing."""
        ### BEGIN SOLUTION
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0
        ### END SOLUTION

    def __iter__(self) -> Iterator[list[int]]:
        """Yields this rank's list of each step that is left in the epoch."""
        ### BEGIN SOLUTION
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.samples, generator=generator).tolist()
        while self.position < self.samples:
            batch = order[self.position : self.position + self.global_batch]
            self.position += len(batch)
            yield batch[self.rank :: self.world_size]
        ### END SOLUTION

    def state_dict(self) -> dict:
        """Returns where all ranks together are: the same on each of them, of any world size.

        What `torch.save` writes of it, `torch.load(..., weights_only=True)` reads.
        """
        ### BEGIN SOLUTION
        return {"epoch": self.epoch, "position": self.position}
        ### END SOLUTION

    def load_state_dict(self, state: dict) -> None:
        """Goes to where `state` says; it may come from another rank of another world size."""
        ### BEGIN SOLUTION
        self.epoch, self.position = state["epoch"], state["position"]
        ### END SOLUTION


# %% nbgrader={"grade_id": "9.2-check", "grade": true, "points": 3, "locked": true}
check("9.2", ElasticSampler)

# %% [markdown]
# ### A checkpoint that is whole, or not there
#
# A folder holds the checkpoint `last.pt`. A process saves the next one under the same name with `torch.save(state,
# path)`, and dies when half of it is written. **Predict** how many checkpoints can be loaded from the folder
# afterwards.

# %% tags=["prediction"]
predicted = {"written in place": 0}


# %%
def killed_while_writing(rank, path):
    """Dies when it has written the first half of a checkpoint."""
    content = io.BytesIO()
    torch.save({"weights": torch.ones(100_000)}, content)
    with path.open("wb") as file:
        file.write(content.getvalue()[: len(content.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def can_be_loaded(path):
    try:
        return bool(torch.load(path, weights_only=True))
    except RuntimeError:
        return False


def empty(name):
    """An empty folder for files of this notebook."""
    folder = (scratch() / name).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


# %%
measured = {}
for way, name in (("written in place", "last.pt"), ("under another name", "unfinished")):
    folder = empty("torn")
    torch.save({"weights": torch.zeros(100_000)}, folder / "last.pt")
    try:
        launch(killed_while_writing, 1, folder / name)
    except RankFailure as failure:
        assert failure.kind == "signal"
    measured[way] = sum(map(can_be_loaded, folder.iterdir()))

# %%
compare(
    predicted,
    measured,
    likely={
        "The old one is gone as soon as its file is opened for writing.": {"written in place": 1},
    },
)

# %%
print("checkpoints that can be loaded:", *(f"{n} {way}" for way, n in measured.items()), sep="\n")

# %% [markdown]
# Written in place, the new checkpoint is torn and the old one is gone: the run has lost everything. A process that
# dies while it writes under another name leaves the old one alone. So a checkpoint is written with care:
#
# * **Atomic.** It is written under another name and renamed at the end. Within a file system a rename happens at
#   once.
# * **Flushed.** Without `fsync` the name can reach the disk before the content, and after a power failure it stands
#   there alone.
# * **Verified.** The name carries a checksum of the content. The reader goes back from the newest file to the first
#   that agrees with its own name. So it also finds what a disk or a copy has damaged.

# %%
# %%writefile scratch/elastic_files.py
"""Checkpoints that are whole, or not there. The notebook and every worker import this file."""

import os
import tempfile
import zlib
from io import BytesIO
from pathlib import Path

import torch


def write_checkpoint(folder, state):
    """Writes step-0007-1a2b3c4d.pt: the step and a checksum. The name appears when all is there."""
    memory = BytesIO()
    torch.save(state, memory)
    name = f"step-{state['step']:04}-{zlib.crc32(memory.getbuffer()):08x}.pt"
    number, unfinished = tempfile.mkstemp(dir=folder)
    with open(number, "wb") as file:
        file.write(memory.getbuffer())
        file.flush()
        os.fsync(number)  # on the disk, not only in the kernel's memory
    Path(unfinished).rename(Path(folder, name))


def newest_checkpoint(folder):
    """Returns the newest state whose checksum agrees with its name, or None."""
    for path in sorted(Path(folder).glob("step-*.pt"), reverse=True):
        content = path.read_bytes()
        if path.stem.endswith(f"{zlib.crc32(content):08x}"):
            return torch.load(BytesIO(content), weights_only=True)
    return None


# %% [markdown]
# A sharded state is a folder with files from all ranks (chapter 8). It follows the same rule: all ranks write into a
# folder that no restart reads, and when the last one is done, rank 0 renames it.

# %% [markdown]
# ### 9.1 Checkpoints that are whole or not there (2 points)
#
# `write_checkpoint` is called by one process, and its files stay for ever. A long run needs more: all ranks call it,
# a step that is saved again replaces its checkpoint, and only the last few files remain. The three rules hold here
# too. A file that has its name is never open for writing. Its bytes are on the disk before it gets the name. And it
# carries a checksum, since `torch.load` does not notice a flipped bit in a tensor: it returns the tensor with a wrong
# number in it.
#
# Ask of each line that you write: if the process is killed here, what will `load` find? And what will still lie in
# the folder in a month?

# %% nbgrader={"grade_id": "9.1", "solution": true}
import hashlib


class Checkpoints:
    """The checkpoints of a run: one file each, in a folder that all ranks see and nothing else uses.

    Every rank calls `save` and `load` with the same arguments; the process group is initialised. The
    folder may be missing at first, and the names of the files are yours to choose.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        ### BEGIN SOLUTION
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)
        ### END SOLUTION

    def save(self, step: int, state: dict) -> None:
        """Makes `state` the checkpoint of `step`, in place of an earlier one of this step.

        Rank 0 alone writes; no rank returns before the file is there. Killed at any moment, it leaves
        what could be loaded before. The bytes are on the disk (`os.fsync`) before the file gets its
        name. Afterwards the checkpoint of `step` and the `keep - 1` of the nearest steps before it
        remain, and no other file: none of a later step, and nothing that a killed save has left.
        """
        ### BEGIN SOLUTION
        if dist.get_rank() == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            content = buffer.getvalue()
            final = self.folder / f"{step:012d}.pt"  # as many digits for all: sorted by step
            unfinished = final.with_suffix(".part")
            with open(unfinished, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, final)
            until_now = sorted(path for path in self.folder.glob("*.pt") if path <= final)
            for path in set(self.folder.iterdir()) - set(until_now[-self.keep :]):
                path.unlink()
        dist.barrier()
        ### END SOLUTION

    def load(self) -> tuple[int, dict] | None:
        """Returns step and state of the latest step whose checkpoint is whole, on every rank the same.

        One that is cut short, or in which a single byte has changed, is passed over, and stays.
        Returns None where none is whole. Reads with `weights_only=True`.
        """
        ### BEGIN SOLUTION
        for path in sorted(self.folder.glob("*.pt"), reverse=True):
            stored = path.read_bytes()
            digest, content = stored[:32], stored[32:]
            if hashlib.sha256(content).digest() == digest:
                # written on another rank's GPU, it may name a device that is not here
                state = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
                return int(path.stem), state
        return None
        ### END SOLUTION


# %% nbgrader={"grade_id": "9.1-check", "grade": true, "points": 2, "locked": true}
check("9.1", Checkpoints)

# %% [markdown]
# ### With PyTorch: torchrun on two nodes
#
# Two agents on this machine now play two nodes with one worker each. As on two machines, both run the same command:
#
# ```
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 5 \
#     --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME  elastic_train.py
# ```
#
# They find each other in the [rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html):
#
# 1. Each agent enters its name in a store at the endpoint, and renews its entry every few seconds: the keep-alive.
# 2. When the maximum of nodes has signed in, the round is complete. With the minimum, it first waits for late nodes:
#    the **last call**.
# 3. The workers get their ranks and start. A round is never changed: if a node comes or goes, there is a new round
#    and a new worker group.
#
# If the machine with the store dies, so does the job; here the notebook holds the store. `09_elastic_further` has the
# options, and says what the variable in front of the command is for.

# %%
# %%writefile scratch/elastic_train.py
"""A worker. It goes on where the newest good checkpoint ends."""

import sys
import time
from pathlib import Path

born = time.time()  # before the imports that take long

import elastic_files as files
import elastic_parts as parts
import torch
import torch.distributed as dist

from course_hosts.nodes import Worker

folder = Path(sys.argv[1])
images, labels = torch.load(folder / "data.pt", weights_only=True)
dist.init_process_group("gloo")  # also where there are GPUs: here two nodes are one machine
worker = Worker(folder)  # keeps a diary, and waits where the notebook wants it to
state = files.newest_checkpoint(folder) or parts.new_state()  # nobody writes until all have read
worker.note("born", state["step"], at=born)
while state["step"] < parts.STEPS:
    worker.wait_at_gate(state["step"])
    parts.train_step(state, images, labels, worker.rank, worker.ranks)
    time.sleep(0.05)  # so that the picture below shows something of so small a step
    worker.note("step", state["step"])
    if worker.rank == 0 and (state["step"] % parts.EVERY == 0 or state["step"] == parts.STEPS):
        files.write_checkpoint(folder, state)
dist.destroy_process_group()


# %% [markdown]
# Without the gate and the diary it is a script as you would write it. It does not know whether this is its first
# life. `Nodes` is the notebook's side: it starts agents with the command above, holds the workers at chosen steps,
# and kills.
#
# The plan: two nodes train 20 steps, with a checkpoint after every 3.
#
# * After step 5 the worker of node B is killed.
# * After step 11 a bit of the newest checkpoint flips, and the whole of B is killed. A goes on alone.
# * When A has done step 14, B comes back, and both train to the end.
#
# **Predict** how many steps are computed, with those that are computed again.

# %% tags=["prediction"]
predicted = {"steps computed": 20 + (5 - 3) + (11 - 6) + (14 - 12)}

# %%
sys.modules.pop("elastic_files", None)  # you may have changed the file
import elastic_files as files

from course_hosts.nodes import Nodes


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# %%
folder = empty("night_shift")
with Nodes(folder, "scratch/elastic_train.py") as nodes:
    torch.save((images, labels), folder / "data.pt")
    nodes.start("A")
    nodes.start("B")
    nodes.train(ranks=2, first=0, until=5)
    nodes.kill_worker("B")
    nodes.train(ranks=2, first=3, until=11)
    flip_a_bit(max(folder.glob("step-*.pt")))
    print(f"{'':22}a bit of the newest checkpoint flips")
    nodes.kill_node("B")
    nodes.train(ranks=1, first=6, until=14)
    nodes.start("B")
    nodes.train(ranks=2, first=12)

# %%
of_rank_0 = [e for e in nodes.events() if (e["event"], e["rank"]) == ("step", 0)]
measured = {"steps computed": len(of_rank_0)}

# %%
compare(
    predicted,
    measured,
    likely={
        "The checkpoint of step 9 is damaged, so the run goes on from that of step 6.": {
            "steps computed": 26
        },
        "As if each group went on where the last one ended.": {"steps computed": 20},
    },
)

# %%
final = files.newest_checkpoint(folder)
difference = check_equal(one_process, [flat(final["weights"].values())])
print("largest difference from the run in one process:", difference)
print("samples not used once in an epoch:", (final["used"] != 1).sum().item())

# %%
ch09.night(nodes)
plt.show()

# %% [markdown]
# *Orange steps were computed a second time. With steps this small, nearly all the time is recovery.* The shares of a
# batch were 24 and 24 samples, then 48, then 24 and 24 again, and the run ends as if nothing had happened.
#
# ### How long a recovery takes, and who notices
#
# * **The worker of B died.** B's agent saw it within 0.1 s, and signed in anew. A's agent saw a node waiting at the
#   rendezvous, and restarted its own healthy worker.
# * **Node B died.** A's worker found out in its next all-reduce, because the connection was broken. Then A's agent
#   waited until B's keep-alive had run out, and for the last call: at least 9 s here, and 40 s with torchrun's
#   defaults.
# * **Node B came back.** A's agent saw it waiting, and restarted its worker.
#
# ### Leave when asked: SIGTERM
#
# A scheduler that wants a node back sends SIGTERM, and SIGKILL half a minute later. A script that finishes its step
# and saves loses nothing. But the signal reaches the ranks at different moments, and one that leaves during a step
# keeps the others waiting in a collective. So a handler only notes the signal, and after each step the ranks agree
# whether to leave.


# %%
def leaves_when_told(rank):
    """Trains until one rank was told to leave. Returns the steps that this rank has done."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    for step in range(1, 100):
        time.sleep(0.01)  # computes
        if (rank, step) == (1, 5):
            signal.raise_signal(signal.SIGTERM)  # as a scheduler sends it
        anybody = torch.tensor([len(told)], device=hardware.device())
        dist.all_reduce(anybody)
        if anybody.item():
            return step  # all save here


print("steps done by each rank:", launch(leaves_when_told, 3))

# %% [markdown]
# ### 9.6 Your own script, which survives
#
# `mine/train.py` (8.6) begins at its first step whenever it is started. Let it go on. If you have not written it yet,
# `mine.start(9)` gives you the course's own as chapter 8 leaves it.
#
# * With `--save-every 20` it writes a checkpoint after every 20th step, counted over all epochs. Started again with
#   the same `--out`, on any number of ranks, it goes on from the newest one, to the parameters and the log of an
#   uninterrupted run.
# * A rank may be killed at any moment, also while it saves.
# * After SIGTERM the ranks finish the step, save and leave. The signal may reach one of them a step before the
#   others.
# * The batch of all ranks together stays `--batch`, and the windows of step s stay those of step s.

# %%
from course_exercises import mine

check("9.6", mine.script(9))

# %% [markdown]
# ## 5. Break it: a rank that hangs, and a bug hunt
#
# ### A rank that hangs instead of dying
#
# An agent watches for processes that *end*. A rank that waits for ever, for a disk or in an endless loop, is alive as
# far as the agent can see, and the others wait for it in a collective. Only the time limit of the collective ends
# this. Here rank 0 waits one second and no longer.


# %%
from datetime import timedelta


def rank_1_hangs(rank, done):
    if rank == 1:
        while not done.exists():  # "hangs" until rank 0 has seen enough
            time.sleep(0.02)
        return "was hanging"
    work = dist.all_reduce(torch.ones(1, device=hardware.device()), async_op=True)
    try:
        work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return "timed out" if "out" in str(error).lower() else str(error)
    finally:
        done.touch()


print(launch(rank_1_hangs, 2, empty("hanging") / "done"))

# %% [markdown]
# The healthy rank raises an error and ends, its agent sees that, and all start again. Without an argument the process
# group's own limit holds: by default 10 minutes for NCCL and 30 for other backends. Set it to a few times your longest
# step:
# [`init_process_group(timeout=timedelta(minutes=2))`](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group).
# The limit does not say *which* rank hangs. An agent that gets a sign of life from every worker does
# (`09_elastic_further`).
#
# ### Bug hunt: a snapshot from a tutorial
#
# This code follows PyTorch's
# [`multigpu_torchrun.py`](https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu_torchrun.py):
# it saves a snapshot after every epoch and starts from it. Find three mistakes before you read on.


# %%
def fault_tolerant(snapshot, epochs):
    run, first = new_run(), 0
    if snapshot.exists():
        loaded = torch.load(snapshot, weights_only=True)
        run["model"].load_state_dict(loaded["MODEL_STATE"])
        first = loaded["EPOCHS_RUN"]
    for epoch in range(first, epochs):
        train_steps(run, 3 * epoch, 3)
        torch.save({"MODEL_STATE": run["model"].state_dict(), "EPOCHS_RUN": epoch}, snapshot)
    return flat(run["model"].parameters())


snapshot = empty("snapshot") / "snapshot.pt"
fault_tolerant(snapshot, epochs=2)  # the first life: two epochs of four
resumed = fault_tolerant(snapshot, epochs=4)
print("largest difference from the undisturbed run:", largest_difference(expected, [resumed]))

# %% [markdown]
# * `EPOCHS_RUN` is the number of the epoch that has ended, not of the next one. Epoch 1 is trained twice.
# * Only the model is saved. Momentum, learning rate and random numbers begin anew.
# * `torch.save` writes in place. If a kill comes at that moment, nothing is left.

# %% [markdown]
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 9.4 How many steps between two checkpoints | 2 | section 3 |
# | 9.3 All that a run needs to go on | 3 | section 4, *What a checkpoint has to hold* |
# | 9.2 A sampler that does not care how many ranks there are | 3 | section 4, *What must not depend on a rank* |
# | 9.1 Checkpoints that are whole or not there | 2 | section 4, *A checkpoint that is whole, or not there* |
# | 9.6 Your own script, which survives | | section 4, at its end |
# | 9.5 Minimum, maximum and restarts for four situations | 1 | `09_elastic_further` |

# %% [markdown]
# ## 7. See it: how often to save
#
# Choose how many nodes a job has, how often one of them fails, and how long a save takes. Two things to try:
#
# * Take half a minute for a save, a quarter of the time. Saves and lost work together cost half as much.
# * Take the fewest nodes and the shortest save. The loss can hardly be seen, and elastic training is not worth the
#   trouble.


# %%
def draw_saving(nodes, node_mtbf_days, save_minutes):
    return ch09.how_often(24 * node_mtbf_days / nodes, save_minutes / 60, recovery=0.1)


explore.Explorer(
    draw_saving,
    nodes=(1, 4000, 2048),
    node_mtbf_days=(30, 1000, 264),
    save_minutes=(0.5, 10.5, 2.0),
)

# %% [markdown]
# *At the start: a cluster like Llama's, with an assumed save of two minutes. The best interval is where the dashed
# and the dotted curve cross, and around it the total is flat: half or twice the interval adds a quarter to
# saves and lost work.*

# %% [markdown]
# ## 8. On a cluster: your script on real nodes
#
# After 9.6 your own script is ready for nodes that come and go. One agent runs on each of them, with the same
# command:
#
# ```
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 5 \
#     --rdzv-backend c10d --rdzv-endpoint node0.cluster:29400 --rdzv-id night \
#     mine/train.py --save-every 20 --text ../data/text/the_long_shed.txt --out /shared/runs/night
# ```
#
# * **Somebody has to start agents** when a machine is replaced. SLURM (`--requeue`) and Kubernetes do. The course's
#   folder `cluster/` has launch files for both, and a `train.py` to take away.
# * **The minimum is a promise.** A model that needs the memory of eight nodes must not be started on one.
# * **The endpoint** is a machine that can die. Put it where failures are rare.
# * **Checkpoints** must outlive the node, on a shared file system or in an object store.
# * **With NCCL** a broken peer may show as a wait and not as an error. The time limit ends it.

# %% [markdown]
# ## 9. Remember
#
# 1. torchrun restarts all workers, and its agents agree on who takes part. The new workers know only what you have
#    saved.
# 2. A checkpoint holds model, optimizer, scheduler, position in the data and random numbers. It is written under
#    another name, flushed, renamed, and verified when it is read.
# 3. If nothing that shapes the result belongs to a rank, any number of ranks can go on.
# 4. A dead worker is noticed at once, a dead node when its keep-alive has run out, and a hanging rank by a time
#    limit.
# 5. The best interval is $\sqrt{2CM}$. There, a save that is twice as fast is worth as much as failures that are half
#    as frequent, apart from the recoveries.
#
# **Sources**
#
# * Llama Team, *The Llama 3 Herd of Models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783): section
#   3.3.4.
# * J. W. Young, *A first order approximation to the optimum checkpoint interval*, CACM 17(9), 1974.
# * J. T. Daly, *A higher order estimate of the optimum checkpoint interval for restart dumps*, FGCS 22(3), 2006.
