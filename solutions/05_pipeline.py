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
# run it. You have run two schedules on four ranks, by hand and with PyTorch, with the gradients of the
# whole batch, and have written both yourself. What goes beyond that (an engine for any schedule,
# backward in two halves, recomputation, an image classifier, batch normalisation, and the interleaved
# schedule as an exercise) is in `05_pipeline_further`.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.launch import RankFailure, launch
from course_utils.lesson import schedules
from course_utils.lesson.equality import equal, flat
from course_utils.lesson.predictions import compare
from course_utils.lesson.schedules import Op

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
from course_utils.figures import ch05 as figures

figures.assembly_line()
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
# on the CPU, the stages are equally large, and `passes` notes when each begins and ends. It lets each pass last
# equally long, whatever else the machine does, so that you see who waits for whom.

# %%
from itertools import pairwise

model, x = ChunkedModel(split_size=1024), torch.randn(4096, 500)
model(x)  # the first pass is slower than the rest
devices = {model.stage1: (0, 0), model.stage2: (1, 0), model.stage3: (0, 1)}
records = figures.passes(model, devices, x)
in_order = sorted((span for r in records for span in r.spans), key=lambda span: span.start)
print("chunks times stages:", len(in_order))
print("two stages ever at work at once:", any(a.end > b.start for a, b in pairwise(in_order)))

# %%
figures.loop(records)
plt.show()

# %% [markdown]
# *Numbers are chunks. Wherever one lane has a box, the other is empty. Device 0 runs stage 1 and,
# paler, stage 3. Chunk 1 begins when chunk 0 has left the last stage.*
#
# Would two GPUs change that, since they run on while Python goes ahead? No. A GPU works off its
# queue in order. In the queue of device 0, stage 3 of chunk 0 stands before stage 1 of chunk 1, and
# it has to wait for device 1. The memory promise does not hold either:

# %%
from course_utils.trace import kept_for_backward

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

# %% [markdown]
# `at_pace` does that for each pass: `Op("F", i)` names the forward pass of micro-batch i, `Op("B", i)` its
# backward pass. Here is the pipeline. `recv` waits for the box, the stage works, `send` hands it on. When all four
# have passed, the gradients come back. The loss of a micro-batch is a mean over its own rows, so it
# counts for a quarter.

# %%
from course_utils.lesson.pace import SLOT, at_pace
from course_utils.trace import Trace


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
def alone(model):
    """The gradients and the loss of one process on the whole batch."""
    loss = mse_loss(model(inputs.to(hardware.device())), targets.to(hardware.device()))
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

# %%
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
# used between machines, where the links are slow. (It grows with the tokens of a step, and the
# gradients that data parallelism sends do not: 04, further, section 3.)
#
# ### A schedule is data
#
# An **op** is one pass of one micro-batch: F3 is the forward pass of micro-batch 3, B3 its backward
# pass. `course_utils.lesson.schedules` writes a schedule as a list with one row for each rank. A row is
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

# %%
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

# %%
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
def plans(p, m, chunks=2):
    """The five schedules of p ranks and m micro-batches."""
    return {
        "GPipe": schedules.gpipe(p, m),
        "1F1B": schedules.one_forward_one_backward(p, m),
        "interleaved": schedules.interleaved(p, m, chunks),
        "ZB-H1": schedules.zb_h1(p, m),
        "ZB-H2": schedules.zb_h2(p, m),
    }


PLANS = plans(4, 8)
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

# %%
measured = {name: simulation.step - simulation.work for name, simulation in SIMULATED.items()}
compare(predicted, measured)

# %% [markdown]
# 1F1B, which turns round early, is not a moment faster than GPipe: it wins memory only. What wins time is smaller
# pieces, or work that fits into the gaps. The further notebook asks what ZB-H2's zero costs, how long the warm-up of
# the interleaved schedule has to be, and holds the closed forms against the simulation of many pipelines.

# %% [markdown]
# ## 4. By hand, then with PyTorch: a rank that works through its row
#
# The simulator says what should happen. Now you build what makes it happen: a rank takes the ops of
# its row, one after the other, and for each it receives, computes and sends. What it computes stands
# in a class of its own. A **stage** is a piece of the model and its shelf, the micro-batches that it
# has begun and not finished.


# %%
class Stage:
    """A piece of the model. inputs: the micro-batches, on the first stage; targets: on the last."""

    def __init__(self, module, inputs, targets):
        self.module, self.inputs, self.targets = module, inputs, targets
        self.shelf, self.fullest = {}, 0

    def run(self, op, arrived):
        i = op.micro_batch
        if op.kind == "F":
            x = self.inputs[i] if arrived is None else arrived.requires_grad_()
            y = self.module(x)
            if self.targets:
                y = mse_loss(y, self.targets[i]) / len(self.targets)
            self.shelf[i] = x, y
            self.fullest = max(self.fullest, len(self.shelf))
            return y.detach()
        x, y = self.shelf.pop(i)
        y.backward(arrived)  # None on the last stage, where y is the loss
        return x.grad


# %% [markdown]
# The loop around it has to run GPipe, 1F1B, and whatever else somebody writes down, and must never stand still for
# another reason than the schedule. Three decisions see to that:
#
# * **Sending never waits.** `isend` returns at once. The tensor is kept until the end of the step, when it has
#   certainly arrived.
# * **Receiving waits.** The next op of the row needs what comes.
# * **Each direction has its own road.** It is a process group. Messages between two ranks arrive in the order in which
#   they were sent, and micro-batches leave every stage in their order. But on a GPU the calls of one group queue
#   behind each other, and a gradient must not stand behind an activation that nobody wants yet.


# %%
def run_row(rank, schedule, m=8):
    """Works through this rank's row; returns its record, its gradients and its fullest shelf."""
    torch.set_num_threads(1)
    last, roads = dist.get_world_size() - 1, {"F": dist.new_group(), "B": dist.new_group()}
    x, y = (part.to(hardware.device()).chunk(m) for part in (inputs, targets))
    stage = Stage(cut(new_model(), last + 1)[rank], x, y if rank == last else None)
    sent, where = [], {"F": (rank - 1, rank + 1), "B": (rank + 1, rank - 1)}
    with Trace() as trace:
        during = at_pace(trace, {"F": 1, "B": 2})
        for op in schedule[rank]:
            source, to = where[op.kind]
            arrived = torch.empty_like(x[0]) if 0 <= source <= last else None
            if arrived is not None:
                dist.recv(arrived, source, roads[op.kind])
            with during(op):
                result = stage.run(op, arrived)
            if 0 <= to <= last:
                sent.append((result, dist.isend(result, to, roads[op.kind])))
        for _, departure in sent:
            departure.wait()
    return trace.record(), flat(p.grad for p in stage.module.parameters()), stage.fullest


# %% [markdown]
# Two schedules, four ranks, the batch of 32 rows in 8 micro-batches. Two claims are checked on both runs: the gradients
# of all layers, and the fullest shelf of each rank.

# %%
RUNS = {name: launch(run_row, 4, PLANS[name]) for name in ("GPipe", "1F1B")}

for name, ran in RUNS.items():
    records, gradients, fullest = zip(*ran)
    print(f"{name:5}  gradients as alone: {equal(expected, [torch.cat(gradients)])}", end="  ")
    print(f"shelves as simulated: {list(fullest) == SIMULATED[name].peak_in_flight} {[*fullest]}")

# %% [markdown]
# Same gradients, two orders. Now the time. Each pair shows what the simulator says and, under it, what the ranks did.

# %%
for name, ran in RUNS.items():
    panels = {f"{name}, simulated": SIMULATED[name]}
    plots.gantt(panels | {f"{name}, emulated on 4 ranks": [record for record, *_ in ran]})
    plt.show()

# %% [markdown]
# *In each pair the lower picture repeats the upper one, box for box. The small gaps in it are what
# messages and the machine's other work cost.*
#
# A picture is no proof. Two claims hold on any machine, however busy it is: every rank ran its ops in
# the order of its row, and no step is shorter than the simulated one.

# %%
TOOK = {}  # the longest time of a rank from its first op to its last, in slots
for name, ran in RUNS.items():
    rows = [[span for span in record.spans if span.kind == "compute"] for record, *_ in ran]
    TOOK[name] = max(row[-1].end - row[0].start for row in rows) / SLOT
    expected_order = [[str(op) for op in row] for row in PLANS[name]]
    in_order = [[span.name for span in row] for row in rows] == expected_order
    not_shorter = TOOK[name] >= SIMULATED[name].step
    print(f"{name:5}  in the schedule's order: {in_order}, not shorter: {not_shorter}")

# %% [markdown]
# How close are they? Each op costs a little more than its slot, so expect a ratio slightly above 1, and more on a busy
# machine.

# %% tags=["nbval-ignore-output"]
for name, took in TOOK.items():
    print(f"{name:5}  emulated to simulated: {took / SIMULATED[name].step:.2f}")

# %% [markdown]
# This loop leaves three things open. With chunks, two ranks exchange messages of several virtual stages, and a message
# may stay on its rank. Zero-bubble schedules run backward in two halves. And a last micro-batch may be smaller. An
# engine that can do all three, and runs all five schedules, is built in the further notebook.

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

# %% [markdown]
# **Predict** how many messages all ranks together send in a step of 8 micro-batches on 4 ranks, under 1F1B and under
# interleaved 1F1B with 2 chunks a rank. Interleaved, the model has 8 virtual stages, each on another rank than its
# neighbours.

# %% tags=["prediction"]
predicted = {"1F1B": 2 * 3 * 8, "interleaved": 2 * 7 * 8}

# %%
from torch.distributed import pipelining


def torch_run(rank, schedule_class, chunks=1):
    torch.set_num_threads(1)
    ranks, device = dist.get_world_size(), hardware.device()
    modules = cut(new_model(), ranks * chunks)
    numbers = range(rank, ranks * chunks, ranks)
    stages = [pipelining.PipelineStage(modules[n], n, ranks * chunks, device) for n in numbers]
    schedule = schedule_class(stages if chunks > 1 else stages[0], 8, loss_fn=mse_loss)
    first = [inputs.to(device)] if rank == 0 else []
    last = {"target": targets.to(device)} if rank == ranks - 1 else {}
    schedule.step(*first, **last)  # finds out the shapes
    for module in modules:
        module.zero_grad()
    with Trace() as trace:
        schedule.step(*first, **last)
    gradients = [flat(p.grad for p in modules[n].parameters()) for n in numbers]
    return gradients, trace.record().count("send")


# %%
measured = {}
for name, schedule_class, chunks in [
    ("GPipe", pipelining.ScheduleGPipe, 1),
    ("1F1B", pipelining.Schedule1F1B, 1),
    ("interleaved", pipelining.ScheduleInterleaved1F1B, 2),
]:
    gradients, sent = zip(*launch(torch_run, 4, schedule_class, chunks))
    measured[name] = sum(sent)
    in_order = torch.cat([part for chunk in zip(*gradients) for part in chunk])
    print(f"{name}: gradients as alone {equal(expected, [in_order])}")
compare(
    predicted,
    measured,
    {"As if twice the pieces made twice the messages.": {"interleaved": 2 * 2 * 3 * 8}},
)

# %% [markdown]
# Three schedules, the same gradients as yours. Twice the pieces make $(pv-1)/(p-1) = 7/3$ times the messages: between
# the chunks a micro-batch also travels from the last rank back to the first. `make bench` compares the time of a step
# with that of the hand-written engine. PyTorch also has zero-bubble schedules, `ScheduleInterleavedZeroBubble`,
# `ScheduleZBVZeroBubble` and `ScheduleDualPipeV`, and its interleaved schedule takes numbers of micro-batches that are
# no multiple of the ranks.

# %% [markdown]
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
    cuts = {name: pipelining.SplitPoint.BEGINNING for name in ("2", "4", "6")}
    pipe = pipelining.pipeline(new_model(), mb_args=(example,), split_spec=cuts)
    schedule = pipelining.Schedule1F1B(pipe.build_stage(rank, device), 8, loss_fn=mse_loss)
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
# ## 5. Break it: wrong gradients that train, and a line that stops
#
# The bug hunt of section 2, *chunks in a loop*, was about a promise of speed and memory. The second
# one is about the gradients. Two things that stop stand behind it.

# %% [markdown]
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
# And PyTorch? Its `PipelineStage` settles the shapes with the first micro-batch and expects that
# many rows each time. **Predict** what happens to 30 rows in 4 micro-batches.

# %%
import warnings


def thirty_rows_in_torch(rank):
    warnings.filterwarnings("ignore", "Using a target size")  # mse_loss, before it raises
    stage = pipelining.PipelineStage(cut(new_model(), 2)[rank], rank, 2, hardware.device())
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=mse_loss)
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
    mine = torch.empty(2**26, device=hardware.device())  # 256 MB
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
# hosts: the program stops at the next line that reads a value. And it stops with large tensors only: a
# small one waits in a buffer of NCCL's until the other side receives. Such a program goes well until
# the model grows.)
#
# Under torchrun both would stand there until the time limit. One rank could receive first, but then
# you need a rule for each pair and each schedule. The way out is calls that do not wait, as in the
# loop of section 4; in exercise 5.6 you write that for a stage with two neighbours.

# %% [markdown]
# ## 6. Exercises: write the schedules yourself
#
# Five parts of a pipeline: its bubble, two schedules, the scale of its gradients, and the talk
# between neighbours. A sixth, 5.4, the interleaved schedule, stands in the further notebook.
#
# In 5.2 and 5.3 you write a **schedule**: a list with one entry per rank, and each entry is the list
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
    Write the lists yourself: no function of `course_utils.lesson.schedules` may be called.
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
    Write the lists yourself: no function of `course_utils.lesson.schedules` may be called.
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
# ### 5.5 The scale of micro-batch gradients (2 points)
#
# `backward()` adds to `.grad`. Run it for each micro-batch, and the gradients add up, which is not
# yet the gradient of the batch's mean loss. Under Adam nobody notices; under SGD the steps are too
# large. Get the scale right, also where the last micro-batch is smaller than the others.

# %%
from collections.abc import Callable


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
    and device, but it requires no gradient. The tensors that were handed in may be of any layout in
    memory and do not change. A rank talks to its neighbours only, point to point, sends these tensors
    and nothing else, and returns when all its messages are through.
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
# A few numbers and a schedule make a pipeline. The explorer simulates it and shows its Gantt chart,
# the idle share of all five schedules for these numbers, and what the ranks of the chosen one
# store, in micro-batches of a whole stage. The **hop latency** is the time from the end of an op until
# its result has reached the next rank, in forward passes. Move one slider at a time:
#
# * Raise the number of micro-batches and watch the idle share fall. What falls with it, and what does
#   not?
# * Choose interleaved and add chunks. Then raise the hop latency: each micro-batch now
#   pays it more often.
# * Compare GPipe and 1F1B while you raise the hop latency. 1F1B turns round at every micro-batch, so
#   it pays more often than GPipe.
# * Choose ZB-H2 and set the hop latency to 0: no gap is left. Then make the backward pass cheaper or
#   dearer. The gaps return, since F, B and W no longer take equal times.
# * Make the last stage heavier, as the head of a language model does. All others wait for it, under every
#   schedule, and more micro-batches help only down to a floor: with 4 stages, the last one twice as heavy,
#   37.5 % of the time.
# * Compare what ranks 0 and p - 1 store under 1F1B and under ZB-H1.

# %%
from course_utils.lesson import explore


def draw_pipeline(
    schedule, stages, micro_batches, chunks, backward_to_forward, last_stage, hop_latency
):
    forward = [1.0] * (stages - 1) + [last_stage]
    backward = [backward_to_forward * time for time in forward]
    results = {
        name: schedules.simulate(plan, forward, backward, latency=hop_latency)
        for name, plan in plans(stages, micro_batches, chunks).items()
    }
    return figures.compared(results, schedule, chunks)


sliders = {"stages": (2, 8, 4), "micro_batches": (1, 24, 8), "chunks": (1, 4, 2)}
times = {"backward_to_forward": (1.0, 3.0, 2.0), "last_stage": (1.0, 2.0, 1.0)}
names = ["interleaved", "GPipe", "1F1B", "ZB-H1", "ZB-H2"]
explore.Explorer(draw_pipeline, schedule=names, **sliders, **times, hop_latency=(0.0, 1.0, 0.1))

# %% [markdown]
# *At the start: interleaved 1F1B with two chunks on four ranks. The bars on the left compare the idle
# share of the five schedules, with the chosen one framed. Those on the right say how many
# micro-batches each rank stores at most; the first rank stores the most.*
#
# And the figure to remember, for 8 stages: what more micro-batches gain, and what they cost.

# %%
sizes, idle, stored = [8, 16, 32, 64], {}, {}
for name in PLANS:
    results = [schedules.simulate(plans(8, m)[name]) for m in sizes]
    pieces = 2 if name == "interleaved" else 1  # each holds half of the layers
    idle[name] = [100 * result.idle_share for result in results]
    stored[name] = [max(result.peak_in_flight) / pieces for result in results]
    print(f"{name:12} m = 64: idle {idle[name][-1]:4.1f} %, stored {stored[name][-1]:g}")
figures.prices(sizes, idle, stored)
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
from course_utils.lesson.terminal import scratch, torchrun

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
#   hangs there, or takes one message for another, even where gloo would sort them out by their tags. In the loop
#   of section 4 the order is right by itself; with chunks somebody has to see to it, as the further notebook does.
# * **Who builds the model.** A model that does not fit on one GPU is built on the meta device and
#   only the rank's own stage is filled with numbers.
# * **The number of micro-batches.** Long pipelines need many. Megatron-LM ran a model of 530
#   billion parameters with 35 stages, and interleaved 3 chunks on each (Narayanan et al., table 1
#   and its scripts). Every forward pass was computed again in backward there, so that a long warm-up
#   costs little memory.
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
# * PyTorch:
#   [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html),
#   [`isend`, `irecv` and tags](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication).
