# %% [markdown]
# # 13. The capstone: one model, one file of your own
#
# Twelve chapters had one question each. This one has an order, as a workshop gets it. One model is to be trained
# by a file that you write. It starts in this notebook. `torchrun` starts it on one machine, then on two hosts. A node of
# them dies, and the training goes on without a lost sample. At the end stands a plan for 1,024 GPUs.
#
# The order has a budget: four ranks together, each with no more memory than twice the parameters. A copy of the model on
# every rank does not fit. How you split it is your choice. Three ways pass that have little in common.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch.nn.functional import avg_pool2d, cross_entropy

from course_planner.figures import ch13
from course_utils import hardware
from course_utils.figures import ch09
from course_utils.launch import launch
from course_utils.lesson import mnist
from course_utils.lesson.equality import equal, flat
from course_utils.lesson.models import ResidualNet

hardware.report()

# %% [markdown]
# ## 1. The factory: the masterpiece
#
# Whoever had learned a trade made one piece alone, from the drawing to the delivery, and the guild looked at it.
# It did not ask how the piece was made. It measured. Does it fit? Is it as good as the one that a master makes alone? Did it
# stay within the material that was handed out? And what if a helper falls ill on the third day?

# %%
figure = ch13.way()
plt.show()

# %% [markdown]
# *One file, five stations. The file is the same at each of the first four; the last is a plan.*
#
# | the guild measures | in PyTorch | you know it from |
# |---|---|---|
# | as good as by one master | parameters, momentum and loss of one process | chapters 2 and 3 |
# | material handed out | the peak of a rank's memory, and the bytes that it sends | chapters 6 and 8 |
# | a helper falls ill | a killed node; checkpoints, the order of samples | chapter 9 |
# | a second workshop | another host, and another number of ranks | chapters 3 and 9 |
# | the offer for the large order | layout, seconds and interval for 1,024 GPUs | chapters 9 and 12 |

# %% [markdown]
# ## 2. The smallest real run: the order, and a first try
#
# The model has a first layer, blocks that add to what they get, and a last layer. The images of MNIST come as 7 x 7
# pixels.

# %%
torch.set_num_threads(1)  # so small a model loses time with more
images, labels = mnist.tensors(train=True, limit=480)
images = avg_pool2d(images, 4).flatten(1)  # (480, 49)


def new_model(width=36, blocks=10):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ResidualNet(width, blocks)


print(f"{sum(p.numel() for p in new_model().parameters()):,} parameters")

# %% [markdown]
# The form is fixed, so that the guild can measure: an object that is made from a model, takes steps, and hands out its
# state. `step` gets the **global batch**, on every rank the same, and returns its loss. What a rank does with it is its
# business. Here is a first try, as plain as it gets: every rank has a copy.


# %%
class Copies:
    """Each rank holds everything, and takes every n-th row of a batch."""

    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model, self.lr, self.momentum = model.to(hardware.device()), lr, momentum
        self.velocity = [torch.zeros_like(p) for p in self.model.parameters()]

    def step(self, images, labels):
        mine = torch.arange(dist.get_rank(), len(images), dist.get_world_size())
        scores = self.model(images[mine])
        loss = cross_entropy(scores, labels[mine], reduction="sum") / len(images)
        weights = list(self.model.parameters())
        results = [loss.detach().clone(), *torch.autograd.grad(loss, weights)]
        for result in results:
            dist.all_reduce(result)
        for weight, speed, gradient in zip(weights, self.velocity, results[1:]):
            speed.mul_(self.momentum).add_(gradient)
            weight.data.sub_(speed, alpha=self.lr)
        return results[0].item()


# %%
def some_steps(rank, make, ranks_batch):
    training = make(new_model())
    device = hardware.device()
    for rows in torch.arange(3 * ranks_batch).split(ranks_batch):
        loss = training.step(images[rows].to(device), labels[rows].to(device))
    return flat(training.model.parameters()), loss


[(alone, loss)] = launch(some_steps, 1, Copies, 22)
for ranks in (2, 4):
    results = launch(some_steps, ranks, Copies, 22)
    same = equal(alone, [parameters for parameters, _ in results])
    print(f"{ranks} ranks: parameters as alone: {same}, loss: {abs(results[1][1] - loss) < 1e-5}")

# %% [markdown]
# The first mark is reached. 22 rows do not divide by 4, and nobody notices.
#
# ## 3. Predict, then measure: why copies break the budget
#
# The **budget**, on four ranks, for a model whose parameters have P bytes:
#
# * memory: at no moment of a step more than 2 P bytes of tensors, activations and all;
# * bytes: in a step at most 3.2 (n - 1) / n P sent on a ring. Plain FSDP sends 3 (chapter 8), an
#   all-reduce 2.
#
# The momentum of SGD has as many numbers as the model. **Predict** what a rank of four holds with `Copies`, in whole P: parameters,
# gradients, momentum. And what it holds with `DistributedDataParallel`, which sends gradients in buckets
# that it keeps beside them. Then what each sends, in kB.

# %% tags=["prediction"]
P = 4 * sum(p.numel() for p in new_model().parameters())
predicted = {
    "copies: held, in P": 1 + 1 + 1,
    "DDP: held, in P": 1 + 1 + 1 + 1,
    "copies: sent, kB": round(2 * 3 / 4 * P / 1000),
    "DDP: sent, kB": round(2 * 3 / 4 * P / 1000),
}

# %% [markdown]
# ## 4. By hand, then with PyTorch: the same copies in PyTorch's hands
#
# `Copies` sums the gradients by hand. The next class lets DDP do it, which averages over ranks: so a share's
# sum is multiplied by n, and not its mean. The optimizer is PyTorch's, too.

# %%
from torch.nn.parallel import DistributedDataParallel


class WithDDP(Copies):
    def __init__(self, model, lr=0.1, momentum=0.9):
        self.model = model.to(hardware.device())
        self.copy = DistributedDataParallel(self.model)
        self.sgd = torch.optim.SGD(self.copy.parameters(), lr, momentum)

    def step(self, images, labels):
        self.sgd.zero_grad()
        n, rank = dist.get_world_size(), dist.get_rank()
        total = cross_entropy(self.copy(images[rank::n]), labels[rank::n], reduction="sum")
        (total / len(images) * n).backward()
        self.sgd.step()
        mean = total.detach() / len(images)
        dist.all_reduce(mean)
        return mean.item()


results = launch(some_steps, 4, WithDDP, 22)
print("parameters as alone:", equal(alone, [parameters for parameters, _ in results]))

# %% [markdown]
# Two meters. `Sampling` adds up, after every operation, all tensors that a rank has at that moment. `Trace` notes the calls. The third
# step is measured, when all that is made once is there.

# %%
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, ring_bytes
from course_utils.trace.meters import Sampling


def measured_step(rank, make):
    training, device = make(new_model()), hardware.device()
    rows = images[:22].to(device), labels[:22].to(device)
    training.step(*rows)
    training.step(*rows)
    with Sampling() as memory, Trace() as trace:
        training.step(*rows)
    return memory.peak, ring_bytes(trace.record().calls)


measured = {}
for name, make in {"copies": Copies, "DDP": WithDDP}.items():
    peak, sent = launch(measured_step, 4, make)[0]
    measured |= {f"{name}: held, in P": round(peak / P), f"{name}: sent, kB": round(sent / 1000)}
compare(predicted, measured, {"As if buckets were the gradients.": {"DDP: held, in P": 3}})

# %% [markdown]
# Both send little enough, and both hold too much. The budget rules out every copy of the parameters that stays beside a copy of the
# gradients. ZeRO 1 holds 2 P before it has its share of the momentum, so it is out too. What is left?
#
# * ZeRO 3 (chapter 8): everything in shards, a block whole only while it computes.
# * Tensor parallelism (chapter 6): nothing is ever whole, and activations travel instead.
# * Both, on a grid (chapter 7), or pairs of ranks that share out a copy.

# %% [markdown]
# ## 5. Break it
#
# ### Bug hunt: the mean of the means
#
# Most scripts take the mean loss of a rank's share, and let DDP average. With 24 rows on four ranks that is right. Here are
# 22. What is wrong, and by how much?


# %%
class MeanOfMeans(WithDDP):
    def step(self, images, labels):
        self.sgd.zero_grad()
        share, answers = (t.tensor_split(dist.get_world_size()) for t in (images, labels))
        loss = cross_entropy(self.copy(share[dist.get_rank()]), answers[dist.get_rank()])
        loss.backward()
        self.sgd.step()
        return loss.item()


for rows in (24, 22):
    [(expected, _)] = launch(some_steps, 1, Copies, rows)
    results = launch(some_steps, 4, MeanOfMeans, rows)
    print(f"{rows} rows: as alone: {equal(expected, [p for p, _ in results])}", end=", ")
    print("losses as alone:", len({round(loss, 6) for _, loss in results}) == 1)

# %% [markdown]
# Two ranks have six rows and two have five. Each share counts a quarter, so a row of a five counts 1/20 and one of a six 1/24,
# where all should count 1/22: 10 % too much, 8 % too little. The loss that is returned is that of a share in
# both cases. Nothing fails, and the curve falls.
#
# ### A life without a safe
#
# The training loop is yours as well. This one has no checkpoints. It counts how often each sample is used when the
# ranks are killed after 7 of 20 steps, and started again.


# %%
def without_a_safe(rank, steps, dies_after=None):
    used = torch.zeros(480, dtype=torch.int64)
    for step in range(steps):
        if step == dies_after:
            break  # as the file knows it: everything in memory is gone
        used += torch.bincount(torch.arange(48 * step, 48 * step + 48) % 480, minlength=480)
    return used


[first_life] = launch(without_a_safe, 1, 20, 7)
[second_life] = launch(without_a_safe, 1, 20)
uses = first_life + second_life
for times in (2, 3):
    print(f"used {times} times: {(uses == times).sum().item()} samples")

# %% [markdown]
# The second life knows nothing of the first, and does 7 steps again. Here that is a waste. With a checkpoint of the model
# only it would be an error: parameters that have seen some samples three times.

# %% [markdown]
# ## 6. Exercises: the file, piece by piece
#
# Two pieces make the file, and the third is the plan. Each is graded by what it does. No way is prescribed,
# and all that the course has is allowed.

# %%
import hashlib
import io
import math
import os
from pathlib import Path

from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import course_planner as estimate
from course_exercises import check, hint
from course_planner import Hardware, Layout, Model

# %% [markdown]
# ### 13.1 A training within the budget (6 points)
#
# The budget of section 3 on four ranks. With fewer ranks only the numbers must be right. The check takes models with widths that are multiples
# of 12, on one to four ranks, and batches of any size, also of fewer rows than ranks.


# %% nbgrader={"grade_id": "13.1", "solution": true}
class Training:
    """One model that all ranks train together with SGD and momentum, none of which holds all of it.

    Every rank makes one from a model with the same values, and calls the same methods in the same
    order; the process group is initialised. Nothing else keeps the model that was handed over.
    """

    def __init__(self, model: ResidualNet, lr: float = 0.1, momentum: float = 0.9) -> None:
        ### BEGIN SOLUTION
        self.model = model.to(hardware.device())
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        ### END SOLUTION

    def step(self, images: Tensor, labels: Tensor) -> float:
        """One step on the global batch, which every rank gets whole: images (N, 49), labels (N,).

        The loss is the mean cross-entropy of all N rows. Parameters and momentum end as in one process
        with `torch.optim.SGD`. Returns the loss of the global batch before the step, on every rank.
        """
        ### BEGIN SOLUTION
        ranks, rank = dist.get_world_size(), dist.get_rank()
        share = images.tensor_split(ranks)[rank], labels.tensor_split(ranks)[rank]
        loss = cross_entropy(self.model(share[0]), share[1], reduction="sum") / len(images)
        (loss * ranks).backward()  # FSDP divides the sum of the gradients by the ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss.item()
        ### END SOLUTION

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns {"model": {name: tensor}, "momentum": {name: tensor}} on every rank.

        The names are those of the model's parameters. Each tensor is whole, on the CPU, and a copy: later
        steps do not change it. Before the first step the momentum is zeros. Here a rank may hold more than the budget.
        """
        ### BEGIN SOLUTION
        state = {"model": {}, "momentum": {}}
        for name, parameter in self.model.named_parameters():
            velocity = self.optimizer.state[parameter].get("momentum_buffer")
            if velocity is None:
                velocity = torch.zeros_like(parameter)
            state["model"][name] = parameter.detach().full_tensor().cpu().clone()
            state["momentum"][name] = velocity.detach().full_tensor().cpu().clone()
        return state
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Goes on from what `state_dict` returned, of any number of ranks."""
        ### BEGIN SOLUTION
        for name, parameter in self.model.named_parameters():

            def cut(whole: Tensor, parameter: DTensor = parameter) -> DTensor:
                whole = whole.to(parameter.device)
                return distribute_tensor(whole, parameter.device_mesh, parameter.placements)

            with torch.no_grad():
                parameter.copy_(cut(state["model"][name]))
            self.optimizer.state[parameter]["momentum_buffer"] = cut(state["momentum"][name])
        ### END SOLUTION


# %% nbgrader={"grade_id": "13.1-check", "grade": true, "points": 6, "locked": true}
check("13.1", Training)

# %% [markdown]
# ### 13.2 A loop that loses nothing (4 points)
#
# The loop around it: the order of the samples, the checkpoints, and how a new life begins. The check brings a `training` of its
# own that notes what it gets, kills at known moments, damages files, and starts again with another number of ranks.


# %% nbgrader={"grade_id": "13.2", "solution": true}
def train(
    training: Training,
    images: Tensor,
    labels: Tensor,
    folder: Path,
    steps: int,
    batch: int,
    every: int,
) -> None:
    """Trains until `steps` steps are done, on every rank; a new life goes on where the last one saved.

    An epoch has each row of `images` once, in an order that differs from epoch to epoch and depends on nothing
    else; a step takes the next `batch` rows of it, the last one of an epoch what is left over. Every rank hands
    the same global batch to `training.step`. All ranks see `folder`; it may not exist yet. After every `every`
    steps, and after the last, a checkpoint is written there, and is complete before the next step begins. It
    holds `training.state_dict()`, which all ranks call together. Killed at any moment, also while it
    saves, or with its newest file cut or a byte of it changed, it goes on from the newest checkpoint that is whole. It keeps at
    least two. The last step may come in the middle of an epoch; if all steps are done, none is made.
    """
    ### BEGIN SOLUTION
    folder, rank = Path(folder), dist.get_rank()
    folder.mkdir(parents=True, exist_ok=True)
    done = 0
    for path in sorted(folder.glob("step-*.pt"), reverse=True):
        digest, content = path.read_bytes()[:32], path.read_bytes()[32:]
        if hashlib.sha256(content).digest() == digest:
            saved = torch.load(io.BytesIO(content), weights_only=True)
            training.load_state_dict(saved["training"])
            done = saved["done"]
            break
    dist.barrier()  # nobody writes until all have read
    in_an_epoch = math.ceil(len(images) / batch)
    while done < steps:
        epoch, place = divmod(done, in_an_epoch)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        rows = order[place * batch : (place + 1) * batch]
        training.step(images[rows], labels[rows])
        done += 1
        if done % every and done < steps:
            continue
        state = {"done": done, "training": training.state_dict()}
        if rank == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            partial = folder / "unfinished"
            with open(partial, "wb") as file:
                file.write(hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue())
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, folder / f"step-{done:09d}.pt")
            for path in sorted(folder.glob("step-*.pt"))[:-2]:
                path.unlink()
        dist.barrier()
    ### END SOLUTION


# %% nbgrader={"grade_id": "13.2-check", "grade": true, "points": 4, "locked": true}
check("13.2", train)

# %% [markdown]
# ### 13.3 The plan (3 points)
#
# The large order: a transformer, a thousand GPUs, and nodes that fail. Chapter 12's `estimate` is yours to use, and chapter 9's
# $\tau^* = \sqrt{2CM}$. Two regrets are measured. A step may be at most 10 % longer than with the fastest layout that
# `estimate.search` finds, and at most 5 % more time may be lost than with the best interval of your layout.


# %% nbgrader={"grade_id": "13.3", "solution": true}
def plan(
    model: Model,
    gpus: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    node_days: float,
    disk: float,
) -> tuple[Layout, int]:
    """Returns a layout of all `gpus`, and how many steps lie between two checkpoints.

    The layout has `batch` sequences of `seq` tokens in a step, is legal (`Layout.check`), and its
    fullest rank holds at most 90 % of `hardware.hbm_bytes` (`estimate.memory`). A step takes
    `estimate.step_time`. A checkpoint has 14 bytes a parameter, parameters and optimizer in mixed
    precision, each written once, at `disk` bytes a second for all ranks together; training waits. A node has `hardware.node` GPUs and fails every
    `node_days` days on average; the job fails with the first. At least one step.
    """
    ### BEGIN SOLUTION
    plans, rejected = estimate.search(model, gpus, batch, seq, hardware, keep=1)
    if not plans:
        raise ValueError(f"No layout of {gpus} GPUs fits: {dict(rejected)}.")
    [best] = plans
    save = 14 * estimate.parameters(model) / disk
    job_mtbf = node_days * 24 * 3600 / (gpus / hardware.node)
    return best.layout, max(1, round(math.sqrt(2 * save * job_mtbf) / best.time.seconds))
    ### END SOLUTION


# %% nbgrader={"grade_id": "13.3-check", "grade": true, "points": 3, "locked": true}
check("13.3", plan)

# %% [markdown]
# ## 7. See it: the budget
#
# What stays on a rank under ZeRO's stages, against the budget. Three things to try:
#
# * 2 ranks. Which stage keeps within the budget, and how much room is left for a block that is gathered?
# * 16 ranks. Why does ZeRO 1 not get below it, with however many?
# * Another width. What changes, and what does not?

# %%
from course_utils.lesson import explore

explore.Explorer(ch13.budget, ranks=(2, 16, 4), width=(12, 120, 36))

# %% [markdown]
# *At the start: four ranks. ZeRO 2 holds 1.5 P between its steps, but its gradients are whole before they are scattered,
# unless that is done block by block. Calculated, not measured.*

# %% [markdown]
# ## 8. On a cluster: your file goes its way
#
# Now the stations. What follows runs *your* `Training` and `train`, and says what is missing while they are not
# written. First the reference: your loop around `Copies`, on one process. `Watched` counts how often each sample is used; it is handed numbers of samples in place of
# the samples, and its counts are in the checkpoint with the rest.

# %%
import shutil

from course_hosts import capstone
from course_utils.lesson.terminal import scratch

STEPS, BATCH, EVERY = 20, 48, 3


class Alone(Copies):
    def state_dict(self):
        names = dict(self.model.named_parameters())
        return {"model": {name: p.detach().cpu().clone() for name, p in names.items()}}


def alone_in_the_loop(rank, folder):
    watched = capstone.Watched(Alone(new_model()), images, folder)
    train(watched, torch.arange(480), labels, folder / "saved", STEPS, BATCH, EVERY)
    return watched.state_dict()


# %%
def empty(name):
    folder = (scratch() / name).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    torch.save((images, labels), folder / "data.pt")
    return folder


ready = capstone.written({"13.1": Training, "13.2": train})
if ready:
    [reference] = launch(alone_in_the_loop, 1, empty("alone"))
    print("each sample used twice:", (reference["used"] == 2).all().item())

# %% [markdown]
# **The file.** The notebook's cells become a program: your two pieces, the imports and definitions that they need, and four lines
# below. Look at `scratch/my_training.py` afterwards; it is a file to keep.

# %%
ENDING = """\
if __name__ == "__main__":
    from course_hosts.capstone import run_as_program

    run_as_program(lambda: Training(new_model()), train, steps=20, batch=48, every=3)
"""
program = scratch() / "my_training.py"
if ready:
    capstone.write_file(program, [Training, train, new_model], ENDING)
    print("written")


# %%
def judge(folder):
    """Compares what a run of the file has left with the reference."""
    result = torch.load(folder / "result.pt", weights_only=True)
    expected = flat(reference["training"]["model"].values())
    same = equal(expected, [flat(result["training"]["model"].values())])
    print(f"{result['done']} steps, parameters as one process: {same}, ", end="")
    print("each sample used twice:", (result["used"] == 2).all().item())


# %% [markdown]
# `torchrun`, on three ranks of this machine.

# %%
from course_utils.lesson import terminal

if ready:
    folder = empty("on_one_machine")
    print(terminal.torchrun(3, program, folder), end="")
    judge(folder)

# %% [markdown]
# **Two hosts, and a node that dies.** Where this machine lets you, the nodes are two hosts that have nothing in common but a
# cable and the files: network namespaces of Linux, which need root. Elsewhere two agents play them. The next cell says which. Node B is killed
# after 8 steps, with its agent; the newest checkpoint is that of step 6, and A goes on from there, alone.

# %% tags=["nbval-ignore-output"]
print(capstone.kind_of_nodes())

# %%
if ready:
    folder = (scratch() / "two_nodes").resolve()
    with capstone.two_nodes(folder, str(program)) as nodes:
        torch.save((images, labels), folder / "data.pt")
        nodes.start("A")
        nodes.start("B")
        nodes.train(ranks=2, first=0, until=8)
        nodes.kill_node("B")
        nodes.train(ranks=1, first=6)
    judge(folder)
    figure = ch09.night(nodes)
    plt.show()

# %% [markdown]
# *If the file is written: above, who was there; below, how far the training was. Two steps were done twice, and none counts
# twice. With one rank everything is in one place, and the parameters are the same.*
#
# **The plan.** GPT-3's size, on 1,024 H100 in machines of eight, with nodes that fail every 300 days and a file system that takes
# 50 GB/s.

# %%
gpt = Model(96, 12_288, 96, 51_200, tied=False, bias=False)
h100 = Hardware(989e12, 80 * 10**9, 3.35e12, 8, 450e9, 5e-6, 50e9, 15e-6)
if capstone.written({"13.3": plan}):
    layout, interval = plan(gpt, 1024, 1536, 2048, h100, node_days=300, disk=50e9)
    print("GPUs:", layout.gpus, " sequences:", layout.sequences())
    seconds = estimate.step_time(gpt, layout, 2048, h100).seconds
    print("layout:", estimate.described(layout))
    print(
        f"{seconds:.1f} s a step, and a save every {interval} steps, {interval * seconds / 60:.0f} minutes"
    )
    best = estimate.search(gpt, 1024, 1536, 2048, h100, keep=1)[0][0]
    print("regret at most 10 %:", seconds / best.time.seconds - 1 <= 0.1)

# %% [markdown]
# What changes on a real cluster:
#
# * **The file keeps its form.** `torchrun` with the options of chapter 9 in place of the notebook, a dataset in place of `data.pt`, NCCL
#   in place of gloo.
# * **Checkpoints.** A state that is whole on a rank does not fit any more. `torch.distributed.checkpoint` writes it in
#   parts (chapter 8).
# * **More to read.** The folder `cluster/` has such a file, with all that a cluster adds. Read it now: you know each line.
# * **The plan is a beginning.** Measure the links, calibrate with a few steps, and search again (chapter 12).

# %% [markdown]
# ## 9. Remember
#
# 1. One process is the measure: parameters, momentum, loss. Whatever is split must give its numbers.
# 2. A row counts as much as another one: divide by the rows of the global batch, not by those of a share.
# 3. Memory is a peak, with gradients and buckets. If parameters *and* gradients stay whole, nothing else saves it.
# 4. What shapes the result belongs to the step: order, batch, momentum. Then the number of ranks is free.
# 5. A checkpoint is written aside, verified, and one more is behind it. Choose its interval for the whole job.
#
# **Sources**
#
# * S. Rajbhandari et al., *ZeRO*, 2019, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): sections 5 and 7.
# * M. Shoeybi et al., *Megatron-LM*, 2019, [arXiv 1909.08053](https://arxiv.org/abs/1909.08053): section 3.
# * J. W. Young, *A first order approximation to the optimum checkpoint interval*, Communications of the ACM 17(9), 1974.
# * PyTorch: [`fully_shard`](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   [DTensor](https://docs.pytorch.org/docs/stable/distributed.tensor.html),
#   [torchrun](https://docs.pytorch.org/docs/stable/elastic/run.html).
