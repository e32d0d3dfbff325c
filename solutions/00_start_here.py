# %% [markdown]
# # 0. Start here
#
# This course teaches distributed training by doing it. Every chapter starts real processes, moves
# real tensors between them, and compares what was measured with what the arithmetic said.
# You need no GPU. If you have some, the same notebooks use them.
#
# In the next twenty minutes you start two processes, watch a mistake being explained, and answer three short
# exercises. Run the cells from top to bottom, each with **Shift+Enter**.

# %% tags=["nbval-ignore-output"]
import os

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from course_exercises import check, hint, progress_text
from course_exercises.checks.course_map import progress_map
from course_utils import hardware
from course_utils.figures import ch00 as figures
from course_utils.launch import RankFailure, launch
from course_utils.lesson.explore import Explorer
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace

hardware.report()
print(hardware.doctor())

# %% [markdown]
# This speaks about *your* machine: which device each process would get, and why a GPU might stay idle. All other
# outputs of this chapter are the same everywhere.

# %% [markdown]
# ## 1. The factory: several workshops, one order
#
# Think of a training run as a factory order. Several workshops fill it faster than one, if they agree on who does what
# and exchange their parts at the right moment.

# %%
figures.workshops()
plt.show()

# %% [markdown]
# *Three workshops stand in a row; trucks carry parts from one to the next.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | workshop | **rank** | one process with its own memory and, where there is one, its own GPU; ranks are numbered from 0 |
# | number of workshops | **world size** | how many ranks take part |
# | truck | **message** | bytes that travel from one rank to another |
# | a round of trucks that everybody joins | **collective** | one operation that all ranks call together, such as `all_reduce` |
# | customer | the **kernel** | the process behind this notebook, which places the order |
#
# Later chapters have more such names; [the quick reference](quick_reference.ipynb) has all of them.

# %% [markdown]
# ## 2. The smallest real run: two ranks say hello and add their numbers
#
# `launch(fn, nprocs)` starts `nprocs` new processes and calls `fn(rank)` in each. What a rank
# prints appears here with its number in front. What it returns comes back in a list, rank 0 first.


# %%
def hello(rank):
    print(f"hello, I am rank {rank} of {dist.get_world_size()}")
    return os.getpid()


process_ids = launch(hello, 2)
print("three different processes:", len({os.getpid(), *process_ids}) == 3)

# %% [markdown]
# Two processes share no memory: rank 0 cannot read a variable of rank 1. To add their numbers they communicate.
# **All-reduce** is the collective for it: every rank hands in a tensor, and every rank gets the sum.


# %%
def add_numbers(rank):
    number = torch.tensor([10.0 * (rank + 1)], device=hardware.device())
    dist.all_reduce(number)  # in place: the sum replaces what was handed in
    return number.item()


launch(add_numbers, 2)

# %% [markdown]
# They handed in 10 and 20, and both hold 30. `hardware.device()` is the rank's GPU, or else the CPU.

# %% [markdown]
# ## 3. Predict, then measure: the sum and the bytes of four ranks
#
# Before you run something, say what will come out. Four ranks hand in 1000 numbers each; rank $r$ hands in the value
# $r + 1$. The sum over $n$ ranks is $1 + 2 + \dots + n = n (n + 1) / 2$, and a float32 number takes 4 bytes. Write your
# two predictions in place of the dots. (If you leave them open, the table shows what was measured.)

# %% tags=["prediction"]
ranks, elements = 4, 1000
predicted = {
    "each element becomes": ranks * (ranks + 1) / 2,
    "bytes that a rank hands in": 4 * elements,
}

# %% [markdown]
# `Trace` writes down every collective that a rank calls, with its bytes. `compare` shows predicted and measured; to a
# wrong prediction it says by how much, and which mistake it looks like. (Its stored table is
# folded away until you run the cell.)


# %%
def count_bytes(rank, elements):
    numbers = torch.full((elements,), rank + 1.0, device=hardware.device())
    with Trace() as trace:
        dist.all_reduce(numbers)
    return numbers[0].item(), trace.record().sent("all_reduce")


results = launch(count_bytes, ranks, elements)
compare(
    predicted,
    dict(zip(predicted, results[0])),
    likely={
        "The ranks count from 0, the values from 1.": {"each element becomes": 6},
        "The numbers, not their bytes.": {"bytes that a rank hands in": elements},
        "What all ranks hand in together.": {"bytes that a rank hands in": 4 * elements * ranks},
    },
)
print("the same on all ranks:", all(result == results[0] for result in results))

# %% [markdown]
# ## 4. By hand, then with PyTorch: one sum, two ways
#
# A collective is made of messages. Here is the sum of two ranks from a `send` and a `recv` each.
# `send` waits until the other side takes the bytes, `recv` until they arrive. So one rank sends
# first and the other receives first.


# %%
def add_by_hand(rank):
    torch.manual_seed(rank)
    mine = torch.randn(1000, device=hardware.device())
    theirs = torch.empty_like(mine)
    if rank == 0:
        dist.send(mine, dst=1)
        dist.recv(theirs, src=1)
    else:
        dist.recv(theirs, src=0)
        dist.send(mine, dst=0)
    by_hand = mine + theirs
    dist.all_reduce(mine)
    return (by_hand - mine).abs().max().item()


print("largest difference by rank:", launch(add_by_hand, 2))

# %% [markdown]
# They are equal to the last bit. The course keeps this habit: every technique is written
# by hand, then with PyTorch's own interface, and both must end with the parameters that *one*
# process reaches on the whole batch.

# %% [markdown]
# ## 5. Break it: a rank that does not come, and a rank that fails
#
# The most common failure in distributed training is silence: a rank waits for another that never
# comes. `launch` says who waits where.
#
# **Bug hunt.** The author of the next cell wants the sum printed once. What will rank 0 wait for?


# %%
def sum_once(rank):
    number = torch.tensor([1.0], device=hardware.device())
    if rank == 0:
        dist.all_reduce(number)
        print("the sum is", number.item())


try:
    launch(sum_once, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# A collective is a meeting: it takes place when *all* ranks call it. The repair is to move the
# `all_reduce` in front of the `if`. The second kind of failure is an error in one rank:


# %%
def divide(rank):
    parts = [8.0, 4.0]
    return parts[rank] / (1 - rank)


try:
    launch(divide, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Outside a `try`, the same text appears in place of a traceback. No process is left behind, and the next cell works:

# %%
launch(add_numbers, 2)

# %% [markdown]
# ## 6. Exercises: three short ones, to learn how they work
#
# An exercise is a function with a description and no body. You replace the line
# `raise NotImplementedError` by your answer, run the cell, and run the check under it. A check tries
# your answer on fresh inputs with several ranks. It says what was required, what came, and the most
# likely reason. You may try as often as you like: only a passed check counts, and it counts once.
#
# Here is a wrong answer to exercise 0.1, and what the check says to it.


# %%
def summed(value):
    total = value.clone()
    dist.all_reduce(total)
    return total


check("0.1", summed)

# %% [markdown]
# When the check's sentence is not enough, ask for a hint. Each call gives the next one. The last
# shows the idea, never the code.

# %%
hint("0.1")

# %% [markdown]
# **0.1 The average of all ranks** (1 point). Now write it right.


# %% nbgrader={"grade_id": "0.1", "solution": true}
def average_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of `value` over all ranks, on every rank.

    value: any shape, float32, one tensor a rank. It is left unchanged.
    Returns a new tensor of the same shape.
    """
    ### BEGIN SOLUTION
    average = value.clone()
    dist.all_reduce(average)
    return average / dist.get_world_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "0.1-check", "grade": true, "points": 1, "locked": true}
check("0.1", average_over_ranks)

# %% [markdown]
# **0.2 The size of a message** (1 point). Predictions in this course count bytes, so you will need
# this often.


# %% nbgrader={"grade_id": "0.2", "solution": true}
def message_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes the values of `tensor` take: a whole number, for any shape and dtype."""
    ### BEGIN SOLUTION
    return tensor.numel() * tensor.element_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "0.2-check", "grade": true, "points": 1, "locked": true}
check("0.2", message_bytes)

# %% [markdown]
# **0.3 Pass it on** (2 points). Every rank sends its tensor to the next rank, the last one to
# rank 0, and returns what it received. It has to work for any number of ranks, also for one.


# %% nbgrader={"grade_id": "0.3", "solution": true}
def pass_on(value: torch.Tensor) -> torch.Tensor:
    """Send `value` to the next rank and return what the previous rank sent, with send and recv.

    value: any shape, the same shape and dtype on every rank. It is left unchanged.
    Returns the previous rank's tensor; with one rank, a copy of `value`.
    """
    ### BEGIN SOLUTION
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = value.clone()
    if ranks == 1:
        return received
    if rank == 0:  # somebody has to receive first, or everybody waits in send
        dist.recv(received, src=ranks - 1)
        dist.send(value, dst=1)
    else:
        dist.send(value, dst=(rank + 1) % ranks)
        dist.recv(received, src=rank - 1)
    return received
    ### END SOLUTION


# %% nbgrader={"grade_id": "0.3-check", "grade": true, "points": 2, "locked": true}
check("0.3", pass_on)

# %% [markdown]
# ## 7. See it: how many trucks a sum needs
#
# In a **star**, every rank sends its tensor to rank 0, which adds and sends the sum back. In a **ring**, each rank talks only to its neighbours. Move the slider and compare how
# many tensors the busiest rank sends and receives in all. You build the ring in chapter 3.

# %%
Explorer(figures.star_and_ring, ranks=(2, 8, 4))

# %% [markdown]
# *Left, every arrow begins or ends at rank 0: its load grows with every rank. Right, each rank has two
# neighbours, and its load stays below four tensors.*
#
# The map of the course fills as your checks pass: run the cell again to see where you are. Most chapters take about an
# hour to read, and their exercises a second sitting.

# %%
progress_map()
plt.show()

# %% [markdown]
# *A building is a chapter, a window an exercise: green once its check has passed. A flag: the chapter is complete.*
# The same in words:

# %% tags=["nbval-ignore-output"]
print(progress_text())

# %% [markdown]
# Your progress is one small file on this machine, and it goes nowhere. How to forget it, or to take it to another
# machine, is in [the quick reference](quick_reference.ipynb).

# %% [markdown]
# ## 8. On a cluster: the same variables, another launcher
#
# On a cluster you do not call `launch`. A launcher called `torchrun` starts your script on every
# machine, and tells each process who it is through the environment. Ours sets the same variables.


# %%
def who_am_i(rank):
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


for variables in launch(who_am_i, 2):
    print(variables)

# %% [markdown]
# `RANK` is this process's number among all, `WORLD_SIZE` how many there are in all, and `LOCAL_RANK` its number on its
# own machine, which chooses the GPU. Chapter 3 runs a whole training script under `torchrun`.

# %% [markdown]
# ## 9. Remember
#
# * A rank is a process with its own memory.
# * A collective is a meeting: all ranks call it, in the same order, with tensors that fit.
# * `launch(fn, n)` runs `fn(rank)` on `n` real ranks and returns their results in rank order.
# * Predict first, then measure. Bytes and sums must be equal; times are compared as ratios.
# * A failure names the rank, the line and what the others were doing.
#
# Keep [the quick reference](quick_reference.ipynb) at hand: every formula, every word, every message.
#
# **Sources.** PyTorch documentation, *Distributed communication package* (torch.distributed):
# sections "Point-to-point communication" and "Collective functions"; *torchrun (Elastic Launch)*:
# section "Environment Variables".
