# %% [markdown]
# # 5. The pipeline: many small batches on one assembly line
#
# In chapter 4 you cut a model in two and gave each half its own device. It worked, and half of the
# time each device stood still: the second waited for the first, then the first for the second. With
# eight devices each would stand still for seven eighths of the time.
#
# This chapter fills the gaps. The batch is cut into **micro-batches** that follow each other through
# the stages, so that all stages are busy at once. What each stage does in which order is a
# **schedule**, and the schedule decides how much time is lost and how much memory is needed.
#
# At the end of the chapter you can read a schedule, say how long it takes and what it stores, and
# run it. You have written three schedules yourself, and have seen five run on real ranks, driven by
# an engine of fewer than 200 lines, with the gradients of the whole batch.

# %% tags=["nbval-ignore-output"]
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from fractions import Fraction
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from course_utils import explore, hardware, mnist, plots, schedules
from course_utils.checks import check, hint
from course_utils.equality import equal, flat
from course_utils.launch import RankFailure, launch
from course_utils.models import MnistConvNet
from course_utils.predictions import compare
from course_utils.schedules import Op
from course_utils.terminal import scratch, torchrun
from course_utils.trace import Record, Span, Trace, kept_for_backward, memory_ledger

hardware.report()

# %% [markdown]
# ## 1. The factory: an assembly line that never waits for the last box
#
# One product passes through four buildings. A truck that waits until a building has finished the
# whole day's work keeps the next three buildings empty. So the work goes in small boxes. As soon as
# the first building has finished box 0, a truck takes it to the second one, and the first building
# begins with box 1. After three boxes all four buildings work.
#
# At the end of the line the product is inspected, and the complaints go back the same way, box by
# box, so that every building learns what to do better. A building that gets a complaint has to look
# at its own notes on that box. It keeps them on a shelf until then.

# %%
figure, ax = plots.canvas(height=2.9)
road, back = plots.COLORS["forward"], plots.COLORS["backward"]
for rank, x in enumerate((0.1, 2.75, 5.4, 8.05)):
    plots.building(ax, x, 1.55, width=1.6, label=f"stage {rank}", color=plots.RANK_COLORS[rank])
    plots.pile(ax, x + 0.42, 0.55, [plots.COLORS["activations"]] * (4 - rank))
    if rank < 3:
        plots.arrow(ax, (x + 1.7, 2.2), (x + 2.55, 2.2), color=road)
        plots.truck(ax, x + 1.68, 2.28, label=f"{3 - rank}", color=road)
        plots.arrow(ax, (x + 2.55, 1.7), (x + 1.7, 1.7), color=back)
ax.text(5, 3.3, "boxes go to the right", ha="center", fontsize=9)
ax.text(
    5,
    0.2,
    "complaints go to the left; the shelves hold notes on open boxes",
    ha="center",
    fontsize=9,
)
ax.set_title("Four buildings, and a box on every truck")
plt.show()

# %% [markdown]
# *Four buildings stand in a line. Trucks with boxes drive to the right, arrows for the complaints
# point to the left. Under each building is its shelf: the first one holds notes on four boxes, the
# last one on one.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | building | **stage** | a part of the model's layers, on its own rank |
# | box | **micro-batch** | some rows of the batch that travel together |
# | box on a truck to the right | **activations** | what a stage computed and the next one needs |
# | complaint on its way to the left | gradient | of the loss, with respect to those activations |
# | notes on the shelf | stored activations | what autograd keeps until the backward pass |
# | timetable | **schedule** | what each rank does, in which order |
# | empty minutes | **bubble** | time in which a rank has nothing to do |
#
# The letters are p for the number of stages, m for the number of micro-batches, v for the number of
# pieces that a rank holds when it holds several.

# %% [markdown]
# ## 2. The smallest real run: first a loop that is no pipeline, then one that is
#
# ### Bug hunt: chunks in a loop
#
# The snippet below stands in the web article *PyTorch Model Parallelism* under the headline *pipeline parallelism*, with the promise
# that it processes the data in a pipelined fashion and lowers the peak of memory. It cuts the batch
# into chunks and sends each through three stages on two devices. Read `forward`. **Predict:** how
# many stages ever work at the same moment? And what does autograd store, compared with one pass of
# the whole batch?


# %%
class ChunkedModel(nn.Module):
    def __init__(self, split_size):
        super().__init__()
        torch.manual_seed(0)
        self.stage1 = nn.Sequential(nn.Linear(500, 500), nn.ReLU())  # "cuda:0"
        self.stage2 = nn.Sequential(nn.Linear(500, 500), nn.ReLU())  # "cuda:1"
        self.stage3 = nn.Sequential(nn.Linear(500, 500))  # "cuda:0"
        self.split_size = split_size

    def forward(self, x):
        outputs = []
        for chunk in x.split(self.split_size):
            chunk = self.stage1(chunk)
            chunk = self.stage2(chunk)
            outputs.append(self.stage3(chunk))
        return torch.cat(outputs)


# %% [markdown]
# The original moves each chunk with `.to("cuda:1")` and back. Here everything stays in one process
# on the CPU, the stages are equally large, and a pair of hooks notes when each begins and ends.


# %%
def watched(model, x):
    """The spans of both devices, as records: which stage worked when."""
    spans, started = ([], []), []
    places = {model.stage1: (0, ""), model.stage2: (1, ""), model.stage3: (0, ".1")}

    def begin(stage, inputs):
        started.append(time.perf_counter())

    def end(stage, inputs, output):
        device, chunk = places[stage]
        number = sum(span.name.endswith(".1") == bool(chunk) for span in spans[device])
        span = Span(f"F{number}{chunk}", "compute", started[-1], time.perf_counter())
        spans[device].append(span)

    for stage in places:
        stage.register_forward_pre_hook(begin)
        stage.register_forward_hook(end)
    model(x)
    return [Record(device, found) for device, found in enumerate(spans)]


x = torch.randn(4096, 500)
model = ChunkedModel(split_size=1024)
model(x)  # the first pass is slower than the rest
records = watched(model, x)
in_order = sorted((span for r in records for span in r.spans), key=lambda span: span.start)
print("chunks times stages:", len(in_order))
print("two stages ever at work at once:", any(a.end > b.start for a, b in pairwise(in_order)))

# %%
figure, ax = plt.subplots(figsize=(plots.WIDTH, 1.9))
shown = plots.gantt_lanes(ax, records)
ax.set_yticks([0, 1], ["device 0", "device 1"])
ax.set(
    xlabel="time (passes of a chunk through two stages)",
    title="Chunks in a loop (measured on the CPU)",
)
plots.legend(figure, dict(zip(("stages 1 and 2", "stage 3", "idle"), shown.values())))
plt.show()

# %% [markdown]
# *Numbers are chunks. Wherever one lane has a box, the other is empty. Device 0 runs stage 1 and,
# paler, stage 3. Chunk 1 begins when chunk 0 has left the last stage.*
#
# Would two GPUs change that, since they run on while Python goes ahead? No. A GPU works off its
# queue in order. In the queue of device 0, stage 3 of chunk 0 stands before stage 1 of chunk 1, and
# it has to wait for device 1. The memory promise does not hold either:

# %%
for split_size in (4096, 1024):
    model = ChunkedModel(split_size)
    with kept_for_backward(model) as kept:
        model(x)
    print(f"chunks of {split_size}: autograd keeps {kept.bytes:,} bytes")

# %% [markdown]
# The backward pass comes after the loop, so autograd keeps the activations of all chunks until
# then. A loop over chunks is a loop. For a pipeline, somebody has to start chunk 1 while chunk 0 is
# still under way.
#
# ### Two ranks, four micro-batches
#
# That somebody is a second process. The model of this chapter is a line of eight equal layers. Rank
# 0 gets the first four, rank 1 the other four.

# %%
WIDTH, ROWS, MICRO_BATCHES = 64, 32, 4
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


# %% [markdown]
# You will see many timelines with more ranks than your machine has cores. So that they show what
# separate devices would do, the ranks keep a pace: a forward pass takes one **slot** of 20 ms, a
# backward pass two. The layers are really computed, which takes much less, and the rank sleeps for
# the rest of its slot, like a process that waits for its device. Such figures say *emulated*.

# %%
SLOT = 0.02  # seconds


def at_pace(trace, slots):
    """Returns a context for an op: it is recorded, and lasts as many slots as its kind takes."""

    @contextmanager
    def during(op):
        hardware.settle()  # on a GPU, waiting for a box has only queued what comes after it
        with trace.span(str(op)):
            begin = time.perf_counter()
            yield
            hardware.settle()
            time.sleep(max(0.0, begin + slots[op.kind] * SLOT - time.perf_counter()))

    return during


# %% [markdown]
# Here is the pipeline. `recv` waits for the box, the stage works, `send` hands it on. When all four
# have passed, the gradients come back. The loss of a micro-batch is a mean over its own rows, so it
# counts for a quarter.


# %%
def two_stages(rank):
    stage = cut(new_model(), 2)[rank]
    boxes = [part.to(hardware.device()) for part in (inputs, targets)[rank].chunk(MICRO_BATCHES)]
    open_boxes = []
    with Trace() as trace:
        during = at_pace(trace, {"F": 1, "B": 2})
        for i, box in enumerate(boxes):
            x = box if rank == 0 else torch.empty_like(box)
            if rank == 1:
                dist.recv(x, src=0)
                x.requires_grad_()
            with during(Op("F", i)):
                y = stage(x)
            if rank == 0:
                dist.send(y.detach(), dst=1)
            open_boxes.append((x, y))
        for i, (x, y) in enumerate(open_boxes):
            gradient = torch.empty_like(y)
            if rank == 0:
                dist.recv(gradient, src=1)
            with during(Op("B", i)):
                if rank == 0:
                    y.backward(gradient)
                else:
                    (mse_loss(y, boxes[i]) / MICRO_BATCHES).backward()
            if rank == 1:
                dist.send(x.grad, dst=0)
    return trace.record(), flat(p.grad for p in stage.parameters())


# %%
def alone(model, loss_of=mse_loss):
    """The gradients and the loss of one process on the whole batch."""
    loss = loss_of(model(inputs.to(hardware.device())), targets.to(hardware.device()))
    loss.backward()
    return flat(p.grad for p in model.parameters()), loss.item()


expected, expected_loss = alone(new_model())
records, gradients = zip(*launch(two_stages, 2))
print("gradients as of the whole batch:", equal(expected, [torch.cat(gradients)]))

# %%
plots.gantt({"Two ranks, four micro-batches (emulated: every pass keeps its slots)": records})
plt.show()

# %% [markdown]
# *Light boxes are forward passes, dark ones backward passes, and the numbers are micro-batches. While
# rank 1 works on micro-batch 0, rank 0 works on micro-batch 1. Gaps remain: rank 1 waits at the start
# and at the end, rank 0 in the middle.*
#
# Such a picture, one lane for each worker and time to the right, is a **Gantt chart**. What remains
# of the gaps is the bubble.

# %% [markdown]
# ## 3. Predict, then measure: bytes, bubbles and shelves
#
# ### The bytes between two stages
#
# **Predict** what the ranks of the last run handed to `send`. Activations have 8 rows of 64 float32
# numbers for each of 4 micro-batches. Gradients have the shape of what they belong to. The number of
# micro-batches does not change the sum, only the number of messages.

# %% tags=["prediction"]
predicted = {
    "rank 0, messages": 4,
    "rank 0, bytes": 32 * 64 * 4,
    "rank 1, messages": 4,
    "rank 1, bytes": 32 * 64 * 4,
}
measured = {}
for record in records:
    measured[f"rank {record.rank}, messages"] = record.count("send")
    measured[f"rank {record.rank}, bytes"] = record.sent("send")
compare(
    predicted,
    measured,
    {
        "As if each micro-batch had all 32 rows.": {
            f"rank {rank}, bytes": 4 * 32 * 64 * 4 for rank in range(2)
        },
        "The bytes of one micro-batch.": {f"rank {rank}, bytes": 8 * 64 * 4 for rank in range(2)},
    },
)

# %% [markdown]
# That is little. A stage boundary carries one tensor of activations there and its gradient back,
# however many layers a stage has and however many parameters they have. This is why pipelines are
# used between machines, where the links are slow.
#
# ### A schedule is data
#
# An **op** is one pass of one micro-batch: F3 is the forward pass of micro-batch 3, B3 its backward
# pass. `course_utils.schedules` writes a schedule as a list with one row for each rank. A row is
# the order of the rank's ops, and nothing else: no times, no gaps. **GPipe** is the schedule that
# you have just run, all forward passes before all backward passes.

# %%
for rank, row in enumerate(schedules.gpipe(3, 4)):
    print(f"rank {rank}:", *row)

# %% [markdown]
# A rank works through its row from left to right. Before an op starts, what it needs must be there:
# F needs the activations from the stage before, B its own F and the gradient from the stage after.
# So some orders cannot run. `first_illegal_move` plays the schedule through and explains the first
# move that is not allowed. Below, rank 2 of that schedule gets three wrong rows.

# %%
wrong_rows = {
    "a backward too early": "F0 F1 F2 B3 F3 B0 B1 B2",
    "one forgotten": "F0 F1 F2 F3 B0 B1 B3",
    "one twice": "F0 F1 F2 F3 B0 B1 B1 B2 B3",
}
for name, text in wrong_rows.items():
    broken = schedules.gpipe(3, 4)
    broken[2] = [Op(word[0], int(word[1:])) for word in text.split()]
    print(f"{name}: {schedules.first_illegal_move(broken)}")

# %% [markdown]
# An order can be legal for each rank alone and still stop the whole pipeline, because ranks wait for
# each other in a circle. Here rank 0 wants the gradient of micro-batch 0 before it sends micro-batch
# 1, and rank 1 wants micro-batch 1 before it works backward:

# %%
circle = [
    [Op("F", 0), Op("B", 0), Op("F", 1), Op("B", 1)],
    [Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1)],
]
print(schedules.first_illegal_move(circle))

# %% [markdown]
# ### The bubble
#
# `simulate` gives each op a time and lets every rank start its next op as soon as it can. As the
# unit take one forward pass of a micro-batch through a stage. A backward pass computes two gradients,
# of the inputs and of the weights, so it takes about two units.

# %%
simulated = schedules.simulate(schedules.gpipe(4, 8), forward=1, backward=2)
plots.gantt({"GPipe, 4 stages, 8 micro-batches (simulated)": simulated})
plt.show()

# %% [markdown]
# *The first micro-batch runs down like a staircase, three units pass before the last rank begins.
# Then the gradients climb up again, and the ranks that have finished wait for rank 0.*
#
# Each rank has work for $m (t_F + t_B)$. The staircase down costs the last rank $(p-1)\,t_F$, the way
# up costs rank 0 $(p-1)\,t_B$, and each rank loses the same sum. So the bubble is
# $(p-1)(t_F + t_B)$. As a share of the ideal time, in which every rank works, that is
#
# $$\frac{p-1}{m}\,,\qquad\text{and as a share of the total time}\qquad \frac{p-1}{m+p-1}\,.$$
#
# The first form is that of Megatron-LM ([Narayanan et al.
# 2021](https://arxiv.org/abs/2104.04473), section 2.2.1), the second that of GPipe ([Huang et al.
# 2019](https://arxiv.org/abs/1811.06965), section 2.3). They describe the same gap, so look twice
# when a paper gives a percentage. **Predict** both for p = 4 and m = 8.

# %% tags=["prediction"]
predicted = {"share of ideal time": 3 / 8, "share of total time": round(3 / 11, 6)}
measured = {
    "share of ideal time": simulated.bubble,
    "share of total time": round(simulated.idle_share, 6),
}
compare(predicted, measured)

# %% [markdown]
# More micro-batches make the bubble small. With m = 4 p it is a fifth of the total time at most, and
# with m = p nearly half. But the batch is what it is: more micro-batches means fewer rows in each,
# until they are too small to keep a device busy.
#
# ### The shelf: 1F1B
#
# GPipe has a second price. Between F and B of a micro-batch a stage keeps its activations. Under
# GPipe all m micro-batches are **in flight** when the first B begins. **1F1B**, one forward, one
# backward, turns round earlier: as soon as a gradient can come back, a rank runs one B after each F.

# %%
plots.gantt(
    {
        "GPipe": simulated,
        "1F1B": schedules.simulate(schedules.one_forward_one_backward(4, 8)),
    }
)
plt.show()

# %% [markdown]
# *Both end at the same time, and both have the same idle time. Under 1F1B the dark boxes begin as
# soon as they can, and from then on every rank alternates, until no forward pass is left.*
#
# From rank r to the end of the line there are p - r stages, its own included. So p - r micro-batches
# are on their way when its first gradient comes back, and then one leaves the shelf for each that is
# added. **Predict** the most micro-batches in flight on each rank.

# %% tags=["prediction"]
predicted = {"GPipe": [8, 8, 8, 8], "1F1B": [4, 3, 2, 1]}
measured = {
    "GPipe": simulated.peak_in_flight,
    "1F1B": schedules.simulate(schedules.one_forward_one_backward(4, 8)).peak_in_flight,
}
compare(
    predicted,
    measured,
    {
        "As if every rank were as far from the end as rank 0.": {"1F1B": [4, 4, 4, 4]},
        "The wrong way round: the first rank is the farthest from the end.": {"1F1B": [1, 2, 3, 4]},
        "As if one forward and one backward left one on each shelf.": {"1F1B": [1, 1, 1, 1]},
    },
)

# %% [markdown]
# The 1F1B numbers do not depend on m. You can take as many micro-batches as you like, and the bubble
# shrinks while the memory stays. That is why long pipelines run 1F1B, or what came after it.
#
# ### Interleaved: several pieces for each rank
#
# The bubble is p - 1 times the passes of one stage. Make the stages smaller: give each rank v pieces
# of the model that are not neighbours. They are called **chunks**, and have nothing to do with the
# chunks of data in section 2. Chunk c of rank r is **virtual stage** c p + r, so a micro-batch passes
# all ranks v times. A pass through a chunk takes 1/v of the time, and the bubble becomes
#
# $$\frac{1}{v}\cdot\frac{p-1}{m}$$
#
# of the ideal time (Narayanan et al., section 2.2.2). The price: $(pv-1)/(p-1)$ times as many
# messages, which is more than $v$ times, and more on the shelves.
#
# ### Zero bubble: the half that nobody waits for
#
# B computes two gradients. The previous stage waits for that of the inputs only. The gradient of the
# weights is needed at the end of the step. **Zero-bubble** schedules split the pass: **B** is now the
# gradient of the inputs, **W** that of the weights, and W goes where a gap would be ([Qi et al.
# 2024](https://arxiv.org/abs/2401.10241), section 2). **ZB-H1** holds no more than 1F1B's p
# micro-batches and has a third of its bubble when F, B and W take equal times. **ZB-H2** runs more
# forward passes ahead, holds up to 2p - 1, and then has no bubble at all.

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
plots.gantt({name: SIMULATED[name] for name in ("interleaved", "ZB-H1", "ZB-H2")})
plt.show()

# %% [markdown]
# *Interleaved: each box is half as long; the palest and the darkest boxes belong to the second chunk.
# ZB-H1: pink W fill the gaps that 1F1B has at the end. ZB-H2: from its first box to its last, no rank
# has a gap; the ranks are only shifted against each other.*
#
# ZB-H2's ranks begin and end at different times. Usually the next step waits for all of them: clipping
# by the gradients' norm, and the test for NaN, need every rank. The paper updates first, validates
# afterwards, and takes the update back where it has to (section 4). If the next step can begin without
# waiting, the step costs what one rank needs from its first op to its last, and this is how the
# paper counts. **Predict** the idle time of a step, in units, with F = B = W = 1: $(p-1)$ times
# $t_F+t_B+t_W$ under 1F1B, half of that with two chunks, $t_F+t_B-t_W$ under ZB-H1, and
# $t_F+t_B-2t_W$ under ZB-H2 (Qi et al., table 2).

# %% tags=["prediction"]
predicted = {"GPipe": 9, "1F1B": 9, "interleaved": 4.5, "ZB-H1": 3, "ZB-H2": 0}
measured = {name: simulation.step - simulation.work for name, simulation in SIMULATED.items()}
compare(predicted, measured)

# %%
for name in ("1F1B", "ZB-H1", "ZB-H2"):
    result = SIMULATED[name]
    print(f"{name}: a rank's step {result.step:g}, from the first op of all to the last", end=" ")
    print(f"{result.makespan:g}")

# %% [markdown]
# From the first op of all ranks to the last one, ZB-H2 takes as long as ZB-H1: three units are only
# the ranks' shift. It wins where step follows step, and each rank begins the next one at once.
#
# Interleaved 1F1B has a longer warm-up than these pictures need. The cell below takes some passes out
# of the warm-up, p - 1 - r of them on rank r, and leaves the order otherwise as it was. The second
# time, messages take a while: the **hop latency** is the time from the end of an op until its result
# has reached the next rank, in the same units.


# %%
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
# ## 4. By hand, then with PyTorch: an engine that runs any schedule
#
# The simulator says what should happen. Now you build what makes it happen. The engine has four
# parts: a stage that can go forward and backward, the addresses of the messages, a post office that
# carries them, and the loop that runs a row.
#
# ### A stage, and a backward pass in two halves
#
# To split the backward pass, somebody has to stop halfway. `torch.autograd.grad` computes the
# gradients that you name and no others. Asked for the gradient of the stage's input, it leaves the
# weights alone. On the way it passes the output of every layer, so it can return those gradients
# too. Later, W takes them up: for each layer it asks for the gradient of the layer's own weights,
# given that of the layer's output. Nothing is computed twice.


# %%
class Stage:
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
whole, halves = Stage(new_model()), Stage(new_model())
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
# ### The addresses
#
# A **message** is the result of an F, for the stage after, or of a B, for the stage before. It is
# named by what it is and whom it is for. `needs` says what an op waits for, `makes` what its result
# is. Both follow from the rule for virtual stages, c p + r.


# %%
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


# %% [markdown]
# ### The post office
#
# Three decisions keep every schedule free of deadlocks, and fast:
#
# * **Sending never waits.** `isend` returns at once. The engine keeps the tensor until it has
#   certainly arrived: for activations when their gradient comes back, for the rest at the end of the
#   step.
# * **Receiving begins early.** For each neighbour one `irecv` more than needed is under way, so that
#   a message can travel while the rank computes.
# * **Messages are received in the order in which they are sent.** gloo matches messages by their
#   **tag**, a number. NCCL ignores tags and matches by order. The receiver knows the sender's row of
#   the schedule, so it can post its receives in just that order. Each direction between two ranks
#   has a process group of its own: on a GPU, messages of one group queue behind each other, and a
#   `send` must not stand behind a `recv` that waits for the other side.
#
# Nobody asks for shapes. `entering[s]` is a sample of what enters virtual stage s. It lives on the
# **meta device**, where tensors have shapes and no data.


# %%
def samples(stages, x):
    """A sample of what enters each stage, without any data."""
    entering = []
    for stage in stages:
        entering.append(x.to("meta"))
        x = deepcopy(stage).to("meta")(entering[-1]).detach()
    return entering


class PostOffice:
    """Carries messages between this rank and the others, in the order of a schedule."""

    def __init__(self, schedule, entering):
        self.rank, self.ranks, self.entering = dist.get_rank(), dist.get_world_size(), entering
        self.roads, self.orders = {}, {}
        for pair in sorted({(a, (a + d) % self.ranks) for a in range(self.ranks) for d in (1, -1)}):
            if pair[0] != pair[1]:
                self.roads[pair] = dist.new_group(pair)
        for source, to in self.roads:
            made = [makes(op, source, self.ranks, len(entering)) for op in schedule[source]]
            if to == self.rank:
                self.orders[source] = [x for x in made if x and x.stage % self.ranks == to]

    def open(self, rows):
        self.rows, self.sent, self.on_the_way, self.at_home = rows, {}, {}, {}
        self.expected = {source: deque(order) for source, order in self.orders.items()}
        for source in self.expected:
            self.expect(source)

    def tag(self, message):
        number = message.micro_batch * len(self.entering) + message.stage
        return 2 * number + (message.kind == "B")

    def expect(self, source):
        if self.expected[source]:
            message = self.expected[source].popleft()
            like = self.entering[message.stage + (message.kind == "B")]
            size = self.rows[message.micro_batch], *like.shape[1:]
            space = torch.empty(size, dtype=like.dtype, device=hardware.device())
            road, tag = self.roads[source, self.rank], self.tag(message)
            self.on_the_way[message] = space, dist.irecv(space, source, road, tag)

    def receive(self, message):
        source = (message.stage + (1 if message.kind == "B" else -1)) % self.ranks
        if source == self.rank:
            return self.at_home.pop(message)
        while message not in self.on_the_way:
            self.expect(source)
        space, arrival = self.on_the_way.pop(message)
        self.expect(source)
        arrival.wait()
        if message.kind == "B":  # so the activations that it belongs to have arrived
            self.sent.pop(Message("F", message.micro_batch, message.stage + 1))[1].wait()
        return space

    def send(self, message, tensor):
        to = message.stage % self.ranks
        if to == self.rank:
            self.at_home[message] = tensor
        else:
            tensor, road = tensor.contiguous(), self.roads[self.rank, to]
            self.sent[message] = tensor, dist.isend(tensor, to, road, self.tag(message))

    def close(self):
        for _, departure in self.sent.values():
            departure.wait()


# %% [markdown]
# ### The loop
#
# What remains is short. A rank takes the ops of its row, one after the other: receive, compute,
# send. On the last stage the loss is part of the forward pass. The gradient that enters the last
# stage is the micro-batch's share of the rows. So the sum over micro-batches is the gradient of the
# whole batch's mean, also where the last micro-batch is smaller.


# %%
class Pipeline:
    """One rank of a pipeline: runs its row of a schedule, whatever the schedule is.

    modules: this rank's pieces of the model, one for each chunk
    entering: a sample of what enters each virtual stage of the whole pipeline
    loss_of: (output, targets) -> the mean loss of their rows
    """

    def __init__(self, modules, schedule, entering, loss_of):
        rank, ranks, stages = dist.get_rank(), dist.get_world_size(), len(entering)
        self.stages, self.loss_of, self.peak = [Stage(module) for module in modules], loss_of, 0
        self.micro_batches = 1 + max(op.micro_batch for op in schedule[rank])
        self.split = any(op.kind == "W" for op in schedule[rank])
        self.post = PostOffice(schedule, entering)
        self.row = [
            (op, needs(op, rank, ranks, stages), makes(op, rank, ranks, stages))
            for op in schedule[rank]
        ]

    def step(self, inputs, targets, during=nullcontext):
        """Adds the gradients of the batch to those of the weights; returns its loss, on the last
        rank. Every rank is given the whole batch. `during(op)` is a context around each op."""
        batch = [
            t.to(hardware.device()).tensor_split(self.micro_batches) for t in (inputs, targets)
        ]
        self.inputs, self.targets = batch
        self.shares = [x.new_tensor(len(x) / len(inputs), dtype=torch.float32) for x in self.inputs]
        self.loss = torch.zeros((), device=hardware.device())
        self.post.open([len(x) for x in self.inputs])
        for op, need, made in self.row:
            arrived = None if need is None else self.post.receive(need)
            with during(op):
                result = self.run(op, arrived, last=made is None)
            if made is not None:
                self.post.send(made, result)
        self.post.close()
        return self.loss.item()

    def run(self, op, arrived, last):
        i, stage = op.micro_batch, self.stages[op.chunk]
        if op.kind == "F":
            x = self.inputs[i] if arrived is None else arrived.requires_grad_()
            result = stage.forward(i, x, partial(self.finish, i) if last else None)
            self.peak = max(self.peak, sum(len(stage.stored) for stage in self.stages))
            return result
        if op.kind == "W":
            return stage.backward_to_weights(i)
        gradient = self.shares[i] if arrived is None else arrived
        return (stage.backward_to_input if self.split else stage.backward)(i, gradient)

    def finish(self, i, output):
        loss = self.loss_of(output, self.targets[i])
        self.loss += self.shares[i] * loss.detach()  # not .item(), which waits for a GPU
        return loss


# %% [markdown]
# ### All five schedules, on four ranks
#
# The batch is the same in all runs, 8 micro-batches of 4 rows. Under the interleaved schedule each
# rank holds two chunks of one layer each, otherwise one stage of two layers. Three claims are
# checked on every run: the loss, the gradients of all layers, and the peak of stored micro-batches
# on each rank.


# %%
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
# ### With PyTorch: `torch.distributed.pipelining`
#
# PyTorch has an engine of its own. Older articles name the module `torch.distributed.pipeline`,
# which is gone; its successor is `torch.distributed.pipelining`. `PipelineStage` holds one stage, a
# schedule object holds the order, and `step` runs it. The first rank passes the inputs, the last
# one the targets. The shapes between the stages are found out once, with the first micro-batch.
# `Schedule1F1B` and `ScheduleGPipe` take one stage for each rank, `ScheduleInterleaved1F1B` takes a
# list of them.
#
# The loss function gives the mean over a micro-batch, and the schedule divides the gradients by the
# number of micro-batches when the step is over (`scale_grads=True`, the default).


# %%
def torch_run(rank, schedule_class, chunks=1):
    torch.set_num_threads(1)
    ranks, device = dist.get_world_size(), hardware.device()
    modules = cut(new_model(), ranks * chunks)
    numbers = range(rank, ranks * chunks, ranks)
    stages = [PipelineStage(modules[n], n, ranks * chunks, device) for n in numbers]
    schedule = schedule_class(stages if chunks > 1 else stages[0], 8, loss_fn=mse_loss)
    losses = []
    first = [inputs.to(device)] if rank == 0 else []
    last = {"target": targets.to(device), "losses": losses} if rank == ranks - 1 else {}
    schedule.step(*first, **last)
    loss = sum(loss.item() for loss in losses) / 8
    gradients = [flat(p.grad for p in modules[n].parameters()) for n in numbers]
    return Run(None, loss, gradients, 0)


# %%
for name, schedule_class, chunks in [
    ("GPipe", ScheduleGPipe, 1),
    ("1F1B", Schedule1F1B, 1),
    ("interleaved", ScheduleInterleaved1F1B, 2),
]:
    runs = launch(torch_run, 4, schedule_class, chunks)
    loss = abs(runs[-1].loss - expected_loss) < 1e-6
    print(
        f"{name}: loss as alone {loss}, gradients as alone", equal(expected, [whole_gradient(runs)])
    )

# %% [markdown]
# Three schedules, the same gradients as yours. `make bench` compares the time of a step with that of
# the hand-written engine. PyTorch also has zero-bubble schedules, `ScheduleInterleavedZeroBubble` and
# `ScheduleZBVZeroBubble`.
#
# ### Let PyTorch cut the model
#
# So far you cut the model yourself. `pipeline()` does it for you: it traces the model with an example
# micro-batch and cuts the trace where `split_spec` says. A **split point** names a layer, and the cut
# goes before it. Every rank then builds its own stage. This also works where the model is no
# `nn.Sequential`, as long as it can be traced.


# %%
def traced_run(rank):
    torch.set_num_threads(1)
    device = hardware.device()
    example = inputs[:4].to(device)
    cuts = {name: SplitPoint.BEGINNING for name in ("2", "4", "6")}
    pipe = pipeline(new_model(), mb_args=(example,), split_spec=cuts)
    schedule = Schedule1F1B(pipe.build_stage(rank, device), 8, loss_fn=mse_loss)
    first = [inputs.to(device)] if rank == 0 else []
    last = {"target": targets.to(device)} if rank == 3 else {}
    schedule.step(*first, **last)
    names, parameters = zip(*pipe.get_stage_module(rank).named_parameters())
    return names, flat(p.grad for p in parameters)


names, gradients = zip(*launch(traced_run, 4))
for rank, name in enumerate(names):
    print(f"rank {rank}:", *name)
print("gradients as alone:", equal(expected, [torch.cat(gradients)]))

# %% [markdown]
# The names are those of the whole model, so a checkpoint of a stage fits the model it was cut from.
#
# ### An image classifier, against one process
#
# Now a real task: a small convolutional network on MNIST, in two stages. Stage 0 is
# the first convolution with its pooling, stage 1 is the rest. Batches have 256 images in 4
# micro-batches, and nobody keeps a pace any more. Three ways run the same 12 steps of SGD: one
# process, the engine with GPipe, the engine with 1F1B.

# %%
STEPS, BATCH = 12, 256
images, labels = mnist.tensors(train=True, limit=STEPS * BATCH)


def classifier():
    torch.manual_seed(0)
    return MnistConvNet().layers.to(hardware.device())


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
    with kept_for_backward(model) as kept:
        model(x.clone().to(hardware.device()))
    return flat(model.parameters()), times, memory_ledger(model) | {"activations": kept.bytes}


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
    size = BATCH // engine.micro_batches, *entering[rank].shape[1:]
    with kept_for_backward(stages[rank]) as kept:
        stages[rank](torch.zeros(size, device=hardware.device()))
    ledger = memory_ledger(stages[rank]) | {"activations": engine.peak * kept.bytes}
    return flat(stages[rank].parameters()), times, ledger


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
ledgers = {"one process": one[0][2]}
for name, ranks in pipelines.items():
    ledgers |= {f"{name}, stage {r}": rank[2] for r, rank in enumerate(ranks)}
print(f"{'bytes':16} parameters  gradients  activations")
for name, ledger in ledgers.items():
    parts = [ledger[kind] for kind in ("parameters", "gradients", "activations")]
    print("{:16} {:10,} {:10,} {:12,}".format(name, *parts))
plots.memory(list(ledgers.values()), list(ledgers), "Memory of the classifier")
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
# ## 5. Break it: wrong gradients that train, and a line that stops
#
# The bug hunt of section 2, *chunks in a loop*, was about a promise of speed and memory. The second
# one, below, is about the gradients. Four mistakes stand around it.
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
# ### Bug hunt: the last micro-batch
#
# This is how gradient accumulation is usually written. The loop divides each loss by the number of
# micro-batches, so that the gradients add up to those of the whole batch. **Predict** for which of
# two batches they do: 32 rows, or 30 rows, in micro-batches of 8?


# %%
def accumulate(model, dataloader, criterion, accumulation_steps):
    for batch, labels in dataloader:
        outputs = model(batch)
        loss = criterion(outputs, labels)
        loss = loss / accumulation_steps
        loss.backward()


for rows in (32, 30):
    few = inputs[:rows].to(hardware.device()), targets[:rows].to(hardware.device())
    model = new_model()
    mse_loss(model(few[0]), few[1]).backward()
    reference = flat(p.grad for p in model.parameters())

    model = new_model()
    dataloader = list(zip(*(part.split(8) for part in few)))
    accumulate(model, dataloader, nn.MSELoss(), accumulation_steps=len(dataloader))
    same = equal(reference, [flat(p.grad for p in model.parameters())])
    print(f"{rows} rows in {len(dataloader)} micro-batches: gradient of the whole batch: {same}")

# %% [markdown]
# 30 rows leave a last micro-batch of 6. `criterion` takes a mean over its own rows, and then each
# micro-batch counts for a quarter. So a row of the last one counts 1/24, the others 1/32. No error
# says so, and the loss falls. The same mistake, with tokens for rows, was found in a well-known
# trainer in 2024 ([Fixing Gradient
# Accumulation](https://huggingface.co/blog/gradient_accumulation)). The repair weighs by rows:

# %%
model = new_model()
for box in torch.arange(30).split(8):
    loss = mse_loss(model(few[0][box]), few[1][box])
    loss.backward(torch.full_like(loss, len(box) / 30))
same = equal(reference, [flat(p.grad for p in model.parameters())])
print("weighed by rows: gradient of the whole batch:", same)

# %% [markdown]
# The engine weighs by rows, and reads the sizes off the batch, so 30 rows are no problem for it:


# %%
def thirty_rows(rank):
    stages = cut(new_model(), 2)
    plan = schedules.one_forward_one_backward(2, 4)
    engine = Pipeline([stages[rank]], plan, samples(stages, inputs), mse_loss)
    engine.step(inputs[:30], targets[:30])
    return flat(p.grad for p in stages[rank].parameters())


print("by hand, as alone:", equal(reference, [torch.cat(launch(thirty_rows, 2))]))

# %% [markdown]
# And PyTorch? Its `PipelineStage` settles the shapes with the first micro-batch and expects that
# many rows each time. **Predict** what happens to 30 rows in 4 micro-batches.


# %%
def thirty_rows_in_torch(rank):
    warnings.filterwarnings("ignore", "Using a target size")  # mse_loss, before it raises
    stage = PipelineStage(cut(new_model(), 2)[rank], rank, 2, hardware.device())
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    if rank == 0:
        schedule.step(few[0].to(hardware.device()))
    else:
        schedule.step(target=few[1].to(hardware.device()))


try:
    launch(thirty_rows_in_torch, 2)
except RankFailure as failure:
    for shape in ("[7, 64]", "[8, 64]"):
        print(f"the failure names {shape}: {shape in str(failure)}")

# %% [markdown]
# It cuts 30 rows into 8, 8, 7 and 7, and sends 7 rows where 8 are expected. It would also divide by
# 4 all the same. The repair is to give each step a batch that divides: `DataLoader(drop_last=True)`,
# or a batch that is filled up with rows whose loss is zero, and then all gradients times 32/30.
#
# ### Both send first
#
# In the middle of 1F1B, two neighbours exchange: one sends activations down, the other a gradient up,
# and both want what the other has. Written in the order in which one thinks, it stops:


# %%
def both_send_first(rank):
    mine = torch.ones(8, WIDTH, device=hardware.device())
    theirs = torch.empty_like(mine)
    dist.send(mine, dst=1 - rank)
    dist.recv(theirs, src=1 - rank)


try:
    launch(both_send_first, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# With gloo, `send` returns when the other side has taken the data, and the other side is in its own
# `send`. (With NCCL the call returns once it is queued, and the GPUs wait for each other in place of the
# hosts: the program stops at the next line that reads a value.)
# Under torchrun both would stand there until the time limit. One rank could receive first, but then
# you need a rule for each pair and each schedule. The way out is calls that do not wait, as in the
# post office of section 4; in exercise 5.6 you write that for a stage with two neighbours.
#
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
# ## 6. Exercises: write the schedules yourself
#
# Six parts of a pipeline: its bubble, three schedules, the scale of its gradients, and the talk
# between neighbours.
#
# In 5.2 to 5.4 you write a **schedule**: a list with one entry per rank, and each entry is the list
# of what this rank does, in order. `Op("F", 3)` is the forward pass of micro-batch 3, `Op("B", 3)`
# its backward pass. A schedule has no times and no gaps: a rank works through its list from left to
# right, and waits where an op needs something that has not come yet. `check` first tries whether
# the schedule can run at all, then simulates it with one unit of time for F and two for B, and
# holds it against a budget of time and a budget of memory. You can look at yours at any time:
# `plots.gantt(schedules.simulate(gpipe(4, 8)))`.

# %% [markdown]
# ### 5.1 The bubble's share (1 point)
#
# Which share of all the ranks' time is idle? Give it as a share of the **total** time of a step, from
# start to end, not of the ideal time. F and B may take any time, as long as all stages are equal.
# With `chunks` > 1 every rank holds that many smaller pieces of the model, and the schedule is
# interleaved 1F1B.


# %% nbgrader={"grade_id": "5.1", "solution": true}
def bubble_share(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns the idle share (0 to 1) of the total time of a step, in a pipeline of equal stages.

    GPipe and 1F1B where `chunks` is 1, interleaved 1F1B with that many chunks per rank otherwise;
    `micro_batches` is then a multiple of `stages`. A single stage is never idle.
    """
    ### BEGIN SOLUTION
    warm_up = stages - 1  # in passes through one chunk, as the work is
    return warm_up / (chunks * micro_batches + warm_up)
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.1-check", "grade": true, "points": 1, "locked": true}
check("5.1", bubble_share)

# %% [markdown]
# ### 5.2 GPipe (2 points)
#
# The oldest schedule: every rank runs the forward passes of all micro-batches, and only then the
# backward passes.


# %% nbgrader={"grade_id": "5.2", "solution": true}
def gpipe(stages: int, micro_batches: int) -> list[list[Op]]:
    """Returns GPipe's schedule: what each of `stages` ranks does, in order.

    Every rank has one F and one B for each of the micro-batches 0 to `micro_batches` - 1, all its F
    before its first B. Time: at most (micro_batches + stages - 1) * (F + B).
    Write the lists yourself: no function of `course_utils.schedules` may be called.
    """
    ### BEGIN SOLUTION
    numbers = range(micro_batches)
    rank_does = [Op("F", n) for n in numbers] + [Op("B", n) for n in numbers]
    return [rank_does.copy() for _ in range(stages)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.2-check", "grade": true, "points": 2, "locked": true}
check("5.2", gpipe)

# %% [markdown]
# ### 5.3 One forward, one backward (3 points)
#
# GPipe holds the activations of all micro-batches. **1F1B** takes just as long and holds fewer: after
# a **warm-up** of some forward passes a rank runs one forward and one backward in turn, and at the
# end the backward passes that remain. Each backward frees what its forward stored. How long the
# warm-up has to be depends on the rank.


# %% nbgrader={"grade_id": "5.3", "solution": true}
def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[Op]]:
    """Returns the 1F1B schedule: what each of `stages` ranks does, in order.

    Every rank has one F and one B for each of the micro-batches 0 to `micro_batches` - 1.
    Time: at most (micro_batches + stages - 1) * (F + B). Memory: rank r never holds the activations
    of more than stages - r micro-batches, from the start of an F to the end of its B.
    Write the lists yourself: no function of `course_utils.schedules` may be called.
    """
    ### BEGIN SOLUTION
    ranks = []
    for rank in range(stages):
        ahead = min(stages - 1 - rank, micro_batches)  # forward passes before the first pair
        does = [Op("F", n) for n in range(ahead)]
        for n in range(micro_batches - ahead):
            does += [Op("F", n + ahead), Op("B", n)]
        does += [Op("B", n) for n in range(micro_batches - ahead, micro_batches)]
        ranks.append(does)
    return ranks
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.3-check", "grade": true, "points": 3, "locked": true}
check("5.3", one_forward_one_backward)

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


# %% nbgrader={"grade_id": "5.4", "solution": true}
def interleaved(stages: int, micro_batches: int, chunks: int) -> list[list[Op]]:
    """Returns the interleaved 1F1B schedule: what each of `stages` ranks does, in order.

    `micro_batches` is a multiple of `stages`. Every rank has one F and one B for each micro-batch
    and each of its chunks 0 to `chunks` - 1. With F and B the times of one chunk:
    time at most (chunks * micro_batches + stages - 1) * (F + B); memory of rank r at most the
    activations of (chunks - 1) * stages + 2 * (stages - r) - 1 micro-batches in one chunk each.
    Write the lists yourself: no function of `course_utils.schedules` may be called.
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
# ### 5.5 The scale of micro-batch gradients (2 points)
#
# `backward()` adds to `.grad`. Run it for each micro-batch, and the gradients add up, which is not
# yet the gradient of the batch's mean loss. Under Adam nobody notices; under SGD the steps are too
# large. Get the scale right, also where the last micro-batch is smaller than the others.


# %% nbgrader={"grade_id": "5.5", "solution": true}
def micro_batch_gradients(
    model: nn.Module,
    loss_function: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    size: int,
) -> float:
    """Gives each parameter the gradient of the mean loss over the whole batch, and returns this loss.

    `inputs` (N, ...) and `targets` (N, ...) are cut, in order, into micro-batches of `size` samples;
    the last one may be smaller. `loss_function(model(x), y)` is the mean loss over the samples in x
    and y. The model never sees more than `size` samples at once, and each micro-batch's activations
    are freed before the next one's forward pass. What stood in `.grad` before is replaced. Where the
    loss does not use a parameter, or the parameter is frozen, `.grad` is None afterwards. No
    parameter changes, and the model stays in training mode.
    """
    ### BEGIN SOLUTION
    model.zero_grad(set_to_none=True)
    mean_loss = 0.0
    for x, y in zip(inputs.split(size), targets.split(size)):
        share = loss_function(model(x), y) * (len(x) / len(inputs))
        share.backward()
        mean_loss += share.item()
    return mean_loss
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.5-check", "grade": true, "points": 2, "locked": true}
check("5.5", micro_batch_gradients)

# %% [markdown]
# ### 5.6 A stage and its two neighbours (3 points)
#
# In the middle of 1F1B, a stage has two things to hand over at the same time: activations to the next
# stage, and gradients to the previous one. Its neighbours hand over something too. If two of them
# begin with a blocking send to each other, both wait for ever.
#
# The function runs on every rank. A gradient that comes back has the shape and the dtype of the
# activations that went out; the activations that come in have those of the gradient that goes back
# for them.


# %% nbgrader={"grade_id": "5.6", "solution": true}
def exchange(
    activations: Tensor | None, gradients: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Hands over to both neighbours, and returns what they hand over.

    Called on every rank at once; rank r is stage r of a line, not of a ring. `activations` goes to
    the next rank and is None on the last one; `gradients` goes to the previous rank and is None on
    the first one. Returns (the previous rank's activations, the next rank's gradients); the first is
    None on the first rank, the second on the last rank. What comes in from the previous rank looks
    like `gradients`, what comes in from the next rank looks like `activations`: same shape, dtype
    and device. The tensors that were handed in may be of any layout in memory and do not change. A
    rank talks to its neighbours only, point to point, and returns when all its messages are through.
    """
    ### BEGIN SOLUTION
    rank = dist.get_rank()
    messages, arrived = [], []
    for outgoing, neighbour in ((gradients, rank - 1), (activations, rank + 1)):
        room = None
        if outgoing is not None:
            outgoing = outgoing.detach().contiguous()
            room = torch.empty_like(outgoing)
            messages.append(dist.P2POp(dist.isend, outgoing, neighbour))
            messages.append(dist.P2POp(dist.irecv, room, neighbour))
        arrived.append(room)
    for work in dist.batch_isend_irecv(messages) if messages else []:
        work.wait()
    return arrived[0], arrived[1]
    ### END SOLUTION


# %% nbgrader={"grade_id": "5.6-check", "grade": true, "points": 3, "locked": true}
check("5.6", exchange)

# %% [markdown]
# ## 7. See it: a pipeline under your hands
#
# Five numbers and a schedule make a pipeline. The explorer simulates it and shows its Gantt chart,
# the idle share of all five schedules for these numbers, and what the ranks of the chosen one
# store, in micro-batches of a whole stage. Move one slider at a time:
#
# * Raise the number of micro-batches and watch the idle share fall. What falls with it, and what does
#   not?
# * Choose interleaved and add chunks. Then raise the hop latency of section 3: each micro-batch now
#   pays it more often.
# * Compare GPipe and 1F1B while you raise the hop latency. 1F1B turns round at every micro-batch, so
#   it pays more often than GPipe.
# * Choose ZB-H2 and set the hop latency to 0: no gap is left. Then make the backward pass cheaper or
#   dearer. The gaps return, since F, B and W no longer take equal times.
# * Compare what ranks 0 and p - 1 store under 1F1B and under ZB-H1.


# %%
def plan_for(name, stages, micro_batches, chunks):
    make = {
        "interleaved": partial(schedules.interleaved, chunks=chunks),
        "GPipe": schedules.gpipe,
        "1F1B": schedules.one_forward_one_backward,
        "ZB-H1": schedules.zb_h1,
        "ZB-H2": schedules.zb_h2,
    }
    return make[name](stages, micro_batches)


def draw_pipeline(schedule, stages, micro_batches, chunks, backward_to_forward, hop_latency):
    results = {}
    for name in ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2"):
        plan = plan_for(name, stages, micro_batches, chunks)
        results[name] = schedules.simulate(plan, 1, backward_to_forward, latency=hop_latency)
    chosen = results[schedule]
    figure, axes = plt.subplot_mosaic(
        [["time", "time"], ["idle", "memory"]],
        figsize=(plots.WIDTH, 4.3 + 0.26 * stages),
        height_ratios=[0.9 + 0.26 * stages, 2.2],
    )
    plots.legend(figure, plots.gantt_lanes(axes["time"], chosen))
    axes["time"].set_title(
        f"{schedule}: a step takes {chosen.step:.1f} forward passes, idle {chosen.idle_share:.1%}"
    )
    left, right = axes["idle"], axes["memory"]
    colors = [plots.COLORS["wrong" if name == schedule else "waiting"] for name in results]
    bars = left.barh(list(results), [100 * r.idle_share for r in results.values()], color=colors)
    left.bar_label(bars, fmt="%.1f", padding=3, fontsize=9)
    left.set(xlabel="idle share (%)", xlim=(0, 100))
    left.invert_yaxis()
    peak = [n / (chunks if schedule == "interleaved" else 1) for n in chosen.peak_in_flight]
    bars = right.bar(range(stages), peak, color=plots.COLORS["activations"])
    right.bar_label(bars, fmt="%.3g", fontsize=9)
    right.margins(y=0.12)
    right.set(xlabel="rank", ylabel="micro-batches stored", xticks=range(stages))
    return figure


explore.Explorer(
    draw_pipeline,
    schedule=["interleaved", "GPipe", "1F1B", "ZB-H1", "ZB-H2"],
    stages=(2, 8, 4),
    micro_batches=(1, 24, 8),
    chunks=(1, 4, 2),
    backward_to_forward=(1.0, 3.0, 2.0),
    hop_latency=(0.0, 1.0, 0.1),
)

# %% [markdown]
# *At the start: interleaved 1F1B with two chunks on four ranks. The bars on the left compare the idle
# share of the five schedules, with the chosen one in orange. Those on the right say how many
# micro-batches each rank stores at most; the first rank stores the most.*
#
# And the figure to remember, for 8 stages: what more micro-batches gain, and what they cost.

# %%
sizes = [8, 16, 32, 64]
figure, axes = plt.subplots(1, 2, figsize=(plots.WIDTH, 3.4))
for width, name in zip((5, 4, 3, 2, 1), ("GPipe", "1F1B", "interleaved", "ZB-H1", "ZB-H2")):
    results = [schedules.simulate(plan_for(name, 8, m, chunks=2)) for m in sizes]
    chunks = 2 if name == "interleaved" else 1  # each holds half of the layers
    idle = [100 * result.idle_share for result in results]
    stored = [max(result.peak_in_flight) / chunks for result in results]
    for ax, values in zip(axes, (idle, stored)):
        ax.plot(sizes, values, marker="o", markersize=4 + width, linewidth=width, label=name)
    print(f"{name:12} m = 64: idle {idle[-1]:4.1f} %, micro-batches stored {stored[-1]:g}")
for ax, title in zip(axes, ("Idle share (%)", "Stored on the fullest rank")):
    ax.set_xscale("log", base=2)
    ax.set_xticks(sizes, sizes)
    ax.set(xlabel="micro-batches of a step", title=title, ylim=(-1, None))
axes[0].legend()
plt.show()

# %% [markdown]
# *Left: more micro-batches lower the idle share under every schedule; GPipe's and 1F1B's are the same.
# Right: only GPipe pays with memory for each of them. The others' shelves are full at a fixed number, those
# of 1F1B and ZB-H1 at 8. ZB-H2 idles least and stores nearly twice as much.*

# %% [markdown]
# ## 8. On a cluster: the same pipeline under torchrun
#
# The script below trains the line of eight layers with `torch.distributed.pipelining`, one stage for
# each process that torchrun starts. It asks the environment for its rank and runs with any number of
# ranks that divides 8. At the end rank 0 collects the parameters of all stages and saves them.

# %%
script, result = scratch() / "pipeline.py", scratch() / "pipeline.pt"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/pipeline.py
"""Trains a line of eight layers in stages: torchrun --nproc-per-node 2 pipeline.py result.pt"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import mse_loss

gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)  # the same model on all ranks; each keeps its own part
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)])
mine = model[rank * 8 // ranks : (rank + 1) * 8 // ranks].to(device)
inputs, targets = torch.randn(2, 32, 64).tanh().to(device)

schedule = Schedule1F1B(PipelineStage(mine, rank, ranks, device), 8, loss_fn=mse_loss)
optimizer = torch.optim.SGD(mine.parameters(), lr=1.0)
history = []
for _ in range(20):
    optimizer.zero_grad()
    losses = []
    first = [inputs] if rank == 0 else []
    last = {"target": targets, "losses": losses} if rank == ranks - 1 else {}
    schedule.step(*first, **last)
    optimizer.step()
    history.append(sum(loss.item() for loss in losses))

if rank == ranks - 1:  # only the last stage knows the loss
    print(f"{ranks} stages, 20 steps; the loss has fallen: {history[-1] < history[0]}")
parts = [None] * ranks if rank == 0 else None
dist.gather_object([p.detach().cpu() for p in mine.parameters()], parts)
if rank == 0:
    torch.save([parameter for part in parts for parameter in part], sys.argv[1])
dist.destroy_process_group()


# %%
print(torchrun(2, script, result), end="")

model = new_model()  # from here on in one process, without micro-batches
x, y = torch.randn(2, 32, WIDTH).tanh().to(hardware.device())  # as in the script, after the model
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for _ in range(20):
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
saved = torch.load(result, weights_only=True)
print("parameters as in one process:", equal(flat(model.parameters()), [flat(saved)]))

# %% [markdown]
# On two machines of 4 GPUs it has 8 stages, of one layer each. Start the same script on both:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST_MACHINE:29500 \
#     pipeline.py result.pt
# ```
#
# What changes there:
#
# * **The order of the ranks.** Neighbouring stages should be neighbouring GPUs, so that few boundaries
#   cross the slow link between the machines: one on two machines, and with v chunks 2v - 1, because the
#   last rank also sends to the first.
# * **NCCL matches by order.** A rank whose receives are not in the order of its neighbour's sends
#   hangs there, or takes one message for another, even if gloo sorted them out by their tags. This is
#   why the post office of section 4 keeps to the sender's order.
# * **Who builds the model.** A model that does not fit on one GPU is built on the meta device and
#   only the rank's own stage is filled with numbers.
# * **The number of micro-batches.** Long pipelines need many. Megatron-LM ran a model of 530
#   billion parameters with 35 stages, and interleaved 3 chunks on each (Narayanan et al., table 1
#   and its scripts).
# * **Pipelines rarely come alone.** Inside a machine, tensor parallelism splits the layers (chapter
#   6); around it, data parallelism multiplies the pipeline (chapter 7).

# %% [markdown]
# ## 9. Remember
#
# 1. A loop over chunks is no pipeline. It takes several ranks and micro-batches that follow each
#    other.
# 2. The bubble is (p - 1)/m of the ideal time and (p - 1)/(m + p - 1) of the total time, for GPipe
#    and for 1F1B. Chunks divide the first share by v, and W in the gaps makes it smaller still.
# 3. GPipe's order stores m micro-batches on each rank (its paper recomputes, and stores their inputs only), 1F1B at most p - r on rank r, ZB-H2 up to 2p - 1.
# 4. Each micro-batch counts with its share of the rows. Test it with SGD: Adam hides a wrong factor.
# 5. Sends that do not wait, and receives in the order in which the other side sends: then no legal
#    schedule deadlocks.
#
# **Sources**
#
# * Y. Huang et al., *GPipe*, NeurIPS 2019, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965):
#   sections 2.2 and 2.3.
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, SC 2021, [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 2.2.1 GPipe
#   and 1F1B, section 2.2.2 the interleaved schedule, table 1.
# * P. Qi et al., *Zero Bubble Pipeline Parallelism*, ICLR 2024, [arXiv
#   2401.10241](https://arxiv.org/abs/2401.10241): section 2, tables 1 and 2.
# * S. Ioffe and C. Szegedy, *Batch Normalization*, 2015, [arXiv
#   1502.03167](https://arxiv.org/abs/1502.03167), section 3.
# * PyTorch:
#   [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html),
#   [`torch.utils.checkpoint`](https://docs.pytorch.org/docs/stable/checkpoint.html),
#   [`isend`, `irecv` and tags](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication).
