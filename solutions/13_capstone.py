# %% [markdown]
# # 13. The capstone: your own script, within a budget
#
# Your script has grown since chapter 2. Here it does what it was written for: it trains on two hosts, a node is
# killed, and the other carries on and ends with the parameters of one process. All this has to fit into a budget of
# memory in which no rank can train a whole copy of the model.

# %% tags=["nbval-ignore-output"]
import os

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.functional import avg_pool2d, cross_entropy

from course_exercises import check, hint, mine
from course_planner.figures import ch13
from course_utils import hardware
from course_utils.launch import launch
from course_utils.lesson import explore, mnist, text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.models import ResidualNet
from course_utils.lesson.predictions import compare
from course_utils.trace.meters import Sampling

hardware.report()

# %% [markdown]
# ## 1. The factory: the large order
#
# The factory gets its largest order so far. The customer does not ask how the line is laid out. They ask for three
# things: the product that a single building would have made; no building that is ever fuller than agreed, not even
# on the first morning or at delivery; and a factory that delivers when it loses a site.

# %%
ch13.way()
plt.show()

# %% [markdown]
# *The same file runs at each stop but the last, which is a plan.*
#
# | the customer asks | in PyTorch |
# |---|---|
# | the product of a single building | the parameters of one process |
# | no building fuller than agreed | the **budget**: the most that a rank's tensors may take up at any moment |
# | a lost site | a killed node; fewer ranks go on from a checkpoint |

# %% [markdown]
# ## 2. The smallest real run: a first try with copies
#
# The first model is small: a first layer, ten residual blocks and a last layer, for images of 7 x 7 pixels.

# %%
torch.set_num_threads(1)  # a model as small as this one loses time with more
images, labels = mnist.tensors(train=True, limit=480)
images = avg_pool2d(images, 4).flatten(1)  # (480, 49)


def new_model(width=36, blocks=10):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResidualNet(width, blocks)


P = 4 * sum(p.numel() for p in new_model().parameters())
print(f"P: {P:,} bytes of parameters")

# %% [markdown]
# A training is an object that is made from a model and takes steps. `step` gets the **global batch**, the same on every
# rank, and returns its loss. In this first try every rank has a copy of the model.


# %%
class Copies:
    """Each rank holds everything, and takes every n-th row of a batch."""

    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model, self.lr, self.momentum = model.to(hardware.device()), lr, momentum
        self.velocity = [torch.zeros_like(p) for p in self.model.parameters()]

    def step(self, images, labels):
        own = torch.arange(dist.get_rank(), len(images), dist.get_world_size())
        scores = self.model(images[own])
        loss = cross_entropy(scores, labels[own], reduction="sum") / len(images)
        weights = list(self.model.parameters())
        results = [loss.detach().clone(), *torch.autograd.grad(loss, weights)]
        for result in results:
            dist.all_reduce(result)
        for weight, speed, gradient in zip(weights, self.velocity, results[1:]):
            speed.mul_(self.momentum).add_(gradient)
            weight.data.sub_(speed, alpha=self.lr)
        return results[0].item()


# %%
def some_steps(rank, make, rows_of_a_batch):
    training, device = make(new_model()), hardware.device()
    for rows in torch.arange(3 * rows_of_a_batch).split(rows_of_a_batch):
        loss = training.step(images[rows].to(device), labels[rows].to(device))
    return flat(training.model.parameters()), loss


[(one_process, loss)] = launch(some_steps, 1, Copies, 22)
for ranks in (2, 4):
    results = launch(some_steps, ranks, Copies, 22)
    difference = check_equal(one_process, [parameters for parameters, _ in results])
    print(f"{ranks} ranks, largest difference from one process: {difference}")

# %% [markdown]
# 22 rows are no multiple of 4, and each still counts as 1/22.

# %% [markdown]
# ## 3. Predict, then measure: copies and the budget
#
# Let P be the bytes of the parameters. The budget of this chapter is **2 P**: at no moment may the tensors of a rank
# take up more, with activations and everything else.
#
# SGD's momentum has as many numbers as the model. `DistributedDataParallel` has to average the same gradients as
# `Copies`, and sends them in buckets of many parameters (chapter 3). **Predict** the most that a rank holds in a step
# with each of the two, in whole P.

# %% tags=["prediction"]
predicted = {"copies, in P": 1 + 1 + 1, "DDP, in P": 1 + 1 + 1 + 1}

# %%
from torch.nn.parallel import DistributedDataParallel


class WithDDP(Copies):
    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model = model.to(hardware.device())
        self.copy = DistributedDataParallel(self.model)
        self.sgd = torch.optim.SGD(self.copy.parameters(), lr, momentum)

    def step(self, images, labels):
        self.sgd.zero_grad()
        n, rank = dist.get_world_size(), dist.get_rank()
        total = cross_entropy(self.copy(images[rank::n]), labels[rank::n], reduction="sum")
        (total / len(images) * n).backward()  # DDP divides by n
        self.sgd.step()
        mean = total.detach() / len(images)
        dist.all_reduce(mean)
        return mean.item()


# %% [markdown]
# `Sampling` adds up all tensors of a rank after every operation. The third step is measured.


# %%
def most_held(rank, make):
    training, device = make(new_model()), hardware.device()
    rows = images[:22].to(device), labels[:22].to(device)
    training.step(*rows)
    training.step(*rows)
    with Sampling() as memory:
        training.step(*rows)
    return memory.peak / P


measured = {
    f"{name}, in P": round(max(launch(most_held, 4, make)))
    for name, make in {"copies": Copies, "DDP": WithDDP}.items()
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if buckets were the gradients. They are copies of them.": {"DDP, in P": 3},
        "Momentum is missing: a third number for each parameter.": {"copies, in P": 2},
    },
)

# %% [markdown]
# The buckets are a second set of gradients (`gradient_as_bucket_view=True` makes them one). Neither training fits, nor
# does ZeRO 1: parameters and gradients whole are 2 P already. Shards of everything fit, with one block whole at a time
# (chapter 8), and so does tensor parallelism (chapter 6).

# %% [markdown]
# ### 13.1 A training within the budget (6 points)
#
# On four ranks no rank may hold more than 2 P in a step, nor send more than 3.2 (n - 1) / n P on a ring. Plain FSDP
# sends 3 (n - 1) / n P, and an all-reduce 2 (n - 1) / n P. With fewer ranks only the numbers must be right.
#
# The check takes models with widths that are multiples of 12, on one to four ranks, and batches of any size, also of
# fewer rows than ranks. It prescribes no technique.


# %% nbgrader={"grade_id": "13.1", "solution": true}
class Training:
    """One model that all ranks train together with SGD and momentum, none of which holds all of it.

    Every rank makes one from a model with the same values, and calls the same methods in the same
    order; the process group is initialised. Nothing else keeps the model that was handed over.
    """

    def __init__(self, model: ResidualNet, lr: float = 0.1, momentum: float = 0.9) -> None:
        ### BEGIN SOLUTION
        self.model = model.to(hardware.device())
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        ### END SOLUTION

    def step(self, images: Tensor, labels: Tensor) -> float:
        """One step on the global batch, which every rank gets whole: images (N, 49), labels (N,).

        The loss is the mean cross-entropy of all N rows. Parameters and momentum end as in one process
        with `torch.optim.SGD`. Returns the loss of the global batch before the step, on every rank.
        """
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(), dist.get_rank()
        share = images.tensor_split(ranks)[rank], labels.tensor_split(ranks)[rank]
        loss = cross_entropy(self.model(share[0]), share[1], reduction="sum") / len(images)
        (loss * ranks).backward()  # FSDP divides the sum of the gradients by the ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item()
        ### END SOLUTION

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns {"model": {name: tensor}, "momentum": {name: tensor}} on every rank.

        The names are those of the model's parameters. Each tensor is whole, on the CPU, and a copy:
        later steps do not change it. Before the first step the momentum is zeros. Here a rank may
        hold more than the budget.
        """
        ### BEGIN SOLUTION
        state = {"model": {}, "momentum": {}}
        for name, parameter in self.model.named_parameters():
            velocity = self.optimizer.state[parameter].get("momentum_buffer")
            if velocity is None:
                velocity = torch.zeros_like(parameter)
            state["model"][name] = parameter.detach().full_tensor().cpu().clone()
            state["momentum"][name] = velocity.detach().full_tensor().cpu().clone()
        return state
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Goes on from what `state_dict` returned, of any number of ranks."""
        ### BEGIN SOLUTION
        for name, parameter in self.model.named_parameters():

            def cut(whole: Tensor, parameter: DTensor = parameter) -> DTensor:
                whole = whole.to(parameter.device)
                return distribute_tensor(whole, parameter.device_mesh, parameter.placements)

            with torch.no_grad():
                parameter.copy_(cut(state["model"][name]))
            self.optimizer.state[parameter]["momentum_buffer"] = cut(state["momentum"][name])
        ### END SOLUTION


# %% nbgrader={"grade_id": "13.1-check", "grade": true, "points": 6, "locked": true}
check("13.1", Training)

# %% [markdown]
# ## 4. By hand, then with PyTorch: your script and the budget
#
# After 12.5 your script has a function `program`, which gives a rank its model and a training step. The next cells
# use the course's own, `train_12`, with a transformer of 16 blocks on the course's text. It is sharded, so each of
# four ranks holds 3/4 P between two steps: a quarter of parameters, of gradients and of momentum.

# %%
from argparse import Namespace

from torch.distributed.device_mesh import init_device_mesh

from course_exercises.mine import train_12

CONTEXT = 32  # characters in a window
SIZES = {"width": 96, "heads": 4, "kv_heads": 2, "layers": 16, "context": CONTEXT}
OPTIONS = Namespace(**SIZES, bfloat16=False, seed=0, rate=0.05)


def of_the_script():
    """The model and the training step on this rank, and its share of a batch of 32 windows."""
    torch.set_num_threads(1)
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), hardware.device()
    mesh = init_device_mesh(device.type, (ranks, 1), mesh_dim_names=("data", "tensor"))
    model, _, step = train_12.program(mesh, OPTIONS, len(text.vocabulary()))
    inputs, targets = (part[rank::ranks].to(device) for part in text.windows(CONTEXT, 32, seed=0))
    return model, step, inputs, targets


def in_P(model, memory):
    return memory.peak / (4 * sum(part.numel() for part in model.parameters()))


# %% [markdown]
# ### When half of the ranks are gone
#
# A node dies, and of four ranks two go on. The global batch stays as large as before, or the result would change. A
# rank of two holds twice as much of the model states, 1.5 P. **Predict** the factor by which the rest grows:
# activations, the blocks that are gathered, and their gradients.

# %% tags=["prediction"]
predicted = {"factor of the rest": 2}


# %%
def held_in_a_step(rank):
    model, step, inputs, targets = of_the_script()
    step(inputs, targets)
    with Sampling() as memory:
        step(inputs, targets)
    return in_P(model, memory)


four, two = (max(launch(held_in_a_step, ranks, timeout=250)) for ranks in (4, 2))
print("held at most:", f"four ranks: {four:.1f} P", f"two ranks: {two:.1f} P", sep="\n")
measured = {"factor of the rest": round((two - 1.5) / (four - 0.75))}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if activations belonged to the model. They belong to a rank's share of the batch.": {
            "factor of the rest": 1
        }
    },
)

# %% [markdown]
# Sharding does not touch activations. They are most of what a rank of four holds here, and they double with its share
# of the batch. So what fits before a failure may not fit after it. Two changes make them small, on any number of ranks:
#
# * **Micro-batches** (chapter 5). A rank takes its share in parts of at most so many windows, and adds up their
#   gradients.
# * **Activation checkpointing.** `torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)` keeps the input of
#   a block only. Backward computes the block again: a third more work, as 4 passes take the place of 3.

# %% [markdown]
# ### Gradients that wait
#
# FSDP reduces the gradients in every micro-batch. You will read that accumulation should communicate once per step,
# and `model.set_requires_gradient_sync(False)` puts the reduction off until it is set to `True` for the last
# micro-batch. **Predict** how many P of gradients a rank of four holds before the last micro-batch, with a reduction
# each time and without.

# %% tags=["prediction"]
predicted = {"reduced each time, in P": 0.25, "reduced at the end, in P": 1.0}


# %%
def held_as_gradients(rank, each_time):
    """Two micro-batches; the bytes by which the tensors of the rank grow in them."""
    model, _, inputs, targets = of_the_script()
    model.set_requires_gradient_sync(each_time)
    with Sampling() as memory:
        before = memory.held()
        for part in zip(inputs.split(4), targets.split(4)):
            train_12.loss_of(model, *part).backward()
        grown = memory.held() - before
    return grown / (4 * sum(part.numel() for part in model.parameters()))


measured = {}
for when, each_time in (("each time", True), ("at the end", False)):
    grown = launch(held_as_gradients, 4, each_time, timeout=250)
    measured[f"reduced {when}, in P"] = round(4 * grown[1]) / 4

# %%
compare(
    predicted,
    measured,
    likely={
        "As if they were shards before they are reduced.": {"reduced at the end, in P": 0.25},
        "The reduction leaves a rank its shard only.": {"reduced each time, in P": 1.0},
    },
)

# %% [markdown]
# A gradient that has not been reduced is whole. To send fewer bytes, every rank has to hold a whole set of gradients, 1
# P. This budget has no room for that, so you reduce in every micro-batch and send more.

# %% [markdown]
# ### The last line
#
# The training is over, and the script saves its model as it has since chapter 6: every rank gathers all parameters,
# rank 0 writes them. The call is `part.full_tensor()` for each parameter.
#
# **Predict** what rank 1 of two, which writes nothing, holds then, in P, to the nearest half. Its model states are
# still there.

# %% tags=["prediction"]
predicted = {"rank 1 of two at the last line, in P": 2.5}


# %%
def last_line(rank):
    model, step, inputs, targets = of_the_script()
    step(inputs[:1], targets[:1])
    with Sampling() as memory:
        whole = {name: part.full_tensor() for name, part in model.state_dict().items()}
        if rank == 0:
            torch.save(whole, os.devnull)
    return in_P(model, memory)


measured = {
    "rank 1 of two at the last line, in P": round(2 * launch(last_line, 2, timeout=250)[1]) / 2
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if rank 0 alone gathered. A collective gives every rank the result.": {
            "rank 1 of two at the last line, in P": 1.5
        },
        "The gathered parameters alone.": {"rank 1 of two at the last line, in P": 1.0},
    },
)

# %% [markdown]
# Large models are saved in shards. Each rank writes its own with `dcp.save`, as in 8.6. A process that has room for
# the model can make one file of them later:
# `python -m torch.distributed.checkpoint.format_utils dcp_to_torch checkpoint model.pt`.

# %% [markdown]
# ### 13.4 Your own script, within the budget
#
# Take `mine/train.py` (12.5) to the budget of 2 P, on four ranks and on the two that are left. If you have not written
# it yet, `mine.start(13)` gives you the course's own as chapter 12 leaves it.
#
# * With the new option `--micro-batch 4` no rank computes more than 4 windows of a step at a time. Parameters and log
#   are those of one rank, for any `--micro-batch`, even if the parts of a share differ in size.
# * Of each block, only the input is kept until backward.
# * From the first line to the last no rank holds more than 2 P. The model is in the folder `checkpoint` of `--out`, in
#   shards; a `model.pt` is not asked for.

# %%
check("13.4", mine.script(13))

# %% [markdown]
# ## 5. Break it: uneven shares, and a life without checkpoints
#
# ### Bug hunt: the loss of a share
#
# Most scripts take the mean loss of a rank's share and let DDP average. Read the class. With 24 rows on four ranks it
# is right. With 22, by how much does a row of the smallest share count too much?


# %%
class MeanOfMeans(WithDDP):
    def step(self, images, labels):
        self.sgd.zero_grad()
        share, answers = (t.tensor_split(dist.get_world_size()) for t in (images, labels))
        loss = cross_entropy(self.copy(share[dist.get_rank()]), answers[dist.get_rank()])
        loss.backward()
        self.sgd.step()
        return loss.item()


for rows, compared in ((24, check_equal), (22, largest_difference)):
    [(expected, _)] = launch(some_steps, 1, Copies, rows)
    results = launch(some_steps, 4, MeanOfMeans, rows)
    print(f"{rows} rows, largest difference:", compared(expected, [p for p, _ in results]))

# %% [markdown]
# Two ranks have six rows and two have five. Each share counts as a quarter, so a row in a share of five counts as 1/20
# instead of 1/22: 10 % too much. Nothing fails, and the curve falls. Micro-batches of different sizes have the same
# trap.
#
# ### A life without checkpoints
#
# This loop has no checkpoint. It counts how often each of 480 samples is used. It is killed after 7 of 20 steps and
# started again.


# %%
def without_checkpoints(steps):
    used = torch.zeros(480, dtype=torch.int64)
    for step in range(steps):
        used += torch.bincount(torch.arange(48 * step, 48 * step + 48) % 480, minlength=480)
    return used


# The second life knows nothing of the first.
uses = without_checkpoints(7) + without_checkpoints(20)
for times in (2, 3):
    print(f"used {times} times: {(uses == times).sum().item()} samples")

# %% [markdown]
# The second life does seven steps again. If a checkpoint held the model but not the place in the data, its parameters
# would have seen some samples three times, and others twice.

# %% [markdown]
# ### 13.2 A loop that loses nothing (4 points)
#
# You write the loop around a training: the order of the samples, the checkpoints, and how a new life begins. The check
# brings a `training` of its own that notes what it gets. It kills at known moments, damages files, and starts again
# with another number of ranks.

# %%
import hashlib
import io
import math
from pathlib import Path


# %% nbgrader={"grade_id": "13.2", "solution": true}
def train(
    training: Training,
    images: Tensor,
    labels: Tensor,
    folder: Path,
    steps: int,
    batch: int,
    every: int,
) -> None:
    """Trains until `steps` steps are done, on every rank; a new life goes on where the last one saved.

    An epoch has each row of `images` once, in an order that differs from epoch to epoch and depends
    on nothing else; a step takes the next `batch` rows of it, the last one of an epoch what is left
    over. Every rank hands the same global batch to `training.step`. All ranks see `folder`; it may
    not exist yet. After every `every` steps, and after the last, a checkpoint is written there, and
    is complete before the next step begins. It holds `training.state_dict()`, which all ranks call
    together. Killed at any moment, also while it saves, or with its newest file cut or a byte of it
    changed, it goes on from the newest checkpoint that is whole. It keeps at least two. The last step
    may come in the middle of an epoch; if all steps are done, none is made.
    """
    ### BEGIN SOLUTION
    folder, rank = Path(folder), dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
        if hashlib.sha256(content).digest() == digest:
            saved = torch.load(io.BytesIO(content), weights_only=True)
            training.load_state_dict(saved["training"])
            done = saved["done"]
            break
    dist.barrier()  # nobody writes until all have read
    in_an_epoch = math.ceil(len(images) / batch)
    while done < steps:
        epoch, place = divmod(done, in_an_epoch)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        rows = order[place * batch : (place + 1) * batch]
        training.step(images[rows], labels[rows])
        done += 1
        if done % every and done < steps:
            continue
        state = {"done": done, "training": training.state_dict()}
        if rank == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            partial = folder / "unfinished"
            with open(partial, "wb") as file:
                file.write(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, folder / f"step-{done:09d}.pt")
            for path in sorted(folder.glob("step-*.pt"))[:-2]:
                path.unlink()
        dist.barrier()
    ### END SOLUTION


# %% nbgrader={"grade_id": "13.2-check", "grade": true, "points": 4, "locked": true}
check("13.2", train)

# %% [markdown]
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 13.1 A training within the budget | 6 | section 3 |
# | 13.4 Your own script, within the budget | | section 4, at its end |
# | 13.2 A loop that loses nothing | 4 | section 5, at its end |
# | 13.3 The plan | 3 | section 8, at its end |

# %% [markdown]
# ## 7. See it: what fits
#
# The bars show what a rank holds at the end of backward under each of ZeRO's stages. Try two things:
#
# * 2 ranks. Which stage keeps within the budget?
# * 16 ranks. Why does ZeRO 1 stay above the budget with any number of them?

# %%
explore.Explorer(ch13.budget, ranks=(2, 16, 4), width=(12, 120, 36))

# %% [markdown]
# *At the start there are four ranks. ZeRO 2 scatters gradients that were whole before (hatched), unless it does so
# block by block. Calculated, not measured; activations come on top.*

# %% [markdown]
# ## 8. On a cluster: your script loses a node
#
# What follows runs your script as soon as it has passed 13.4, and the course's own until then. First it runs in one
# process, which gives the parameters to compare with. Then it runs under `torchrun` on four ranks of this machine. To
# save time it reads only the beginning of the text, and yet the second cell takes half a minute.

# %%
import shutil

from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from course_hosts import capstone
from course_utils.lesson import terminal

script = mine.passing("13.4").resolve()
beginning = terminal.scratch().resolve() / "beginning.txt"
beginning.write_text(text.text()[:4096])
options = [f"--{name.replace('_', '-')}={number}" for name, number in SIZES.items()]
options += ["--text", beginning, "--rate=0.05", "--batch=16", "--micro-batch=2", "--epochs=1"]
options += ["--save-every=3"]


def parameters_of(out):
    """All parameters in the checkpoint that a run has left, as one vector."""
    dcp_to_torch_save(out / "checkpoint", out / "whole.pt")
    model = torch.load(out / "whole.pt", weights_only=True)["model"]
    return flat(model[name] for name in sorted(model))


# %%
def trained_by(ranks):
    out = terminal.scratch().resolve() / f"capstone_{ranks}"
    shutil.rmtree(out, ignore_errors=True)
    print(terminal.torchrun(ranks, script, *options, "--out", out), end="")
    return parameters_of(out)


alone = trained_by(1)
four_ranks = trained_by(4)
print("largest difference:", check_equal(alone, [four_ranks]))

# %% [markdown]
# **Two hosts, and a node that dies.** Where this machine can have them, the nodes are two hosts that share nothing but
# a cable and the files: network namespaces of Linux, which need root. Elsewhere two agents play them. The next cell
# says which.

# %% tags=["nbval-ignore-output"]
print(capstone.kind_of_nodes())

# %% [markdown]
# Each node has two ranks. The epoch has seven steps, and a checkpoint comes after every third. After step 5 node B is
# killed, its agent and both ranks. Node A goes on alone. **Predict** how many steps its second life computes.

# %% tags=["prediction"]
predicted = {"steps of the second life": 7 - 3}

# %%
folder, out = (terminal.scratch().resolve() / name for name in ("two_nodes", "capstone_hosts"))
shutil.rmtree(out, ignore_errors=True)
with capstone.two_nodes(folder, script, 2, [*options, "--out", out]) as nodes:
    nodes.start("A")
    nodes.start("B")
    nodes.train(ranks=4, first=0, until=5)
    nodes.kill_node("B")
    nodes.train(ranks=2, first=0)
last = [event for event in nodes.events() if event["group"] == nodes.groups[-1]]
measured = {"steps of the second life": max(event["step"] for event in last)}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if step 5 had been saved.": {"steps of the second life": 2},
        "As if it began again.": {"steps of the second life": 7},
    },
)

# %%
survived = parameters_of(out)
print("largest difference from one process:", check_equal(alone, [survived]))
most = capstone.held(folder)[2] / (4 * len(alone))
assert most <= 2, f"{most:.2f} P"
print(f"the most that a rank of two held: {most:.0f} P, rounded")

# %% [markdown]
# The table counts the steps of each life from 0. Half of the ranks are gone, each share is twice as large, and the
# memory has stayed within the budget of 2 P. (The second digit of the peak depends on when a gathered block is
# freed.)
#
# The same file goes to a cluster, with the command of chapter 9. `cluster/train.py` is such a file grown up:
#
# | part | your script | `cluster/train.py` | why |
# |---|---|---|---|
# | order of the data | `DistributedSampler`, cut to the batch | `Order`, a permutation of its own | no sample is left out, with any number of ranks |
# | first values | drawn whole, cut | each module's `reset_parameters` | for models that you did not write |
# | accumulation | reduces in each micro-batch | `--reduce every` or `last` | where there is room for whole gradients, fewer bytes |
# | checkpoints | renamed when whole | a manifest with checksums, verified; written in the background | disks damage files; saves cost time |
# | restarts | SIGTERM | each start has a name of its own; gives up after a start that gains no step | a cut-off node must not write; a bug must not restart for ever |
# | update | SGD with momentum | clipping and a schedule as well | large models need both |

# %% [markdown]
# ### 13.3 The plan (3 points)
#
# The next order is a transformer on a thousand GPUs whose nodes fail. Chapter 12's `estimate` is yours to use, and so
# is chapter 9's $\tau^* = \sqrt{2CM}$. The check measures two regrets. A step may be at most 10 % longer than with the
# fastest layout that `estimate.search` finds, and at most 5 % more time may be lost than with the best interval of your
# layout. `help(Hardware)`, `help(Layout)` and `help(Model)` name the fields.

# %%
import course_planner as estimate
from course_planner import Hardware, Layout, Model


# %% nbgrader={"grade_id": "13.3", "solution": true}
def plan(
    model: Model,
    gpus: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    node_days: float,
    disk: float,
) -> tuple[Layout, int]:
    """Returns a layout of all `gpus`, and how many steps lie between two checkpoints.

    The layout has `batch` sequences of `seq` tokens in a step, is legal (`Layout.check`), and its
    fullest rank fits (`estimate.memory` of each stage, `estimate.fits`). A step takes
    `estimate.step_time`. A checkpoint holds 14 bytes per parameter (2 for the parameter, 12 for the
    optimizer). All ranks together write `disk` bytes a second, and training waits. A node has
    `hardware.node` GPUs and fails every `node_days` days on average; the job fails with the first.
    At least one step.
    """
    ### BEGIN SOLUTION
    plans, rejected = estimate.search(model, gpus, batch, seq, hardware, keep=1)
    if not plans:
        raise ValueError(f"No layout of {gpus} GPUs fits: {dict(rejected)}.")
    [best] = plans
    save = 14 * estimate.parameters(model) / disk
    job_mtbf = node_days * 24 * 3600 / (gpus / hardware.node)
    return best.layout, max(1, round(math.sqrt(2 * save * job_mtbf) / best.time.seconds))
    ### END SOLUTION


# %% nbgrader={"grade_id": "13.3-check", "grade": true, "points": 3, "locked": true}
check("13.3", plan)

# %% [markdown]
# ### The offer
#
# This is a model of GPT-3's size on 1,024 H100 in machines of eight, with batches of 1,536 sequences of 2,048 tokens,
# nodes that each fail every 300 days and a file system that takes 50 GB/s. The cell shows the fastest layout of the
# search. Compare it with yours.

# %%
gpt = Model(96, 12_288, 96, 51_200, tied=False, bias=False)
h100 = Hardware(
    peak=989e12,
    hbm_bytes=80 * 2**30,
    hbm_bandwidth=3.35e12,
    node=8,
    intra_bandwidth=450e9,
    intra_latency=1.9e-6,
    inter_bandwidth=50e9,
    inter_latency=8.5e-6,
)
[best] = estimate.search(gpt, 1024, 1536, 2048, h100, keep=1)[0]
print("layout:", estimate.described(best.layout))
print(f"{best.time.seconds:.1f} s a step, by the model of chapter 12")

# %% [markdown]
# On the cluster you measure the links, calibrate with a few steps, and search again.

# %% [markdown]
# ## 9. Remember
#
# 1. Compare with one process: whatever you split, training has to end with its parameters.
# 2. The memory that counts is the peak over the whole life of a script: its start, each step, each resume, and its last
#    line.
# 3. Sharding divides model states. Activations follow a rank's share of the batch, which grows when ranks are lost.
# 4. A gradient that has not been reduced is whole, and a parameter that is gathered is whole on every rank.
# 5. Every row has the same weight in the global batch, whatever share or micro-batch it comes in.
#
# **Sources**
#
# * S. Rajbhandari et al., *ZeRO*, 2019, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): sections 5 and 7.
# * T. Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016,
#   [arXiv 1604.06174](https://arxiv.org/abs/1604.06174): activation checkpointing.
# * J. W. Young, *A first order approximation to the optimum checkpoint interval*, Communications of the ACM 17(9),
#   1974.
# * PyTorch: [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html),
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
