# %% [markdown]
# # 2. Data parallelism in one process
#
# One Python process can drive several GPUs. `nn.DataParallel` does it with a single line of code, and
# that line turns a training step into six moves. In this chapter you train the course's network on
# all of MNIST, take a training step apart into these moves, do each of them by hand, and find out why
# the first GPU carries most of the load. Then you learn to recognise the reasons why the other GPUs
# stay idle.
#
# PyTorch itself advises against this class, also on one machine, and recommends the one of chapter 3. You meet
# it in much code all the same; its six moves come back in every other technique; and what is wrong with it
# is the best reason for the next chapter.
#
# You need no GPU. Where there is none, CPU threads play the part of the GPUs. They do the same
# computation; only their time is not a GPU's.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn import functional as F

from course_exercises import check, hint
from course_utils import hardware, plots
from course_utils.figures import ch02
from course_utils.lesson import mnist
from course_utils.lesson.models import MnistNet
from course_utils.lesson.predictions import compare

torch.set_num_threads(1)  # the matrices are small: a second core would only wait for the first
hardware.report()

# %% [markdown]
# ## 1. The factory: one head office and its helper floors
#
# Picture a factory with several floors. The ground floor is the **head office**. It keeps the only
# blueprint, and all raw material is delivered to it. When an order comes in, the head office
# photocopies the blueprint for every other floor, deals the material out, and works on its own share
# like everybody else. Finished pieces come back down. The head office alone inspects them, writes
# notes on what was wrong, and sends the notes up. Every floor answers with corrections to the
# blueprint. The head office adds all corrections up, changes its blueprint, and throws the
# photocopies away. The next order starts with new ones.

# %%
figure = ch02.head_office()
plt.show()

# %% [markdown]
# *Three helper floors stand on a head office. Copies of the blueprint and material go up; pieces and
# corrections come down. Only the head office inspects the pieces and changes the blueprint.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a floor | **worker** | a device, and the thread of this process that drives it |
# | head office | worker 0 | the first GPU: it holds the model, the optimizer and the whole batch |
# | photocopying the blueprint | **replicate** | each worker gets a **replica**: a copy of the parameters |
# | dealing out material | **scatter** | each worker gets a **chunk**: some rows of the batch |
# | all floors at work | **parallel forward** | every replica computes the outputs of its chunk |
# | pieces come back down | **gather** | the outputs are put together on worker 0 |
# | inspection, corrections summed | loss and backward | the gradients of all replicas are added into the original's |
# | changing the blueprint | update | one optimizer step, on worker 0 |
#
# This is data parallelism: the same model everywhere, different data. It is the simplest kind,
# because nothing but one process is involved. The price is that everything passes through the head
# office.

# %% [markdown]
# ## 2. The smallest real run: one worker learns MNIST, two workers do one step
#
# First the run that all others must equal: one worker, the whole batch. MNIST has 60,000 training
# images and 10,000 test images of handwritten digits, 28 by 28 grey values each. `mnist.tensors`
# reads the original files. `hardware.device()` is the first GPU, or the CPU where there is none.

# %%
home = hardware.device()
train_images, train_labels = (tensor.to(home) for tensor in mnist.tensors(train=True))
test_images, test_labels = (tensor.to(home) for tensor in mnist.tensors(train=False))
print("training:", tuple(train_images.shape), "test:", tuple(test_images.shape))

# %% [markdown]
# The network has 784 inputs, 50 hidden units and 10 outputs, one for each digit. Its outputs are
# **logits**: scores that the loss function turns into probabilities.

# %%
model = MnistNet()
for name, parameter in model.named_parameters():
    print(f"{name:15} {tuple(parameter.shape)!s:10} {parameter.numel():6} numbers")
parameters = sum(parameter.numel() for parameter in model.parameters())
print(f"together {parameters} numbers of 4 bytes: {4 * parameters} bytes")

# %% [markdown]
# One pass over the data is called an **epoch**. A bar moves while the next cells run, with the current loss
# beside it.


# %%
from IPython.display import display

from course_utils.lesson.explore import Progress


def train(model: nn.Module, epochs: int = 6, batch: int = 200) -> list[float]:
    """Trains with SGD and returns the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps, losses = len(train_images) // batch, []
    progress = Progress(epochs * steps)
    display(progress)
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(train_images)).to(home).split(batch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train_images[rows]), train_labels[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 50 == 0:
                progress.show(len(losses), f"epoch {epoch} of {epochs}, loss {loss.item():.3f}")
        print(f"epoch {epoch}: {steps} updates, mean loss {sum(losses[-steps:]) / steps:.1f}")
    return losses


# %%
torch.manual_seed(0)
model = MnistNet().to(home)
losses = train(model)

# %% [markdown]
# The order of the images was shuffled in every epoch, and `torch.manual_seed(0)` fixed it. Now the
# 10,000 images that the network has never seen. **Accuracy** is the share of images whose largest
# logit belongs to the right digit.


# %%
def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        guesses = model(test_images).argmax(dim=1)
    return (guesses == test_labels).float().mean().item()


print("test accuracy at least 96 %:", accuracy(model) >= 0.96)

# %%
figure = plots.loss_curves({"each batch of 200": losses})
plt.show()

# %% [markdown]
# *The loss falls fast during the first hundred updates and then slowly, with noise from batch to
# batch.*
#
# Now the six moves, with two workers and eight images. `worker_devices` deals the workers round the
# GPUs that exist; without a GPU all of them run on the CPU.


# %%
def worker_devices(workers: int) -> list[torch.device]:
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", i % gpus) if gpus else home for i in range(workers)]


# %% [markdown]
# `functional_call(model, tensors, inputs)` runs `model` with other tensors in the place of its own
# parameters. That is all a replica needs: the code of the model, and a copy of its tensors.

# %%
from torch.func import functional_call

devices = worker_devices(2)
model = MnistNet().to(devices[0])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
images, labels = train_images[:8], train_labels[:8]

own = dict(model.named_parameters())
replicas = [{name: own[name].to(device, copy=True) for name in own} for device in devices]
chunks = [chunk.to(device) for chunk, device in zip(images.chunk(2), devices)]
outputs = [functional_call(model, *pair) for pair in zip(replicas, chunks)]
logits = torch.cat([output.to(devices[0]) for output in outputs])
F.cross_entropy(logits, labels).backward()
optimizer.step()
print("rows on each worker:", [len(chunk) for chunk in chunks])
print("gradients arrived in the original:", all(p.grad is not None for p in model.parameters()))

# %% [markdown]
# The lines from `replicas` to `optimizer.step()` are the six moves: replicate, scatter, forward,
# gather, loss with backward, update. The forward of the two workers still runs one after the other
# here; section 4 puts it into threads.
#
# Nobody wrote a line that adds the gradients up. Autograd does it. The original parameter was copied
# to two workers, so two gradients flow back into it, and where one tensor is used twice its gradient
# is the **sum** of both. The sum, not the mean: the loss on worker 0 is already the mean over all
# rows of the batch.

# %% [markdown]
# ## 3. Predict, then measure: the bytes between the workers, and the loss of unequal chunks
#
# Every copy between two workers is a trip of a truck. Whatever travels out during the forward pass
# has a counterpart that travels back during the backward pass:
#
# | on the way out | on the way back |
# |---|---|
# | replicate: the parameters, to every helper | reduce: the parameters' gradients, to worker 0 |
# | scatter: the helpers' rows of the batch | the gradients of these rows; images need none, so nothing |
# | gather: the helpers' outputs, to worker 0 | the gradients of these outputs, to the helpers |
#
# Take $n$ workers, $P$ parameters, a batch of $B$ rows, and float32 numbers of 4 bytes. A chunk has
# at most $\lceil B / n \rceil$ rows. Worker 0 is the first worker and the head office: it uses the
# original parameters, and its own chunk does not travel. So the helpers hold
# $H = B - \lceil B / n \rceil$ rows, and the bytes are
#
# $$\text{replicate} = \text{reduce} = 4 P (n - 1), \qquad \text{scatter} = 4 \cdot 784 \, H, \qquad
# \text{gather} = \text{back} = 4 \cdot 10 \, H.$$
#
# (These are the steps of `torch/nn/parallel`: `replicate.py`, `scatter_gather.py`, `_functions.py`.)
#
# (The reduce is called "replicate, back" in the cells below, and the way of the outputs' gradients
# "gather, back".) Before you compute it: with 4 workers and 1000 images, what makes up more of the
# bytes, the `"images"` or the `"parameters"` (with their gradients)? Write that down first.

# %% tags=["prediction"]
import math

workers, batch = 4, 1000
helper_rows = batch - math.ceil(batch / workers)
predicted = {
    "replicate": 4 * parameters * (workers - 1),
    "scatter": 4 * 784 * helper_rows,
    "gather": 4 * 10 * helper_rows,
    "gather, back": 4 * 10 * helper_rows,
    "replicate, back": 4 * parameters * (workers - 1),
    "most of the bytes": "images",
}

# %% [markdown]
# To measure it, the copies need a counter. An **autograd function** has a forward and a backward. Our
# truck carries a tensor to a device in the forward, and the gradient home in the backward, and it
# notes each trip.

# %%
trips = []  # (road, bytes), one entry a trip


class Truck(torch.autograd.Function):
    """Carries a tensor to a device, and its gradient back home."""

    @staticmethod
    def forward(ctx, tensor, device, road):
        ctx.home, ctx.road = tensor.device, road
        trips.append((road, tensor.nbytes))
        return tensor.to(device, copy=True)

    @staticmethod
    def backward(ctx, gradient):
        trips.append((f"{ctx.road}, back", gradient.nbytes))
        return gradient.to(ctx.home, copy=True), None, None


# %% [markdown]
# The three moves that need trucks, for worker 0 without a trip and for every helper with one:


# %%
def photocopy(module, devices):
    """The tensors that each worker computes with: the originals, then a copy for every helper."""
    own = dict(module.named_parameters())
    ship = Truck.apply
    copies = [
        {name: ship(own[name], device, "replicate") for name in own} for device in devices[1:]
    ]
    return [own, *copies]


def deal_out(batch, devices):
    """The rows of each worker, on its device; fewer chunks than workers if the batch is small."""
    first, *others = batch.chunk(len(devices))
    return [first, *(Truck.apply(chunk, d, "scatter") for chunk, d in zip(others, devices[1:]))]


def collect(outputs, device):
    """All outputs in the order of the workers, on `device`."""
    first, *others = outputs
    return torch.cat([first, *(Truck.apply(output, device, "gather") for output in others)])


# %%
from collections import Counter


def measured_step(model, images, labels, devices):
    """One forward and backward pass over all workers; returns the bytes of each road."""
    trips.clear()
    chunks = deal_out(images, devices)
    copies = photocopy(model, devices[: len(chunks)])
    outputs = [functional_call(model, *pair) for pair in zip(copies, chunks)]
    F.cross_entropy(collect(outputs, devices[0]), labels).backward()
    totals = Counter()
    for road, size in trips:
        totals[road] += size
    return dict(totals)


devices = worker_devices(workers)
model = MnistNet().to(devices[0])
measured = measured_step(model, train_images[:batch], train_labels[:batch], devices)

# %%
more = measured["scatter"] > measured["replicate"] + measured["replicate, back"]
compare(
    predicted,
    measured | {"most of the bytes": "images" if more else "parameters"},
    likely={
        "As if worker 0's copy travelled too: it uses the original.": {
            road: 4 * parameters * workers for road in ("replicate", "replicate, back")
        },
        "As if worker 0's rows travelled too: they are there already.": {
            "scatter": 4 * 784 * batch,
            "gather": 4 * 10 * batch,
            "gather, back": 4 * 10 * batch,
        },
    },
)
print(sum(measured.values()), "bytes in one step")
print("no other trips:", measured.keys() < predicted.keys())

# %% [markdown]
# With 1000 images the images weigh most. The parameters, though, travel in *every* step and twice,
# however small the batch is. Change `workers` and `batch` and run the cells again. Try a batch that
# the number of workers does not divide. Then try 5 images: the formula fails there. Which part of it?
#
# (5 rows on 4 workers make chunks of 2, 2 and 1 rows. The fourth worker gets no replica, so the $n$ of
# the formula is the number of chunks.)
#
# **The loss of unequal chunks.** Batches rarely divide evenly. `torch.chunk`, which `nn.DataParallel`
# uses too, gives every worker $\lceil B / n \rceil$ rows until none are left. Take 13 rows and 4
# workers. The chunks have 4, 4, 4 and 1 rows. Let $L_i$ be the mean loss of chunk $i$ with $b_i$
# rows. The loss of the batch is the mean over all rows,
#
# $$L = \frac{1}{B} \sum_i b_i L_i ,$$
#
# and this is not the mean of the $L_i$ unless all $b_i$ are equal. Predict how many times too much
# the single row of the last chunk counts in the mean of the four means: $\frac{1}{4}$ instead of
# $\frac{1}{13}$.

# %% tags=["prediction"]
predicted = {"the last row counts, times": 13 / 4}

# %%
with torch.no_grad():
    logits = model(train_images[:13])
row_losses = F.cross_entropy(logits, train_labels[:13], reduction="none").requires_grad_()
chunk_means = torch.stack([chunk.mean() for chunk in row_losses.chunk(4)])
rows = torch.tensor([len(chunk) for chunk in row_losses.chunk(4)], device=home)
weighted = (rows * chunk_means).sum() / 13

print("rows:", rows.tolist())
print("weighted mean equals the loss of the batch:", torch.allclose(weighted, row_losses.mean()))
print("mean of means equals it:", torch.allclose(chunk_means.mean(), row_losses.mean()))
(weight,) = torch.autograd.grad(chunk_means.mean(), row_losses)
compare(predicted, {"the last row counts, times": round(13 * weight[-1].item(), 4)})

# %% [markdown]
# `nn.DataParallel` avoids this: it gathers the *outputs*, and the loss is computed once, over all
# rows, on worker 0. Keep it in mind for models that compute their loss inside `forward`. They get one
# loss per worker back, and the usual `.mean()` over them is the mean of means.

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same parameters with threads, with DataParallel and without
#
# ### Workers in threads
#
# A **thread** is a second line of execution in the same process. It sees the same memory, so nothing
# has to be sent to it. `nn.DataParallel` starts one thread per replica in every forward pass. For
# that, one thing must change. `functional_call` puts the copies into the module while it runs, and
# takes them out afterwards. Two threads that do so with the *same* module would overwrite each
# other's tensors. So each worker gets a frame of its own: a copy of the module on the device `meta`,
# where tensors have a shape and no memory. Two layers that share one tensor as their weight
# are **tied**, and this move unties them. `MnistNet` has no such layers. A model that has some needs a
# plain deep copy, in which they stay tied.


# %%
import copy
from concurrent.futures import ThreadPoolExecutor


def one_core_threads(count):
    """Threads whose operations use one core each; torch keeps this setting thread by thread."""
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


class HandDataParallel(nn.Module):
    """Runs `module` on several workers of this process, as nn.DataParallel does."""

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module, self.devices = module, devices
        self.frames = [copy.deepcopy(module).to("meta") for _ in devices]  # a list: no parameters

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        chunks = deal_out(batch, self.devices)
        copies = photocopy(self.module, self.devices[: len(chunks)])
        with one_core_threads(len(chunks)) as threads:
            outputs = list(threads.map(functional_call, self.frames, copies, chunks))
        return collect(outputs, self.devices[0])


# %% [markdown]
# `threads.map` returns the outputs in the order of the workers, whichever finishes first. An error in
# a worker comes out of it as an error of this cell. The backward pass needs no threads of ours:
# autograd runs it from C++, with one thread per GPU.
#
# ### The test that every technique of this course must pass
#
# Train the same model from the same seed on the same batches for five steps of SGD. Use a batch that
# four workers cannot share equally, 250. In the end the parameters and the last gradients must be
# those of one worker with the whole batch. SGD is used on purpose: an optimizer such as Adam divides
# by the size of the gradient, and hides gradients that are wrong by a constant factor.


# %%
def five_steps(wrap):
    """Parameters and gradients after five steps of wrap(model) on 250 images each."""
    torch.manual_seed(1)
    model = MnistNet().to(home)
    parallel = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        rows = slice(250 * step, 250 * (step + 1))
        optimizer.zero_grad()
        F.cross_entropy(parallel(train_images[rows]), train_labels[rows]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()] + [p.grad for p in model.parameters()]


def largest_difference(left, right):
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


# %%
from functools import partial

big_batch = five_steps(lambda model: model)
for workers in (1, 2, 3, 4):
    by_hand = five_steps(partial(HandDataParallel, devices=worker_devices(workers)))
    difference = largest_difference(big_batch, by_hand)
    print(f"workers: {workers}  parameters and gradients within 1e-5: {difference <= 1e-5}")

# %% [markdown]
# ### nn.DataParallel itself
#
# The same in PyTorch is one line: `nn.DataParallel(model)`. What it does depends on the machine.
#
# | GPUs | what `nn.DataParallel(model)(batch)` does |
# |---|---|
# | 0 | calls `model(batch)`; no copy, no thread, and no warning that nothing is parallel |
# | 1 | moves the model to this GPU when it is wrapped, moves the batch there, calls the model |
# | $n$ | scatters the batch, replicates the model, one thread per replica, gathers on the first GPU |
#
# To see which case you have, look at the rows of each forward call. A **hook** is a function that a
# module calls by itself, here before its forward. Replicas inherit it, so a list behind a hook shows
# how the batch was divided.


# %%
def watch(model: nn.Module) -> list[int]:
    """Returns a list that gets the number of rows of every forward call, replicas included."""
    rows = []
    model.register_forward_pre_hook(lambda module, inputs: rows.append(len(inputs[0])))
    return rows


model = MnistNet().to(home)
rows = watch(model)
parallel = nn.DataParallel(model)
parallel(train_images[:64])
expected = [len(chunk) for chunk in torch.empty(64).chunk(max(1, torch.cuda.device_count()))]
print("one forward call per GPU, and one where there is none:", sorted(rows) == sorted(expected))
print("every row was computed once:", sum(rows) == 64)

# %%
difference = largest_difference(big_batch, five_steps(nn.DataParallel))
print("nn.DataParallel  parameters and gradients within 1e-5:", difference <= 1e-5)

# %% [markdown]
# What four GPUs would do with small batches, you can see by hand on any machine:

# %%
model = MnistNet().to(home)
rows = watch(model)
parallel = HandDataParallel(model, worker_devices(4))
for batch in (64, 10, 5, 1):
    rows.clear()
    parallel(train_images[:batch])
    print(f"batch of {batch:2}: chunks of {sorted(rows, reverse=True)}")

# %% [markdown]
# A batch of 5 leaves one of four workers idle, and a batch of 1 leaves three idle. The reason is
# `torch.chunk`: it makes chunks of $\lceil 5 / 4 \rceil = 2$ rows until none are left.
#
# ### Why the first GPU carries the load
#
# Count what lies on each GPU during a step. Worker 0 keeps the parameters, their gradients, the
# state of the optimizer, the whole batch, and all outputs with what the loss makes of them. A helper
# keeps a replica, the replica's gradients and its own rows, and only until the step ends. With $P$
# parameters, $B$ rows, $R = \lceil B/n \rceil$ rows a worker, $I$ input numbers, $A$ activations and
# $O$ outputs a row, in bytes:
#
# $$M_0 = 4 \, (3 P + I B + A R + 4 \, O B), \qquad M_i = 4 \, (2 P + I R + A R + O R).$$
#
# The 3 counts parameters, gradients and the momentum of SGD. The 4 in $4 \, O B$ counts the gathered
# logits, their log-probabilities and the gradients of both. **Activations** are the results of layers
# that the backward pass needs again.
#
# The time of a step has the same shape. Forward and backward are shared, the rest is not: loss and
# update run on the first GPU alone, the batch and the outputs go through its one connection, and so do
# the copies of the model if they are made one by one. Section 7 puts this into a formula, and shows what
# changes where NCCL, NVIDIA's library for exchanges between GPUs, makes the copies in a ring.


# %%
def memory_model(gpus, batch, parameters, inputs, activations, outputs):
    """Bytes by kind on the first GPU, and on each helper."""
    rows = math.ceil(batch / gpus)
    first = {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": 4 * parameters,
        "activations": 4 * activations * rows,
        "inputs and outputs": 4 * (inputs + 4 * outputs) * batch,
    }
    helper = {
        "parameters": 4 * parameters,
        "gradients": 4 * parameters,
        "activations": 4 * activations * rows,
        "inputs and outputs": 4 * (inputs + outputs) * rows,
    }
    return first, helper


IMAGE, KEPT = 3 * 224 * 224, 5_000_000  # assumed: numbers of one image, activations kept for it

# %%
first, helper = memory_model(4, 256, 25_000_000, IMAGE, KEPT, outputs=50_000)
labels = ["GPU 0"] + [f"GPU {i}" for i in (1, 2, 3)]
figure = plots.memory([first, helper, helper, helper], labels, "A model of the memory in one step")
plt.show()
print(
    "GPU 0 needs more than a helper by a factor of",
    round(sum(first.values()) / sum(helper.values()), 2),
)

# %% [markdown]
# *Four bars, a model, not a measurement: all four GPUs hold the same activations, and the first one
# holds in addition the optimizer's state, the whole batch and all outputs.*
#
# The batch has to be small enough for the *first* GPU. The others have memory left that this program
# cannot use. The more outputs a row has, the worse it gets.
#
# The next cell measures it where there are GPUs, on a network of two layers.


# %%
def measured_memory(gpus, batch=4096, hidden=4096, outputs=10_000):
    """Largest number of bytes that each GPU held during three steps of nn.DataParallel."""
    model = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, outputs)).to(home)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parallel, images = nn.DataParallel(model), train_images[:batch].flatten(1)
    before = [torch.cuda.memory_allocated(i) for i in range(gpus)]
    for i in range(gpus):
        torch.cuda.reset_peak_memory_stats(i)
    for _ in range(3):
        optimizer.zero_grad()
        logits = parallel(images)
        F.cross_entropy(logits, train_labels[:batch]).backward()
        optimizer.step()
    own = sum(4 * p.numel() for p in model.parameters())
    peaks = [torch.cuda.max_memory_allocated(i) - before[i] for i in range(gpus)]
    return [peaks[0] + own, *peaks[1:]], own // 4


# %% tags=["nbval-ignore-output"]
gpus = torch.cuda.device_count()
if gpus == 0:
    print("No GPU to measure. The figure above is a model.")
else:
    peaks, count = measured_memory(gpus)
    ledgers = memory_model(gpus, 4096, count, 0, 4096, 10_000)
    for i, peak in enumerate(peaks):
        size = sum(ledgers[i > 0].values())
        print(f"GPU {i}: measured {peak / 1e6:.0f} MB, model {size / 1e6:.0f} MB")

# %% [markdown]
# ### Why Python's threads hold it back
#
# In its usual build, Python lets only one thread at a time execute Python code. The lock that ensures this is the
# **global interpreter lock** (GIL). PyTorch releases it inside large operations, so two threads can
# multiply matrices at the same moment. They cannot both run the Python code in between. Compare three
# kinds of work: a loop in Python, the forward pass of a small network, a large matrix product. Each
# is done once by one thread, then once by each of two threads at the same time.


# %% tags=["nbval-ignore-output"]
import time


def seconds(work, threads):
    """Shortest of five times that `threads` threads need to do `work` once each."""
    times = []
    with one_core_threads(threads) as pool:
        for _ in range(5):
            start = time.perf_counter()
            list(pool.map(lambda _: work(), range(threads)))
            hardware.settle()  # a GPU's calls return before its work is done
            times.append(time.perf_counter() - start)
    return min(times)


small, eight, square = MnistNet(), torch.randn(8, 784), torch.randn(800, 800)
kinds = {
    "a loop in Python": lambda: sum(i * i for i in range(300_000)),
    "small forward passes": lambda: [small(eight) for _ in range(500)],
    "large matrix products": lambda: [square @ square for _ in range(3)],
}
for name, work in kinds.items():
    ratio = seconds(work, 2) / seconds(work, 1)
    print(f"{name:22} two threads need {ratio:.1f} times the time of one, for twice the work")

# %% [markdown]
# A ratio near 1 means that the threads worked side by side, a ratio near 2 that they took turns. A
# loop in Python takes turns. Large products run side by side, if two cores are free for them. A small
# forward pass is mostly Python, so a second thread helps it little or not at all. Your ratios vary
# from run to run and with whatever else the machine does.
#
# The forward pass of a replica is Python code that asks a GPU for one operation after another. The
# GPU works on its own, but somebody has to ask. With $n$ replicas in one process, $n$ threads ask in
# turn. If a forward pass takes longer to ask for than to compute, more GPUs do not help. One process
# per GPU has one lock per GPU: this is what chapter 3 does.
#
# Our network is an extreme case. Its step is so short that copies and threads cost more than they
# can save, here by hand and on GPUs alike:


# %% tags=["nbval-ignore-output"]
def one_step(parallel):
    F.cross_entropy(parallel(train_images[:200]), train_labels[:200]).backward()


model = MnistNet().to(home)
alone = seconds(partial(one_step, model), 1)
for workers in (2, 4):
    parallel = HandDataParallel(model, worker_devices(workers))
    ratio = seconds(partial(one_step, parallel), 1) / alone
    print(f"workers: {workers}  a step by hand takes {ratio:.1f} times as long as with one worker")

# %% [markdown]
# ## 5. Break it: why only one GPU is busy, and other ways to fail
#
# "My machine has four GPUs, and only one works." The reasons are few, and a program can look for
# them: `hardware.doctor` does. It takes the model that the loop calls, a batch and the optimizer, and
# names each cause, the evidence for it and the repair. First it looks at your machine:

# %% tags=["nbval-ignore-output"]
hardware.doctor(nn.DataParallel(MnistNet().to(home)), train_images[:200])

# %% [markdown]
# You may not have four GPUs, so invent them. A `Machine` is a snapshot of what a program sees: how
# many GPUs the driver lists, what the environment variable `CUDA_VISIBLE_DEVICES` says, how many GPUs
# CUDA gave to this process when it started. A `Setup` describes the training loop. Here is a healthy
# one, and then one thing at a time goes wrong.

# %%
four = hardware.Machine(driver_gpus=4)
healthy = hardware.Setup(
    wrappers=("DataParallel",), model_device="cuda:0", batch_size=256, batch_device="cuda:0"
)
hardware.doctor(machine=four, setup=healthy)

# %% [markdown]
# **CUDA_VISIBLE_DEVICES** is an environment variable with the list of the GPUs that a program may
# see. CUDA reads it once, when it starts in a process. A change after that has no effect on this
# process, even if the variable now says what you want:

# %%
late = hardware.Machine(driver_gpus=4, visible="0,1,2,3", started_gpus=1)
hardware.doctor(machine=late, setup=healthy)

# %% [markdown]
# Four more machines, each with one thing wrong:

# %%
machines = {
    "a list of two": hardware.Machine(driver_gpus=4, visible="0,1"),
    "a GPU that does not exist": hardware.Machine(driver_gpus=4, visible="0,4,1,2"),
    "a driver that does not fit": hardware.Machine(driver_gpus=4, torch_gpus=0),
    "a full first GPU": hardware.Machine(driver_gpus=4, memory_used=(0.9, 0.3, 0.3, 0.3)),
}
for symptom, machine in machines.items():
    [finding] = hardware.doctor(machine=machine, setup=healthy)
    print(f"{symptom}: {finding.cause}\n    {finding.evidence}")

# %% [markdown]
# The same for the training loop. `replace` copies a description with one field changed.

# %%
from dataclasses import replace

loops = {
    "the loop calls the bare model": {"wrappers": (), "other_wrapper": True},
    "the batch has 5 samples": {"batch_size": 5},
    "the inputs stayed behind": {"batch_device": "cpu"},
    "two GPUs were listed": {"device_ids": (0, 1)},
}
for symptom, change in loops.items():
    [finding] = hardware.doctor(machine=four, setup=replace(healthy, **change))
    print(f"{symptom}: {finding.cause}\n    {finding.evidence}")

# %% [markdown]
# `hardware.CAUSES` lists everything that the doctor knows. Now the failures themselves.

# %% [markdown]
# ### A batch of one
#
# You have seen that a batch of one keeps one worker busy. There is a worse case. **Batch
# normalization** divides by the spread of the values in its chunk, and one row has no spread. A batch
# of 13 rows is large enough, but its last chunk is not:

# %%
norm = nn.BatchNorm1d(50, track_running_stats=False)  # no buffers: see exercise 2.2
model = nn.Sequential(nn.Flatten(), nn.Linear(784, 50), norm, nn.Linear(50, 10)).to(home)
parallel = HandDataParallel(model, worker_devices(4))
model(train_images[:13])
print("13 rows on one worker: fine")
try:
    parallel(train_images[:13])
except ValueError as error:
    print("13 rows on 4 workers:", error)

# %% [markdown]
# The repair: batches that leave no small rest. `DataLoader(..., drop_last=True)` drops the last,
# smaller batch of an epoch, which is where such a rest usually comes from.
#
# ### Inputs on the wrong device
#
# An operation needs all its tensors on one device. To see the error without a GPU, use the device
# `meta`, which exists everywhere. Tensors there have no values, but the rule is the same. On a GPU
# the message begins with *Expected all tensors to be on the same device*.

# %%
try:
    MnistNet()(torch.zeros(4, 784, device="meta"))
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# The repair is `images.to(device)` in every step. **Bug hunt.** The web article *Data
# Parallelism & Model Parallelism* says: if you move only the model to the GPU and forget the inputs, the
# computation will "likely default to the CPU or a single GPU". Nothing defaults. A plain model raises the error above. `nn.DataParallel` is the exception: its
# scatter fetches the inputs from wherever they are. The labels, which it never sees, then stop the
# loss.

# %%
parallel = nn.DataParallel(MnistNet().to(home))
logits = parallel(train_images[:8].cpu())
print("DataParallel takes inputs from the CPU, and its outputs are at home:", logits.device == home)
try:
    F.cross_entropy(logits.cpu(), train_labels[:8].to("meta"))
except RuntimeError as error:
    print("labels elsewhere:", error)

# %% [markdown]
# ### Wrapped too late
#
# Wrapping makes a new object. Whoever got hold of the model before keeps the bare one.


# %%
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(self, images, labels):
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()


model = MnistNet().to(home)
rows = watch(model)
trainer = Trainer(model)
model = HandDataParallel(model, worker_devices(4))  # too late
trainer.step(train_images[:64], train_labels[:64])
print("wrapped after the trainer was made:", rows)

rows.clear()
trainer = Trainer(model)
trainer.step(train_images[:64], train_labels[:64])
print("wrapped before:", rows)

# %% [markdown]
# Nothing failed, and the loss would have gone down. Only the shape of the inputs shows it: print it
# inside `forward`, as the hook does here. The order that works is: build the model, move it, wrap it,
# then make the optimizer and everything else from the wrapped one. (The optimizer alone would not
# mind. Wrapping copies no parameter.) The doctor can tell as well, because it looks for wrappers that
# the loop does not use:

# %%
bare = MnistNet()
parallel = nn.DataParallel(bare)
print("the loop calls bare:", "wrapped-late" in hardware.doctor(bare, machine=four).causes)
print("the loop calls parallel:", "wrapped-late" in hardware.doctor(parallel, machine=four).causes)

# %% [markdown]
# ### `module.` in the checkpoint
#
# The wrapper holds your model under the name `module`, and all its parameter names begin with it. A
# checkpoint written by the wrapped model does not fit the bare one:

# %%
import io

parallel = nn.DataParallel(MnistNet())
file = io.BytesIO()
torch.save(parallel.state_dict(), file)
file.seek(0)
saved = torch.load(file, weights_only=True, map_location="cpu")
try:
    MnistNet().load_state_dict(saved)
except RuntimeError as error:
    print(error)

# %% [markdown]
# Two repairs. Save `parallel.module.state_dict()`, and nobody who loads it has to know how it was
# trained. For a file that exists already, take the prefix off:

# %%
torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
print(MnistNet().load_state_dict(saved))
print(
    "the same names when the inner model is saved:",
    list(parallel.module.state_dict()) == list(saved),
)

# %% [markdown]
# ### Bug hunt: an argument that does not exist, and an average that averages nothing
#
# The web article *PyTorch Multi GPU: 4 Techniques Explained* shows these lines. Find two mistakes before
# you run the cell.
#
# ```python
# parallel_net = nn.DataParallel(myNet, gpu_ids=[0, 1, 2])
# predictions = parallel_net(inputs)
# loss = loss_function(predictions, labels)
# loss.mean().backward()        # averages GPU-losses and performs a backward pass
# ```

# %%
try:
    nn.DataParallel(MnistNet(), gpu_ids=[0, 1, 2])
except TypeError as error:
    print(error)

model = MnistNet().to(home)
loss = F.cross_entropy(
    HandDataParallel(model, worker_devices(3))(train_images[:9]), train_labels[:9]
)
print("numbers in the loss before .mean():", loss.numel())
print(".mean() changes it:", loss.mean().item() != loss.item())

# %% [markdown]
# The argument is called `device_ids`. And there are no "GPU losses" to average: the predictions were
# gathered, so the loss is one number already. `.mean()` does nothing here. It is needed, and wrong
# for unequal chunks, where `forward` itself returns the loss (section 3).
#
# ### Bug hunt: a device that is asked the wrong question
#
# The web article *Parallelize Your Way to Faster Deep Learning: Exploring DataParallel* wraps the model
# only where there are GPUs:
#
# ```python
# device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# if device.is_cuda:
#     model = nn.DataParallel(model)
# ```

# %%
try:
    if torch.device("cpu").is_cuda:
        model = nn.DataParallel(model)
except AttributeError as error:
    print(error)
print("a tensor can be asked:", torch.zeros(1).is_cuda)
print("a device has a type:", torch.device("cuda", 1).type)

# %% [markdown]
# `is_cuda` belongs to tensors. A device is asked with `device.type == "cuda"`. And one GPU is not yet
# a reason to wrap: ask `torch.cuda.device_count() > 1`.
#
# ### Bug hunt: the variable that is said to hide your GPUs
#
# *Data Parallelism & Model Parallelism* says that PyTorch sees a single GPU when CUDA_VISIBLE_DEVICES
# is not set, or when it names one. Half of this is wrong. Which half? The next cell starts a fresh Python without
# the variable and asks how many GPUs it sees.

# %%
import os
import subprocess
import sys

environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
program = "import torch; print(torch.cuda.device_count())"
answer = subprocess.run(
    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
)
driver = hardware.machine().driver_gpus or 0  # None where there is no driver to ask
print("without the variable, torch sees every GPU of the driver:", int(answer.stdout) >= driver)

# %% [markdown]
# An unset variable hides nothing: all GPUs are visible. An *empty* one hides all of them, and a list
# hides those that it leaves out (CUDA Programming Guide, section 5.2.1.1). So the article's first
# repair, to set the variable to `0,1,2,3`, changes nothing where it was unset. (Without a GPU both
# numbers of the cell are 0, and it proves little. With several it proves the point.)

# %% [markdown]
# ## 6. Exercises: write the moves yourself, then be the doctor
#
# The functions of sections 3 and 4 serve a simple network: no buffers, no tied parameters, a single
# output tensor. Yours handle more. All of them must work with any list of devices, and a device may
# occur several times in it, as the CPU does here.
#
# **2.1 Scatter, without idle workers** (2 points). `torch.chunk` gave 5 rows to only three of four
# workers. Divide better.

# %%
from collections.abc import Callable


# %% nbgrader={"grade_id": "2.1", "solution": true}
def scatter(batch: torch.Tensor, devices: list[torch.device]) -> list[torch.Tensor]:
    """Divides `batch` among `devices` as evenly as possible.

    batch: any shape with at least one row; rows are counted along dimension 0.
    Returns a list of chunks, chunk i on devices[i], with the rows in their order. The numbers of
    rows differ by at most one, and the larger chunks come first: 5 rows on 4 devices give chunks
    of 2, 1, 1, 1 rows. A batch with fewer rows than devices gives one row to each of the first
    devices and no empty chunk. Gradients flow back through the chunks into `batch`. Written here,
    without torch.nn.parallel.
    """
    ### BEGIN SOLUTION
    count = min(len(devices), len(batch))
    return [part.to(device) for part, device in zip(batch.tensor_split(count), devices)]
    ### END SOLUTION


# %% nbgrader={"grade_id": "2.1-check", "grade": true, "points": 2, "locked": true}
check("2.1", scatter)

# %% [markdown]
# When the check's sentence is not enough, `hint("2.1")` gives the next hint.
#
# **2.2 Replicate** (4 points). A replica is anything that can be called with a batch. Now the model
# may have **buffers**, tensors that belong to it but are not trained, such as the running mean of
# batch normalization. A forward pass may change them in place. `nn.DataParallel` keeps the changes of
# worker 0, because that replica shares the original's tensors, and loses those of the helpers.


# %% nbgrader={"grade_id": "2.2", "solution": true}
def replicate(
    model: nn.Module, devices: list[torch.device]
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """Makes one replica of `model` for each device; model lies on devices[0].

    Returns a list of callables: replicas[i](batch) gives the outputs of the model for a batch on
    devices[i].
    * replicas[0] computes with the parameters and buffers of `model` itself.
    * Every other replica has copies of all parameters and buffers, made now, on its device, also
      where that is devices[0] again. Changes to its buffers do not reach `model`.
    * In a backward pass the gradients of all replicas are added into the parameters of `model`.
      Tied parameters (one tensor under two names) stay tied, and frozen ones stay frozen.
    * Every replica computes in the mode, training or evaluation, that each part of `model` has.
    * Threads may call different replicas at the same time, and none waits for another.
    Written here, without torch.nn.parallel.
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
# **2.3 Gather** (2 points). Models return more than one tensor: a tuple, a dictionary, or the loss
# itself, a tensor without dimensions.


# %% nbgrader={"grade_id": "2.3", "solution": true}
def gather(outputs: list, device: torch.device):
    """Puts the outputs of the workers together on `device`.

    outputs: one output per worker, in the order of the workers, all of the same structure: a
    tensor (rows, ...), where the numbers of rows may differ; a tensor without dimensions; or a
    tuple, list or dict of such outputs, also nested.
    Returns the same structure with the rows of all workers along dimension 0. Tensors without
    dimensions become one vector with a number per worker. Gradients flow back to the outputs, also
    from that vector. Written here, without torch.nn.parallel.
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
# **2.4 The whole step** (4 points). One training step over several workers. You need no threads, and
# nothing of your earlier answers. Divide the batch as `torch.chunk` does.


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
    Each chunk runs on its own device: the first through `model`, every other through a copy of its
    parameters and buffers. The helpers' changes to buffers are lost. Afterwards the gradients
    and the parameters of `model` are those of the same step with the whole batch at once, whatever
    gradients an earlier step left behind; a parameter that gets none in this step has `grad` None.
    Every chunk runs once, in the mode, training or evaluation, that each part of `model` has.
    Written here, without nn.DataParallel.
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
# **2.5 Be the doctor** (3 points). Six broken set-ups and a healthy one, with different numbers each
# time. Only one thing is wrong in each. Decide from the fields of `machine` and `setup`; print
# `hardware.Machine.__doc__` and `hardware.Setup.__doc__` to see what they mean.


# %% nbgrader={"grade_id": "2.5", "solution": true}
def diagnose(machine: hardware.Machine, setup: hardware.Setup) -> str:
    """Names the one reason why not all GPUs of `machine` work in `setup`, without hardware.doctor.

    The model in `setup` is meant for nn.DataParallel. Returns one of
      "visible-partial"   CUDA_VISIBLE_DEVICES leaves out some of the driver's GPUs
      "visible-wrong"     it names a GPU that does not exist, and CUDA stopped reading there
      "visible-late"      it was changed after CUDA had started
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
# ## 7. See it: what more GPUs buy, and what the first one pays
#
# Memory had a formula in section 4. Here is one for the time of a step, with $H = B - R$ rows that
# travel to helpers:
#
# $$T = \underbrace{\frac{8 P (n - 1) + 4 \, (I + 2 \, O) H}{W}}_{\text{copies}}
#   + \underbrace{\frac{6 P u R}{F}}_{\text{forward, backward}}
#   + \underbrace{\frac{16 \, O B + 20 P}{V}}_{\text{loss, update}}$$
#
# The first term is for copies that leave the first GPU one by one. Where PyTorch was built with NCCL, and
# no GPU occurs twice in the list, `nn.DataParallel` broadcasts and sums through it, in a ring. All
# connections together then carry the same $8 P (n-1)$ bytes, but the first GPU's own carries only $8P$, as
# every other link of the ring does. The model knows both.
#
# $W$ is the speed of the first GPU's connection in bytes per second, $V$ that of its memory, $F$ the
# operations per second of each GPU. A row uses each parameter $u$ times, with 2 operations in the
# forward pass and 4 in the backward pass (Kaplan et al. 2020, section 2.1, where $u$ is 1). The update
# reads parameter, gradient and momentum, and writes parameter and momentum. Only the middle term is
# divided among the GPUs. $W$, $V$, $F$ and $u$ are assumptions that you can change, not measurements.

# %%
LINK, ARITHMETIC, MEMORY = 25e9, 20e12, 1e12  # assumed: bytes, operations and bytes per second
USES = 100  # assumed: how often a row uses each parameter, as in a convolution


def time_model(gpus, batch, parameters, inputs, outputs, ring=False):
    """Seconds of each phase of one step, in order; `ring`: NCCL copies the model."""
    copies = min(gpus - 1, 1) if ring else gpus - 1  # that pass through the first GPU's connection
    rows = math.ceil(batch / gpus)
    away = batch - rows
    forward = 2 * parameters * USES * rows / ARITHMETIC
    return {
        "replicate": 4 * parameters * copies / LINK,
        "scatter": 4 * inputs * away / LINK,
        "forward": forward,
        "gather": 4 * outputs * away / LINK,
        "loss": 4 * 4 * outputs * batch / MEMORY,
        "gather, back": 4 * outputs * away / LINK,
        "backward": 2 * forward,
        "reduce": 4 * parameters * copies / LINK,
        "update": 5 * 4 * parameters / MEMORY,
    }


# %%
def shares(gpus, *sizes, ring=False):
    """Share of a step in which helpers compute, and the speed-up over one GPU."""
    step, alone = time_model(gpus, *sizes, ring), sum(time_model(1, *sizes).values())
    return (step["forward"] + step["backward"]) / sum(step.values()), alone / sum(step.values())


# %%
for ring in (False, True):
    print("NCCL's ring" if ring else "one by one")
    for gpus in (1, 2, 4, 8):
        helping, faster = shares(gpus, 256, 25_000_000, IMAGE, 1000, ring=ring)
        print(
            f"GPUs: {gpus}  {faster:.2f} times as fast as one, helpers compute {helping:.0%} of the time"
        )

# %% [markdown]
# Copied one by one, the model makes eight GPUs slower than four: the shared part of the step shrinks
# with every GPU, and the part that passes through the first one grows. NCCL's ring takes that away. What
# stays is that the whole model travels twice in every step, and that loss, update and the way of the
# batch are the first GPU's alone: the helpers still wait for a part of the step. Move the sliders and look for a network that
# profits. Then make it fail, with many parameters and a small batch.

# %%
from course_utils.lesson.explore import Explorer


def draw_load(gpus, batch, million_parameters, thousand_outputs, copies):
    sizes, outputs = (batch, million_parameters * 1_000_000, IMAGE), thousand_outputs * 1000
    first, helper = memory_model(gpus, *sizes, KEPT, outputs)
    ring = copies == "NCCL's ring"
    phases = time_model(gpus, *sizes, outputs, ring)
    _, faster = shares(gpus, *sizes, outputs, ring=ring)
    return ch02.load(gpus, first, helper, phases, faster)


Explorer(
    draw_load,
    gpus=(1, 8, 4),
    batch=(8, 1024, 256),
    million_parameters=(1, 500, 25),
    thousand_outputs=(1, 100, 1),
    copies=["one by one", "NCCL's ring"],
)

# %% [markdown]
# *Left, memory: the first bar is longer than the others by the optimizer, the batch and the outputs.
# Right, one step: all GPUs compute during forward and backward, and all but the first wait during the
# rest. It is a model, not a measurement.*
#
# Three questions for the sliders. How large must the batch be before four GPUs are three times as
# fast as one? What do 100,000 outputs per row do to the first GPU's memory? Which slider makes the
# helpers wait longest?

# %% [markdown]
# ## 8. On a cluster: two processes, two models
#
# `nn.DataParallel` is one process on one machine. It sends nothing to other processes. Under
# `torchrun --nproc-per-node 2 train.py` the script runs twice, and the two processes know nothing of
# each other. Each trains a model of its own, and each tries to use all GPUs. Two ranks show it: each
# takes a data-parallel step on its own images.


# %%
from course_utils.launch import launch


def train_alone(rank):
    torch.manual_seed(0)  # the same start on both ranks
    place = hardware.device()
    model = MnistNet().to(place)
    parallel = HandDataParallel(model, [place, place])
    images, labels = (tensor.to(place) for tensor in mnist.tensors(train=True, limit=200))
    mine = slice(100 * rank, 100 * (rank + 1))
    F.cross_entropy(parallel(images[mine]), labels[mine]).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return model.linear1.weight.detach()


first, second = launch(train_alone, 2)
print("same parameters on both ranks after one step:", torch.equal(first, second))

# %% [markdown]
# For several machines, and even for one machine with several GPUs, PyTorch's documentation recommends
# `DistributedDataParallel`: one process per GPU, each with its own lock, its own copy of the model that
# stays where it is, and its own optimizer. There is no head office. In a step only gradients travel.
# That is chapter 3.

# %% [markdown]
# ### A script of your own begins here
#
# From here on a file grows with you: `mine/train.py`, a training script without a notebook around it. Each of the
# next chapters asks you to change it, and at the end of the course it trains on several machines. It begins small:
# one device, a transformer of two layers, and a story of 33,000 characters that it learns to continue one character
# at a time. `DataLoader`, epochs, an evaluation on text that was held out, a log and a saved model are all there.

# %%
import sys

from course_exercises import mine
from course_utils.lesson.terminal import run_in_terminal

script = mine.script(2)
print(
    run_in_terminal(
        sys.executable, script, "--text", "../data/text/the_long_shed.txt", "--out", "mine/first"
    )
)

# %% [markdown]
# Open the file beside this notebook and read it once from top to bottom, because you will change it: 180 lines of plain
# PyTorch that need nothing of this course. A loss of 4.3 would be a guess among 72 characters.

# %% [markdown]
# ## 9. Remember
#
# 1. `nn.DataParallel` scatters, replicates, computes in threads and gathers, in every step anew.
#    Your loop then computes loss and update on the first GPU.
# 2. Gradients of replicas are *summed* into the original. The result is that of the big batch, because
#    the loss is the mean over all gathered rows. A mean of chunk means is something else.
# 3. Each step moves $8 P (n - 1)$ bytes of parameters and gradients, however small the batch is. The
#    first GPU holds the optimizer, the batch and all outputs, so its memory limits the batch.
# 4. One process has one interpreter lock: replicas take turns in Python. One process per GPU is faster.
# 5. One busy GPU has few causes: a variable that hides GPUs, a batch with too few chunks, a loop that
#    calls the bare model. Look at the shapes inside `forward`, or ask `hardware.doctor`.
#
# **Sources**
#
# * PyTorch documentation: `torch.nn.DataParallel`; CUDA semantics, section "Use
#   nn.parallel.DistributedDataParallel instead of multiprocessing or nn.DataParallel";
#   `torch.func.functional_call`; `torch.chunk`.
# * PyTorch source, `torch/nn/parallel/`: `data_parallel.py`, `replicate.py`, `scatter_gather.py`,
#   `parallel_apply.py`, `_functions.py`.
# * S. Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020,
#   section 2.2.
# * NVIDIA, *CUDA Programming Guide*, section 5.2.1.1, CUDA_VISIBLE_DEVICES.
# * Python documentation, glossary: global interpreter lock.
# * J. Kaplan et al., *Scaling Laws for Neural Language Models*, 2020, section 2.1.
# * Y. LeCun, C. Cortes, C. Burges, *The MNIST database of handwritten digits* (CC BY-SA 3.0).
#
# Next: `03_ddp.ipynb`.
