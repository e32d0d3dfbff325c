# %% [markdown]
# # 3. Distributed data parallel: equal factories, no head office
#
# In chapter 2 one process drove all devices. The first device kept the only true model, scattered
# the batch and collected the gradients. It carried the load, and Python's threads held the rest
# back.
#
# This chapter takes the head office away. Every device gets a process of its own, with its own
# model, its own optimizer and its own share of the data. The processes exchange one thing:
# gradients. PyTorch calls this **distributed data parallel**, DDP for short. It is the form of data
# parallelism that people use, on one machine and on thousands.
#
# At the end of the chapter you can say what each rank hands over in a step, what it is for, and what a
# ring makes of it on the wire. You have averaged gradients by hand and with `DistributedDataParallel`, on 1, 2 and 4 ranks, and have seen that all
# runs end with the same parameters. And you have seen nine mistakes that do not look like mistakes.
# What goes beyond that (overlap on the clock, accumulation, uneven ranks, large batches, batch
# normalisation, and DDP's machinery as an exercise) is in `03_ddp_further`.

# %% tags=["nbval-ignore-output"]
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace

hardware.report()

# %% [markdown]
# ## 1. The factory: equal factories, no head office
#
# In chapter 2 a head office owned the blueprint. It sent copies out in the morning, collected all
# change notes in the evening, and everyone waited while it worked.
#
# Now picture four factories that are equals. Each has its own copy of the blueprint and its own
# pile of raw material. During a shift every factory writes down how it would change the blueprint.
# In the evening trucks drive round a ring road. They carry the notes from each factory to the next
# until all four have the average of all notes. Each factory then applies the same average to its
# own copy. The copies were equal in the morning, so they are equal in the evening. Nobody had to
# send a blueprint.

# %%
import matplotlib.pyplot as plt

from course_utils.figures import ch03

figure = ch03.ring_road()
plt.show()

# %% [markdown]
# *Four equal factories stand on a ring road. Each has the whole blueprint and its own pile of
# material. Trucks carry change notes to the next factory, and from the last back to the first.
# There is no office in the middle.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | factory | **rank** | one process with its own device and its own Python |
# | number of factories | **world size** | how many ranks take part |
# | blueprint | parameters | every rank holds all of them |
# | first morning: factory 0 sends its blueprint to all | **broadcast** | rank 0's parameters are copied to all ranks |
# | delivery plan | **DistributedSampler** | says which rows of the data set belong to which rank |
# | change notes | gradients | every rank computes its own, from its own rows |
# | evening round of the trucks | **all-reduce** | every rank ends with the sum of all gradients |
# | crate that a truck carries | **bucket** | gradients of several layers that travel together |
# | club of the factories that know each other's address | **process group** | the ranks that take part in an exchange |
#
# Equal copies stay equal only as long as everybody plays by the rules. Most of section 5 is about
# factories that do not.

# %% [markdown]
# ## 2. The smallest real run: two ranks average one gradient
#
# The model below has one parameter. Each rank feeds it a different number, so each rank computes a
# different gradient. `dist.all_reduce` adds the gradients of all ranks and leaves the sum on every
# rank. A division by the world size turns the sum into the mean.


# %%
def average_one_gradient(rank):
    weight = torch.ones(1, device=hardware.device(), requires_grad=True)
    (weight * (rank + 1)).sum().backward()  # the gradient is the rank's own input: 1 or 2
    own = weight.grad.item()
    dist.all_reduce(weight.grad)  # in place; adds up by default
    weight.grad /= dist.get_world_size()
    return own, weight.grad.item()


launch(average_one_gradient, 2)

# %% [markdown]
# Rank 0 computed 1, rank 1 computed 2. After the exchange both hold 1.5, the gradient of the mean
# loss over both inputs. Nobody asked a master for it. Every rank ran the same program and called
# the same **collective**, an operation that all ranks of a group must call, in the same order.
#
# ### Who is in the group
#
# `launch` called `dist.init_process_group` for you before your function began. This is the
# **rendezvous**: each process says *I am rank 1 of 2* at an agreed place (a file, or a port of one
# machine), learns the addresses of the others there, and connects to them. The result is the
# **default process group**. Its **backend** is the library that moves the bytes: **gloo** between
# CPUs, **NCCL** between NVIDIA GPUs.
#
# A collective runs in the default group unless you name another one. `dist.new_group` makes smaller
# groups. Every rank must create every group, in the same order, also those that it is not in.


# %%
def sum_in_pairs(rank):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number = torch.tensor([float(rank)], device=hardware.device())
    dist.all_reduce(number, group=pairs[rank // 2])
    return number.item()


launch(sum_in_pairs, 4)

# %% [markdown]
# Ranks 0 and 1 share the sum 0 + 1, ranks 2 and 3 share 2 + 3. Later chapters use such groups to
# run data parallelism along one axis and model parallelism along another.
#
# ### Why your function does not start without help
#
# Outside this course a script can start its ranks with `torch.multiprocessing.spawn`. It opens new
# Python processes and sends each one your function. With a function from a notebook cell this
# fails. First look at what is sent. A function is **pickled by reference**: the bytes hold the name
# of its module and its own name, not its code.

# %%
import pickle


def hello(rank):
    print("hello from rank", rank)


print(pickle.dumps(hello))

# %% [markdown]
# The new process is told to look up `hello` in `__main__`. In your notebook `__main__` is the
# kernel, where `hello` lives. In the new process `__main__` is an empty module. The error appears
# in the new process, so it goes to that process's standard error. The exception in the cell says less.
# `caught_terminal` catches what a child process writes there, so that you can read both.

# %%
import torch.multiprocessing as mp

from course_utils.lesson.terminal import caught_terminal

with caught_terminal() as terminal:
    try:
        mp.spawn(hello, nprocs=1)
    except mp.ProcessExitedException as error:
        print("the cell says:    ", error)
error = next(line for line in terminal if line.startswith("AttributeError"))
print("the terminal says:", error.split(" (")[0])  # then the module, as this Python describes it

# %% [markdown]
# This error has stopped many people on their first day. You find it in the trackers of Jupyter,
# Paddle and other projects
# ([issue 6258 of jupyter/notebook](https://github.com/jupyter/notebook/issues/6258)).
#
# There are two ways out. `launch` sends the code itself, with the library cloudpickle. The common
# way is to put the function into a file, because a module that both processes can import makes the
# name mean the same in both.
#
# ### A script, as people write it
#
# The next cells write such a script to `scratch/ddp_mnist.py` and run it as you would in a
# terminal. It trains the 784-50-10 network of chapter 2 on two ranks. Read it once from top to
# bottom. Each line that is new gets its own part of this chapter.

# %%
from course_utils.lesson.terminal import run_in_terminal, scratch

script, result = scratch() / "ddp_mnist.py", scratch() / "two_ranks.pt"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/ddp_mnist.py
"""Trains on MNIST with DDP. In a terminal: python ddp_mnist.py result.pt"""

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DistributedSampler

from course_utils.lesson import mnist
from course_utils.lesson.models import MnistNet

STEPS, GLOBAL_BATCH, LEARNING_RATE = 60, 128, 0.2


def train(rank, world_size, meeting_point="env://"):
    local_rank = int(os.environ.get("LOCAL_RANK", rank))  # this rank's number on its machine
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    gpu = torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    backend = "nccl" if gpu else "gloo"
    dist.init_process_group(backend, meeting_point, rank=rank, world_size=world_size)

    images, labels = mnist.tensors(train=True, limit=STEPS * GLOBAL_BATCH)
    sampler = DistributedSampler(images)  # this rank's share of the row numbers
    torch.manual_seed(0)
    model = DDP(MnistNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for rows in torch.tensor(list(sampler)).split(GLOBAL_BATCH // world_size):
        optimizer.zero_grad()
        loss = cross_entropy(model(images[rows].to(device)), labels[rows].to(device))
        loss.backward()
        optimizer.step()

    if rank == 0:  # all ranks hold the same parameters; one of them saves
        torch.save(model.module.state_dict(), sys.argv[1])
        print(f"{world_size} ranks took {STEPS} steps; rank 0 saved {Path(sys.argv[1]).name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun started this process, once for each rank
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(train, args=(2, Path(folder, "meeting").as_uri()), nprocs=2)

# %% [markdown]
# The last lines stand under `if __name__ == "__main__"` for a reason. Each new process imports this
# file again to find `train`. Without the guard each of them would try to spawn two more, and Python
# stops that with a `RuntimeError`.

# %%
print(run_in_terminal(sys.executable, script, result), end="")

# %% [markdown]
# Keep the file `two_ranks.pt` in mind. In section 4 you train the same network by hand, on 1, 2 and
# 4 ranks, and compare.

# %% [markdown]
# ## 3. Predict, then measure: how many bytes each collective moves
#
# ### Eight collectives
#
# A letter says whose data a block holds, a digit which piece of it. First the four with a **root**,
# a rank at the centre.

# %%
for name in ("broadcast", "scatter"):
    plots.collective(name)
    plt.show()

# %% [markdown]
# *`broadcast` copies rank 0's block to all. `scatter` gives each rank one piece of what rank 0
# holds.*

# %%
for name in ("gather", "reduce"):
    plots.collective(name)
    plt.show()

# %% [markdown]
# *`gather` brings the blocks of all ranks to rank 0, side by side. `reduce` brings their sum to
# rank 0; what the other ranks hold afterwards is undefined.*
#
# The other four have no root. All ranks do the same.

# %%
for name in ("all_gather", "all_reduce"):
    plots.collective(name)
    plt.show()

# %% [markdown]
# *`all_gather` leaves the blocks of all ranks on every rank. `all_reduce` leaves their sum on every
# rank; it is the one that averages gradients.*

# %%
for name in ("reduce_scatter", "all_to_all"):
    plots.collective(name)
    plt.show()

# %% [markdown]
# *`reduce_scatter` adds up and leaves one piece of the sum on each rank. `all_to_all` sends piece i
# of every rank to rank i, like a transposed table.*
#
# ### What a rank hands over
#
# `Trace` records every collective of a process and the **payload** that this rank hands to the
# call. How the backend routes the bytes is another question, which comes next. **Predict:** four
# ranks, a tensor of 1,000 float32 numbers, so 4,000 bytes. What does each rank hand over? A rank
# that only receives hands over nothing. An operation whose input is cut into pieces needs one piece
# for each rank, so 16,000 bytes. Rank 0 is the root where there is one.

# %% tags=["prediction"]
predicted_rank_0 = {
    "broadcast": 4_000,
    "scatter": 16_000,
    "gather": 4_000,
    "reduce": 4_000,
    "all_gather": 4_000,
    "all_reduce": 4_000,
    "reduce_scatter": 16_000,
    "all_to_all": 16_000,
}
predicted_rank_1 = {"broadcast": 0, "scatter": 0, "gather": 4_000, "reduce": 4_000}


# %%
def every_collective(rank):
    x = torch.ones(1000, device=hardware.device())
    four, four_more = ([torch.ones_like(x) for _ in range(4)] for _ in range(2))
    root = rank == 0
    with Trace() as trace:
        dist.broadcast(x, src=0)
        dist.scatter(x, four if root else None, src=0)
        dist.gather(x, four if root else None, dst=0)
        dist.reduce(x, dst=0)
        dist.all_gather(four, x)
        dist.all_reduce(x)
        dist.reduce_scatter(x, four)
        dist.all_to_all_single(torch.cat(four_more), torch.cat(four))  # gloo: lists from 2.12 on
    record = trace.record()
    return {op: record.sent(op) for op in predicted_rank_0}


counted = launch(every_collective, 4)

# %%
likely = {
    "One piece: the input is cut into one piece for each rank.": {
        op: 4_000 for op in ("scatter", "reduce_scatter", "all_to_all")
    },
    "What it receives: only what a rank hands over counts.": {
        op: 16_000 for op in ("gather", "all_gather")
    },
}
print("rank 0")
compare(predicted_rank_0, counted[0], likely)
print("rank 1, where the root is another rank")
compare(
    predicted_rank_1,
    counted[1],
    {"Only the root hands over something here.": {"broadcast": 4_000, "scatter": 16_000}},
)
same = all(counted[1][op] == counted[0][op] for op in counted[0].keys() - {"broadcast", "scatter"})
print("the other six as on rank 0:", same)

# %% [markdown]
# ### What travels: a head office against a ring
#
# An all-reduce can be routed in many ways. The first idea is a head office: all ranks send their
# tensor to rank 0, which adds them up and sends the sum back. With plain `dist.send` and
# `dist.recv`:


# %%
def through_head_office(rank):
    x = torch.ones(1000, device=hardware.device())
    others = range(1, dist.get_world_size())
    with Trace() as trace:
        if rank == 0:
            for other in others:
                arrived = torch.empty_like(x)
                dist.recv(arrived, src=other)
                x += arrived
            for other in others:
                dist.send(x, dst=other)
        else:
            dist.send(x, dst=0)
            dist.recv(x, src=0)
    return trace.record().sent("send")


# %% [markdown]
# **Predict** the bytes that rank 0 and rank 1 send, for a tensor of S = 4,000 bytes on n = 4 ranks.

# %% tags=["prediction"]
n, S = 4, 4_000
predicted = {"rank 0": (n - 1) * S, "rank 1": S}

# %%
sent = launch(through_head_office, n)
compare(
    predicted,
    {"rank 0": sent[0], "rank 1": sent[1]},
    {
        "As if one message reached all: each rank gets one of its own.": {"rank 0": S},
        "Sent and received: the sum comes back, it is not sent.": {"rank 1": 2 * S},
    },
)

# %% [markdown]
# Rank 0's link carries n - 1 times the tensor out, and as much in. Every rank that you add makes it
# slower. A **ring** has no such place. Cut the tensor into n pieces. Each rank sends one piece to
# its right neighbour and receives one from its left, n - 1 times while the pieces are added up, and
# n - 1 times while the sums go round. That makes
#
# $$\text{bytes sent by each rank} = 2\,(n - 1)\,\frac{S}{n} ,$$
#
# and as long as the ranks do the adding, in no all-reduce does the busiest rank get by with less
# ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). (Some switches add on the
# way; then a rank sends its tensor once.) In exercise 3.2 you write
# the ring yourself, and its bytes are counted.

# %%
figure, axes = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.2))
for ax, draw, title in zip(axes, (plots.star, plots.ring), ("head office", "ring")):
    draw(ax, 4)
    ax.set_title(title)
plt.show()
for n in (2, 4, 8, 64):
    ring = 2 * (n - 1) / n
    print(f"{n:2} ranks: the head office sends {n - 1:2} S, each rank of a ring {ring:.2f} S")

# %% [markdown]
# *On the left all messages meet at rank 0. On the right each rank sends to one neighbour, and all
# links are equally busy.* However many ranks there are, each rank of a ring sends less than twice the
# tensor. The ring of four, step by step:

# %%
plots.ring_steps(4)
plt.show()

# %% [markdown]
# *Rows are ranks, columns are pieces. The stripes of a piece, a colour and a number for each rank, say whose
# part is in it. A thick edge: it has just arrived from the rank above. After three steps each rank holds one
# complete sum, another one on each; after six, all hold all.*
#
# `record.sent` counts what a rank hands over. What then travels is the algorithm's affair. With S for
# the bytes of the larger one of a rank's input and output, the usual algorithms have the busiest link
# carry ([NCCL tests, performance](https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md)):
#
# | collective | bytes | S here, on 4 ranks |
# |---|---|---|
# | `broadcast`, `reduce` | S | 4,000 |
# | `scatter`, `gather` (the root's link) | (n - 1)/n S | 16,000 |
# | `all_gather`, `reduce_scatter`, `all_to_all` | (n - 1)/n S | 16,000 |
# | `all_reduce` | 2 (n - 1)/n S | 4,000 |
#
# ### What DDP moves in the script
#
# Back to the script of section 2. DDP does two things with the network. The constructor copies rank
# 0's parameters to all ranks. Each backward averages all gradients. **Predict** the bytes, from the
# shapes of the network: 784 x 50 weights and 50 biases, then 50 x 10 weights and 10 biases, 4 bytes
# each.

# %% tags=["prediction"]
predicted = {
    "broadcast at the start": 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "3 steps": 3 * 4 * (784 * 50 + 50 + 50 * 10 + 10),
}

# %%
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.lesson.models import MnistNet


def bytes_of_ddp(rank):
    device = hardware.device()
    with Trace() as trace:
        model = DDP(MnistNet().to(device))
        for _ in range(3):
            model(torch.ones(8, 784, device=device)).sum().backward()
    calls = [call for call in trace.record().calls if call.dtype == "float32" and call.sends]
    return [sum(c.bytes for c in calls if c.op == op) for op in ("broadcast", "all_reduce")]


broadcast, all_reduce = launch(bytes_of_ddp, 2)[0]
compare(predicted, {"broadcast at the start": broadcast, "3 steps": all_reduce})

# %% [markdown]
# The cell counts float32 only. DDP also exchanges a few integers: the shapes of the parameters, to
# check that all ranks built the same model, and the order of the buckets.
#
# Two facts to keep. The bytes depend on the model, not on the batch: a larger batch makes a step
# longer and its communication relatively cheaper. And what a rank hands over in a step is the same
# on 2 and on 400 ranks.

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same parameters on 1, 2 and 4 ranks
#
# ### Give each rank its share: DistributedSampler
#
# Every rank sees the whole data set, but must train on its own part of it. `DistributedSampler`
# answers one question: which row numbers are mine? You can ask it without any process group. Ten
# rows on four ranks, first without shuffling:

# %%
from torch.utils.data import DistributedSampler

for rank in range(4):
    mine = DistributedSampler(range(10), num_replicas=4, rank=rank, shuffle=False)
    print(f"rank {rank}:", list(mine))

# %% [markdown]
# Two things to see. The sampler takes **strides**: rank 0 gets every fourth row, not the first
# block. And every rank gets three rows, twelve together, although there are ten: rows 0 and 1 were
# used twice, as **padding**, so that all ranks take equally many steps. Keep the padding in mind;
# it comes back in section 5.
#
# With shuffling, all ranks draw the same permutation, from the same seed, and take their strides
# from it. The permutation depends on `seed + epoch`. You announce the epoch with `set_epoch`:

# %%
for epoch in range(3):
    sampler = DistributedSampler(range(10_000), num_replicas=4, rank=2, seed=0)
    sampler.set_epoch(epoch)
    print(f"rank 2, epoch {epoch}:", list(sampler)[:5])

# %% [markdown]
# The strides have a consequence that the rest of this chapter is built on. Cut the rows of each
# rank into shares of `GLOBAL_BATCH / world_size`. Then, in every step, the shares of all ranks
# together are the same rows, whatever the number of ranks. The **global batch** is the same.

# %%
STEPS, GLOBAL_BATCH, LEARNING_RATE = 60, 128, 0.2
images, labels = mnist.tensors(train=True, limit=STEPS * GLOBAL_BATCH)


def my_batches(rank, world_size, epoch=0):
    sampler = DistributedSampler(images, num_replicas=world_size, rank=rank, seed=0)
    sampler.set_epoch(epoch)
    return torch.tensor(list(sampler)).split(GLOBAL_BATCH // world_size)


# %%
whole = my_batches(0, 1)
for n in (2, 4):
    shares = [my_batches(rank, n) for rank in range(n)]
    together = [torch.cat(parts) for parts in zip(*shares)]  # what all ranks see in each step
    same = all(set(a.tolist()) == set(b.tolist()) for a, b in zip(whole, together))
    print(f"{n} ranks: the same {len(together)} global batches as one process:", same)

# %% [markdown]
# ### Why the mean of the means is right
#
# `cross_entropy` is a mean over its batch. Rank $r$ holds $B/n$ rows and computes the mean of their
# losses, $L_r$. The loss of the whole batch is
#
# $$L = \frac{1}{B}\sum_{i=1}^{B} \ell_i = \frac{1}{n}\sum_{r=0}^{n-1} L_r
# \qquad\text{so}\qquad \nabla L = \frac{1}{n}\sum_{r=0}^{n-1} \nabla L_r .$$
#
# Averaging the gradients of equal shares gives the gradient of the whole batch, exactly. With
# unequal shares it does not: the rows of a small share would count more.
#
# First the reference: one process, the whole batch. It runs in this kernel, without any rank.

# %%
from torch.nn.functional import cross_entropy


def new_model(seed=0):
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(seed)
    return MnistNet().to(hardware.device())


def loss_of(model, rows):
    device = hardware.device()
    return cross_entropy(model(images[rows].to(device)), labels[rows].to(device))


# %%
from course_utils.lesson.equality import equal, flat


def train_alone(learning_rate=LEARNING_RATE):
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for rows in my_batches(rank=0, world_size=1):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return flat(model.parameters())


alone = train_alone()

# %% [markdown]
# ### By hand
#
# The two pieces that make data parallelism out of this loop: every rank **starts** with the
# parameters of rank 0, and between `backward` and `step` all ranks **average** their gradients.
# Here all gradients travel together, copied into one vector. Such a vector is called a **bucket**.

# %%
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def start_like_rank_0(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def average_in_one_bucket(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    bucket = parameters_to_vector(gradients)  # a copy of all gradients in one row
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    vector_to_parameters(bucket, gradients)  # and back


# %% [markdown]
# Check the derivation on one step before you train. The reference is the gradient of the first
# global batch in one process.


# %%
def first_gradient(rank):
    model = new_model()
    loss_of(model, my_batches(rank, dist.get_world_size())[0]).backward()
    average_in_one_bucket(model)
    return flat(p.grad for p in model.parameters())


model = new_model()
loss_of(model, whole[0]).backward()
expected = flat(p.grad for p in model.parameters())
print("gradients on 4 ranks within 1e-5 of alone:", equal(expected, launch(first_gradient, 4)))

# %% [markdown]
# Now train. Each rank draws its model from a different seed on purpose; the broadcast has to repair
# that. The steps are the reference's, with one line more.


# %%
def train_by_hand(
    rank,
    synchronise,
    start=start_like_rank_0,
    optimizer_class=torch.optim.SGD,
    learning_rate=LEARNING_RATE,
):
    model = new_model(seed=rank)
    start(model)
    optimizer = optimizer_class(model.parameters(), lr=learning_rate)
    for rows in my_batches(rank, dist.get_world_size()):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        synchronise(model)
        optimizer.step()
    return flat(model.parameters())


# %% [markdown]
# ### With PyTorch
#
# `DistributedDataParallel` wraps the model. The constructor broadcasts the parameters and buffers
# of rank 0. Hooks inside `backward` average the gradients. There is no line left between `backward`
# and `step`. If the model is on a GPU, DDP follows it there.


# %%
def train_with_ddp(rank):
    model = DDP(new_model(seed=rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for rows in my_batches(rank, dist.get_world_size()):
        optimizer.zero_grad()
        loss_of(model, rows).backward()
        optimizer.step()
    return flat(model.parameters())


# %%
for n in (1, 2, 4):
    by_hand = launch(train_by_hand, n, average_in_one_bucket)
    with_ddp = launch(train_with_ddp, n)
    fine = equal(alone, by_hand), equal(alone, with_ddp)
    print("ranks: {}   within 1e-5 of alone: by hand {}, DDP {}".format(n, *fine))

# %% [markdown]
# This is the contract of the whole course: a parallel technique changes where the work is done, not
# what is learned. The largest difference of any of the 39,760 parameters, on any rank, is at most
# 1e-5 after 60 steps. The script from section 2 keeps the contract too, and the network has
# learned:

# %%
saved = torch.load(result, weights_only=True)
print("the script's two ranks within 1e-5 of alone:", equal(alone, [flat(saved.values())]))

test_images, test_labels = mnist.tensors(train=False)
network = MnistNet()
vector_to_parameters(alone, network.parameters())
share = (network(test_images).argmax(1) == test_labels).float().mean().item()
print("more than 80 % of the 10,000 test images right:", share > 0.8)

# %% [markdown]
# ### When the gradients travel: buckets and overlap
#
# DDP does not wait for the end of `backward`. Backward works from the last layer to the first, so
# the gradients of the last layers are ready early. DDP collects ready gradients in buckets, and as
# soon as a bucket is full its all-reduce starts while backward goes on. The communication
# **overlaps** with the computation.
#
# A **communication hook** lets you watch. DDP calls it for each full bucket, and `allreduce_hook`
# does what DDP does by default. The model has 8 layers with 1 MiB of gradients each.
# `bucket_cap_mb=2` asks for buckets of 2 MiB.


# %%
def eight_layers():
    layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]  # 4 * 512 * 512 bytes = 1 MiB
    return nn.Sequential(*layers).to(hardware.device())


# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def watched_step(rank, bucket_cap_mb):
    events = []
    model = DDP(eight_layers(), bucket_cap_mb=bucket_cap_mb)

    def hook(state, bucket):
        events.append(f"all-reduce of {bucket.buffer().nbytes:,} bytes starts")
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)
    for number, layer in enumerate(model.module):
        text = f"gradient of layer {number} computed"
        layer.weight.register_hook(lambda _, text=text: events.append(text))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # DDP lays out its buckets anew after the first step
        events.clear()
        model(torch.ones(4, 512, device=hardware.device())).sum().backward()
        events.append("backward returns")
        optimizer.step()
        events.append("optimizer.step returns")
    return events


# %%
print("\n".join(launch(watched_step, 2, 2)[0]))

# %% [markdown]
# Read the list from the top. Backward computes the gradients of layers 7 and 6, and the first
# all-reduce starts long before layer 0 is reached. When `backward` returns, all buckets have been
# averaged. (On a GPU their averages are *queued* by then, in front of whatever the optimizer will queue:
# the host need not wait.) `optimizer.step` moves no bytes at all. Some texts say that `step` is where the
# processes synchronise; the list shows that it is `backward` ([DDP design
# note](https://docs.pytorch.org/docs/stable/notes/ddp.html), *Internal Design*).
#
# **Predict.** How many buckets do the 8 MiB need, for caps of 1, 2, 4 and 8 MiB? A bucket is closed
# when it has reached its cap. The last entry leaves the cap to DDP: 25 MiB, but only 1 MiB for the
# first bucket, so that the communication starts early
# ([`torch/nn/parallel/distributed.py`](https://github.com/pytorch/pytorch/blob/main/torch/nn/parallel/distributed.py)).

# %% tags=["prediction"]
caps = {"1 MiB": 1, "2 MiB": 2, "4 MiB": 4, "8 MiB": 8, "default": None}
predicted_buckets = {"1 MiB": 8, "2 MiB": 4, "4 MiB": 2, "8 MiB": 1, "default": 2}


def count_buckets(cap):
    return sum("starts" in event for event in launch(watched_step, 2, cap)[0])


compare(
    predicted_buckets,
    {name: count_buckets(cap) for name, cap in caps.items()},
    {"As if all 8 MiB went into the first bucket: its cap is 1 MiB.": {"default": 1}},
)

# %% [markdown]
# Few large buckets send the last bytes late: nothing hides them. Many small ones pay the start-up
# cost of an all-reduce many times. In section 7 you move the size and see what is hidden; the
# further notebook has the same two ways on the clock.

# %% [markdown]
# ## 5. Break it: mistakes that train, and mistakes that hang
#
# Most mistakes in this chapter raise no error. The run goes on, the loss falls, and the model is
# not the one you think it is. The contract from section 4 catches them.
#
# ### Sum instead of mean
#
# `all_reduce` adds. Forget the division, and every gradient is n times too large. **Predict:** with
# SGD, which learning rate in one process gives the same parameters?


# %%
def sum_in_one_bucket(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    bucket = parameters_to_vector(gradients)
    dist.all_reduce(bucket)  # and no division
    vector_to_parameters(bucket, gradients)


summed = launch(train_by_hand, 2, sum_in_one_bucket)
print("within 1e-5 of alone:", equal(alone, summed))
print("within 1e-5 of alone with twice the rate:", equal(train_alone(2 * LEARNING_RATE), summed))

# %% [markdown]
# Now the same mistake with Adam. Adam divides each gradient by a running estimate of its size, so a
# constant factor cancels. If you test with Adam, you do not find this bug. That is why the contract
# is stated for SGD. The repair is the division; `op=dist.ReduceOp.AVG` adds and divides in one
# call.

# %%
adam = (start_like_rank_0, torch.optim.Adam, 0.001)
averaged_adam = launch(train_by_hand, 2, average_in_one_bucket, *adam)[0]
summed_adam = launch(train_by_hand, 2, sum_in_one_bucket, *adam)[0]
print("SGD: sum and mean differ by more than 0.05:", (summed[0] - alone).abs().max().item() > 0.05)
largest = (summed_adam - averaged_adam).abs().max().item()
print("Adam: sum and mean differ by less than 0.001:", largest < 0.001)

# %% [markdown]
# ### A missing broadcast
#
# The gradients are averaged, but each rank began with its own random parameters. **Predict:** do
# the models come closer to each other in 60 steps?


# %%
def no_broadcast(model):
    pass


first, second = launch(train_by_hand, 2, average_in_one_bucket, no_broadcast)
difference_at_start = flat(new_model(seed=0).parameters()) - flat(new_model(seed=1).parameters())
print("the ranks end with the same model:", equal(first, [second]))
print("the difference is that of the start:", equal(first - second, [difference_at_start]))

# %% [markdown]
# They never meet. All ranks take the same step, so the distance between them stays what it was.
# Each step is the average of gradients taken at different points, which is the gradient of neither
# model. The repair is the broadcast at the start, which DDP's constructor does for you.
#
# The seeds were there to make it the same in every run. Without any, it happens by itself: each rank of each
# `launch` begins with a random state of its own, as every process under torchrun does.


# %%
def first_weight_without_a_seed(rank):
    return MnistNet().linear1.weight[0, 0].item()


first, second = launch(first_weight_without_a_seed, 2)
print("built without a seed, the two models begin alike:", first == second)

# %% [markdown]
# ### A collective under `if rank == 0`
#
# Saving and validating are often done by rank 0 alone. If there is a collective inside, rank 0
# waits for partners who are not coming.


# %%
def validate(rank):
    correct = torch.tensor([90.0 + rank], device=hardware.device())
    if rank == 0:
        dist.all_reduce(correct)  # only rank 0 comes here
        print("correct on all ranks:", correct.item())


try:
    launch(validate, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# The repair: every rank calls the collective; only the printing stays under the `if`.


# %%
def validate_together(rank):
    correct = torch.tensor([90.0 + rank], device=hardware.device())
    dist.all_reduce(correct)
    if rank == 0:
        print("correct on all ranks:", correct.item())


_ = launch(validate_together, 2)

# %% [markdown]
# Uneven batches hang for the same reason: a partner does not come, there because it has left the
# training loop. The further notebook shows that, and `Join`, which repairs it.
#
# ### A missing `set_epoch`
#
# A `DataLoader` with a `DistributedSampler` does shuffle. Does it shuffle anew in each epoch?

# %%
from torch.utils.data import DataLoader

sampler = DistributedSampler(range(10_000), num_replicas=2, rank=0)
loader = DataLoader(range(10_000), batch_size=5, sampler=sampler)
forgotten = [next(iter(loader)).tolist() for epoch in range(3)]

remembered = []
for epoch in range(3):
    sampler.set_epoch(epoch)  # before the loader starts the epoch
    remembered.append(next(iter(loader)).tolist())

print("forgotten: ", forgotten)
print("remembered:", remembered)

# %% [markdown]
# Without `set_epoch` every epoch has the same batches in the same order, and each row always meets
# the same neighbours. Nothing warns you.
#
# ### Padded duplicates in an evaluation
#
# Ten test images on four ranks. Suppose the model is right on images 0, 1 and 8, so its accuracy is
# 30 %. The usual code gives every rank a `DistributedSampler` and adds the counts up.

# %%
right = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 1, 0])


def evaluate_with_padding(rank):
    mine = list(DistributedSampler(right, shuffle=False))
    counts = torch.tensor([right[mine].sum(), len(mine)], device=hardware.device())
    dist.all_reduce(counts)
    return counts.tolist()


correct, scored = launch(evaluate_with_padding, 4)[0]
print(f"{correct} of {scored}: {correct / scored:.1%} instead of {right.float().mean():.1%}")

# %% [markdown]
# The sampler padded ten to twelve. Images 0 and 1 were scored twice, and they were easy ones.
# Exercise 3.5 asks for an evaluation that counts each image once.
#
# ### Bug hunt: code from the web
#
# Four snippets. Before you run each cell, say what it does.
#
# **Hunt 1.** "Pass your averaging function to the optimizer." (After the web article *Parallelize Your
# Way to Faster Deep Learning: Exploring DataParallel*, as hunts 2 and 3.)


# %%
def divide_gradients(optimizer, world_size=2):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad /= world_size


try:
    torch.optim.Adam(MnistNet().parameters(), lr=0.001, gradient_averaging_fn=divide_gradients)
except TypeError as error:
    print(error)

# %% [markdown]
# No optimizer of PyTorch has such an argument. Optimizers know nothing about other processes; what
# they find in `.grad` is what they apply.
#
# **Hunt 2.** So call the same function by hand, between `backward` and `step`. "It averages the
# gradients."


# %%
def divide_only(model):
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


first, second = launch(train_by_hand, 2, divide_only)
print("the ranks end with the same model:", equal(first, [second]))

# %% [markdown]
# It divides, but nothing is sent. Each rank trains alone, on half of the data, with half of the
# learning rate. A mean needs the other ranks' numbers. Look for the collective: no collective, no
# averaging.
#
# **Hunt 3.** "Wrap the model in `nn.DistributedDataParallel`. DDP requires several machines."

# %%
try:
    nn.DistributedDataParallel(MnistNet())
except AttributeError as error:
    print(error)

# %% [markdown]
# The class lives in `torch.nn.parallel`. And it needs no second machine: every run in this chapter
# took place on one, with 1, 2 and 4 ranks. It needs a process group, even if the group has one
# rank.
#
# **Hunt 4.** A demonstration of DDP trains `nn.Linear(20, 1)` with `cross_entropy` on targets of shape
# (batch, 1). It runs without an error, on any number of ranks.


# %%
def without_any_exchange(rank):
    torch.manual_seed(0)
    model = nn.Linear(20, 1)
    torch.manual_seed(rank)  # each rank draws its own data
    loss = cross_entropy(model(torch.randn(32, 20)), torch.rand(32, 1))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item() == 0, flat(p.grad for p in model.parameters()), flat(model.parameters())


(zero, gradient, first), (_, _, second) = launch(without_any_exchange, 2)
print("the loss is zero:", zero)
print("the largest gradient:", gradient.abs().max().item())
print("the ranks end with the same model:", equal(first, [second]))

# %% [markdown]
# Cross-entropy over a single class: the softmax of one number is always 1, so the loss is 0 and
# every gradient is exactly zero. Nothing is learned. Worse, the ranks agree perfectly, although
# nothing was exchanged. A test of synchronisation proves something only if the
# gradients of the ranks differ. Check
# yours: training must change the model, and leaving out the exchange must change the result.

# %% [markdown]
# ## 6. Exercises: write the parts of DDP yourself

# %% [markdown]
# Four parts of DDP. A fifth, 3.4, the machinery that overlaps, stands in the further notebook. Every answer runs
# on real ranks: `check` starts them, hands your code fresh random tensors and awkward models, and
# prints one line per requirement. `hint("3.1")` prints the next of three hints. Wherever your code
# runs, the process group is ready: `dist.get_rank()` and `dist.get_world_size()` work.

# %% [markdown]
# ### 3.1 Average the gradients (2 points)
#
# Every rank has run its own backward pass. Each `.grad` now holds the gradient of that rank's loss.
# Replace it by the mean over all ranks, so that every rank takes the same step.
#
# Write that first, for models in which every parameter has a gradient. Then come the awkward ones. A
# **frozen** parameter (`requires_grad=False`) and one that no rank used have no gradient: their `.grad` is
# `None` and stays so. A **tied** parameter is one tensor that two layers share; it has one gradient. And a
# parameter may be used on some ranks only, where batches take different ways through the model. A rank
# that did not use it adds zeros, and ends with the mean as the others do. But it does not see that they have a
# gradient, and all ranks must make the same collectives: let them agree first.


# %% nbgrader={"grade_id": "3.1", "solution": true}
def average_gradients(model: nn.Module) -> None:
    """Replaces every gradient of `model` by its mean over all ranks.

    Called on every rank after `backward()`. Where a rank has no gradient and another one has, it
    counts as zero, and all ranks end with the mean. Where no rank has one, `.grad` stays None. The
    parameters themselves do not change. A tied parameter, one tensor in two layers, is averaged once.
    """
    ### BEGIN SOLUTION
    for parameter in model.parameters():
        users = torch.tensor(parameter.grad is not None, dtype=torch.int, device=parameter.device)
        dist.all_reduce(users)  # every rank makes this call, whatever it has
        if users > 0:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.1-check", "grade": true, "points": 2, "locked": true}
check("3.1", average_gradients)

# %% [markdown]
# ### 3.2 All-reduce on a ring (3 points)
#
# Build `all_reduce` from `send` and `recv`. Cut the tensor into as many chunks as there are ranks.
# Every rank talks to its neighbours only: it sends to the rank on its right and receives from the
# rank on its left. In each of the first n - 1 steps, a rank adds the chunk that arrives to its own.
# After them, each rank owns one chunk that is summed over all ranks: a **reduce-scatter**. In the
# other n - 1 steps the summed chunks travel on round the ring: an **all-gather**.
#
# A step sends one n-th of the tensor. Each rank sends 2(n - 1)/n of the tensor's bytes in all: less
# than twice the tensor, however many ranks there are. The check counts them.


# %% nbgrader={"grade_id": "3.2", "solution": true}
def ring_all_reduce(tensor: Tensor) -> None:
    """Replaces `tensor` by its sum over all ranks, in place.

    `tensor` has the same shape and dtype (floating point or integer) on every rank. Any shape: also
    one with fewer elements than ranks, with none at all, or not contiguous in memory. Any world
    size.

    Communicates with `dist.send`, `dist.recv`, `dist.isend`, `dist.irecv` or
    `dist.batch_isend_irecv` alone, no collective. Each rank sends 2(n-1)/n of the tensor's bytes; chunks may
    differ by one element.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    flat = tensor.contiguous().view(-1)  # the tensor's own memory, or a copy of it
    chunks = flat.tensor_split(world_size)
    for step in range(2 * (world_size - 1)):
        summing = step < world_size - 1  # reduce-scatter first, then all-gather
        outgoing, kept = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(kept) if summing else kept
        both = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        if summing:
            kept += incoming
    tensor.copy_(flat.view_as(tensor))
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.2-check", "grade": true, "points": 3, "locked": true}
check("3.2", ring_all_reduce)

# %% [markdown]
# ### 3.3 Who reads which sample (2 points)
#
# `DistributedSampler` shuffles the indices of the dataset, repeats some so that the ranks' shares are
# equal, and gives each rank every n-th index. It sends nothing: all ranks shuffle with the same
# seed, and so they agree. Write it. Return exactly what
# `DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed)` gives after
# `set_epoch(epoch)`.


# %% nbgrader={"grade_id": "3.3", "solution": true}
def shard_indices(length: int, rank: int, world_size: int, epoch: int, seed: int) -> list[int]:
    """Returns the indices of the samples that `rank` reads in `epoch`, in order.

    `length`, 0 or more, is the number of samples in the dataset. The order of an epoch is
    `torch.randperm(length)`, drawn from a `torch.Generator` of its own with seed `seed + epoch`.
    Every rank gets ceil(length / world_size) indices: where the order is too short, it starts again
    from its beginning, as often as needed. No communication, no process group, and no
    `DistributedSampler`: here you write what it does.
    """
    ### BEGIN SOLUTION
    import math
    from itertools import cycle, islice

    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(length, generator=generator).tolist()
    padded_length = math.ceil(length / world_size) * world_size
    return list(islice(cycle(order), rank, padded_length, world_size))
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.3-check", "grade": true, "points": 2, "locked": true}
check("3.3", shard_indices)

# %% [markdown]
# ### 3.5 Evaluate every image once (3 points)
#
# `DistributedSampler` repeats samples so that the ranks' shares are equal. For training this does
# little harm. For an evaluation it counts some images twice, and the accuracy depends on the number
# of ranks. Share the images out without repeats, and return the accuracy over all of them.
#
# Now the shares differ: a rank may have one image fewer than another, one batch fewer, or no image
# at all. Every rank must still take part in the same collectives.


# %% nbgrader={"grade_id": "3.5", "solution": true}
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> float:
    """Returns the share of `images` (0 to 1) that `model` classifies correctly.

    Called on every rank with the same model and the whole test set: `images` (N, ...) and `labels`
    (N,) int64, N > 0. `model(images)` returns scores (batch, classes). Every image goes through the
    model once, on one rank; no rank takes more than ceil(N / world_size) images, and no batch is
    empty or larger than `batch_size`. Returns the same number, a float, on every rank. The model is in
    evaluation mode meanwhile; afterwards each of its modules is in the mode in which it came (a
    frozen part may be in evaluation mode all the time), nothing else of it has changed, and autograd is
    as it was. No gradients are computed.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    my_images, my_labels = images[rank::world_size], labels[rank::world_size]
    correct = labels.new_zeros(())  # an integer, on the labels' device
    modes = {module: module.training for module in model.modules()}
    model.eval()
    with torch.no_grad():
        for start in range(0, len(my_images), batch_size):
            batch = slice(start, start + batch_size)
            correct += (model(my_images[batch]).argmax(dim=1) == my_labels[batch]).sum()
    for module, mode in modes.items():
        module.training = mode
    dist.all_reduce(correct)
    return correct.item() / len(images)
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.5-check", "grade": true, "points": 3, "locked": true}
check("3.5", evaluate)

# %% [markdown]
# ## 7. See it: when communication hides behind backward
#
# How large should a bucket be? A small model answers. Backward takes the time $T$ and produces the
# gradients at an even pace. With $k$ buckets one is ready every $T/k$. Each all-reduce takes
#
# $$t = a + \frac{2(n-1)}{n}\cdot\frac{\text{bucket bytes}}{\text{bandwidth}} ,$$
#
# where $a$ is its start-up cost, and the link sends one bucket at a time. If $t$ is shorter than
# $T/k$, the link keeps up, and only the last bucket is **exposed**: it ends after backward. If $t$
# is longer, buckets queue up, and every one adds its lag:
#
# $$\text{exposed} = t + (k - 1)\,\max(0,\; t - T/k) .$$


# %%
def exposed_ms(buckets, backward_ms, all_reduce_ms):
    return all_reduce_ms + (buckets - 1) * max(0.0, all_reduce_ms - backward_ms / buckets)


def schedule(buckets, backward_ms, all_reduce_ms):
    """Start and end of each all-reduce, one after the other, bucket by bucket."""
    spans, free = [], 0.0
    for i in range(1, buckets + 1):
        start = max(i * backward_ms / buckets, free)  # ready, and the link is free
        free = start + all_reduce_ms
        spans.append((start, free))
    return spans


# %%
agree = []
for buckets in (1, 2, 7, 40):
    for all_reduce_ms in (0.1, 1.0, 5.0):
        last = schedule(buckets, 30.0, all_reduce_ms)[-1][1]
        agree.append(abs(last - 30.0 - exposed_ms(buckets, 30.0, all_reduce_ms)) < 1e-9)
print("formula and schedule agree:", all(agree))

# %% [markdown]
# The explorer draws the schedule. All its times are the model's, none is measured. Move one slider
# at a time:
#
# * Lower the bandwidth until buckets queue up. From there on only fewer bytes or more backward time
#   help.
# * Raise the world size. From 2 to 4 ranks the traffic grows by half, from 4 to 64 by less than a
#   third.
# * Make the buckets very small and raise the start-up cost. Then make them very large. The best
#   size lies between.

# %%
from course_utils.lesson import explore


def draw_overlap(world_size, million_parameters, bucket_MB, GB_per_s, backward_ms, startup_us):
    buckets = max(1, round(4 * million_parameters / bucket_MB))
    traffic = 2 * (world_size - 1) / world_size * 4 * million_parameters / buckets  # MB
    all_reduce_ms = startup_us / 1000 + traffic / GB_per_s  # MB divided by GB/s is ms
    exposed = exposed_ms(buckets, backward_ms, all_reduce_ms)
    share = exposed / (backward_ms + exposed)
    figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.6))
    ax.barh(1, backward_ms, color=plots.COLORS["backward"], label="backward")
    bars = [(start, end - start) for start, end in schedule(buckets, backward_ms, all_reduce_ms)]
    look = {"facecolor": plots.COLORS["communication"], "edgecolor": "white"}
    ax.broken_barh(bars, (-0.4, 0.8), linewidth=min(1, 20 / buckets), **look)
    ax.axvspan(backward_ms, backward_ms + exposed, zorder=0, **plots.look_of("waiting"))
    ax.set_yticks([1, 0], ["backward", f"all-reduce\n{buckets} x {all_reduce_ms:.2f} ms"])
    ax.set_xlabel("time (ms), simulated")
    ax.set_title(f"Exposed communication: {exposed:.1f} ms, {share:.0%} of the time")
    return figure


explore.Explorer(
    draw_overlap,
    world_size=(2, 64, 8),
    million_parameters=(1, 200, 25),
    bucket_MB=(1, 100, 25),
    GB_per_s=(1.0, 21.0, 10.0),
    backward_ms=(10, 200, 40),
    startup_us=(0, 1000, 100),
)

# %% [markdown]
# *At the start, the upper bar is backward. Under it four all-reduces follow each other, and each
# one begins when its quarter of backward is done. The hatched stripe at the right is the part of the
# last all-reduce that nothing hides.*

# %% [markdown]
# ## 8. On a cluster: the same script under torchrun
#
# On a cluster few people call `mp.spawn`. **torchrun** starts one process per GPU on each machine,
# sets a few environment variables in each, and watches over them.
#
# | variable | what it says |
# |---|---|
# | `RANK` | this process's rank in the whole job |
# | `WORLD_SIZE` | ranks in the whole job |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same two on this machine; `LOCAL_RANK` chooses the GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | where the ranks meet |
#
# `init_process_group` reads them when the meeting place is `env://`, which is the default. The
# script from section 2 does so when it finds `RANK`. Run the unchanged file:

# %%
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
result_of_torchrun = Path("scratch/torchrun.pt")

print(run_in_terminal(*torchrun, *meeting, script, result_of_torchrun), end="")

# %%
saved = torch.load(result_of_torchrun, weights_only=True)
print("torchrun's two ranks within 1e-5 of alone:", equal(alone, [flat(saved.values())]))

# %% [markdown]
# Port 0 in the endpoint asks the operating system for a free port. Many scripts hard-code one,
# often 12355. Two jobs on one machine then collide: *address already in use*.
#
# With two machines of 8 GPUs, you give the same command on both, and the script stays as it is:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 \
#     ddp_mnist.py result.pt
# ```
#
# What changes there:
#
# * **The backend.** With enough GPUs the script chooses NCCL. Collectives then run on the GPU, beside
#   the kernels of backward. That costs the CPU nothing, but it is not free: NCCL's kernels take some
#   multiprocessors and memory bandwidth from those of backward.
# * **The slowest link decides.** A ring passes through every link, and between machines they are
#   slower than inside. The explorer above tells you when that begins to hurt.
# * **The global batch.** The script keeps it and cuts it into smaller shares. If you keep the share
#   of one rank instead, sixteen ranks make a batch sixteen times as large. Then decide what to do
#   with the learning rate.
# * **The data.** Each machine needs to reach it. The sampler needs no change.
# * **One file.** Only rank 0 saves, and `module.` stays out of the names because the script saves
#   the state of `model.module`.
# * **Failures.** When one rank dies, torchrun ends all and can start them again. Then you need a
#   checkpoint to continue from. Chapter 9 is about that.
# * **A whole script.** `03_ddp_further` has one with a `DataLoader`, `set_epoch` and an evaluation.
#   `cluster/train.py` of this repository adds what a long run needs: bfloat16, clipping, checkpoints
#   that are verified, and the way back to them (chapters 8 and 9).

# %% [markdown]
# ### 3.6 Your own script, on several ranks
#
# Chapter 2 gave you `mine/train.py`, which trains on one device. Change it so that `torchrun` can start it on any number
# of ranks:
#
# * `--batch` stays the batch of a step, on all ranks together, and every rank trains on its share of it. No epoch has
#   the order of the one before.
# * On 2 and on 4 ranks the parameters become those of one rank, step by step.
# * The log and the line that is printed have means over all ranks: the loss of an epoch, and the loss on the
#   held-out text, in which each window counts once. Their number may not divide by that of the ranks.
# * One rank writes `log.jsonl` and `model.pt`, from which `Transformer` can be loaded without DDP.
# * With GPUs each rank takes its own, by `LOCAL_RANK`, and gives it to DDP as `device_ids`.
#
# This takes about 25 lines, most of which stand in this chapter. Try it in a terminal as well:
#
# ```
# torchrun --nproc-per-node 2 mine/train.py --text ../data/text/the_long_shed.txt --out mine/second
# ```
#
# `mine.diff(3)` shows what you have changed so far. torchrun sets `OMP_NUM_THREADS=1` unless you set it: PyTorch's CPU
# work then has one thread a rank, so that ranks on one machine do not take each other's cores.

# %%
from course_exercises import mine

check("3.6", mine.script(3))

# %% [markdown]
# ## 9. Remember
#
# 1. DDP is one process per device. Every rank holds the whole model and its own share of the batch.
# 2. Two exchanges make the ranks one model: the broadcast at the start and the mean of the
#    gradients in every backward. `optimizer.step` sends nothing.
# 3. In a ring all-reduce each rank sends 2(n - 1)/n times the gradients' bytes, less than twice,
#    however many ranks there are. Buckets let it hide behind backward.
# 4. All ranks must call the same collectives in the same order. If one does not come, the others
#    wait.
# 5. Test with SGD against one process on the global batch. Falling loss proves little.
#
# **Sources**
#
# * S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB
#   2020, [arXiv 2006.15704](https://arxiv.org/abs/2006.15704): section 3.2 gradient reduction,
#   buckets and overlap.
# * P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of
#   workstations*, Journal of Parallel and Distributed Computing 69, 2009: the lower bound and the
#   ring.
# * PyTorch:
#   [`DistributedDataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
#   [DDP design note](https://docs.pytorch.org/docs/stable/notes/ddp.html),
#   [`torch.distributed`](https://docs.pytorch.org/docs/stable/distributed.html),
#   [`DistributedSampler`](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler),
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
