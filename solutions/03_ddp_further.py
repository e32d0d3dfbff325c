# %% [markdown]
# # 3. Distributed data parallel, further: overlap, accumulation, and ranks that differ
#
# The lesson made copies that stay equal. This notebook is about what comes up once that works: gradients that are
# added up before they travel, communication on the clock, a rank that runs out of data, batches that grow with the
# ranks, a layer that looks at its whole batch, a parameter that no loss uses, and a hang without `launch` to explain
# it. You also write the machinery of DDP yourself.
#
# Run the parts in their order: some use what an earlier one defines. None needs an answer from the lesson.

# %% tags=["nbval-ignore-output"]
import time
from contextlib import nullcontext

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils import hardware, plots
from course_utils.launch import RankFailure, launch
from course_utils.lesson import mnist
from course_utils.lesson.equality import check_equal, flat, largest_difference

hardware.report()

# %% [markdown]
# ## 1. The factory: trucks that leave before the evening
#
# In the lesson the trucks left in the evening. But the notes on the last station of the line are ready hours before
# those on the first, because the notes are written from the last station back to the first. So each truck leaves as
# soon as it is full, and the building goes on writing while the truck travels. Small trucks leave early, and each
# trip costs time. A single large truck leaves last, and all buildings wait for it.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a truck leaves when it is full | overlap | the all-reduce of a bucket runs while backward goes on |
# | several shifts, one round of trucks | **gradient accumulation** | several backward passes before one exchange |
# | a building without material joins the round with blank notes | **`Join`** | a rank that has finished takes part with zeros |
#
# ## 2. The smallest real run: one step, four ranks, the gradient of one process
#
# All parts of this notebook train the network of the lesson, on the same global batches.

# %%
from torch.nn.functional import cross_entropy
from torch.utils.data import DistributedSampler

from course_utils.lesson.models import MnistNet

STEPS, GLOBAL_BATCH, LEARNING_RATE = 60, 128, 0.2
images, labels = mnist.tensors(train=True, limit=STEPS * GLOBAL_BATCH)


def my_batches(rank, world_size):
    sampler = DistributedSampler(images, num_replicas=world_size, rank=rank, seed=0)
    return torch.tensor(list(sampler)).split(GLOBAL_BATCH // world_size)


def new_model():
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    return MnistNet().to(hardware.device())


# %%
def loss_of(model, rows):
    device = hardware.device()
    return cross_entropy(model(images[rows].to(device)), labels[rows].to(device))


def gradient_of(rank):
    model = DDP(new_model())
    loss_of(model, my_batches(rank, dist.get_world_size())[0]).backward()
    return flat(p.grad for p in model.parameters())


model, whole = new_model(), my_batches(0, 1)
loss_of(model, whole[0]).backward()
expected = flat(p.grad for p in model.parameters())
four_ranks = launch(gradient_of, 4)
print("largest difference of a gradient from one process:", check_equal(expected, four_ranks))

# %% [markdown]
# ## 3. Predict, then measure: what accumulation saves
#
# If the batch that you want does not fit into memory, cut it into **micro-batches** and let `backward` add their
# gradients up before one `step`. That is **gradient accumulation**. DDP does not know that you wait: it averages
# after every `backward`. Under `model.no_sync()` a pass, forward and backward, keeps its gradients to itself. The next
# backward outside of it sends the sum.
#
# **Predict.** MnistNet has 39,760 parameters of 4 bytes. A step has 4 micro-batches. How many bytes does each rank
# hand to `all_reduce` in one step, without and with `no_sync`?

# %%
from course_utils.trace import Trace


def accumulate(rank, patient, micro_batches=4):
    model = DDP(new_model())
    shares = my_batches(rank, dist.get_world_size())[0].chunk(micro_batches)
    with Trace() as trace:
        for number, rows in enumerate(shares, 1):
            silent = patient and number < micro_batches
            with model.no_sync() if silent else nullcontext():
                (loss_of(model, rows) / micro_batches).backward()  # the mean over micro-batches
    return trace.record().sent("all_reduce"), flat(p.grad for p in model.parameters())


# %% tags=["prediction"]
predicted = {"without no_sync": 4 * 39_760 * 4, "with no_sync": 39_760 * 4}

# %%
from course_utils.lesson.predictions import compare

measured = {}
for name, patient in [("without no_sync", False), ("with no_sync", True)]:
    (measured[name], gradient), *_ = launch(accumulate, 2, patient)
    print(f"{name}, largest difference from one process: {check_equal(expected, [gradient])}")

# %%
compare(
    predicted,
    measured,
    {
        "As if the average were made once, at the step: it is made in every backward.": {
            "without no_sync": 39_760 * 4
        },
        "As if the last backward were silent too: it sends the sum.": {"with no_sync": 0},
    },
)

# %% [markdown]
# The gradient is the same, and three quarters of the bytes are saved. Note the division by the number of
# micro-batches. Without it the gradient is 4 times too large, and an optimizer such as Adam hides that, as section 5
# of the lesson shows.
#
# ## 4. By hand, then with PyTorch: the clock, ranks that run out, large batches
#
# ### Overlap on the clock
#
# The lesson's list of events shows that DDP sends full buckets while backward goes on. Does that save time? On a CPU
# an all-reduce and a matrix product want the same cores, so overlap gains nothing there. On a GPU they mostly do not.
# The next cell emulates such a device: the backward of each of 8 layers is a pause of 20 ms, in which the cores
# are free. The all-reduces are real. They run once with a bucket for each layer, and once with a single bucket.

# %%
PAUSE = 0.02  # seconds that the device computes for a layer


def timed_steps(rank, bucket_cap_mb):
    device = hardware.device()
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(8)]  # 16 MiB of gradients each
    for layer in layers:
        layer.register_full_backward_pre_hook(lambda *_: time.sleep(PAUSE))
    model = DDP(nn.Sequential(*layers).to(device), bucket_cap_mb=bucket_cap_mb)
    x, records = torch.randn(8, 2048, device=device), []
    for _ in range(8):
        dist.barrier()  # both ranks begin a step together
        with Trace() as trace:
            with trace.span("forward"):
                loss = model(x).sum()
            with trace.span("backward"):
                loss.backward()
        records.append(trace.record())
    return records[2:]  # the first two warm up and lay out the buckets


# %%
steps = {name: launch(timed_steps, 2, cap) for name, cap in [("8 buckets", 16), ("1 bucket", 1000)]}
for name, of_rank in steps.items():
    record = of_rank[0][-1]
    calls, sent = record.count("all_reduce"), record.sent("all_reduce")
    print(f"{name}: calls of all_reduce: {calls}, bytes: {sent:,}")


# %%
def duration(step):
    return max(span.end for record in step for span in record.spans)


fastest = {name: min(zip(*of_rank), key=duration) for name, of_rank in steps.items()}
titles = (
    "8 buckets (emulated): most all-reduces run beside backward",
    "1 bucket (emulated): the all-reduce comes after backward",
)
plots.timelines(dict(zip(titles, fastest.values())))
plt.show()

# %% tags=["nbval-ignore-output"]
ratio = duration(fastest["8 buckets"]) / duration(fastest["1 bucket"])
print(f"time of a step, 8 buckets to 1 bucket: {ratio:.2f}")

# %% [markdown]
# *The narrow lane under each rank shows the all-reduces. Above, they run beside backward, and only the last one ends
# after it. Below, the lane is empty until the last gradient is computed, and both ranks wait, hatched, for one long
# all-reduce.*
#
# The bytes are the same, only their time differs.
#
# ### A profile: which rank keeps the others waiting?
#
# `Trace` is this course's. For your own training there is `torch.profiler`. Its **profile** notes when each operator
# began and ended, in each thread, and `record_function` adds names of your own. It costs time and memory, so its
# `schedule` leaves steps out: below, one is not looked at, one warms the profiler up, and three are kept. Each rank
# writes a file. Four ranks train on the CPU, also where there are GPUs, and rank 2 has a slow loader.

# %%
from torch.profiler import profile, record_function, schedule

from course_utils.lesson.terminal import scratch

SLOW, KEPT = 2, 3  # a rank; steps


def write_profile(rank, folder):
    torch.set_num_threads(1)
    layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]  # 1 MiB of gradients each
    model, x = DDP(nn.Sequential(*layers), bucket_cap_mb=1), torch.randn(64, 512)
    steps = schedule(wait=1, warmup=1, active=KEPT)
    with profile(schedule=steps, acc_events=True) as profiler:  # PyTorch 2.11 warns without it
        for _ in range(2 + KEPT):
            with record_function("load"):
                time.sleep(0.2 if rank == SLOW else 0.01)
            model(x).sum().backward()
            profiler.step()
    file = folder / f"profile_{rank}.json"
    profiler.export_chrome_trace(str(file))
    return file.name


print(*launch(write_profile, 4, scratch()))

# %% [markdown]
# Take one of the files `scratch/profile_0.json` to `profile_3.json` to [ui.perfetto.dev](https://ui.perfetto.dev), a
# page that draws it; the file stays in your browser. You see a lane for each thread, and operators inside of
# operators. The file is plain JSON, so a few lines of Python can look at all ranks at once, which nobody can do by
# eye for 1,024.

# %%
import json


def spans_of(rank, *names):
    """When the events with one of these names began and ended on a rank, in seconds."""
    events = json.loads((scratch() / f"profile_{rank}.json").read_text())["traceEvents"]
    kept = [event for event in events if event["ph"] == "X" and event["name"].endswith(names)]
    return sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in kept)


# %% [markdown]
# **Predict.** How many all-reduces are in rank 0's file? Add up the seconds between begin and end of a rank's
# all-reduces. On how many ranks is the sum larger than on rank 2, the slow one?

# %% tags=["prediction"]
predicted = {"all-reduces in rank 0's file": 8 * 3, "ranks whose sum is larger": 3}

# %%
sums = [sum(end - begin for begin, end in spans_of(rank, ":all_reduce")) for rank in range(4)]
measured = {
    "all-reduces in rank 0's file": len(spans_of(0, ":all_reduce")),
    "ranks whose sum is larger": sum(seconds > sums[SLOW] for seconds in sums),
}

# %%
compare(
    predicted,
    measured,
    {
        "As if a step had one: each bucket has one, and each of the 8 layers fills a bucket.": {
            "all-reduces in rank 0's file": 3
        },
        "As if the slow rank communicated longest: it comes last, and nobody keeps it waiting.": {
            "ranks whose sum is larger": 0
        },
    },
)

# %%
from course_utils.trace import Record, Span


def last_step(rank, origin):
    """A Record of what a rank's profile says of its last step."""
    names = {
        "load": spans_of(rank, "load"),
        "forward": spans_of(rank, "DistributedDataParallel.forward"),
        "backward": spans_of(rank, "MmBackward0"),
        "communication": spans_of(rank, ":all_reduce"),
    }
    spans = []
    for name, found in names.items():
        background = name == "communication"
        for begin, end in found:
            if end > origin:
                times = max(begin - origin, 0), end - origin
                kind = name if background else "compute"
                spans.append(Span(kind, name, *times, background=background))
    return Record(rank, spans)


# %%
# the last step begins with the first of the ranks' last loads
origin = min(max(spans_of(rank, "load"))[0] for rank in range(4))
steps = [last_step(rank, origin) for rank in range(4)]
plots.timeline(steps, title="Three ranks' all-reduces are long: they wait for rank 2")
plt.show()

# %% [markdown]
# *Ranks 0, 1 and 3 compute without waiting, and their all-reduces last until rank 2 has come. Rank 2 loads for 200 ms
# and computes last, and its own all-reduces are short.*
#
# So a long all-reduce says little about the links. The rank that everybody waits for is the one with the least time
# in collectives, and with 1,024 ranks you find it by sorting that number. Whatever it does instead is what you have
# to fix: here a loader, and no faster link would help. Of the remaining communication, count only the **exposed**
# part, during which the rank computes nothing.
#
# In the profile of a GPU, what computes are its kernels (`event["cat"] == "kernel"`), and NCCL's begin with
# `ncclDevKernel`. [HTA](https://hta.readthedocs.io/) does this count for whole clusters.

# %% [markdown]
# ### 3.8 Where the time of a step goes (2 points)
#
# A few lines of code turn a profile into a diagnosis. Write the function that takes the spans of a step apart. When
# it passes, try it on your own profile: `where_time_goes(max(spans_of(0, "ProfilerStep#4")), spans_of(0, "aten::mm"),
# spans_of(0, ":all_reduce"))`.

# %%
from itertools import pairwise

from course_exercises import check, hint

Interval = tuple[float, float]  # begin and end, in seconds


# %% nbgrader={"grade_id": "3.8", "solution": true}
def where_time_goes(
    step: Interval, computing: list[Interval], communicating: list[Interval]
) -> dict[str, float]:
    """Returns the seconds of one step of a rank by what they went for.

    `computing` and `communicating` come in any order, may be empty, and may reach beyond the step.
    Spans of one list may overlap, or lie inside each other as operators do.

        "compute"    it computes, whatever else it does
        "hidden"     it communicates, and computes beside it
        "exposed"    it communicates, and does not compute
        "idle"       neither

    compute + exposed + idle is the whole step.
    """
    ### BEGIN SOLUTION
    edges = {point for span in (step, *computing, *communicating) for point in span}
    edges = sorted(point for point in edges if step[0] <= point <= step[1])
    seconds = dict.fromkeys(("compute", "hidden", "exposed", "idle"), 0.0)
    for left, right in pairwise(edges):  # nothing begins or ends between two edges
        computes, communicates = (
            any(begin <= left and right <= end for begin, end in spans)
            for spans in (computing, communicating)
        )
        if computes:
            seconds["compute"] += right - left
        if communicates:
            seconds["hidden" if computes else "exposed"] += right - left
        elif not computes:
            seconds["idle"] += right - left
    return seconds
    ### END SOLUTION


# %% nbgrader={"grade_id": "3.8-check", "grade": true, "points": 2, "locked": true}
check("3.8", where_time_goes)

# %% [markdown]
# ### 3.4 DDP that overlaps (5 points)
#
# The machinery of DDP, in one class. It is the longest exercise of the chapter: plan an evening for it.
#
# With `average_gradients` of 3.1 the links rest while backward runs, and then every rank rests while the links work.
# DDP starts earlier. Backward computes the last layer's gradients first. As soon as a **bucket** of gradients is
# complete, DDP starts its all-reduce with `async_op=True` and lets backward go on.
#
# Three things decide whether the result is right:
#
# * **Order.** All ranks start the same all-reduces in the same order, even if on one rank the gradients are ready in
#   a different order, or some do not come at all.
# * **Unused parameters.** A bucket with a parameter that the loss did not use never fills by itself. Where only some
#   ranks used a parameter, its gradient counts as zero on the others. Where none did, its `.grad` stays `None`.
# * **Accumulation.** Under `no_sync()` every rank adds up its own gradients and sends nothing. The next backward
#   outside averages the whole sum.
#
# After `parameter.register_post_accumulate_grad_hook(function)`, PyTorch calls `function(parameter)` each time that
# backward has finished this parameter's `.grad`.
#
# Do not write it in one go. Climb in four steps, and run the check after each: it continues past a failed line, so it
# shows on which step you stand. `hint("3.4")` prints the next of three hints.
#
# | step | what you add | lines of the check that hold from here on |
# |---|---|---|
# | 1. per parameter | the broadcast; at the end, an all-reduce for each gradient, as in 3.1 | the start, the mean on two and three ranks, `no_sync()` sends nothing and the whole sum is averaged after it, frozen, tied, unused |
# | 2. flat | at the end, one all-reduce of all gradients in one vector | no new one: fewer and larger messages, still after backward |
# | 3. asynchronous | a hook for each parameter starts its all-reduce; at the end, only `wait` | all-reduces start while backward still runs, backward does not wait |
# | 4. bucketed | hooks fill buckets; a full one leaves when all before it have left | buckets of `bucket_bytes`, `no_sync()` within `no_sync()`, a parameter that only some ranks used |

# %%
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace


# %% nbgrader={"grade_id": "3.4", "solution": true}
class OverlappedDDP(nn.Module):
    """Averages the gradients of `module` over all ranks while backward is still running.

    Constructed on every rank around modules of the same architecture. After construction every rank
    has rank 0's parameters and buffers. One step of training:

        loss_function(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()

    Gradients travel in buckets of at most `bucket_bytes` bytes, the last layer's first; a larger
    parameter has a bucket to itself. Parameters that are frozen at construction are left alone.
    Built from hooks and collectives, without DistributedDataParallel.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 * 2**20) -> None:
        """Broadcasts rank 0's parameters and buffers, and prepares the buckets and hooks."""
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.synchronize = True
        self.buckets: list[SimpleNamespace] = []  # in the order in which backward fills them
        group, size = [], 0
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            full = size + parameter.nbytes > bucket_bytes
            if group and (full or parameter.dtype != group[0].dtype):
                self._add_bucket(group)
                group, size = [], 0
            group.append(parameter)
            size += parameter.nbytes
        if group:
            self._add_bucket(group)

    def _add_bucket(self, parameters: list[nn.Parameter]) -> None:
        # One flat buffer: the gradients, then for each parameter how many ranks have a gradient.
        sizes = [parameter.numel() for parameter in parameters]
        buffer = parameters[0].new_empty(sum(sizes) + len(sizes))
        *parts, users = buffer.split([*sizes, len(sizes)])
        views = [part.view_as(parameter) for part, parameter in zip(parts, parameters)]
        bucket = SimpleNamespace(parameters=parameters, buffer=buffer, views=views, users=users)
        bucket.missing, bucket.work = len(parameters), None
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, bucket))
        self.buckets.append(bucket)

    def _gradient_ready(self, bucket: SimpleNamespace, parameter: nn.Parameter) -> None:
        if not self.synchronize:
            return
        if bucket.work is not None:
            raise RuntimeError("backward() again before finish_gradient_synchronization().")
        bucket.missing -= 1
        for following in self.buckets:  # in order: the buckets must match on all ranks
            if following.missing:
                break
            if following.work is None:
                self._start(following)

    def _start(self, bucket: SimpleNamespace) -> None:
        bucket.users.copy_(torch.tensor([p.grad is not None for p in bucket.parameters]))
        for parameter, view in zip(bucket.parameters, bucket.views):
            if parameter.grad is None:
                view.zero_()
            else:
                torch.div(parameter.grad, dist.get_world_size(), out=view)
                parameter.grad = view  # the mean arrives in place: nothing to copy back
        bucket.work = dist.all_reduce(bucket.buffer, async_op=True)
        ### END SOLUTION

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self) -> None:
        """Returns when every gradient is the mean over all ranks; call it before the optimizer."""
        ### BEGIN SOLUTION
        for bucket in self.buckets:
            if bucket.work is None:  # a parameter was not used
                self._start(bucket)
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.missing, bucket.work = len(bucket.parameters), None
            for parameter, view, users in zip(bucket.parameters, bucket.views, bucket.users):
                if parameter.grad is None and users > 0:  # used, but on other ranks only
                    parameter.grad = view
        ### END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within `with model.no_sync():`, backward adds up local gradients and sends nothing. After the
        block, even if an exception ended it, everything is as before: inside another one, still
        nothing is sent."""
        ### BEGIN SOLUTION
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before  # still False where this block stands inside another
        ### END SOLUTION


# %% nbgrader={"grade_id": "3.4-check", "grade": true, "points": 5, "locked": true}
check("3.4", OverlappedDDP)

# %% [markdown]
# ### When one rank has fewer batches: `Join`
#
# The sampler pads, so that all ranks take equally many steps. Where each rank reads its own file, one rank may have 5
# batches and another 4. In the fifth step rank 0 waits in an all-reduce that rank 1 never calls. Under torchrun it
# waits silently until a time limit (10 minutes with NCCL, 30 with gloo), or until gloo sees that rank 1's process has
# ended. `launch` finds out after a few seconds that nobody can go on.


# %%
def uneven_batches(rank):
    model = DDP(new_model())
    for rows in my_batches(rank, 2)[: 5 - rank]:  # rank 0 has 5 batches, rank 1 has 4
        loss_of(model, rows).backward()


try:
    launch(uneven_batches, 2)
except RankFailure as failure:
    print(failure)

# %% [markdown]
# The repair is the context manager `Join`: a rank that has finished **shadows** the collectives of the others with
# zeros, until all have finished.

# %%
from torch.distributed.algorithms.join import Join


def uneven_with_join(rank, divide_by_initial=True):
    model = DDP(new_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    history = []
    with Join([model], divide_by_initial_world_size=divide_by_initial):
        for rows in my_batches(rank, 2)[: 5 - rank]:
            history.append(flat(model.parameters()))
            optimizer.zero_grad()
            loss_of(model, rows).backward()
            optimizer.step()
    return len(history), history[-1], flat(model.parameters())


(steps_0, before, after_0), (steps_1, _, after_1) = launch(uneven_with_join, 2)
print(f"rank 0 took {steps_0} steps, rank 1 took {steps_1}")
print("largest difference between the ranks:", check_equal(after_0, [after_1]))

# %% [markdown]
# How much does the last batch count? By default `Join` still divides by the number of ranks at the start, as if the
# missing rank had sent zeros. With `divide_by_initial_world_size=False` it divides by the number of ranks that still
# have data.

# %%
_, before_too, after_too = launch(uneven_with_join, 2, False)[0]
halved, whole_step = (after_0 - before).norm(), (after_too - before_too).norm()
print(f"the last step by default, as a share of that with False: {halved / whole_step:.2f}")

# %% [markdown]
# With `False` the last step is that of one process on the rows that are left. If you want full batches in every step,
# give all ranks equally many rows: `drop_last=True` of the sampler cuts instead of padding
# ([`Join`](https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html)).
#
# ### Batch size and learning rate
#
# So far the global batch stayed the same, and each rank's share shrank. In practice people keep the share and let the
# global batch grow: n ranks with 32 rows each make a batch of 32 n. An epoch then has n times fewer steps, and with
# the same learning rate the model travels less far. Because a parallel run equals one process on the global batch,
# you can study this in the kernel.

# %%
train_images, train_labels = mnist.tensors(train=True, limit=8192)
test_images, test_labels = mnist.tensors(train=False)


def losses(global_batch, learning_rate):
    """Test loss after every 1,024 images."""
    model, values = new_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    device = hardware.device()
    for start in range(0, len(train_images), global_batch):
        rows = slice(start, start + global_batch)
        loss = cross_entropy(model(train_images[rows].to(device)), train_labels[rows].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (start + global_batch) % 1024 == 0:
            with torch.no_grad():
                output = model(test_images[:2000].to(device))
                values.append(cross_entropy(output, test_labels[:2000].to(device)).item())
    return values


# %%
curves = {
    "1 rank, batch 32, rate 0.05": losses(32, 0.05),
    "4 ranks, batch 128, rate 0.05": losses(128, 0.05),
    "4 ranks, batch 128, rate 0.2": losses(128, 0.2),
    "16 ranks, batch 512, rate 0.8": losses(512, 0.8),
}
for name, values in curves.items():
    print(f"{name}: test loss {values[-1]:.2f} at the end")

# %%
figure = plots.loss_curves(curves, title="Four times the batch needs four times the rate")
figure.axes[0].set(xlabel="images seen, in units of 1,024", ylabel="test loss", ylim=(0, 3.2))
plt.show()

# %% [markdown]
# *Four ranks with the old rate lag far behind. Four ranks with four times the rate follow the curve of one rank.
# Sixteen ranks with sixteen times the rate zigzag.*
#
# This is the **linear scaling rule**: batch times k, rate times k ([Goyal et al.
# 2017](https://arxiv.org/abs/1706.02677), section 2.1). It is a rule of thumb with a limit. Where k steps of the
# small run would have changed the gradient a lot, one step that is k times as long overshoots. Warming the rate up
# over the first epochs moves the limit (section 2.2 there).
#
# ### BatchNorm looks at its own rank only
#
# The contract has a condition: the loss of a row must not depend on the other rows. **Batch normalisation** breaks
# it. It subtracts the mean of the batch, and a rank sees its own share only.


# %%
def normalised(normalisation):
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(784, 50), normalisation(50), nn.ReLU(), nn.Linear(50, 10)
    return nn.Sequential(*layers).to(hardware.device())


def gradient_and_buffers(rank, normalisation):
    model = DDP(normalised(normalisation))
    loss_of(model, my_batches(rank, dist.get_world_size())[0]).backward()
    return flat(p.grad for p in model.parameters()), [flat([b]) for b in model.buffers()]


# %%
for normalisation in (nn.LayerNorm, nn.BatchNorm1d):
    model = normalised(normalisation)
    loss_of(model, whole[0]).backward()
    reference = flat(p.grad for p in model.parameters())
    gradients, buffers = zip(*launch(gradient_and_buffers, 4, normalisation))
    print(f"{normalisation.__name__}, largest difference")
    print("    of a gradient, from one process:", largest_difference(reference, gradients))
    of_buffers = [largest_difference(each[0], each) for each in zip(*buffers)]
    print("    of a buffer, between the ranks: ", max(of_buffers, default="it has none"))

# %% [markdown]
# Layer normalisation works within a row and keeps the contract. With batch normalisation the gradient is another one,
# and each rank has its own running mean and variance. At the start of the next forward DDP copies rank 0's buffers to
# all, so what ranks 1 to 3 have seen is lost (`broadcast_buffers=True`).
#
# With large shares this does little harm. With a few rows a rank, the statistics become noise. The repair is to
# all-reduce the sums inside the layer. On GPUs `nn.SyncBatchNorm.convert_sync_batchnorm(model)` does it, with one more
# collective in forward and one in backward for every such layer.

# %% [markdown]
# ## 5. Break it: a parameter without a gradient, and a hang without `launch`
#
# ### A parameter that the loss does not use
#
# The network below has two heads. Rank 0 trains the one for digits, rank 1 the one for odd and even. DDP waits for
# the gradients of all parameters, and on each rank some never come.


# %%
class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(784, 20)
        self.digit = nn.Linear(20, 10)
        self.parity = nn.Linear(20, 2)

    def forward(self, images, head):
        return getattr(self, head)(torch.relu(self.body(images.flatten(1))))


# %%
def train_two_heads(rank, find_unused=False):
    torch.manual_seed(0)
    device = hardware.device()
    model = DDP(TwoHeads().to(device), find_unused_parameters=find_unused)
    head, targets = [("digit", labels), ("parity", labels % 2)][rank]
    for rows in my_batches(rank, 2)[:2]:
        model.zero_grad()
        output = model(images[rows].to(device), head)
        cross_entropy(output, targets[rows].to(device)).backward()
    return flat([model.module.parity.weight.grad])


# %%
def error_of_two_heads(rank):
    try:
        train_two_heads(rank)
    except RuntimeError as error:
        return str(error)


errors = launch(error_of_two_heads, 2)
print(errors[0].split(". ")[0])
for error in errors:
    print(next(line for line in error.splitlines() if line.startswith("Parameter indices")))

# %% [markdown]
# The error comes one step late, at the second forward: only then does DDP see that the first step never finished. The
# whole text is longer and offers you `find_unused_parameters=True`. First find out which parameters they are. The
# numbers are positions in `model.parameters()`.

# %%
names = [name for name, _ in TwoHeads().named_parameters()]
print("unused on rank 0:", names[4:6])
print("unused on rank 1:", names[2:4])

# %% [markdown]
# `find_unused_parameters=True` makes DDP walk through the graph after every forward and count missing gradients as
# zeros. It costs that walk and one more small all-reduce in every step, so set it only where the graph really
# changes. **Predict**: rank 1 alone trained the head for odd and even. Which share of its gradient do both ranks get?

# %% tags=["prediction"]
predicted = {"share of rank 1's gradient": 0.5}


# %%
def own_gradient():
    torch.manual_seed(0)
    model = TwoHeads()
    rows = my_batches(1, 2)[1]  # rank 1, second step
    cross_entropy(model(images[rows], "parity"), labels[rows] % 2).backward()
    return flat([model.parity.weight.grad])


averaged = launch(train_two_heads, 2, True)
shares = [(gradient.norm() / own_gradient().norm()).item() for gradient in averaged]
measured = {"share of rank 1's gradient": round(max(shares), 3)}

# %%
compare(
    predicted,
    measured,
    {
        "A mean over all ranks: the other one counts as zero.": {"share of rank 1's gradient": 1},
    },
)

# %% [markdown]
# ### Without `launch`: a hang, read with what everybody has
#
# `launch` names the rank and the line because it keeps a record of every call. On a cluster nobody does that for you.
# Here is a script with the most common hang: rank 0 alone evaluates, and the evaluation calls a collective. One of
# its functions is there for the day on which it hangs. Find it before you read on.

# %%
from course_utils.lesson.terminal import torchrun

script = scratch() / "whole_script.py"
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/whole_script.py
"""Trains on MNIST. torchrun --nproc-per-node 2 whole_script.py FOLDER SECONDS [--rank-0-only]"""

import faulthandler
import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course_utils.lesson import mnist
from course_utils.lesson.models import MnistNet


def watch(folder, rank):
    number = noted = 0
    while True:  # no call has begun for a second: which were there, and where is each thread?
        time.sleep(1)
        record = _dump_fr_trace_json()
        before, number = number, len(json.loads(record)["entries"])
        if before == number != noted:
            noted = number
            (folder / f"calls_{rank}.json").write_bytes(record)
            with open(folder / f"stacks_{rank}.txt", "w") as file:
                faulthandler.dump_traceback(file)


def test_loss(model, images, labels):
    with torch.no_grad():
        loss = cross_entropy(model(images), labels)
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main(folder, limit, rank_0_only):
    dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    threading.Thread(target=watch, args=[folder, rank], daemon=True).start()
    data = TensorDataset(*mnist.tensors(train=True, limit=2048))
    sampler = DistributedSampler(data, seed=0)
    torch.manual_seed(0)
    model = DDP(MnistNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(2):
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in DataLoader(data, 128 // world_size, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    if rank == 0 or not rank_0_only:
        share = [part[rank::world_size] for part in mnist.tensors(train=False)]
        line = f"rank {rank}: test loss {test_loss(model, *share):.2f}\n"
        sys.stdout.write(line)  # in one piece: print would write its line's end apart
    dist.barrier()  # nobody leaves before all are done
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), "--rank-0-only" in sys.argv)

# %%
print(*sorted(torchrun(2, script, scratch(), "1800").splitlines()), sep="\n")

# %% [markdown]
# In this run every rank evaluates its share, and every rank calls the all-reduce. Now the faulty one, with a time
# limit of 20 seconds. By default you would wait for half an hour.

# %% tags=["nbval-ignore-output"]
print(torchrun(2, script, scratch(), "20", "--rank-0-only"))

# %% [markdown]
# What torchrun calls the *root cause (first observed failure)* is the rank that reached its time limit first, and it
# may be innocent. That rank waited longer than the limit and raised an error. The other found its connection closed a
# moment later, or was ended by torchrun. What you want is the same moment on all ranks.
#
# *The record of calls.* PyTorch keeps the last collectives of a process in memory, in its **flight recorder**. The
# function `watch` writes them to a file whenever nothing new has begun for a second. (For gloo it has to call a private
# function of PyTorch. With NCCL the files come by themselves, see below.) To read the files, lay the ranks side by side
# and look for the first call that differs.

# %%
calls = []
for rank in range(2):
    entries = json.loads((scratch() / f"calls_{rank}.json").read_text())["entries"]
    calls.append([(entry["profiling_name"], entry["input_sizes"]) for entry in entries])
same = next(i for i, (ours, theirs) in enumerate(zip(*calls)) if ours != theirs)
print(f"{same} calls are the same on both ranks: DDP's own 5, and one for each of 32 steps")
for rank in range(2):
    name, sizes = calls[rank][same]
    print(f"rank {rank}, call {same + 1}: {name}")

# %% [markdown]
# Call number 38 is an all-reduce on rank 0 and a barrier on rank 1. Each waits for the other to join. The record names
# the ranks and the calls, and not the line.
#
# *The stacks.* `faulthandler`, from Python's own library, notes where every thread is, even while it is stuck in
# C++. A process that you have not prepared is read from outside: `py-spy dump --pid PID` (`pip install py-spy`; in a
# container it needs the right to trace).

# %%
for rank in range(2):
    frames = (scratch() / f"stacks_{rank}.txt").read_text().splitlines()
    own = [line for line in frames if script.name in line and " in watch" not in line]
    number, function = own[0].split(" line ")[1].split(" in ")
    print(f"rank {rank}, in {function}: {script.read_text().splitlines()[int(number) - 1].strip()}")

# %% [markdown]
# Rank 0 is in `test_loss`. Rank 1 will never come there: it waits in the barrier after it. Four more tools are worth
# knowing before you need them.
#
# | set before the run | what you get |
# |---|---|
# | `TORCH_DISTRIBUTED_DEBUG=DETAIL` | each call is compared on all ranks before it begins: "Detected mismatch between collectives on ranks", with both names, at once. It costs one exchange for each call |
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1`, `TORCH_FR_DUMP_TEMP_FILE=/shared/calls_` | with NCCL, each rank writes its record when the time limit strikes. `torchfrtrace` (it comes with PyTorch) reads the files of all ranks and names the call that lacks a rank |
# | `NCCL_DEBUG=INFO` | with NCCL, each rank prints what it chose when it made its groups: version, devices, network adapter. Look here first if the ranks never get as far as the first collective |
# | `torch.distributed.debug.start_debug_server()` in the script | a page that shows stacks and records of all ranks while they hang (needs `tabulate`, `requests`) |
#
# ([NCCL's variables](https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html), [the flight
# recorder's tutorial](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html), [a hang found with
# the debug server](https://docs.pytorch.org/tutorials/intermediate/debug_hangs_with_flight_recorder.html), which
# records with a package of its own, TorchComms.)

# %% [markdown]
# ## 6. Exercises
#
# 3.8 Where the time of a step goes (2 points) and 3.4 DDP that overlaps (5 points) are in section 4, after the
# profile; 3.7 Your own script is in section 8. (The numbers do not follow the order.)

# %% [markdown]
# ## 7. See it: the best size of a bucket
#
# The lesson's explorer moves one size at a time. Here is the exposed time against the size of the buckets, for 100 MB
# of gradients, 10 GB/s, 40 ms of backward and a start-up of 10 µs in each step of the ring. The model is the
# lesson's: a ring sends one of $k$ buckets in the time $t$, they are ready one after the other during backward, and
# what is not hidden is $t + (k - 1)\,\max(0,\; t - T/k)$.


# %%
def exposed_ms(buckets, ranks, backward_ms=40, bucket_MB=100, GB_per_s=10, startup_ms=0.01):
    piece_MB = bucket_MB / buckets / ranks
    all_reduce_ms = 2 * (ranks - 1) * (startup_ms + piece_MB / GB_per_s)
    return all_reduce_ms + (buckets - 1) * max(0.0, all_reduce_ms - backward_ms / buckets)


# %%
from course_utils.figures import ch03

counts = [1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 25, 32, 40, 50, 63, 80, 100, 125, 160, 200, 250, 320]
sizes = [100 / buckets for buckets in counts]
exposed = {n: [exposed_ms(buckets, n) for buckets in counts] for n in (8, 64, 256)}
for n, times in exposed.items():
    best = sizes[times.index(min(times))]
    print(f"{n} ranks: best {best:.1f} MB, exposed {min(times):.1f} ms")
ch03.bucket_sizes(sizes, exposed)
plt.show()

# %% [markdown]
# *Each curve falls steeply while the buckets queue up, reaches its best size, and rises slowly, because the last
# bucket grows. With more ranks the start-ups of a ring add up, so the best bucket is larger.*
#
# In this model DDP's default of 25 MiB, the grey line, is the best size for 256 ranks, and it is 40 times the best size
# for 8 ranks. There it costs little: 4 ms more, beside 40 ms of backward. Buckets that are too small cost far more. The
# model is also kind to small buckets: it leaves out what each costs the host and the GPU, where all-reduces and
# backward share multiprocessors. In one published measurement on two GPUs a step took 0.729 s with buckets of 1 MB and
# of 10 MB, 0.709 s with 100 MB, and 0.712 s with 1,000 MB
# ([damek/cs336-assignment2-systems](https://github.com/damek/cs336-assignment2-systems/blob/main/cs336_systems/outputs/ddp_bucketed_bencharmking.md),
# batch size 2, 128 tokens). Measure before you change it.

# %% [markdown]
# ## 8. On a cluster
#
# * **Overlap.** On GPUs the collectives run beside the kernels of backward. Look for it in a profile of all ranks, and
#   for the rank with the least time in collectives.
# * **Accumulation.** It is the usual way to a large batch on few machines. `no_sync` also divides the traffic between
#   machines by the number of micro-batches.
# * **`Join`.** It needs two small all-reduces more in every step, so that the ranks know who is still there, and
#   whether this backward sends its gradients. Most people cut the data to equal lengths and do without.
# * **`SyncBatchNorm`.** It communicates in every such layer, forward and backward: keep its group inside a machine
#   (`process_group=`).
# * **A parameter that is not used.** It costs a walk through the graph in each step. If the set of used parameters
#   never changes, `DDP(..., static_graph=True)` finds it out once.
# * **Slow links.** DDP's `powerSGD_hook` sends two thin matrices in place of a gradient ([Vogels et al.
#   2019](https://arxiv.org/abs/1905.13727)). Local SGD averages parameters after many steps of each rank, and DiLoCo
#   hands their average change to a second optimizer ([Douillard et al. 2023](https://arxiv.org/abs/2311.08105)). None
#   of these ends with the parameters of one process.
# * **Other launchers.** [Monarch](https://github.com/meta-pytorch/monarch) starts processes on many machines from a
#   notebook, and calls methods of objects in them. It is experimental.

# %% [markdown]
# ### 3.7 Your own script: accumulate, and count characters
#
# Take `mine/train.py` (3.6) further. If you have not written it yet, `mine.start(3, further=True)` gives you the
# course's own.
#
# * `--sentences` reads a stream of sentences in place of windows: what `re.finditer(r"[^.?!]{2,}", text)` finds, in
#   its order, in each epoch. A sentence `s` gives inputs `s[:-1]` and targets `s[1:]`, both cut to `--context`
#   characters. The first nine tenths are learned, the others held out.
# * Each sentence is read by one worker of one rank (`--workers`, processes of a `DataLoader`): an `IterableDataset`
#   learns its worker's number from `get_worker_info()`. Drop the last sentences, which do not fill a batch of all
#   ranks. A `collate_fn` pads a batch's sentences (`pad_sequence`) with targets that the loss leaves out
#   (`ignore_index`).
# * `--accumulate 4` cuts a rank's share of the batch into four micro-batches. Their gradients travel once.
# * The loss is the mean over the characters of the step, on all ranks and in all micro-batches together, so that
#   neither option changes the gradient. The log has the mean over the characters of the epoch.

# %%
from course_exercises import mine

check("3.7", mine.script(3, further=True))

# %% [markdown]
# ## 9. Remember
#
# 1. A bucket travels while backward goes on. If the link keeps up, only the last one is exposed.
# 2. `no_sync` around all micro-batches but the last: the same gradient, one message. Divide by their number.
# 3. Ranks with different numbers of batches hang, unless `Join` or a cut makes them equal.
# 4. The global batch grows with the ranks: scale the rate, warm it up, and watch the loss.
# 5. A wrapped model differs from one process in layers that look at the whole batch, such as batch normalisation, and
#    in parameters that not every rank uses.
#
# **Sources**
#
# * S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB
#   2020, [arXiv 2006.15704](https://arxiv.org/abs/2006.15704): section 3.2 gradient reduction,
#   buckets and overlap, section 3.2.4 accumulation.
# * P. Goyal et al., *Accurate, Large Minibatch SGD*, 2017, [arXiv
#   1706.02677](https://arxiv.org/abs/1706.02677), sections 2.1 and 2.2.
# * S. Ioffe and C. Szegedy, *Batch Normalization*, 2015, [arXiv
#   1502.03167](https://arxiv.org/abs/1502.03167), section 3.
# * PyTorch:
#   [`DistributedDataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html),
#   [`Join`](https://docs.pytorch.org/docs/stable/distributed.algorithms.join.html),
#   [`SyncBatchNorm`](https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html).
