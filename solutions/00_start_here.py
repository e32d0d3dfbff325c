# %% [markdown]
# # 0. Start here
#
# This course teaches distributed training by doing it. Every chapter starts real processes, moves real
# tensors between them, and compares what it measures with what arithmetic predicts. You need no GPU. If
# you have some, the same notebooks use them.
#
# In this chapter you start two processes, see how a mistake is explained, and solve three short exercises.
# Run the cells from top to bottom, each with **Shift+Enter**.

# %% tags=["nbval-ignore-output"]
import os

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist

from course_exercises import check, hint
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
# The report is about *your* machine. Apart from the map of your progress, the other outputs hardly depend on the
# machine.

# %% [markdown]
# ## 1. The factory: several buildings, one order
#
# Think of training as an order that a factory has to fill. Several buildings fill it faster than one, if
# they agree on who does what.

# %%
figures.round_of_trucks()
plt.show()

# %% [markdown]
# *Every building gives the round of trucks a number, and every building gets back the sum.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | building | **rank** | one process with its own memory, and its own GPU where there is one; ranks are numbered from 0 |
# | number of buildings | **world size** | how many ranks take part |
# | truck | **message** | bytes that travel from one rank to another |
# | round of trucks that every building joins | **collective** | one operation that all ranks call together |

# %% [markdown]
# ## 2. The smallest real run: two ranks say hello and add their numbers
#
# `launch(fn, nprocs)` starts `nprocs` new processes and calls `fn(rank)` in each of them. What a rank prints appears
# here with the rank's number in front. The returned values come back in a list, rank 0 first.

# %%
counter = 0


def hello(rank):
    global counter
    counter += 1
    print(f"I am rank {rank} of {dist.get_world_size()}, and my counter is {counter}")


launch(hello, 2)
print("the notebook's counter is", counter)

# %% [markdown]
# Three processes have three counters: those of the two ranks, and that of the **kernel**, the process behind this
# notebook. No process sees another one's variables, so the ranks have to communicate. **All-reduce** is the
# collective for sums: every rank hands in a tensor, and every rank gets the sum of all of them.


# %%
def add_numbers(rank):
    number = torch.tensor([10.0 * (rank + 1)], device=hardware.device())
    dist.all_reduce(number)  # in place: the sum replaces what was handed in
    return number.item()


launch(add_numbers, 2)

# %% [markdown]
# The ranks handed in 10 and 20, and both hold 30. `hardware.device()` is the GPU of a rank, or else the CPU.

# %% [markdown]
# ### 0.1 The average of all ranks (1 point)
#
# An exercise is a function without a body. Replace the line `raise NotImplementedError` by your answer, run the cell,
# and run the check below it. The check tries your answer on fresh inputs with several ranks. It tells you what was
# expected, what you returned, and the most likely reason. Try as often as you like: only a passed check counts. Here
# is a wrong answer to this exercise, and what the check says about it.


# %%
def summed(value):
    total = value.clone()
    dist.all_reduce(total)
    return total


check("0.1", summed)

# %% [markdown]
# If that is not enough, ask for a hint. Each call gives the next one, and the last shows the idea, never the code.

# %%
hint("0.1")

# %% [markdown]
# Now write it correctly.


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
# ## 3. Predict, then measure: sums and bytes of four ranks
#
# Predict the result before you run something. Four ranks have a tensor of 1000 float32 numbers each, and all numbers
# of rank $r$ are $r + 1$. The ranks call `all_reduce` on this tensor twice. How large is each number then, and how
# many bytes does a rank hand in to both calls together? A float32 number takes 4 bytes. Write your predictions in
# place of the dots. If you leave them open, the table shows what was measured.

# %% tags=["prediction"]
predicted = {
    "each number after two calls": 40.0,
    "bytes that a rank hands in": 8000,
}

# %% [markdown]
# `Trace` records every collective that a rank calls, with its bytes. `compare` puts predicted and measured side by
# side. If a prediction is wrong, it says by how much, and which mistake the number looks like.


# %%
def sum_twice(rank):
    numbers = torch.full((1000,), rank + 1.0, device=hardware.device())
    with Trace() as trace:
        dist.all_reduce(numbers)
        dist.all_reduce(numbers)
    return numbers[0].item(), trace.record().sent("all_reduce")


measured = dict(zip(predicted, launch(sum_twice, 4)[0]))

# %%
compare(
    predicted,
    measured,
    likely={
        "The ranks count from 0, the numbers from 1.": {"each number after two calls": 24},
        "The second call sums again: four ranks hand in four equal sums.": {
            "each number after two calls": 10
        },
        "Twice the sum: the second call adds up four sums.": {"each number after two calls": 20},
        "The bytes of one call.": {"bytes that a rank hands in": 4000},
        "The numbers, not their bytes.": {"bytes that a rank hands in": 2000},
        "What all ranks hand in together.": {"bytes that a rank hands in": 32000},
    },
)

# %% [markdown]
# ### 0.2 The size of a message (1 point)
#
# Most predictions in this course count bytes.


# %% nbgrader={"grade_id": "0.2", "solution": true}
def message_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes the values of `tensor` take: a whole number, for any shape and dtype."""
    ### BEGIN SOLUTION
    return tensor.numel() * tensor.element_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "0.2-check", "grade": true, "points": 1, "locked": true}
check("0.2", message_bytes)

# %% [markdown]
# ## 4. By hand, then with PyTorch: one sum, two ways
#
# A collective consists of messages. Here two ranks compute their sum with one `send` and one `recv` each. `send`
# waits until the other side takes the bytes, and `recv` waits until they arrive. So one rank has to send first while
# the other one receives first.


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


print("largest difference on each rank:", launch(add_by_hand, 2))

# %% [markdown]
# The two sums are equal to the last bit. The course keeps this habit: every technique is written by hand, then
# with PyTorch's interface, and both have to end with the parameters that *one* process reaches on the whole
# batch.

# %% [markdown]
# ### 0.3 Pass it on (2 points)
#
# Every rank sends its tensor to the next rank, the last rank to rank 0, and returns what it received. Your answer has
# to work for any number of ranks, including one.


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
# ## 5. Break it: a rank that does not come, and a rank that fails
#
# The most common failure in distributed training is silence: a rank waits for another that never comes. `launch`
# tells you who waits, and where.
#
# **Bug hunt.** The author of the next cell wants the sum to be printed once. What does rank 0 wait for?


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
# A collective takes place when *all* ranks have called it. The repair is to move `all_reduce` before the `if`. The
# second kind of failure is an error in one rank:


# %%
def divide(rank):
    parts = [8.0, 4.0]
    return parts[rank] / (1 - rank)


try:
    launch(divide, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Without the `try`, the same text appears in place of a traceback. No process is left behind, and the next cell works:

# %%
launch(add_numbers, 2)

# %% [markdown]
# ## 6. Exercises of this chapter
#
# | exercise | points | in section |
# |---|--:|---|
# | 0.1 The average of all ranks | 1 | 2 |
# | 0.2 The size of a message | 1 | 3 |
# | 0.3 Pass it on | 2 | 4 |

# %% [markdown]
# ## 7. See it: how many messages a sum needs
#
# In a **star**, every rank sends its tensor to rank 0, which adds them up and sends the sum back. In a **ring**, each
# rank talks to its neighbours only. Move the slider and compare how many tensors the busiest rank sends and receives.

# %%
Explorer(figures.star_and_ring, ranks=(2, 8, 4))

# %% [markdown]
# *In the star, every arrow begins or ends at rank 0, whose load grows with every rank. In the ring, the load of each
# rank stays below four tensors.*
#
# The map of the course fills as your checks pass. Run the cell again to see where you are. Most chapters take about an
# hour to read, and their exercises a second sitting.

# %%
progress_map()
plt.show()

# %% [markdown]
# *A building is a chapter, and a window is an exercise: green once its check has passed. A flag means that the
# chapter is complete.* For a list of all exercises, import `progress_text` from `course_exercises` and print
# `progress_text()`.
#
# Your progress is one small file on this machine, and it is sent nowhere. [The quick reference](quick_reference.ipynb)
# says how to delete it, or take it to another machine.

# %% [markdown]
# ## 8. On a cluster: the same variables, another launcher
#
# On a cluster, a launcher called `torchrun` starts your script on every machine. Through environment variables it
# tells each process who it is. `launch` sets the same variables.


# %%
def who_am_i(rank):
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}


for variables in launch(who_am_i, 2):
    print(variables)

# %% [markdown]
# `RANK` is the number of this process among all, `WORLD_SIZE` is how many there are, and `LOCAL_RANK` is its number
# on its own machine, which chooses the GPU. In chapter 2 you run a whole training script under `torchrun`.

# %% [markdown]
# ## 9. Remember
#
# * A rank is a process with its own memory.
# * All ranks call a collective, in the same order, with tensors of the same shape and dtype.
# * `launch(fn, n)` runs `fn(rank)` on `n` real ranks and returns their results in the order of the ranks.
# * Predict first, then measure. Bytes and sums have to be equal; times are compared as ratios.
# * The message of a failure names the rank, the line and what the other ranks were doing.
#
# Keep [the quick reference](quick_reference.ipynb) at hand: it has every formula, every term and every message.
#
# **Sources.** PyTorch documentation, *Distributed communication package* (torch.distributed):
# sections "Point-to-point communication" and "Collective functions"; *torchrun (Elastic Launch)*:
# section "Environment Variables".
