# %% [markdown]
# # 9. Elastic training: machines fail, the training goes on
#
# A training run on many machines loses some of them while it runs.

# %% tags=["nbval-ignore-output"]
import hashlib
import io
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

from course_utils import hardware
from course_utils.checks import check, hint

hardware.report()

# %% [markdown]
# ## 1. The factory: the night shift

# %% [markdown]
# ## 2. The smallest real run

# %% [markdown]
# ## 3. Predict, then measure

# %% [markdown]
# ## 4. By hand, then with PyTorch

# %% [markdown]
# ## 5. Break it

# %% [markdown]
# ## 6. Exercises: lose nothing that was done
#
# Five parts of a run that survives its machines: a file that is whole or absent, an order of samples
# that no world size changes, a state that is complete, and two choices that are made before the run
# starts. Nothing here starts torchrun: the checks kill, damage and resume on their own, at moments that
# are the same in every run.

# %% [markdown]
# ### 9.1 Checkpoints that are whole or not there (2 points)
#
# A process can be killed between any two bytes that it writes. So a file that already has its name must
# never be open for writing: write under another name, and rename. A rename is **atomic**: whoever looks
# sees the old file or the new one, never a part of each.
#
# That protects against your own death, not against the disk's. A byte can change later, and `torch.load`
# does not notice it: PyTorch's reader leaves out the zip format's checksums, and the tensor arrives with a
# wrong number in it. So each file carries a **checksum** of its content, and whoever loads compares. And
# a file can have its name while its bytes are still on the way to the disk. `os.fsync` waits for them.


# %% nbgrader={"grade_id": "9.1", "solution": true}
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

        One that is cut short, or in which a single byte has changed, is passed over. Returns None
        where none is whole. Reads with `weights_only=True`.
        """
        ### BEGIN SOLUTION
        for path in sorted(self.folder.glob("*.pt"), reverse=True):
            stored = path.read_bytes()
            digest, content = stored[:32], stored[32:]
            if hashlib.sha256(content).digest() == digest:
                return int(path.stem), torch.load(io.BytesIO(content), weights_only=True)
        return None
        ### END SOLUTION


# %% nbgrader={"grade_id": "9.1-check", "grade": true, "points": 2, "locked": true}
check("9.1", Checkpoints)

# %% [markdown]
# ### 9.2 A sampler that does not care how many ranks there are (3 points)
#
# `DistributedSampler` gives rank $r$ of $n$ the samples $r$, $r + n$, $r + 2n$ and so on, filled up with
# samples that come twice. Stop it, start again with another $n$, and nobody can say which samples have been
# used. Think the other way round: there is one order of all samples in an epoch, drawn from seed and epoch
# alone, and a position in it. Each step takes the next `global_batch` of them, and only that piece is
# shared out among the ranks that happen to be there.
#
# What you write is a **batch sampler**: it yields lists of indices, as a `DataLoader` takes them for its
# argument `batch_sampler`. A list counts as used as soon as it is handed out, so the state that is saved
# at the end of a step includes this step. (With `num_workers` above 0 a loader asks for lists ahead of the
# training. Then the training loop has to count, and this sampler is not enough.)


# %% nbgrader={"grade_id": "9.2", "solution": true}
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
        """Goes to the beginning of `epoch`; in the epoch that is under way it changes nothing."""
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
        """Returns where all ranks together are: the same on each of them, of any world size."""
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
# ### 9.3 All that a run needs to go on (3 points)
#
# A resume is complete if the resumed run cannot be told from one that was never disturbed. Weights are the
# smallest part of that. The optimizer has its momenta, the scheduler its count, the sampler its position.
# And there are three generators of random numbers behind a training step: PyTorch's for dropout, numpy's
# and Python's for whatever prepares the data. On a GPU PyTorch has a fourth.
#
# All this goes through `torch.load(..., weights_only=True)`, which makes tensors, numbers, strings,
# and lists, tuples and dicts of them, and refuses everything else: an unpickler that makes any object
# also runs any code. `np.random.get_state()` holds an array. Find it another form.
#
# The random states are those of one rank. Ranks that draw different numbers put the states of all of
# them into the checkpoint, for instance with `all_gather_object`. That is exact for the same number of
# ranks. Only numbers that are drawn from seed, epoch and sample survive a change of it.


# %% nbgrader={"grade_id": "9.3", "solution": true}
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

        Raises what the parts raise: a state of another model is no state of this one.
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
# ### 9.4 How many steps between two checkpoints (2 points)
#
# Save often, and the saving costs; save rarely, and each failure costs. To first order ([Young
# 1974](https://doi.org/10.1145/361147.361115)), with $T$ seconds of training between two checkpoints, $s$
# seconds for a save, $R$ seconds until a restarted run trains again, and a failure of the *job* every $M$
# seconds on average, the share of the time that is lost is
#
# $$\frac{s}{T} + \frac{T/2 + R}{M}.$$
#
# A failure comes at any moment of the interval, so on average half of it is done again. Two things stand
# between this and an answer. What is known is how long *one node* lasts, and the job stops with the first
# of them. And a checkpoint is made after a whole number of steps.


# %% nbgrader={"grade_id": "9.4", "solution": true}
def best_interval(
    nodes: int, node_mtbf_hours: float, save: float, recovery: float, step: float
) -> tuple[int, float]:
    """Returns the number of steps between two checkpoints that loses least, and the share it loses.

    Each of `nodes` nodes fails every `node_mtbf_hours` hours on average, independently of the others.
    `save`, `recovery` and `step` are the seconds that a save, a recovery and a training step take. At
    least one step lies between two checkpoints. The share is 0.05 where 5 % are lost, and at most 1.
    """
    ### BEGIN SOLUTION
    job_mtbf = 3600 * node_mtbf_hours / nodes

    def lost(steps: int) -> float:
        return save / (steps * step) + (steps * step / 2 + recovery) / job_mtbf

    ideal = math.sqrt(2 * save * job_mtbf) / step
    steps = min(max(1, math.floor(ideal)), math.ceil(ideal), key=lost)
    return steps, min(1.0, lost(steps))
    ### END SOLUTION


# %% nbgrader={"grade_id": "9.4-check", "grade": true, "points": 2, "locked": true}
check("9.4", best_interval)

# %% [markdown]
# ### 9.5 Minimum, maximum and restarts for four situations (1 point)
#
# `torchrun --nnodes=MIN:MAX --max-restarts=N` has to be told three numbers. Here are four runs:
#
# | run | nodes that you may get | fewest that hold the model | most that have work | nodes or workers lost | nodes that join |
# |---|---|---|---|---|---|
# | new code, tried for the first time | 16 | 2 | 16 | unknown | unknown |
# | sharded over everything that you have | 16 | 16 | 64 | 9 | 9 |
# | two spare nodes beside eight | 10 | 4 | 8 | 6 | 2 |
# | cheap nodes that come and go | 32 | 4 | 64 | 120 | 110 |
#
# A node has work if the global batch has a sample for each of its ranks. What has to be known about
# torchrun: it starts with `MIN` nodes if no more come in time, and goes on with as few. A node beyond
# `MAX` waits, and takes the place of one that is lost. A lost node or worker costs those that are left
# one of their restarts. A node that joins restarts the workers too, but that is not counted.
#
# The aim is the same each time: never stop while the run could go on, never start where it cannot, and
# allow no more restarts than you expect to need. New code is the exception. Its first failures are
# bugs: a restart only repeats them, and each node more is one more log to read.


# %% nbgrader={"grade_id": "9.5", "solution": true}
def elastic_limits(
    available: int, fits: int, useful: int, losses: int, joins: int, new_code: bool
) -> tuple[int, int, int]:
    """Returns the minimum and maximum of `--nnodes`, and `--max-restarts`.

    Of `available` nodes that the run may get, at least `fits` are needed to hold the model, and at
    most `useful` have work; `fits` is the smallest of the three. `losses` nodes or workers are
    expected to fail in the course of the run, and `joins` nodes to come back or to be added.
    `new_code` runs on as few nodes as hold it, and stops at its first failure.
    """
    ### BEGIN SOLUTION
    if new_code:
        return fits, fits, 0
    return fits, min(available, useful), losses
    ### END SOLUTION


# %% nbgrader={"grade_id": "9.5-check", "grade": true, "points": 1, "locked": true}
check("9.5", elastic_limits)

# %% [markdown]
# ## 7. See it

# %% [markdown]
# ## 8. On a cluster

# %% [markdown]
# ## 9. Remember
