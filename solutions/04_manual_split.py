# %% [markdown]
# # 4. Manual split: one assembly line in two buildings
#
# In chapters 2 and 3 every device held the whole model. That ends when the model no longer fits.
# Then you cut the model itself: the first layers live on one device, the rest on another. This is
# **model parallelism** in its plainest form, and every larger scheme grows out of it.
#
# You cut two models here, by hand: an image classifier and a transformer language model. You predict
# what crosses the border, what each side stores and how long it idles, and measure all three. And you
# learn to find the best place for a cut, in a convolutional net whose layers are very uneven. What goes beyond that (a model with 1.4 billion parameters planned to the byte, a stream of batches on the
# clock, classes from the web that only look cut, and an experiment with three strategies) is in
# `04_manual_split_further`.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist
from course_utils.lesson.equality import equal, flat
from course_utils.lesson.predictions import compare

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
from course_utils.figures import ch04 as figures

figures.two_buildings()
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
#
# ### When more than one tensor crosses
#
# In many networks several tensors go from one stage to the next: the products, and beside them a residual, a mask,
# or token numbers. Two things are new then. Rank 0 has several gradients, and the products that they belong to may
# share a part of the graph. One `backward` after the other goes through that part twice:

# %%
items = torch.ones(2, 3, requires_grad=True)
shared = items.exp()
products, residual = 2 * shared, shared + 1

products.backward(torch.ones(2, 3))
try:
    residual.backward(torch.ones(2, 3))
except RuntimeError as error:
    print(str(error).split(" (")[0])

# %% [markdown]
# [`torch.autograd.backward`](https://docs.pytorch.org/docs/stable/generated/torch.autograd.backward.html) takes a list
# of tensors and a list of their gradients, and goes back once, from all of them.
#
# And rank 1 may have received a tensor that the loss does not use, such as a mask. Then its `.grad` is None after
# backward, and not a tensor of zeros. The other end does not know that, and waits. So both ends need a rule
# for what is sent back. Exercise 4.2 has one. And `send` wants its tensor contiguous, with its numbers one behind the
# other in memory, which a transposed one is not; `.contiguous()` makes it so.

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
from course_utils.trace import Trace


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
compare(
    predicted,
    dict(zip(predicted, amounts)),
    {
        "As if each number took one byte.": dict.fromkeys(predicted, 64 * 256),
        "As if the images crossed: it is what the last layer of building 0 hands on.": dict.fromkeys(
            predicted, 4 * 64 * 784
        ),
    },
)

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
from contextlib import nullcontext


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
# Now take a line of eight equal stations, so that you know the balanced cut: four in each building. Each station is a
# linear layer of 512 x 512 and a ReLU, and a batch has 256 items. Count the work in units of one product of a
# 256 x 512 and a 512 x 512 matrix. Forward takes one for each station. Backward takes two, one for
# the gradient of the weights and one for that of the input, except that the very first station does
# not need the second: nobody asks how the items should have been different.
#
# **Predict** the units of each building in one training step, and how many pass from the beginning of a step to its
# end. Do it for the balanced cut, and for a cut after two stations, where one building has three times as many stations
# as the other. Which of the two steps takes longer?

# %% tags=["prediction"]
predicted = {
    "4 | 4: building 0": 4 + 8 - 1,
    "4 | 4: building 1": 3 * 4,
    "4 | 4: from beginning to end": 23,
    "2 | 6: building 0": 2 + 4 - 1,
    "2 | 6: building 1": 3 * 6,
    "2 | 6: from beginning to end": 23,
}

# %% [markdown]
# `FlopCounterMode` counts the multiplications and additions of the matrix products and convolutions that run
# under it, on every machine the same. ReLU, pooling and the update count as nothing.


# %%
from torch.utils.flop_counter import FlopCounterMode

STATIONS, ITEMS, SIZE = 8, 256, 512


def equal_stations():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()) for _ in range(STATIONS)]
    return nn.Sequential(*layers)


def stage_of(rank, cut):
    return (equal_stations()[:cut], equal_stations()[cut:])[rank].to(hardware.device())


def train_stations(rank, stage, steps=1, span=quiet):
    device = hardware.device()
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    if rank == 0:
        train_first_stage(stage, optimizer, [torch.ones(ITEMS, SIZE, device=device)] * steps, span)
    else:
        targets = [torch.zeros(ITEMS, device=device).long()] * steps
        train_last_stage(stage, optimizer, targets, (SIZE,), span)


# %%
def units(rank, cut):
    with FlopCounterMode(display=False) as counter:
        train_stations(rank, stage_of(rank, cut))
    return counter.get_total_flops() // (2 * ITEMS * SIZE * SIZE)


measured, work_of_step = {}, {cut: launch(units, 2, cut) for cut in (4, 2)}
for cut, of_buildings in work_of_step.items():
    counts = [*of_buildings, sum(of_buildings)]  # they take turns, so a step is their sum
    measured |= dict(zip(list(predicted)[len(measured) :], counts))

# %%
compare(
    predicted,
    measured,
    {
        "As if the two worked at the same time: each waits for the other's truck.": {
            "4 | 4: from beginning to end": 12,
            "2 | 6: from beginning to end": 18,
        },
        "Three for each station: the first one needs no gradient of the items.": {
            "4 | 4: building 0": 12,
            "2 | 6: building 0": 6,
        },
    },
)

# %%
for cut, of_buildings in work_of_step.items():
    idle = ", ".join(f"{1 - each / sum(of_buildings):.0%}" for each in of_buildings)
    print(f"cut after {cut} stations: buildings 0 and 1 idle for {idle} of a step")

# %% [markdown]
# Both steps take 23 units. The order of sends and receives leaves no other way: forward of building 0, forward and
# backward of building 1, backward of building 0, and never two of them at once. Whoever moves a station to the
# other building moves its time to another place in the row, and the row stays as long.
#
# So that you see what separate devices would do, however many cores your machine has, the ranks keep a pace:
# a unit takes one slot of 20 ms. The layers are really computed, which takes much less, and the rank sleeps for the rest
# of its slot, like a process that waits for its device. Such figures say *emulated*.


# %%
from course_utils.lesson.pace import SLOT, paced


def turns(rank, cut, steps=2):
    """Training steps in which every unit of work takes one slot."""
    stage = stage_of(rank, cut)
    train_stations(rank, stage)  # the first step is slower than the rest
    slots = {"forward": len(stage), "backward": 2 * len(stage) - (rank == 0), "update": 0}
    with Trace() as trace:
        train_stations(rank, stage, steps, lambda name: paced(trace, name, slots[name]))
    return trace.record()


panels = {
    "balanced: 4 stations | 4 stations (emulated)": launch(turns, 2, 4),
    "2 stations | 6 stations (emulated)": launch(turns, 2, 2),
}
figures.turns(panels, "slots", SLOT)
plt.show()

# %% [markdown]
# *Two training steps with each cut. Wherever one building is blue, the other is grey: it waits.
# With the balanced cut the two take turns of equal length. With the other cut building 0 waits for
# most of the time, but the two steps take about as long.*


# %% tags=["nbval-ignore-output"]
def end_of(records):
    return max(span.end for record in records for span in record.spans)


for name, records in panels.items():
    computing = [record.seconds("compute") for record in records]
    idle = ", ".join(f"{1 - each / end_of(records):.0%}" for each in computing)
    print(f"{name}: {end_of(records):.2f} s; buildings 0 and 1 idle for {idle}")

# %% [markdown]
# The shares lie a little above the predicted ones: a truck takes time too, and so does the update.

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


# %%
import random

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
# Run it: ten batches of 256 items through two ranks, forward only, again in slots.


# %%
def evaluate_stream(rank, cut, batches=10):
    device, on_the_way = hardware.device(), []
    stage = stage_of(rank, cut).requires_grad_(False)
    items = torch.ones(ITEMS, SIZE, device=device)
    with Trace() as trace:
        for _ in range(batches):
            if rank == 1:
                dist.recv(items, src=0)
            with paced(trace, "forward", len(stage)):
                products = stage(items)
            if rank == 0:
                on_the_way.append((products, dist.isend(products, dst=1)))
        for _, work in on_the_way:
            work.wait()
    return trace.record()


# %%
streams = {
    "balanced: 4 stations | 4 stations (emulated)": launch(evaluate_stream, 2, 4),
    "2 stations | 6 stations (emulated)": launch(evaluate_stream, 2, 2),
}
figures.turns(streams, "slots", SLOT)
plt.show()

# %% [markdown]
# *Ten batches, forward only. With the balanced cut both buildings are busy most of the time.
# With the other cut building 0 is through early, and building 1 decides when the last batch
# leaves.*
#
# `isend` makes this possible: building 0 hands its products over and goes on at once, without
# waiting for the other end. The ratio below should be near 62/44 = 1.41.

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
from course_utils.trace import kept_for_backward, memory_ledger


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


# %%
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
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


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
# The same two functions train a transformer. The model is `course_utils.lesson.models.LanguageModel`: a
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
from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel


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


# %%
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


# %%
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
# single process, the jump at step 6 included, which the large learning rate makes. Thirty steps are
# enough to learn which characters are frequent.*
#
# What would the two buildings hold for a model that needs them, with 24 layers of width 2,048? That is the first thing
# that the further notebook plans, to the byte and without a GPU.

# %% [markdown]
# ### Where to cut
#
# Equal numbers of layers are not equal work. The network below is a convolutional one whose layers
# are very uneven. A convolution works at each place of an image. Before an image is made smaller,
# there are four times as many places as after.


# %%
from course_utils.lesson.models import uneven_line

print(uneven_line())

# %% [markdown]
# **Profile** first. You could take the time of each station, which is what you want to balance in the end, but
# which wobbles. Or you count multiplications and additions, which gives the same on every machine:


# %%
def operations_of(line, items):
    """Multiplications and additions of each station's forward, in millions."""
    counts = []
    for station in line:
        with FlopCounterMode(display=False) as counter:
            items = station(items)
        counts.append(counter.get_total_flops() / 1e6)
    return counts


work = operations_of(uneven_line(), all_images[:16])
for number, millions in enumerate(work, start=1):
    print(f"station {number}: {millions:8.1f} million operations, {millions / sum(work):6.1%}")

# %% [markdown]
# Second, the best cut. What decides is the slowest stage, so you look for the cuts whose slowest
# stage is the least slow. For eight stations you can afford to try all cuts. For $L$ stations and
# $p$ stages there are $\binom{L-1}{p-1}$.


# %%
import math
from itertools import combinations, pairwise


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
    print(f"{name}: after station {cuts[0]}, work {shares}")
print(f"24 layers in 4 stages: {math.comb(23, 3):,} cuts to try; 96 in 8: {math.comb(95, 7):,}")

# %% [markdown]
# Trying all is exact, but it does not go far. Exercise 4.3 asks you for a partitioner that is exact
# and fast.

# %%
figures.stations(work, {"equal numbers of layers": 4, "best cut": best[0]})
plt.show()

# %% [markdown]
# *Station 2 has almost two thirds of all work. The cut in the middle leaves almost nothing for building 1.
# The best cut comes right after station 2.*
#
# Does that cut hold on the clock? The further notebook sends a stream of batches through both, and takes the
# time. ReLU and pooling layers take time and count as nothing, so a count and a clock may disagree.

# %% [markdown]
# ## 5. Break it: mistakes that people make with a cut model
#
# ### A target on the wrong device
#
# The output of a cut model is on the last device. The targets come out of the data loader on the
# CPU. The loss wants both in one place. So that you can see this without a GPU, the model's output
# is on the device meta here, which counts as another device on every machine.


# %%
def error_of(action):
    """What `action()` raises, as text."""
    try:
        action()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


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
figures.tables()
plt.show()

# %% [markdown]
# *Left: in one process the entrance and the exit use the same table. Middle: after the cut there
# are two tables, and nobody keeps them equal. Right: an exchange of the gradients in every step
# keeps them equal.*

# %%
drift = [(a - b).abs().max().item() for a, b in zip(entrance, exit_)]
kept = [(a - b).abs().max().item() for a, b in zip(entrance_tied, exit_tied)]
figures.drift(drift, kept)
plt.show()

# %% [markdown]
# *Untied, the tables are apart after the first step, and do not come together again. Tied again,
# their distance stays at zero.*
#
# The price: the table is stored twice, and its gradient crosses the yard in every step. For the
# model that is planned in the further notebook, that would be 50,000 x 2,048 numbers, 410 MB; the
# activations of a step of 2,048 tokens are 17 MB.
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
# ## 6. Exercises: cut, hand over, balance
#
# Three exercises, from three buildings to the best cut. `check` hands your code fresh
# random layers and sizes and prints one line per requirement. `hint("4.1")` prints the next of
# three hints. 4.4 and 4.5 are in the further notebook: a model to repair, and an experiment.
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
# ### 4.2 Across the cut and back (3 points)
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

    Gradients are added to `.grad` of both stages' parameters, as `loss.backward()` does it: a
    parameter of rank 1 that the loss does not use keeps None, and so does one of rank 0 on which
    nothing depends that crosses.
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


# %% nbgrader={"grade_id": "4.2-check", "grade": true, "points": 3, "locked": true}
check("4.2", hand_over)

# %% [markdown]
# ### 4.3 The best cut (2 points)
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


# %% nbgrader={"grade_id": "4.3-check", "grade": true, "points": 2, "locked": true}
check("4.3", balanced_cuts)

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


# %%
from course_utils.lesson.explore import Explorer


def draw_split(heavy_station, heavy_minutes, buildings, truck_minutes, batches, cut, what):
    minutes = [1] * 8
    minutes[heavy_station - 1] = heavy_minutes
    equal_numbers = tuple(round(8 * i / buildings) for i in range(1, buildings))
    cuts = equal_numbers if cut == "equal numbers" else try_all_cuts(minutes, buildings)
    run = stream if what == "evaluation" else train_one_by_one
    spans = run(stage_work(minutes, cuts), batches, truck_minutes)
    alone = sum(minutes) * batches * (1 if what == "evaluation" else 3)
    return figures.split(minutes, cuts, spans, alone)


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
# And the price of more buildings: with p of them and one batch at a time, all but one are idle at any moment. The
# further notebook draws it beside the memory that they save. Chapter 5 brings it down.

# %% [markdown]
# ## 8. On a cluster: the same two stages under torchrun
#
# The script below is the second way of section 4, as you would put it into a file. **torchrun**
# starts it once for each rank; the course's function of the same name gives it the options of
# chapter 3. What is new is only the beginning: who am I, and which device is mine.

# %%
from course_utils.lesson.terminal import scratch, torchrun

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

from course_utils.lesson import mnist

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
# * O. Press and L. Wolf, *Using the Output Embedding to Improve Language Models*, 2017, [arXiv
#   1608.05859](https://arxiv.org/abs/1608.05859): tied embeddings.
# * PyTorch: [autograd mechanics](https://docs.pytorch.org/docs/stable/notes/autograd.html),
#   [`torch.distributed.send` and
#   `recv`](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication),
#   [meta device](https://docs.pytorch.org/docs/stable/meta.html),
#   [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html),
#   [hooks for saved
#   tensors](https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.saved_tensors_hooks).
