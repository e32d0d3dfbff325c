# %% [markdown]
# # 5. The pipeline, further: an engine for any schedule, and what it is good for
#
# The lesson's loop runs GPipe and 1F1B. This notebook adds five schedules: an interleaved one, in which each rank
# holds several pieces of the model, two with (nearly) no bubble, in which a backward pass has two halves, and two
# whose line runs down the ranks and up again. You build an engine that runs any legal schedule, run seven of them on
# four ranks, and train an image classifier with it. Then come mistakes that show only in the gradients. At the end you
# write the interleaved schedule, and cut a model for a V.
#
# You need no answer from the lesson.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_utils import hardware, plots
from course_utils.figures import ch05 as figures
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist, schedules
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.predictions import compare
from course_utils.lesson.schedules import Op

hardware.report()

# %% [markdown]
# ## 1. The factory: the line passes each building twice
#
# In the lesson each building had one stretch of the line. Now the stretches are half as long, and the line runs through
# the buildings twice: after building 3 it goes on in building 0, or it turns in building 3 and comes back. Trucks of
# several stretches drive between the same two buildings. Every building knows the lists of its neighbours, so it knows
# which box comes next and has a place ready for it.
#
# A building handles a change note in two parts: first the part for which the previous building waits, and later, when
# there is time, the part that no other building waits for.
#
# | new in the factory | in PyTorch | what it is |
# |---|---|---|
# | stretch of the line | **virtual stage** | a piece of the model |
# | which building has which stretches | `place` | the number of the virtual stage that is chunk c on rank r |
# | first part of a change note | **B** | the gradient of the stage's inputs |
# | second part | **W** | the gradient of its weights |
#
# ## 2. The smallest real run: a backward pass in two halves
#
# The model is a line of eight layers. Every result is compared with one process and the whole batch.

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
def whole_batch(model, rows=ROWS):
    """The gradients of one process that gets all rows at once."""
    x, y = (part[:rows].to(hardware.device()) for part in (inputs, targets))
    mse_loss(model(x), y).backward()
    return flat(p.grad for p in model.parameters())


expected = whole_batch(new_model())

# %% [markdown]
# To split the backward pass, you stop it halfway. `torch.autograd.grad` computes only the gradients that you name. If
# you name the stage's input, it leaves the weights alone. On the way it passes the output of every layer, so it can
# return those gradients too. W uses them later: for each layer it asks for the gradients of the weights, given the
# gradient of the output. Nothing is computed twice.


# %%
class SplitStage:
    """A piece of the model, and its micro-batches in flight."""

    def __init__(self, module):
        self.module, self.in_flight, self.layers = module, {}, []
        for layer in module.modules():
            if any(p.requires_grad for p in layer.parameters(recurse=False)):
                layer.register_forward_hook(self.remember)

    def remember(self, layer, inputs, output):
        self.layers.append((layer, output))

    def forward(self, i, x, finish=None):
        self.layers = []
        output = self.module(x) if finish is None else finish(self.module(x))
        self.in_flight[i] = x, output, self.layers
        return output.detach()

    def backward(self, i, gradient):
        x, output, _ = self.in_flight.pop(i)
        output.backward(gradient)
        return x.grad

    def backward_to_input(self, i, gradient):
        x, output, layers = self.in_flight[i]
        wanted = [result for _, result in layers] + ([x] if x.requires_grad else [])
        gradients = torch.autograd.grad(output, wanted, gradient, retain_graph=True)
        self.in_flight[i] = layers, gradients
        return gradients[-1]

    def backward_to_weights(self, i):
        for (layer, result), gradient in zip(*self.in_flight.pop(i)):
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
difference = check_equal(flat([input_gradient]), [flat([halves.backward_to_input(0, gradient)])])
print("after B, gradient of the input: largest difference", difference)
print(
    "after B, weights with a gradient:", sum(p.grad is not None for p in halves.module.parameters())
)
halves.backward_to_weights(0)
both = [flat(p.grad for p in stage.module.parameters()) for stage in (whole, halves)]
print("after W, gradients of the weights: largest difference", check_equal(both[0], [both[1]]))

# %% [markdown]
# This approach has a limit: each weight must belong to one layer that is called once. A tied weight would lead W back
# through the layers between its two uses.
#
# ## 3. Predict, then measure: smaller pieces, and work for the gaps
#
# ### Interleaved: several pieces on each rank
#
# The bubble of 1F1B is p - 1 forward and backward passes of a stage. In the **interleaved** schedule each rank holds
# v smaller pieces of the model, called **chunks**, which are not neighbours: chunk c of rank r is virtual stage c p +
# r. A micro-batch passes all ranks v times. A pass through a chunk takes 1/v of the time, and the bubble becomes
# $(p-1)/(vm)$ of the ideal time (Narayanan et al., section 2.2.2). The price is memory and messages: rank r has up to
# 2(p - r - 1) + (v - 1)p + 1 passes in flight, each through half a stage if v is 2. (Without the 2 a step would take
# as long if messages took no time; the extra passes hide them.) Section 4 draws it.
#
# ### Zero bubble: the half that no other rank waits for
#
# The previous stage waits only for the gradient of the inputs. **Zero-bubble** schedules therefore split the pass
# into B and W, and put W where a gap would be ([Qi et al. 2024](https://arxiv.org/abs/2401.10241), section 2). If F
# and the halves take $t_F$, $t_B$ and $t_W$, the idle time of a step falls from $(p-1)(t_F+t_B+t_W)$ under 1F1B to
# $(p-1)(t_F+t_B-t_W)$ under **ZB-H1**. **ZB-H2** runs more forward passes ahead, and has $(p-1)(t_F+t_B-2t_W)$ (table
# 2): nothing, if all three take equally long.

# %%
p, m = 4, 8


def plans_of(p, m, chunks=2):
    return {
        "GPipe": schedules.gpipe(p, m),
        "1F1B": schedules.one_forward_one_backward(p, m),
        "interleaved": schedules.interleaved(p, m, chunks),
        "ZB-H1": schedules.zb_h1(p, m),
        "ZB-H2": schedules.zb_h2(p, m),
    }


PLANS = plans_of(p, m)
SIMULATED = {name: schedules.simulate(plan) for name, plan in PLANS.items()}
panels = {}
for name in ("ZB-H1", "ZB-H2"):
    idle = SIMULATED[name].step - SIMULATED[name].work
    panels[f"{name}: each rank is idle for {idle:g} units of its step (simulated)"] = SIMULATED[
        name
    ]
plots.gantt(panels)
plt.show()

# %% [markdown]
# *Pink boxes are W. Under ZB-H1 they fill gaps that 1F1B has at the end. Under ZB-H2 no rank has a gap from its first
# box to its last; the ranks are only shifted against each other.*
#
# A micro-batch is in flight until its last use: until B, or until W in the zero-bubble schedules. Under 1F1B the four
# ranks have 4, 3, 2 and 1 in flight, under ZB-H1 4 each: the last rank puts its W off, so that its B, for which the
# others wait, come early. ZB-H2 runs 2(p - r) - 1 forward passes on rank r before its first B, and has 7 on each.
#
# ### When ZB-H2 saves time

# %%
for name in ("1F1B", "ZB-H1", "ZB-H2"):
    result = SIMULATED[name]
    print(f"{name}: a rank's step {result.step:g}, all ranks together {result.makespan:g}")

# %% [markdown]
# From the first op of any rank to the end of the last, ZB-H2 takes as long as ZB-H1. It wins only where each rank
# begins its next step at once. Usually a step waits for all ranks: clipping by the gradients' norm, and the test for
# NaN, need every rank. The paper updates first, validates afterwards, and rolls the update back if necessary (section
# 4).
#
# ### A V: down the ranks and up again
#
# The line need not begin again at rank 0. It can turn at the last rank and come back: rank r then holds the virtual
# stages r and 2p - 1 - r, a **V**. Rank 0 has the first stage and the last one, so it reads the inputs *and* computes
# the loss. At the turn a micro-batch stays on its rank.
#
# **ZB-V** splits B and W on a V (Qi et al., section 6). **DualPipe-V** is half of DeepSeek's DualPipe
# ([DeepSeek-V3](https://arxiv.org/abs/2412.19437), section 3.2.1), which feeds the line from both ends and keeps two
# copies of the weights. In its middle part each F stands beside a B of the other chunk, so that one can compute while
# the messages of the other travel.
#
# 1F1B on four ranks has 4, 3, 2 and 1 micro-batches in flight, or 8, 6, 4 and 2 passes through half a stage. Under
# ZB-V rank 0 begins with seven forward passes through its first chunk. **Predict** for eight micro-batches: how many
# passes through half a stage does each rank have in flight at most? Which rank needs the least memory? And how many
# units is a rank idle between its first op and its last, if F, B and W take equally long?

# %% tags=["prediction"]
predicted = {"in flight": [8, 8, 8, 8], "idle": 0}

# %%
V_PLANS = {"ZB-V": schedules.zb_v(p, m), "DualPipe-V": schedules.dualpipe_v(p, m)}
for name, plan in V_PLANS.items():
    SIMULATED[name] = schedules.simulate(plan, place=schedules.v_shaped)
zb_v = SIMULATED["ZB-V"]

# %%
compare(
    predicted,
    {"in flight": zb_v.peak_in_flight, "idle": zb_v.step - zb_v.work},
    {
        "As under 1F1B. But rank 3 is early in chunk 0 and late in chunk 1.": {
            "in flight": [8, 6, 4, 2]
        },
        "Rank r begins r half passes late, but that is before its first op.": {"idle": 1.5},
    },
)

# %%
panels = {}
for name in V_PLANS:
    result = SIMULATED[name]
    idle, most = result.step - result.work, max(result.peak_in_flight)
    panels[f"{name}: idle {idle:g} units, {most} half passes in flight (simulated)"] = result
plots.gantt(panels)
plt.show()

# %% [markdown]
# *Boxes are half as long, as with any two chunks. In each colour, the second chunk has the other shade. Under ZB-V no
# rank has a gap between its first box and its last.*
#
# No rank needs less than another: a rank is as early in one chunk as it is late in the other, so all have 2p half
# passes in flight, as many as 1F1B's first rank. ZB-V has no bubble only with 2p - 1 micro-batches or more, with
# three equal times, and, like ZB-H2, where a rank begins its next step at once. DualPipe-V keeps one half pass more,
# 2p + 1 (table 2 of the report). Where a half F takes as long as a half B, $t_F = t_B \ge t_W$, and there are 2p
# micro-batches or more, it is idle for $(p-1)(t_F+t_B-t_W)$: ZB-H1's formula, in which the times are now those of
# *half* passes.
#
# ## 4. By hand, then at work: an engine, seven schedules, a classifier
#
# The engine has four parts: the stages that you have seen, names for the messages, a part that sends and receives them,
# and the loop that runs a rank's list.
#
# ### The names of the messages
#
# A **message** is the result of an F, for the stage after, or of a B, for the stage before. Its name says what it is
# and which stage gets it. `needs` says what an op of a virtual stage waits for, `makes` what its result is. A placement
# is a function, `place(rank, chunk, ranks)`, that gives the virtual stage: c p + r if the line begins again.

# %%
from typing import NamedTuple


class Message(NamedTuple):
    kind: str  # "F": activations, "B": their gradients
    micro_batch: int
    stage: int  # the virtual stage that gets it


def needs(op, stage, stages):
    at_the_end = stage == (0 if op.kind == "F" else stages - 1)
    return None if op.kind == "W" or at_the_end else Message(op.kind, op.micro_batch, stage)


def makes(op, stage, stages):
    stage += 1 if op.kind == "F" else -1
    outside = not 0 <= stage < stages
    return None if op.kind == "W" or outside else Message(op.kind, op.micro_batch, stage)


plan = schedules.interleaved(4, 4, chunks=2)
for source in (0, 2):
    made = (makes(op, schedules.looped(source, op.chunk, 4), 8) for op in plan[source])
    to_rank_1 = [message for message in made if message and message.stage % 4 == 1]
    words = [f"{m.kind}{m.micro_batch}>{m.stage}" for m in to_rank_1]
    print(f"rank {source} sends to rank 1:", *words)

# %% [markdown]
# `F0>5` are the activations of micro-batch 0 on their way to stage 5. Rank 1 reads the order of its messages off the
# sender's list, before anything is sent.
#
# ### Sending and receiving
#
# Three decisions keep every schedule fast and free of deadlocks:
#
# * `isend` returns at once. The engine keeps the tensor until it has certainly arrived: activations until their
#   gradients come back, the rest until the end of the step.
# * For each neighbour, one `irecv` more than needed is under way, so that a message can travel while the rank
#   computes.
# * Messages are received in the order in which they are sent. gloo could tell them apart by a **tag**, a number; NCCL
#   ignores tags and matches by order. Each direction between two ranks has a process group of its own: on a GPU,
#   messages of one group queue behind each other, and a `send` must not stand behind a `recv` that waits for the
#   other side.
#
# The engine knows all shapes in advance. `entering[s]` is a sample of what enters virtual stage s. It lives on the
# **meta device**, where tensors have shapes but no data.

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
# Each group is used once when it is made, in an order that all ranks share. With the first message of a group NCCL
# connects its two ranks, and even `irecv` does not return before both are there: two ranks that each begin with an
# `irecv` would wait for each other.

# %%
from collections import deque


def groups_between(ranks):
    """{(source, destination): a process group} for each direction between neighbours, all used once."""
    pairs = {(rank, (rank + step) % ranks) for rank in range(ranks) for step in (1, -1)}
    groups, first = {}, torch.zeros(1, device=hardware.device())
    for source, destination in sorted(pair for pair in pairs if pair[0] != pair[1]):
        groups[source, destination] = group = dist.new_group((source, destination))
        if dist.get_rank() == source:
            dist.send(first, destination, group)
        elif dist.get_rank() == destination:
            dist.recv(first, source, group)
    return groups


# %% [markdown]
# The receiving half comes first. `open` is called at the start of a step, with the rows of each micro-batch. `expect`
# posts the next receive from a neighbour. `collect` waits for a message and posts one more.


# %%
class Receiver:
    """Receives from the other ranks, in the order in which they send."""

    def __init__(self, schedule, entering, place):
        self.rank, ranks, stages = dist.get_rank(), dist.get_world_size(), len(entering)
        homes = schedules.homes(place, ranks, stages // ranks)  # {stage: (rank, chunk)}
        self.home = {stage: rank for stage, (rank, _) in homes.items()}
        self.entering, self.groups, self.orders = entering, groups_between(ranks), {}
        for source in (s for s, destination in self.groups if destination == self.rank):
            made = [makes(op, place(source, op.chunk, ranks), stages) for op in schedule[source]]
            self.orders[source] = [x for x in made if x and self.home[x.stage] == self.rank]

    def open(self, rows):
        self.rows, self.sent, self.received, self.local = rows, {}, {}, {}
        self.expected = {source: deque(order) for source, order in self.orders.items()}
        for source in self.expected:
            self.expect(source)

    def expect(self, source):
        if self.expected[source]:
            message = self.expected[source].popleft()
            like = self.entering[message.stage + (message.kind == "B")]
            size = self.rows[message.micro_batch], *like.shape[1:]
            tensor = torch.empty(size, dtype=like.dtype, device=hardware.device())
            work = dist.irecv(tensor, source, self.groups[source, self.rank])
            self.received[message] = tensor, work

    def collect(self, message, source):
        while message not in self.received:
            self.expect(source)
        tensor, work = self.received.pop(message)
        self.expect(source)
        work.wait()
        return tensor


# %% [markdown]
# A `Messenger` also sends. It keeps what it has sent, and hands over what stays on the rank.


# %%
class Messenger(Receiver):
    """Carries messages between this rank and the others, in the order of a schedule."""

    def receive(self, message):
        source = self.home[message.stage + (1 if message.kind == "B" else -1)]
        if source == self.rank:
            return self.local.pop(message)
        tensor = self.collect(message, source)
        if message.kind == "B":  # so the activations that it belongs to have arrived
            self.sent.pop(Message("F", message.micro_batch, message.stage + 1))[1].wait()
        return tensor

    def send(self, message, tensor):
        destination = self.home[message.stage]
        if destination == self.rank:
            self.local[message] = tensor
        else:
            tensor, group = tensor.contiguous(), self.groups[self.rank, destination]
            self.sent[message] = tensor, dist.isend(tensor, destination, group)

    def close(self):
        for _, work in self.sent.values():
            work.wait()


# %% [markdown]
# ### The loop
#
# A rank works through its list: receive, compute, send. On the last stage the loss is part of the forward pass. The
# gradient that enters the last stage is the micro-batch's share of the rows. So the sum over micro-batches is the
# gradient of the whole batch's mean, even if the last micro-batch is smaller.

# %%
from contextlib import nullcontext
from functools import partial


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

    def run(self, op, received, batch, last):
        i, stage = op.micro_batch, self.stages[op.chunk]
        if op.kind == "F":
            x = batch.inputs[i] if received is None else received.requires_grad_()
            result = stage.forward(i, x, partial(batch.finish, i) if last else None)
            self.peak = max(self.peak, sum(len(stage.in_flight) for stage in self.stages))
            return result
        if op.kind == "W":
            return stage.backward_to_weights(i)
        gradient = batch.shares[i] if received is None else received
        return (stage.backward_to_input if self.split else stage.backward)(i, gradient)


# %% [markdown]
# `Pipeline` puts them together. `modules` are this rank's pieces of the model, one for each chunk, `entering` a
# sample of what enters each virtual stage of the whole pipeline, `loss_of` gives the mean loss of some rows, and
# `place` is the placement: the only thing that a V changes. `step` adds the gradients of a batch to those of the
# weights and returns its loss, on the rank with the last stage. Every rank is given the whole batch. `during(op)` is
# a context around each op.


# %%
class Pipeline(Work):
    """One rank of a pipeline: runs its list of a schedule, whatever the schedule is."""

    def __init__(self, modules, schedule, entering, loss_of, place=schedules.looped):
        rank, row = dist.get_rank(), schedule[dist.get_rank()]
        super().__init__(modules, split=any(op.kind == "W" for op in row))
        self.micro_batches = 1 + max(op.micro_batch for op in row)
        self.messenger, self.loss_of = Messenger(schedule, entering, place), loss_of
        stages = [(place(rank, op.chunk, len(schedule)), len(entering)) for op in row]
        self.row = [(op, needs(op, *at), makes(op, *at)) for op, at in zip(row, stages)]

    def step(self, inputs, targets, during=nullcontext):
        batch = Batch(inputs, targets, self.micro_batches, self.loss_of)
        self.messenger.open([len(x) for x in batch.inputs])
        for op, need, made in self.row:
            received = None if need is None else self.messenger.receive(need)
            with during(op):
                result = self.run(op, received, batch, last=made is None)
            if made is not None:
                self.messenger.send(made, result)
        self.messenger.close()
        return batch.loss.item()


# %% [markdown]
# ### All seven schedules, on four ranks
#
# The batch is the same in all runs, 8 micro-batches of 4 rows. Under the interleaved schedule and on a V each rank
# holds two chunks of one layer each, otherwise one stage of two layers. Under 1F1B all ranks together send 48 messages
# in a step: 8 micro-batches cross 3 boundaries, forward and back. **Predict** how many they send under the interleaved
# schedule, and how many under ZB-V.

# %% tags=["prediction"]
predicted = {"interleaved": 2 * 7 * 8, "ZB-V": 2 * 6 * 8}

# %%
from course_utils.lesson.pace import at_pace
from course_utils.trace import Record, Trace


def gradients_of(stages):
    return {number: flat(p.grad for p in stage.parameters()) for number, stage in stages.items()}


def in_order(of_ranks):
    """The gradients of all virtual stages, as one process has them."""
    of_stages = {number: each for rank in of_ranks for number, each in rank.items()}
    return torch.cat([of_stages[number] for number in sorted(of_stages)])


# %%
class Run(NamedTuple):
    record: Record
    gradients: dict[int, Tensor]  # of each virtual stage on the rank
    peak: int


def pipeline_run(rank, schedule, slots, place=schedules.looped):
    torch.set_num_threads(1)
    ranks, chunks = dist.get_world_size(), 1 + max(op.chunk for op in schedule[rank])
    stages = cut(new_model(), ranks * chunks)
    own = {number: stages[number] for number in (place(rank, c, ranks) for c in range(chunks))}
    entering = samples(stages, inputs)
    engine = Pipeline(list(own.values()), schedule, entering, mse_loss, place)
    with Trace() as trace:
        engine.step(inputs, targets, during=at_pace(trace, slots))
    return Run(trace.record(), gradients_of(own), engine.peak)


# %%
WHOLE, SPLIT = {"F": 1, "B": 2}, {"F": 1, "B": 1, "W": 1}
SLOTS = {"GPipe": WHOLE, "1F1B": WHOLE, "ZB-H1": SPLIT, "ZB-H2": SPLIT}
SLOTS["interleaved"] = {"F": 0.5, "B": 1}
RUNS = {name: launch(pipeline_run, 4, plan, SLOTS[name]) for name, plan in PLANS.items()}
halves = {kind: 0.5 for kind in "FBW"}
for name, plan in V_PLANS.items():
    RUNS[name] = launch(pipeline_run, 4, plan, halves, schedules.v_shaped)

print("micro-batches in flight at most, on each rank, and the largest difference from one process:")
for name, runs in RUNS.items():
    difference = check_equal(expected, [in_order(run.gradients for run in runs)])
    print(f"{name:12} {[run.peak for run in runs]}, largest difference {difference}")
sent = {name: sum(run.record.count("send") for run in RUNS[name]) for name in predicted}

# %%
compare(
    predicted,
    sent,
    {
        "As if twice the pieces made twice the messages.": {"interleaved": 2 * 2 * 3 * 8},
        "As if a message were sent at the turn, too.": {"ZB-V": 2 * 7 * 8},
    },
)

# %% [markdown]
# All seven give the same gradients, and as many passes in flight as simulated. Eight pieces have seven boundaries,
# which is $(pv-1)/(p-1) = 7/3$ times as many as three: between the chunks a micro-batch also travels from the last rank
# back to the first. On a V it stays on the last rank at the turn, and every message goes to a neighbour.

# %%
for name in ("interleaved", "ZB-V"):
    panels = {f"{name}, simulated": SIMULATED[name]}
    panels["Four ranks do the same, box for box (emulated)"] = [run.record for run in RUNS[name]]
    plots.gantt(panels)
    plt.show()

# %% [markdown]
# *In each pair the lower picture repeats the upper one. The small gaps in it are what messages and the machine's
# other work cost.*
#
# ### The two V schedules in PyTorch
#
# PyTorch has such schedules, too: `ScheduleInterleaved1F1B`, `ScheduleInterleavedZeroBubble`, `ScheduleZBVZeroBubble`
# and `ScheduleDualPipeV` take a list of `PipelineStage`s for each rank. The attribute `pipeline_order` has the rows:
# `7I0` is the gradient of the inputs of stage 7 for micro-batch 0, `7W0` that of its weights, and `7B0` is both in
# one piece. Run the two that are a V, and read their rows.

# %%
import re

from torch.distributed import pipelining


def torch_run(rank, schedule_class):
    device, parts = hardware.device(), cut(new_model(), 8)
    own = {number: parts[number] for number in (rank, 7 - rank)}  # a V
    stages = [pipelining.PipelineStage(part, number, 8, device) for number, part in own.items()]
    # PyTorch 2.11's stages greet their neighbours; at the turn of a V the neighbour is on the same rank
    for stage in stages:
        stage._get_init_p2p_neighbors_ops = list
    schedule = schedule_class(stages, 8, loss_fn=mse_loss)
    batch = {"target": targets.to(device)} if rank == 0 else {}
    schedule.step(*([inputs.to(device)] if rank == 0 else []), **batch)
    return [str(action) for action in schedule.pipeline_order[rank]], gradients_of(own)


def as_ops(row):
    kinds = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    found = re.findall(r"(\d)([FIBW])(\d)", " ".join(row))
    return [Op(k, int(i), int(int(stage) > 3)) for stage, kind, i in found for k in kinds[kind]]


# %%
TORCH = {"ZB-V": "ScheduleZBVZeroBubble", "DualPipe-V": "ScheduleDualPipeV"}
for name, schedule_class in TORCH.items():
    rows, gradients = zip(*launch(torch_run, 4, getattr(pipelining, schedule_class)))
    print(f"{schedule_class}: largest difference", check_equal(expected, [in_order(gradients)]))
    differ = [rank for rank in range(4) if as_ops(rows[rank]) != V_PLANS[name][rank]]
    print("  ranks whose order differs:", differ or "none")
    print("  rank 1 begins:", *rows[1][:9])
    print("  rank 1, from its middle:", *rows[1][-15:-9])

# %% [markdown]
# Op by op, both orders match ours. What PyTorch writes differently changes no order: `None` is a slot in which a rank
# waits. Under DualPipe-V, `(6F5;1B1)OVERLAP_F_B` is a pair, which its runtime runs one after the other unless you
# give it a function that overlaps them. A `B` in one piece sends its result at its end; ours, B and then W, sends it
# earlier. And with fewer than 2p micro-batches `ScheduleDualPipeV` raises, where ours leaves out those that are not
# there.
#
# ### Beside data ranks: gradients travel once
#
# Four ranks can also be two copies of a pipeline of two stages. Each stage is then wrapped in DDP, in the group of its
# two copies. DDP sums in every backward pass, which would be m times in a step. PyTorch's stages know that, and let
# only the last micro-batch sum. A hook counts what DDP sends. Before you run the cell, say how often that is for a
# stage with 4 micro-batches, in the pipeline and in a plain loop of four backward passes.

# %%
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

sums = []  # of this rank


def counted(group, bucket):
    sums.append(bucket.index())
    return allreduce_hook(group, bucket)


# %%
def two_copies(rank):
    device = hardware.device()
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "pipeline"))
    (copy, stage), data = mesh.get_coordinate(), mesh.get_group("data")
    part = DistributedDataParallel(cut(new_model(), 2)[stage], process_group=data)
    part.register_comm_hook(data, counted)
    x, y = (rows.chunk(2)[copy].to(device) for rows in (inputs, targets))
    own = pipelining.PipelineStage(part, stage, 2, device, group=mesh.get_group("pipeline"))
    schedule = pipelining.Schedule1F1B(own, 4, loss_fn=mse_loss)
    for _ in range(2):  # the first step also runs a backward pass to learn the shapes
        part.zero_grad()
        sums.clear()
        schedule.step(*([] if stage else [x]), **({"target": y} if stage else {}))
    gradients, in_pipeline = flat(p.grad for p in part.parameters()), len(sums)
    for rows in x.chunk(4):
        part(rows).sum().backward()
    return gradients, in_pipeline, len(sums) - in_pipeline


# %%
gradients, in_pipeline, in_loop = zip(*launch(two_copies, 4))
for copy in (gradients[:2], gradients[2:]):
    print("a copy, largest difference:", check_equal(expected, [torch.cat(copy)]))
print("sums of rank 0: in the pipeline", in_pipeline[0], "and in the loop", in_loop[0])

# %% [markdown]
# In the loop the first three sums are for nothing. An engine of your own can call `no_sync()` around all backward
# passes but the last, or sum by hand after the step, as chapter 7 does. With B and W apart only the second way is left:
# DDP's hooks do not run under `torch.autograd.grad`.
#
# ### Let PyTorch cut the model
#
# `pipeline()` traces a model with an example micro-batch and cuts the trace where `split_spec` says. A **split
# point** names a layer, and the cut goes before it. This also works where the model is no `nn.Sequential`, as long as
# it can be traced.


# %%
def traced_run(rank):
    device = hardware.device()
    cuts = {name: pipelining.SplitPoint.BEGINNING for name in ("2", "4", "6")}
    pipe = pipelining.pipeline(new_model(), mb_args=(inputs[:4].to(device),), split_spec=cuts)
    schedule = pipelining.Schedule1F1B(pipe.build_stage(rank, device), 8, loss_fn=mse_loss)
    first = [inputs.to(device)] if rank == 0 else []
    last = {"target": targets.to(device)} if rank == 3 else {}
    schedule.step(*first, **last)
    names, parameters = zip(*pipe.get_stage_module(rank).named_parameters())
    return names, flat(p.grad for p in parameters)


names, gradients = zip(*launch(traced_run, 4))
print("rank 3 has", *names[3])
print("largest difference:", check_equal(expected, [torch.cat(gradients)]))

# %% [markdown]
# The names are those of the whole model, so a checkpoint of a stage fits the model it was cut from.

# %% [markdown]
# ### An image classifier, against one process
#
# Now comes a real task: a small convolutional network on MNIST, in two stages. Stage 0 is the first convolution with
# its pooling, stage 1 is the rest. Batches have 256 images in 4 micro-batches, and the ranks no longer sleep to fill
# their slots. Three ways run the same 12 steps of SGD: one process, the engine with GPipe, the engine with 1F1B.

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
    micro_batch = torch.zeros(BATCH // engine.micro_batches, *entering[rank].shape[1:])
    return flat(stages[rank].parameters()), times, held(stages[rank], micro_batch, engine.peak)


# %%
one = launch(classify_alone, 1, 1)
one_all_cores = launch(classify_alone, 1, hardware.cores())
pipelines = {
    "GPipe": launch(classify, 2, schedules.gpipe(2, 4)),
    "1F1B": launch(classify, 2, schedules.one_forward_one_backward(2, 4)),
}
for name, ranks in pipelines.items():
    parameters = torch.cat([rank[0] for rank in ranks])
    difference = check_equal(one[0][0], [parameters])
    print(f"{name}: parameters after {STEPS} steps, largest difference {difference}")

# %%
ledgers = {"one process": one[0][2]}
for name, ranks in pipelines.items():
    ledgers |= {f"{name}, stage {r}": rank[2] for r, rank in enumerate(ranks)}
print(f"{'bytes':16} parameters  gradients  activations")
for name, ledger in ledgers.items():
    parts = [ledger[kind] for kind in ("parameters", "gradients", "activations")]
    print("{:16} {:10,} {:10,} {:12,}".format(name, *parts))
title = "1F1B keeps fewer activations than GPipe, most of them on stage 0"
plots.memory(list(ledgers.values()), list(ledgers), title)
plt.show()

# %% [markdown]
# *Stage 0 has almost no parameters and most of the activations, since the images are still large there. With 1F1B
# stage 1 holds one micro-batch instead of four, and stage 0 holds two. A stage's activations are computed: the
# counted peak times the bytes of a micro-batch.*
#
# A stage can hold less and compute more: it keeps only the input of each micro-batch, and before B it runs the forward
# pass again. That is **recomputation**, also called activation checkpointing. GPipe's paper does it. A micro-batch in
# flight then costs its stage's input, and one whole set of activations exists at a time, while its B runs. **Predict**
# how many bytes a micro-batch of 64 images then costs in flight on each stage. Stage 0 passes on 8 channels of 14 x 14.

# %% tags=["prediction"]
predicted = {"stage 0": 64 * 28 * 28 * 4, "stage 1": 64 * 8 * 14 * 14 * 4}

# %%
from torch.utils.checkpoint import checkpoint

model, stored, recomputed = classifier(), {}, {}
x = images[:64].clone().to(hardware.device())
for rank, stage in enumerate((model[:3], model[3:])):
    with kept_for_backward(stage) as kept:
        made = stage(x)
    with kept_for_backward(stage) as input_only:
        checkpoint(stage, x, use_reentrant=False)
    stored[f"stage {rank}"], recomputed[f"stage {rank}"] = kept.bytes, input_only.bytes
    x = made.detach().requires_grad_()
print("bytes of a micro-batch without recomputation:")
print(stored)

# %%
compare(predicted, recomputed, {"All activations, as without recomputation.": stored})

# %% [markdown]
# And the time? The next cell compares the median time of a step with that of one process on one core, and with one
# process that may use all cores.


# %% tags=["nbval-ignore-output"]
def median(times):
    return sorted(times[2:])[len(times[2:]) // 2]


base = median(one[0][1])
print(f"{'':28} time of a step, relative to one process on one core")
print(f"{'one process, all cores':28} {median(one_all_cores[0][1]) / base:.2f}")
for name, ranks in pipelines.items():
    print(f"{'2 ranks, one core each, ' + name:28} {median(ranks[0][1]) / base:.2f}")

# %% [markdown]
# Your numbers depend on your machine. Two stages with 4 micro-batches have a bubble of 1/5 of the total time, so the
# best ratio is 1/2 divided by 4/5, which is 0.63. It is not reached: the stages do not take equally long, 6,272 bytes
# for each image and direction go through the CPU's memory, and each op has a fixed cost. On a machine with two cores,
# one process that uses both has no bubble at all. (If *all cores* is slower than one core, other programs may be
# using them.) A pipeline pays off where the model does not fit on one device.

# %% [markdown]
# ## 5. Break it: wrong gradients that train
#
# ### Gradients too large by the number of micro-batches
#
# Suppose you forget that the loss of a micro-batch counts for 1/m. All gradients are then m times too large. The run
# below makes this mistake on purpose, with 8 micro-batches on two ranks, once with SGD and once with AdamW.
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
    share = (wrong - right).norm() / right.norm()
    print(f"{make_optimizer.func.__name__}: the update of ten steps is off by {100 * share:.0f} %")

# %% [markdown]
# SGD steps with eight times the gradient. AdamW divides each gradient by its own typical size, so a constant factor
# cancels, and the run looks healthy. It is not: gradient clipping, weight decay that is added to the gradient (as in
# `Adam`), and the norms in your logs all see the factor. Such factors have been found in large code bases: gradients
# too large by the number of tokens ([torchtitan 2972](https://github.com/pytorch/torchtitan/issues/2972)), and
# gradients divided once more in each accumulation step ([torchtitan
# 1733](https://github.com/pytorch/torchtitan/issues/1733)). Test with SGD, and compare gradients, not losses.
#
# ### A last micro-batch that is smaller
#
# The engine weights micro-batches by their rows, and reads the sizes off the batch:


# %%
def thirty_rows(rank):
    stages = cut(new_model(), 2)
    plan = schedules.one_forward_one_backward(2, 4)
    engine = Pipeline([stages[rank]], plan, samples(stages, inputs), mse_loss)
    engine.step(inputs[:30], targets[:30])
    return flat(p.grad for p in stages[rank].parameters())


gradients = torch.cat(launch(thirty_rows, 2))
print("largest difference:", check_equal(whole_batch(new_model(), rows=30), [gradients]))

# %% [markdown]
# PyTorch's `PipelineStage` learns the shapes from the first micro-batch, and expects that many rows each time:

# %%
import warnings


def thirty_rows_in_torch(rank):
    warnings.filterwarnings("ignore", "Using a target size")  # mse_loss, before it raises
    stage = pipelining.PipelineStage(cut(new_model(), 2)[rank], rank, 2, hardware.device())
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=mse_loss)
    if rank == 0:
        schedule.step(inputs[:30].to(hardware.device()))
    else:
        schedule.step(target=targets[:30].to(hardware.device()))


try:
    launch(thirty_rows_in_torch, 2)
except RankFailure as failure:
    print("shapes in the failure:", *sorted(set(re.findall(r"\[\d, 64\]", str(failure)))))

# %% [markdown]
# It cuts 30 rows into 8, 8, 7 and 7, and sends 7 rows where 8 are expected. It would also give each micro-batch a
# weight of 1/4. So give each step a batch that divides: use `DataLoader(drop_last=True)`, or fill the batch up with
# rows whose loss is zero, and multiply all gradients by 32/30.
#
# ### BatchNorm looks at its own micro-batch only
#
# The engine promises the gradient of the whole batch. It can keep the promise only if a row's loss does not depend on
# the other rows. Batch normalisation subtracts the mean of what it sees, and now it sees a micro-batch.


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
    reference = whole_batch(normalised(normalisation))
    gradients, batches = zip(*launch(normalised_run, 2, normalisation))
    difference = largest_difference(reference, [torch.cat(gradients)])
    print(f"{normalisation.__name__}: largest difference {difference}", end="")
    print(f", {batches[0][0]} batches counted in one step" if any(batches) else "")

# %% [markdown]
# The running mean and variance move four times in a step instead of once, and each time towards the statistics of
# only eight rows. Layer normalisation works within a row. Transformers use it, which is one reason why they are easy
# to pipeline. For a convolutional network, GPipe uses the statistics of each micro-batch for training and tracks
# those of the whole batch for evaluation (Huang et al., section 2.2). **Group normalisation**, which takes its mean
# over some channels of one image, avoids the question.
#
# ### Dropout and recomputation out of step
#
# Long pipelines often recompute. With dropout, the second run has to drop the same elements as the first, but in a
# pipeline other micro-batches have drawn random numbers in between. The cell runs two micro-batches, F0 F1 B0 B1. The
# second of the two ways does not save and restore the random state.


# %%
def with_dropout(run):
    torch.manual_seed(0)
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
    stage.to(hardware.device())
    losses = []
    for x, y in zip(inputs.to(hardware.device()).chunk(2), targets.to(hardware.device()).chunk(2)):
        losses.append(mse_loss(run(stage, x), y))  # F0, F1
    for loss in losses:
        loss.backward()  # B0, B1
    return flat(losses), flat(p.grad for p in stage.parameters())


# %%
recompute = partial(checkpoint, use_reentrant=False)
ways = {
    "recomputed": recompute,
    "random state forgotten": partial(recompute, preserve_rng_state=False),
}
losses, gradients = with_dropout(lambda stage, x: stage(x))  # all activations stored
for name, run in ways.items():
    other_losses, other_gradients = with_dropout(run)
    print(f"{name}: losses differ by {check_equal(losses, [other_losses])}", end=", ")
    print(f"gradients by {largest_difference(gradients, [other_gradients])}")

# %% [markdown]
# Both losses are right, because they come from the first forward pass. The gradient of the second way belongs to
# other masks, and no error says so. `checkpoint` saves and restores the random state by default
# (`preserve_rng_state=True`); an engine that recomputes on its own has to do the same for each micro-batch.

# %% [markdown]
# ## 6. Exercises: a schedule, and a cut for another
#
# In 5.4 you write a schedule, as in 5.2 and 5.3: for each rank a list of ops. `check` first tests whether it can run
# at all, then simulates it with one unit of time for F and two for B, and compares it with a limit of time and a
# limit of memory. It draws your schedule if it is right. To see it earlier, run
# `plots.gantt(schedules.simulate(interleaved(4, 8, 2)))`.

# %%
from course_exercises import check, hint

# %% [markdown]
# ### 5.4 Interleaved 1F1B (3 points)
#
# Every rank now holds several chunks of the model: chunk c of rank r is piece c * stages + r of the whole, so that a
# micro-batch passes all ranks once for chunk 0, once more for chunk 1, and so on. `Op("F", 3, 1)` is the forward pass
# of micro-batch 3 through chunk 1. The ranks now wait for passes through a chunk, not through a whole stage, and the
# bubble shrinks with them.
#
# Two questions decide. In which order does a rank run its forward passes, so that the pieces after it always have
# work? And how many of them come before its first pair of forward and backward?
#
# Below is one such schedule: three ranks, six micro-batches, two chunks; `F0.1` is the forward pass of micro-batch 0
# through chunk 1. Follow the `F` alone, then the `B` alone: every rank has the same two orders, and only what comes
# before the first pair differs.

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
# ### 5.7 Cut a model for a V (2 points)
#
# Equal numbers of layers are not equal work. The first stage also has the **embedding**, a lookup that takes little
# time (or an image encoder, which takes much), and the last one the **head**, the product with the vocabulary. In
# Llama 3 8B the head has as many weights as 2.4 layers. The authors of Llama 3 405B gave the first and the last stage
# one layer fewer each ([paper](https://arxiv.org/abs/2407.21783), section 3.3.2). On a V both ends are on rank 0.
# Here are 32 layers on four ranks. (The simulator gives both stages of a rank the same time, so it spreads the head's
# 2.4 layers over rank 0's two stages.)

# %%
for layers_of_rank in ([8, 8, 8, 8], [6, 9, 9, 8]):
    forward = [layers_of_rank[0] + 2.4, *layers_of_rank[1:]]
    run = schedules.simulate(
        schedules.zb_v(4, 8), forward, [2 * time for time in forward], place=schedules.v_shaped
    )
    print(
        f"{layers_of_rank} layers: a step takes as long as {run.step:.0f} forward passes of one layer"
    )


# %% nbgrader={"grade_id": "5.7", "solution": true}
def cut_for_a_v(layers: int, ranks: int, embedding: float, head: float) -> list[int]:
    """Returns how many layers each of the 2 * ranks stages of a V has, in the order of the line.

    Rank r has the stages r and 2 * ranks - 1 - r. `embedding` and `head` are times, in units of one
    layer's: the first comes on top of stage 0, the second on top of the last stage. The slowest rank
    is as fast as whole layers allow. Given its layers, the times of a rank's two stages, ends
    included, differ as little as possible. A stage may have no layer; where several cuts do, any is
    right.
    """

    ### BEGIN SOLUTION
    def dealt(number: int, begun: list[float]) -> list[int]:
        """Each of `number` layers goes to whoever has least to do; how many each gets."""
        counts = [0] * len(begun)
        for _ in range(number):
            busy = [time + count for time, count in zip(begun, counts)]
            counts[busy.index(min(busy))] += 1
        return counts

    cut = [0] * (2 * ranks)
    for rank, number in enumerate(dealt(layers, [embedding + head] + [0.0] * (ranks - 1))):
        ends = [0.0, 0.0] if rank else [embedding, head]
        cut[rank], cut[-1 - rank] = dealt(number, ends)
    return cut
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.7-check", "grade": true, "points": 2, "locked": true}
check("5.7", cut_for_a_v)

# %% [markdown]
# ## 7. See it: five schedules, and how many chunks
#
# This is the lesson's explorer, with five of the seven schedules. Move one slider at a time:
#
# * Choose the interleaved schedule and add chunks. Then raise the hop latency: each micro-batch now pays it more
#   often.
# * Choose ZB-H2 and set the hop latency to 0: no gap is left. Then make the backward pass cheaper. The gaps return,
#   since F, B and W no longer take equal times.
# * Make the last stage slower. All other ranks wait for it, under every schedule.

# %%
from course_utils.lesson.explore import Explorer


def draw(schedule, stages, micro_batches, chunks, **times):
    return figures.compared(plans_of(stages, micro_batches, chunks), schedule, **times)


sizes = {"stages": (2, 8, 4), "micro_batches": (1, 24, 8), "chunks": (1, 4, 2)}
times = {"backward_to_forward": (1.0, 3.0, 2.0), "last_stage": (1.0, 2.0, 1.0)}
Explorer(draw, schedule=list(PLANS), **sizes, **times, hop_latency=(0.0, 1.0, 0.1))

# %% [markdown]
# *At the start: GPipe on four ranks, with a hop latency of 0.1. The bars on the left compare the idle share of the
# five schedules, those on the right say how many micro-batches each rank stores at most.*
#
# More chunks make the bubble smaller, but add messages. Here are 8 ranks and 32 micro-batches; the hop latency is in
# forward passes of a whole stage.

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
# *If messages take no time, each further chunk helps, but less and less. With slow ones the curve turns upwards. At the
# beginning and at the end of a step nothing hides the hops: there are pv - 1 on the way there and as many on the way
# back, so more chunks mean more hops. With a latency of 0.25 and more than four chunks, a pass is also shorter than the
# trip of its result, so every rank waits for messages in between, too.*
#
# ## 8. On a cluster
#
# * The messenger uses no tags and posts its receives in the sender's order, so it is right with NCCL, too.
# * Clipping and the check for NaN make all ranks wait, and ZB-H2's gain is lost. The norm of the gradients needs all
#   stages: each sums its own squares, and one all-reduce over the pipeline follows.
# * More micro-batches make the bubble smaller and each matrix product smaller too. On a GPU measure the time of a
#   stage against the rows of a micro-batch first, and take the smallest micro-batch whose time is still proportional
#   to its rows.
# * Recomputation makes activations cheap, so deep warm-ups cost little, and it makes every backward pass longer by a
#   forward pass.
# * With chunks, the last rank also sends to the first: on two nodes 2v - 1 boundaries cross the slow link, in place
#   of one. On a V of two chunks it is two.
# * On a V rank 0 has the embedding and the head of a language model, so they can share a weight without a message.
# * A stage can itself be cut among tensor ranks. Since PyTorch 2.13 `PipelineStage` takes and sends DTensors.
#
# ## 9. Remember
#
# 1. Backward is two products: B, for which the stage before waits, and W, which can wait.
# 2. If sends do not wait, and receives follow the order of the sender's list, every legal schedule runs, on a V too.
# 3. A zero bubble saves time only where a rank begins the next step without waiting for the others.
# 4. A factor in all gradients shows under SGD and hides under Adam: compare gradients, not losses.
# 5. A layer that looks at several rows (batch normalisation) or draws random numbers (dropout, run twice) gives other
#    gradients than one process, unless you take care.
#
# **Sources**
#
# * Y. Huang et al., *GPipe*, NeurIPS 2019, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): section 2.2, batch
#   normalisation; section 2.3, recomputation.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 2.2.2, the interleaved schedule.
# * P. Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024, [arXiv 2401.10241](https://arxiv.org/abs/2401.10241):
#   sections 2, 4 and 6, table 2.
# * DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024, [arXiv 2412.19437](https://arxiv.org/abs/2412.19437): section
#   3.2.1, table 2; and [DualPipe](https://github.com/deepseek-ai/DualPipe).
# * S. Ioffe and C. Szegedy, *Batch Normalization*, 2015, [arXiv 1502.03167](https://arxiv.org/abs/1502.03167),
#   section 3.
# * PyTorch: [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html), [`isend`, `irecv` and
#   tags](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication).
