# %% [markdown]
# # 2. Data parallelism in one process
#
# One Python process can drive several GPUs. `nn.DataParallel(model)` divides every batch among them, with one line of
# code. In this chapter you take that line apart, do the same by hand and measure what it costs. Then you find out why
# so often only one of several GPUs is busy.
#
# Do not choose this class for new code: PyTorch recommends the class of chapter 3, also on a single machine. You meet
# `nn.DataParallel` here because older code is full of it, and because its bottleneck, the first GPU, explains the
# design of chapter 3.
#
# You need no GPU. Where there is none, the CPU plays the part of every device. The results are the same; the times
# are not those of GPUs.

# %% tags=["nbval-ignore-output"]
import copy
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch02
from course_utils.lesson import mnist
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.models import MnistNet
from course_utils.lesson.predictions import compare

torch.set_num_threads(1)  # the matrices are small: a second core would only wait for the first
hardware.report()

# %% [markdown]
# ## 1. The factory: one building with several floors
#
# In chapter 1 every rank was a building. Now there is a single building, one process, and its **floors** are the
# devices. The ground floor keeps the blueprint. For every batch it copies the blueprint for the floors above and
# hands out the material. All floors work. The ground floor collects the results, inspects them, and sends back how
# they should have been different. Each floor answers with change notes for its copy of the blueprint. The ground
# floor adds these up, changes the blueprint, and throws the copies away.

# %%
ch02.floors()
plt.show()

# %% [markdown]
# *Every arrow begins or ends on the ground floor, which also holds the optimizer and the whole batch.*
#
# | in the factory | in PyTorch |
# |---|---|
# | floor | **worker**: a device, and the thread of this process that drives it |
# | ground floor | worker 0, the first GPU; the other workers are its helpers |
# | to copy the blueprint | **replicate**: each worker gets a **replica**, a copy of the parameters |
# | to hand out the material | **scatter**: each worker gets a **chunk**, some rows of the batch |
# | all floors work | **parallel forward**: each replica computes the outputs of its chunk |
# | to collect the results | **gather**: the outputs are put together on worker 0 |

# %% [markdown]
# ## 2. The smallest real run: MNIST, and one step taken apart
#
# MNIST has 60,000 training images and 10,000 test images of handwritten digits, of 28 by 28 grey values each.
# `hardware.device()` is the first GPU, or the CPU where there is none.

# %%
home = hardware.device()
train_images, train_labels = (tensor.to(home) for tensor in mnist.tensors(train=True))
test_images, test_labels = (tensor.to(home) for tensor in mnist.tensors(train=False))
print("training images:", tuple(train_images.shape), "test images:", tuple(test_images.shape))

# %% [markdown]
# `MnistNet` has 784 inputs, 50 hidden values and 10 outputs, which makes 39,760 parameters. The outputs are
# **logits**: scores, one for each digit, which the loss turns into probabilities. One pass over the data is an
# **epoch**, and **accuracy** is the share of images whose largest logit belongs to the right digit.

# %%
torch.manual_seed(0)
model = nn.DataParallel(MnistNet().to(home))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for epoch in (1, 2, 3):
    losses = []
    for rows in torch.randperm(len(train_images)).split(200):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(train_images[rows]), train_labels[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: mean loss {sum(losses) / len(losses):.1f}")

with torch.no_grad():
    correct = model(test_images).argmax(dim=1) == test_labels
print(f"accuracy on the test images: {correct.float().mean().item():.0%}")

# %% [markdown]
# This is the loop of a single device. Now do by hand what `model(...)` and `backward()` do on several devices, here
# with two workers and eight images. Where there are fewer GPUs than workers, one device plays several of them.


# %%
def worker_devices(workers: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", i % gpus) if gpus else home for i in range(workers)]


# %% [markdown]
# `functional_call(model, tensors, inputs)` runs `model` with other tensors in place of its own parameters.

# %%
devices = worker_devices(2)
model = MnistNet().to(home)
images, labels = train_images[:8], train_labels[:8]
own = dict(model.named_parameters())

replicas = [{name: own[name].to(device, copy=True) for name in own} for device in devices]
chunks = [chunk.to(device) for chunk, device in zip(images.chunk(2), devices)]
outputs = [functional_call(model, replica, chunk) for replica, chunk in zip(replicas, chunks)]
logits = torch.cat([output.to(home) for output in outputs])
F.cross_entropy(logits, labels).backward()
two_workers = flat(parameter.grad for parameter in model.parameters())

model.zero_grad()
F.cross_entropy(model(images), labels).backward()
one_worker = flat(parameter.grad for parameter in model.parameters())
print("largest difference of the gradients:", check_equal(one_worker, [two_workers]))

# %% [markdown]
# The lines from `replicas` to `backward` are the moves of the table: replicate, scatter, forward, gather, then the
# loss and its backward pass on worker 0. The optimizer's update would follow there. No line adds the gradients of the
# two replicas; autograd does that. A tensor that was copied twice gets the **sum** of two gradients. The sum is
# right, because the loss is already a mean over all rows.

# %% [markdown]
# ### Who gets how many rows
#
# `nn.DataParallel` divides a batch with `torch.chunk(batch, n)`. It makes at most `n` chunks. Each has ⌈rows / n⌉
# rows; the last gets what is left. How many workers have something to do?

# %% tags=["prediction"]
predicted = {"busy workers, 5 images on 4 workers": 3, "busy workers, 9 images on 8 workers": 5}

# %%
measured = {
    "busy workers, 5 images on 4 workers": len(train_images[:5].chunk(4)),
    "busy workers, 9 images on 8 workers": len(train_images[:9].chunk(8)),
}

# %%
compare(
    predicted,
    measured,
    likely={"As if every worker got a row.": dict(zip(predicted, (4, 8)))},
)

# %% [markdown]
# 9 images make chunks of $\lceil 9 / 8 \rceil = 2$ rows until none are left: 2, 2, 2, 2 and 1. Three of eight workers
# stay idle, and no warning says so. 5 images on 4 workers make chunks of 2, 2 and 1.

# %% [markdown]
# ### 2.1 Scatter, without idle workers (2 points)
#
# Divide better than `torch.chunk`. Your function works with any list of devices, in which a device may occur several
# times, as the CPU does here. If the check's message is not enough, `hint("2.1")` gives the next hint.


# %% nbgrader={"grade_id": "2.1", "solution": true}
def scatter(batch: torch.Tensor, devices: list[torch.device]) -> list[torch.Tensor]:
    """Divides `batch` among `devices` as evenly as possible.

    batch: any shape with at least one row; rows are counted along dimension 0.
    Returns a list of chunks, chunk i on devices[i], with the rows in their order. The numbers of
    rows differ by at most one, and the larger chunks come first: 5 rows on 4 devices give chunks
    of 2, 1, 1 and 1 rows. A batch with fewer rows than devices gives one row to each of the first
    devices and no empty chunk. Gradients flow back through the chunks into `batch`. Write it
    without torch.nn.parallel.
    """
    ### BEGIN SOLUTION
    count = min(len(devices), len(batch))
    return [part.to(device) for part, device in zip(batch.tensor_split(count), devices)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "2.1-check", "grade": true, "points": 2, "locked": true}
check("2.1", scatter)

# %% [markdown]
# ## 3. Predict, then measure: the bytes of a step, and the loss of unequal chunks
#
# ### What travels in a step
#
# Worker 0 computes with the model itself and with its own rows: these do not travel. Each helper gets a replica and a
# chunk. Take 4 workers, the 39,760 parameters of `MnistNet`, and 64 images of 784 numbers. Every number has 4 bytes.
# How many bytes does replicate send in a step, to all helpers together, and how many does scatter? Then estimate: if
# you halve the batch, by how many percent does the total traffic of a step (both directions) fall? Give a whole
# number.

# %% tags=["prediction"]
predicted = {
    "replicate": 4 * 39_760 * 3,
    "scatter": 4 * 784 * 48,
    "saved by half a batch, in %": 7,
}

# %% [markdown]
# To measure it, every copy between workers goes through one function, which counts bytes. A **hook** is a function
# that PyTorch calls by itself: here, when the gradient of a copy arrives in the backward pass.

# %%
traffic = Counter()  # bytes by move


def move(tensor: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """Copies `tensor` to another worker, and counts the bytes there and back."""
    moved = tensor.to(device, copy=True)
    traffic[name] += moved.nbytes
    if moved.requires_grad:
        back = f"{name}, gradients back"
        moved.register_hook(lambda gradient: traffic.update({back: gradient.nbytes}))
    return moved


# %%
class HandDataParallel(nn.Module):
    """Runs `module` on several devices of one process, as nn.DataParallel does."""

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module, self.devices = module, devices

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first, *others = batch.chunk(len(self.devices))
        outputs = [self.module(first)]
        own = dict(self.module.named_parameters())
        for chunk, device in zip(others, self.devices[1:]):
            replica = {name: move(own[name], device, "replicate") for name in own}
            output = functional_call(self.module, replica, move(chunk, device, "scatter"))
            outputs.append(move(output, self.devices[0], "gather"))
        return torch.cat(outputs)


# %%
def traffic_of_step(workers: int, batch: int) -> Counter:
    model = HandDataParallel(MnistNet().to(home), worker_devices(workers))
    traffic.clear()
    F.cross_entropy(model(train_images[:batch]), train_labels[:batch]).backward()
    return traffic.copy()


whole, half = traffic_of_step(4, 64), traffic_of_step(4, 32)
saved = round(100 * (1 - half.total() / whole.total()))
measured = {**whole, "saved by half a batch, in %": saved}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if worker 0's replica and rows travelled too.": {
            "replicate": 4 * 39_760 * 4,
            "scatter": 4 * 784 * 64,
        },
        "These are numbers. Each has 4 bytes.": {"replicate": 39_760 * 3, "scatter": 784 * 48},
        "What one helper gets. There are three.": {
            "replicate": 4 * 39_760,
            "scatter": 4 * 784 * 16,
        },
        "As if all bytes were the batch's.": {"saved by half a batch, in %": 50},
    },
)

# %%
print(f"{'move':25}   bytes")
for name, size in whole.items():
    print(f"{name:25} {size:7}")

# %% [markdown]
# The parameters and their gradients travel in every step, however small the batch is. With $n$ chunks, $P$
# parameters, and $B$ rows of which $H = B - \lceil B / n \rceil$ are on the helpers, a step moves:
#
# | move | bytes | back, in the backward pass |
# |---|---|---|
# | replicate | $4 P (n - 1)$ | $4 P (n - 1)$: the gradients of the replicas, summed on worker 0 |
# | scatter | $4 \cdot 784 \, H$ | nothing: images need no gradient |
# | gather | $4 \cdot 10 \, H$ | $4 \cdot 10 \, H$: the gradients of the outputs |
#
# If copies are made one by one, all of this passes through the connection of the first GPU. With NCCL, NVIDIA's
# library for such exchanges, `nn.DataParallel` copies parameters and sums gradients in a ring. Then each link,
# including that of the first GPU, carries only $8 P$ of the $8 P (n - 1)$ bytes.

# %% [markdown]
# ### 2.2 Replicate, for any model (4 points, optional)
#
# This exercise is long, and nothing later needs it. It is for those who maintain code with `nn.DataParallel`.
#
# A model may have **buffers**: tensors that belong to it but are not trained, such as the running mean of batch
# normalization. A forward pass may change them in place. `nn.DataParallel` keeps the changes of worker 0, which uses
# the tensors of the model, and loses those of the helpers. It also calls all replicas at the same time, in threads.
# `functional_call` puts its tensors into the module while it runs, so two threads need two modules.


# %% nbgrader={"grade_id": "2.2", "solution": true}
def replicate(
    model: nn.Module, devices: list[torch.device]
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Makes one replica of `model` for each device; model lies on devices[0].

    Returns a list of callables: replicas[i](batch) gives the outputs of the model for a batch on
    devices[i].
    * replicas[0] computes with the parameters and buffers of `model` itself.
    * Every other replica has copies of all parameters and buffers, made now, on its device (also
      where that is devices[0] again). What it changes in its buffers does not reach `model`.
    * A backward pass adds the gradients of all replicas into the parameters of `model`. Tied
      parameters (one tensor under two names) stay tied, and frozen ones stay frozen.
    * Each part of a replica is in the mode, training or evaluation, of that part of `model`.
    * Threads can call different replicas at the same time, and none waits for another.
    Write it without torch.nn.parallel.
    """
    ### BEGIN SOLUTION
    replicas = [model]
    for device in devices[1:]:
        tensors = {
            name: tensor.to(device, copy=True)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        replicas.append(partial(functional_call, copy.deepcopy(model), tensors))
    return replicas
    ### END SOLUTION


# %% nbgrader={"grade_id": "2.2-check", "grade": true, "points": 4, "locked": true}
check("2.2", replicate)

# %% [markdown]
# ### The loss of unequal chunks
#
# Some models compute the loss inside `forward`. Each worker then returns the mean loss of its own chunk, and you will
# often see `loss.mean()` after it. Take 13 rows on 4 workers: chunks of 4, 4, 4 and 1. In the mean of the four means,
# by what factor is the last row's weight larger than in the mean over all 13 rows?

# %% tags=["prediction"]
predicted = {"the last row counts, times": 13 / 4}

# %%
row_losses = torch.zeros(13, requires_grad=True)
torch.stack([chunk.mean() for chunk in row_losses.chunk(4)]).mean().backward()
measured = {"the last row counts, times": 13 * row_losses.grad[-1].item()}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if a mean of means were the mean.": {"the last row counts, times": 1},
        "That is its weight in the mean of means; divide by 1/13.": {
            "the last row counts, times": 1 / 4
        },
        "Four times as much as a row of a full chunk. The question compares it with 1/13.": {
            "the last row counts, times": 4
        },
    },
)

# %% [markdown]
# The last row has the weight 1/4 instead of 1/13. If chunk $i$ has $b_i$ rows and the mean loss $L_i$, the mean over
# all rows is
#
# $$L = \frac{1}{B} \sum_i b_i L_i .$$
#
# That is the mean of the $L_i$ only if all $b_i$ are equal. Where `forward` returns outputs, there is no such
# problem: the loss is computed once, on worker 0, over all rows.

# %% [markdown]
# ### 2.3 Gather (2 points, optional)
#
# Models may also return a tuple, a dictionary, or the loss itself, a tensor without dimensions.


# %% nbgrader={"grade_id": "2.3", "solution": true}
def gather(outputs: list, device: torch.device):
    """Puts the outputs of the workers together on `device`.

    outputs: one output per worker, in the order of the workers, all of the same structure: a
    tensor (rows, ...), where the numbers of rows may differ; a tensor without dimensions; or a
    tuple, list or dict of such outputs, also nested.
    Returns the same structure with the rows of all workers along dimension 0. Tensors without
    dimensions become one vector with a number per worker. Gradients flow back to the outputs, also
    from that vector. Write it without torch.nn.parallel.
    """
    ### BEGIN SOLUTION
    first = outputs[0]
    if isinstance(first, dict):
        return {key: gather([output[key] for output in outputs], device) for key in first}
    if isinstance(first, (tuple, list)):
        return type(first)(gather(list(parts), device) for parts in zip(*outputs))
    rows = [output.to(device) for output in outputs]
    return torch.stack(rows) if first.dim() == 0 else torch.cat(rows)
    ### END SOLUTION


# %% nbgrader={"grade_id": "2.3-check", "grade": true, "points": 2, "locked": true}
check("2.3", gather)

# %% [markdown]
# ## 4. By hand, then with PyTorch: the parameters of one worker
#
# ### By hand
#
# Every technique of this course has to pass one test. The same model trains from the same start on the same batches,
# for a few steps of SGD, and must end with the parameters of one worker that computes whole batches. The test does not
# use Adam, which divides by the size of the gradient and so hides gradients that are wrong by a constant factor.


# %%
def five_steps(wrap, loss_of=F.cross_entropy) -> torch.Tensor:
    """All parameters and gradients after five steps of SGD with wrap(model), on 13 images each."""
    torch.manual_seed(1)
    model = MnistNet().to(home)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images, labels in zip(train_images[:65].split(13), train_labels[:65].split(13)):
        optimizer.zero_grad()
        loss_of(parallel(images), labels).backward()
        optimizer.step()
    return flat([*model.parameters(), *(p.grad for p in model.parameters())])


# %%
def mean_of_means(logits, labels):
    chunks = zip(logits.chunk(4), labels.chunk(4))
    return torch.stack([F.cross_entropy(outputs, of) for outputs, of in chunks]).mean()


one_worker = five_steps(lambda model: model)
for workers in (2, 3, 4):
    by_hand = five_steps(partial(HandDataParallel, devices=worker_devices(workers)))
    print(f"{workers} workers, largest difference:", check_equal(one_worker, [by_hand]))
wrong = five_steps(partial(HandDataParallel, devices=worker_devices(4)), mean_of_means)
print("4 workers, mean of means, largest difference:", largest_difference(one_worker, [wrong]))

# %% [markdown]
# The order of additions changes the last digits and nothing else. The mean of means trains a different model.

# %% [markdown]
# ### 2.4 The whole step (4 points)
#
# Write one training step over several workers. It does more than the version above: models may have buffers, tied
# layers and frozen ones, and the update belongs to it. You need none of your earlier answers, and no threads. Divide
# the batch with `torch.chunk`.


# %% nbgrader={"grade_id": "2.4", "solution": true}
def data_parallel_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    images: torch.Tensor,
    labels: torch.Tensor,
    devices: list[torch.device],
) -> float:
    """Does one training step of `model` with the batch divided among `devices`.

    model, images and labels lie on devices[0]. optimizer, of any kind, holds all parameters of
    `model`. loss_fn(outputs, labels) is the mean over the rows.
    Each chunk runs once, on its own device: the first through `model`, every other through a copy of
    its parameters and buffers, in the mode, training or evaluation, of each part of `model`. What
    helpers change in their buffers is lost.
    Afterwards the gradients and the parameters of `model` are those of the same step with the whole
    batch at once, whatever gradients an earlier step left behind; a parameter that gets none in this
    step has `grad` None. Write it without nn.DataParallel.
    Returns the loss of the whole batch, as it was before the update.
    """
    ### BEGIN SOLUTION
    outputs = []
    for index, (chunk, device) in enumerate(zip(images.chunk(len(devices)), devices)):
        state = {}
        if index > 0:
            tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            state = {name: tensor.to(device, copy=True) for name, tensor in tensors.items()}
        output = functional_call(model, state, (chunk.to(device),))
        outputs.append(output.to(devices[0]))
    loss = loss_fn(torch.cat(outputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
    ### END SOLUTION


# %% nbgrader={"grade_id": "2.4-check", "grade": true, "points": 4, "locked": true}
check("2.4", data_parallel_step)

# %% [markdown]
# ### With PyTorch
#
# What `nn.DataParallel(model)(batch)` does depends on the machine:
#
# | GPUs | what happens |
# |---|---|
# | 0 | the model is called, and no warning says that nothing is parallel |
# | 1 | the batch moves to the GPU, and the model is called there |
# | $n$ | scatter, replicate, forward in one thread per replica, gather on the first GPU |

# %%
by_torch = five_steps(nn.DataParallel)
print("nn.DataParallel, largest difference:", check_equal(one_worker, [by_torch]))

# %% [markdown]
# ### Why the first GPU carries the load
#
# A helper holds a replica, its gradients, and the inputs, activations and outputs of its chunk, until the step ends.
# Worker 0 holds the same, and in addition the optimizer's state, the whole batch, and all outputs with what the loss
# makes of them.
#
# Suppose that a batch just fits on four GPUs. You double the GPUs and the batch. Does each GPU now need `"more"`
# memory or `"the same"`?

# %% tags=["prediction"]
predicted = {"GPU 0 needs": "more", "GPU 1 needs": "the same"}

# %%
IMAGE, KEPT = 3 * 224 * 224, 5_000_000  # assumed: numbers of an image, activations kept for it


def memory_model(gpus, batch, parameters, inputs, activations, outputs):
    """Bytes by kind on the first GPU, and on a helper. Inputs, activations, outputs: numbers of a row."""
    rows = math.ceil(batch / gpus)
    helper = {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "activations": 4 * activations * rows,
        "inputs and outputs": 4 * (inputs + outputs) * rows,
    }
    more = {
        "optimizer": 4 * parameters,
        "inputs and outputs": 4 * (inputs + 4 * outputs) * batch,
    }
    return helper | more, helper


four, eight = (memory_model(n, 64 * n, 25_000_000, IMAGE, KEPT, 50_000) for n in (4, 8))
grows = [sum(after.values()) > sum(before.values()) for before, after in zip(four, eight)]
measured = {name: "more" if more else "the same" for name, more in zip(predicted, grows)}

# %%
compare(
    predicted,
    measured,
    likely={
        "The whole batch and all outputs lie on GPU 0.": {"GPU 0 needs": "the same"},
        "A helper has as many rows as before.": {"GPU 1 needs": "more"},
    },
)

# %% [markdown]
# So the batch may not fit any more, although every helper has room for its chunk. With $R = \lceil B / n \rceil$ rows
# on a worker, and $I$ inputs, $A$ activations and $O$ outputs for each row, worker 0 and a helper hold, in bytes,
#
# $$M_0 = 4 \, (3 P + I B + A R + 4 \, O B), \qquad M_i = 4 \, (2 P + I R + A R + O R).$$
#
# The 3 counts parameters, gradients and the momentum of SGD. The 4 before $O B$ counts the gathered logits, their
# log-probabilities, and the gradients of both.

# %% [markdown]
# ### Why Python's threads hold it back
#
# A **thread** is one of several lines of execution in a process; all of them see the same memory. `nn.DataParallel`
# starts one for each replica. In the usual build of Python, however, only one thread at a time executes Python code:
# the one that has the **global interpreter lock** (GIL). PyTorch releases the lock inside large operations, such as a
# matrix product. Below, two threads do twice the work of one. Which of the three `kinds` of work takes them twice as
# long?


# %% tags=["nbval-ignore-output"]
def seconds(work: Callable, threads: int) -> float:
    """The shortest of five times that `threads` threads need to do `work` once each."""
    times = []
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(lambda _: work(), range(threads)))
            times.append(time.perf_counter() - start)
    return min(times)


small, images, square = MnistNet(), torch.randn(8, 784), torch.randn(800, 800)
kinds = {
    "a loop in Python": lambda: sum(i * i for i in range(300_000)),
    "small forward passes": lambda: [small(images) for _ in range(500)],
    "large matrix products": lambda: [square @ square for _ in range(3)],
}
for name, work in kinds.items():
    print(
        f"{name:22} two threads take {seconds(work, 2) / seconds(work, 1):.1f} times as long as one"
    )

# %% [markdown]
# A ratio near 1 means that the threads worked side by side, near 2 that they took turns. (On a busy machine all
# ratios grow.) The loop takes turns. Large products run side by side if two cores are free. A small forward pass is
# mostly Python, so a second thread hardly helps. On GPUs, the forward pass of a replica is Python code that starts
# one GPU operation after another. If starting them takes longer than computing them, more replicas in one process
# gain nothing. Chapter 3 has one process per GPU, each with a lock of its own.

# %% [markdown]
# ## 5. Break it: why only one GPU is busy
#
# ### Bug hunt: the variable that is said to hide your GPUs
#
# **CUDA_VISIBLE_DEVICES** is an environment variable that lists the GPUs a program may use. CUDA reads it once, when
# it starts in a process, and stops at the first number that no GPU has. GPUs are numbered from 0. You will read that
# PyTorch sees a single GPU if the variable is *not set*. Is that so? Of four GPUs, how many does a program see if it
# is not set, and how many with `0,4,1,2`?

# %% tags=["prediction"]
predicted = {"GPUs seen, not set": 4, "GPUs seen, '0,4,1,2'": 1}

# %%
not_set = hardware.Machine(driver_gpus=4, visible=None)  # follows CUDA's rule
listed = hardware.Machine(driver_gpus=4, visible="0,4,1,2")
measured = dict(zip(predicted, (not_set.torch_gpus, listed.torch_gpus)))

# %%
compare(
    predicted,
    measured,
    likely={
        "As that sentence says. But an unset variable hides nothing.": {"GPUs seen, not set": 1},
        "As if CUDA left the wrong number out and read on.": {"GPUs seen, '0,4,1,2'": 3},
        "There is no GPU 4: four GPUs have the numbers 0 to 3.": {"GPUs seen, '0,4,1,2'": 4},
    },
)

# %% [markdown]
# A variable that is not set hides nothing; an empty one hides all GPUs. So the usual advice, to set it to `0,1,2,3`,
# changes nothing where it was not set. `hardware.Machine` only describes a machine; now ask yours. A fresh Python
# counts its GPUs without the variable, and the driver says how many there are.

# %%
environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
program = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
seen = int(subprocess.run(program, env=environment, capture_output=True, check=True).stdout)
there = hardware.machine().driver_gpus or seen  # None: no driver that could be asked
print("GPUs of this machine that an unset variable hides:", there - seen)

# %% [markdown]
# ### Ask the doctor
#
# `hardware.doctor` looks at your machine, at the model that your loop calls, and at a batch. For each cause of an
# idle GPU it gives the evidence and the repair.

# %% tags=["nbval-ignore-output"]
print(hardware.doctor(nn.DataParallel(MnistNet().to(home)), train_images[:200]))

# %% [markdown]
# It also diagnoses descriptions: a `Machine`, and a `Setup` for the loop. The first pair is healthy, and each of the
# others has one change.

# %%
four = hardware.Machine(driver_gpus=4)
loop = hardware.Setup(
    ("DataParallel",), model_device="cuda:0", batch_size=256, batch_device="cuda:0"
)
cases = [
    (four, loop),
    (hardware.Machine(driver_gpus=4, visible="0,1"), loop),
    (hardware.Machine(driver_gpus=4, visible="0,1,2,3", started_gpus=1), loop),
    (four, replace(loop, wrappers=(), other_wrapper=True)),
    (four, replace(loop, batch_device="cpu")),
    (four, replace(loop, batch_size=5)),
]
for machine, setup in cases:
    print(hardware.doctor(machine=machine, setup=setup))

# %% [markdown]
# ### 2.5 Be the doctor (3 points)
#
# Decide between six broken set-ups and a healthy one, with other numbers each time. At most one thing is wrong in each.
# `print(hardware.Machine.__doc__)` and `print(hardware.Setup.__doc__)` say what the fields mean.


# %% nbgrader={"grade_id": "2.5", "solution": true}
def diagnose(machine: hardware.Machine, setup: hardware.Setup) -> str:
    """Names the one reason why not all GPUs of `machine` work in `setup`, without hardware.doctor.

    The model in `setup` is meant for nn.DataParallel. Returns one of
      "visible-partial"   CUDA_VISIBLE_DEVICES leaves out some of the driver's GPUs
      "visible-wrong"     it names a GPU that does not exist, and CUDA stopped reading there
      "visible-late"      it was changed, or unset, after CUDA had started
      "wrapped-late"      a wrapper exists, but the loop calls the bare model
      "inputs-on-cpu"     the batch was left on the CPU
      "batch-too-small"   torch.chunk makes fewer chunks of the batch than there are GPUs
      "healthy"           nothing is wrong
    """
    ### BEGIN SOLUTION
    shown = len(machine.selected())
    listed = shown if machine.visible is None else len(machine.visible.split(","))
    if machine.started_gpus is not None and machine.started_gpus != shown:
        return "visible-late"
    if shown < listed:
        return "visible-wrong"
    if machine.torch_gpus < machine.driver_gpus:
        return "visible-partial"
    if setup.other_wrapper:
        return "wrapped-late"
    if setup.batch_device == "cpu":
        return "inputs-on-cpu"
    chunks = torch.empty(setup.batch_size).chunk(machine.torch_gpus)
    return "healthy" if len(chunks) == machine.torch_gpus else "batch-too-small"
    ### END SOLUTION


# %% nbgrader={"grade_id": "2.5-check", "grade": true, "points": 3, "locked": true}
check("2.5", diagnose)

# %% [markdown]
# ### Wrapped too late
#
# Wrapping makes a new object. Code that received the model earlier keeps the bare one. A hook notes the rows of
# each forward call:


# %%
class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def step(self, images, labels):
        F.cross_entropy(self.model(images), labels).backward()


rows = []
model = MnistNet().to(home)
model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
too_early = Trainer(model)
in_time = Trainer(HandDataParallel(model, worker_devices(4)))
for trainer in (too_early, in_time):
    rows.clear()
    trainer.step(train_images[:64], train_labels[:64])
    print("rows of each forward call:", rows)

# %% [markdown]
# Nothing fails, and the loss falls all the same; only the shape of the inputs inside `forward` shows the mistake.
# Build the model, move it, wrap it, and use only the wrapper from then on.

# %% [markdown]
# ### Inputs or labels left behind
#
# All tensors of an operation must lie on one device. Some tutorials say that with forgotten inputs the computation
# "will likely default to the CPU or a single GPU". In fact it fails. The device `meta`, whose tensors have no values,
# shows that without a GPU.


# %%
def error_of(operation: Callable, *arguments) -> str:
    try:
        operation(*arguments)
    except (RuntimeError, AttributeError, TypeError) as error:
        return str(error)
    return "no error"


parallel = nn.DataParallel(MnistNet().to(home))
elsewhere = train_labels[:8].to("meta")
print("inputs left behind:", error_of(MnistNet(), torch.zeros(8, 784, device="meta")))
print("labels left behind:", error_of(F.cross_entropy, torch.zeros(8, 10), elsewhere))
print("nn.DataParallel, inputs on the CPU:", error_of(parallel, train_images[:8].cpu()))

# %% [markdown]
# `nn.DataParallel` is the exception: its scatter fetches the inputs from any device. It never sees the labels, so the
# loss still fails if you leave them behind. The repair: `inputs, labels = inputs.to(device), labels.to(device)` in
# every step.

# %% [markdown]
# ### `module.` in the checkpoint
#
# The wrapper keeps your model under the name `module`, so all names in its checkpoint begin with it.

# %%
saved = nn.DataParallel(MnistNet()).state_dict()
print(error_of(MnistNet().load_state_dict, saved))
torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
print(MnistNet().load_state_dict(saved))

# %% [markdown]
# The last two lines repair an existing file. For a new one, save `parallel.module.state_dict()`.

# %% [markdown]
# ### Bug hunt: three mistakes in five lines
#
# Many introductions have lines like these. Find three mistakes before you run the next cell.
#
# ```python
# device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# if device.is_cuda:
#     model = nn.DataParallel(model, gpu_ids=[0, 1, 2])
# loss = loss_function(model(inputs), labels)
# loss.mean().backward()        # averages the losses of the GPUs
# ```

# %%
print("what PyTorch says of the lines, from the top:")
print(error_of(lambda: home.is_cuda))
print(error_of(lambda: nn.DataParallel(MnistNet(), gpu_ids=[0, 1, 2])))
logits = HandDataParallel(MnistNet().to(home), worker_devices(3))(train_images[:9])
print("numbers in the loss:", F.cross_entropy(logits, train_labels[:9]).numel())

# %% [markdown]
# Tensors have `is_cuda`; a device has `device.type == "cuda"`, and one GPU is no reason to wrap: ask for
# `torch.cuda.device_count() > 1`. The argument is called `device_ids`. And there are no losses of single GPUs: the
# outputs were gathered, the loss is one number, and `.mean()` does nothing.

# %% [markdown]
# ## 6. Exercises
#
# | exercise | points | section |
# |---|---|---|
# | 2.1 Scatter, without idle workers | 2 | 2 |
# | 2.2 Replicate, for any model (optional) | 4 | 3 |
# | 2.3 Gather (optional) | 2 | 3 |
# | 2.4 The whole step | 4 | 4 |
# | 2.5 Be the doctor | 3 | 5 |

# %% [markdown]
# ## 7. See it: what more GPUs buy, and what the first one pays
#
# The speed-up is often said to be roughly proportional to the number of GPUs. Here is a model of the time of a step.
# Forward and backward are divided among the GPUs. During the rest only the first GPU and its connection work. A row
# uses each parameter `USES` times, with 2 operations in the forward pass and 4 in the backward pass (Kaplan et al.
# 2020, section 2.1, for one use). The constants are assumptions that you can change.

# %%
LINK, ARITHMETIC, MEMORY = 25e9, 20e12, 1e12  # assumed: bytes, operations and bytes per second
USES = 100  # assumed, as in a convolution


def time_model(gpus, batch, parameters, inputs, outputs, ring):
    """Seconds of each phase of a step, in order; `ring`: NCCL copies the model."""
    copies = min(gpus - 1, 1) if ring else gpus - 1  # that pass through the first GPU's connection
    rows = math.ceil(batch / gpus)
    away, once = batch - rows, parameters * USES * rows / ARITHMETIC
    return {
        "copies": 4 * (parameters * copies + inputs * away) / LINK,
        "forward": 2 * once,
        "loss": 8 * outputs * away / LINK + 16 * outputs * batch / MEMORY,
        "backward": 4 * once,
        "sum": 4 * parameters * copies / LINK,
        "update": 20 * parameters / MEMORY,
    }


# %%
def speedup(gpus, *sizes, ring):
    one, many = (sum(time_model(n, *sizes, ring).values()) for n in (1, gpus))
    return one / many


for ring in (True, False):
    times = [f"{speedup(n, 256, 25_000_000, IMAGE, 1000, ring=ring):.1f}" for n in (1, 2, 4, 8)]
    print("NCCL's ring:" if ring else "one by one: ", *times, "times as fast with 1, 2, 4, 8 GPUs")

# %% [markdown]
# If the model is copied to one GPU after the other, eight GPUs are slower than four. With the ring they are five
# times as fast as one. Move the sliders: which model profits most from eight GPUs, and which is slower with eight
# than with one?

# %%
from course_utils.lesson.explore import Explorer


def draw_load(gpus, rows_per_GPU, million_parameters, thousand_outputs, copies):
    batch, parameters = gpus * rows_per_GPU, million_parameters * 1_000_000
    sizes, outputs = (batch, parameters, IMAGE), thousand_outputs * 1000
    memory = memory_model(gpus, *sizes, KEPT, outputs)
    ring = copies == "NCCL's ring"
    phases = time_model(gpus, *sizes, outputs, ring)
    return ch02.load(gpus, *memory, phases, speedup(gpus, *sizes, outputs, ring=ring))


Explorer(
    draw_load,
    gpus=(1, 8, 4),
    rows_per_GPU=(1, 128, 64),
    million_parameters=(1, 500, 25),
    thousand_outputs=(1, 100, 1),
    copies=["NCCL's ring", "one by one"],
)

# %% [markdown]
# *Left: the first bar also contains the optimizer's state, the whole batch and all outputs. Right: all GPUs compute
# during forward and backward; otherwise only the first one works. Both are calculated, not measured. Much work for
# each parameter pays: with 2 rows for each GPU and copies one by one, eight GPUs are several times slower than one.*

# %% [markdown]
# ## 8. On a cluster: a script, and two processes that do not share
#
# ### Your own script begins here
#
# From here on you extend one file, `mine/train.py`: a training script outside the notebooks. Later chapters ask you
# to change it, and at the end of the course it trains on several machines. It begins on one device: a transformer of
# two layers learns to continue a story of 33,000 characters, one character at a time.

# %%
from course_exercises import mine
from course_utils.lesson.terminal import run_in_terminal, torchrun

script = mine.first()
text = "../data/text/the_long_shed.txt"
print(run_in_terminal(sys.executable, script, "--text", text, "--out", "mine/first"))

# %% [markdown]
# Equal probabilities for all 72 characters give a loss of 4.3. Open `mine/train.py` beside this notebook and find the
# parts below in its 170 lines of plain PyTorch. Exercise 3.6 is the first that changes them.
#
# | in the script | what it does | what changes there |
# |---|---|---|
# | `Windows`, `DataLoader` | cut the text into windows, and shuffle them | each rank reads its own share (chapter 3) |
# | `Transformer` | embeddings, two blocks, an output layer | it is cut (6) and sharded (8) |
# | the loop in `main` | loss, backward, update | gradients are averaged over the ranks (3) |
# | `evaluate` | mean loss on text that was held out | a mean over all ranks (3) |
# | log and `torch.save` | a line for each epoch; the model at the end | one rank writes (3); a restart reads them (9) |
#
# A cluster starts one process per GPU, with a launcher such as `torchrun`. Suppose that it starts this script,
# unchanged, in two processes. The script trains for 3 epochs and prints a line for each. How many lines do the two
# processes print together, and how many *different* ones are among them?

# %% tags=["prediction"]
predicted = {"lines": 6, "different lines": 3}

# %%
printed = torchrun(2, script, "--text", text, "--out", "mine/twice").splitlines()
epochs = [line for line in printed if line.startswith("epoch")]
measured = {"lines": len(epochs), "different lines": len(set(epochs))}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if the two processes shared the work, or one of them the printing.": {"lines": 3},
        "The two processes start with the same seed and read the same text.": {
            "different lines": 6
        },
    },
)

# %% [markdown]
# Both processes trained the same model on the whole text from the same seed: twice the work for the same result. Both
# also wrote the same two files. `nn.DataParallel` would not help, because it sends nothing to another process: each
# process would try to use all GPUs.
#
# What makes processes share is `DistributedDataParallel`, which PyTorch recommends for one machine and for many. Each
# GPU has a process, with its own interpreter lock, its own copy of the model that stays where it is, and its own
# optimizer. No process does the work of the ground floor, and in a step only gradients travel. That is chapter 3, and
# at its end you change this script.

# %% [markdown]
# ## 9. Remember
#
# 1. In every step `nn.DataParallel` scatters the batch, replicates the model, computes in threads and gathers the
#    outputs. The loss and the update happen on the first GPU.
# 2. The gradients of the replicas are summed into the model, because the loss is a mean over all rows. A mean of the
#    chunks' means is something else.
# 3. Each step moves $8 P (n - 1)$ bytes of parameters and gradients, however small the batch is. The first GPU also
#    holds the optimizer, the whole batch and all outputs.
# 4. A process has one interpreter lock, so its replicas take turns in Python.
# 5. One busy GPU has few causes: a variable that hides the others, a batch with too few chunks, a loop that calls the
#    bare model. Print the shapes inside `forward`, or ask `hardware.doctor`.
#
# **Sources**
#
# * PyTorch: [`DataParallel`](https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html), and its
#   source in `torch/nn/parallel/`; [CUDA semantics](https://docs.pytorch.org/docs/stable/notes/cuda.html), "Use
#   nn.parallel.DistributedDataParallel instead of multiprocessing or nn.DataParallel".
# * S. Li et al., *PyTorch Distributed*, VLDB 2020, [arXiv 2006.15704](https://arxiv.org/abs/2006.15704), section 2.2.
# * NVIDIA, *CUDA Programming Guide*, section 5.2.1.1, CUDA_VISIBLE_DEVICES.
# * J. Kaplan et al., *Scaling Laws for Neural Language Models*, 2020, [arXiv
#   2001.08361](https://arxiv.org/abs/2001.08361), section 2.1.
# * Y. LeCun, C. Cortes, C. Burges, *The MNIST database of handwritten digits* (CC BY-SA 3.0).
#
# Next: `03_ddp.ipynb`.
