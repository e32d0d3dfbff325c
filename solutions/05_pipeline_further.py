# %% [markdown]
# # 5. The pipeline, further: an engine for any schedule, and what it is good for
#
# The lesson's loop runs GPipe and 1F1B. This notebook builds an engine that runs whatever is legal: several
# pieces of the model on each rank, backward passes in two halves, a last micro-batch that is smaller. It runs
# five schedules on four ranks, and then trains an image classifier. Then come mistakes that show only in the
# gradients: a factor that Adam hides, a normalisation that looks at its micro-batch, and coins that fall
# differently the second time. At its end you write the interleaved schedule yourself.
#
# None of it needs an answer of the lesson.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_utils import hardware, plots
from course_utils.launch import launch
from course_utils.lesson import mnist, schedules
from course_utils.lesson.equality import equal, flat
from course_utils.lesson.predictions import compare
from course_utils.lesson.schedules import Op

hardware.report()

# %% [markdown]
# ## 1. The factory: a dispatch office that knows every timetable
#
# In the lesson each building had one station of the line, and a road to either neighbour. Now the line winds through
# the buildings twice: station 0 stands in building 0, station 3 in building 3, and station 4 in building 0 again. Boxes
# of two stations share a road, and a box may go from one hall of a building to the next.
#
# So every building gets a dispatch office. It has the timetables of its neighbours, and so it knows which box comes next
# on which road before it comes, and has a place for it. And the notes on a box are worked up in two rounds: first
# what the station before waits for, later, when there is nothing else to do, what concerns nobody but the own station.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a station | **virtual stage** | the model's piece number c p + r, chunk c of rank r |
# | the label on a box | **message** | kind, micro-batch, and the virtual stage that gets it |
# | a place that is ready for a box | `irecv` | a receive that is posted before the message is needed |
# | first round of the notes | **B** | the gradient of the stage's inputs |
# | second round | **W** | the gradient of its weights |
#
# ## 2. The smallest real run: a backward pass in two halves
#
# The line of eight layers, its batch, and one process as the measure are those of the lesson.

# %%
WIDTH, ROWS = 64, 32
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(ROWS, WIDTH, generator=generator)
targets = torch.randn(ROWS, WIDTH, generator=generator)


def new_model(layers=8):
    torch.manual_seed(0)
    line = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(*line).to(hardware.device())


def cut(model, parts):
    """Equal consecutive parts of an nn.Sequential."""
    size = len(model) // parts
    return [model[part * size : (part + 1) * size] for part in range(parts)]


# %%
def alone(model):
    """The gradients and the loss of one process on the whole batch."""
    loss = mse_loss(model(inputs.to(hardware.device())), targets.to(hardware.device()))
    loss.backward()
    return flat(p.grad for p in model.parameters()), loss.item()


expected, expected_loss = alone(new_model())

# %% [markdown]
# To split the backward pass, somebody has to stop halfway. `torch.autograd.grad` computes the
# gradients that you name and no others. Asked for the gradient of the stage's input, it leaves the
# weights alone. On the way it passes the output of every layer, so it can return those gradients
# too. Later, W takes them up: for each layer it asks for the gradient of the layer's own weights,
# given that of the layer's output. Nothing is computed twice.


# %%
class SplitStage:
    """A piece of the model, and the micro-batches that it has begun and not finished."""

    def __init__(self, module):
        self.module, self.stored, self.layers = module, {}, []
        for layer in module.modules():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                layer.register_forward_hook(self.note)

    def note(self, layer, inputs, output):
        self.layers.append((layer, output))

    def forward(self, i, x, finish=None):
        self.layers = []
        output = self.module(x) if finish is None else finish(self.module(x))
        self.stored[i] = x, output, self.layers
        return output.detach()

    def backward(self, i, gradient):
        x, output, _ = self.stored.pop(i)
        output.backward(gradient)
        return x.grad

    def backward_to_input(self, i, gradient):
        x, output, layers = self.stored[i]
        wanted = [result for _, result in layers] + ([x] if x.requires_grad else [])
        gradients = torch.autograd.grad(output, wanted, gradient, retain_graph=True)
        self.stored[i] = layers, gradients
        return gradients[-1]

    def backward_to_weights(self, i):
        for (layer, result), gradient in zip(*self.stored.pop(i)):
            weights = [p for p in layer.parameters(recurse=False) if p.requires_grad]
            found = torch.autograd.grad(result, weights, gradient, retain_graph=True)
            for weight, new in zip(weights, found):
                weight.grad = new if weight.grad is None else weight.grad.add_(new)


# %% [markdown]
# Does B really leave the weights alone, and do both halves together give what `backward` gives?

# %%
whole, halves = SplitStage(new_model()), SplitStage(new_model())
x = inputs.clone().to(hardware.device()).requires_grad_()
gradient = torch.ones_like(x)

whole.forward(0, x)
input_gradient = whole.backward(0, gradient)
halves.forward(0, x)
same = torch.equal(halves.backward_to_input(0, gradient), input_gradient)
print("after B: gradient of the input equal:", same)
print(
    "after B: weights with a gradient:", sum(p.grad is not None for p in halves.module.parameters())
)
halves.backward_to_weights(0)
both = [flat(p.grad for p in stage.module.parameters()) for stage in (whole, halves)]
print("after W: gradients of the weights equal:", equal(both[0], [both[1]]))

# %% [markdown]
# This way has a limit: each weight must belong to one layer that is called once. A tied weight would
# lead W back through the layers between its two uses.
#
# ## 3. Predict, then measure: shelves, shifts, and a warm-up
#
# ### What W keeps on the shelf
#
# The lesson's five schedules, for 4 ranks and 8 micro-batches. **Predict** the most micro-batches in flight on each
# rank, for the interleaved schedule in pieces of half a stage. A micro-batch stays on the shelf until nobody needs it any
# more, and that is W, where there is one.

# %%
p, m = 4, 8
PLANS = {
    "GPipe": schedules.gpipe(p, m),
    "1F1B": schedules.one_forward_one_backward(p, m),
    "interleaved": schedules.interleaved(p, m, chunks=2),
    "ZB-H1": schedules.zb_h1(p, m),
    "ZB-H2": schedules.zb_h2(p, m),
}
SIMULATED = {name: schedules.simulate(plan) for name, plan in PLANS.items()}

# %% tags=["prediction"]
predicted = {"interleaved": [11, 9, 7, 5], "ZB-H1": [4, 4, 4, 4], "ZB-H2": [7, 7, 7, 7]}

# %%
compare(
    predicted,
    {name: SIMULATED[name].peak_in_flight for name in predicted},
    {
        "As under 1F1B: but the last rank waits with its W.": {"ZB-H1": [4, 3, 2, 1]},
        "As under 1F1B, in pieces: the warm-up is longer.": {"interleaved": [8, 6, 4, 2]},
    },
)

# %% [markdown]
# Under 1F1B the last rank holds a single micro-batch. Under ZB-H1 it holds as many as the first one: it puts its W off
# so that its B, for which the others wait, come early.
#
# ### What ZB-H2 needs so that its zero counts

# %%
for name in ("1F1B", "ZB-H1", "ZB-H2"):
    result = SIMULATED[name]
    print(f"{name}: a rank's step {result.step:g}, from the first op of all to the last", end=" ")
    print(f"{result.makespan:g}")

# %% [markdown]
# From the first op of all ranks to the last one, ZB-H2 takes as long as ZB-H1: three units are only
# the ranks' shift. It wins where step follows step, and each rank begins the next one at once.
#
# Interleaved 1F1B has a longer warm-up than it needs where messages take no time, as in all simulations so
# far. The cell below takes some passes out of the warm-up, p - 1 - r of them on rank r, and leaves the order
# otherwise as it was. The second time, messages take a while: the **hop latency** is the time from the end of
# an op until its result has reached the next rank, in the same units.

# %%
from itertools import zip_longest


def shorter_warm_up(row, fewer):
    """The same order of F and the same order of B, with fewer F before the first pair."""
    forward, backward = ([op for op in row if op.kind == kind] for kind in "FB")
    early = row.index(backward[0]) - 1 - fewer
    pairs = zip_longest(forward[early:], backward)
    return forward[:early] + [op for pair in pairs for op in pair if op]


usual = PLANS["interleaved"]
shorter = [shorter_warm_up(row, p - 1 - rank) for rank, row in enumerate(usual)]
for latency in (0, 0.25):
    for name, plan in (("usual warm-up", usual), ("shorter warm-up", shorter)):
        result = schedules.simulate(plan, latency=latency)
        peak = result.peak_in_flight
        print(f"hop latency {latency}, {name}: step {result.step:g}, in flight {peak}")

# %% [markdown]
# With free messages, the shorter warm-up is as fast and stores less. With slow ones it waits at every
# turn. The extra passes of Megatron-LM's order, a shelf of eleven instead of eight, are what hides
# the messages.
#
# One example proves little. The next cell compares the closed forms with the simulation for many
# pipelines: with a slow and a fast backward pass, in fractions, so that equal means equal.

# %%
from fractions import Fraction
from functools import partial

SCHEDULERS = {
    "gpipe": schedules.gpipe,
    "one_forward_one_backward": schedules.one_forward_one_backward,
    "interleaved": partial(schedules.interleaved, chunks=3),
    "zb_h1": schedules.zb_h1,
    "zb_h2": schedules.zb_h2,
}


def agrees(name, p, m, backward):
    chunks = 3 if name == "interleaved" else 1
    result = schedules.simulate(SCHEDULERS[name](p, m), Fraction(1), backward)
    idle = schedules.bubble_time_of(name, p, m, chunks, Fraction(1), backward)
    peak = schedules.peak_in_flight_of(name, p, m, chunks)
    return result.step - result.work == idle and result.peak_in_flight == peak


# %%
for name in SCHEDULERS:
    cases = [
        agrees(name, p, m, backward)
        for p in (1, 2, 3, 5, 8)
        for m in (2 * p, 3 * p, 8 * p)
        for backward in (Fraction(3, 2), Fraction(2))
    ]
    print(f"{name}: idle time and shelves as predicted in {sum(cases)} of {len(cases)} pipelines")

# %% [markdown]
# And a large one, as on a cluster with 256 stages and 4,096 micro-batches, two million ops:

# %%
large = schedules.simulate(schedules.one_forward_one_backward(256, 4096))
print(f"bubble: {large.bubble:.4%} of the ideal time; formula: {255 / 4096:.4%}")
print(
    f"in flight on the first rank {large.peak_in_flight[0]}, on the last {large.peak_in_flight[-1]}"
)

# %% [markdown]
# ## 4. By hand, then at work: an engine, five schedules, a classifier
#
# The engine has four parts: the stages, which you have seen, the addresses of the messages, a post office that carries
# them, and the loop that runs a row.
#
# ### The addresses
#
# A **message** is the result of an F, for the stage after, or of a B, for the stage before. It is
# named by what it is and whom it is for. `needs` says what an op waits for, `makes` what its result
# is. Both follow from the rule for virtual stages, c p + r.

# %%
from typing import NamedTuple


class Message(NamedTuple):
    kind: str  # "F": activations, "B": their gradient
    micro_batch: int
    stage: int  # the virtual stage that gets it


def needs(op, rank, ranks, stages):
    stage = op.chunk * ranks + rank
    at_the_end = stage == (0 if op.kind == "F" else stages - 1)
    return None if op.kind == "W" or at_the_end else Message(op.kind, op.micro_batch, stage)


def makes(op, rank, ranks, stages):
    stage = op.chunk * ranks + rank + (1 if op.kind == "F" else -1)
    outside = not 0 <= stage < stages
    return None if op.kind == "W" or outside else Message(op.kind, op.micro_batch, stage)


plan = schedules.interleaved(4, 4, chunks=2)
for source in (0, 2):
    made = (makes(op, source, 4, 8) for op in plan[source])
    to_rank_1 = [message for message in made if message and message.stage % 4 == 1]
    words = [f"{m.kind}{m.micro_batch}>{m.stage}" for m in to_rank_1]
    print(f"rank {source} sends to rank 1:", *words)

# %% [markdown]
# `F0>5` is what micro-batch 0 has become on its way to stage 5. Messages for two stages of rank 1 come
# by one road, in the sender's order, which rank 1 can read off the schedule before anything is sent.
#
# ### The post office
#
# Three decisions keep every schedule free of deadlocks, and fast:
#
# * **Sending never waits.** `isend` returns at once. The engine keeps the tensor until it has
#   certainly arrived: for activations when their gradient comes back, for the rest at the end of the
#   step.
# * **Receiving begins early.** For each neighbour one `irecv` more than needed is under way, so that
#   a message can travel while the rank computes.
# * **Messages are received in the order in which they are sent.** gloo could tell them apart by a **tag**, a
#   number; NCCL ignores tags and matches by order. The receiver knows the sender's row of the
#   schedule, so it posts its receives in just that order and needs no tags. Each direction between two ranks
#   has a process group of its own: on a GPU, messages of one group queue behind each other, and a
#   `send` must not stand behind a `recv` that waits for the other side.
#
# Nobody asks for shapes. `entering[s]` is a sample of what enters virtual stage s. It lives on the
# **meta device**, where tensors have shapes and no data.

# %%
from copy import deepcopy


def samples(stages, x):
    """A sample of what enters each stage, without any data."""
    entering = []
    for stage in stages:
        entering.append(x.to("meta"))
        x = deepcopy(stage).to("meta")(entering[-1]).detach()
    return entering


# %% [markdown]
# Each of the roads is used once when it is made, in an order that all ranks share. With the first message of
# a group NCCL connects its two ranks, and even `irecv` does not return before both are there: two ranks that
# each begin with an `irecv` would wait for each other.

# %%
from collections import deque


def roads_between(ranks):
    """{(source, to): a process group} for each direction between neighbours, all in use already."""
    pairs = {(rank, (rank + step) % ranks) for rank in range(ranks) for step in (1, -1)}
    pairs = sorted(pair for pair in pairs if pair[0] != pair[1])
    roads, word = {}, torch.zeros(1, device=hardware.device())
    for source, to in pairs:
        roads[source, to] = road = dist.new_group((source, to))
        if dist.get_rank() == source:
            dist.send(word, to, road)
        elif dist.get_rank() == to:
            dist.recv(word, source, road)
    return roads


# %% [markdown]
# The receiving half. `open` is called at the start of a step, with the rows of each micro-batch. `expect` posts the next
# receive from a neighbour, and `collect` waits for a message and posts one more.


# %%
class Inbox:
    """Receives from the other ranks, in the order in which they send."""

    def __init__(self, schedule, entering):
        self.rank, self.ranks, self.entering = dist.get_rank(), dist.get_world_size(), entering
        self.roads, self.orders = roads_between(self.ranks), {}
        for source, to in self.roads:
            made = [makes(op, source, self.ranks, len(entering)) for op in schedule[source]]
            if to == self.rank:
                self.orders[source] = [x for x in made if x and x.stage % self.ranks == to]

    def open(self, rows):
        self.rows, self.sent, self.on_the_way, self.at_home = rows, {}, {}, {}
        self.expected = {source: deque(order) for source, order in self.orders.items()}
        for source in self.expected:
            self.expect(source)

    def expect(self, source):
        if self.expected[source]:
            message = self.expected[source].popleft()
            like = self.entering[message.stage + (message.kind == "B")]
            size = self.rows[message.micro_batch], *like.shape[1:]
            space = torch.empty(size, dtype=like.dtype, device=hardware.device())
            arrival = dist.irecv(space, source, self.roads[source, self.rank])
            self.on_the_way[message] = space, arrival

    def collect(self, message, source):
        while message not in self.on_the_way:
            self.expect(source)
        space, arrival = self.on_the_way.pop(message)
        self.expect(source)
        arrival.wait()
        return space


# %% [markdown]
# And the whole office, which also sends, keeps what it has sent, and carries what stays on the rank.


# %%
class PostOffice(Inbox):
    """Carries messages between this rank and the others, in the order of a schedule."""

    def receive(self, message):
        source = (message.stage + (1 if message.kind == "B" else -1)) % self.ranks
        if source == self.rank:
            return self.at_home.pop(message)
        space = self.collect(message, source)
        if message.kind == "B":  # so the activations that it belongs to have arrived
            self.sent.pop(Message("F", message.micro_batch, message.stage + 1))[1].wait()
        return space

    def send(self, message, tensor):
        to = message.stage % self.ranks
        if to == self.rank:
            self.at_home[message] = tensor
        else:
            tensor, road = tensor.contiguous(), self.roads[self.rank, to]
            self.sent[message] = tensor, dist.isend(tensor, to, road)

    def close(self):
        for _, departure in self.sent.values():
            departure.wait()


# %% [markdown]
# ### The loop
#
# A rank takes the ops of its row, one after the other: receive, compute, send. On the last stage the loss is part of
# the forward pass. The gradient that enters the last stage is the micro-batch's share of the rows. So the sum over
# micro-batches is the gradient of the whole batch's mean, also where the last micro-batch is smaller.

# %%
from contextlib import nullcontext


class Batch:
    """A batch in `parts` micro-batches, each with its share of the rows, and the loss so far."""

    def __init__(self, inputs, targets, parts, loss_of):
        batch = (t.to(hardware.device()).tensor_split(parts) for t in (inputs, targets))
        self.inputs, self.targets = batch
        self.shares = [x.new_tensor(len(x) / len(inputs), dtype=torch.float32) for x in self.inputs]
        self.loss_of, self.loss = loss_of, torch.zeros((), device=hardware.device())

    def finish(self, i, output):
        loss = self.loss_of(output, self.targets[i])
        self.loss += self.shares[i] * loss.detach()  # not .item(), which waits for a GPU
        return loss


# %%
class Work:
    """What a rank computes: its pieces of the model, and each op on one of them."""

    def __init__(self, modules, split):
        self.stages, self.split, self.peak = [SplitStage(module) for module in modules], split, 0

    def run(self, op, arrived, batch, last):
        i, stage = op.micro_batch, self.stages[op.chunk]
        if op.kind == "F":
            x = batch.inputs[i] if arrived is None else arrived.requires_grad_()
            result = stage.forward(i, x, partial(batch.finish, i) if last else None)
            self.peak = max(self.peak, sum(len(stage.stored) for stage in self.stages))
            return result
        if op.kind == "W":
            return stage.backward_to_weights(i)
        gradient = batch.shares[i] if arrived is None else arrived
        return (stage.backward_to_input if self.split else stage.backward)(i, gradient)


# %% [markdown]
# `Pipeline` puts them together. `modules` are this rank's pieces of the model, one for each chunk, `entering` a sample of
# what enters each virtual stage of the whole pipeline, and `loss_of` gives the mean loss of some rows. `step` adds the
# gradients of a batch to those of the weights and returns its loss, on the last rank. Every rank is given the whole batch;
# `during(op)` is a context around each op.


# %%
class Pipeline(Work):
    """One rank of a pipeline: runs its row of a schedule, whatever the schedule is."""

    def __init__(self, modules, schedule, entering, loss_of):
        place = dist.get_rank(), dist.get_world_size(), len(entering)
        row = schedule[dist.get_rank()]
        super().__init__(modules, split=any(op.kind == "W" for op in row))
        self.micro_batches = 1 + max(op.micro_batch for op in row)
        self.post, self.loss_of = PostOffice(schedule, entering), loss_of
        self.row = [(op, needs(op, *place), makes(op, *place)) for op in row]

    def step(self, inputs, targets, during=nullcontext):
        batch = Batch(inputs, targets, self.micro_batches, self.loss_of)
        self.post.open([len(x) for x in batch.inputs])
        for op, need, made in self.row:
            arrived = None if need is None else self.post.receive(need)
            with during(op):
                result = self.run(op, arrived, batch, last=made is None)
            if made is not None:
                self.post.send(made, result)
        self.post.close()
        return batch.loss.item()


# %% [markdown]
# ### All five schedules, on four ranks
#
# The batch is the same in all runs, 8 micro-batches of 4 rows. Under the interleaved schedule each
# rank holds two chunks of one layer each, otherwise one stage of two layers. Three claims are
# checked on every run: the loss, the gradients of all layers, and the peak of stored micro-batches
# on each rank.

# %%
from course_utils.lesson.pace import SLOT, at_pace
from course_utils.trace import Record, Trace


class Run(NamedTuple):
    record: Record
    loss: float
    gradients: list[Tensor]  # of each chunk
    peak: int


def pipeline_run(rank, schedule, slots, batch=(inputs, targets)):
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    chunks = 1 + max(op.chunk for op in schedule[rank])
    stages = cut(new_model(), ranks * chunks)
    engine = Pipeline(stages[rank::ranks], schedule, samples(stages, batch[0]), mse_loss)
    with Trace() as trace:
        loss = engine.step(*batch, during=at_pace(trace, slots))
    gradients = [flat(p.grad for p in stage.parameters()) for stage in stages[rank::ranks]]
    return Run(trace.record(), loss, gradients, engine.peak)


def whole_gradient(runs):
    """The gradients of all virtual stages, in the order of the layers."""
    return torch.cat([part for chunk in zip(*(run.gradients for run in runs)) for part in chunk])


# %%
SLOTS = {
    "GPipe": {"F": 1, "B": 2},
    "1F1B": {"F": 1, "B": 2},
    "interleaved": {"F": 0.5, "B": 1},
    "ZB-H1": {"F": 1, "B": 1, "W": 1},
    "ZB-H2": {"F": 1, "B": 1, "W": 1},
}
RUNS = {name: launch(pipeline_run, 4, plan, SLOTS[name]) for name, plan in PLANS.items()}

print(f"{'':12}  loss  gradients  peak as predicted")
for name, runs in RUNS.items():
    loss = abs(runs[-1].loss - expected_loss) < 1e-6
    gradients = equal(expected, [whole_gradient(runs)])
    peaks = [run.peak for run in runs]
    print(f"{name:12}  {loss}  {gradients!s:9}  {peaks == SIMULATED[name].peak_in_flight} {peaks}")

# %% [markdown]
# Same loss, same gradients, five orders. Now the time. Each figure shows what the simulator says and,
# under it, what the ranks did.

# %%
for name in ("GPipe", "1F1B", "interleaved"):
    panels = {f"{name}, simulated": SIMULATED[name]}
    plots.gantt(panels | {f"{name}, emulated on 4 ranks": [run.record for run in RUNS[name]]})
    plt.show()

# %% [markdown]
# *In each pair the lower picture repeats the upper one, box for box. The small gaps in it are what
# messages and the machine's other work cost.*

# %%
for name in ("ZB-H1", "ZB-H2"):
    panels = {f"{name}, simulated": SIMULATED[name]}
    plots.gantt(panels | {f"{name}, emulated on 4 ranks": [run.record for run in RUNS[name]]})
    plt.show()

# %% [markdown]
# *Light, dark and pink boxes are F, B and W. The ranks fill with W the time in which they would wait,
# and under ZB-H2 no rank waits between its first box and its last.*
#
# A picture is no proof. Two claims hold on any machine, however busy it is: every rank ran its ops in
# the order of its row, and no step is shorter than the simulated one.

# %%
TOOK = {}  # the longest time of a rank from its first op to its last, in slots
for name, runs in RUNS.items():
    rows = [[span for span in run.record.spans if span.kind == "compute"] for run in runs]
    TOOK[name] = max(row[-1].end - row[0].start for row in rows) / SLOT
    in_order = [[span.name for span in row] for row in rows] == [
        [str(op) for op in row] for row in PLANS[name]
    ]
    not_shorter = TOOK[name] >= SIMULATED[name].step
    print(f"{name:12} in the schedule's order: {in_order}, not shorter: {not_shorter}")

# %% [markdown]
# How close are they? The next cell divides the time that the ranks took by the simulated time. Each
# op costs a little more than its slot, so expect a ratio slightly above 1, and more on a busy
# machine.

# %% tags=["nbval-ignore-output"]
for name, took in TOOK.items():
    print(f"{name:12} emulated to simulated: {took / SIMULATED[name].step:.2f}")

# %% [markdown]
# ### An image classifier, against one process
#
# Now a real task: a small convolutional network on MNIST, in two stages. Stage 0 is
# the first convolution with its pooling, stage 1 is the rest. Batches have 256 images in 4
# micro-batches, and nobody keeps a pace any more. Three ways run the same 12 steps of SGD: one
# process, the engine with GPipe, the engine with 1F1B. The first cell is what all three share.

# %%
import time

from torch.nn.functional import cross_entropy

from course_utils.lesson.models import MnistConvNet
from course_utils.trace import kept_for_backward, memory_ledger

STEPS, BATCH = 12, 256
images, labels = mnist.tensors(train=True, limit=STEPS * BATCH)


def classifier():
    torch.manual_seed(0)
    return MnistConvNet().layers.to(hardware.device())


def held(model, x, times=1):
    """The ledger of a module that keeps the activations of x, `times` over."""
    with kept_for_backward(model) as kept:
        model(x.to(hardware.device(), copy=True))
    return memory_ledger(model) | {"activations": times * kept.bytes}


# %%
def classify_alone(rank, threads):
    torch.set_num_threads(threads)
    model, times = classifier(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in zip(images.split(BATCH), labels.split(BATCH)):
        begin = time.perf_counter()
        optimizer.zero_grad()
        cross_entropy(model(x.to(hardware.device())), y.to(hardware.device())).backward()
        optimizer.step()
        hardware.settle()
        times.append(time.perf_counter() - begin)
    return flat(model.parameters()), times, held(model, x)


# %%
def classify(rank, schedule):
    torch.set_num_threads(1)
    model, times = classifier(), []
    stages = [model[:3], model[3:]]
    entering = samples(stages, images[:BATCH])
    engine = Pipeline([stages[rank]], schedule, entering, cross_entropy)
    optimizer = torch.optim.SGD(stages[rank].parameters(), lr=0.1)
    for x, y in zip(images.split(BATCH), labels.split(BATCH)):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        engine.step(x, y)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - begin)
    box = torch.zeros(BATCH // engine.micro_batches, *entering[rank].shape[1:])
    return flat(stages[rank].parameters()), times, held(stages[rank], box, engine.peak)


# %%
one = launch(classify_alone, 1, 1)
one_all_cores = launch(classify_alone, 1, hardware.cores())
pipelines = {
    "GPipe": launch(classify, 2, schedules.gpipe(2, 4)),
    "1F1B": launch(classify, 2, schedules.one_forward_one_backward(2, 4)),
}
for name, ranks in pipelines.items():
    parameters = torch.cat([rank[0] for rank in ranks])
    print(f"{name}: parameters after {STEPS} steps as alone:", equal(one[0][0], [parameters]))

# %%
from course_utils.figures import ch05 as figures

ledgers = {"one process": one[0][2]}
for name, ranks in pipelines.items():
    ledgers |= {f"{name}, stage {r}": rank[2] for r, rank in enumerate(ranks)}
print(f"{'bytes':16} parameters  gradients  activations")
for name, ledger in ledgers.items():
    parts = [ledger[kind] for kind in ("parameters", "gradients", "activations")]
    print("{:16} {:10,} {:10,} {:12,}".format(name, *parts))
figures.ledgers(ledgers)
plt.show()

# %% [markdown]
# *One process holds everything. Stage 0 has almost no parameters and most of the activations, since
# the images are still large there. With 1F1B stage 1 holds one micro-batch instead of four; stage 0
# holds two. A stage's activations are computed: the counted peak times the bytes of a micro-batch.*
#
# A stage can hold less and compute more: of each micro-batch it keeps only what came in, and before B
# it runs the forward pass again. That is **recomputation**, also called activation checkpointing;
# GPipe's paper does it. Then a micro-batch on the shelf costs its stage's input, and one whole set of
# activations exists at a time, while its B runs. **Predict** what a micro-batch of 64 images costs on
# the shelf of each stage. What leaves stage 0 are 8 channels of 14 x 14.

# %% tags=["prediction"]
predicted = {"stage 0": 64 * 28 * 28 * 4, "stage 1": 64 * 8 * 14 * 14 * 4}

# %%
from torch.utils.checkpoint import checkpoint

model, whole, measured = classifier(), {}, {}
x = images[:64].clone().to(hardware.device())
for rank, stage in enumerate((model[:3], model[3:])):
    with kept_for_backward(stage) as kept:
        made = stage(x)
    with kept_for_backward(stage) as shelved:
        checkpoint(stage, x, use_reentrant=False)
    whole[f"stage {rank}"], measured[f"stage {rank}"] = kept.bytes, shelved.bytes
    x = made.detach().requires_grad_()
compare(predicted, measured, {"All activations: the shelf without recomputation.": whole})

# %% [markdown]
# A thirteenth and less than a quarter of what the stages keep otherwise, for one more forward pass of
# each micro-batch.
#
# And the time? The next cell compares the median time of a step with that of one process on one
# core, and with one process that may use all cores.


# %% tags=["nbval-ignore-output"]
def median(times):
    return sorted(times[2:])[len(times[2:]) // 2]


base = median(one[0][1])
print(f"{'':28} time of a step, to one process on one core")
print(f"{'one process, all cores':28} {median(one_all_cores[0][1]) / base:.2f}")
for name, ranks in pipelines.items():
    print(f"{'2 ranks, one core each, ' + name:28} {median(ranks[0][1]) / base:.2f}")

# %% [markdown]
# Your numbers depend on your machine. What to expect of them:
#
# * **At best 0.63.** Two stages with 4 micro-batches have a bubble of 1/5 of the total time. So the
#   best ratio is 1/2 divided by 4/5, if both stages take equally long.
# * **They do not take equally long.** The slower stage sets the pace; the other one waits.
# * **Messages cost.** 6,272 bytes for each image and direction go through the CPU's memory here.
# * **Small micro-batches are less efficient.** Each op has a fixed cost.
# * **The cores are shared.** If your machine has two cores and something else runs on one of them,
#   the pipeline has nothing to win. And one process with all cores has no bubble at all.
#
# So do not expect two ranks on one CPU to win much. A pipeline pays where the model does not fit on
# one device: then the comparison is not with one process but with chapter 4's half-idle devices.

# %% [markdown]
# ## 5. Break it: wrong gradients that train
#
# ### Gradients too large by the number of micro-batches
#
# Somebody forgets that the loss of a micro-batch counts for 1/m. All gradients are then m times too
# large. The run below makes this mistake on purpose, on two ranks, once with SGD and once with AdamW.
# **Predict** which of the two you would notice.


# %%
def train(rank, make_optimizer, factor):
    torch.set_num_threads(1)
    stages = cut(new_model(), 2)
    start = flat(stages[rank].parameters())
    optimizer = make_optimizer(stages[rank].parameters())
    plan = schedules.one_forward_one_backward(2, 8)
    engine = Pipeline(
        [stages[rank]], plan, samples(stages, inputs), lambda y, t: factor * mse_loss(y, t)
    )
    for _ in range(10):
        optimizer.zero_grad()
        engine.step(inputs, targets)
        optimizer.step()
    return flat(stages[rank].parameters()) - start


# %%
for make_optimizer in (partial(torch.optim.SGD, lr=0.5), partial(torch.optim.AdamW, lr=1e-3)):
    right = torch.cat(launch(train, 2, make_optimizer, 1))
    wrong = torch.cat(launch(train, 2, make_optimizer, 8))
    print(f"{make_optimizer.func.__name__}: the way travelled")
    print(
        "    differs by more than half of its length:",
        ((wrong - right).norm() > right.norm() / 2).item(),
    )
    print(
        "    differs by less than a twentieth:", ((wrong - right).norm() < right.norm() / 20).item()
    )

# %% [markdown]
# Every gradient that SGD gets is scaled by eight, so its first step is eight times too large. AdamW
# divides each gradient by its own typical size, so a constant factor cancels, and the run looks
# healthy. It is not: gradient clipping, weight decay that is added to the gradient (as in `Adam`),
# and the norms in your logs all see the factor. Factors of this kind have been found in large code bases:
# gradients too large by the number of tokens ([torchtitan
# 2972](https://github.com/pytorch/torchtitan/issues/2972)), and gradients divided again at each of
# several steps that were to add up ([torchtitan
# 1733](https://github.com/pytorch/torchtitan/issues/1733)). Test with SGD, and compare gradients,
# not losses.
#
# ### A last micro-batch that is smaller
#
# PyTorch's stages refused 30 rows in 4 micro-batches, as the lesson shows, and a loop that divides by 4 gets their
# gradients wrong. The engine weighs by rows, and reads the sizes off the batch:

# %%
few = inputs[:30].to(hardware.device()), targets[:30].to(hardware.device())
model = new_model()
mse_loss(model(few[0]), few[1]).backward()
reference = flat(p.grad for p in model.parameters())


def thirty_rows(rank):
    stages = cut(new_model(), 2)
    plan = schedules.one_forward_one_backward(2, 4)
    engine = Pipeline([stages[rank]], plan, samples(stages, inputs), mse_loss)
    engine.step(inputs[:30], targets[:30])
    return flat(p.grad for p in stages[rank].parameters())


print("by hand, as alone:", equal(reference, [torch.cat(launch(thirty_rows, 2))]))

# %% [markdown]
# ### BatchNorm looks at its own micro-batch only
#
# The engine promises the gradient of the whole batch. It can keep the promise only if a row's loss
# does not depend on the other rows. Batch normalisation subtracts the mean of what it sees, and now
# it sees a micro-batch.


# %%
def normalised(normalisation):
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), normalisation(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers).to(hardware.device())


def normalised_run(rank, normalisation):
    stages = cut(normalised(normalisation), 2)
    plan = schedules.one_forward_one_backward(2, 4)
    engine = Pipeline([stages[rank]], plan, samples(stages, inputs), mse_loss)
    engine.step(inputs, targets)
    batches = [m.num_batches_tracked.item() for m in stages[rank] if hasattr(m, "running_mean")]
    return flat(p.grad for p in stages[rank].parameters()), batches


for normalisation in (nn.LayerNorm, nn.BatchNorm1d):
    reference, _ = alone(normalised(normalisation))
    gradients, batches = zip(*launch(normalised_run, 2, normalisation))
    name = normalisation.__name__
    print(f"{name}: gradient as of the whole batch:", equal(reference, [torch.cat(gradients)]))
    if any(batches):
        print(f"{name}: batches that it has counted in one step:", *batches[0])

# %% [markdown]
# The running mean and variance move four times in a step instead of once, and each time towards the
# statistics of eight rows only. Layer normalisation works within a row. It is what transformers
# use, and one reason why they are easy to pipeline. For a convolutional network, GPipe keeps the
# statistics of each micro-batch for training and gathers those of the whole batch for evaluation
# (Huang et al., section 2.2). **Group normalisation**, which takes its mean over some channels of one
# image, avoids the question.
#
# ### Dropout and recomputation out of step
#
# Long pipelines often recompute. With dropout, the second run has to drop the same elements as the
# first. In a pipeline other micro-batches have drawn random numbers
# in between. The cell runs two micro-batches, F0 F1 B0 B1, and once leaves out the care that
# `checkpoint` takes of the random state.


# %%
def with_dropout(recompute):
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    stage.to(hardware.device())
    losses = []
    for x, y in zip(inputs.to(hardware.device()).chunk(2), targets.to(hardware.device()).chunk(2)):
        losses.append(mse_loss(recompute(stage, x), y))  # F0, F1
    for loss in losses:
        loss.backward()  # B0, B1
    return flat(losses), flat(p.grad for p in stage.parameters())


# %%
ways = {
    "stored": lambda stage, x: stage(x),
    "recomputed": partial(checkpoint, use_reentrant=False),
    "recomputed, random state forgotten": partial(
        checkpoint, use_reentrant=False, preserve_rng_state=False
    ),
}
results = {name: with_dropout(way) for name, way in ways.items()}
losses, gradient = results["stored"]
for name, (own_losses, own_gradient) in results.items():
    print(f"{name}: loss {equal(losses, [own_losses])}, gradient {equal(gradient, [own_gradient])}")

# %% [markdown]
# The loss is right in all three, because it comes from the first forward pass. The gradient of the
# third belongs to other masks. No error says so. `checkpoint` saves and restores the random state by
# default (`preserve_rng_state=True`); an engine that recomputes on its own has to do the same for
# each micro-batch.

# %% [markdown]
# ## 6. Exercise: interleaved 1F1B
#
# As in 5.2 and 5.3 you write a **schedule**, a list with one entry per rank. `check` first tries whether it can run at all,
# then simulates it with one unit of time for F and two for B, and holds it against a budget of time and a budget of
# memory. You can look at yours at any time: `plots.gantt(schedules.simulate(interleaved(4, 8, 2)))`.

# %%
from course_exercises import check, hint

# %% [markdown]
# ### 5.4 Interleaved 1F1B (3 points)
#
# Every rank now holds several chunks of the model: chunk c of rank r is piece c * stages + r of the
# whole, so that a micro-batch passes all ranks once for chunk 0, once more for chunk 1, and so on.
# `Op("F", 3, 1)` is the forward pass of micro-batch 3 through chunk 1. The ranks now wait for
# passes through a chunk, not through a whole stage, and the bubble shrinks with them.
#
# Two questions decide. In which order does a rank run its forward passes, so that the pieces after
# it always have work? And how many of them come before its first pair of forward and backward?
#
# Below is one such schedule: three ranks, six micro-batches, two chunks; `F0.1` is the forward pass of
# micro-batch 0 through chunk 1. Follow the `F` alone, then the `B` alone: every rank has the same two
# orders, and only what comes before the first pair differs.

# %%
for rank, row in enumerate(schedules.interleaved(3, 6, 2)):
    print(f"rank {rank}:", *row)


# %% nbgrader={"grade_id": "5.4", "solution": true}
def interleaved(stages: int, micro_batches: int, chunks: int) -> list[list[Op]]:
    """Returns the interleaved 1F1B schedule: what each of `stages` ranks does, in order.

    `micro_batches` is a multiple of `stages`. Every rank has one F and one B for each micro-batch
    and each of its chunks 0 to `chunks` - 1. With F and B the times of one chunk:
    time at most (chunks * micro_batches + stages - 1) * (F + B); memory of rank r at most the
    activations of (chunks - 1) * stages + 2 * (stages - r) - 1 micro-batches in one chunk each.
    Write the lists yourself: no function of `course_utils.lesson.schedules` may be called.
    """
    ### BEGIN SOLUTION
    total, group = chunks * micro_batches, chunks * stages

    def step(kind: str, k: int) -> Op:
        """The k-th F or the k-th B of every rank: `stages` micro-batches, chunk after chunk."""
        round_, place = divmod(k, group)
        turn, member = divmod(place, stages)
        chunk = turn if kind == "F" else chunks - 1 - turn
        return Op(kind, round_ * stages + member, chunk)

    ranks = []
    for rank in range(stages):
        ahead = min(group - stages + 2 * (stages - 1 - rank), total)
        does = [step("F", k) for k in range(ahead)]
        for k in range(total):
            does += [step("F", k + ahead)] if k + ahead < total else []
            does += [step("B", k)]
        ranks.append(does)
    return ranks
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.4-check", "grade": true, "points": 3, "locked": true}
check("5.4", interleaved)

# %% [markdown]
# ## 7. See it: how many chunks
#
# Chunks make the bubble smaller and the messages more. 8 ranks, 32 micro-batches, and messages that take a while: the hop
# latency is in forward passes of a whole stage.

# %%
counts, idle = [1, 2, 3, 4, 6, 8], {}
for latency in (0, 0.1, 0.25):
    results = [
        schedules.simulate(schedules.interleaved(8, 32, chunks), latency=latency)
        for chunks in counts
    ]
    idle[latency] = [100 * result.idle_share for result in results]
    best = counts[idle[latency].index(min(idle[latency]))]
    print(f"hop latency {latency}: best {best} chunks, idle {min(idle[latency]):.1f} %")
figures.chunks_and_hops(counts, idle)
plt.show()

# %% [markdown]
# *With free messages each further chunk helps, less and less. With slow ones the curve turns upwards: at the
# beginning and at the end of a step nothing hides the hops, pv - 1 on the way there and as many back, and they grow
# with the chunks. With a latency of 0.25 and more than four chunks, a pass is also shorter than the way of its result,
# and every rank waits for the mail in between, too.*
#
# ## 8. On a cluster
#
# * **The order of messages.** NCCL ignores tags and matches by order. The post office uses no tags and posts its
#   receives in the sender's order, so it is right on GPUs too.
# * **A step that begins before the others have ended.** Clipping and the check for NaN make all ranks wait, and ZB-H2's
#   gain goes. The norm of the gradients needs all stages: each sums its own squares, and one all-reduce over the
#   pipeline follows.
# * **Micro-batches and kernels.** More micro-batches make the bubble smaller and each matrix product smaller too. On a GPU
#   measure the time of a stage against the rows of a micro-batch first, and take the fewest rows at which it is still
#   in proportion.
# * **Recomputation.** It makes the shelf cheap, so deep warm-ups cost little, and it makes every backward pass longer by a
#   forward pass.
# * **From both ends.** DualPipe feeds the line from both ends, with two sets of weights on each rank; PyTorch has a variant without the second
#   set as `ScheduleDualPipeV`.
#
# ## 9. Remember
#
# 1. Backward is two products: B, for which the stage before waits, and W, which can wait.
# 2. Sends that do not wait, receives in the order of the sender's row: then every legal schedule runs.
# 3. A zero bubble counts only where a rank begins the next step without waiting for the others.
# 4. A factor in all gradients shows under SGD and hides under Adam: compare gradients, not losses.
# 5. Whatever looks at several rows (batch normalisation) or draws random numbers (dropout, run twice) differs from
#    one process unless somebody takes care.
#
# **Sources**
#
# * Y. Huang et al., *GPipe*, NeurIPS 2019, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): section 2.2, batch
#   normalisation; section 2.3, recomputation.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, SC 2021, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 2.2.2, the interleaved schedule.
# * P. Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024, [arXiv
#   2401.10241](https://arxiv.org/abs/2401.10241): sections 2 and 4, table 2.
# * S. Ioffe and C. Szegedy, *Batch Normalization*, 2015, [arXiv
#   1502.03167](https://arxiv.org/abs/1502.03167), section 3.
# * PyTorch:
#   [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html),
#   [`isend`, `irecv` and tags](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication).
