# %% [markdown]
# # 4. Manual split: one assembly line in two buildings
#
# In chapters 2 and 3 every device held the whole model. That ends when the model no longer fits.
# Then you cut the model itself: the first layers live on one device, the rest on another. This is
# **model parallelism** in its plainest form, and every larger scheme grows out of it.
#
# You cut three models here, by hand: an image classifier, a transformer language model, and a
# convolutional net whose layers are very uneven. You predict what crosses the border, what each
# side stores and how long it idles, and measure all three. And you learn to find the best place for
# a cut.

# %% tags=["nbval-ignore-output"]
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from time import perf_counter

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from course_utils import hardware, mnist, plots, text
from course_utils.checks import check, hint
from course_utils.equality import equal, flat
from course_utils.explore import Explorer
from course_utils.launch import RankFailure, launch
from course_utils.models import LanguageModel
from course_utils.predictions import compare
from course_utils.terminal import scratch, torchrun
from course_utils.trace import (
    Record,
    Span,
    Trace,
    kept_for_backward,
    memory_ledger,
    separate_waiting,
)

hardware.report()

# %% [markdown]
# ## 1. The factory: one line that is too long for its building
#
# A factory wants to build a machine that takes eight stations, one after the other. The hall has
# room for four. So the line is cut. Stations 1 to 4 stay in building 0, stations 5 to 8 move into
# building 1. Half-finished products cross the yard on a truck.
#
# The blueprint is improved from the last station backwards. Station 8 sees the finished machine and
# says what should have been different about the part that it was given. That note goes to station
# 7, and so on to station 1. Between stations 5 and 4 the note has to cross the yard too. The truck
# drives both ways.

# %%
figure, ax = plots.canvas(height=3.1)
road = plots.COLORS["communication"]
for number, (x, stations) in enumerate(((0.9, "stations 1 to 4"), (6.3, "stations 5 to 8"))):
    color = plots.RANK_COLORS[number]
    plots.building(ax, x, 1.2, width=2.6, height=1.7, label=f"building {number}", color=color)
    plots.blueprint(ax, x + 0.85, 3.05, part=(number / 2, (number + 1) / 2))
    ax.text(x + 1.3, 1.38, stations, ha="center", fontsize=9)
plots.arrow(ax, (0.1, 2.1), (0.85, 2.1))
ax.text(0.42, 2.2, "items", ha="center", va="bottom", fontsize=9)
plots.truck(ax, 4.45, 2.2)
plots.arrow(ax, (3.6, 2.1), (6.2, 2.1), color=road)
ax.text(4.9, 2.85, "products", ha="center", va="bottom", fontsize=9)
plots.arrow(ax, (6.2, 1.5), (3.6, 1.5), color=road)
ax.text(4.9, 1.4, "notes on the products", ha="center", va="top", fontsize=9)
plots.arrow(ax, (9.0, 2.1), (9.75, 2.1))
ax.text(9.4, 2.2, "loss", ha="center", va="bottom", fontsize=9)
ax.text(4.9, 0.55, "each building improves its own half of the blueprint", ha="center", fontsize=9)
plt.show()

# %% [markdown]
# *Items enter building 0, half-finished products cross the yard to building 1, and notes on these
# products come back. Each building keeps one half of the blueprint, and no one has the whole.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | station | layer | a piece of work with its own parameters |
# | building | **stage** | consecutive layers on one device |
# | yard between two buildings | **cut** | the place where one stage ends and the next begins |
# | half-finished products | **activations** | what the last layer of a stage hands on |
# | notes on the products | the gradient of the loss with respect to these activations | what a stage needs to start its backward pass |
# | truck | `.to(device)`, or `send` and `recv` | a copy between devices of one process, or a message between two |
# | a building with nothing to do | **idle** | waits for the other's truck |
#
# The notes carry exactly as many numbers as the products: one gradient for each activation. Nothing
# else crosses the yard: no parameter, and no gradient of a parameter.

# %% [markdown]
# ## 2. The smallest real run: one process with two devices, then two processes
#
# ### One process: `forward` moves the products
#
# The smallest version needs no second process. You put each half on a device, and `forward` moves
# the activations in between. Which two devices depends on your machine:


# %%
def two_devices():
    """Two GPUs where there are two; else a GPU and the CPU; else the CPU twice."""
    gpus = [torch.device("cuda", i) for i in range(min(2, torch.cuda.device_count()))]
    return (gpus + [torch.device("cpu")] * 2)[:2]


class TwoBuildings(nn.Module):
    """Two stages of a model, each on its own device."""

    def __init__(self, first, second, devices):
        super().__init__()
        self.devices = devices
        self.first = first.to(devices[0])
        self.second = second.to(devices[1])

    def forward(self, items):
        products = self.first(items.to(self.devices[0]))
        return self.second(products.to(self.devices[1]))  # the truck


# %% [markdown]
# The line of this section classifies images of MNIST. It has four linear layers. The cut lies after
# the second, where 256 numbers for each image cross the yard.


# %%
CUT, WIDTH = 5, 256  # layers in the first stage; values for each image that cross the cut


def assembly_line():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(),
        *(nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)),
    )


# %%
images, labels = mnist.tensors(train=True, limit=64)

whole = assembly_line()
expected_loss = cross_entropy(whole(images), labels)
expected_loss.backward()

line = assembly_line()
model = TwoBuildings(line[:CUT], line[CUT:], two_devices())
output = model(images)
loss = cross_entropy(output, labels.to(output.device))  # the targets go where the output is
loss.backward()

print("same loss:", abs(loss.item() - expected_loss.item()) < 1e-5)
print(
    "same gradients:",
    equal(flat(p.grad for p in whole.parameters()), [flat(p.grad for p in model.parameters())]),
)

# %% [markdown]
# You wrote nothing for the way back. `.to` is an operation like any other: autograd records it, and
# its backward moves the gradient to the device that the activations came from.
#
# What the truck did depends on your machine. The next cell looks at it. Between two GPUs, or a GPU
# and the CPU, `.to` makes a copy, and autograd's graph has a node for it. If both devices are the
# CPU, there is no yard: `.to` returns the very tensor that it was given, and no byte moves.

# %% tags=["nbval-ignore-output"]
here, there = two_devices()
products = model.first(images.to(here))
moved = products.to(there)
print(f"building 0 is {here}, building 1 is {there}")
if moved is products:
    print("The same device: nothing is copied. The cut exists on paper only.")
else:
    print(f"A real transfer of {moved.nbytes:,} bytes; on the way back: {moved.grad_fn.name()}")

# %% [markdown]
# ### Two processes: you drive the truck
#
# With two ranks there is always a yard, on any machine. The stages live in two processes, and
# autograd of one knows nothing of the other. So you carry both loads yourself. Four lines are new,
# one for each end of each trip:


# %%
def two_ranks(rank):
    device = hardware.device()
    stage = (assembly_line()[:CUT], assembly_line()[CUT:])[rank].to(device)
    products = torch.empty(len(images), WIDTH, device=device)
    if rank == 0:
        products = stage(images.to(device))
        dist.send(products.detach(), dst=1)  # activations leave
        notes = torch.empty_like(products)
        dist.recv(notes, src=1)  # their gradient arrives
        products.backward(notes)
    else:
        dist.recv(products, src=0)
        products.requires_grad_()  # so that backward fills products.grad
        cross_entropy(stage(products), labels.to(device)).backward()
        dist.send(products.grad, dst=0)
    return flat(p.grad for p in stage.parameters())


halves = launch(two_ranks, 2)
print(
    "gradients of both halves as in one process:",
    equal(flat(p.grad for p in whole.parameters()), [torch.cat(halves)]),
)

# %% [markdown]
# `products.backward(notes)` is the heart of it. For a tensor that is no loss, `backward` needs the
# gradient of the loss with respect to it, and multiplies from there on by the chain rule
# ([`torch.Tensor.backward`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html)).
# Building 1 computed just that: `products.grad`.

# %% [markdown]
# ## 3. Predict, then measure: what crosses, who idles, what is stored
#
# ### What crosses the yard
#
# A batch of $N$ items, $H$ values for each at the cut, 4 bytes for each value: $4NH$ bytes there
# and as many back. The formula has no number of layers and no number of parameters in it.
# **Predict** for 64 images and the cut with 256 values:

# %% tags=["prediction"]
predicted = {
    "one process, in at the door": 4 * 64 * 256,
    "one process, out at the door": 4 * 64 * 256,
    "two ranks, sent there": 4 * 64 * 256,
    "two ranks, sent back": 4 * 64 * 256,
}

# %% [markdown]
# In one process you measure at the door of building 1: what comes in through `forward`, and the
# gradient that goes out. Between ranks, `Trace` records what each hands to `send`.


# %%
def bytes_at_the_door(stage, run):
    """The bytes that enter `stage` in forward and leave it in backward, while `run` runs."""
    crossed = []

    def door(module, inputs):
        crossed.append(inputs[0].nbytes)
        inputs[0].register_hook(lambda gradient: crossed.append(gradient.nbytes))

    handle = stage.register_forward_pre_hook(door)
    run()
    handle.remove()
    return crossed


def one_step():
    output = model(images)
    cross_entropy(output, labels.to(output.device)).backward()


def sent_by(rank):
    with Trace() as trace:
        two_ranks(rank)
    return trace.record().sent("send")


# %%
amounts = [*bytes_at_the_door(model.second, one_step), *launch(sent_by, 2)]
compare(predicted, dict(zip(predicted, amounts)))

# %% [markdown]
# At the door the amount is the same on every machine: it is what goes through the cut. Whether it
# also moves is another question. Where both devices are one, `.to` returned the same tensor, and
# nothing moved; section 2 said which it is on yours. Between two ranks it always moves.

# %% [markdown]
# ### Who idles
#
# Two buildings should be twice as fast? Look at the trucks: building 1 cannot begin before the
# products have arrived, and building 0 cannot go back before the notes have. At any moment at most
# one building works. So with $p$ stages the computing takes as long as on one device, and a stage
# with the share $s$ of the work is idle for the share $1 - s$ of the time. If the cut is
# **balanced**, each stage has $s = 1/p$:
#
# $$\text{idle share} = 1 - \frac{1}{p} .$$
#
# First you need training loops that last for several steps. The two functions below are the two
# ends of the yard. `span` marks the stretches of computing for a `Trace`; on its own it does
# nothing.


# %%
def quiet(name):
    """A span that records nothing."""
    return nullcontext()


def train_first_stage(stage, optimizer, batches, span=quiet):
    """Building 0: trains `stage` on every batch of `batches`; building 1 is rank 1."""
    for items in batches:
        optimizer.zero_grad()
        with span("forward"):
            products = stage(items)
        dist.send(products.detach(), dst=1)
        notes = torch.empty_like(products)
        dist.recv(notes, src=1)
        with span("backward"):
            products.backward(notes)
        with span("update"):
            optimizer.step()


# %%
def train_last_stage(stage, optimizer, targets, shape, span=quiet):
    """Building 1: `targets` has a tensor for each batch, `shape` is that of one item's product.

    Returns the losses.
    """
    losses = []
    for target in targets:
        optimizer.zero_grad()
        products = torch.empty(len(target), *shape, device=target.device)
        dist.recv(products, src=0)
        with span("forward"):
            scores = stage(products.requires_grad_())
            loss = cross_entropy(scores.flatten(0, -2), target.flatten())
        with span("backward"):
            loss.backward()
        dist.send(products.grad, dst=0)
        with span("update"):
            optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# For the clock you take a line of eight equal stations, so that you know the balanced cut: four in
# each building. Each station is a linear layer of 512 x 512 and a ReLU. The cell runs three steps
# after one to warm up, several times over, and keeps the run that other programs disturbed least.


# %%
STATIONS = 8


def equal_stations():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(STATIONS)]
    return nn.Sequential(*layers)


def timed_steps(rank, cut, rounds=4):
    torch.set_num_threads(1)
    device = hardware.device()
    items, targets = torch.ones(256, 512, device=device), torch.zeros(256, device=device).long()
    stage = (equal_stations()[:cut], equal_stations()[cut:])[rank].to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    records = []
    for steps in [1] + [3] * rounds:
        with Trace() as trace:
            if rank == 0:
                train_first_stage(stage, optimizer, [items] * steps, trace.span)
            else:
                train_last_stage(stage, optimizer, [targets] * steps, (512,), trace.span)
        records.append(trace.record())
    return records[1:]  # without the first step: it warms up


# %%
def end_of(records):
    return max(span.end for record in records for span in record.spans)


def fastest(results):
    """The records of all ranks in the round that took the least time, without `isend`s."""
    records = separate_waiting(min(zip(*results), key=end_of))
    return [replace(r, spans=[s for s in r.spans if not s.background]) for r in records]


balanced, uneven_cut = fastest(launch(timed_steps, 2, 4)), fastest(launch(timed_steps, 2, 2))
panels = {"balanced: 4 stations | 4 stations": balanced, "2 stations | 6 stations": uneven_cut}
plots.timelines(panels)
plt.show()

# %% [markdown]
# *Three training steps with each cut. Wherever one building is blue, the other is grey: it waits.
# With the balanced cut the two take turns of equal length. With the other cut building 0 waits for
# most of the time, but the three steps take about as long.*
#
# What can you claim whatever the machine? By the order of sends and receives, the buildings never
# compute forward or backward at the same time. So, together, they are idle for at least half of the
# time. The clocks of two GPUs differ a little, so the cell leaves 5 % of room for both claims.


# %%
def work_of(record):
    return [(s.start, s.end) for s in record.spans if s.name in ("forward", "backward")]


def overlap(one, other):
    """The seconds in which both ranks compute."""
    pairs = ((a, b) for a in work_of(one) for b in work_of(other))
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)


def idle_shares(records):
    total = end_of(records)
    return [1 - sum(end - start for start, end in work_of(r)) / total for r in records]


CLOCKS = 0.05  # two GPUs' clocks agree to within a few per cent of so short a run
claims = (
    f"both at work for {CLOCKS:.0%} of the time or less",
    f"idle for {0.5 - CLOCKS:.0%} or more",
)

for name, records in panels.items():
    together = sum(idle_shares(records)) / 2
    print(
        f"{name}: {claims[0]}: {overlap(*records) <= CLOCKS * end_of(records)}, "
        f"{claims[1]}: {together >= 0.5 - CLOCKS}"
    )

# %% [markdown]
# For each building alone, count the work in units of one product of a 256 x 512 and a 512 x 512
# matrix. Forward takes one for each station. Backward takes two, one for the gradient of the
# weights and one for that of the input, except that the very first station does not need the
# second: nobody asks how the items should have been different. That makes 23 units in all.


# %%
def predicted_idle(cut):
    first = cut + 2 * cut - 1
    last = 3 * (STATIONS - cut)
    return [1 - units / (first + last) for units in (first, last)]


for cut in (4, 2):
    shares = ", ".join(f"{share:.0%}" for share in predicted_idle(cut))
    print(f"cut after {cut} stations: buildings 0 and 1 idle for {shares} of the time")

# %% [markdown]
# Now the clock. Taken together, the measured shares lie a little above the prediction, because
# neither building computes while a truck drives, and the update counts as idle here. One building
# alone may lie below. On a busy machine everything moves a few per cent.

# %% tags=["nbval-ignore-output"]
for cut, records in ((4, balanced), (2, uneven_cut)):
    for rank, (share, predicted) in enumerate(zip(idle_shares(records), predicted_idle(cut))):
        print(f"cut after {cut}, building {rank}: predicted {predicted:.0%}, measured {share:.0%}")

# %% [markdown]
# ### What an unbalanced cut costs
#
# In a training step that goes through the buildings one after the other, it costs no time: the sum
# stays the sum. It costs in two other ways. The fuller building needs more memory, and it is the
# fullest one that has to fit. And as soon as more than one batch is on its way, the slowest
# building sets the pace for all.
#
# The simplest case with several batches is evaluation, where nothing comes back. Building 0 starts
# the next batch while building 1 works on the one before. With the times $t_1, \dots, t_p$ of the
# stages and $m$ batches, the last one leaves after
#
# $$T = \sum_s t_s + (m - 1)\,\max_s t_s .$$
#
# You check the formula with a small simulation: a stage starts a batch when the batch has arrived
# and the stage is free.


# %%
def stream(times, batches, truck=0):
    """Start and end of every batch in every stage: spans[stage][batch]. A truck takes `truck`."""
    spans = [[] for _ in times]
    for _ in range(batches):
        arrived = 0
        for stage, minutes in enumerate(times):
            free = spans[stage][-1][1] if spans[stage] else 0
            start = max(arrived, free)
            spans[stage].append((start, start + minutes))
            arrived = start + minutes + truck
    return spans


generator, agree = random.Random(0), []
for _ in range(500):
    times = [generator.randint(1, 9) for _ in range(generator.randint(1, 6))]
    m = generator.randint(1, 20)
    agree.append(stream(times, m)[-1][-1][1] == sum(times) + (m - 1) * max(times))
print(f"formula and simulation agree for {sum(agree)} of {len(agree)} lines")

for cut in (4, 2):
    units = sum((cut, STATIONS - cut)) + (10 - 1) * max(cut, STATIONS - cut)
    print(f"10 batches, cut after {cut} of 8 stations: {units} units; one building: {10 * 8}")

# %% [markdown]
# The balanced cut should take 44 units where one building takes 80, the cut after two stations 62.
# Run it: ten batches of 256 items through two ranks, forward only.


# %%
def evaluate_stream(rank, cut, batches=10, rounds=5):
    torch.set_num_threads(1)
    device, records = hardware.device(), []
    stage = (equal_stations()[:cut], equal_stations()[cut:])[rank].to(device).requires_grad_(False)
    items = torch.ones(256, 512, device=device)
    for _ in range(1 + rounds):
        on_the_way = []
        with Trace() as trace:
            for _ in range(batches):
                if rank == 0:
                    with trace.span("forward"):
                        products = stage(items)
                    on_the_way.append((products, dist.isend(products, dst=1)))
                else:
                    dist.recv(items, src=0)
                    with trace.span("forward"):
                        stage(items)
            for _, work in on_the_way:
                work.wait()
        records.append(trace.record())
    return records[1:]


# %%
streams = {
    "balanced: 4 stations | 4 stations": fastest(launch(evaluate_stream, 2, 4)),
    "2 stations | 6 stations": fastest(launch(evaluate_stream, 2, 2)),
}
plots.timelines(streams)
plt.show()

# %% [markdown]
# *Ten batches, forward only. With the balanced cut both buildings are busy most of the time.
# With the other cut building 0 is through early, and building 1 decides when the last batch
# leaves.*
#
# `isend` makes this possible: building 0 hands its products over and goes on at once, without
# waiting for the other end. The ratio below should be near 62/44 = 1.41. Two ranks on two busy
# cores show less of it.

# %% tags=["nbval-ignore-output"]
ends = [end_of(records) for records in streams.values()]
print(f"time with the cut after 2 stations, over the balanced one: {ends[1] / ends[0]:.2f}")

# %% [markdown]
# Chapter 5 brings several batches on the way to training too. From there on the balance of a cut is
# worth real time.

# %% [markdown]
# ### What each building stores
#
# Four kinds of memory, for each stage:
#
# * **Parameters**: 4 bytes each. A linear layer from $a$ to $b$ values has $ab + b$.
# * **Gradients**: as many bytes.
# * **Optimizer**: Adam keeps two averages for each parameter, and a step counter of 4 bytes for
#   each tensor.
# * **Activations** that autograd keeps until backward. A linear layer keeps its input. A ReLU keeps
#   its output, which is the next layer's input, so the two share one tensor. The loss keeps the
#   logarithms of the probabilities, the targets (8 bytes each), and one number, the sum of the
#   targets' weights.
#
# **Predict** for 64 images and the line of section 2, cut after the second ReLU:


# %% tags=["prediction"]
def linear_bytes(*sizes):
    return sum(4 * (a * b + b) for a, b in sizes)


N = 64
first, last = linear_bytes((784, 256), (256, 256)), linear_bytes((256, 256), (256, 10))
predicted_memory = [
    {
        "parameters": first,
        "gradients": first,
        "optimizer": 2 * first + 4 * 4,  # two layers with a weight and a bias each
        "activations": 4 * N * (784 + 256 + 256),  # images, two outputs of a ReLU
    },
    {
        "parameters": last,
        "gradients": last,
        "optimizer": 2 * last + 4 * 4,
        "activations": 4 * N * (256 + 256 + 10) + 8 * N + 4,  # arrived, ReLU, loss, targets, sum
    },
]


# %%
def stored(rank):
    device = hardware.device()
    stage = (assembly_line()[:CUT], assembly_line()[CUT:])[rank].to(device)
    optimizer = torch.optim.Adam(stage.parameters())
    with kept_for_backward(stage) as kept:
        if rank == 0:
            train_first_stage(stage, optimizer, [images.to(device)])
        else:
            train_last_stage(stage, optimizer, [labels.to(device)], (WIDTH,))
    ledger = memory_ledger(stage, optimizer) | {"activations": kept.bytes}
    return {kind: ledger[kind] for kind in predicted_memory[rank]}


ledgers = launch(stored, 2)
for rank in range(2):
    print(f"building {rank}")
    compare(
        predicted_memory[rank],
        ledgers[rank],
        {
            "As if every ReLU kept an output of its own: the next layer's input is the same tensor.": {
                "activations": 4 * N * (3 * WIDTH + (784, 10)[rank]) + rank * (8 * N + 4)
            },
            "One number for each parameter: Adam keeps two, and a step count for each tensor.": {
                "optimizer": ledgers[rank]["parameters"]
            },
        },
    )

# %%
plots.memory(ledgers, ["building 0", "building 1"], "Bytes of each building, 64 images")
plt.show()

# %% [markdown]
# *Building 0 holds more than three times as much as building 1, although both have two linear
# layers: the first layer reads 784 values. Equal numbers of layers are not equal memory.*
#
# Two things to keep. Neither building stores anything of the other's parameters, gradients or
# optimizer: this is what the cut is for. And the activations at the cut exist on both sides, once
# as what was sent and once as what arrived.

# %% [markdown]
# ## 4. By hand, then with PyTorch: three ways, one result, and where to cut
#
# ### Losses, gradients, parameters
#
# The contract of the course: whatever the technique, the training ends with the parameters of one
# process. The reference is a plain loop in this kernel, on the CPU. Ten steps of SGD, each on
# another 64 images.

# %%
STEPS, BATCH, RATE = 10, 64, 0.1
all_images, all_labels = mnist.tensors(train=True, limit=STEPS * BATCH)
image_batches, label_batches = all_images.split(BATCH), all_labels.split(BATCH)


def train_alone(model, optimizer, batches, targets):
    """One process; returns the losses. The model may end on another device than it starts on."""
    losses = []
    for items, target in zip(batches, targets):
        optimizer.zero_grad()
        scores = model(items)
        target = target.to(scores.device)
        loss = cross_entropy(scores.flatten(0, -2), target.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def outcome(losses, model):
    """What the contract compares, in three vectors."""
    return {
        "losses": torch.tensor(losses),
        "gradients": flat(p.grad for p in model.parameters()),
        "parameters": flat(model.parameters()),
    }


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


whole = assembly_line()
alone = outcome(train_alone(whole, sgd(whole), image_batches, label_batches), whole)

# %% [markdown]
# First way: one process, two devices. Second way: two ranks, with the two ends of the yard from
# section 3. Each rank builds the whole line from the same seed and keeps its own half.

# %%
torch.set_num_threads(1)
line = assembly_line()
model = TwoBuildings(line[:CUT], line[CUT:], two_devices())
one_process = outcome(train_alone(model, sgd(model), image_batches, label_batches), model)


def train_in_two_buildings(rank):
    torch.set_num_threads(1)
    device = hardware.device()
    stage = (assembly_line()[:CUT], assembly_line()[CUT:])[rank].to(device)
    if rank == 0:
        train_first_stage(stage, sgd(stage), [items.to(device) for items in image_batches])
        return outcome([], stage)
    targets = [target.to(device) for target in label_batches]
    return outcome(train_last_stage(stage, sgd(stage), targets, (WIDTH,)), stage)


# %% [markdown]
# Third way: PyTorch's own interface. `PipelineStage` wraps a stage and knows its neighbours, and a
# **schedule** does the sends, the receives and the backward calls. With one micro-batch, that is
# with the batch in one piece, it does what you did by hand. Chapter 5 is about more than one.


# %%
def train_with_pytorch(rank):
    torch.set_num_threads(1)
    device = hardware.device()
    module = (assembly_line()[:CUT], assembly_line()[CUT:])[rank].to(device)
    stage = PipelineStage(module, stage_index=rank, num_stages=2, device=device)
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=cross_entropy)
    optimizer, losses = sgd(module), []
    for items, target in zip(image_batches, label_batches):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(items.to(device))
        else:
            schedule.step(target=target.to(device), losses=(own := []))
            losses += [loss.item() for loss in own]  # one for each micro-batch
        optimizer.step()
    return outcome(losses, module)


# %%
def together(results):
    """The vectors of both ranks, one behind the other."""
    return {what: torch.cat([result[what] for result in results]) for what in results[0]}


ways = {
    "one process, two devices": one_process,
    "two ranks by hand": together(launch(train_in_two_buildings, 2)),
    "two ranks with PyTorch": together(launch(train_with_pytorch, 2)),
}
for name, result in ways.items():
    same = {what: equal(alone[what], [result[what]]) for what in alone}
    print(f"{name}, as one process:", ", ".join(f"{what} {is_so}" for what, is_so in same.items()))

# %% [markdown]
# There is nothing to average here, and no sum that could be taken in another order. The cut changes
# where a number is computed, not how.

# %% [markdown]
# ### A language model in two buildings
#
# The same two functions train a transformer. The model is `course_utils.models.LanguageModel`: a
# table of token vectors, one of position vectors, a row of **blocks** (an attention and two linear
# layers each), a norm, and a head that turns each vector into one score per token of the
# vocabulary. The text is a short story that comes with the course, and a token is one character.
#
# **Attention** is where tokens see each other. It makes three vectors of each token. Its **query**
# is compared with the **keys** of the tokens up to it; the better a key fits, the more that token's
# **value** counts in the sum that the token gets. Several **heads** do this side by side, each with
# its own part of the width.
#
# A model that is no `nn.Sequential` needs a class for each half. Between blocks it is easy to cut:
# one tensor of shape (batch, tokens, width) goes from each block to the next.


# %%
class FirstHalf(nn.Module):
    """The tables and the first blocks of a LanguageModel."""

    def __init__(self, model, cut):
        super().__init__()
        self.token, self.position, self.blocks = model.token, model.position, model.blocks[:cut]

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


class SecondHalf(nn.Module):
    """The remaining blocks of a LanguageModel, its norm and its head."""

    def __init__(self, model, cut):
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[cut:], model.norm, model.head

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# %%
SMALL = {"vocabulary": len(text.vocabulary()), "width": 64, "heads": 4, "layers": 4, "context": 32}
SENTENCES = 16  # in a batch
tokens, next_tokens = text.windows(SMALL["context"], 30 * SENTENCES, seed=0)
token_batches, next_batches = tokens.split(SENTENCES), next_tokens.split(SENTENCES)


def small_model(**changes):
    torch.manual_seed(0)
    return LanguageModel(**SMALL, **changes)


def train_language_model(rank, prepare=lambda stage, optimizer: None, **changes):
    """Trains a half on each of two ranks. `prepare` may change things before the first step."""
    torch.set_num_threads(1)
    device = hardware.device()
    half = (FirstHalf, SecondHalf)[rank](small_model(**changes), cut=2).to(device)
    optimizer = torch.optim.SGD(half.parameters(), lr=0.2)
    prepare(half, optimizer)
    if rank == 0:
        train_first_stage(half, optimizer, [batch.to(device) for batch in token_batches])
        return outcome([], half)
    targets, shape = [batch.to(device) for batch in next_batches], (SMALL["context"], 64)
    return outcome(train_last_stage(half, optimizer, targets, shape), half)


# %%
def language_model_alone(**changes):
    model = small_model(**changes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return outcome(train_alone(model, optimizer, token_batches, next_batches), model)


expected = language_model_alone()
result = together(launch(train_language_model, 2))
for what, values in expected.items():
    print(f"{what} as in one process: {equal(values, [result[what]])}")
first, *_, last = result["losses"].tolist()
print("the loss fell by more than 0.5:", first - last > 0.5)

# %%
curves = {"one process": expected["losses"].tolist(), "two buildings": result["losses"].tolist()}
plots.loss_curves(curves, "A small language model learns characters")
plt.show()

# %% [markdown]
# *The two curves lie on each other: the thin one of the two buildings inside the thick one of the
# single process, the jump at step 6 included, which the large learning rate makes. Thirty steps are enough to learn which characters are frequent.*

# %% [markdown]
# ### The planned model: 24 layers of width 2,048
#
# The model above is a toy. How would it be with a real one? The web article *PyTorch Model Parallelism* cuts
# a language model with 24 layers, width 2,048, 16 heads and a vocabulary of 50,000 over two GPUs,
# for 4 texts of 512 tokens. You take these sizes for the `LanguageModel` from above. The article's
# own model is smaller, as you will count: inside, its layers are not four times as wide, and it has
# no positions and no last norm. You need no GPU to say what each device has to hold.
#
# For the parameters of a block of width $W$, add up the shapes: $4W^2 + 4W$ for the attention,
# $8W^2 + 5W$ for the two linear layers, $4W$ for the two norms. The tables and the head have a row
# for each token or position.
#
# For the activations of a block, walk through it. With $N$ texts of $T$ tokens, autograd keeps
# tensors of $NTW$ numbers: the block's input, the norm's output, queries, keys and values (three),
# what the heads return, the sum after the attention, the second norm's output, and both sides of
# the activation function, four times as wide (eight). That is 16. Each norm keeps a mean and a
# scale for each token, and the attention one number for each head and token. Together
# $4NT\,(16W + 4 + \text{heads})$ bytes.


# %%
def stage_bytes(stage, vocabulary, width, heads, layers, context, texts):
    """Predicts the bytes of stage 0 or 1 of a language model cut in the middle, with Adam."""
    N_T, blocks = texts * context, layers // 2
    numbers, tensors = blocks * (12 * width**2 + 13 * width), 12 * blocks
    activations = blocks * 4 * N_T * (16 * width + 4 + heads)
    if stage == 0:
        numbers += (vocabulary + context) * width
        tensors += 2
        activations += 8 * N_T  # the token numbers, for the table's gradient
    else:
        numbers += 2 * width + vocabulary * width
        tensors += 3
        activations += 4 * N_T * (2 * width + 2) + 4 * N_T * vocabulary + 8 * N_T + 4  # norm, loss
    return {
        "parameters": 4 * numbers,
        "gradients": 4 * numbers,
        "optimizer": 8 * numbers + 4 * tensors,
        "activations": activations,
    }


# %% [markdown]
# First the test: is the formula right for the small model, to the byte? Both halves run in this
# process, on the CPU, so that `kept_for_backward` counts what autograd really keeps. The `clone`
# has a reason: a batch that is a slice keeps the memory of the whole tensor it was cut from.

# %%
halves = [half(small_model(), cut=2) for half in (FirstHalf, SecondHalf)]
optimizers = [torch.optim.Adam(half.parameters()) for half in halves]

with kept_for_backward(halves[0]) as kept_0:
    products = halves[0](token_batches[0].clone())
arrived = products.detach().requires_grad_()
with kept_for_backward(halves[1]) as kept_1:
    loss = cross_entropy(halves[1](arrived).flatten(0, 1), next_batches[0].clone().flatten())
loss.backward()
products.backward(arrived.grad)

for stage, (half, optimizer, kept) in enumerate(zip(halves, optimizers, (kept_0, kept_1))):
    optimizer.step()
    ledger = memory_ledger(half, optimizer) | {"activations": kept.bytes}
    print(f"small model, building {stage}")
    compare(stage_bytes(stage, **SMALL, texts=SENTENCES), ledger)

# %% [markdown]
# Now the large one. On the device **meta** a tensor has a shape and a type, but no memory. So you
# can build the whole model on any laptop, run a training step of each half, and count. (Only the
# activations are the formula's: on meta no storage can be told from another.)

# %%
PLANNED = {"vocabulary": 50_000, "width": 2048, "heads": 16, "layers": 24, "context": 512}

with torch.device("meta"):
    planned = LanguageModel(**PLANNED)
    inputs = torch.empty(4, 512, dtype=torch.int64), torch.empty(4, 512, 2048)

planned_ledgers = []
for stage, half in enumerate((FirstHalf(planned, 12), SecondHalf(planned, 12))):
    optimizer = torch.optim.Adam(half.parameters())
    half(inputs[stage]).sum().backward()
    optimizer.step()
    predicted = stage_bytes(stage, **PLANNED, texts=4)
    ledger = memory_ledger(half, optimizer) | {"activations": predicted["activations"]}
    planned_ledgers.append({kind: ledger[kind] for kind in predicted})
    print(f"planned model, building {stage}: the rest as predicted:", ledger | predicted == ledger)
print(f"{sum(p.numel() for p in planned.parameters()):,} parameters")

# %% [markdown]
# And the article's own model? Its blocks are `nn.TransformerEncoderLayer`, which PyTorch makes
# 2,048 wide inside if nobody asks for more
# ([`torch.nn.TransformerEncoderLayer`](https://docs.pytorch.org/docs/stable/generated/torch.nn.TransformerEncoderLayer.html)).

# %%
with torch.device("meta"):
    blocks = [nn.TransformerEncoderLayer(2048, nhead=16) for _ in range(24)]
    article = nn.Sequential(nn.Embedding(50_000, 2048), *blocks, nn.Linear(2048, 50_000))
print(f"{sum(p.numel() for p in article.parameters()):,} parameters in the article's own model")


# %%
def added(ledgers):
    return {kind: sum(ledger[kind] for ledger in ledgers) for kind in ledgers[0]}


bars = [*planned_ledgers, added(planned_ledgers)]
plots.memory(bars, ["building 0", "building 1", "both in one"], "The planned model (computed)")
plt.show()
for name, ledger in zip(("building 0", "building 1", "both in one"), bars):
    print(f"{name}: {sum(ledger.values()):,} bytes")
print(f"a step sends {4 * 4 * 512 * 2048:,} bytes there and as many back")

# %% [markdown]
# *The whole model needs 27.5 GiB and would not fit on a GPU with 24 GiB. Each half needs less than
# 14 GiB and fits. Most of it is the optimizer's, the gradients' and the parameters' share.*
#
# Compare the last line with the bars: 16 MiB cross the yard in each direction, while data
# parallelism would hand over the gradients of all 1.4 billion parameters, 5.3 GiB, in each step. That is
# for 2,048 tokens. Activations grow with the tokens of a step, gradients do not: at some 690,000 tokens
# the two are equal, and large runs have more.
#
# The bars add up all four kinds. In a step the activations go as the gradients come, so the two are
# never there in full together. On the other hand, single operations need room in between, and on a
# GPU the allocator and the libraries come on top.

# %% [markdown]
# ### Where to cut
#
# Equal numbers of layers are not equal work. The network below is a convolutional one whose layers
# are very uneven. A convolution works at each place of an image. Before an image is made smaller,
# there are four times as many places as after.


# %%
def uneven_line():
    """Eight stations from images (N, 1, 28, 28) to scores (N, 10)."""
    torch.manual_seed(0)

    def conv(a, b, *more):
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *more)

    return nn.Sequential(
        *(conv(1, 64), conv(64, 64, nn.MaxPool2d(2)), conv(64, 64), conv(64, 64, nn.MaxPool2d(2))),
        nn.Sequential(nn.Flatten(), nn.Linear(3136, 256), nn.ReLU()),
        *(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2)),
        nn.Linear(256, 10),
    )


# %% [markdown]
# **Profile** first. Two ways: count the multiplications and additions of each station, which gives
# the same on every machine, or take the time, which is what you want to balance in the end, but
# wobbles.


# %%
def flops_of(line, items):
    """Multiplications and additions of each station's forward, in millions."""
    counts = []
    for station in line:
        with FlopCounterMode(display=False) as counter:
            items = station(items)
        counts.append(counter.get_total_flops() / 1e6)
    return counts


def seconds_of(line, items, rounds=5):
    """The fastest of a few forward passes of each station."""
    times = []
    for station in line:
        clock = [perf_counter()]
        for _ in range(rounds):
            result = station(items)
            clock.append(perf_counter())
        times.append(min(b - a for a, b in pairwise(clock)))
        items = result
    return times


work = flops_of(uneven_line(), all_images[:16])
for number, millions in enumerate(work):
    print(f"station {number}: {millions:8.1f} million operations, {millions / sum(work):6.1%}")

# %% [markdown]
# Second, the best cut. What decides is the slowest stage, so you look for the cuts whose slowest
# stage is the least slow. For eight stations you can afford to try all cuts. For $L$ stations and
# $p$ stages there are $\binom{L-1}{p-1}$.


# %%
def stage_work(work, cuts):
    """The work of each stage; a cut is the number of stations before it."""
    edges = (0, *cuts, len(work))
    return [sum(work[a:b]) for a, b in pairwise(edges)]


def try_all_cuts(work, stages):
    """The cuts with the least work in the fullest stage."""
    return min(
        combinations(range(1, len(work)), stages - 1), key=lambda cuts: max(stage_work(work, cuts))
    )


equal_layers, best = (4,), try_all_cuts(work, 2)
for name, cuts in (("equal numbers of layers", equal_layers), ("best cut", best)):
    shares = " | ".join(f"{part / sum(work):.0%}" for part in stage_work(work, cuts))
    print(f"{name}: after station {cuts[0] - 1}, work {shares}")
print(f"24 layers in 4 stages: {math.comb(23, 3):,} cuts to try; 96 in 8: {math.comb(95, 7):,}")

# %% [markdown]
# Trying all is exact, but it does not go far. Exercise 4.3 asks you for a partitioner that is exact
# and fast.

# %%
figure, ax = plt.subplots(figsize=(plots.WIDTH, 3.0))
colors = [plots.RANK_COLORS[int(station >= best[0])] for station in range(len(work))]
ax.bar(range(len(work)), work, color=colors, edgecolor=plots.COLORS["ink"], linewidth=0.8)
for cut, name, style in ((4, "equal numbers of layers", ":"), (best[0], "best cut", "-")):
    ax.axvline(cut - 0.5, color=plots.COLORS["wrong" if cut == 4 else "ink"], linestyle=style)
    ax.text(cut - 0.45, 0.97 * max(work), name, va="top", fontsize=10)
ax.set(xlabel="station", ylabel="million operations", title="Work of the stations (counted)")
plt.show()

# %% [markdown]
# *Station 1 has almost two thirds of all work. The cut in the middle leaves almost nothing for building 1.
# The best cut comes right after station 1.*
#
# Third, the test. A stream of eight batches through two ranks, as in section 3, with both cuts.
# Predicted from the counted work: (sum + 7 x slowest) of each.


# %%
def stream_of_images(rank, cut, batches=8, rounds=4):
    torch.set_num_threads(1)
    device, records = hardware.device(), []
    line = uneven_line().to(device).requires_grad_(False)
    items = all_images[:16].to(device)
    products = line[:cut](items)  # on rank 1 only for its shape
    for _ in range(1 + rounds):
        crates = []
        with Trace() as trace:
            for _ in range(batches):
                if rank == 1:
                    dist.recv(products, src=0)
                with trace.span("forward"):
                    done = line[:cut](items) if rank == 0 else line[cut:](products)
                if rank == 0:
                    crates.append((done, dist.isend(done, dst=1)))
            for _, work in crates:
                work.wait()
        records.append(trace.record())
    return records[1:]


# %%
streams = {
    "equal numbers of layers": fastest(launch(stream_of_images, 2, equal_layers[0])),
    "best cut": fastest(launch(stream_of_images, 2, best[0])),
}
plots.timelines(streams)
plt.show()
pace = [sum(work) + 7 * max(stage_work(work, cuts)) for cuts in (equal_layers, best)]
print(f"predicted: the best cut takes {pace[1] / pace[0]:.2f} of the time of the equal one")

# %% [markdown]
# *Above, building 1 has next to nothing to do, and the stream takes as long as in one building.
# Below, building 1 takes over a third of the work, and the stream ends earlier.*
#
# And what the clock says. The last line is the best cut for the measured times instead of the
# counted work. On your machine it may be a different one: a convolution does more operations in a
# microsecond than a ReLU or a pooling layer, which the count leaves out.

# %% tags=["nbval-ignore-output"]
ends = [end_of(records) for records in streams.values()]
print(f"measured: the best cut takes {ends[1] / ends[0]:.2f} of the time of the equal one")
times = seconds_of(uneven_line().requires_grad_(False), all_images[:16])
print("shares of the time:", ", ".join(f"{share / sum(times):.0%}" for share in times))
print("best cut by time: after station", try_all_cuts(times, 2)[0] - 1)

# %% [markdown]
# ## 5. Break it: mistakes that people make with a cut model
#
# ### Bug hunt: a class from the web
#
# This class, shortened a little, comes from Run:ai's *PyTorch Multi GPU: 4 Techniques Explained*. It says that
# it "defines where your subnetworks are placed and how both perform a forward pass". Find two
# mistakes before you run it.


# %%
class ModelParallel(nn.Module):
    def __init__(self):
        self.sub_network1 = nn.Linear(20, 500)
        self.sub_network2 = nn.Linear(500, 10)

    def forward(x):
        x = self.sub_network1(x)  # noqa: F821 - as the guide has it
        x = self.sub_network2(x)  # noqa: F821
        return x


def error_of(action):
    """What `action()` raises, as text."""
    try:
        action()
    except (AttributeError, RuntimeError, TypeError) as error:
        # newer versions of PyTorch put the name of the operation in front
        return f"{type(error).__name__}: {str(error).removeprefix('addmm: ')}"
    return "no error"


print(error_of(ModelParallel))


# %%
class WithInit(ModelParallel):
    def __init__(self):
        nn.Module.__init__(self)
        self.sub_network1 = nn.Linear(20, 500)
        self.sub_network2 = nn.Linear(500, 10)


print(error_of(lambda: WithInit()(torch.ones(2, 20))))

# %% [markdown]
# The first: without `super().__init__()` a module has no list in which it could register its parts.
# The second: a method gets the object as its first argument. `forward(x)` has no name for it, so
# `x` would be the model, and the batch is one argument too many. The error speaks of 2 arguments
# where you gave one, which is what gives it away. The repair: `def forward(self, x)`.
#
# The same guide names "the `model_parallel` class" as if PyTorch had one. It has not. The class is
# the author's own.

# %% [markdown]
# ### Bug hunt: the missing flatten
#
# Another article's model, again shortened. The first part is said to be for "cuda:0". Here it gets
# images of 64 x 64. What comes out of the pooling layer, and what does the linear layer make of it?

# %%
part1 = nn.Sequential(
    nn.Conv2d(3, 16, 7, stride=2, padding=3),
    nn.ReLU(),
    nn.MaxPool2d(3, stride=2, padding=1),
    nn.Linear(1024, 512),
)
pictures = torch.randn(4, 3, 64, 64)
print("out of the pooling layer:", tuple(part1[:3](pictures).shape))
print(error_of(lambda: part1(pictures)))

# %% [markdown]
# A linear layer works on the *last* dimension and takes all others for a batch. It sees
# 4 x 16 x 16 = 1,024 rows of 16 numbers. The two 1,024 in the message have nothing to do with each
# other. If you follow the message and write `Linear(16, 512)`, you get something worse than an error:

# %%
part1[3] = nn.Linear(16, 512)
print("no error, but the shape is", tuple(part1(pictures).shape))

features = part1[:3](pictures).flatten(start_dim=1)
print("with a flatten:", tuple(nn.Linear(16 * 16 * 16, 512)(features).shape))

# %% [markdown]
# Without the flatten, each row of each channel of each image gets 512 features of its own. The
# repair is a flatten between the two kinds of layers, and an input size that counts channels x
# height x width after the pooling. In exercise 4.4 you repair the whole model.

# %% [markdown]
# ### A target on the wrong device
#
# The output of a cut model is on the last device. The targets come out of the data loader on the
# CPU. The loss wants both in one place. So that you can see this without a GPU, the model's output
# is on the device meta here, which counts as another device on every machine.

# %%
scores = nn.Linear(256, 10, device="meta")(torch.empty(64, 256, device="meta"))
print(error_of(lambda: cross_entropy(scores, labels)))
print(error_of(lambda: cross_entropy(scores, labels.to(scores.device))))

# %% [markdown]
# With GPUs the sentence starts with *Expected all tensors to be on the same device*. The repair is
# to ask the output where it is, and not to name a device: `target.to(output.device)`. It is right
# for any cut. Do not move the output to the CPU instead: then `backward` starts with a transfer of
# all scores.

# %% [markdown]
# ### Two ends that disagree
#
# Nothing travels with the products that says how large they are. Building 1 has to know. 1,000
# images make fifteen batches of 64 and one of 40, and here building 1 has not thought of the last.


# %%
def last_batch(rank):
    device = hardware.device()
    if rank == 0:
        dist.send(torch.ones(40, WIDTH, device=device), dst=1)
    else:
        dist.recv(torch.empty(64, WIDTH, device=device), src=0)


try:
    launch(last_batch, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# `launch` compares what the two ends asked for. Plain gloo, the backend on CPUs, does not: it fills
# the first 40 rows and leaves whatever was in the other 24, without a word. A message that is
# larger than its room ends the process that receives it. The repair is to take the size from the
# targets of the same batch, which `train_last_stage` does, or to send the shape first.

# %% [markdown]
# ### A tied embedding, cut in two
#
# Many language models use one table twice: at the entrance it turns tokens into vectors, and at the
# exit it turns vectors into scores. That is a **tied embedding**. In one process both places hold
# the same `Parameter`, and autograd adds the gradients of both uses.
#
# Cut the model, and the entrance is in building 0 and the exit in building 1. Each process builds
# its own table. They begin equal. What happens then? No error, for a start.


# %%
def note_tables(history):
    """A `prepare` that notes the table of this half after each step."""

    def prepare(half, optimizer):
        table = (half.token if hasattr(half, "token") else half.head).weight
        optimizer.register_step_post_hook(lambda *_: history.append(table.detach().cpu().clone()))

    return prepare


def untied(rank):
    history = []
    train_language_model(rank, note_tables(history), tied=True)
    return history


entrance, exit_ = launch(untied, 2)
tied_alone = small_model(tied=True)
optimizer = torch.optim.SGD(tied_alone.parameters(), lr=0.2)
train_alone(tied_alone, optimizer, token_batches, next_batches)
print("equal after the last step:", equal(entrance[-1], [exit_[-1]]))
print("entrance as in one process:", equal(tied_alone.token.weight.detach(), [entrance[-1]]))
print("exit as in one process:    ", equal(tied_alone.token.weight.detach(), [exit_[-1]]))

# %% [markdown]
# The table is **silently untied**. Each building has only its own half of the gradient. The two
# copies drift apart from the first step on, and neither is the table of the single process.
#
# The repair is to let both ranks have the sum, as autograd makes it in one process. Between
# backward and the update both call one all-reduce for the gradient of the table. An optimizer can
# be asked to do something before each step, so the training loops stay as they are:


# %%
def sum_of_both_uses(half, optimizer):
    """A `prepare` that adds up the gradients of the table's two uses before each step."""
    table = (half.token if hasattr(half, "token") else half.head).weight
    optimizer.register_step_pre_hook(lambda *_: dist.all_reduce(table.grad))


def tied_again(rank):
    history = []

    def prepare(half, optimizer):
        sum_of_both_uses(half, optimizer)
        note_tables(history)(half, optimizer)

    train_language_model(rank, prepare, tied=True)
    return history


entrance_tied, exit_tied = launch(tied_again, 2)
print("equal after every step:", all(equal(a, [b]) for a, b in zip(entrance_tied, exit_tied)))
print(
    "both as in one process:",
    equal(tied_alone.token.weight.detach(), [entrance_tied[-1], exit_tied[-1]]),
)


# %%
def draw_tables(ax, left, title, tables, note):
    """One panel: a building for each table, what goes in and out, and what becomes of gradients."""
    for number, table in enumerate(tables):
        x = left + 0.35 + 1.5 * number
        plots.building(ax, x, 0.85, 1.1, 1.7, color=plots.RANK_COLORS[number])
        plots.blueprint(ax, x + 0.1, 1.4)
        ax.text(x + 0.55, 0.96, table, ha="center", va="bottom", fontsize=9)
    plots.arrow(ax, (left, 1.45), (left + 0.3, 1.45))
    plots.arrow(ax, (x + 1.15, 1.45), (x + 1.45, 1.45))
    middle = (left + x + 1.45) / 2
    ax.text(middle, 2.85, title, ha="center", weight="bold", fontsize=11)
    ax.text(middle, 0.7, note, ha="center", va="top", fontsize=9)


# %%
figure, ax = plots.canvas(height=2.6)
two = ["entrance", "exit"]
draw_tables(ax, 0.1, "one process", ["one table"], "both gradients\nadd up in it")
draw_tables(ax, 2.75, "silently untied", two, "each table gets the gradient\nof its own use only")
draw_tables(ax, 6.6, "tied again", two, "both tables get the sum\nof both gradients")
for start, end in ((8.0, 8.5), (8.5, 8.0)):
    plots.arrow(ax, (start, 1.75), (end, 1.75), color=plots.COLORS["communication"])
plt.show()

# %% [markdown]
# *Left: in one process the entrance and the exit use the same table. Middle: after the cut there
# are two tables, and nobody keeps them equal. Right: an exchange of the gradients in every step
# keeps them equal.*

# %%
drift = [(a - b).abs().max().item() for a, b in zip(entrance, exit_)]
kept = [(a - b).abs().max().item() for a, b in zip(entrance_tied, exit_tied)]
figure, ax = plt.subplots(figsize=(plots.WIDTH, 2.6))
ax.plot(range(1, 31), drift, color=plots.COLORS["wrong"], label="silently untied")
ax.plot(range(1, 31), kept, color=plots.COLORS["ink"], label="tied again")
ax.set(xlabel="step", ylabel="largest difference", title="Between entrance and exit")
ax.legend()
plt.show()

# %% [markdown]
# *Untied, the tables are apart after the first step, and do not come together again. Tied again,
# their distance stays at zero.*
#
# The price: the table is stored twice, and its gradient crosses the yard in every step. For the
# planned model that would be 50,000 x 2,048 numbers, 410 MB, where the activations are 17 MB.
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) pays this price: it keeps an *embedding
# group* of the first and the last stage for this all-reduce. The ways round it are to give up the
# tie, or to put both ends on one device.

# %% [markdown]
# ### An optimizer that was built before the move
#
# "Build the optimizer after `model.to(device)`", people say. Is that still so? A plain `.to` from
# the CPU to a GPU puts new data into the *same* `Parameter` objects, so an optimizer that knows
# them goes on working. But there are moves that make new objects, and they are the ones that you
# need for large models: you build on meta, keep your half, and let `to_empty` give it memory.

# %%
stage = nn.Linear(4, 4, device="meta")
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)  # too early
weight = stage.weight

stage.to_empty(device=hardware.device())
nn.init.ones_(stage.weight)
nn.init.zeros_(stage.bias)
print("the same Parameter after the move:", stage.weight is weight)

before = flat(stage.parameters())
for _ in range(5):
    stage(torch.ones(2, 4, device=hardware.device())).sum().backward()
    optimizer.step()
print("parameters changed in five steps:", not equal(before, [flat(stage.parameters())]))

# %% [markdown]
# No error and no warning. The optimizer holds the old parameters on meta. They never get a
# gradient, so it skips them, and the stage never learns. A loss that does not fall is all that you
# see.
#
# One question finds this bug and its relatives (a stage that was copied with `deepcopy`, a layer
# that was replaced): does the optimizer hold the parameters of the model that I call?


# %%
def holds(optimizer, module):
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return all(id(p) in held for p in module.parameters())


print("built before the move:", holds(optimizer, stage))
print("built after the move: ", holds(torch.optim.SGD(stage.parameters(), lr=0.1), stage))

# %% [markdown]
# There is one more reason to build it afterwards. The optimizer's state, such as Adam's averages,
# does not move with the model. Load a checkpoint into the optimizer first and move the model then,
# and its state is still on the old device.

# %% [markdown]
# ### Bug hunt: a language model that cannot read
#
# The article from which you took the sizes in section 4 builds its layers as
# `nn.TransformerEncoderLayer(d_model=..., nhead=...)` and feeds them tokens of shape (4 texts, 512
# tokens). It runs, and the output has the right shape. Below is the article's model in small. Which
# tokens does a score depend on?


# %%
class ArticleModel(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.token_embedding = nn.Embedding(50, 16)
        layers = (nn.TransformerEncoderLayer(16, 2, dropout=0.0, **options) for _ in range(2))
        self.layers = nn.ModuleList(layers)
        self.output_layer = nn.Linear(16, 50)

    def forward(self, x, **options):
        x = self.token_embedding(x)
        for layer in self.layers:
            x = layer(x, **options)
        return self.output_layer(x)


def what_it_reads(model, **options):
    """Changes token 3 of text 0, and says which scores that changes."""
    texts = torch.arange(4 * 8).view(4, 8)
    other = texts.clone()
    other[0, 3] = 49
    changed = ((model(texts, **options) - model(other, **options)).abs() > 1e-6).any(dim=-1)
    print("  a later place of the same text:   ", changed[0, 4:].any().item())
    print("  an earlier place of the same text:", changed[0, :3].any().item())
    print("  another text:                     ", changed[1:].any().item())


# %%
print("as in the article, the changed token changes")
what_it_reads(ArticleModel())

mask = nn.Transformer.generate_square_subsequent_mask(8)
print("with batch_first=True and a causal mask it changes")
what_it_reads(ArticleModel(batch_first=True), src_mask=mask, is_causal=True)

# %% [markdown]
# By default the layer expects (tokens, texts). With (texts, tokens) it lets the texts of a batch
# look at each other, place by place, and no place ever sees what was written before it. The repair
# has two parts: `batch_first=True`, and a **causal mask**, without which a place would also see the
# tokens that it has to predict. The positions are missing too. No cut is wrong here, and no cut
# makes it right: test the model on one device first.

# %% [markdown]
# ## 6. Exercises: cut, hand over, balance
#
# Five exercises, from three buildings to an experiment of your own. `check` hands your code fresh
# random layers and sizes and prints one line per requirement. `hint("4.1")` prints the next of
# three hints.
#
# Where a machine has no GPU, a check needs a second device to see what you move where. It takes
# PyTorch's **meta device**: a tensor there has shape, dtype and place, and no content.

# %% [markdown]
# ### 4.1 Three buildings (2 points)
#
# Spread a chain of layers over three devices. The parts are as even as whole layers allow. The
# devices are given: they may be three GPUs, one GPU and the CPU, or the same device three times.


# %% nbgrader={"grade_id": "4.1", "solution": true}
class ThreeBuildings(nn.Module):
    """A chain of layers in three consecutive parts, part i on `devices[i]`.

    `layers`: at least three modules that are called one after the other. No two parts differ by
    more than one layer. All parameters and buffers of a part are on its device, and an optimizer
    finds every parameter in `parameters()`. What is frozen stays frozen.

    The inputs may come from any device. The output stays on the last part's device. Backward
    reaches the first layer.
    """

    def __init__(self, layers: list[nn.Module], devices: list[torch.device]) -> None:
        super().__init__()
        ### BEGIN SOLUTION
        size, longer = divmod(len(layers), 3)  # the first `longer` parts take one layer more
        ends = [size + min(1, longer), 2 * size + longer, len(layers)]
        chains = layers[: ends[0]], layers[ends[0] : ends[1]], layers[ends[1] :]
        self.buildings = nn.ModuleList(nn.Sequential(*chain) for chain in chains)
        self.places = devices
        for building, place in zip(self.buildings, devices):
            building.to(place)
        ### END SOLUTION

    def forward(self, inputs: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        goods = inputs
        for building, place in zip(self.buildings, self.places):
            goods = building(goods.to(place))
        return goods
        ### END SOLUTION


# %% nbgrader={"grade_id": "4.1-check", "grade": true, "points": 2, "locked": true}
check("4.1", ThreeBuildings)

# %% [markdown]
# ### 4.2 Across the cut and back (2 points)
#
# Autograd does not know that there is another rank. Its graph on rank 0 ends at the activations,
# and the graph on rank 1 begins with what arrived. Carry one training step across: activations go
# forward, gradients come back.
#
# In a real network more than one tensor crosses: a residual, a mask, token numbers. What crosses
# therefore is a list. Three rules keep both ranks in step, whatever the loss does.
#
# * Every tensor of the list is sent forward, in the order of the list.
# * For every *floating-point* tensor of the list, a gradient of the same shape and dtype is sent
#   back, in the same order. Where the loss did not use the tensor, it is zero.
# * Integer tensors have no gradient, so nothing is sent back for them.


# %% nbgrader={"grade_id": "4.2", "solution": true}
def hand_over(stage: nn.Module, data: Tensor, room: list[Tensor]) -> float | None:
    """Forward and backward of one step through a model that is cut between ranks 0 and 1.

    Called on both ranks, each with its own stage. `room` holds one tensor for each that crosses,
    with its shape, dtype and device, contiguous; the contents mean nothing, and you may overwrite
    them. The next step may come with the same tensors.

    On rank 0, `data` are the inputs, and `stage(data)` returns the tuple of tensors that cross. They
    may be not contiguous, and some may need no gradient. The function returns None. On rank 1,
    `data` are the targets, `stage(*tensors, data)` returns the loss, a scalar, and so does the
    function, as a float.

    Gradients are added to `.grad` of both stages' parameters, as `loss.backward()` does it in a
    model that is not cut: a parameter that the loss does not use keeps None.
    """
    ### BEGIN SOLUTION
    if dist.get_rank() == 1:
        leaves = []  # here this graph begins; `room` itself comes again, without a gradient
        for tensor in room:
            dist.recv(tensor, src=0)
            leaves.append(tensor.detach().requires_grad_(tensor.is_floating_point()))
        loss = stage(*leaves, data)
        loss.backward()
        for leaf in leaves:
            if leaf.requires_grad:
                unused = leaf.grad is None
                dist.send(torch.zeros_like(leaf) if unused else leaf.grad, dst=0)
        return loss.item()
    crossing = stage(data)
    for tensor in crossing:
        dist.send(tensor.detach().contiguous(), dst=1)
    pairs = []
    for tensor, gradient in zip(crossing, room):
        if tensor.is_floating_point():
            dist.recv(gradient, src=1)
            pairs += [(tensor, gradient)] if tensor.requires_grad else []
    torch.autograd.backward(*zip(*pairs))  # all at once: they may share a part of the graph
    return None
    ### END SOLUTION


# %% nbgrader={"grade_id": "4.2-check", "grade": true, "points": 2, "locked": true}
check("4.2", hand_over)

# %% [markdown]
# ### 4.3 The best cut (3 points)
#
# A chain of stages is as fast as its slowest stage. Given each layer's cost, find the cut whose
# slowest stage is as fast as possible. "As many layers each" misses it, and so does "fill a stage
# until it has its share". Your answer has to be exact.
#
# There are 11 ways to cut 12 layers once, and almost 10^14 ways to cut 96 layers into 12
# stages. The check tries such a model, so trying all cuts does not finish.


# %% nbgrader={"grade_id": "4.3", "solution": true}
def balanced_cuts(costs: list[float], stages: int) -> list[int]:
    """Returns where to cut a chain of layers so that the slowest stage is as fast as possible.

    `costs` are the layers' costs, each at least 0, in any unit: whole numbers or not, large or tiny
    (0.00001). Every stage is a run of consecutive layers, at least one. The cost of a stage is the
    sum of its layers'.

    The result has stages - 1 indices in ascending order. A cut c stands before layer c: with cuts
    [2, 5], the stages are costs[:2], costs[2:5] and costs[5:]. Any best cut will do.

    Raises ValueError, with a message, where `stages` is less than 1 or more than there are layers.
    """
    ### BEGIN SOLUTION
    from itertools import accumulate

    layers = len(costs)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be cut into {stages} stages of one or more.")
    total = [0, *accumulate(costs)]  # total[i]: the cost of the first i layers
    # best[i] is (slowest stage, cuts) for the first i layers, with one stage more in each round.
    best = [(total[i], []) for i in range(layers + 1)]
    for stage in range(1, stages):
        previous = best
        best = [(float("inf"), [])] * (layers + 1)
        for i in range(stage + 1, layers + 1):
            slowest, cut = min(
                (max(previous[c][0], total[i] - total[c]), c) for c in range(stage, i)
            )
            best[i] = slowest, [*previous[cut][1], cut]
    return best[layers][1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "4.3-check", "grade": true, "points": 3, "locked": true}
check("4.3", balanced_cuts)

# %% [markdown]
# ### 4.4 Repair the convolutional model (2 points)
#
# This model is put together from articles about model parallelism. It does not run. Read it, count
# its mistakes, then write a model of the same architecture that works. Six things are wrong or too
# narrow.
#
# ```python
# class ConvNet(nn.Module):
#     def __init__(self):
#         self.part1 = nn.Sequential(
#             nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3),
#             nn.ReLU(),
#             nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
#             nn.Linear(1024, 512),
#         ).to("cuda:0")
#         self.part2 = nn.Sequential(
#             nn.ReLU(),
#             nn.Linear(512, 256),
#             nn.ReLU(),
#             nn.Linear(256, 10),
#         ).to("cuda:1")
#
#     def forward(x):
#         x = self.part1(x)
#         x = x.to("cuda:1")
#         return self.part2(x)
# ```
#
# A convolution or pooling with kernel k, stride s and padding p turns a height of h into
# floor((h + 2p - k) / s) + 1.


# %% nbgrader={"grade_id": "4.4", "solution": true}
class RepairedConvNet(nn.Module):
    """The model above, for images of any size, in two parts on the two `devices`.

    `image_size` is (height, width) in pixels. `part1` reaches up to the first linear layer and is
    on `devices[0]`; the rest is `part2`, on `devices[1]`. The layers and their order are those of
    the model above; the first linear layer takes all that pooling leaves of an image. All
    parameters exist after construction, so that an optimizer can be built.

    Called with images (N, 3, height, width) on any device, it returns the logits (N, 10) on
    `devices[1]`.
    """

    def __init__(self, image_size: tuple[int, int], devices: list[torch.device]) -> None:
        ### BEGIN SOLUTION
        super().__init__()
        self.devices = devices
        see = nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Flatten()
        with torch.no_grad():
            seen = nn.Sequential(*see)(torch.zeros(1, 3, *image_size))
        self.part1 = nn.Sequential(*see, nn.Linear(seen.shape[1], 512)).to(devices[0])
        classify = nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)
        self.part2 = nn.Sequential(*classify).to(devices[1])
        ### END SOLUTION

    def forward(self, images: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        first, second = self.devices
        return self.part2(self.part1(images.to(first)).to(second))
        ### END SOLUTION


# %% nbgrader={"grade_id": "4.4-check", "grade": true, "points": 2, "locked": true}
check("4.4", RepairedConvNet)

# %% [markdown]
# ### 4.5 An experiment: three strategies (3 points)
#
# Which cut is best? Some count layers, some count parameters, some measure time. Compare the
# three. The first step is a table that can be trusted, and the check goes through it to the byte.
#
# The time of each layer comes in as a list, measured before. So the table depends on nothing but
# its inputs. `cut(costs, stages)` returns the best cuts in the form of exercise 4.3: your
# `balanced_cuts`, or `try_all_cuts` from section 4.
#
# To run a stage alone, feed it what arrives there: the output of the stage before it, detached.
# It came over a cut, so it has to require a gradient, if it is floating point. Otherwise autograd
# keeps less than it does in training. `kept_for_backward` counts what a
# forward pass keeps:
#
# ```python
# with kept_for_backward(stage) as kept:
#     outputs = stage(arriving)
# kept.bytes
# ```


# %% nbgrader={"grade_id": "4.5", "solution": true}
def compare_cuts(
    layers: nn.Sequential,
    inputs: Tensor,
    seconds: list[float],
    stages: int,
    cut: Callable[[list[float], int], list[int]],
) -> dict[str, dict]:
    """Returns a table of three ways to cut `layers` into `stages` consecutive stages.

    `seconds` is each layer's time for forward and backward. `inputs` is the batch that enters the
    first layer. The keys of the result are the strategies:

        "equal layers"      as many layers each; where that does not divide, the first stages have
                            one more (as `torch.tensor_split` does it)
        "equal parameters"  what `cut` returns for the number of parameters of each layer, frozen
                            ones included
        "profiled time"     what `cut` returns for `seconds`

    Each row is a dict:

        "cuts"     the indices of the layers before which the chain is cut
        "memory"   for each stage, the bytes of its parameters, buffers, gradients and of what it
                   keeps for backward of this batch. A parameter that a stage uses twice counts
                   once, and so does a tensor that two layers keep; a frozen one has no gradient.
                   What comes over a cut requires a gradient. The layers stay in their mode. The
                   optimizer is plain SGD and keeps nothing.
        "slowest"  the seconds of the slowest stage
        "idle"     the share of all stages' time that is idle when batches follow each other
                   without a gap: a stage works its own seconds in every `slowest` seconds
    """

    ### BEGIN SOLUTION
    def memory_of(parts: list[nn.Sequential]) -> list[int]:
        result, goods = [], inputs
        for part in parts:
            with kept_for_backward(part) as kept:
                outputs = part(goods)
            held = [*part.parameters(), *part.buffers()]
            gradients = [p for p in part.parameters() if p.requires_grad]
            result.append(kept.bytes + sum(tensor.nbytes for tensor in held + gradients))
            goods = outputs.detach().requires_grad_(outputs.is_floating_point())
        return result

    def row(cuts: list[int]) -> dict:
        spans = [slice(*span) for span in pairwise([0, *cuts, len(layers)])]
        times = [sum(seconds[span]) for span in spans]
        return {
            "cuts": cuts,
            "memory": memory_of([layers[span] for span in spans]),
            "slowest": max(times),
            "idle": 1 - sum(times) / (stages * max(times)),
        }

    numbers = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    size, longer = divmod(len(layers), stages)
    return {
        "equal layers": row([i * size + min(i, longer) for i in range(1, stages)]),
        "equal parameters": row(cut(numbers, stages)),
        "profiled time": row(cut(seconds, stages)),
    }
    ### END SOLUTION


def conclusion() -> str:
    """Returns what you conclude from the experiment that follows the check. Nothing checks it."""
    ### BEGIN SOLUTION
    return (
        "The profile has the fastest slowest stage: with two stages 0.67 of the operations that\n"
        "equal layers give it, and 0.66 of those that equal parameters give. Equal parameters are\n"
        "worst in both respects: the layers with most parameters have little work and keep little\n"
        "for backward, so with 2, 3 and 4 stages this cut also has the largest stage in memory.\n"
        "Where memory is short I would take the profile for two stages, since its fuller stage is\n"
        "the smallest there too, and equal layers for three or four. They cost a quarter more\n"
        "time with three stages and nearly none with four, where station 1 alone sets the pace."
    )
    ### END SOLUTION


# %% nbgrader={"grade_id": "4.5-check", "grade": true, "points": 3, "locked": true}
check("4.5", compare_cuts)

# %% [markdown]
# Now the experiment itself. It has no single right answer, so nothing checks it. As soon as your
# `compare_cuts` is written, the next cells give it `uneven_line()` from section 4, for 2, 3 and 4
# stages, and draw its tables. The counted operations stand for the seconds, so that you get the
# same picture on every machine.
#
# 1. **Predict** first: which strategy has the fastest slowest stage, and which has the largest
#    stage in memory?
# 2. Run the cells. Then add your own: `seconds_of` instead of the count, or better a profile with
#    backward, or a model of your own.
# 3. Return your conclusion from `conclusion`, in a few sentences. Which strategy won, and by how
#    much? Which would you take where memory is short, and why?


# %%
def if_written(answer, *inputs):
    """What `answer` returns; None while it is not written, and where it does not work yet."""
    try:
        return answer(*inputs)
    except NotImplementedError:
        return None
    except Exception as error:  # noqa: BLE001 - a half-written answer may raise anything
        print(f"not yet ({type(error).__name__}: {error}): check your answer first")
        return None


def draw_cuts(tables):
    """Bars of all stages: one column for each table, memory above and operations below."""
    _, axes = plt.subplots(
        2, len(tables), figsize=(plots.WIDTH, 4.6), sharey="row", layout="constrained"
    )
    for (above, below), (stages, table) in zip(axes.T, tables.items()):
        style = {"width": 0.8 / stages, "color": plots.RANK_COLORS[:stages]}
        for group, found in enumerate(table.values()):
            places = [group - 0.4 + 0.8 * (stage + 0.5) / stages for stage in range(stages)]
            above.bar(places, [count / 2**20 for count in found["memory"]], **style)
            below.bar(places, stage_work(work, found["cuts"]), **style)
        above.set(title=f"{stages} stages", xticks=[])
        below.set_xticks(range(len(table)), [name.replace(" ", "\n") for name in table])
    axes[0, 0].set_ylabel("memory (MiB)")
    axes[1, 0].set_ylabel("million operations")


# %%
batch = all_images[:16].clone()  # a slice would keep all images


def experiment():
    """Prints your tables, draws them and returns them, by the number of stages."""
    tables = {}
    for stages in (2, 3, 4):
        tables[stages] = compare_cuts(uneven_line(), batch, work, stages, try_all_cuts)
        for strategy, found in tables[stages].items():
            print(
                f"{stages} stages, {strategy:16}  slowest {found['slowest'] / sum(work):4.0%} of work, "
                f"idle {found['idle']:3.0%}, largest {max(found['memory']):>10,} bytes"
            )
    draw_cuts(tables)
    plt.show()
    return tables


tables = if_written(experiment) or {}
if not tables:
    print("no tables yet: they come with a compare_cuts that passes its check")

# %% [markdown]
# *Once you have tables: a group of bars for each strategy, with a bar for each stage, the first on
# the left. Above, the highest bar of a group says how much memory the fullest device needs. Below,
# it sets the pace of the line.*
#
# And the clock: the stream of eight batches from section 4 goes through two ranks, with each
# strategy's cut for two stages.


# %% tags=["nbval-ignore-output"]
def clock():
    ends = {
        strategy: end_of(fastest(launch(stream_of_images, 2, found["cuts"][0])))
        for strategy, found in tables.get(2, {}).items()
    }
    for strategy, end in ends.items():
        print(f"{strategy}: {end / ends['equal layers']:.2f} of the time of equal layers")


if_written(clock)

# %%
print(if_written(conclusion) or "no conclusion yet: write it into the function `conclusion`")

# %% [markdown]
# ## 7. See it: one line, its cuts, and who waits
#
# The explorer simulates a line of eight stations. Seven of them take one minute for a batch, one is
# heavy. All its times are the model's, none is measured. Try:
#
# * Move the heavy station through the line, with equal numbers of stations in each building. Then
#   let the best cut follow it.
# * Take more buildings. Where does the heavy station set the pace alone, so that more buildings
#   stop helping?
# * Switch to training, one batch at a time. Every cut now takes the same time.


# %%
def train_one_by_one(times, batches, truck):
    """Start, end and name of all work in each stage; backward takes twice as long as forward."""
    spans, now = [[] for _ in times], 0
    for _ in range(batches):
        there = [(stage, minutes, "forward") for stage, minutes in enumerate(times)]
        back = [(stage, 2 * minutes, "backward") for stage, minutes, _ in reversed(there)]
        for number, (stage, minutes, name) in enumerate(there + back):
            crosses = number not in (0, len(times))  # the last stage turns round without a truck
            now += truck * crosses
            spans[stage].append((now, now + minutes, name))
            now += minutes
    return spans


def records_of(spans):
    named = [[(*span, "forward")[:3] for span in stage] for stage in spans]
    return [
        Record(stage, [Span(name, "compute", start, end) for start, end, name in found])
        for stage, found in enumerate(named)
    ]


# %%
def draw_split(heavy_station, heavy_minutes, buildings, truck_minutes, batches, cut, what):
    minutes = [1] * 8
    minutes[heavy_station - 1] = heavy_minutes
    equal_numbers = tuple(round(8 * i / buildings) for i in range(1, buildings))
    cuts = equal_numbers if cut == "equal numbers" else try_all_cuts(minutes, buildings)
    times = stage_work(minutes, cuts)
    if what == "evaluation":
        records = records_of(stream(times, batches, truck_minutes))
    else:
        records = records_of(train_one_by_one(times, batches, truck_minutes))
    end = end_of(records)
    alone = sum(minutes) * batches * (1 if what == "evaluation" else 3)

    figure, axes = plt.subplots(2, 1, figsize=(plots.WIDTH, 4.6), height_ratios=(1, 1.5))
    homes = [sum(station >= c for c in cuts) for station in range(8)]
    colors = [plots.RANK_COLORS[home] for home in homes]
    axes[0].bar(range(1, 9), minutes, color=colors, edgecolor=plots.COLORS["ink"], linewidth=0.8)
    for c in cuts:
        axes[0].axvline(c + 0.5, color=plots.COLORS["ink"])
    axes[0].set(xlabel="station", ylabel="minutes", ylim=(0, 12.5), xticks=range(1, 9))
    axes[0].set_title(f"Buildings of {', '.join(map(str, times))} minutes (simulated)")
    names = [f"building {i}" for i in range(buildings)]
    plots.legend(figure, plots.lanes(axes[1], records, end, names, unit="minutes"))
    idle = 1 - alone / (buildings * end)
    axes[1].set_title(f"{end:g} minutes; one building: {alone}; idle: {idle:.0%}")
    return figure


Explorer(
    draw_split,
    heavy_station=(1, 8, 5),
    heavy_minutes=(1, 12, 4),
    buildings=(2, 4, 3),
    truck_minutes=(0, 5, 0),
    batches=(1, 8, 4),
    cut=["equal numbers", "best cut"],
    what=["evaluation", "training"],
)

# %% [markdown]
# *At the start, the heavy station is in building 1, which works without a pause and sets the pace.
# Building 0 is through early, and building 2 waits for each batch. The best cut would give the
# heavy station a building of its own.*

# %% [markdown]
# And the figure to remember: what more buildings buy, and what they cost. It shows the planned
# model of section 4, with its 24 blocks shared out evenly over 1 to 24 stages.


# %%
def fullest_stage(stages):
    """The ledger of the fullest stage of the planned model, which is the first or the last."""
    both = [stage_bytes(stage, **PLANNED | {"layers": 48 // stages}, texts=4) for stage in (0, 1)]
    return max(both, key=lambda ledger: sum(ledger.values()))


counts = [2, 3, 4, 6, 8, 12, 24]
fullest = [bars[-1], *map(fullest_stage, counts)]
largest = [sum(ledger.values()) for ledger in fullest]
idle = [1 - 1 / stages for stages in [1, *counts]]

figure, (left, right) = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.0))
places, ticks = range(len(largest)), [1, *counts]
below = [0.0] * len(fullest)
for kind in bars[-1]:
    heights = [ledger[kind] / 2**30 for ledger in fullest]
    left.bar(places, heights, bottom=below, color=plots.COLORS[kind], label=kind)
    below = [a + b for a, b in zip(below, heights)]
left.legend()
left.set(xticks=places, xticklabels=ticks, xlabel="stages", ylabel="GiB")
left.set_title("Memory of the fullest stage")
right.bar(
    places,
    [100 * share for share in idle],
    color=plots.COLORS["waiting"],
    hatch="////",
    edgecolor="white",
)
right.set(xticks=places, xticklabels=ticks, xlabel="stages", ylabel="per cent", ylim=(0, 100))
right.set_title("Idle, one batch at a time")
plt.show()
for stages, count, share in zip(ticks, largest, idle):
    print(f"stages {stages:2}: {plots.human_bytes(count):>9}, idle {share:.0%}")

# %% [markdown]
# *More stages need less memory each, at first almost in proportion; later the tables and the scores
# of the vocabulary at the two ends stay. The price is on the right: with one batch at a time, all
# but one stage are idle at any moment.* Chapter 5 brings this price down.

# %% [markdown]
# ## 8. On a cluster: the same two stages under torchrun
#
# The script below is the second way of section 4, as you would put it into a file. **torchrun**
# starts it once for each rank; the course's function of the same name gives it the options of
# chapter 3. What is new is only the beginning: who am I, and which device is mine.

# %%
script, result = scratch() / "two_buildings.py", scratch() / "two_buildings.pt"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/two_buildings.py
"""Trains a line in two buildings: torchrun --nproc-per-node 2 two_buildings.py result.pt"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course_utils import mnist

STEPS, BATCH, RATE, CUT, WIDTH = 10, 64, 0.1, 5, 256

local_rank = int(os.environ["LOCAL_RANK"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank = dist.get_rank()

torch.manual_seed(0)
line = [nn.Flatten(), nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
line += [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
stage = nn.Sequential(*(line[:CUT] if rank == 0 else line[CUT:])).to(device)
optimizer = torch.optim.SGD(stage.parameters(), lr=RATE)  # after the move

images, labels = mnist.tensors(train=True, limit=STEPS * BATCH)
for items, target in zip(images.split(BATCH), labels.split(BATCH)):
    optimizer.zero_grad()
    border = torch.empty(BATCH, WIDTH, device=device)
    if rank == 0:
        products = stage(items.to(device))
        dist.send(products.detach(), dst=1)
        dist.recv(border, src=1)
        products.backward(border)
    else:
        dist.recv(border, src=0)
        cross_entropy(stage(border.requires_grad_()), target.to(device)).backward()
        dist.send(border.grad, dst=0)
    optimizer.step()

halves = [None, None] if rank == 0 else None
dist.gather_object({name: p.cpu() for name, p in stage.state_dict().items()}, halves)
if rank == 0:
    torch.save([half[name] for half in halves for name in half], sys.argv[1])
    print(f"{STEPS} steps in two buildings; rank 0 saved both halves")
dist.destroy_process_group()


# %%
print(torchrun(2, script, result), end="")
saved = torch.load(result, weights_only=True)
print("as in one process:", equal(alone["parameters"], [flat(saved)]))

# %% [markdown]
# What changes on a real cluster:
#
# * **Where the yard is.** Stages next to each other belong on devices with a fast link between
#   them. Beside the parameters the bytes are few as long as a step has few tokens, but
#   nothing hides them here: both buildings wait while the truck drives.
# * **No rank has the whole model.** Each builds its own stage, or builds all on meta and gives
#   memory to its own part only. A checkpoint has one file for each stage.
# * **The data.** Only the first rank needs the inputs and only the last one the targets. Both must
#   walk through the same batches in the same order, so they share a seed.
# * **The last batch.** Its size may differ. Both ends must know the shape of what crosses before it
#   arrives.
# * **Data parallelism on top.** Several such lines can share the batch. Then the ranks with the
#   same stage average their gradients, as in chapter 3. Chapter 7 does that.

# %% [markdown]
# ## 9. Remember
#
# 1. Cut between layers, and only activations and their gradients cross: 4NH bytes in each
#    direction, however many parameters there are.
# 2. In one process `.to(device)` is enough, autograd brings the gradient back. Between ranks you
#    send it yourself and call `products.backward(gradient)`.
# 3. The parameters, gradients and optimizer state of a stage are stored on its device alone: a cut
#    buys room. It buys no time: with one batch at a time, all but one of p stages are idle.
# 4. The fullest stage decides what fits, and the slowest one sets the pace. Profile before you cut.
# 5. What is shared across the cut, as a tied embedding, comes apart without an error. Compare with
#    one process, under SGD.
#
# **Sources**
#
# * Y. Huang et al., *GPipe*, 2019, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): sections
#   2.1 and 2.2 cut a model into cells of similar estimated cost, section 2.3 is about memory and
#   idle time.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, SC 2021, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 2.2,
#   pipeline stages.
# * V. Korthikanti et al., *Reducing Activation Recomputation in Large Transformer Models*, 2022,
#   [arXiv 2205.05198](https://arxiv.org/abs/2205.05198): section 4, what
#   a block keeps for backward.
# * O. Press and L. Wolf, *Using the Output Embedding to Improve Language Models*, 2017, [arXiv
#   1608.05859](https://arxiv.org/abs/1608.05859): tied embeddings.
# * PyTorch: [autograd mechanics](https://docs.pytorch.org/docs/stable/notes/autograd.html),
#   [`torch.distributed.send` and
#   `recv`](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication),
#   [meta device](https://docs.pytorch.org/docs/stable/meta.html),
#   [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html),
#   [hooks for saved
#   tensors](https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks).
