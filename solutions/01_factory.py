# %% [markdown]
# # 1. Two ways to grow a factory
#
# There are two basic ways to train one model on more than one processor. With **data parallelism**
# every processor has a copy of the model and a share of the data. With **model parallelism** every
# processor has a part of the model, and all of the data passes through the parts. The later chapters
# refine one of these two ways, or combine them.
#
# In this chapter you run both on two real ranks, count what they cost, and learn to choose.

# %% tags=["nbval-ignore-output"]
import math
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch01
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.explore import Explorer
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, memory_ledger

hardware.report()

# %% [markdown]
# ## 1. The factory: copy the line, or run it through several buildings
#
# Material enters a production line at its first station. Each station does its work and hands the
# half-finished parts to the next one. A blueprint tells every station what to do. After each batch of
# material the stations get notes on what to change, and the blueprint is improved a little. When one
# building is too slow or too small, you build more. There are two ways to use them.
#
# **Copies.** Every building gets the whole line and a share of the material. After each batch, a round
# of trucks brings every building the average of all change notes, so that the blueprints stay equal.
#
# **One line in several buildings.** Each building houses some of the stations. All of the material goes
# through all of the buildings: trucks carry the half-finished parts forward and the change notes back.

# %%
ch01.two_ways()
plt.show()

# %% [markdown]
# *Left: two buildings with the whole blueprint and half of the material each; the change notes are
# averaged. Right: two buildings with half of the blueprint each; all of the material passes through both.*
#
# All chapters use these words, mostly in their first section:
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | building | rank | one process, on a GPU of its own where there is one |
# | site | node | one machine with several ranks |
# | station, line | layer, model | the line is all stations in their order |
# | blueprint | parameters | what training improves |
# | material | batch | the examples of one step; one box of material is a **micro-batch** |
# | half-finished parts | **activations** | what one layer hands to the next |
# | shelf | stored activations | what forward keeps because backward needs it |
# | change notes | gradients | how the loss changes with each parameter, or with each activation |
# | truck | **send** and **recv** | a message from one rank to another; each side waits for the other |
# | round of trucks that every building joins | collective | one call that all ranks make, such as all-reduce |
# | foreman | agent of `torchrun` | the process that starts the ranks of a node and watches them |

# %% [markdown]
# ## 2. The smallest real run: half of the batch each, then half of the layers each
#
# The model has 784 inputs (the pixels of a digit), 50 hidden values and 10 outputs. It has two stages, and `build`
# makes those that a rank asks for. Each stage has a seed of its own, so its parameters are the same in every process.

# %%
images, labels = mnist.tensors(train=True, limit=64)


def build(stages):
    """The given stages of the model, in order, with the same parameters in every process."""
    layers = []
    for stage in stages:
        torch.manual_seed(stage)
        if stage == 0:
            layers += [nn.Flatten(), nn.Linear(784, 50), nn.ReLU()]
        else:
            layers += [nn.Linear(50, 10)]
    return nn.Sequential(*layers)


# %% [markdown]
# A **training step** is forward, backward and update. The functions below do forward, backward and the exchange
# between ranks. The first is for one process, the second for copies. All-reduce sums the gradients over the ranks,
# and the division turns the sum into the mean.


# %%
def whole_step(model, images, labels):
    cross_entropy(model(images), labels).backward()


def copies_step(model, images, labels):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole_step(model, images.tensor_split(ranks)[rank], labels.tensor_split(ranks)[rank])
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks


# %% [markdown]
# In the line, rank 0 has stage 0 and rank 1 has stage 1. Autograd records the operations of one process only. What
# happens between the two ranks has to be written by hand: rank 0 sends its activations forward, and rank 1 sends the
# gradient of these activations back. `detach` gives you the values without the graph, which cannot travel. Rank 0
# keeps the graph for its own backward.


# %%
def line_step(model, images, labels):
    if dist.get_rank() == 0:
        activations = model(images)
        dist.send(activations.detach(), dst=1)
        gradient = torch.empty_like(activations)
        dist.recv(gradient, src=1)
        activations.backward(gradient)  # continues what rank 1 has begun
    else:
        activations = torch.empty(len(images), 50, device=images.device)
        dist.recv(activations, src=0)
        activations.requires_grad_()  # so that backward fills activations.grad
        whole_step(model, activations, labels)
        dist.send(activations.grad, dst=0)


# %% [markdown]
# Run the three and compare the gradients. For each way to train, a list says which stages each rank holds.


# %%
def run(rank, step, stages, images, labels):
    """One step on this rank's device; returns the model with its gradients."""
    device = hardware.device()
    model = build(stages[rank]).to(device)
    step(model, images.to(device), labels.to(device))
    return model


def gradients(rank, *arguments):
    return flat(parameter.grad for parameter in run(rank, *arguments).parameters())


one = (whole_step, [[0, 1]])
copies = (copies_step, [[0, 1], [0, 1]])
line = (line_step, [[0], [1]])

expected = launch(gradients, 1, *one, images, labels)[0]
of_copies = launch(gradients, 2, *copies, images, labels)
of_line = launch(gradients, 2, *line, images, labels)
print("copies, largest difference from one process:", check_equal(expected, of_copies))
print("line, largest difference from one process:", check_equal(expected, [torch.cat(of_line)]))

# %% [markdown]
# Both give the gradients of the whole batch. Each copy has all of them, and each rank of the line has those of its
# own stage. Float32 sums differ in their last digits when their terms are added in another order; `check_equal` stops
# with an error if a difference is larger than 1e-5.

# %% [markdown]
# ### 1.1 Throughput and latency (2 points)
#
# Once a line is trained, it only delivers: each order is an example that needs an answer. Nothing travels back, so
# there are no change notes. As soon as a building has finished an order, it can begin the next one, so several orders
# are in the line at once. Two numbers describe such a line:
#
# * **Throughput** is how many orders leave in a minute, once the line is full.
# * **Latency**, or delivery time, is how long one order takes from its entry into the first building
#   until it leaves the last.
#
# There are `lines` identical lines. In each of them, building $b$ works `minutes[b]` on an order.
# Between two buildings an order travels for `truck` minutes. There are always enough trucks, and a
# building goes on working while they drive.


# %% nbgrader={"grade_id": "1.1", "solution": true}
def deliveries(minutes: list[float], truck: float, lines: int) -> tuple[float, float]:
    """Return (throughput, latency) of all lines together.

    minutes: what each building of a line needs for one order, in the order of the line.
    truck: minutes from one building to the next.
    lines: how many such lines work side by side, each on orders of its own.
    Throughput is in orders per minute, of all lines together, when all of them are full.
    Latency is in minutes, for one order in a line in which it never has to wait.
    """
    ### BEGIN SOLUTION
    throughput = lines / max(minutes)  # the slowest building sets the pace of its line
    return throughput, sum(minutes) + truck * (len(minutes) - 1)
    ### END SOLUTION


# %% nbgrader={"grade_id": "1.1-check", "grade": true, "points": 2, "locked": true}
check("1.1", deliveries)

# %% [markdown]
# For a hint, run `hint("1.1")` in a cell of your own.

# %% [markdown]
# ## 3. Predict, then measure: what is sent, what is held, how long it takes
#
# ### What a rank sends and holds
#
# Look at `copies_step` and `line_step` once more. How many bytes does rank 0 hand over in one step on 64 images: to
# all-reduce in the copies, to `send` in the line? How many bytes of parameters and gradients does a rank hold after
# the step? Stage 0 has 784 x 50 weights and 50 biases, stage 1 has 50 x 10 weights and 10 biases. A float32 number
# takes 4 bytes. Write expressions, not results: Python computes them.

# %% tags=["prediction"]
predicted = {
    "copies: bytes that rank 0 sends": 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "line: bytes that rank 0 sends": 4 * 64 * 50,
    "copies: bytes that rank 0 holds": 2 * 4 * (784 * 50 + 50 + 50 * 10 + 10),
    "line: bytes that rank 0 holds": 2 * 4 * (784 * 50 + 50),
    "line: bytes that rank 1 holds": 2 * 4 * (50 * 10 + 10),
}

# %% [markdown]
# `Trace` records what a rank hands over in collectives and messages. `memory_ledger` counts the bytes of a model by
# kind. PyTorch's `FlopCounterMode` counts floating-point operations; you will need them in a moment.

# %%
from torch.utils.flop_counter import FlopCounterMode


def costs(rank, *arguments):
    with Trace() as trace, FlopCounterMode(display=False) as counter:
        model = run(rank, *arguments)
    held = memory_ledger(model)
    sent = trace.record().sent()
    return sent, held["parameters"] + held["gradients"], counter.get_total_flops()


cost_of_one = launch(costs, 1, *one, images, labels)
cost_of_copies = launch(costs, 2, *copies, images, labels)
cost_of_line = launch(costs, 2, *line, images, labels)
measured = {}
for name, ranks in (("copies", cost_of_copies), ("line", cost_of_line)):
    for rank, (sent, held, _) in enumerate(ranks):
        measured[f"{name}: bytes that rank {rank} sends"] = sent
        measured[f"{name}: bytes that rank {rank} holds"] = held

# %%
compare(
    predicted,
    measured,
    likely={
        "As if half of the images gave half of the gradients: each parameter has one.": {
            "copies: bytes that rank 0 sends": 79_520
        },
        "The activations of one image: those of all 64 cross the cut.": {
            "line: bytes that rank 0 sends": 200
        },
        "These are numbers. Each has 4 bytes.": {
            "copies: bytes that rank 0 sends": 39_760,
            "line: bytes that rank 0 sends": 3_200,
        },
        "As if gradients of parameters crossed the cut: they stay where their layer is.": {
            "line: bytes that rank 0 sends": 157_000
        },
        "As if half of the layers were half of the parameters.": {
            "line: bytes that rank 0 holds": 159_040,
            "line: bytes that rank 1 holds": 159_040,
        },
        "The parameters without their gradients.": {
            "copies: bytes that rank 0 holds": 159_040,
            "line: bytes that rank 0 holds": 157_000,
            "line: bytes that rank 1 holds": 2_040,
        },
    },
)

# %% [markdown]
# Let $W$ be the number of parameters, $N$ the number of images, and $H$ the number of values that cross the cut
# between the ranks for one image. A copy hands over $4W$ bytes, *however large the batch is*. A rank of the line
# hands over $4NH$ bytes, *however many layers the model has*. When a model of equal layers gets wider, $W$ grows with
# the square of the width, $H$ with the width itself.
#
# Half of the layers need not be half of the memory. Here stage 0 has 99 % of the parameters, so this
# cut saves rank 0 next to nothing.

# %% [markdown]
# ### How long a step takes
#
# Suppose that messages took no time. How long is one training step on two ranks, as a share of the time that
# one process needs for the whole batch? Think of who has to wait for whom.

# %% tags=["prediction"]
predicted = {"copies: time of a step": 0.5, "line: time of a step": 1.0}

# %% [markdown]
# Without messages, the time follows the floating-point operations. Ranks that work at the same time take as
# long as the busiest of them. Ranks that work one after the other take the sum.

# %%
total = cost_of_one[0][2]
measured = {
    "copies: time of a step": max(operations for *_, operations in cost_of_copies) / total,
    "line: time of a step": sum(operations for *_, operations in cost_of_line) / total,
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if both ranks of the line worked at once: rank 1 waits for the activations.": {
            "line: time of a step": 0.5
        },
    },
)

# %%
ch01.steps()
plt.show()

# %% [markdown]
# *A simulated step with two equal stages. The copies compute side by side. In the line only one rank computes at a
# time, so the step takes as long as that of one process, plus the messages.*
#
# A line saves memory. It does not make a training step shorter. The **idle share** is the part of all ranks' time in
# which they do not compute. For a line with $B$ ranks and the batch in one piece it is $1 - 1/B$: of the two ranks
# that you pay for, one is always idle. With *several* pieces the share gets smaller. The next exercise counts the
# minutes.

# %% [markdown]
# ### 1.2 Where the line stalls (3 points)
#
# Take the line of exercise 1.1 again. All orders are ready at minute 0. For each building, count the minutes in which
# it does nothing, from minute 0 until the last order has left the *last* building. You may simulate it, or find a
# formula.


# %% nbgrader={"grade_id": "1.2", "solution": true}
def idle_minutes(minutes: list[float], truck: float, orders: int) -> list[float]:
    """Return for each building how many minutes it does nothing.

    minutes: what each building needs for one order, in the order of the line.
    truck: minutes from one building to the next; there are always enough trucks.
    orders: how many orders go through the line, one after the other.
    Every building's minutes count from minute 0 until the last order has left the last building.
    """
    ### BEGIN SOLUTION
    free_from = [0.0] * len(minutes)
    for _ in range(orders):
        arrival = 0.0
        for b, work in enumerate(minutes):
            free_from[b] = max(arrival, free_from[b]) + work  # the order waits, or the building
            arrival = free_from[b] + truck
    return [free_from[-1] - orders * work for work in minutes]
    ### END SOLUTION


# %% nbgrader={"grade_id": "1.2-check", "grade": true, "points": 3, "locked": true}
check("1.2", idle_minutes)

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same parameters four times
#
# A training loop around the steps of section 2 is short: every rank updates the parameters that it holds, with plain
# SGD.

# %%
STEPS, RATE = 4, 0.1


def train(rank, step, stages, images, labels):
    device = hardware.device()
    model = build(stages[rank]).to(device)
    images, labels = images.to(device), labels.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        step(model, images, labels)
        optimizer.step()
    return flat(model.parameters())


# %% [markdown]
# PyTorch has an interface for each way. `DistributedDataParallel` wraps a copy and averages the gradients during
# `backward`; chapter 3 takes it apart. No `copies_step` is needed: the loop is that of one process, on a share of the
# batch.

# %%
from torch.nn.parallel import DistributedDataParallel


def pytorch_copies(rank, images, labels):
    device = hardware.device()
    model = DistributedDataParallel(build([0, 1]).to(device))
    mine, my_labels = (whole.tensor_split(2)[rank].to(device) for whole in (images, labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(mine), my_labels).backward()
        optimizer.step()
    return flat(model.parameters())


# %% [markdown]
# `torch.distributed.pipelining` wraps one stage and does the sends and receives; chapter 5 takes it apart. With the
# whole batch as one micro-batch, its schedule is that of your line.

# %%
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def pytorch_line(rank, images, labels):
    device = hardware.device()
    model = build([rank]).to(device)
    stage = PipelineStage(model, stage_index=rank, num_stages=2, device=device)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(images.to(device))
        else:
            schedule.step(target=labels.to(device))
        optimizer.step()
    return flat(model.parameters())


# %% [markdown]
# All four must end with the parameters of one process that does every step on the whole batch.

# %%
expected = launch(train, 1, *one, images, labels)[0]
trained = {
    "copies by hand": launch(train, 2, *copies, images, labels),
    "copies with DistributedDataParallel": launch(pytorch_copies, 2, images, labels),
    "line by hand": [torch.cat(launch(train, 2, *line, images, labels))],
    "line with torch.distributed.pipelining": [torch.cat(launch(pytorch_line, 2, images, labels))],
}
for name, parameters in trained.items():
    print(f"{name}, largest difference:", check_equal(expected, parameters))

# %% [markdown]
# ## 5. Break it: unequal shares, a missing truck, and two claims
#
# ### Unequal shares
#
# The mean of the two ranks' means was the mean of the batch, because both had 32 images. Give
# `copies_step` five images. They are shared out as three and two.

# %%
five = images[:5], labels[:5]
of_five = launch(gradients, 1, *one, *five)[0]
first, second = launch(gradients, 2, *copies, *five)
print("between the two ranks:", largest_difference(first, [second]))
print("from one process:     ", largest_difference(of_five, [first]))

# %% [markdown]
# No error appears: both ranks agree on a wrong gradient. An image of the smaller share weighs 1/4, one of the larger
# share 1/6, and each should weigh 1/5. The last batch of a data set is often such a batch. The repair is to divide by
# the size of the *whole* batch on every rank, and to add the gradients up:


# %%
def weighted_step(model, images, labels):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, my_labels = images.tensor_split(ranks)[rank], labels.tensor_split(ranks)[rank]
    (cross_entropy(model(mine), my_labels, reduction="sum") / len(images)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


repaired = launch(gradients, 2, weighted_step, [[0, 1], [0, 1]], *five)
print("from one process:", check_equal(of_five, repaired))

# %% [markdown]
# ### A truck that never comes
#
# Both sides of a cut have to agree on the number of messages. Here each side computes it for itself. One
# rounds down, the other up.


# %%
def stream(rank, images, batch):
    activations = torch.zeros(batch, 50, device=hardware.device())
    if rank == 0:
        for _ in range(images // batch):
            dist.send(activations, dst=1)
    else:
        for _ in range(math.ceil(images / batch)):
            dist.recv(activations, src=0)


try:
    launch(stream, 2, 100, 32)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# `launch` watches its ranks, so you know after a few seconds. Elsewhere rank 1 would wait without a word, or fail
# with a lost connection when the process of rank 0 has ended. The repair is one number that both sides
# share: one line of code computes it for both, or rank 0 sends it first.
#
# ### Bug hunt: a cut model on two ranks
#
# You will read that "backpropagation works automatically across GPUs". That is true within one process, where
# `.to("cuda:1")` is an operation that autograd records. Here somebody has moved such a model to two processes and
# replaced `.to` by `send` and `recv`. It runs, and the loss falls. Read the code below: by how much do the parameters
# of rank 0 change in four steps, and why?

# %% tags=["prediction"]
predicted = {"largest change of a parameter of rank 0": 0.0}


# %%
def hunted(rank, images, labels):
    device = hardware.device()
    model = build([rank]).to(device)
    before = flat(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            dist.send(model(images.to(device)).detach(), dst=1)
        else:
            activations = torch.empty(len(images), 50, device=device)
            dist.recv(activations, src=0)
            loss = cross_entropy(model(activations), labels.to(device))
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return (flat(model.parameters()) - before).abs().max().item(), losses


(change, _), (_, losses) = launch(hunted, 2, images, labels)
measured = {"largest change of a parameter of rank 0": change}
print("loss:", ", ".join(f"{loss:.3f}" for loss in losses))

# %%
compare(predicted, measured)

# %% [markdown]
# No gradient travels back. `send` and `recv` are not part of autograd's graph, so `backward` ends at the cut. The
# parameters of rank 0 get no gradients, and an optimizer silently skips parameters without one. Rank 1 learns from
# the random features of rank 0, which is enough to make the loss fall. You find this mistake if you compare with one
# process, or check that every parameter has a gradient. The repair is `line_step`.
#
# ### A claim to test: twice the GPUs, twice the speed
#
# You will read that "the speedup is roughly proportional to the number of GPUs you have available". Take copies, a
# batch of 16 images, and messages that take no time. How many times faster than one rank are 6 ranks, and 12?

# %% tags=["prediction"]
predicted = {"speed-up with 6 ranks": 5.33, "speed-up with 12 ranks": 8.0}

# %%
measured = {}
print("images of each rank:")
for ranks in (6, 12):
    shares = [len(share) for share in images[:16].tensor_split(ranks)]
    measured[f"speed-up with {ranks} ranks"] = round(16 / max(shares), 2)
    print(f"{ranks} ranks:", shares)

# %%
compare(
    predicted,
    measured,
    likely={
        "As if images could be cut: the step is over when the largest share is done.": {
            "speed-up with 6 ranks": 6,
            "speed-up with 12 ranks": 12,
        },
    },
)

# %% [markdown]
# The largest share sets the time of a step, even if messages are free. Real messages take time. Here is the time of a
# real step on two ranks, for a small batch and for a large one. Each rank has one thread.


# %%
def seconds_of_step(rank, step, stages, images, labels):
    torch.set_num_threads(1)
    device = hardware.device()
    model = build(stages[rank]).to(device)
    images, labels = images.to(device), labels.to(device)
    durations = []
    for _ in range(9):
        with Trace() as trace, trace.span("step"):
            step(model, images, labels)
        durations.append(max(span.end for span in trace.record().spans))
    return sorted(durations)[4]  # the median


# %% tags=["nbval-ignore-output"]
for count in (64, 16384):
    batch = mnist.tensors(train=True, limit=count)
    alone = launch(seconds_of_step, 1, *one, *batch)[0]
    together = max(launch(seconds_of_step, 2, *copies, *batch))
    print(f"{count:5} images: copies take {together / alone:.2f} x the time of one process")

# %% [markdown]
# With 64 images the exchange of the gradients takes longer than the computation that it saves. With 16,384 images the
# same exchange hardly counts, and on two free CPU cores the ratio comes near one half. So there is a decision to
# make.

# %% [markdown]
# ### 1.3 Decide (3 points)
#
# A `Job` describes a model and the GPUs that train it. A step of copies takes the computation time of one GPU divided
# by the number of GPUs, plus the exchange of the gradients. Cut a model only if it does not fit, and copy one that
# fits only if copies make a step faster.


# %%
@dataclass(frozen=True)
class Job:
    gpus: int
    gpu_bytes: float  # memory of one GPU
    state_bytes: float  # parameters, gradients and optimizer state of one whole copy
    sample_bytes: float  # activations of one sample; a copy at work needs room for one
    compute_seconds: float  # one step of the whole batch on one GPU, if it had room
    exchange_seconds: float  # one all-reduce of all gradients over all GPUs


def transformer(parameters, layers, hidden, heads, sequence, batch, gpus, gpu_gb, link_gb):
    attention = 5 * heads * sequence / hidden
    return Job(
        gpus=gpus,
        gpu_bytes=gpu_gb * 1e9,
        state_bytes=16 * parameters,
        sample_bytes=layers * sequence * hidden * (34 + attention),
        compute_seconds=6 * parameters * sequence * batch / 140e12,
        exchange_seconds=2 * (gpus - 1) / gpus * 2 * parameters / (link_gb * 1e9),
    )


# %% [markdown]
# The numbers come from papers. With Adam in mixed precision the state takes 16 bytes a parameter (Rajbhandari et al.,
# section 3.1). A layer of width $h$ with $a$ heads that keeps its attention matrix stores $s h (34 + 5 a s / h)$
# bytes of activations for a sample of $s$ tokens (Korthikanti et al., equation 1). The computation takes six
# operations per parameter and token (Kaplan et al., section 2.1), and every GPU does 140 Tflop/s, as Narayanan et al.
# report. In the exchange each link carries $2(n-1)/n$ times the bytes of the gradients, 2 a parameter, as chapter 3
# derives.

# %%
link = {"NVLink of an A100": 300, "Ethernet, 1 Gbit/s": 0.125}  # GB/s, each direction
fast, slow = link.values()
jobs = {
    "BERT-large, 8 GPUs of 80 GB": transformer(340e6, 24, 1024, 16, 512, 32, 8, 80, fast),
    "BERT-large, 2 PCs on an office network": transformer(340e6, 24, 1024, 16, 512, 4, 2, 24, slow),
    "GPT-2 of 1.5 billion, 2 GPUs of 24 GB": transformer(1.5e9, 48, 1600, 25, 1024, 8, 2, 24, fast),
    "Llama 3 8B, 8 GPUs of 80 GB": transformer(8.03e9, 32, 4096, 32, 2048, 32, 8, 80, fast),
    "Megatron 22B, 8 GPUs of 80 GB": transformer(22e9, 48, 6144, 64, 2048, 4, 8, 80, fast),
    "GPT-3 175B, 32 GPUs of 80 GB": transformer(175e9, 96, 12288, 96, 2048, 64, 32, 80, fast),
}
for name, job in jobs.items():
    copy = (job.state_bytes + job.sample_bytes) / 1e9
    print(f"{name:40} a copy: {copy:7.1f} GB   compute {job.compute_seconds:7.3f} s", end="   ")
    print(f"exchange {job.exchange_seconds:6.3f} s")

# %% [markdown]
# First decide the six jobs with pencil and paper, which takes three minutes. Then write down the rule that you used.


# %% nbgrader={"grade_id": "1.3", "solution": true}
def decide(job: Job) -> str:
    """Return how to train: "one", "data", "model", "both" or "none".

    A copy of the model needs room for its state and the activations of one sample. Cutting spreads
    them evenly over the GPUs of the copy; use as few GPUs for a copy as possible.
    "none":  a copy does not fit, not even cut over all GPUs.
    "model": a copy has to be cut, and only one copy fits on the GPUs.
    "both":  a copy has to be cut, and two or more copies fit on the GPUs.
    "data":  a copy fits on one GPU, and sharing the batch over all GPUs makes a step faster:
             the compute is divided by their number, the exchange comes on top.
    "one":   a copy fits on one GPU, and sharing the batch does not make a step faster.
    """
    ### BEGIN SOLUTION
    gpus_a_copy = math.ceil((job.state_bytes + job.sample_bytes) / job.gpu_bytes)
    if gpus_a_copy > job.gpus:
        return "none"
    if gpus_a_copy > 1:
        return "both" if job.gpus // gpus_a_copy >= 2 else "model"
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared < job.compute_seconds else "one"
    ### END SOLUTION


# %% nbgrader={"grade_id": "1.3-check", "grade": true, "points": 3, "locked": true}
check("1.3", decide)

# %% [markdown]
# ## 6. Exercises of this chapter
#
# | exercise | points | in section |
# |---|--:|---|
# | 1.1 Throughput and latency | 2 | 2 |
# | 1.2 Where the line stalls | 3 | 3 |
# | 1.3 Decide | 3 | 5 |

# %% [markdown]
# ## 7. See it: when copies send more than a line
#
# This is the arithmetic of section 3 for a model of equal layers: each of two ranks has half of the batch or half of
# the layers. A layer keeps its input for backward.


# %%
def draw_costs(width, layers, batch):
    parameters = 4 * layers * (width + 1) * width  # bytes; the gradients take as many
    crossing = 4 * batch * width  # bytes of the activations at the cut
    kept = layers * crossing // 2  # half of the rows in all layers, or all rows in half of them
    sent = {"copies": {"gradients": parameters}, "line": {"activations": crossing}}
    held = {
        "copies": {"parameters": parameters, "gradients": parameters, "activations": kept},
        "line": {"parameters": parameters // 2, "gradients": parameters // 2, "activations": kept},
    }
    return ch01.costs(sent, held)


Explorer(draw_costs, width=(64, 1024, 512), layers=(2, 32, 8), batch=(16, 8192, 256))

# %% [markdown]
# *Left, what rank 0 hands over in a step; right, what it holds. Both ways halve the activations, and only the line
# halves the model.*
#
# Guess before you move a slider:
#
# 1. Make the batch larger. From which batch on does the line send more than the copies?
# 2. Double the width. Which way sends twice as many bytes, and which way four times as many?
# 3. Double the layers. What does the line send now?

# %% [markdown]
# ## 8. On a cluster: fast links inside a node, slow links between nodes
#
# On a cluster `torchrun` starts the ranks, and the script calls `init_process_group` itself. The steps stay as they
# are:
#
# ```python
# # train.py, started on each of two nodes by
# # torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:PORT train.py
# torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
# dist.init_process_group("nccl")
# train(dist.get_rank(), copies_step, [[0, 1]] * dist.get_world_size(), images, labels)
# dist.destroy_process_group()
# ```
#
# What changes is the price of a message. The GPUs of a node have links of their own. Between nodes all of them share
# the network, which is slower. So what ranks send most often stays inside a node: a model is usually cut over the
# GPUs of *one* node first, and copied across nodes. Chapter 7 does both at once.
#
# For training, a line with the whole batch in one piece is a last resort. Chapter 5 cuts the batch into
# micro-batches, so that all ranks work; exercise 1.2 counted the idle time that remains. To *use* a trained model
# that is too large for one GPU, people do run it as a plain line (`device_map="auto"` in the accelerate library).

# %% [markdown]
# ## 9. Remember
#
# * Data parallelism copies the model and shares the batch. Model parallelism cuts the model and passes
#   the whole batch through.
# * A copy hands over its gradients once a step, however large the batch is. A line hands over the activations of the
#   batch at each cut, and their gradients on the way back.
# * Copies make a step shorter, limited by the largest share and the exchange. A line with the batch in one piece
#   saves memory but no time: of $B$ ranks, one computes at a time.
# * Both end with the parameters of one process on the whole batch. If they do not, look for unequal shares that were
#   averaged as if they were equal, or for a gradient that never travelled back.
# * Cut only what does not fit. Copy only where the computation that you save takes longer than the exchange.
#
# **Sources.** S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel
# Training*, VLDB 2020 (arXiv 2006.15704), section 2. D. Narayanan et al., *Efficient Large-Scale
# Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021 (arXiv 2104.04473), sections 2.2
# and 5. S. Rajbhandari et al., *ZeRO*, SC 2020 (arXiv 1910.02054), section 3.1. V. Korthikanti et
# al., *Reducing Activation Recomputation in Large Transformer Models*, 2022 (arXiv 2205.05198),
# equation 1. J. Kaplan et al., *Scaling Laws for Neural Language Models*, 2020 (arXiv 2001.08361),
# section 2.1. Sizes of the models: Devlin et al. 2019 (BERT), Radford et al. 2019 (GPT-2), Brown et
# al. 2020 (GPT-3), Grattafiori et al. 2024 (Llama 3). PyTorch documentation: *Distributed
# communication package*, section "Point-to-point communication"; *Pipeline Parallelism*.
