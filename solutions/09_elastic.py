# %% [markdown]
# # 9. Elastic training: machines fail, the training goes on
#
# While Llama 3 405B was trained on 16,384 GPUs, the job was interrupted 466 times in 54 days, 419
# times without warning ([Llama 3 paper](https://arxiv.org/abs/2407.21783), section 3.3.4). So many
# machines are never all well for a day. A run of that size is not one that does not fail. It is one
# that fails and goes on.
#
# In this chapter you kill processes for real: a worker, then a whole node with its agent. Nodes leave
# and come back while the training runs. At the end the parameters are those of a run that nobody
# disturbed, and every sample was used exactly once per epoch. Training that goes on with the
# machines that are there is called **elastic**.
#
# What goes beyond that (why a worker died, a loader that runs ahead, a foreman who listens, orphans,
# what torchrun's options cost, and how others do it) is in `09_elastic_further`.
#
# The chapter kills processes with signals and needs Linux or macOS.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch09
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist
from course_utils.lesson.equality import equal, flat
from course_utils.lesson.predictions import compare

torch.set_num_threads(1)  # so small a model loses time with more
hardware.report()

# %% [markdown]
# ## 1. The factory: the night shift
#
# The product is made in several buildings, day and night, for weeks. At night a machine breaks, a
# worker goes home, a whole building loses its power. Nobody can be called. What has to be there so
# that the night shift goes on by itself?
#
# * In every building a **foreman**, who makes nothing. He watches his workers. If one is gone, he
#   sends the others home and starts a new shift.
# * A **register**, where all foremen sign in before a shift. It says who is there tonight, and who is
#   number 0. It also says how many buildings must have signed at least, and how many are needed at
#   most.
# * A **safe**, where the state of the work is put from time to time: the product as it is now, the
#   settings of the machines, and the place in the order list.
#
# A new shift opens the safe, reads how far the work is, and goes on from there. What was done after
# the last entry is lost, and done again.

# %%
figure = ch09.two_buildings()
plt.show()

# %% [markdown]
# *Two buildings, each with a foreman and two workers. The foremen sign in the register, which
# decides who takes part in a shift. The state of the work lies in a safe that burns with neither.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | building | **node** | one machine with its GPUs |
# | foreman | **agent**: the process that `torchrun` is | starts the node's workers, watches and restarts them |
# | worker | **worker**, a rank | one process with one GPU |
# | everyone in a shift | **worker group** | all workers that train together; it lives and dies as a whole |
# | register | **rendezvous** | where agents agree on who takes part and who has which rank |
# | signing again now and then | **keep-alive** | an agent that is silent for too long is struck off |
# | safe | **checkpoint** | the state on a disk that outlives the machine |
# | at least, at most | `--nnodes 1:2` | the **minimum** to start with, the **maximum** to wait for |

# %% [markdown]
# ## 2. The smallest real run: a worker dies, the work is done
#
# This script needs no tensor. In its first life, rank 1 does what the Linux kernel does with a
# process that takes too much memory: `kill -9`, the signal SIGKILL, against which no program can do
# anything. Rank 0 waits for it, as in a collective.

# %%
import sys
from pathlib import Path

from course_utils.lesson.terminal import run_in_terminal, scratch

script = scratch() / "two_lives.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/two_lives.py
"""Dies once. Start it with torchrun."""

import os
import signal

NAMES = """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK
ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS
TORCHELASTIC_RUN_ID"""

life, number = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
if life == "0":
    if number == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # as a rank that waits for another one
if number == "0":
    for name in NAMES.split():
        print(f"{name:27} {'a free port' if name == 'MASTER_PORT' else os.environ[name]}")

# %%
meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "night"]
torchrun = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *meeting]
torchrun += ["--nproc-per-node", "2", "--max-restarts", "1"]
print(run_in_terminal(*torchrun, script, timeout=250), end="")

# %% [markdown]
# `python -m torch.distributed.run` is what the command `torchrun` runs. It is the agent. It saw that
# a worker had died, ended the other one, and started both again: the restart count is 1. No other
# program had to be called, and with `--max-restarts 0`, the default, the job would have failed.
#
# Workers know all they need from their environment. What the variables mean
# ([torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html), "Environment Variables"):
#
# | variable | meaning |
# |---|---|
# | `RANK`, `WORLD_SIZE` | this worker's number, and how many there are, **now**: both can be others after a restart |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same within the node: which GPU to take |
# | `GROUP_RANK`, `GROUP_WORLD_SIZE` | the node's number, and how many nodes there are |
# | `ROLE_RANK`, `ROLE_WORLD_SIZE` | as `RANK`, among workers of one role; with one role the same |
# | `MASTER_ADDR`, `MASTER_PORT` | where `init_process_group` finds the others: in a store of the agent's on rank 0's node, or, with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` as in this course, in one of rank 0's; torchrun chooses a free port |
# | `TORCHELASTIC_RESTART_COUNT` | how often this agent restarted its workers after a failure |
# | `TORCHELASTIC_MAX_RESTARTS` | how often it may: `--max-restarts` |
# | `TORCHELASTIC_RUN_ID` | the job's name, `--rdzv-id`: agents with the same name belong together |

# %% [markdown]
# ## 3. Predict, then measure: what a failure costs
#
# ### The work since the last checkpoint
#
# A checkpoint after every $k$ steps, a death after $d$ steps: the new life goes on at the last
# multiple of $k$. So $d \bmod k$ steps are computed twice. **Predict** it for 20 steps and a death after
# 11, for $k$ = 1, 4, 6 and for no checkpoint at all.

# %% tags=["prediction"]
steps, death = 20, 11
predicted = {
    "every 1": 11 % 1,
    "every 4": 11 % 4,
    "every 6": 11 % 6,
    "no checkpoint": 11,
}


# %%
import os
import signal


def count_steps(rank, folder, every, dies_after):
    """Counts to `steps`, and goes on where the last checkpoint was; notes every step it does."""
    saved = folder / "saved"
    done = int(saved.read_text()) if saved.exists() else 0
    while done < steps:
        done += 1
        with (folder / "all steps").open("a") as notes:
            print(done, file=notes)
        if every and done % every == 0:
            saved.write_text(str(done))
        if done == dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


# %%
import shutil


def steps_done_twice(every):
    folder = Path("scratch/count")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        launch(count_steps, 1, folder.resolve(), every, death)
    except RankFailure as failure:
        assert failure.kind == "signal"
    launch(count_steps, 1, folder.resolve(), every, None)
    return len((folder / "all steps").read_text().split()) - steps


# %%
intervals = {"every 1": 1, "every 4": 4, "every 6": 6, "no checkpoint": 0}
compare(
    predicted,
    {name: steps_done_twice(every) for name, every in intervals.items()},
    {
        "What was still to come: those steps are done once.": dict.fromkeys(intervals, 9),
        "Half of the interval is the average over many deaths; this one came at step 11.": {
            "every 4": 2
        },
    },
)

# %% [markdown]
# On average a death comes in the middle between two checkpoints, and half an interval is lost.
#
# ### How often to save
#
# Saving costs time too. Save every minute, and most of the time goes into saving. Save once a day, and
# each failure costs half a day. With an interval of $\tau$ between checkpoints, $C$ for saving one,
# $R$ for a recovery, and $M$ as the **mean time between failures** (MTBF) of the job, the share of time
# that is lost, measured by the time of lasting work, is to first order
#
# $$L(\tau) = \frac{C}{\tau} + \frac{\tau/2 + R}{M}.$$
#
# The first term is paid once in every interval. The second is paid once in every $M$: half an
# interval of work, and the recovery. The derivative $-C/\tau^2 + 1/(2M)$ is zero at
#
# $$\tau^* = \sqrt{2\,C\,M},$$
#
# the formula of Young (1974); Daly (2006) has the next terms. The recovery $R$ moves the
# curve up, not sideways. At $\tau^*$ the two shares, saving and lost work, are equal, each
# $\sqrt{C/(2M)}$.
#
# A job needs all its nodes. If each fails independently once in $m$ on average, $n$ of them fail once
# in $M = m/n$. Now Llama's numbers.

# %%
import math

gpus, days, failures = 16_384, 54, 419  # Llama 3 paper, section 3.3.4
M = days * 24 * 60 / failures
print(f"the job: one failure in {M / 60:.1f} hours")
print(f"one server of 8 GPUs: one failure in {M * gpus / 8 / 60 / 24:.0f} days")
for save_minutes in (0.1, 1, 10):
    best = math.sqrt(2 * save_minutes * M)
    print(
        f"saving takes {save_minutes:4} min: save every {best:4.1f} min, "
        f"{save_minutes / best:4.1%} for saving, {best / 2 / M:4.1%} lost work"
    )

# %% [markdown]
# The paper does not say how long a save took; the three times are assumptions. A server that fails less
# than twice a year makes a cluster that fails every three hours, and a save of ten minutes would
# cost a third of the work's time on top of it. That is why so much work goes into making saves short.
#
# The next figure draws the formula, for a save of one minute and a recovery of three.


# %%
figure = ch09.time_lost(save=1.0, recovery=3.0, mtbf=M)
plt.show()

# %% [markdown]
# *The curve falls like saving and rises like lost work. Around its lowest point it is flat: twice or
# half the best interval costs little more.* `09_elastic_further` holds it against failures that come by
# dice.
#
# **Predict**, and say first what you feel. The cluster grows to four times as many GPUs of the same
# kind; a save takes one minute, as before. By which factor does the best interval change? And by which
# the share of time that saves and lost work take together?

# %% tags=["prediction"]
predicted = {"best interval": 1 / 2, "saves and lost work": 2.0}


# %%
def lowest_point(mtbf, save=1.0):
    """Looks along the curve: the best interval in minutes, and the share that it loses."""
    intervals = [tenths / 10 for tenths in range(1, 2000)]
    return min((save / tau + tau / 2 / mtbf, tau) for tau in intervals)[::-1]


before, after = lowest_point(M), lowest_point(M / 4)
compare(
    predicted,
    dict(zip(predicted, (round(b / a, 1) for a, b in zip(before, after)))),
    {
        "As if it followed the time between failures: that stands under a root.": {
            "best interval": 1 / 4
        },
        "As if each failure lost as much as before: the interval is half as long.": {
            "saves and lost work": 4.0
        },
    },
)

# %% [markdown]
# Four times the failures, and each loses half as much work: twice the loss. Saves come twice as often, which
# doubles their share too. Only the recoveries, $R/M$, become four times as many.

# %% [markdown]
# ## 4. By hand, then with PyTorch: an agent, a checkpoint, a run that cannot be stopped
#
# ### An agent by hand
#
# An agent is a loop: start the workers, look at them now and then, and if one has died, end all and
# start again. All, because the others wait for the dead one in a collective, and because a process
# group cannot take in a new member. (With NCCL, `dist.shrink_group` makes a smaller group of those that
# are left; torchrun does not use it.)


# %%
import subprocess


def start_workers(program, workers, life):
    """Starts them; each learns from its environment who it is."""
    own = [os.environ | {"RANK": str(rank), "LIFE": str(life)} for rank in range(workers)]
    return [subprocess.Popen([sys.executable, program], env=variables) for variables in own]


def who_died(group):
    """A sentence about the first that ended badly, or None."""
    for number, worker in enumerate(group):
        if worker.poll() not in (None, 0):
            return f"worker {number} ended with {signal.Signals(-worker.returncode).name}"
    return None


# %%
import time


def supervise(program, workers, max_restarts):
    """Runs `workers` copies of a program until all end well. Returns what happened, in words."""
    story = []
    for life in range(max_restarts + 1):
        group = start_workers(program, workers, life)
        try:
            while not (gone := who_died(group)):
                if all(worker.poll() == 0 for worker in group):
                    return [*story, f"life {life}: all workers ended well"]
                time.sleep(0.02)  # the monitor interval
            story.append(f"life {life}: {gone}")
        finally:
            for worker in group:
                worker.kill()
                worker.wait()
    return [*story, "no restarts left"]


# %%
program = Path("scratch/mortal.py")
program.unlink(missing_ok=True)

# %%
# %%writefile scratch/mortal.py
"""A worker of which, in its first life, number 1 dies."""

import os
import signal

if os.environ["LIFE"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # the others wait, and are well

# %%
for line in supervise(program, workers=3, max_restarts=2):
    print(line)

# %% [markdown]
# That is what torchrun does on one node. Two things are missing: agents on several nodes have to agree,
# which is the rendezvous, and the new life must know what the old one knew. Begin with the second.
#
# ### What a checkpoint has to hold
#
# Everything on which the next step depends. Forget one thing, and the run goes on, the loss falls, and
# yet it is another run. The next cell trains a small network for 12 steps. Then it resumes from step
# 6 six times, and each time but the first one part is left out.

# %%
from torch.nn.functional import cross_entropy

images, labels = mnist.tensors(train=True, limit=480)
images = images.flatten(1)


def new_run():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train_steps(run, position, count):
    """`count` steps on the rows from `position` on. Returns their losses."""
    losses = []
    for start in range(40 * position, 40 * (position + count), 40):
        rows = slice(start, start + 40)
        run["optimizer"].zero_grad()
        loss = cross_entropy(run["model"](images[rows]), labels[rows])
        loss.backward()
        run["optimizer"].step()
        run["scheduler"].step()
        losses.append(loss.item())
    return losses


# %%
import io

undisturbed = new_run()
undisturbed_losses = train_steps(undisturbed, 0, 6)
whole = {name: part.state_dict() for name, part in undisturbed.items()}
whole |= {"position": 6, "random numbers": torch.get_rng_state()}
buffer = io.BytesIO()  # what lies on the disk does not change when training goes on
torch.save(whole, buffer)
undisturbed_losses += train_steps(undisturbed, 6, 6)


# %%
def resumed_without(*left_out):
    """Six more steps from the checkpoint, a part of which is not used."""
    run = new_run()
    saved = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for name in run.keys() - set(left_out):
        run[name].load_state_dict(saved[name])
    if "random numbers" not in left_out:
        torch.set_rng_state(saved["random numbers"])
    return run, train_steps(run, 0 if "position" in left_out else saved["position"], 6)


expected = flat(undisturbed["model"].parameters())
for left_out in ([], *([name] for name in whole)):
    run, _ = resumed_without(*left_out)
    same = torch.equal(expected, flat(run["model"].parameters()))
    print(f"without {', '.join(left_out) or 'leaving anything out':22} bit-equal: {same}")

# %% [markdown]
# Five parts: **model, optimizer, scheduler, position in the data, random numbers**. With all five the
# resumed run is the same, bit for bit: here, on one machine, with gloo on the CPU. Other machines add in
# another order; there the parameters agree within rounding.
#
# ### What may not depend on a rank
#
# Elastic runs add a condition. After a failure there may be fewer ranks, or more, and a rank's number
# may change. So nothing that shapes the result may belong to a rank:
#
# * **The order of samples** belongs to the epoch, and a **global batch**, all samples of one step, to
#   the step. A rank takes its share of the batch. How many ranks there are decides only how large the
#   shares are, and not even that they are equal.
# * **The gradient** is the sum over all samples of the batch, divided by their number. Not the mean of
#   the ranks' means: shares may differ in size.
# * **Random numbers**, such as those of dropout, are drawn for the whole global batch on every rank; each
#   takes the rows of its share. On a large model one would derive a seed from step and sample.
# * **The learning rate** belongs to the step. The global batch stays as it is, so it need not change.
#
# The next cell writes these rules into a file that the notebook and the workers import. It keeps the step of SGD with momentum in plain sight, which also saves the workers
# the import of `torch.optim`: a new worker's start is part of every recovery. `used` counts how often
# each row went into the parameters. It is part of the state, so a step that is lost is taken off the
# count as well.

# %%
Path("scratch/elastic_parts.py").unlink(missing_ok=True)

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
    """The rows of the global batch of `step`, an int64 tensor. No rank has a say in it."""
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
        "step": 0,  # says where the data and the learning rate are, too
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
# Does the number of ranks change anything? Train the 20 steps with one process, then with 2, 3 and 5
# ranks; 48 samples do not divide by 5.

# %%
import cloudpickle

if "scratch" not in sys.path:
    sys.path.insert(0, "scratch")
sys.modules.pop("elastic_parts", None)  # you may have changed the file
import elastic_parts as parts

cloudpickle.register_pickle_by_value(parts)  # send its functions along to the ranks

alone = parts.new_state()
for _ in range(parts.STEPS):
    parts.train_step(alone, images, labels)
parameters_alone = flat(alone["weights"].values())


def train_on_ranks(rank, ranks):
    device = hardware.device()
    state = parts.new_state(device)
    for _ in range(parts.STEPS):
        parts.train_step(state, images.to(device), labels.to(device), rank, ranks)
    return flat(state["weights"].values()), state["used"].cpu()


for ranks in (2, 3, 5):
    results = launch(train_on_ranks, ranks, ranks, timeout=250)
    same = equal(parameters_alone, [parameters for parameters, _ in results])
    once = all((used == 1).all().item() for _, used in results)
    print(f"{ranks} ranks: parameters as alone: {same}, each sample once per epoch: {once}")

# %% [markdown]
# ### A checkpoint that is whole, or not there
#
# A checkpoint is useful only if it is there after any failure, so `write_checkpoint` is careful in three
# ways.
#
# * **Atomic.** It writes under another name and renames at the end. A rename within a file system happens
#   at once: whoever looks finds the finished file or none. A process that dies while it writes
#   leaves a temporary file that nobody takes for a checkpoint.
# * **Flushed.** Without `fsync` the rename can reach the disk before the content, and after a power
#   failure the name stands there without it.
# * **Verified.** The name carries a checksum of the content. `newest_checkpoint` goes back from the
#   newest to the first that agrees with its own name. That also finds what a disk or a copy has damaged
#   later, which no rename can prevent.

# %%
Path("scratch/elastic_files.py").unlink(missing_ok=True)

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
    """Writes step-0007-1a2b3c4d.pt, the step and a checksum. The name appears when all is there."""
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
# **Predict** the bytes of its tensors: the weights, as many for the momentum, 8 bytes for each counter,
# and a generator's state. Then damage the newest of three files by a single bit.

# %% tags=["prediction"]
numbers = 784 * 32 + 32 * 10
predicted = {
    "weights": 4 * numbers,
    "momentum": 4 * numbers,
    "used": 8 * parts.EPOCHS * parts.ROWS,
    "random": torch.Generator().get_state().nbytes,
}


# %%
def tensor_bytes(value):
    tensors = value.values() if isinstance(value, dict) else [value]
    return sum(tensor.nbytes for tensor in tensors)


compare(predicted, {name: tensor_bytes(alone[name]) for name in predicted})


# %%
sys.modules.pop("elastic_files", None)  # you may have changed the file
import elastic_files as files


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


folder = Path("scratch/three")
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir()
state = parts.new_state()
for _ in range(3):
    parts.train_step(state, images, labels)
    files.write_checkpoint(folder, state)
print("newest checkpoint: step", files.newest_checkpoint(folder)["step"])
flip_a_bit(max(folder.glob("step-*.pt")))
print("newest good checkpoint after the damage: step", files.newest_checkpoint(folder)["step"])

# %% [markdown]
# ### With PyTorch: torchrun on two nodes
#
# Now the run for which all this was made. Two agents on this machine play two nodes, with one worker
# each. They run the same command, as on two machines:
#
# ```
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 5 \
#     --rdzv-backend c10d --rdzv-endpoint HOST:PORT --rdzv-id NAME  elastic_train.py
# ```
#
# How agents find each other, the **rendezvous**
# ([documentation](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html)):
#
# 1. Each agent enters its name in a store at the endpoint, and renews its entry every few seconds.
# 2. As soon as the maximum has signed, the round is complete. With the minimum, the agents wait for late
#    ones, the **last call**, and then complete it.
# 3. Nodes are numbered, workers get their ranks, and a worker group starts. A round is never changed. If
#    somebody comes or goes, there is a new round and a new group.
#
# Where the store lives matters: if its machine dies, so does the job. Here the notebook holds it, as a
# head node would, and no agent's death touches it. How long each of these steps waits is decided by
# options; `09_elastic_further` says what each costs, and what the variable in front of the command is
# for.

# %%
Path("scratch/elastic_train.py").unlink(missing_ok=True)

# %%
# %%writefile scratch/elastic_train.py
"""A worker. Whoever is there goes on where the newest good checkpoint ends."""

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
# Without the gate and the diary it is a script as you would write it: read the checkpoint, train, write
# checkpoints. It does not know whether this is its first life.
#
# `Nodes`, from `course_hosts/nodes.py`, is the notebook's side: it starts agents with the command above, holds
# the workers at chosen steps, so that it can kill at a known one, and kills. Whatever happens in its
# block, nothing that carries the job's name in its environment survives it. It lets an agent wait 8 s
# for a silent node, so that a busy machine is not taken for a dead one, and 2 s for a last call.
#
# The plan: two nodes; the worker of B is killed after 5 steps; then the newest checkpoint is damaged
# and the whole of B is killed after 11; A goes on alone; B comes back, and both train to the end.
#
# **Predict.** Checkpoints come after every 3 steps. After 5 steps the newest is that of step 3. After 11
# it is that of step 9, but a damaged one, so step 6. When B comes back, A is at 14 and its checkpoint
# at 12. Watch the table grow while the cell runs: it takes a while, for each new worker group starts
# Python and torch again.

# %% tags=["prediction"]
predicted = {
    "steps that count": 20,
    "steps computed": 20 + (5 - 3) + (11 - 6) + (14 - 12),
    "worker groups": 4,
    "samples used twice or never": 0,
}

# %%
from course_hosts.nodes import Nodes, processes_of

folder = Path("scratch/night_shift").resolve()
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
    left = processes_of(nodes.id)

# %%
final = files.newest_checkpoint(folder)
print("parameters as undisturbed:", equal(parameters_alone, [flat(final["weights"].values())]))
print("processes left over:", len(left))
restarts, counted = len(nodes.groups) - 1, nodes.restarts_counted("A")
print("agent A counted some restarts, not all:", 0 < counted < restarts)
compare(
    predicted,
    {
        "steps that count": final["step"],
        "steps computed": sum(e["event"] == "step" and e["rank"] == 0 for e in nodes.events()),
        "worker groups": len(nodes.groups),
        "samples used twice or never": (final["used"] != 1).sum().item(),
    },
)

# %% [markdown]
# Two nodes, one, two again. The shares of a batch were 24 and 24 samples, then 48, then 24 and 24, and
# the batch was always the same 48. The run ends with the parameters of the run that nobody
# disturbed.
#
# Here is the same story against the clock.

# %%
figure = ch09.night(nodes)
plt.show()

# %% [markdown]
# *Above, the workers of each node. Below, how far the training was: each new worker group starts lower
# than the last one ended (dashed), because it starts from a checkpoint. With steps this small, nearly
# all the time is recovery. (In the last group, A may have become rank 1: a rank is not a place.)*
#
# ### How long a recovery takes, and who notices
#
# Three recoveries, three different ways to notice.
#
# * **The worker of B died.** B's agent saw it within a monitor interval, and signed in anew. A's agent
#   saw somebody waiting at the rendezvous, and restarted its own, healthy worker.
# * **Node B died.** No agent was left to report it. A's worker found out, in its next all-reduce: the
#   connection was broken. A's agent then waited until B's keep-alive had run out, and after that for the
#   last call.
# * **Node B came back.** A's agent saw it waiting at the rendezvous, and restarted.
#
# **Predict** how long agents take after the loss of a node until they start new workers, at least and
# with the defaults: B's last sign of life can be as old as one keep-alive interval.

# %%
at_least = {"here": (8 - 1) * 1 + 2, "with the defaults": (3 - 1) * 5 + 30}
print("seconds at least, until new workers start:", at_least)

# %%
measured = nodes.recoveries()
print("the lost node took at least that long:", sum(measured[1]) >= at_least["here"])
names = ["a worker was killed", "a node was killed", "a node came back"]
figure = ch09.recoveries(dict(zip(names, measured)))
plt.show()

# %% [markdown]
# *Grey: until a new worker starts; hatched: until it can train. After the loss of a node the grey part
# is mostly waiting, because the agents have to be sure. A node that comes back is a whole agent that starts
# first. A second or two go to the rendezvous in any case: an agent that waits looks at the store once
# a second.*
#
# One more thing. `TORCHELASTIC_RESTART_COUNT` is not the number of restarts, as the run printed. Agent A
# started its worker four times. What counts against `--max-restarts` is a failure of its *own* worker:
# here the one with the broken connection, when node B was lost.

# %% [markdown]
# ## 5. Break it
#
# ### A checkpoint of the model only
#
# In section 4 each part left out gave other parameters. The dangerous thing is how well it looks. Here
# the run resumes with the model and the position, without optimizer, scheduler and random numbers.

# %%
run, losses = resumed_without("optimizer", "scheduler", "random numbers")
with_all, losses_with_all = resumed_without()
figure = plots.loss_curves(
    {"undisturbed": undisturbed_losses, "resumed, model only": undisturbed_losses[:6] + losses},
    title="Resumed after step 6 with the model only",
)
(ax,) = figure.axes
ax.lines[1].set_color(plots.COLORS["wrong"])
ax.axvline(6.5, color="#8C8C8C", lw=1)
ax.text(6.6, max(undisturbed_losses), "resumed", va="top")
ax.legend()
plt.show()
print("the loss still falls:", losses[-1] < undisturbed_losses[5])
print("losses as undisturbed, with all parts:", losses_with_all == undisturbed_losses[6:])
print("losses as undisturbed, model only:", losses == undisturbed_losses[6:])

# %% [markdown]
# *To the right of the line the two curves part. Both fall, and without the undisturbed one nobody would
# suspect anything.*
#
# ### A write that is torn by a kill
#
# `torch.save(state, path)` opens the file and fills it. The next rank function dies in the middle of
# such a write: after the first half of the bytes. Then it dies in the same place of an atomic write.


# %%
class DiesHalfway:
    """A file that kills its own process when half of `total` bytes are written."""

    def __init__(self, file, total):
        self.file, self.total, self.written = file, total, 0

    def write(self, data):
        count = self.file.write(bytes(data)[: self.total // 2 - self.written])
        self.written += count
        if self.written >= self.total // 2:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)


# %%
def killed_while_writing(rank, path, atomic):
    content = io.BytesIO()
    torch.save({"weights": torch.ones(100_000)}, content)
    target = path.with_suffix(".tmp") if atomic else path
    with target.open("wb") as file:
        DiesHalfway(file, len(content.getbuffer())).write(content.getbuffer())
    target.rename(path)


def state_on_disk(path):
    try:
        torch.load(path, weights_only=True)
        return "whole"
    except RuntimeError as error:
        return f"torn: {str(error).splitlines()[0].split(':')[0]}"


# %%
folder = Path("scratch/torn").resolve()
for atomic in (False, True):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch.save({"weights": torch.zeros(100_000)}, folder / "last.pt")  # yesterday's checkpoint
    try:
        launch(killed_while_writing, 1, folder / "last.pt", atomic)
    except RankFailure as failure:
        how, found = "atomic" if atomic else "in place", state_on_disk(folder / "last.pt")
        print(f"{how:9} killed by a {failure.kind}; checkpoint: {found}")

# %% [markdown]
# In place, the new one is torn and the old one is gone too: the run has lost everything. With the rename,
# yesterday's checkpoint is still there.
#
# ### The sampler starts at zero
#
# A checkpoint without the position in the data. The run has a budget of 10 steps in each epoch and dies after
# 6 of them. Count how often each sample of the epoch is used.
#
# * **position kept**: go on with the seventh batch.
# * **from zero**: a new iterator begins at the first batch, for the 4 steps that are left.
# * **own count kept**: two ranks with a `DistributedSampler` each took every second sample and kept
#   count of their own, 6 x 24. After the failure there is one rank, which skips 144 samples, its
#   count, of the whole list.

# %%
size, budget, died = parts.ROWS, 10, 6
batch = size // budget


def times_used(taken_before, taken_after):
    return torch.bincount(torch.cat([taken_before, taken_after]), minlength=size)


place = torch.arange(size)  # in the shuffled order of the epoch
before = place[: died * batch]
resumed = {
    "position kept": place[died * batch :],
    "from zero": place[: (budget - died) * batch],
    "own count kept": place[died * batch // 2 :][: (budget - died) * batch],
}
counts = {name: times_used(before, after) for name, after in resumed.items()}
for name, uses in counts.items():
    once, twice, never = ((uses == times).sum() for times in (1, 2, 0))
    print(f"{name:15} seen once {once:3}, twice {twice:3}, never {never:3}")
figure = ch09.uses(counts)
plt.show()

# %% [markdown]
# *Blue: how often each sample was used; orange: the second time. Only with the position kept has each
# exactly one use. On the right the two ranks had used the first 288 samples between them, and the one
# rank begins at 144.*
#
# Nothing fails, and the loss even looks better on samples that were seen already. The position must be
# that of the *global* order.
#
# ### A rank that hangs instead of dying
#
# An agent watches for processes that *end*. One that waits for ever, for a disk, for a lock, in an endless
# loop, is alive as far as the agent can see, and the others wait for it in a collective. What ends this
# is the time limit of the collective: here rank 0 waits one second and no longer.


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
        words = str(error).lower()
        return "timed out" if "timed out" in words or "timing out" in words else words
    finally:
        done.touch()


done = Path("scratch/done").resolve()
done.unlink(missing_ok=True)
print(launch(rank_1_hangs, 2, done))

# %% [markdown]
# The rank that is well raises an error and ends; its agent sees that, and all start again. Without an
# argument the process group's own limit holds, by default 10 minutes for NCCL and 30 for the others
# ([`init_process_group`](https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.init_process_group)).
# Set it to a few times your longest step: `init_process_group(timeout=timedelta(minutes=2))`.
#
# That limit does not say *which* rank hangs. An agent that listens to its workers does; you find it in
# `09_elastic_further`.

# %% [markdown]
# ### Bug hunt: a snapshot from a tutorial
#
# Code of this kind circulates as fault-tolerant training. It saves a snapshot after every epoch and starts
# from it. Find what is wrong before you read on; there are three things.


# %%
def fault_tolerant(snapshot, epochs=4, dies_in=None):
    run, trained, first = new_run(), [], 0
    if snapshot.exists():
        saved = torch.load(snapshot, weights_only=True)
        run["model"].load_state_dict(saved["MODEL_STATE"])
        first = saved["EPOCHS_RUN"]
    for epoch in range(first, epochs):
        if epoch == dies_in:
            return run, trained
        trained.append(epoch)
        train_steps(run, 3 * epoch, 3)
        torch.save({"MODEL_STATE": run["model"].state_dict(), "EPOCHS_RUN": epoch}, snapshot)
    return run, trained


snapshot = Path("scratch/snapshot.pt")
snapshot.unlink(missing_ok=True)
_, first_life = fault_tolerant(snapshot, dies_in=2)
run, second_life = fault_tolerant(snapshot)
print("epochs of the first life: ", first_life)
print("epochs of the second life:", second_life)
print("parameters as undisturbed:", equal(expected, [flat(run["model"].parameters())]))

# %% [markdown]
# * **`EPOCHS_RUN` is the number of the epoch that has ended, not of the next.** Epoch 1 is trained twice.
# * **Only the model is saved.** Momentum, learning rate and random numbers begin anew.
# * **`torch.save` writes in place.** You have seen what a kill at that moment leaves.
#
# PyTorch's own lesson on fault tolerance has all three
# ([`multigpu_torchrun.py`](https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/multigpu_torchrun.py)).

# %% [markdown]
# ## 6. Exercises: lose nothing that was done
#
# Four parts of a run that survives its machines: a file that is whole or absent, an order of samples
# that no world size changes, a state that is complete, and a choice that is made before the run
# starts. (9.5, the choice of minimum, maximum and restarts, is in `09_elastic_further`.) Nothing here starts torchrun: the checks kill, damage and resume on their own, at moments that
# are the same in every run.

# %%
import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler

# %% [markdown]
# ### 9.1 Checkpoints that are whole or not there (2 points)
#
# `write_checkpoint` of section 4 is called by one process, and its files stay for ever. A long run needs a
# little more: all ranks call it, a step that is saved again replaces its checkpoint, and only the last few
# files remain. Its three rules hold here too. A file that has its name is never open for writing. Its
# bytes are on the disk before it gets the name. And it carries a checksum, since `torch.load` does not
# notice a flipped bit in a tensor: it returns the tensor with a wrong number in it.
#
# Ask of each line that you write: if the process is killed here, what will `load` find? And what will
# still lie in the folder in a month?


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
# training. Then the training loop has to count, and this sampler is not enough:
# `09_elastic_further`, section 3.)


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
        """Goes to the beginning of `epoch`; in the epoch under way, at its end too, it changes nothing."""
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
# ### 9.3 All that a run needs to go on (3 points)
#
# A resume is complete if the resumed run cannot be told from one that was never disturbed. Weights are one
# part of that. The optimizer has its momenta, the scheduler its count, the sampler its position.
# And there are three generators of random numbers behind a training step: PyTorch's for dropout, numpy's
# and Python's for whatever prepares the data. On a GPU PyTorch has a fourth.
#
# All this goes through `torch.load(..., weights_only=True)`, which makes tensors, numbers, strings,
# and lists, tuples and dicts of them, and refuses objects of other classes: an unpickler that makes any
# object also runs any code. `np.random.get_state()` holds an array. Find it another form.
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
# Section 3 has the share of time that is lost, $L(\tau) = C/\tau + (\tau/2 + R)/M$, with $\tau$ seconds of
# work between two checkpoints. Two things stand between this and a number for your script. What is known
# is how long *one node* lasts, in hours. And a checkpoint is made after a whole number of steps: of the two
# beside the ideal one, one loses less.


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
# ## 7. See it: how often to save
#
# Choose how many nodes a job has, how often one of them fails, and how long a save takes. On the left the
# time that is lost, for every interval; on the right what 24 hours look like at the best interval,
# with failures thrown by dice. Three things to try:
#
# * Four times the nodes: the best interval is half as long, and the loss at least doubles.
# * A save that takes a quarter of the time: half as much is lost for saving and lost work together.
# * The fewest nodes with the shortest save: the loss can hardly be seen, and elastic training is hardly
#   worth the trouble.

# %%
from course_utils.lesson import explore


def draw_saving(nodes, node_mtbf_days, save_minutes):
    return ch09.how_often(24 * node_mtbf_days / nodes, save_minutes / 60, recovery=0.1)


explore.Explorer(
    draw_saving,
    nodes=(1, 4000, 2048),
    node_mtbf_days=(30, 1000, 264),
    save_minutes=(0.1, 20.1, 2.1),
)

# %% [markdown]
# *At the start: a cluster like Llama's, with an assumed save of about two minutes. On the left the best interval
# is where the curve of lost work crosses that of saving. On the right each orange stretch was computed
# for nothing, and each grey one is a recovery of six minutes.*

# %% [markdown]
# ## 8. On a cluster: real nodes, and who starts the agents
#
# On two machines nothing changes in the script. On each of them runs one agent, with the same command:
#
# ```
# TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 --max-restarts 5 \
#     --rdzv-backend c10d --rdzv-endpoint node0.cluster:29400 --rdzv-id night \
#     --rdzv-conf keep_alive_interval=5,keep_alive_max_attempt=6,last_call_timeout=60 \
#     train.py
# ```
#
# What changes:
#
# * **Somebody has to start agents**, and start new ones when a machine is replaced. torchrun restarts workers;
#   it cannot bring back a node. SLURM (`--requeue`) and Kubernetes (a PyTorchJob or a JobSet) do.
# * **The folder `cluster/` of the course** is a training to take away: its `train.py` resumes as this
#   chapter's script does, with launch files for both: `slurm.sbatch`, `pytorchjob.yaml` and `jobset.yaml`. Its
#   README says which lines are yours to change, and it has a page to tick off before the first run.
# * **The minimum is a promise.** A model that needs eight nodes' memory must not be started on one. And not every
#   error goes away with a restart: an exit code can say so, but torchrun always exits with 1.
# * **The endpoint is a machine that can die.** With c10d the store lives in an agent, on the node of the
#   endpoint. Put it where failures are rare.
# * **The safe must outlive the node**: a shared file system or an object store. A state of many
#   gigabytes is written in parts, by all ranks, with `torch.distributed.checkpoint` (chapter 8), and a
#   checkpoint counts only when all parts are there.
# * **Leaving in good order.** A scheduler that wants a node back sends SIGTERM some time before
#   SIGKILL. A script that then finishes its step and saves, as `cluster/train.py` does, loses nothing.
# * **With NCCL** a broken peer may show as a wait and not as an error. The time limit of `init_process_group`
#   and NCCL's own watchdog end it.

# %% [markdown]
# ### 9.6 Your own script, which survives
#
# `mine/train.py` (8.6) begins at its first step whenever it is started. Let it go on. If you have not written it yet,
# `mine.start(9)` gives you the course's own as chapter 8 leaves it.
#
# * With `--save-every 20` it writes a checkpoint after every 20th step, counted over all epochs. Started again with the
#   same `--out`, on any number of ranks, it goes on from the newest one, to the parameters and the log of a run that
#   nobody has interrupted.
# * A rank may be killed at any moment, also while it saves.
# * After SIGTERM the ranks finish the step, save and leave. The signal may reach one of them a step before the others.
# * The batch of all ranks together stays `--batch`, and the windows of step s stay those of step s.

# %%
from course_exercises import mine

check("9.6", mine.script(9))

# %% [markdown]
# ## 9. Remember
#
# 1. torchrun restarts workers, all of them, and agrees with other agents on who takes part. What the new
#    life knows is what you saved.
# 2. A checkpoint is model, optimizer, scheduler, position in the data and random numbers; written under another
#    name, flushed, renamed; verified when read, with an older one to fall back on.
# 3. Nothing that shapes the result may belong to a rank. Then two nodes, one, and two again give the
#    parameters of an undisturbed run.
# 4. A dead worker is noticed at once, a dead node by a broken collective and its keep-alive, a hung rank only by
#    a time limit.
# 5. The best interval is $\sqrt{2CM}$. There, halving the time of a save gains as much as doubling the time
#    between failures does on saves and lost work; rarer failures save restarts as well.
#
# **Sources**
#
# * PyTorch: [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html),
#   [rendezvous](https://docs.pytorch.org/docs/stable/elastic/rendezvous.html),
#   [agent](https://docs.pytorch.org/docs/stable/elastic/agent.html),
#   [distributed checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
# * Llama Team, *The Llama 3 Herd of Models*, 2024, [arXiv 2407.21783](https://arxiv.org/abs/2407.21783): section 3.3.4
#   interruptions and their causes.
# * J. W. Young, *A first order approximation to the optimum checkpoint interval*, Communications of
#   the ACM 17(9), 1974. J. T. Daly, *A higher order estimate of the optimum checkpoint interval for
#   restart dumps*, Future Generation Computer Systems 22(3), 2006.
