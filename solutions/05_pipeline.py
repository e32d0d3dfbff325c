# %% [markdown]
# # 5. The pipeline: micro-batches that keep every stage busy
#
# In chapter 4 you cut a model in two, and each half waited while the other one worked. With eight stages, each rank
# would stand idle for seven eighths of the time.
#
# A pipeline cuts the batch as well. Its parts, the **micro-batches**, follow each other through the stages, so that
# all stages work at once. A **schedule** says which passes each rank runs, and in which order. It decides how long a
# step takes and how much memory it needs.
#
# In this chapter you write two schedules and run both on four ranks, by hand and with PyTorch. You also repair two
# mistakes that people make: wrongly scaled gradients, and neighbours that wait for each other. The notebook
# `05_pipeline_further` goes on with interleaved and zero-bubble schedules, and with some whose line runs down the
# ranks and up again.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch05 as figures
from course_utils.launch import RankFailure, launch
from course_utils.lesson import schedules
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.explore import Explorer
from course_utils.lesson.pace import at_pace
from course_utils.lesson.predictions import compare
from course_utils.lesson.schedules import Op
from course_utils.trace import Trace, kept_for_backward

hardware.report()

# %% [markdown]
# ## 1. The factory: no building waits for the whole batch
#
# Four buildings share a line: each has some of its stations. If a truck waited until a building had finished the
# whole batch, the next buildings would stand empty. So the material travels in boxes. As soon as the first building
# has finished box 0, a truck takes its half-finished parts to the second building, and the first one begins with box
# 1. Once it starts on box 3, all four are at work.
#
# At the end of the line the parts are inspected, and change notes go back the same way, box by box. To use a change
# note, a building needs the half-finished parts of that box. It keeps them on a shelf until the note arrives.

# %%
figures.assembly_line()
plt.show()

# %% [markdown]
# *Trucks carry half-finished parts to the right, and change notes come back to the left. The first building has the
# parts of four boxes on its shelf, the last one those of one box.*
#
# | new in the factory | in PyTorch | what it is |
# |---|---|---|
# | box | micro-batch | some rows of the batch, which travel together |
# | shelf | stored activations | what autograd keeps of a micro-batch until its backward pass |
#
# In the formulas, p is the number of stages and m the number of micro-batches.

# %% [markdown]
# ## 2. The smallest real run: two stages, four micro-batches
#
# The model is a line of eight equal layers. `stage_of(rank, stages)` builds only the layers of one rank. Every layer
# has its own seed, so `stage_of(0, 1)` builds the whole model in one process, with the same parameters.

# %%
LAYERS, WIDTH, ROWS = 8, 64, 32
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(ROWS, WIDTH, generator=generator)
targets = torch.randn(ROWS, WIDTH, generator=generator)


def layer(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def stage_of(rank, stages):
    size = LAYERS // stages
    layers = [layer(number) for number in range(rank * size, (rank + 1) * size)]
    return nn.Sequential(*layers).to(hardware.device())


# %% [markdown]
# The first stage sends the activations of each micro-batch to the last stage, and keeps them until their gradients
# come back: in the meantime the micro-batch is **in flight**.
#
# `timed(Op("F", i))` surrounds the forward pass of micro-batch i, and `timed(Op("B", i))` its backward pass. A forward
# pass lasts one **slot** of 20 ms and a backward pass two: the rank computes its layers, then sleeps for the rest of
# its slots. So two cores show what four devices would do. The title of such a figure says *emulated*.


# %%
def first_stage(stage, micro_batches, timed):
    in_flight = []
    for i, x in enumerate(micro_batches):
        with timed(Op("F", i)):
            activations = stage(x)
        dist.send(activations.detach(), dst=1)
        in_flight.append(activations)
    for i, activations in enumerate(in_flight):
        gradients = torch.empty_like(activations)
        dist.recv(gradients, src=1)
        with timed(Op("B", i)):
            activations.backward(gradients)


# %% [markdown]
# The last stage computes the loss. The loss of a micro-batch is a mean over only its own rows, so it is weighted by
# 1/m.


# %%
def last_stage(stage, micro_batches, timed):
    in_flight = []
    for i, target in enumerate(micro_batches):
        activations = torch.empty_like(target)
        dist.recv(activations, src=0)
        activations.requires_grad_()
        with timed(Op("F", i)):
            loss = mse_loss(stage(activations), target) / len(micro_batches)
        in_flight.append((activations, loss))
    for i, (activations, loss) in enumerate(in_flight):
        with timed(Op("B", i)):
            loss.backward()
        dist.send(activations.grad, dst=0)


# %%
def two_stages(rank, m):
    stage = stage_of(rank, 2)
    batch, run = (inputs, first_stage) if rank == 0 else (targets, last_stage)
    with Trace() as trace:
        timed = at_pace(trace, {"F": 1, "B": 2})
        run(stage, batch.to(hardware.device()).chunk(m), timed)
    return trace.record(), flat(p.grad for p in stage.parameters())


# %%
whole = stage_of(0, 1)  # one process, the whole batch
mse_loss(whole(inputs.to(hardware.device())), targets.to(hardware.device())).backward()
expected = flat(p.grad for p in whole.parameters())

records, gradients = zip(*launch(two_stages, 2, 4))
difference = check_equal(expected, [torch.cat(gradients)])
print("gradients, largest difference from one process:", difference)

# %%
plots.gantt({"While rank 1 has micro-batch 0, rank 0 has micro-batch 1 (emulated)": records})
plt.show()

# %% [markdown]
# *Light boxes are forward passes, dark boxes are backward passes, and the numbers are micro-batches. Rank 1 waits at
# the beginning and at the end, rank 0 in the middle.*
#
# A picture with a lane for each rank, and time from left to right, is a **Gantt chart**.

# %% [markdown]
# ## 3. Predict, then measure: bytes, the bubble and the shelf
#
# ### The bytes between two stages
#
# In that run rank 0 sent the activations of 4 micro-batches, in float32 numbers of 4 bytes. **Predict** how many bytes
# it sent, and how many it sends if the same batch is cut into 8 micro-batches.

# %% tags=["prediction"]
predicted = {"4 micro-batches": 32 * 64 * 4, "8 micro-batches": 32 * 64 * 4}

# %%
records_of_8, _ = zip(*launch(two_stages, 2, 8))
sent = {"4 micro-batches": records[0].sent("send"), "8 micro-batches": records_of_8[0].sent("send")}
print(f"for comparison, all gradients of the model: {4 * len(expected):,} bytes")
print("messages of rank 0:", records[0].count("send"), "and", records_of_8[0].count("send"))

# %%
compare(
    predicted,
    sent,
    likely={
        "Numbers, where bytes are asked for.": dict.fromkeys(predicted, 32 * 64),
        "The bytes of one micro-batch.": {
            "4 micro-batches": 8 * 64 * 4,
            "8 micro-batches": 4 * 64 * 4,
        },
        "As if each micro-batch had all 32 rows.": {
            "4 micro-batches": 4 * 32 * 64 * 4,
            "8 micro-batches": 8 * 32 * 64 * 4,
        },
    },
)

# %% [markdown]
# Smaller micro-batches make more messages, but the bytes stay the same, however many layers a stage has. Data
# parallelism would send the gradients of all layers. This is why a pipeline can run between nodes, where links are
# slow. (With more rows in a step a pipeline sends more, and data parallelism does not: see section 3 of
# `04_manual_split_further`.)
#
# ### A schedule is a list for each rank
#
# An **op** is one pass of one micro-batch through a stage: F3 is the forward pass of micro-batch 3, and B3 its backward
# pass. A schedule holds one list for each rank: the ops of this rank, in order. It holds no times. A rank works through
# its list and waits where an op needs something that has not arrived: F needs the activations of the stage before, B
# needs its own F and the gradients of the stage after.
#
# `simulate` plays a schedule with one unit of time for F and two for B, because a backward pass computes two
# gradients, of the inputs and of the weights. If a schedule cannot run, `first_illegal_move` says why.

# %%
one_by_one = [Op("F", 0), Op("B", 0), Op("F", 1), Op("B", 1)]
forward_first = [Op("F", 0), Op("F", 1), Op("B", 0), Op("B", 1)]

step = schedules.simulate([one_by_one, one_by_one]).makespan
print(f"both ranks one by one: {step:g} units")
print("mixed:", schedules.first_illegal_move([one_by_one, forward_first]))

# %% [markdown]
# Each list works on its own, but in the second schedule the ranks wait for each other: rank 0 wants the gradients of
# micro-batch 0 before it sends micro-batch 1, and rank 1 wants micro-batch 1 before its first backward pass.

# %% [markdown]
# ### 5.2 GPipe (2 points)
#
# In section 2 both ranks ran all forward passes first, and then all backward passes. This schedule is **GPipe**. Write
# it for any number of stages. `check` tests whether your schedule can run, simulates it, and compares its time with a
# limit. It draws your schedule if it is right. To see it earlier, run `plots.gantt(schedules.simulate(gpipe(4, 8)))`.


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
# ### The bubble
#
# Four stages run GPipe with eight micro-batches. Each rank works for 8 x (1 + 2) = 24 units and waits for the rest of
# the step. The step lasts from the first op of any rank to the end of the last one. **Predict** how many units rank 0
# waits, and how many rank 3.

# %% tags=["prediction"]
predicted = {"rank 0 waits": 9, "rank 3 waits": 9}

# %%
simulated = schedules.simulate(schedules.gpipe(4, 8), forward=1, backward=2)
waited = {}
for rank in (0, 3):
    ops = [op for op in simulated.spans if op.rank == rank]
    waited[f"rank {rank} waits"] = simulated.makespan - sum(op.end - op.start for op in ops)

# %%
compare(
    predicted,
    waited,
    likely={
        "The time before its first op alone.": {"rank 0 waits": 0, "rank 3 waits": 3},
        "The time after its last op alone.": {"rank 3 waits": 6},
        "Only the waiting for gradients. Rank 0 waits for the others' forward passes, too.": {
            "rank 0 waits": 6
        },
    },
)

# %%
plots.gantt({"GPipe: every rank waits for 9 of 33 units (simulated)": simulated})
plt.show()

# %% [markdown]
# *Rank 3 waits 3 units for its first micro-batch and 6 units at the end. Rank 0 begins at once, and then waits 9
# units for its first gradients.*
#
# Each rank waits for p - 1 forward passes and p - 1 backward passes of the other stages. This time is the **bubble**:
# $(p-1)(t_F + t_B)$, where $t_F$ and $t_B$ are the times of F and B.

# %% [markdown]
# ### 5.1 The bubble's share (1 point)
#
# What share of a step is the bubble? Give it as a share of the total time, from the first op to the last. F and B
# may take any time, as long as all stages are equal.
#
# The parameter `chunks` is for the interleaved schedule of the further notebook. There each rank holds `chunks` smaller
# pieces of the model in place of one stage. A rank then waits for passes through one piece, which take 1/`chunks` of
# the time.


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
# ### Two percentages of the same bubble
#
# Papers divide the bubble by either of two times. GPipe's authors take the total time of a step, which gives
# $(p-1)/(m+p-1)$ ([Huang et al. 2019](https://arxiv.org/abs/1811.06965), section 2.3). Megatron-LM's authors take the
# ideal time, in which no rank waits, and get $(p-1)/m$ ([Narayanan et al. 2021](https://arxiv.org/abs/2104.04473),
# section 2.2.1).

# %%
print(f"of the total time: {simulated.idle_share:.3f}, of the ideal time: {simulated.bubble}")

# %% [markdown]
# More micro-batches make the bubble smaller: with m = 4p it is less than a fifth of the total time. But the batch
# stays the same, so each micro-batch then has fewer rows, and a device computes small matrix products less
# efficiently.
#
# ### The shelf: GPipe and 1F1B
#
# GPipe has a second cost. When its first B begins, all m micro-batches are in flight, and every rank stores the
# activations of all of them.
#
# **1F1B** (one forward, one backward) turns back earlier: as soon as the first gradients can arrive, a rank runs one
# B after each F. The last rank, for instance, runs F0 B0 F1 B1 F2 B2. **Predict** for 4 stages: how many units does a
# step of 8 micro-batches take (33 under GPipe)? How many micro-batches are in flight on rank 0 at most, and on rank
# 3? And on rank 0 with 64 micro-batches?

# %% tags=["prediction"]
predicted = {
    "units of a step": 33,
    "in flight on rank 0": 4,
    "in flight on rank 3": 1,
    "on rank 0, 64 micro-batches": 4,
}

# %%
early = schedules.simulate(schedules.one_forward_one_backward(4, 8))
many = schedules.simulate(schedules.one_forward_one_backward(4, 64))
measured = {
    "units of a step": early.makespan,
    "in flight on rank 0": early.peak_in_flight[0],
    "in flight on rank 3": early.peak_in_flight[3],
    "on rank 0, 64 micro-batches": many.peak_in_flight[0],
}

# %%
compare(
    predicted,
    measured,
    likely={
        "The work of a rank, without its bubble.": {"units of a step": 24},
        "As under GPipe.": {
            "in flight on rank 0": 8,
            "in flight on rank 3": 8,
            "on rank 0, 64 micro-batches": 64,
        },
        "As if each F were followed by its own B at once. Only on the last rank is it so.": {
            "in flight on rank 0": 1
        },
        "As if eight times the micro-batches filled eight times the shelf.": {
            "on rank 0, 64 micro-batches": 32
        },
    },
)

# %%
figures.shelves({"GPipe": simulated, "1F1B": early})
plt.show()

# %% [markdown]
# *Above, what each rank does; below, how many micro-batches it has in flight at that time. Both steps take 33 units.
# Under GPipe every shelf fills up to 8. Under 1F1B the shelves hold 4, 3, 2 and 1.*
#
# 1F1B is not faster: rank 3 begins no earlier, and rank 0 gets its last gradients no earlier. It only needs less
# memory. From rank r to the end of the line there are p - r stages, rank r included. So p - r micro-batches are on
# their way when its first gradients return, and from then on each new F follows a B. The number m does not matter: you
# can add micro-batches to make the bubble smaller, and the memory stays the same. Long pipelines therefore run 1F1B or
# one of its successors.

# %% [markdown]
# ### 5.3 One forward, one backward (3 points)
#
# Write 1F1B. After a **warm-up** of some forward passes, a rank runs one F and one B in turn, and at the end it runs
# the B that remain. Each B frees what its F has stored. The length of the warm-up depends on the rank.


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
# ## 4. By hand, then with PyTorch: one loop runs both schedules
#
# The simulator says what should happen. Now four ranks do it. A `Stage` has the layers of one rank and its
# micro-batches in flight: `forward` adds a micro-batch, and `backward` takes it out again.


# %%
class Stage:
    def __init__(self, layers, inputs, targets):  # targets: on the last stage only
        self.layers, self.inputs, self.targets = layers, inputs, targets
        self.in_flight, self.peak = {}, 0

    def forward(self, i, activations):
        x = self.inputs[i] if activations is None else activations.requires_grad_()
        y = self.layers(x)
        if self.targets is not None:
            y = mse_loss(y, self.targets[i]) / len(self.targets)
        self.in_flight[i] = x, y
        self.peak = max(self.peak, len(self.in_flight))
        return y.detach()

    def backward(self, i, gradients):
        x, y = self.in_flight.pop(i)
        y.backward(gradients)  # None on the last stage, where y is the loss
        return x.grad


# %% [markdown]
# `run_schedule` works through the list of its rank: it receives what an op needs, computes, and sends the result. Two
# decisions keep every legal schedule running:
#
# * The rank sends with `isend`, which returns at once, and goes on with its list. The tensor is kept until it has
#   left.
# * Activations and gradients have a process group each. On a GPU, the messages of one group queue behind each other,
#   and a gradient must not wait behind activations that the next rank does not want yet.


# %%
def run_schedule(rank, schedule, m=8):
    last = dist.get_world_size() - 1
    x, y = (part.to(hardware.device()).chunk(m) for part in (inputs, targets))
    stage = Stage(stage_of(rank, last + 1), x, y if rank == last else None)
    forward = (stage.forward, rank - 1, rank + 1, dist.new_group())
    backward = (stage.backward, rank + 1, rank - 1, dist.new_group())
    sent = []
    with Trace() as trace:
        timed = at_pace(trace, {"F": 1, "B": 2})
        for op in schedule[rank]:
            run, source, destination, group = forward if op.kind == "F" else backward
            received = None
            if 0 <= source <= last:
                received = torch.empty_like(x[0])
                dist.recv(received, source, group)
            with timed(op):
                result = run(op.micro_batch, received)
            if 0 <= destination <= last:
                sent.append((result, dist.isend(result, destination, group)))
        for _, message in sent:
            message.wait()
    return trace.record(), flat(p.grad for p in stage.layers.parameters()), stage.peak


# %% [markdown]
# Have you solved 5.2 and 5.3? Then put your own two functions into `plans`.

# %%
plans = {"GPipe": schedules.gpipe(4, 8), "1F1B": schedules.one_forward_one_backward(4, 8)}
for name, plan in plans.items():
    records, gradients, peaks = zip(*launch(run_schedule, 4, plan))
    difference = check_equal(expected, [torch.cat(gradients)])
    print(f"{name}: largest difference {difference}, most in flight {list(peaks)}")

# %% [markdown]
# Both orders give the gradients of one process, and the shelves fill up as simulated. Here are the times of 1F1B:

# %%
panels = {"1F1B, simulated": early, "Four ranks do the same, box for box (emulated)": records}
plots.gantt(panels)
plt.show()

# %% [markdown]
# *The small gaps in the lower picture are what messages and the other work of the machine cost.*
#
# ### With PyTorch: `torch.distributed.pipelining`
#
# A `PipelineStage` has the layers of one rank, a schedule class has the order, and `step` runs it. The first rank
# passes the inputs, the last one the targets. PyTorch learns the shapes between the stages from the first micro-batch.
# (Older texts use `torch.distributed.pipeline`: that module is gone.)
#
# The loss function gives the mean over one micro-batch. At the end of a step the schedule divides all gradients by
# the number of micro-batches, unless `scale_grads` is False.

# %%
from torch.distributed import pipelining


def torch_run(rank, schedule_class, scale_grads=True):
    ranks, device = dist.get_world_size(), hardware.device()
    layers = stage_of(rank, ranks)
    stage = pipelining.PipelineStage(layers, rank, ranks, device)
    schedule = schedule_class(stage, 8, loss_fn=mse_loss, scale_grads=scale_grads)
    first = [inputs.to(device)] if rank == 0 else []
    last = {"target": targets.to(device)} if rank == ranks - 1 else {}
    schedule.step(*first, **last)
    return flat(p.grad for p in layers.parameters())


for schedule_class in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
    gradients = torch.cat(launch(torch_run, 4, schedule_class))
    print(f"{schedule_class.__name__}: largest difference", check_equal(expected, [gradients]))
gradients = torch.cat(launch(torch_run, 4, pipelining.Schedule1F1B, False))
print("scale_grads=False: largest difference", largest_difference(expected, [gradients]))

# %% [markdown]
# The further notebook lets PyTorch cut the model by itself, with `pipeline()`.
#
# ## 5. Break it: a loop that is no pipeline, wrong gradients, and two ranks that wait
#
# ### Bug hunt: chunks in a loop
#
# Some articles call the following module a pipeline, and say that it reduces peak memory. It cuts the batch into
# chunks and sends each of them through three stages on two GPUs. (The GPUs are comments here.)


# %%
class PipelineParallelModule(nn.Module):
    def __init__(self, split_size):
        super().__init__()
        self.stage1 = nn.Sequential(nn.Linear(20, 500), nn.ReLU())  # on "cuda:0"
        self.stage2 = nn.Sequential(nn.Linear(500, 500), nn.ReLU())  # on "cuda:1"
        self.stage3 = nn.Sequential(nn.Linear(500, 10))  # on "cuda:0"
        self.split_size = split_size

    def forward(self, x):
        outputs = []
        for chunk in x.split(self.split_size):
            outputs.append(self.stage3(self.stage2(self.stage1(chunk))))
        return torch.cat(outputs)


# %% [markdown]
# **Predict:** 128 rows go through the module in four chunks of 32. How many bytes does autograd keep for the backward
# pass, in per cent of what it keeps when all 128 rows go through at once?

# %% tags=["prediction"]
predicted = {"bytes kept, in per cent": 100}

# %%
kept_bytes, order = {}, []
for split_size in (128, 32):
    module = PipelineParallelModule(split_size)
    with kept_for_backward(module) as kept:
        module(torch.randn(128, 20))
    kept_bytes[split_size] = kept.bytes
for name, stage in module.named_children():
    stage.register_forward_hook(lambda *_, name=name: order.append(name))
module(torch.randn(128, 20))
print("order of the passes:", *order)

# %%
compare(
    predicted,
    {"bytes kept, in per cent": 100 * kept_bytes[32] / kept_bytes[128]},
    likely={
        "As if the backward pass of a chunk came right after it.": {"bytes kept, in per cent": 25}
    },
)

# %% [markdown]
# The backward pass begins after the loop, so autograd keeps the activations of all chunks until then. And the stages
# never work at the same time. A GPU works through its queue in order, even if Python runs ahead:
#
# ```
# cuda:0  | stage1, chunk 0 |                 | stage3, chunk 0 | stage1, chunk 1 |
# cuda:1  |                 | stage2, chunk 0 |                 |                 | stage2, chunk 1 |
# ```
#
# In the queue of `cuda:0`, stage 3 of chunk 0 comes before stage 1 of chunk 1, and has to wait for `cuda:1`. A pipeline
# needs a schedule: another order on each device.
#
# ### Bug hunt: the last micro-batch
#
# Gradient accumulation is usually written like this: each loss is divided by the number of micro-batches, so that the
# gradients add up to those of the whole batch. Does that work for 32 rows in micro-batches of 8? And for 30 rows?


# %%
def accumulate(model, batches):
    for x, y in batches:
        loss = mse_loss(model(x), y) / len(batches)
        loss.backward()


def both_ways(rows):
    x, y = (part[:rows].to(hardware.device()) for part in (inputs, targets))
    models = stage_of(0, 1), stage_of(0, 1)
    mse_loss(models[0](x), y).backward()
    accumulate(models[1], list(zip(x.split(8), y.split(8))))
    return [flat(p.grad for p in model.parameters()) for model in models]


at_once, accumulated = both_ways(rows=32)
print("32 rows: largest difference", check_equal(at_once, [accumulated]))
at_once, accumulated = both_ways(rows=30)
print("30 rows: largest difference", largest_difference(at_once, [accumulated]))

# %% [markdown]
# 30 rows leave a last micro-batch of 6 rows, and it still counts for a quarter of the loss. So each of its rows counts
# for 1/24, and each other row for 1/32. Nothing fails, and the loss goes down. The same mistake, with tokens in place
# of rows, was found in a well-known trainer in 2024 ([Fixing Gradient
# Accumulation](https://huggingface.co/blog/gradient_accumulation)). PyTorch's schedules divide by the number of
# micro-batches, too. So give them batches that divide into equal parts, for instance with `DataLoader(drop_last=True)`.

# %% [markdown]
# ### 5.5 The scale of micro-batch gradients (2 points)
#
# Repair the loop. `backward()` adds to `.grad`, so the gradients of the micro-batches add up by themselves. Find the
# scale that makes their sum the gradient of the mean loss over the whole batch, even if the last micro-batch is
# smaller.

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
# ### Both send first
#
# In the middle of 1F1B, two neighbours exchange tensors: one sends activations, the other gradients, and each needs
# what the other has.


# %%
def both_send_first(rank):
    mine = torch.empty(2**26, device=hardware.device())  # 268 MB
    theirs = torch.empty_like(mine)
    dist.send(mine, dst=1 - rank)
    dist.recv(theirs, src=1 - rank)


try:
    launch(both_send_first, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# With gloo, `send` returns when the other rank receives, and the other rank is waiting in its own `send`. Under
# torchrun both would wait until the time limit. With NCCL a small tensor still gets through, because it waits in a
# buffer: such a program runs until the model grows.

# %% [markdown]
# ### 5.6 A stage and its two neighbours (3 points)
#
# A stage in the middle of the line hands activations to the next rank and gradients to the previous one, while its
# neighbours do the same. Write this exchange so that no rank waits for ever. The function runs on every rank.
#
# Gradients that come back have the shape and dtype of the activations that went out. Activations that come in have
# the shape and dtype of the gradients that go back for them.


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
# ## 6. Exercises: where they stand
#
# | exercise | points | section |
# |---|---|---|
# | 5.1 The bubble's share | 1 | 3 |
# | 5.2 GPipe | 2 | 3 |
# | 5.3 One forward, one backward | 3 | 3 |
# | 5.5 The scale of micro-batch gradients | 2 | 5 |
# | 5.6 A stage and its two neighbours | 3 | 5 |
#
# Exercise 5.4, the interleaved schedule, is in the further notebook. `hint("5.3")` gives the next hint for 5.3.

# %% [markdown]
# ## 7. See it: a pipeline under your hands
#
# Move one slider at a time. The **hop latency** is the time from the end of an op until its result reaches the next
# rank, measured in forward passes.
#
# * Add micro-batches. What becomes smaller, and under which schedule does memory grow?
# * Compare both schedules while you raise the hop latency. 1F1B exchanges in every turn, so it waits more often.
# * Make the last stage slower; in a language model the head does that. All other ranks wait for it, and more
#   micro-batches help very little.

# %%
SCHEDULES = {"GPipe": schedules.gpipe, "1F1B": schedules.one_forward_one_backward}


def draw(schedule, stages, micro_batches, **times):
    plans = {name: make(stages, micro_batches) for name, make in SCHEDULES.items()}
    return figures.compared(plans, schedule, **times)


sizes = {"stages": (2, 8, 4), "micro_batches": (1, 24, 8)}
times = {"last_stage": (1.0, 2.0, 1.0), "hop_latency": (0.0, 1.0, 0.1)}
Explorer(draw, schedule=list(SCHEDULES), **sizes, **times)

# %% [markdown]
# *At the start: GPipe with four stages and a hop latency of 0.1. Below, the idle share of both schedules, and the
# micro-batches that each rank stores under the chosen one.*

# %% [markdown]
# ## 8. On a cluster: the same pipeline under torchrun
#
# The script trains the line of eight layers with `torch.distributed.pipelining`, one stage for each process that
# torchrun starts. At the end rank 0 collects the parameters of all stages and saves them.

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


def layer(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh())


gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpu else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

numbers = range(rank * 8 // ranks, (rank + 1) * 8 // ranks)  # the layers of this rank
layers = nn.Sequential(*[layer(number) for number in numbers]).to(device)
torch.manual_seed(8)
inputs, targets = torch.randn(2, 32, 64).tanh().to(device)

schedule = Schedule1F1B(PipelineStage(layers, rank, ranks, device), 8, loss_fn=mse_loss)
optimizer = torch.optim.SGD(layers.parameters(), lr=1.0)
history = []
for _ in range(20):
    optimizer.zero_grad()
    losses = []
    first = [inputs] if rank == 0 else []
    last = {"target": targets, "losses": losses} if rank == ranks - 1 else {}
    schedule.step(*first, **last)
    optimizer.step()
    history.append(sum(loss.item() for loss in losses) / 8)

if rank == ranks - 1:  # only the last stage knows the loss
    print(f"{ranks} stages, 20 steps: loss {history[0]:.2f}, then {history[-1]:.2f}")
parts = [None] * ranks if rank == 0 else None
dist.gather_object([p.detach().cpu() for p in layers.parameters()], parts)
if rank == 0:
    torch.save([parameter for part in parts for parameter in part], sys.argv[1])
dist.destroy_process_group()

# %%
print(torchrun(2, script, result), end="")

model = stage_of(0, 1)  # one process, without micro-batches
torch.manual_seed(8)
x, y = torch.randn(2, 32, WIDTH).tanh().to(hardware.device())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for _ in range(20):
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
saved = flat(torch.load(result, weights_only=True))
print("parameters, largest difference:", check_equal(flat(model.parameters()), [saved]))

# %% [markdown]
# On two nodes of 4 GPUs the pipeline has 8 stages, of one layer each. Start the same script on both nodes:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 \
#     pipeline.py result.pt
# ```
#
# What changes there:
#
# * Neighbouring stages should be neighbouring GPUs, so that only one boundary crosses the slow link between the
#   nodes.
# * If the model is large, each rank builds only its own layers, as `stage_of` does, or builds the whole model on the
#   meta device, without data, and fills in only its own layers.
# * NCCL matches messages by their order: a rank has to receive in the order in which its neighbour sends.
# * With data parallelism around the pipeline (chapter 7), gradients are averaged once in a step, after the last
#   micro-batch. DDP and FSDP average in every backward pass unless told not to (`no_sync`,
#   `set_requires_gradient_sync`); `PipelineStage` tells them.

# %% [markdown]
# ## 9. Remember
#
# 1. A pipeline needs several ranks, and micro-batches that follow each other. A loop over chunks is not enough.
# 2. The bubble of GPipe and 1F1B is (p - 1)/m of the ideal time, and (p - 1)/(m + p - 1) of the total time.
# 3. GPipe stores m micro-batches on each rank, 1F1B at most p - r on rank r, in the same time.
# 4. Each micro-batch counts with its share of the rows. Test it with gradients or SGD: Adam hides a wrong factor.
# 5. Neighbours that exchange start all messages first (`isend`, `irecv`), and wait afterwards.
#
# **Sources**
#
# * Y. Huang et al., *GPipe*, NeurIPS 2019, [arXiv 1811.06965](https://arxiv.org/abs/1811.06965): sections 2.2 and
#   2.3. (The paper stores only the inputs of a stage and computes its activations again.)
# * D. Narayanan et al., *Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM*, SC 2021,
#   [arXiv 2104.04473](https://arxiv.org/abs/2104.04473): section 2.2.1.
# * PyTorch: [`torch.distributed.pipelining`](https://docs.pytorch.org/docs/stable/distributed.pipelining.html),
#   [`isend`, `irecv`](https://docs.pytorch.org/docs/stable/distributed.html#point-to-point-communication).
