# %% [markdown]
# # 3. Distributed data parallel: equal ranks, no master
#
# In chapter 2 one process drove all devices, and the first device carried most of the load. In this chapter every
# device gets a process of its own, with its own copy of the model, its own optimizer and its own share of the data.
# In a training step these processes exchange one thing: gradients. PyTorch calls this **distributed data parallel**,
# DDP for short. It is the usual way to train a model that fits on one device, on one machine and on thousands.
#
# You write four parts of it: the average, the ring, the sampler and the evaluation. The last exercise is the goal of
# the chapter: `torchrun` starts your own training script on several ranks, and it ends with the same parameters as
# training in one process. `03_ddp_further` adds overlap on the clock, gradient accumulation, uneven ranks and DDP's
# own machinery.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch03
from course_utils.launch import launch
from course_utils.lesson import mnist
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace

hardware.report()

# %% [markdown]
# ## 1. The factory: four equal buildings
#
# Each of four buildings has the whole line, a copy of the blueprint and its own share of the material. During a shift
# each building writes change notes: how it would change the blueprint. In the evening a round of trucks brings every
# building the average of all notes, and each applies it to its own copy. The copies were equal in the morning, so
# they are equal in the evening, and no blueprint had to travel that day.

# %%
ch03.ring_road()
plt.show()

# %% [markdown]
# *Trucks carry change notes to the next building, and from the last one back to the first. No building is special.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | the buildings that join a round | **process group** | the ranks that communicate with each other |
# | on the first morning building 0 sends its blueprint to all | **broadcast** | rank 0's parameters are copied to all ranks |
# | delivery plan | **DistributedSampler** | says which samples belong to which rank |
# | a full truckload of notes | **bucket** | gradients of several layers in one message |

# %% [markdown]
# ## 2. The smallest real run: two ranks average one gradient
#
# The model below has one parameter, and its loss is the parameter times the input. Rank 0 has the input 1 and rank 1
# the input 2, so these are their gradients, too.


# %%
def average_one_gradient(rank):
    weight = torch.ones(1, device=hardware.device(), requires_grad=True)
    (weight * (rank + 1)).sum().backward()
    own = weight.grad.item()
    dist.all_reduce(weight.grad)  # in place: the sum over all ranks
    weight.grad /= dist.get_world_size()
    return own, weight.grad.item()


launch(average_one_gradient, 2)

# %% [markdown]
# Rank 0 computed 1, rank 1 computed 2, and both end with 1.5: the gradient of the mean loss over both inputs. Both
# ran the same program and made the same calls in the same order. No rank was in charge.
#
# ### Who takes part
#
# `launch` has called `dist.init_process_group` before your function begins. In this call, the **rendezvous**, the
# processes meet at an agreed place, a file or a port of one machine, and learn each other's addresses. All processes
# that met there form the **default process group**, in which a collective runs unless you name another group. The
# **backend** of a group is the library that moves its bytes: **gloo** between CPUs, **NCCL** between NVIDIA GPUs.
#
# You can now write the heart of DDP. Wherever your code runs, the process group is ready: `dist.get_rank()` and
# `dist.get_world_size()` work.

# %% [markdown]
# ### 3.1 Average the gradients (2 points)
#
# Every rank has run its own backward pass, and each `.grad` holds the gradient of that rank's loss. Replace it by the
# mean over all ranks, so that every rank takes the same step.
#
# First write it for models in which every parameter has a gradient. Then come the awkward ones:
#
# * A **frozen** parameter (`requires_grad=False`) has no gradient, and a parameter that no rank used has none either.
#   Their `.grad` is `None` and stays so.
# * A **tied** parameter is one tensor that two layers share. It has one gradient.
# * A parameter may be used only on some ranks, because their batches take another way through the model. A rank that
#   did not use it adds zeros and ends with the mean, as the others do. It cannot see that the others have a gradient,
#   and all ranks must make the same collective calls: let them agree first.
#
# `hint("3.1")` prints the next of three hints.


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
# ## 3. Predict, then measure: the bytes of an average
#
# ### Eight collectives
#
# A letter says whose data a block holds, a digit which piece of it. Σ is a sum over all ranks.

# %%
with_root = ["broadcast", "scatter", "gather", "reduce"]
without = ["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
plots.before_and_after(with_root + without)
plt.show()

# %% [markdown]
# *Left: the four with a **root**, a rank at the centre, here rank 0. Right: four in which all ranks do the same.* An
# `all_reduce` consists of two others: `reduce_scatter` leaves a piece of the sum on each rank, and `all_gather` then
# brings the pieces to all.
#
# ### All-reduce through rank 0
#
# A collective says what the ranks hold afterwards. How the bytes travel is left to the backend. The first idea is a
# star: all ranks send their tensor to rank 0, which adds them up and sends the sum back. `Trace` records the
# **payload** of each call, the bytes that this rank hands over.


# %%
def sum_through_rank_0(rank):
    x = torch.ones(1000, device=hardware.device())
    with Trace() as trace:
        if rank == 0:
            others = range(1, dist.get_world_size())
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
# **Predict** how many bytes rank 0 and rank 1 send. The tensor has 1,000 float32 numbers, and there are four ranks.

# %% tags=["prediction"]
predicted = {"rank 0 sends": 3 * 4_000, "rank 1 sends": 4_000}

# %%
sent = launch(sum_through_rank_0, 4)
measured = {"rank 0 sends": sent[0], "rank 1 sends": sent[1]}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if one message reached all ranks: each gets one of its own.": {"rank 0 sends": 4_000},
        "That is sent plus received; rank 1 only receives the sum.": {"rank 1 sends": 8_000},
    },
)

# %% [markdown]
# Rank 0 sends the tensor n - 1 times and receives just as many. Each rank that you add makes the all-reduce slower.
#
# ### All-reduce on a ring
#
# In a ring all ranks do the same. Cut the tensor into n pieces. In each step every rank sends one piece to its right
# neighbour and receives one from its left. For n - 1 steps it adds what arrives to its own piece. Then the sums go
# round: for another n - 1 steps what arrives replaces its own. Move the slider through the steps.

# %%
from course_utils.lesson import explore

explore.Explorer(plots.ring_step, step=(1, 7, 2))

# %% [markdown]
# *The numbers in a block say whose parts it holds. In each step each rank sends another piece, and all links are
# equally busy. After step 3 each rank has one complete sum (Σ).*
#
# **Predict**, for a tensor of 6,400 bytes, how many bytes each rank sends in all: in a ring of 4, and in a ring of
# 64.

# %% tags=["prediction"]
predicted = {"ring of 4": 9_600, "ring of 64": 12_600}


# %%
def sent_on_ring(ranks, size):
    pieces = torch.empty(size, dtype=torch.uint8).tensor_split(ranks)
    return sum(pieces[step % ranks].nbytes for step in range(2 * (ranks - 1)))


measured = {f"ring of {ranks}": sent_on_ring(ranks, 6_400) for ranks in (4, 64)}

# %%
compare(
    predicted,
    measured,
    likely={
        "The whole tensor in each step: a step sends one piece of n.": {
            "ring of 4": 38_400,
            "ring of 64": 806_400,
        },
        "Half of the way: the sums have to go round, too.": {
            "ring of 4": 4_800,
            "ring of 64": 6_300,
        },
    },
)

# %% [markdown]
# In each of $2(n-1)$ steps a rank sends a piece of $S/n$ bytes. In all that makes
#
# $$\text{bytes sent by each rank} = 2\,(n - 1)\,\frac{S}{n} .$$
#
# That is 1.5 tensors on 4 ranks, 1.97 on 64, and never 2. Where the ranks themselves add, no all-reduce lets its
# busiest rank send less ([Patarasuk and Yuan 2009](https://doi.org/10.1016/j.jpdc.2008.09.002)). Some switches add on
# the way; then a rank sends its tensor once.

# %% [markdown]
# ### 3.2 All-reduce on a ring (3 points)
#
# Build `all_reduce` from messages between neighbours. Cut the tensor into as many chunks as there are ranks. In each
# of the first n - 1 steps a rank sends a chunk to its right and adds the chunk that arrives from its left to its own.
# Now each rank has one chunk that is summed over all ranks: this was a **reduce-scatter**. In the other n - 1 steps
# the summed chunks go round: an **all-gather**. The check counts the bytes.


# %% nbgrader={"grade_id": "3.2", "solution": true}
def ring_all_reduce(tensor: Tensor) -> None:
    """Replaces `tensor` by its sum over all ranks, in place.

    `tensor` has the same shape and dtype (floating point or integer) on every rank. Any shape: also
    one with fewer elements than ranks, with none at all, or not contiguous in memory. Any world
    size.

    Communicates only by `dist.send`, `dist.recv`, `dist.isend`, `dist.irecv` or
    `dist.batch_isend_irecv`, and by no collective. Each rank sends 2(n-1)/n of the tensor's bytes; chunks may
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
# ### What DDP hands over in a step
#
# `DistributedDataParallel` wraps a model and averages its gradients. You will read that `optimizer.step()` is where
# the processes synchronise. **Predict** how many bytes of float32 a rank hands over to collectives, with a network of
# 39,760 parameters: in `backward()` after a forward pass of 8 rows, in `backward()` after 64 rows, and in
# `optimizer.step()`.

# %% tags=["prediction"]
predicted = {
    "backward(), 8 rows": 4 * 39_760,
    "backward(), 64 rows": 4 * 39_760,
    "optimizer.step()": 0,
}

# %%
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.lesson.models import MnistNet


def bytes_of_ddp(rank, rows=8):
    device = hardware.device()
    model = DDP(MnistNet().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.ones(rows, 784, device=device)).sum()
    with Trace() as backward:
        loss.backward()
    with Trace() as step:
        optimizer.step()
    calls = [trace.record().calls for trace in (backward, step)]
    return [sum(call.bytes for call in some if call.dtype == "float32") for some in calls]


eight_rows, step = launch(bytes_of_ddp, 2)[0]
measured = {"backward(), 8 rows": eight_rows, "optimizer.step()": step}
measured["backward(), 64 rows"] = launch(bytes_of_ddp, 2, 64)[0][0]

# %%
compare(
    predicted,
    measured,
    likely={
        "As if activations travelled: gradients do, and they have the parameters' shapes.": {
            "backward(), 64 rows": 8 * 4 * 39_760
        },
        "The gradients have been averaged in `backward` already.": {"optimizer.step()": 4 * 39_760},
    },
)

# %% [markdown]
# The gradients travel in `backward`, and `step` sends nothing. The bytes depend on the model and not on the batch, so
# a larger batch makes communication a smaller share of the step. Before the first step DDP's constructor has sent the
# parameters once: it copies those of rank 0 to all.

# %% [markdown]
# ## 4. By hand, then with PyTorch: the parameters of one process
#
# ### A share of the samples for each rank
#
# Every rank can read the whole data set, and trains on its own part. `DistributedSampler` says which samples these
# are, and gives every rank the same number, so that all take the same number of steps. **Predict**, for ten samples
# and four ranks, how many samples rank 3 gets, and how many all ranks read together.

# %% tags=["prediction"]
predicted = {"samples of rank 3": 3, "samples of all ranks": 12}

# %%
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

shares = [list(DistributedSampler(range(10), 4, rank, shuffle=False)) for rank in range(4)]
measured = {"samples of rank 3": len(shares[3]), "samples of all ranks": sum(map(len, shares))}

# %%
compare(
    predicted,
    measured,
    likely={"Shares of 3, 3, 2 and 2 are unequal.": {"samples of rank 3": 2}},
)

# %%
for rank, share in enumerate(shares):
    print(f"rank {rank} reads samples {share}")

# %% [markdown]
# Each rank reads in **strides**: every fourth sample, not a block. And samples 0 and 1 are read twice. This
# **padding** makes the shares equal; section 5 shows where it does harm.
#
# With shuffling all ranks draw the same permutation, from the seed `seed + epoch`, and take their strides from it.
# They agree without a message.

# %% [markdown]
# ### 3.3 Who reads which sample (2 points)
#
# Write what `DistributedSampler` does. Return exactly the indices that
# `DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed)` gives after `set_epoch(epoch)`.


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
# ### Equal shares: the mean of the means is the mean
#
# `cross_entropy` is a mean over its batch. Rank $r$ holds $B/n$ of the $B$ rows and computes their mean loss $L_r$.
# The loss of the **global batch**, the rows of all ranks together, is
#
# $$L = \frac{1}{B}\sum_{i=1}^{B} \ell_i = \frac{1}{n}\sum_{r=0}^{n-1} L_r
# \qquad\text{so}\qquad \nabla L = \frac{1}{n}\sum_{r=0}^{n-1} \nabla L_r .$$
#
# The average of the ranks' gradients is the gradient of the global batch. With unequal shares it is not, because the
# rows of a small share would count more. The next cells train the reference: one process, on the global batch.

# %%
from torch.nn.functional import cross_entropy

from course_utils.lesson.equality import check_equal, flat, largest_difference

EPOCHS, GLOBAL_BATCH, LEARNING_RATE = 3, 128, 0.2
data = TensorDataset(*mnist.tensors(train=True, limit=20 * GLOBAL_BATCH))


def batches_of(rank, world_size):
    sampler = DistributedSampler(data, world_size, rank, seed=0)
    return DataLoader(data, GLOBAL_BATCH // world_size, sampler=sampler)


def new_model(seed=0):
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(seed)
    return MnistNet().to(hardware.device())


# %%
def loss_of(model, images, labels):
    device = hardware.device()
    return cross_entropy(model(images.to(device)), labels.to(device))


def train(model, batches, average=lambda model: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(EPOCHS):
        batches.sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in batches:
            optimizer.zero_grad()
            loss_of(model, images, labels).backward()
            average(model)
            optimizer.step()
    return flat(model.parameters())


alone = train(new_model(), batches_of(rank=0, world_size=1))

# %% [markdown]
# ### By hand
#
# Two things turn this loop into data parallelism. Every rank starts with the parameters of rank 0, and between
# `backward` and `step` all ranks average their gradients. Here all gradients travel together, copied into one vector,
# the bucket. Each rank draws its first parameters from another seed on purpose, so that a missing broadcast would
# show.

# %%
from torch.nn.utils import parameters_to_vector, vector_to_parameters


@torch.no_grad()  # the parameters are overwritten, and autograd is not to record it
def start_like_rank_0(model):
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor, src=0)


def average_in_one_bucket(model):
    gradients = [parameter.grad for parameter in model.parameters()]
    bucket = parameters_to_vector(gradients)  # a copy of all gradients in one row
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    vector_to_parameters(bucket, gradients)  # and back


def train_by_hand(rank, average=average_in_one_bucket, start=start_like_rank_0):
    model = new_model(seed=rank)
    start(model)
    return train(model, batches_of(rank, dist.get_world_size()), average)


# %% [markdown]
# ### With PyTorch
#
# DDP's constructor broadcasts the parameters and buffers of rank 0, and its hooks average the gradients inside
# `backward`. The loop is that of one process.


# %%
def train_with_ddp(rank):
    model = DDP(new_model(seed=rank))
    return train(model, batches_of(rank, dist.get_world_size()))


print("largest difference of a parameter, on any rank, from one process")
for n in (1, 2, 4):
    by_hand = check_equal(alone, launch(train_by_hand, n))
    with_ddp = check_equal(alone, launch(train_with_ddp, n))
    print(f"world size {n}, by hand: {by_hand}   with DDP: {with_ddp}")
apart = launch(train_by_hand, 2, lambda model: None)
print("world size 2, without the average:", largest_difference(alone, apart))

# %% [markdown]
# This is the contract of the whole course: a parallel technique changes where the work is done, and not what is
# learned. After 60 steps the 39,760 parameters differ by rounding only. Without the average the difference is 0.085.
#
# ### As a script, under torchrun
#
# `mp.spawn` cannot start a function of a notebook. It sends the function **pickled by reference**: the new process
# gets its name and looks it up in its own `__main__`, which is empty.

# %%
import torch.multiprocessing as mp

from course_utils.lesson.terminal import caught_terminal, scratch, torchrun


def hello(rank):
    print("hello from rank", rank)


with caught_terminal() as terminal:
    try:
        mp.spawn(hello, nprocs=1)
    except mp.ProcessExitedException as error:
        print("the cell says:    ", error)
error = next(line for line in terminal if line.startswith("AttributeError"))
print("the terminal says:", error.split(" (")[0])

# %% [markdown]
# `launch` sends the code itself. The usual way is a file and **torchrun**, which starts it once for each rank and
# tells each its number through the environment. The next cells write such a script and run it. The numbered lines are
# all that a script for one process does not have.

# %%
script, result = scratch() / "ddp_mnist.py", scratch() / "two_ranks.pt"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/ddp_mnist.py
"""Trains on MNIST. torchrun --nproc-per-node 2 ddp_mnist.py result.pt"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course_utils.lesson import mnist
from course_utils.lesson.models import MnistNet

EPOCHS, GLOBAL_BATCH = 3, 128

local_rank = int(os.environ["LOCAL_RANK"])  # 1. a GPU for each rank of this machine
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")  # 2. the rendezvous
rank, world_size = dist.get_rank(), dist.get_world_size()

data = TensorDataset(*mnist.tensors(train=True, limit=20 * GLOBAL_BATCH))
sampler = DistributedSampler(data, seed=0)  # 3. this rank's samples, and its part of the batch
batches = DataLoader(data, GLOBAL_BATCH // world_size, sampler=sampler)
torch.manual_seed(0)
model = MnistNet().to(device)
parallel = DistributedDataParallel(model, device_ids=[local_rank] if gpu else None)  # 4.
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)  # 5. another order in each epoch
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(parallel(images.to(device)), labels.to(device))
        loss.backward()  # 4. averages the gradients: the forward pass went through the wrapper
        optimizer.step()

if rank == 0:  # 6. all ranks have the same parameters, and one of them saves
    torch.save(model.state_dict(), sys.argv[1])
    print(f"{world_size} ranks trained for {EPOCHS} epochs; rank 0 saved the model")
dist.destroy_process_group()  # 7. all ranks are done

# %%
print(torchrun(2, script, result), end="")
saved = torch.load(result, weights_only=True)
print("largest difference from one process:", check_equal(alone, [flat(saved.values())]))

# %% [markdown]
# ### When the gradients travel: buckets and overlap
#
# DDP does not wait for the end of `backward`. Backward works from the last layer to the first, so the gradients of
# the last layers are ready early. As soon as a bucket is full, its all-reduce starts, and backward goes on:
# communication **overlaps** with computation. A **communication hook**, which DDP calls for each full bucket, lets
# you watch. The model has 4 layers with 1 MiB of gradients each, and `bucket_cap_mb=1` asks for buckets of 1 MiB.

# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def watched_backward(rank):
    layers, events = [nn.Linear(512, 512, bias=False) for _ in range(4)], []
    model = DDP(nn.Sequential(*layers).to(hardware.device()), bucket_cap_mb=1)

    def hook(state, bucket):
        events.append(f"all-reduce of {bucket.buffer().nbytes:,} bytes starts")
        return allreduce_hook(state, bucket)  # what DDP does by default

    model.register_comm_hook(None, hook)
    for number, layer in enumerate(layers):
        text = f"gradient of layer {number} computed"
        layer.weight.register_hook(lambda _, text=text: events.append(text))
    for _ in range(2):  # DDP lays out its buckets anew after the first step
        events.clear()
        model(torch.ones(4, 512, device=hardware.device())).sum().backward()
    return [*events, "backward returns"]


print("\n".join(launch(watched_backward, 2)[0]))

# %% [markdown]
# Three of four all-reduces start before the last gradient is computed. When `backward` returns, all have ended. (On a
# GPU they are queued by then, in front of whatever the optimizer will queue.) The default cap is 25 MiB, and 1 MiB
# for the first bucket, so that communication starts early. Section 7 asks how large a bucket should be.

# %% [markdown]
# ## 5. Break it: mistakes that raise no error
#
# With most mistakes of this chapter the run goes on and the loss falls, but the model is not the one that you think it
# is. A test of the contract finds them.
#
# ### Sum instead of mean
#
# `all_reduce` adds. Without the division, two ranks get gradients that are twice the mean. SGD subtracts the gradient
# times the learning rate. Adam first divides it by a running estimate of its size. **Predict** for each of them how
# many times as long the first step is as with the mean.

# %% tags=["prediction"]
predicted = {"SGD": 2, "Adam": 1}


# %%
def first_step(rank, optimizer_class, divisor):
    model = new_model()
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    before = flat(model.parameters())
    images, labels = next(iter(batches_of(rank, 2)))
    loss_of(model, images, labels).backward()
    for gradient in [parameter.grad for parameter in model.parameters()]:
        dist.all_reduce(gradient)
        gradient /= divisor
    optimizer.step()
    return (flat(model.parameters()) - before).norm().item()


measured = {}
for optimizer_class in (torch.optim.SGD, torch.optim.Adam):
    summed, averaged = (launch(first_step, 2, optimizer_class, n)[0] for n in (1, 2))
    measured[optimizer_class.__name__] = round(summed / averaged, 2)

# %%
compare(
    predicted,
    measured,
    likely={
        "Adam divides by an estimate that is doubled as well, so the factor cancels.": {"Adam": 2}
    },
)

# %% [markdown]
# With SGD the mistake doubles the learning rate. Adam hides it, so a test with Adam misses it. That is why the
# contract is stated for SGD.
#
# ### A missing broadcast
#
# The gradients are averaged, but each rank began with random parameters of its own. Without a seed in the script this
# happens by itself. **Predict** how far apart the two models are after 60 steps, as a multiple of the distance at the
# start.

# %% tags=["prediction"]
predicted = {"times as far apart": 1.0}

# %%
first, second = launch(train_by_hand, 2, average_in_one_bucket, lambda model: None)
at_start = flat(new_model(seed=0).parameters()) - flat(new_model(seed=1).parameters())
measured = {"times as far apart": round(((first - second).norm() / at_start.norm()).item(), 2)}

# %%
compare(
    predicted,
    measured,
    likely={"They never meet: all ranks take the same step.": {"times as far apart": 0.0}},
)

# %%
print("largest difference from one process:     ", largest_difference(alone, [first, second]))
print("the difference of the two has changed by:", check_equal(at_start, [first - second]))

# %% [markdown]
# All ranks take the same step, so each keeps its distance from the others. And each step is an average of gradients
# taken at two different points, which is the gradient of neither model. DDP's constructor makes the broadcast for
# you.
#
# ### A missing `set_epoch`
#
# `DistributedSampler` shuffles by default. **Predict**: in how many different orders does this loader read the
# samples, if it is used for three epochs?

# %% tags=["prediction"]
predicted = {"orders in 3 epochs": 1}

# %%
sampler = DistributedSampler(range(10_000), num_replicas=2, rank=0)
loader = DataLoader(range(10_000), batch_size=5, sampler=sampler)
first_batches = [next(iter(loader)).tolist() for epoch in range(3)]
measured = {"orders in 3 epochs": len(set(map(tuple, first_batches)))}

# %%
compare(
    predicted,
    measured,
    likely={"Nobody tells the sampler that a new epoch begins.": {"orders in 3 epochs": 3}},
)

# %% [markdown]
# Nothing warns you. Tell the sampler the epoch before it begins. If you ask the loader to shuffle, you get an error:

# %%
for epoch in range(3):
    sampler.set_epoch(epoch)
    print(f"epoch {epoch} begins with samples", next(iter(loader)).tolist())
try:
    DataLoader(range(10_000), shuffle=True, sampler=sampler)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# ### Samples that count twice in an evaluation
#
# A model is right on 3 of 10 test images: on images 0, 1 and 8. The usual code gives each of four ranks a
# `DistributedSampler` and adds the counts up.

# %%
right = torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 1, 0])


def evaluate_with_padding(rank):
    mine = list(DistributedSampler(right, shuffle=False))
    counts = torch.tensor([right[mine].sum(), len(mine)], device=hardware.device())
    dist.all_reduce(counts)
    return counts.tolist()


correct, scored = launch(evaluate_with_padding, 4)[0]
print(f"{correct} of {scored} are right: {correct / scored:.1%} in place of 30.0%")

# %% [markdown]
# The sampler has padded ten samples to twelve. Images 0 and 1 count twice, and the model is right on both.

# %% [markdown]
# ### 3.5 Evaluate every image once (3 points)
#
# Share the images out without repeats, and return the accuracy over all of them, which may not depend on the number
# of ranks. Now the shares differ: a rank may have one image fewer than another, one batch fewer, or no image at all.
# Every rank must still take part in the same collectives.


# %% nbgrader={"grade_id": "3.5", "solution": true}
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, batch_size: int) -> float:
    """Returns the share of `images` (0 to 1) that `model` classifies correctly.

    Called on every rank with the same model and the whole test set: `images` (N, ...) and `labels`
    (N,) int64, N > 0. `model(images)` returns scores (batch, classes). Returns the same number, a
    float, on every rank.

    * Every image goes through the model once, on one rank, and no rank takes more than
      ceil(N / world_size) images. No batch is empty or larger than `batch_size`.
    * The model is in evaluation mode meanwhile, and no gradients are computed.
    * Afterwards each of its modules is in the mode in which it came (a frozen part may be in
      evaluation mode all the time). Nothing else about the model changes, and autograd's mode is restored.
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
# ### Whose loss stands in the log?
#
# Each rank computes the loss of its own rows. If rank 0 writes `loss.item()` into the log, the others' rows are
# missing.


# %%
def first_loss(rank, world_size):
    images, labels = next(iter(batches_of(rank, world_size)))
    return loss_of(new_model(), images, labels).detach()


def first_losses(rank):
    own = first_loss(rank, world_size=2)
    mean = own.clone()
    dist.all_reduce(mean)
    return own.item(), mean.item() / 2


for rank, (own, mean) in enumerate(launch(first_losses, 2)):
    print(f"rank {rank}: its own loss {own:.3f}, mean over the ranks {mean:.3f}")
print(f"one process: {first_loss(rank=0, world_size=1):.3f}")

# %% [markdown]
# A mean of means is right here, because the shares are equal. Where they differ, as in 3.5, add up the rows' losses
# and the numbers of rows over the ranks, then divide.
#
# ### Bug hunt: an average without a collective
#
# Some tutorials say that an optimizer averages the gradients over GPUs if you hand it a function as
# `gradient_averaging_fn`. No optimizer of PyTorch has this argument, and the call raises a TypeError. So call the
# function by hand, between `backward` and `step`. Does it average?


# %%
def divide_gradients(model, world_size=2):
    for parameter in model.parameters():
        parameter.grad /= world_size


first, second = launch(train_by_hand, 2, divide_gradients)
print("largest difference between the ranks:", largest_difference(first, [second]))
print("largest difference from one process: ", largest_difference(alone, [first, second]))

# %% [markdown]
# The function divides, but it sends nothing. Each rank trains alone, on half of the data and with half of the learning
# rate. Look for the collective: without one there is no average over ranks. And test the other way round, too: if you
# leave the exchange out, the result has to change.
#
# You will also read `nn.DistributedDataParallel(model)`, and that DDP needs several machines. The class is in
# `torch.nn.parallel`. It needs a process group, and all ranks of a group may be on one machine, as in this chapter.

# %% [markdown]
# ## 6. Exercises
#
# | exercise | points | where it stands |
# |---|---|---|
# | 3.1 Average the gradients | 2 | section 2 |
# | 3.2 All-reduce on a ring | 3 | section 3 |
# | 3.3 Who reads which sample | 2 | section 4 |
# | 3.4 DDP that overlaps | 5 | `03_ddp_further`, section 4 |
# | 3.5 Evaluate every image once | 3 | section 5 |
# | 3.6 Your own script, on several ranks | | section 8 |
# | 3.7 Your own script: accumulate, and count characters | | `03_ddp_further`, section 8 |
# | 3.8 Where the time of a step goes | 2 | `03_ddp_further`, section 4 |

# %% [markdown]
# ## 7. See it: how large should a bucket be?
#
# Backward takes the time $T$ and produces the gradients, $S$ bytes, at an even pace. With $k$ buckets one is ready
# every $T/k$, and a ring sends it in $2(n-1)$ steps. Each step costs a start-up time $a$ and the time of its bytes:
#
# $$t = 2(n-1)\left(a + \frac{S/k}{n \cdot \text{bandwidth}}\right) .$$
#
# The link sends one bucket at a time. If $t$ is shorter than $T/k$, it keeps up, and only the last bucket is
# **exposed**: it ends after backward. If $t$ is longer, buckets queue up, and each adds its lag:
#
# $$\text{exposed} = t + (k - 1)\,\max(0,\; t - T/k) .$$


# %%
def schedule(buckets, backward_ms, all_reduce_ms):
    """Start and end of each all-reduce: the bucket is ready, and the link is free."""
    spans, free = [], 0.0
    for i in range(1, buckets + 1):
        start = max(i * backward_ms / buckets, free)
        free = start + all_reduce_ms
        spans.append((start, free))
    return spans


def draw_overlap(ranks, bucket_MB, GB_per_s, backward_ms):
    buckets = max(1, round(100 / bucket_MB))  # of a model with 100 MB of gradients
    piece_MB = 100 / buckets / ranks
    all_reduce_ms = 2 * (ranks - 1) * (0.01 + piece_MB / GB_per_s)  # a is 10 µs
    return ch03.overlap(schedule(buckets, backward_ms, all_reduce_ms), backward_ms)


explore.Explorer(
    draw_overlap,
    ranks=(2, 256, 8),
    bucket_MB=(1, 100, 25),
    GB_per_s=(1.0, 21.0, 10.0),
    backward_ms=(10, 200, 40),
)

# %% [markdown]
# *At the start: above, backward; below, four all-reduces, each begun when its quarter of backward is done. The hatched stripe is the
# part of the last one that does not overlap with it.* All times are the model's. Move one slider at a time:
#
# * With 8 ranks, buckets of 1 MB leave less exposed than DDP's 25 MiB. With 256 ranks they queue up, because each
#   costs 510 start-ups, and buckets of 25 MB are best.
# * Lower the bandwidth until the link falls behind. From there on only fewer bytes or more backward time help.
#
# So the default is a compromise for many kinds of clusters. The model leaves out that an all-reduce takes
# multiprocessors and memory bandwidth of the GPU from backward: measure before you change the size.

# %% [markdown]
# ## 8. On a cluster: torchrun on every machine
#
# torchrun starts one process for each GPU of its machine, watches over them, and sets these variables:
#
# | variable | what it says |
# |---|---|
# | `RANK`, `WORLD_SIZE` | this process's number, and how many there are on all machines |
# | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | the same on this machine; `LOCAL_RANK` chooses the GPU |
# | `MASTER_ADDR`, `MASTER_PORT` | where the ranks meet; `init_process_group` reads them |
#
# On two machines with 8 GPUs each you give the same command on both, and the script of section 4 stays as it is:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 ddp_mnist.py result.pt
# ```
#
# * **The port.** On one machine, `--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0` lets the system choose a free one.
#   Scripts that fix a port, often 12355, collide when two run at once: *address already in use*.
# * **The global batch.** The script keeps it and cuts it into smaller shares. If you keep a rank's share instead,
#   sixteen ranks make a batch sixteen times as large, and you have to adapt the learning rate (`03_ddp_further`).
# * **A download.** If every rank downloads the data, all write to the same file. Let rank 0 do it, and let the others
#   wait in `dist.barrier()`, which all ranks call.
# * **The slowest link decides.** A ring passes through every link, and links between machines are slower than those
#   inside.
# * **Failures.** When one rank dies, torchrun ends all and can start them again; the script then loads its checkpoint
#   (chapter 9).

# %% [markdown]
# ### 3.6 Your own script, on several ranks
#
# Chapter 2 gave you `mine/train.py`, which trains on one device. Read its 170 lines once, and change it so that
# `torchrun` can start it on any number of ranks that divides `--batch`. About 25 lines change.
#
# | in `mine/train.py` | what it has to do | where you have seen it |
# |---|---|---|
# | `device` | each rank takes its own GPU by `LOCAL_RANK`, if there are any, and gives it to DDP as `device_ids` | section 4, line 1 of the script |
# | process group | made before all that needs the ranks, left at the end | section 4, lines 2 and 7 |
# | `batches` | `--batch` is the batch of all ranks together, and no epoch has the order of the one before | section 4, lines 3 and 5; section 5 |
# | `model` | after each step all ranks have the same parameters as training in one process | section 4, line 4 |
# | `summed`, the loss of an epoch | the mean over all ranks | section 5, *Whose loss* |
# | `held_out_batches`, `evaluate` | each window counts once, also where their number does not divide by that of the ranks | exercise 3.5 |
# | `log.jsonl`, `model.pt`, `print` | rank 0 alone writes them; `Transformer` can load `model.pt` without DDP | section 4, line 6 |
#
# Try it in a terminal as well:
#
# ```
# torchrun --nproc-per-node 2 mine/train.py --text ../data/text/the_long_shed.txt --out mine/second
# ```
#
# `mine.diff(3)` shows what you have changed so far. torchrun warns you that it sets `OMP_NUM_THREADS=1`: PyTorch's CPU
# work then has one thread a rank, so that ranks on one machine do not take each other's cores. Set the variable
# yourself, and the warning goes away. If you get stuck, `hint("3.6")` helps, and `cluster/train.py` is a complete
# script of this kind.

# %%
from course_exercises import mine

check("3.6", mine.script(3))

# %% [markdown]
# ## 9. Remember
#
# 1. DDP is one process per device. Every rank holds the whole model and reads its own share of the batch.
# 2. Two exchanges keep the models of all ranks equal: the broadcast at the start, and the mean of the gradients in
#    every `backward`. `optimizer.step` sends nothing.
# 3. In a ring each rank sends 2(n - 1)/n times the gradients' bytes, less than twice, however many ranks there are.
#    With buckets most of this overlaps with backward.
# 4. All ranks make the same collective calls in the same order. Without a collective there is no average.
# 5. Test with SGD against one process on the global batch. A falling loss proves little.
#
# **Sources**
#
# * S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020, [arXiv
#   2006.15704](https://arxiv.org/abs/2006.15704): section 3.2 gradient reduction, buckets and overlap.
# * P. Patarasuk and X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, Journal of
#   Parallel and Distributed Computing 69, 2009: the lower bound and the ring.
# * PyTorch:
#   [`DistributedDataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
#   [DDP design note](https://docs.pytorch.org/docs/stable/notes/ddp.html),
#   [`torch.distributed`](https://docs.pytorch.org/docs/stable/distributed.html),
#   [`DistributedSampler`](https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler),
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
