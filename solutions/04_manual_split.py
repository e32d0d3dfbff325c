# %% [markdown]
# # 4. Manual split: one line in two buildings
#
# In chapters 2 and 3 every device held the whole model. When a model no longer fits, you cut it: its first layers live
# on one device, the rest on another. This is **model parallelism** in its plainest form.
#
# In this chapter you cut a classifier and a language model by hand. You predict what crosses the cut, who waits and
# what each side stores, and look for the best place to cut. The notebook `04_manual_split_further` plans a large model
# to the byte, and compares three ways to choose a cut.

# %% tags=["nbval-ignore-output"]
from contextlib import nullcontext
from functools import partial
from itertools import combinations, pairwise

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch04 as figures
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist, schedules, text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, kept_for_backward, memory_ledger

hardware.report()

# %% [markdown]
# ## 1. The factory: a line that is too long for its building
#
# A line of eight stations does not fit into one hall. Stations 1 to 4 stay in building 0, and stations 5 to 8 move to
# building 1. A truck carries the half-finished parts across the yard.
#
# The blueprint is improved from the last station backwards. Each station tells the one before it how its parts should
# have been different. Between stations 5 and 4 these change notes cross the yard too, so the truck drives both ways.
# Nothing else crosses: each building keeps its half of the blueprint to itself.

# %%
figures.two_buildings()
plt.show()

# %% [markdown]
# *Material enters building 0, half-finished parts cross the yard, and change notes come back.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | the stations of one building | **stage** | consecutive layers on one device |
# | the yard between two buildings | **cut** | the place where one stage ends and the next begins |
# | change notes on half-finished parts | gradients of the activations | what a stage needs to begin its backward pass |
# | truck inside one process | `.to(device)` | a copy from one device to another |
# | a building with nothing to do | **idle** rank | waits for the truck |

# %% [markdown]
# ## 2. The smallest real run: one process, then two
#
# ### One process: `.to` is the truck
#
# The model classifies MNIST images with four linear layers, and the cut lies after the second one. Each layer has its
# own seed, so any process can build a layer without building the others.

# %%
SIZES = 784, 256, 256, 256, 10  # values of an image before, between and after the layers
LAYERS, CUT = 4, 2


def layer(number):
    """Layer `number` of the classifier."""
    torch.manual_seed(number)
    linear = nn.Linear(SIZES[number], SIZES[number + 1])
    return linear if number == LAYERS - 1 else nn.Sequential(linear, nn.ReLU())


def build(make, first, end):
    """What `make` returns for the numbers `first` to `end - 1`, called one after the other."""
    return nn.Sequential(*map(make, range(first, end)))


# %% [markdown]
# `TwoStages` puts each stage on its own device, and `forward` moves the activations between them. Your machine decides
# which devices these are: two GPUs, a GPU and the CPU, or the CPU twice. In the last case `.to` returns the tensor
# that it was given and copies nothing.


# %%
class TwoStages(nn.Module):
    """Two stages of a model, each on its own device."""

    def __init__(self, first, last, devices):
        super().__init__()
        self.devices = devices
        self.first, self.last = first.to(devices[0]), last.to(devices[1])

    def forward(self, inputs):
        activations = self.first(inputs.to(self.devices[0]))
        return self.last(activations.to(self.devices[1]))


def two_devices():
    """Two GPUs where there are two; else a GPU and the CPU; else the CPU twice."""
    gpus = [torch.device("cuda", i) for i in range(min(2, torch.cuda.device_count()))]
    return (gpus + [torch.device("cpu")] * 2)[:2]


# %%
images, labels = mnist.tensors(train=True, limit=640)
input_batches, target_batches = images.flatten(1).split(64), labels.split(64)
inputs, targets = input_batches[0].clone(), target_batches[0]  # a slice keeps all images


def gradients_of(model):
    return flat(p.grad for p in model.parameters())


whole = build(layer, 0, LAYERS)
cross_entropy(whole(inputs), targets).backward()

model = TwoStages(build(layer, 0, CUT), build(layer, CUT, LAYERS), two_devices())
outputs = model(inputs)
cross_entropy(outputs, targets.to(outputs.device)).backward()

difference = check_equal(gradients_of(whole), [gradients_of(model)])
print("gradients, largest difference from the uncut model:", difference)

# %% [markdown]
# The way back needs no code. Autograd records `.to` like any other operation, and its backward moves the gradient to
# the device that the activations came from. The targets go to `outputs.device`, which is right for any cut: the loss
# needs outputs and targets in one place.

# %% [markdown]
# ### 4.1 Three buildings (2 points)
#
# Spread a chain of layers over three given devices, in parts as even as whole layers allow. The devices may be three
# GPUs, one GPU and the CPU, or the same device three times.
#
# On a machine without a GPU, the check needs a second device to see what you move where. It uses PyTorch's **meta
# device**: a tensor there has a shape and a dtype, but no content.


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
        self.stages = nn.ModuleList(nn.Sequential(*chain) for chain in chains)
        self.places = devices
        for stage, place in zip(self.stages, devices):
            stage.to(place)
        ### END SOLUTION

    def forward(self, inputs: Tensor) -> Tensor:
        ### BEGIN SOLUTION
        passing = inputs
        for stage, place in zip(self.stages, self.places):
            passing = stage(passing.to(place))
        return passing
        ### END SOLUTION


# %% nbgrader={"grade_id": "4.1-check", "grade": true, "points": 2, "locked": true}
check("4.1", ThreeBuildings)

# %% [markdown]
# ### Two processes: you drive the truck
#
# Two ranks are two processes, so the activations have to be sent on any machine. Autograd in one process knows nothing
# of the other. So you carry both loads yourself, with one line at each end of each trip. (`span` marks the stretches of
# computing for a clock in section 3. By default it does nothing.)


# %%
def first_stage_step(stage, inputs, span=nullcontext):
    """Rank 0: one forward and one backward pass."""
    with span("forward"):
        activations = stage(inputs.to(hardware.device()))
    dist.send(activations.detach(), dst=1)
    gradients = torch.empty_like(activations)
    dist.recv(gradients, src=1)
    with span("backward"):
        activations.backward(gradients)


# %%
def last_stage_step(stage, targets, shape=(256,), span=nullcontext):
    """Rank 1: the same, and the loss. `shape` is that of one example's activations."""
    targets = targets.to(hardware.device())
    activations = torch.empty(len(targets), *shape, device=targets.device)
    dist.recv(activations, src=0)
    activations.requires_grad_()  # so that backward fills activations.grad
    with span("forward"):
        scores = stage(activations)
        loss = cross_entropy(scores.flatten(0, -2), targets.flatten())  # one row for each target
    with span("backward"):
        loss.backward()
    dist.send(activations.grad, dst=0)


# %%
def stage_of(rank, cut=CUT):
    """The layers of this rank, and no others."""
    stage = build(layer, 0, cut) if rank == 0 else build(layer, cut, LAYERS)
    return stage.to(hardware.device())


def half_step(rank, stage, span=nullcontext):
    """This rank's half of one training step."""
    if rank == 0:
        first_stage_step(stage, inputs, span)
    else:
        last_stage_step(stage, targets, span=span)


def gradients_after_step(rank):
    stage = stage_of(rank)
    half_step(rank, stage)
    return gradients_of(stage)


difference = check_equal(gradients_of(whole), [torch.cat(launch(gradients_after_step, 2))])
print("gradients of both ranks, largest difference from one process:", difference)

# %% [markdown]
# `activations.backward(gradients)` is the heart of it. When you call `backward` on a tensor that is not a scalar, it
# needs the gradient of the loss with respect to that tensor, and applies the chain rule from there
# ([`torch.Tensor.backward`](https://docs.pytorch.org/docs/stable/generated/torch.Tensor.backward.html)). Rank 1 has
# just computed that gradient: `activations.grad`.

# %% [markdown]
# ## 3. Predict, then measure: what crosses, who waits, what is stored
#
# ### What crosses the cut
#
# The batch has 64 images, and a float32 number takes 4 bytes. Rank 0 has 266,752 parameters. **Predict** how many bytes
# rank 1 sends back in one step, and how many rank 0 sends if you cut one layer earlier.

# %% tags=["prediction"]
predicted = {
    "cut after 2 layers, rank 1 sends": 65536,
    "cut after 1 layer, rank 0 sends": 65536,
}


# %%
def sent_by(rank, cut=CUT):
    stage = stage_of(rank, cut)
    with Trace() as trace:
        half_step(rank, stage)
    return trace.record().sent("send")


measured = {
    "cut after 2 layers, rank 1 sends": launch(sent_by, 2)[1],
    "cut after 1 layer, rank 0 sends": launch(sent_by, 2, 1)[0],
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if each number took one byte.": dict.fromkeys(predicted, 64 * 256),
        "The images do not cross: the activations behind the last layer of rank 0 do.": dict.fromkeys(
            predicted, 4 * 64 * 784
        ),
        "Gradients of parameters stay at home. The gradients of the activations cross.": dict.fromkeys(
            predicted, 4 * 266_752
        ),
    },
)

# %% [markdown]
# A batch of $N$ examples with $H$ values each at the cut costs $4NH$ bytes in each direction. The formula contains
# neither the number of layers nor the number of parameters. Data parallelism is the other way round: it sends the
# gradients of all parameters, however large the batch is.

# %% [markdown]
# ### Who waits
#
# Suppose that each layer takes one unit of time forward and two units backward, and that messages take no time. One
# device needs 12 units for a training step. **Predict** how many units two ranks need: with two layers each, and with
# one layer on rank 0 and three on rank 1.

# %% tags=["prediction"]
predicted = {"2 | 2: units of a step": 12, "1 | 3: units of a step": 12}

# %% [markdown]
# `simulate` starts each pass as soon as its input is there. `gpipe(2, 1)` (GPipe, a schedule of chapter 5) is the
# order of section 2: two stages, and one batch that goes forward and then backward.


# %%
def units_of_step(*layers_of_stage):
    """The time of a training step through stages with so many layers (simulated)."""
    order = schedules.gpipe(len(layers_of_stage), 1)
    backward = [2 * count for count in layers_of_stage]
    return int(schedules.simulate(order, forward=layers_of_stage, backward=backward).step)


measured = {
    "2 | 2: units of a step": units_of_step(2, 2),
    "1 | 3: units of a step": units_of_step(1, 3),
}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if both computed at the same time: each waits for what the other sends.": {
            "2 | 2: units of a step": 6,
            "1 | 3: units of a step": 9,
        },
    },
)

# %% [markdown]
# Two devices are no faster than one, and the balance makes no difference. Rank 1 cannot begin before the activations
# arrive, and rank 0 cannot go back before the gradients do. If you move a layer to the other rank, its time moves with
# it.
#
# Now real ranks do it. To show what two devices would do, however many cores your machine has, a rank computes each
# pass and then sleeps until the pass has lasted one slot of 20 ms for each unit. The course calls such a figure
# *emulated*.

# %%
from course_utils.lesson.pace import SLOT, paced


def paced_step(rank, cut):
    """One training step in which a layer takes one slot forward and two backward."""
    stage = stage_of(rank, cut)
    slots = {"forward": len(stage), "backward": 2 * len(stage)}
    half_step(rank, stage)  # the first step is slower than the rest
    with Trace() as trace:
        half_step(rank, stage, span=lambda name: paced(trace, name, slots[name]))
    return trace.record()


panels = {
    "2 | 2 layers: one rank computes while the other waits (emulated)": launch(paced_step, 2, 2),
    "1 | 3 layers: the step is as long (emulated)": launch(paced_step, 2, 1),
}
plots.timelines(panels, "slots", SLOT)
plt.show()

# %% [markdown]
# *Wherever one rank is blue, the other waits, or has finished its step.*
#
# A stage with the share $s$ of the work is idle for the share $1 - s$ of the step. If the cut is **balanced**, all
# $p$ stages take equally long, and
#
# $$\text{idle share} = 1 - \frac{1}{p} .$$

# %% [markdown]
# ### What an unbalanced cut costs
#
# In a training step with one batch, an unbalanced cut costs no time. That changes as soon as several batches are in
# flight. The simplest case is evaluation: nothing comes back, and rank 0 starts a batch while rank 1 still works on
# the one before.
#
# One device needs 40 units for ten batches. **Predict** how many two ranks need, with one layer and three.

# %% tags=["prediction"]
predicted = {"1 | 3: units for ten batches": 31}


# %%
def stream(times, batches):
    """Start and end of each batch in each stage, spans[stage][batch] (simulated)."""
    spans = [[] for _ in times]
    for _ in range(batches):
        arrived = 0
        for row, time in zip(spans, times):
            free = row[-1][1] if row else 0
            start = max(arrived, free)
            arrived = start + time
            row.append((start, arrived))
    return spans


measured = {"1 | 3: units for ten batches": stream([1, 3], 10)[-1][-1][1]}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if rank 1 had something to do from the beginning.": {
            "1 | 3: units for ten batches": 30
        },
        "As if a batch began when the one before has left rank 1.": {
            "1 | 3: units for ten batches": 40
        },
        "As if the work were shared equally and no rank ever waited.": {
            "1 | 3: units for ten batches": 20
        },
    },
)

# %% [markdown]
# The first batch goes through all stages. The others leave one by one, at the pace of the slowest stage. With the times
# $t_1, \dots, t_p$ of the stages, the last of $m$ batches leaves after
#
# $$T = \sum_s t_s + (m - 1)\,\max_s t_s .$$
#
# With one layer and three, that is 31 units; with two and two, it is 22. In chapter 5, training sends several batches
# on their way, too.

# %% [markdown]
# ### What each rank stores
#
# Each parameter takes 16 bytes: 4 for itself, 4 for its gradient, and 8 for the two averages that Adam keeps. The
# activations that autograd keeps for backward come on top. Both ranks have two of the four layers, whose sizes are in
# section 2. **Predict** the share of all parameters that rank 0 holds.

# %% tags=["prediction"]
predicted = {"per cent of the parameters on rank 0": 80}


# %%
def stored(rank):
    stage = stage_of(rank)
    optimizer = torch.optim.Adam(stage.parameters())
    with kept_for_backward(stage) as kept:
        half_step(rank, stage)
    optimizer.step()
    return memory_ledger(stage, optimizer) | {"activations": kept.bytes}


ledgers = launch(stored, 2)
on_ranks = [ledger["parameters"] for ledger in ledgers]
measured = {"per cent of the parameters on rank 0": round(100 * on_ranks[0] / sum(on_ranks))}

# %%
compare(
    predicted,
    measured,
    likely={
        "Half of the layers is not half of the parameters: the first one reads 784 values.": {
            "per cent of the parameters on rank 0": 50
        },
    },
)

# %%
plots.memory(ledgers, ["rank 0", "rank 1"], "Equal numbers of layers are not equal memory")
plt.show()

# %% [markdown]
# *Rank 0 holds about four fifths of everything.*
#
# This is what the cut is for: no rank stores a parameter, a gradient or optimizer state of another rank's layers. But
# the fullest rank must have room for everything it holds. The activations at the cut are stored twice: by their
# sender and by their receiver.

# %% [markdown]
# ## 4. By hand, then with PyTorch: one result, and where to cut
#
# ### Ten steps, the same parameters
#
# Whatever the technique, training ends with the same parameters as in one process. That is the contract of the
# course. Here are ten steps of SGD, each on 64 new images: in one process, and on two ranks by hand.


# %%
def train(stage, step, batches, rate=0.1):
    """One step of SGD for each batch; returns the parameters of the stage."""
    optimizer = torch.optim.SGD(stage.parameters(), lr=rate)
    for batch in batches:
        optimizer.zero_grad()
        step(stage, batch)
        optimizer.step()
    return flat(stage.parameters())


def whole_step(model, batch):
    inputs, targets = batch
    cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()


def train_by_hand(rank):
    if rank == 0:
        return train(stage_of(0), first_stage_step, input_batches)
    return train(stage_of(1), last_stage_step, target_batches)


# %% [markdown]
# PyTorch's own interface is `torch.distributed.pipelining`. A `PipelineStage` wraps a stage and knows its neighbours. A
# **schedule** does the sends, the receives and the backward calls. With one micro-batch, that is, the whole batch, it
# does what you did by hand.

# %%
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def train_with_pytorch(rank):
    module = stage_of(rank)
    stage = PipelineStage(module, stage_index=rank, num_stages=2, device=hardware.device())
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=cross_entropy)

    def step(module, batch):
        batch = batch.to(hardware.device())
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch)

    return train(module, step, input_batches if rank == 0 else target_batches)


# %%
expected = train(build(layer, 0, LAYERS), whole_step, list(zip(input_batches, target_batches)))
by_hand, with_pytorch = (torch.cat(launch(way, 2)) for way in (train_by_hand, train_with_pytorch))
moved = largest_difference(flat(build(layer, 0, LAYERS).parameters()), [expected])
print("parameters, largest difference from where they began:", moved)
print("from one process, by hand:     ", check_equal(expected, [by_hand]))
print("from one process, with PyTorch:", check_equal(expected, [with_pytorch]))

# %% [markdown]
# There is nothing to average here. The cut changes where a number is computed, but not how.

# %% [markdown]
# ### 4.2 Across the cut and back (3 points)
#
# In many networks several tensors go from one stage to the next: a residual, a mask, token numbers. Rank 0 then gets
# several gradients, and the tensors that they belong to may share a part of the graph. Two calls of `backward` would
# go through that part twice:

# %%
shared = torch.ones(2, 3, requires_grad=True).exp()
activations, residual = 2 * shared, shared + 1

activations.backward(torch.ones(2, 3))
try:
    residual.backward(torch.ones(2, 3))
except RuntimeError as error:
    print(str(error).split(" (")[0])

# %% [markdown]
# [`torch.autograd.backward`](https://docs.pytorch.org/docs/stable/generated/torch.autograd.backward.html) takes a list
# of tensors and a list of their gradients, and goes back once, from all of them.
#
# Carry one training step across, as in section 2, but for a list of tensors. Three rules keep both ranks in step,
# whatever the loss uses.
#
# * Every tensor of the list is sent forward, in the order of the list. `send` wants a contiguous tensor, whose numbers
#   lie one after the other in memory; `.contiguous()` makes one of any tensor.
# * For every *floating-point* tensor of the list, a gradient of the same shape and dtype is sent back, in the same
#   order. If the loss did not use the tensor, its `.grad` is None. Rank 0 waits all the same, so zeros are sent.
# * Integer tensors have no gradient, so nothing is sent back for them.


# %% nbgrader={"grade_id": "4.2", "solution": true}
def hand_over(stage: nn.Module, data: Tensor, room: list[Tensor]) -> float | None:
    """Forward and backward of one step through a model that is cut between ranks 0 and 1.

    Called on both ranks, each with its own stage. `room` holds one tensor for each tensor that crosses,
    with its shape, dtype and device, contiguous; the contents mean nothing, and you may overwrite
    them. The next step may come with the same tensors.

    On rank 0, `data` are the inputs, and `stage(data)` returns the tuple of tensors that cross. They
    need not be contiguous, and some may need no gradient. The function returns None. On rank 1,
    `data` are the targets, `stage(*tensors, data)` returns the loss, a scalar;
    the function returns it as a float.

    Gradients are added to `.grad` of both stages' parameters, as `loss.backward()` does it: a
    parameter of rank 1 that the loss does not use keeps None, and so does a
    parameter of rank 0 that no crossing tensor depends on.
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
# ### A language model in two stages
#
# The two functions of section 2 also train a transformer. Its first part turns each token into a vector. Then comes a
# row of blocks, each an attention and two linear layers. The last part, the head, gives each token of the vocabulary
# a score. Between blocks it is easy to cut: one tensor of shape (batch, tokens, width) goes from each block to the
# next.
#
# **Attention** is where tokens see each other. It makes three vectors of each token. A token's **query** is compared
# with the **keys** of the tokens up to it. The better a key fits, the more the **value** of the same token counts in
# the sum that attention returns. Several **heads** do this side by side, each with its own part of the width.

# %%
from course_utils.lesson.models import Block

CHARACTERS, TOKENS, WIDTH = len(text.vocabulary()), 32, 64


class Tables(nn.Module):
    """A vector for each token, plus one for its place in the text."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.token.weight, std=WIDTH**-0.5)

    def forward(self, tokens):
        return self.token(tokens) + self.place.weight


def part(number):
    """Part `number` of the language model: the tables (0), a block (1 to 4), or the head (5)."""
    torch.manual_seed(number)
    if number == 0:
        return Tables()
    if number < 5:
        return Block(WIDTH, heads=4)
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS, bias=False))


# %%
tokens, next_tokens = text.windows(TOKENS, 160, seed=0)
token_batches, next_batches = tokens.split(16), next_tokens.split(16)


def language_stage(rank):
    """This rank's half of the language model, its step, and its batches."""
    if rank == 0:
        return build(part, 0, 3).to(hardware.device()), first_stage_step, token_batches
    step = partial(last_stage_step, shape=(TOKENS, WIDTH))
    return build(part, 3, 6).to(hardware.device()), step, next_batches


def train_half(rank):
    return train(*language_stage(rank))


expected = train(build(part, 0, 6), whole_step, list(zip(token_batches, next_batches)))
halves = launch(train_half, 2)
print("language model, largest difference:", check_equal(expected, [torch.cat(halves)]))

# %% [markdown]
# ### Where to cut
#
# The eight stations of the next network are very uneven. Stations 1 to 4 are convolutions to 64 channels, and station
# 1 reads an image of one channel. Stations 1 and 2 work on 28 x 28 pixels, stations 3 and 4 on 14 x 14. Stations 5 to
# 8 are linear layers with little work. A convolution does the same work at each pixel. **Predict** the ratio of
# station 2's work to station 3's, and after which station to cut so that the fuller stage has as little work as
# possible.

# %% tags=["prediction"]
predicted = {"work of station 2, over station 3": 4, "best cut: after station": 2}

# %% [markdown]
# First you **profile** the model. You want to balance times in the end, but they vary. `FlopCounterMode` counts the
# multiplications and additions of convolutions and matrix products, which are the same everywhere. Then you try all
# cuts, and take the one whose fullest stage has the least work.

# %%
from torch.utils.flop_counter import FlopCounterMode

from course_utils.lesson.models import uneven_line


def operations_of(line, items):
    """Multiplications and additions of each station's forward pass, in millions."""
    counts = []
    for station in line:
        with FlopCounterMode(display=False) as counter:
            items = station(items)
        counts.append(counter.get_total_flops() / 1e6)
    return counts


# %%
def stage_work(work, cuts):
    """The work of each stage; a cut is the number of stations before it."""
    return [sum(work[a:b]) for a, b in pairwise((0, *cuts, len(work)))]


def try_all_cuts(work, stages):
    """The cuts with the least work in the fullest stage."""
    every = combinations(range(1, len(work)), stages - 1)
    return min(every, key=lambda cuts: max(stage_work(work, cuts)))


work = operations_of(uneven_line(), images[:16])
best = try_all_cuts(work, stages=2)
measured = {
    "work of station 2, over station 3": round(work[1] / work[2]),
    "best cut: after station": best[0],
}

# %%
compare(
    predicted,
    measured,
    likely={
        "Equal numbers of stations are not equal work.": {"best cut: after station": 4},
        "28 x 28 pixels are four times as many as 14 x 14: height and width count.": {
            "work of station 2, over station 3": 2
        },
    },
)

# %%
figures.stations(work, {"equal numbers of layers": 4, "best cut": best[0]})
plt.show()

# %% [markdown]
# *Station 2 has almost two thirds of all work. The cut in the middle leaves next to nothing for rank 1.*
#
# Trying all cuts is exact, but for $L$ stations and $p$ stages there are $\binom{L-1}{p-1}$ of them: 7 here, and 11
# billion for 96 stations in 8 stages.

# %% [markdown]
# ### 4.3 The best cut (2 points)
#
# A chain of stages is as fast as its slowest stage. Given each layer's cost, find the cut whose slowest stage is as
# fast as possible. Neither equal numbers of layers nor "fill a stage until it has its share" always finds it. Your
# answer has to be exact.
#
# There are 11 ways to cut 12 layers once, and almost 8 × 10^13 ways to cut 96 layers into 12 stages. The check tries
# such a model, so trying all cuts does not finish.


# %% nbgrader={"grade_id": "4.3", "solution": true}
def balanced_cuts(costs: list[float], stages: int) -> list[int]:
    """Returns where to cut a chain of layers so that the slowest stage is as fast as possible.

    `costs` are the layers' costs, each at least 0, in any unit: whole numbers or not, large or tiny
    (0.00001). Every stage is a run of consecutive layers, at least one. The cost of a stage is the
    sum of its layers' costs.

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
# ## 5. Break it: mistakes that people make with a cut model
#
# ### Two ends that disagree
#
# A message does not say how large it is, so rank 1 has to know. 1,000 images make fifteen batches of 64 and one of 40,
# and here rank 1 does not expect the last one:


# %%
def last_batch(rank):
    if rank == 0:
        dist.send(torch.ones(40, 256, device=hardware.device()), dst=1)
    else:
        dist.recv(torch.empty(64, 256, device=hardware.device()), src=0)


try:
    launch(last_batch, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# `launch` compares what the two ends asked for. Plain gloo fills the first 40 rows and leaves whatever was in the other
# 24, without an error. Take the number of rows from the targets of the same batch, as `last_stage_step` does.
#
# ### A tied embedding, cut in two
#
# Many language models use one table twice: the first part turns tokens into vectors with it, and the head turns
# vectors into scores. That is a **tied embedding**. In one process both places hold the same `Parameter`, and autograd
# adds the gradients of both uses. After a cut, each rank has its own table. The two begin equal. What happens then?


# %%
def train_tied(rank, exchange):
    """Trains half of a model with a tied embedding; returns this rank's copy of the table."""
    stage, step, batches = language_stage(rank)
    table = stage[0].token.weight if rank == 0 else stage[-1][1].weight
    with torch.no_grad():
        table.copy_(part(0).token.weight)  # both copies begin with the same values

    def tied_step(stage, batch):
        step(stage, batch)
        if exchange:
            dist.all_reduce(table.grad)

    train(stage, tied_step, batches)
    return table.detach().cpu()


# %%
whole = build(part, 0, 6)
whole[-1][1].weight = whole[0].token.weight
train(whole, whole_step, list(zip(token_batches, next_batches)))
expected = whole[0].token.weight.detach()

alone, exchanged = (launch(train_tied, 2, exchange) for exchange in (False, True))
print("largest difference from the table of one process")
print("  without an exchange: ", largest_difference(expected, alone))
print("  gradients exchanged:", check_equal(expected, exchanged))

# %% [markdown]
# Without the exchange the table is **silently untied**: there is no error, but each rank uses only one part of the
# gradient, the copies drift apart, and neither equals the table of one process. The repair is the all-reduce in
# `tied_step`: it adds the two gradients before the update, as autograd does in one process.

# %%
figures.tables()
plt.show()

# %% [markdown]
# *Left: one table in one process. Middle: two tables after the cut, and nothing keeps them equal. Right: the
# gradients are added in every step.*
#
# The price is that the table is stored twice, and its gradient crosses the cut in every step.
# [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) pays this price: it has an *embedding group* of the first and the
# last stage for this all-reduce.

# %% [markdown]
# ## 6. Exercises: cut, hand over, balance
#
# | exercise | points | where |
# |---|---|---|
# | 4.1 Three buildings | 2 | section 2 |
# | 4.2 Across the cut and back | 3 | section 4 |
# | 4.3 The best cut | 2 | section 4 |
# | 4.4 Repair the convolutional model | 2 | the further notebook |
# | 4.5 An experiment: three strategies | 3 | the further notebook |
#
# `check` gives your code fresh random layers and sizes, and prints one line for each requirement. `hint("4.1")` prints
# the next of three hints.

# %% [markdown]
# ## 7. See it: one line, its cuts, and who waits
#
# The explorer simulates a line of eight stations, forward only. Seven of them take one minute for a batch, and one is
# heavy.
#
# * Move the heavy station through the line, with (nearly) equal numbers of stations. Then let the best cut follow it.
# * Take more buildings. When does the heavy station alone set the pace, so that another building does not help?

# %%
from course_utils.lesson.explore import Explorer


def draw_split(heavy_station, heavy_minutes, buildings, batches, cut):
    minutes = [1] * 8
    minutes[heavy_station - 1] = heavy_minutes
    equal_numbers = tuple(round(8 * i / buildings) for i in range(1, buildings))
    cuts = equal_numbers if cut == "equal numbers" else try_all_cuts(minutes, buildings)
    spans = stream(stage_work(minutes, cuts), batches)
    return figures.split(minutes, cuts, spans, alone=sum(minutes) * batches)


Explorer(
    draw_split,
    heavy_station=(1, 8, 5),
    heavy_minutes=(1, 12, 4),
    buildings=(2, 4, 3),
    batches=(1, 8, 4),
    cut=["equal numbers", "best cut"],
)

# %% [markdown]
# *At the start, the heavy station is in building 1, which works without a break and sets the pace. Building 0 is
# finished early, and building 2 waits for each batch. The best cut gives the heavy station a building of its own.*

# %% [markdown]
# ## 8. On a cluster: the same two stages under torchrun
#
# The script below does what `train_by_hand` does, and **torchrun** starts it once for each rank.

# %%
from course_utils.lesson.terminal import scratch, torchrun

script, result = scratch() / "two_stages.py", scratch() / "two_stages.pt"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/two_stages.py
"""Trains a model in two stages: torchrun --nproc-per-node 2 two_stages.py result.pt"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from course_utils.lesson import mnist

SIZES, CUT, BATCH, STEPS = (784, 256, 256, 256, 10), 2, 64, 10

local_rank = int(os.environ["LOCAL_RANK"])
gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank = dist.get_rank()


def layer(number):
    torch.manual_seed(number)
    linear = nn.Linear(SIZES[number], SIZES[number + 1])
    return linear if number == 3 else nn.Sequential(linear, nn.ReLU())


first, end = (0, CUT) if rank == 0 else (CUT, 4)
stage = nn.Sequential(*map(layer, range(first, end))).to(device)
optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)  # after the move

images, labels = mnist.tensors(train=True, limit=STEPS * BATCH)
for inputs, targets in zip(images.flatten(1).split(BATCH), labels.split(BATCH)):
    optimizer.zero_grad()
    if rank == 0:
        activations = stage(inputs.to(device))
        dist.send(activations.detach(), dst=1)
        gradients = torch.empty_like(activations)
        dist.recv(gradients, src=1)
        activations.backward(gradients)
    else:
        activations = torch.empty(len(targets), SIZES[CUT], device=device)
        dist.recv(activations, src=0)
        cross_entropy(stage(activations.requires_grad_()), targets.to(device)).backward()
        dist.send(activations.grad, dst=0)
    optimizer.step()

stages = [None, None] if rank == 0 else None
dist.gather_object([p.detach().cpu() for p in stage.parameters()], stages)
if rank == 0:
    torch.save([*stages[0], *stages[1]], sys.argv[1])
    print(f"{STEPS} steps in two stages; rank 0 saved the parameters of both")
dist.destroy_process_group()


# %%
print(torchrun(2, script, result), end="")
saved = flat(torch.load(result, weights_only=True))
print("parameters, largest difference from by hand:", check_equal(by_hand, [saved]))

# %% [markdown]
# What changes on a real cluster:
#
# * **Where the cut lies.** Neighbouring stages belong on devices with a fast link between them, because nothing hides
#   the messages: both ranks wait while they travel.
# * **The model.** Each rank builds its stage on the meta device, and `to_empty` gives it memory, still without
#   values. It makes new parameters, so build the optimizer afterwards. One built earlier holds the old parameters,
#   and the stage never learns.
# * **The data.** Only the first rank needs the inputs, and only the last one the targets, in the same order.

# %% [markdown]
# ## 9. Remember
#
# 1. If you cut between layers, only activations and their gradients cross: 4NH bytes in each direction, however many
#    parameters there are.
# 2. In one process `.to(device)` is enough. Between ranks you send the gradient back yourself, and call
#    `activations.backward(gradients)`.
# 3. A cut saves memory but no time: with one batch at a time, all but one of p stages are idle.
# 4. The fullest stage decides what fits, and the slowest one sets the pace. Profile before you cut.
# 5. A parameter that two stages share drifts apart without an error. Compare with one process.
#
# **Sources**
#
# * Y. Huang et al., *GPipe*, 2019, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): sections 2.1 and 2.2 balance
#   the stages by estimated cost, section 2.3 is about memory and idle time.
# * O. Press and L. Wolf, 2017, [arXiv 1608.05859](https://arxiv.org/abs/1608.05859): tied embeddings.
# * PyTorch: [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html).
