# %% [markdown]
# # 8. FSDP: no rank holds the whole model
#
# In data parallelism every rank holds the same parameters, gradients and optimizer state: 64 GPUs hold 64 equal copies.
# A rank needs all parameters for a step, but never all of them at the same moment. In **fully sharded data
# parallelism**, FSDP, each rank keeps a part and fetches the rest just before it is used.
#
# You build this by hand, then use PyTorch's own `fully_shard` with mixed precision, the meta device and checkpoints.
# Accumulation, recomputation and meshes of two dimensions are in `08_fsdp_further`.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch08
from course_utils.launch import RankFailure, launch
from course_utils.lesson import explore, text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, kept_for_backward, memory_ledger, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: every building keeps a part of each page
#
# Four buildings work from the same blueprint. Each has a copy of every page, of the change notes for it, and of the
# records of earlier changes: the same things take up room four times. But a building works on one page at a time.
#
# So each building keeps a quarter of every page, with its notes and records. When page 3 is needed, a round of trucks
# brings every building the quarters that it lacks. The buildings use the page and throw the copies away. Then comes
# page 4.

# %%
ch08.pages()
plt.show()

# %% [markdown]
# *Page 3 is in use. Of every other page, each building has only its own quarter.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | page of the blueprint | **unit** | layers whose parameters are fetched together, usually one block |
# | quarter of a page | **shard** | the part of a unit that one rank keeps |
# | a round of trucks with the quarters | **all-gather** | every rank gets the whole unit |
# | throwing the copies away | **reshard** | only the rank's own shard stays |
# | a round of trucks with change notes, each to the keeper of its quarter | **reduce-scatter** | each rank gets the summed gradient of its own shard |
# | records of earlier changes | **optimizer state** | momentum, or Adam's two averages |
#
# Each building still does all the work on its own material: this is data parallelism.

# %% [markdown]
# ## 2. The smallest real run: a layer that no rank holds
#
# Two ranks share one layer: each keeps half of the rows of its weight. A step gathers the weight, computes with it and
# frees it. A reduce-scatter then adds up the gradients of both ranks and leaves each rank the sum for its half.

# %%
from torch.nn.functional import linear


def half_a_layer_each(rank, reduce):
    torch.manual_seed(0)  # the same numbers on both ranks
    weight, inputs = (torch.randn(rows, 4).to(hardware.device()) for rows in (8, 6))
    shard = weight.chunk(2)[rank].clone()  # what this rank keeps: 4 of 8 rows
    whole = torch.empty_like(weight)
    dist.all_gather(list(whole.chunk(2)), shard)
    whole.requires_grad_()
    linear(inputs[rank::2], whole).square().sum().backward()  # this rank's half of the batch
    gradient = whole.grad.chunk(2)[rank].clone()
    if reduce:
        dist.reduce_scatter(gradient, list(whole.grad.chunk(2)))
    return (shard - 0.01 * gradient).cpu()


def the_layer_on_one_process():
    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4)
    linear(inputs, weight).square().sum().backward()
    return (weight - 0.01 * weight.grad).detach()


# %%
one_process = the_layer_on_one_process()
right, wrong = (torch.cat(launch(half_a_layer_each, 2, reduce)) for reduce in (True, False))
print("largest difference from one process: ", check_equal(one_process, [right]))
print("the same without the reduce-scatter: ", largest_difference(one_process, [wrong]))

# %% [markdown]
# Between two steps no rank holds the whole layer. The rest of the chapter shards a whole model.

# %% [markdown]
# ## 3. Predict, then measure: what a rank holds and sends
#
# ### The model, and one process to compare with
#
# A language model of four blocks (chapter 6) learns from the course's story. Each rank takes its own windows of the
# batch. One process trains on all of them. The optimizer is SGD with momentum: it has a state, and unlike Adam it does
# not hide gradients that are wrong by a factor.

# %%
from functools import partial

from course_utils.lesson.models import LanguageModel

CONTEXT, WINDOWS, STEPS, WIDTH, LAYERS = 16, 12, 3, 32, 4
momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
build = partial(LanguageModel, len(text.vocabulary()), WIDTH, 4, LAYERS, CONTEXT)


def new_model() -> LanguageModel:
    torch.set_num_threads(1)  # a model as small as this one loses time with more
    torch.manual_seed(0)
    return build().to(hardware.device())


def batches(steps=range(STEPS), rank=0, ranks=1):
    """This rank's windows of each batch; 12 of them is a multiple of 1, 2, 3 and 4 ranks."""
    for step in steps:
        inputs, targets = (part[rank::ranks] for part in text.windows(CONTEXT, WINDOWS, seed=step))
        yield inputs.to(hardware.device()), targets.flatten().to(hardware.device())


# %%
from torch.nn.functional import cross_entropy


def train(model, optimizer, data):
    """Trains on `data` and returns the losses."""
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = new_model()
losses = train(alone, momentum_sgd(alone.parameters()), batches())
expected = flat(alone.parameters())
PARAMETERS = sum(parameter.numel() for parameter in alone.parameters())
print(f"{PARAMETERS:,} parameters; losses {', '.join(f'{loss:.3f}' for loss in losses)}")

# %% [markdown]
# ### Five entries
#
# Five entries make up the ledger of a GPU's memory in training.
#
# * **Parameters**, **gradients** and **optimizer state** are the **model states**. In data parallelism every rank holds
#   the same ones. They can be sharded.
# * **Activations** are what forward keeps for backward (chapter 4). Every rank has its own, so there is nothing to
#   shard.
# * **Temporary buffers**, such as a gathered unit, exist only for a moment.
#
# Adam keeps two averages for each parameter. In **mixed precision** parameters and gradients have 16 bits, too few for
# small updates. So the optimizer keeps float32 numbers: a **master copy** of the parameter, and the two averages.
#
# **Predict** the bytes of model states per parameter, with Adam and everything in float32 (4 bytes a number). How
# many GB do the model states of 7.5 billion parameters take in mixed precision?

# %% tags=["prediction"]
predicted = {"float32, bytes a parameter": 16, "mixed precision, GB": 120}

# %%
model = new_model()
adam = torch.optim.Adam(model.parameters())
train(model, adam, batches())
bytes_each = sum(memory_ledger(model, adam).values()) / PARAMETERS

# %%
compare(
    predicted,
    {
        "float32, bytes a parameter": round(bytes_each),
        "mixed precision, GB": 120,  # published: Rajbhandari et al. 2019, figure 1
    },
    likely={
        "The parameters alone. Gradients and optimizer state are three times as much.": {
            "float32, bytes a parameter": 4
        },
        "The optimizer state is missing: with Adam two numbers a parameter.": {
            "float32, bytes a parameter": 8
        },
        "One of the four numbers is missing: parameter, gradient, two averages.": {
            "float32, bytes a parameter": 12
        },
        "The float32 master copy is missing.": {"mixed precision, GB": 90},
        "Half of float32's. The master copy takes up what 16 bits save.": {
            "mixed precision, GB": 60
        },
        "The parameters alone, 2 bytes each.": {"mixed precision, GB": 15},
    },
)

# %% [markdown]
# Mixed precision makes activations smaller, but not the model states. Three recipes are in use:
#
# | bytes a parameter | parameters | gradients | optimizer | together |
# |---|---|---|---|---|
# | float32; and `fully_shard` in mixed precision | 4 | 4 | 8 | 16 |
# | the ZeRO paper ([Rajbhandari et al. 2019](https://arxiv.org/abs/1910.02054)) | 2 | 2 | 12 | 16 |
# | Megatron, with float32 gradients | 2 | 4 | 12 | 18; with stage 1 on $n$ ranks $6 + 12/n$ |
#
# ZeRO, the "zero redundancy optimizer", shards among $n$ ranks one kind after another: stage 1 the optimizer state,
# stage 2 also the gradients, stage 3 also the parameters.

# %%
ch08.stages()
plt.show()
for n in (4, 64, 1024):
    held = (f"{ch08.gigabytes(7.5, n, stage):6.2f} GB" for stage in (1, 2, 3))
    print(f"7.5 billion on {n:4} ranks, stages 1 to 3:", *held)

# %% [markdown]
# *A rank holds the coloured parts, drawn here for 3 ranks. The numbers are those of the paper's table 1.* Stage 1
# cannot get below 4 bytes a parameter and stage 2 not below 2. Stage 3 has no such floor.

# %% [markdown]
# ### 8.1 The ledger as a function (2 points)
#
# Compute the bytes of model states on a rank, for any stage. Stage 0 shards nothing. A shard is a whole number of
# parameters, the same on every rank: if the division leaves a remainder, round up.


# %% nbgrader={"grade_id": "8.1", "solution": true}
def model_state_bytes(
    parameters: int,
    world_size: int,
    stage: int,
    parameter_bytes: int = 2,
    gradient_bytes: int = 2,
    optimizer_bytes: int = 12,
) -> int:
    """Returns the bytes of model state that each rank holds.

    `parameters` is the number of parameters, `stage` 0, 1, 2 or 3. The other three are bytes for one
    parameter; the defaults are mixed precision with Adam (ZeRO paper, section 3.1). A shard has
    ceil(parameters / world_size) parameters. Raises ValueError for any other stage.
    """
    ### BEGIN SOLUTION
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"There are stages 0 to 3, and you asked for {stage}.")
    shard = -(-parameters // world_size)
    held = [shard if stage >= sharded_from else parameters for sharded_from in (3, 2, 1)]
    sizes = parameter_bytes, gradient_bytes, optimizer_bytes
    return sum(count * size for count, size in zip(held, sizes))
    ### END SOLUTION


# %% nbgrader={"grade_id": "8.1-check", "grade": true, "points": 2, "locked": true}
check("8.1", model_state_bytes)

# %% [markdown]
# ### What a ring carries
#
# Data parallelism all-reduces the gradients. The ring of chapter 3 does that in two halves: a reduce-scatter, then an
# all-gather. In stage 1 the optimizer state is sharded. A rank updates its own shard, so it needs the summed gradients
# of that shard only, and after the update every rank needs all parameters. In stage 3 the parameters are sharded too. A
# unit is gathered before its forward, freed, and gathered again before its backward.
#
# **Predict** the bytes that a rank sends in a step, as a multiple of what data parallelism sends.

# %% tags=["prediction"]
predicted = {"stage 1": 1.0, "stage 3": 1.5}


# %%
def all_reduce_and_its_halves(rank):
    """The bytes that a ring sends for each, and the largest difference of their results."""
    gradients = torch.arange(PARAMETERS, device=hardware.device()).remainder(97.0) * (rank + 1)
    at_once, in_halves = gradients.clone(), torch.empty_like(gradients)
    shard = torch.empty_like(gradients.chunk(4)[rank])
    with Trace() as all_reduce:
        dist.all_reduce(at_once)
    with Trace() as reduce_scatter:
        dist.reduce_scatter(shard, list(gradients.chunk(4)))
    with Trace() as all_gather:
        dist.all_gather(list(in_halves.chunk(4)), shard)
    traces = (all_reduce, reduce_scatter, all_gather)
    return [ring_bytes(t.record().calls) for t in traces], check_equal(at_once, [in_halves])


(data_parallel, reduced, gathered), difference = launch(all_reduce_and_its_halves, 4)[0]
measured = {
    "stage 1": (reduced + gathered) / data_parallel,
    "stage 3": (reduced + 2 * gathered) / data_parallel,
}
print("all-reduce against its two halves, largest difference:", difference)

# %%
compare(
    predicted,
    measured,
    likely={
        "As if all gradients were all-reduced first: each rank needs those of its shard only.": {
            "stage 1": 1.5,
            "stage 3": 2.0,
        },
        "As if stage 1 sent nothing more than a reduce-scatter.": {"stage 1": 0.5},
        "As if the parameters were gathered once: backward gathers them again.": {"stage 3": 1.0},
    },
)

# %% [markdown]
# With $\Psi$ parameters, a reduce-scatter or an all-gather sends $\Psi(n-1)/n$ numbers from each rank:
#
# * **Stages 1 and 2**: reduce-scatter the gradients, update, all-gather the parameters. That is $2\Psi(n-1)/n$, no more
#   than data parallelism.
# * **Stage 3**: two all-gathers and a reduce-scatter, $3\Psi(n-1)/n$.
#
# So stage 1 saves memory at no cost in bytes. Stage 2 does too, except with gradient accumulation: to hold no more than
# a shard of the gradients, the ranks have to reduce them after *every* micro-batch.

# %% [markdown]
# ## 4. By hand, then with PyTorch

# %% [markdown]
# ### 8.2 An optimizer that shares its state out (4 points)
#
# Stage 1 needs no new model, only a new optimizer. Every rank has all parameters and, from an all-reduce, the same
# averaged gradients. Give each parameter an **owner**: one rank keeps its state, computes its update and sends the
# result to the others. Whole parameters are shared out, not single numbers, because some optimizers, such as
# `torch.optim.Muon`, need whole matrices.
#
# Your class is a `torch.optim.Optimizer` itself. Such an object has `param_groups`, a list of dicts with parameters and
# their options, and `state`, a dict from parameters to what is kept for them. `Optimizer.__init__` calls
# `add_param_group` for each group. A learning rate scheduler changes the `param_groups` of *your* object, and the next
# step must use these values.
#
# The check makes the process group. With more ranks than parameters some ranks own nothing: an optimizer refuses an
# empty list of parameters, but not a group with an empty list.

# %% nbgrader={"grade_id": "8.2", "solution": true}
from collections.abc import Callable


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates all parameters as `optimizer_cls(params, **kwargs)` does; a rank has a part of the state.

    `params` are parameters or parameter groups, the same on every rank; `optimizer_cls` is any
    optimizer whose update of a parameter needs no other one. Every parameter has one owner, even if
    it is frozen; a tied parameter appears once, as `model.parameters()` gives it. No rank owns more
    elements than an equal share plus those of one parameter.

    `param_groups` has all parameters with all options. `state` has those of this rank only, so that
    `state_dict()` is this rank's part, and `load_state_dict()` takes it back.
    """

    def __init__(self, params, optimizer_cls: type[torch.optim.Optimizer], **kwargs) -> None:
        ### BEGIN SOLUTION
        self.make_inner = partial(optimizer_cls, **kwargs)
        self.inner: list[torch.optim.Optimizer] = []  # one for each group, with what this rank owns
        self.owners: dict[nn.Parameter, int] = {}
        self.owned = [0] * dist.get_world_size()  # elements, by rank
        of_nothing = self.make_inner([{"params": []}])  # it tells the options that kwargs leave out
        super().__init__(params, of_nothing.defaults)
        ### END SOLUTION

    def add_param_group(self, param_group: dict) -> None:
        """Adds a group, on every rank; the constructor of torch's Optimizer calls it for each group."""
        ### BEGIN SOLUTION
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in sorted(group["params"], key=torch.numel, reverse=True):
            self.owners[parameter] = self.owned.index(min(self.owned))
            self.owned[self.owners[parameter]] += parameter.numel()
        mine = [p for p in group["params"] if self.owners[p] == dist.get_rank()]
        self.inner.append(self.make_inner([{**group, "params": mine}]))
        self.state.update(self.inner[-1].state)  # some optimizers make their state at once
        ### END SOLUTION

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Updates every parameter that has a gradient, on every rank. Returns what `closure` returns.

        `closure`, where there is one, is called once, with gradients enabled, before the update.
        """
        ### BEGIN SOLUTION
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, inner in zip(self.param_groups, self.inner):
            # what a scheduler or load_state_dict has changed
            options = {key: value for key, value in group.items() if key != "params"}
            inner.param_groups[0].update(options)
            inner.state = self.state
            inner.step()
        works = [dist.broadcast(p, src, async_op=True) for p, src in self.owners.items()]
        for work in works:
            work.wait()
        return loss
        ### END SOLUTION


# %% nbgrader={"grade_id": "8.2-check", "grade": true, "points": 4, "locked": true}
check("8.2", ShardedOptimizer)

# %% [markdown]
# ### ZeRO-3 by hand: one shard of everything
#
# The parameters that forward uses are the result of an all-gather. Every rank has used every shard, so backward is a
# reduce-scatter, and the gradients are sharded as well.


# %%
class Gather(torch.autograd.Function):
    """Forward: all-gather the shards. Backward: reduce-scatter the gradient, averaged."""

    @staticmethod
    def forward(ctx, shard):
        whole = shard.new_empty(dist.get_world_size() * len(shard))
        dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        shards = list(gradient.chunk(dist.get_world_size()))
        own = torch.empty_like(shards[0])
        dist.reduce_scatter(own, shards)
        return own / dist.get_world_size()


# %% [markdown]
# Collectives need equal shards. So a unit's parameters are laid end to end in one **flat** vector. Its length here
# divides by 2 and by 4 (in exercise 8.3 you pad it).

# %%
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector


class Sharded(nn.Module):
    """Keeps one shard of a module's parameters, and gathers the others for its forward."""

    def __init__(self, module):
        super().__init__()
        parameters = dict(module.named_parameters())
        self.shapes = {name: parameter.shape for name, parameter in parameters.items()}
        shards = parameters_to_vector(parameters.values()).detach().chunk(dist.get_world_size())
        self.shard = nn.Parameter(shards[dist.get_rank()].clone())
        self.layers = [module.to("meta")]  # shapes without numbers; in a list, so not registered

    def gathered(self):
        sizes = [shape.numel() for shape in self.shapes.values()]
        parts = Gather.apply(self.shard).split(sizes)
        return {name: part.view(self.shapes[name]) for name, part in zip(self.shapes, parts)}

    def forward(self, *inputs):
        return functional_call(self.layers[0], self.gathered(), inputs)


# %%
def train_by_hand(rank):
    model = new_model()
    model.blocks = nn.ModuleList(Sharded(block) for block in model.blocks)
    for name in ("token", "position", "norm", "head"):
        setattr(model, name, Sharded(getattr(model, name)))
    optimizer = momentum_sgd(model.parameters())  # any optimizer: it sees the shards
    train(model, optimizer, batches(rank=rank, ranks=dist.get_world_size()))
    units = [module for module in model.modules() if isinstance(module, Sharded)]
    held = sum(len(unit.shard) for unit in units)
    return flat(part for unit in units for part in unit.gathered().values()), held


for n in (2, 4):
    values, held = zip(*launch(train_by_hand, n))
    print(f"{n} ranks hold {held[0]:,} of {PARAMETERS:,} parameters each", end="; ")
    print("largest difference from one process:", check_equal(expected, values))

# %% [markdown]
# One thing is missing: autograd keeps a unit's gathered parameters from forward to backward. Stage 3 frees them and
# gathers again for backward. You write that in exercise 8.4.

# %% [markdown]
# ### With PyTorch: `fully_shard`
#
# PyTorch's own FSDP is `fully_shard` (FSDP2). It changes a module in place: its parameters that are not yet in a unit
# become a unit. So call it on each block first and on the whole model last. Each parameter becomes a DTensor (chapter
# 6), cut by rows, and keeps its name. Two rules: make the optimizer *after* the wrapping, and let every rank call
# `forward`.

# %%
from torch.distributed.fsdp import fully_shard


def wrap(model, **options):
    """Makes a unit of each block, and one of the rest: embeddings, norm and head."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train_wrapped(rank):
    model = wrap(new_model())
    optimizer = momentum_sgd(model.parameters())
    train(model, optimizer, batches(rank=rank, ranks=dist.get_world_size()))
    up = model.blocks[0].feed_forward.up.weight
    print(f"a {type(up).__name__} of {tuple(up.shape)}, of which {tuple(up.to_local().shape)} here")
    return flat(parameter.full_tensor() for parameter in model.parameters())


values = launch(train_wrapped, 3)
print("largest difference from one process:", check_equal(expected, values))

# %% [markdown]
# The last rank has 42 of 128 rows: where they do not divide evenly, it gets fewer, or none. `full_tensor` gathers, so
# all ranks call it.
#
# ### What a wrapping costs
#
# A script may call `fully_shard(model)` and forget the blocks. It runs and gives the right numbers.
#
# **Predict** for 4 ranks the most bytes of parameters that a rank holds at any moment of a step. Gathered parameters
# lie beside the rank's shards. With a unit per block, each block is freed after its forward. The root unit (embeddings,
# norm, head) is not, since backward needs its head at once. All parameters take 224,000 bytes, a block 50,816, the root
# unit 20,736.

# %% tags=["prediction"]
predicted = {
    "wrapped per block": 224_000 // 4 + 20_736 + 50_816,
    "root only": 224_000 // 4 + 224_000,
}

# %% [markdown]
# A `Meter` reads the bytes of parameters and gradients at every layer, in forward and backward.

# %%
from course_utils.trace.meters import Meter

WRAPPINGS = {
    "per block": wrap,
    "per block, kept": partial(wrap, reshard_after_forward=False),
    "root only": fully_shard,
}


def readings_of_wrappings(rank):
    """For each wrapping the bytes that a ring sends in a step, and those held at every layer."""
    readings = {}
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    for name, wrapping in WRAPPINGS.items():
        model = wrapping(new_model())
        meter = Meter(model)
        with Trace() as trace:
            cross_entropy(model(inputs).flatten(0, 1), targets).backward()
        meter.read()
        readings[name] = ring_bytes(trace.record().calls), meter.readings
    return readings


# %%
readings = launch(readings_of_wrappings, 4)[0]
most = {name: max(p for _, p, _ in of_layers) for name, (_, of_layers) in readings.items()}
measured = {"wrapped per block": most["per block"], "root only": most["root only"]}

# %%
compare(
    predicted,
    measured,
    likely={
        "The shards alone. What is gathered lies beside them.": {
            "wrapped per block": 56_000,
            "root only": 56_000,
        },
        "The root unit is gathered as well.": {"wrapped per block": 56_000 + 50_816},
        "The shards stay while everything is gathered.": {"root only": 224_000},
    },
)

# %%
ch08.through_a_step({name: layers for name, (_, layers) in readings.items()}, 4 * PARAMETERS)
plt.show()
for name, (sent, _) in readings.items():
    print(f"{name:15} sends {sent / data_parallel:.2f} of data parallelism's bytes")

# %% [markdown]
# *With the root alone, all parameters are whole from the first layer on, gradients pile up until the end, and the
# shards lie beside them.* At that peak, the optimizer state is all that is smaller than in data parallelism.
#
# The dashed curve is a compromise: `reshard_after_forward=False` keeps the parameters until backward and saves the
# second gather. (Per block sends 1.45 and not 1.5, because the root unit is gathered once.) The curves leave out
# temporary buffers, such as the next block, which is already on its way.
#
# ### Prefetch: ask for the next unit early
#
# The order of the units is known. So `fully_shard` fetches the next one *while* this one computes, and sends a block's
# gradients during the next block's backward.

# %%
ch08.prefetching()
plt.show()

# %% [markdown]
# *Simulated; a message takes 0.8 times as long as a block's forward pass. From row to row, rank 0 waits (hatched)
# less.*
#
# A gather is hidden if the computation beside it takes longer. A block of $12W^2$ parameters has $24W^2$ bytes in 16
# bits, and takes $24tW^2$ operations for $t$ tokens. The width $W$ drops out, so only the number of a rank's tokens
# matters. An H100 in one of several machines needs about 2,500 of them ([Austin et al.
# 2025](https://jax-ml.github.io/scaling-book/gpus)).

# %% [markdown]
# ### Mixed precision: a policy
#
# `MixedPrecisionPolicy` sets the types in which ranks send and compute. With `param_dtype=torch.bfloat16` a unit is
# cast before it is gathered. `reduce_dtype=torch.float32` adds up gradients in float32, which is safer over many ranks.
# Shards, gradients and the update stay float32: the shards are the master copy.
#
# **Predict** what a ring sends with this policy, as a share of float32's bytes, to two digits.

# %% tags=["prediction"]
predicted = {"share of float32's bytes": 0.67}

# %%
from torch.distributed.fsdp import MixedPrecisionPolicy

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def step_with_policy(rank):
    """The bytes that a ring sends; on rank 0, the types that were seen."""
    model = wrap(new_model(), mp_policy=POLICY)
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    with Trace() as trace:
        logits = model(inputs)
        cross_entropy(logits.flatten(0, 1).float(), targets).backward()
    weight, calls = model.head.weight, trace.record().calls
    if rank == 0:
        print("travel:", *sorted({f"{call.op} {call.dtype}" for call in calls}), sep="  ")
        print("logits", logits.dtype, " gradient", weight.grad.dtype, " shard", weight.dtype)
    return ring_bytes(calls)


measured = launch(step_with_policy, 4)[0] / readings["per block"][0]

# %%
compare(
    predicted,
    {"share of float32's bytes": round(measured, 2)},
    likely={"The gradients travel in float32.": {"share of float32's bytes": 0.5}},
)

# %% [markdown]
# Of the three messages, the two gathers are halved and the reduce-scatter is not.
#
# ### Meta device: build what fits on no rank
#
# `new_model()` makes the whole model on every rank before it is cut, and a large model has no room there. Tensors on
# the **meta** device have shapes but no memory. So build there and wrap, which cuts shapes only. Then `to_empty`
# allocates the shards, and you fill them. Here `set_model_state_dict` takes whole tensors from rank 0, one at a time,
# and gives each rank its part.

# %%
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh


def train_from_meta(rank):
    values = new_model().state_dict() if rank == 0 else {}
    with torch.device("meta"):
        model = build()
    wrap(model, mesh=init_device_mesh(hardware.device().type, (dist.get_world_size(),)))
    model.to_empty(device=hardware.device())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    optimizer = momentum_sgd(model.parameters())
    train(model, optimizer, batches(rank=rank, ranks=dist.get_world_size()))
    held = memory_ledger(model, optimizer)["parameters"]
    return flat(parameter.full_tensor() for parameter in model.parameters()), held


values, held = zip(*launch(train_from_meta, 2))
print(f"rank 1 holds {held[1]:,} of {4 * PARAMETERS:,} bytes")
print("largest difference from one process:", check_equal(expected, values))

# %% [markdown]
# If rank 0 has no room either, draw the values after `to_empty`, with each layer's `reset_parameters()`. But on CPUs
# all shards then get the same numbers (`08_fsdp_further`, section 5).
#
# If even the shards are too large, `offload_policy=CPUOffloadPolicy()` keeps them, their gradients and the optimizer
# state in the host's memory (**CPU offload**, run in `08_fsdp_further`). Every gather then crosses the slow link
# between host and GPU.
#
# ### Checkpoints: four ranks save, two or one resume
#
# With `torch.distributed.checkpoint` (DCP) every rank writes its own shards, and a small file `.metadata` says which
# part of which tensor lies where. To load, each rank reads the pieces that *its* shards need. So any number of ranks
# can load it: this is **resharding**.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def state_to_save(model, optimizer):
    """What a checkpoint holds, under the names of the whole model; its DTensors are this rank's."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(model, optimizer, folder):
    """Writes this rank's shards into a folder that does not exist yet. All ranks call it."""
    dcp.save(state_to_save(model, optimizer), checkpoint_id=folder)


def resume(model, optimizer, folder):
    """Fills model and optimizer, whatever number of ranks has saved. All ranks call it."""
    state = state_to_save(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


# %% [markdown]
# Four ranks train two steps and save. Two ranks resume for two more, then one alone. Finally two resume only the model,
# as many scripts do.


# %%
def train_steps(rank, steps, resume_from=None, with_optimizer=True, save_to=None):
    model = wrap(new_model())
    optimizer = momentum_sgd(model.parameters())
    if resume_from:
        resume(model, optimizer, resume_from)
    if not with_optimizer:
        optimizer = momentum_sgd(model.parameters())
    train(model, optimizer, batches(steps, rank, dist.get_world_size()))
    if save_to:
        save(model, optimizer, save_to)
    return flat(parameter.full_tensor() for parameter in model.parameters())


# %%
import shutil

from course_utils.lesson.terminal import scratch

CHECKPOINT = (scratch() / "fsdp" / "step-2").resolve()
shutil.rmtree(CHECKPOINT.parent, ignore_errors=True)
CHECKPOINT.parent.mkdir(parents=True)
launch(train_steps, 4, range(2), save_to=CHECKPOINT)
print("saved by 4 ranks:", *sorted(path.name for path in CHECKPOINT.iterdir()))
longer = new_model()
train(longer, momentum_sgd(longer.parameters()), batches(range(4)))
undisturbed = flat(longer.parameters())
for n in (2, 1):
    values = launch(train_steps, n, range(2, 4), CHECKPOINT)
    print(f"resumed by {n}, largest difference:", check_equal(undisturbed, values))
values = launch(train_steps, 2, range(2, 4), CHECKPOINT, with_optimizer=False)
print("the same without the optimizer state:", largest_difference(undisturbed, values))

# %% [markdown]
# Even with a new optimizer the first loss after resuming is right, because it depends on the parameters alone. Test a
# checkpoint like this: stop, resume, and compare with a run that was never stopped.
#
# Save every checkpoint into a folder of its own. A rank can die during a save, and a half-written folder must not pass
# for a whole one (`08_fsdp_further`, section 4).

# %% [markdown]
# ### 8.6 Your own script, in shards
#
# `mine/train.py` (6.7) keeps a copy of everything on each data rank. Shard it. If you have not written it yet,
# `mine.start(8)` gives you the course's own as chapter 6 leaves it.
#
# * `fully_shard` on each block and on the model, over the data ranks, replaces the averaging of gradients.
# * Parameters get memory only as shards: build the model under `torch.device("meta")`, and give each shard its first
#   values after the sharding. They must be the same on any number of ranks: draw one parameter at a time, whole and
#   from a seed of its own, and cut it with `distribute_tensor(whole, part.device_mesh, part.placements,
#   src_data_rank=None)`.
# * With the new option `--bfloat16` the script computes in bfloat16; parameters, optimizer state, the sums of
#   gradients and the loss stay float32: a bfloat16 number has fewer than three digits.
# * At the end all ranks write a checkpoint with `torch.distributed.checkpoint`: the state dict of the model under
#   `"model"`, into the folder `checkpoint` of `--out`. The file `model.pt` stays. (To share a model, save it as
#   safetensors: `08_fsdp_further`, section 4.)
# * Now every forward pass gathers, so all ranks must make the same number of them, with held-out windows too. In the
#   held-out loss each window counts once.
#
# Two of PyTorch's warnings are harmless here: that the logits are a view (nobody changes them in place), and that two
# all-gathers follow each other (one of the two mesh dimensions has size 1).

# %%
from course_exercises import mine

check("8.6", mine.script(8))

# %% [markdown]
# ## 5. Break it: one bug hunt and two mistakes
#
# ### Bug hunt: size and speed at once
#
# You will read that FSDP "elegantly solves the problem of both model size and training speed", and that "model sharding
# involves splitting a large model into smaller pieces and distributing them across multiple GPUs".
#
# **Predict** how many blocks one of 4 ranks computes with FSDP, as a multiple of DDP's.

# %% tags=["prediction"]
predicted = {"blocks computed": 1.0}

# %%
from torch.nn.parallel import DistributedDataParallel as DDP


def counted(rank, wrapping):
    """Model states held, activations kept, bytes sent and blocks computed in a step."""
    model, computed = new_model(), []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: computed.append(1))
    network = wrapping(model)
    optimizer = momentum_sgd(network.parameters())
    [(inputs, targets)] = batches([0], rank, dist.get_world_size())
    with Trace() as trace:
        with kept_for_backward(model) as kept:
            loss = cross_entropy(network(inputs).flatten(0, 1), targets)
        loss.backward()
    optimizer.step()
    states = sum(memory_ledger(network, optimizer).values())
    return states, kept.bytes, ring_bytes(trace.record().calls), len(computed)


kinds = ("model states held", "activations kept", "bytes sent", "blocks computed")
with_ddp, with_fsdp = (launch(counted, 4, wrapping)[1] for wrapping in (DDP, wrap))
measured = {kind: round(b / a, 2) for kind, a, b in zip(kinds, with_ddp, with_fsdp)}

# %%
compare(
    predicted,
    measured,
    likely={
        "As if a rank computed with its shards only: it gathers every block whole.": {
            "blocks computed": 0.25
        }
    },
)

# %%
print("of a rank in a step, as a multiple of DDP's:")
for kind in kinds:
    print(f"{kind:17}  {measured[kind]:.2f}")

# %% [markdown]
# FSDP solves the problem of size, not of speed: the work is the same, and more is sent. It makes larger models or
# larger batches *possible*. And the "smaller pieces" are not those of chapter 4: each rank computes all four blocks,
# for its own windows. Sharding divides what is stored, not the work.
#
# ### The optimizer made before the sharding
#
# `fully_shard` replaces every parameter with a new one. An optimizer made earlier still has the old ones. Here you
# train on one batch three times, so the loss should fall.


# %%
def train_three_times(rank, optimizer_first):
    model = new_model()
    if optimizer_first:
        optimizer = momentum_sgd(model.parameters())
        wrap(model)
    else:
        wrap(model)
        optimizer = momentum_sgd(model.parameters())
    losses = train(model, optimizer, list(batches([0], rank, dist.get_world_size())) * 3)
    return " ".join(f"{loss:.3f}" for loss in losses)


for order, optimizer_first in (("after", False), ("before", True)):
    print(f"optimizer made {order} the wrapping:", launch(train_three_times, 2, optimizer_first)[0])

# %% [markdown]
# There is no error and no warning: an optimizer skips parameters without gradients, and its old ones get none. On
# changing batches the loss goes up and down as usual. Check once, at the start, that the loss of one batch falls.
#
# ### Forward on one rank only
#
# Rank 0 validates alone, or prints a sample. DDP allows that for this model. With FSDP, forward gathers.


# %%
def sample_on_rank_0(rank):
    model, (inputs, _) = wrap(new_model()), next(batches())
    if rank == 0:
        with torch.no_grad():
            print("a sample of shape", tuple(model(inputs[:1]).shape))


try:
    launch(sample_on_rank_0, 2, backend="gloo")  # NCCL's rank 0 would wait on the GPU
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Under torchrun this can be a silent hang until a time limit. So can an early `break` on one rank, a layer that only
# some ranks use, or a full state dict under `if rank == 0`. The repair: all ranks compute, one prints.

# %% [markdown]
# ## 6. Exercises
#
# | | points | where |
# |---|---|---|
# | 8.1 The ledger as a function | 2 | section 3 |
# | 8.2 An optimizer that shares its state out | 4 | section 4, at its beginning |
# | 8.6 Your own script, in shards | | section 4, after the checkpoints |
# | 8.3 Flatten, pad, shard and unshard | 2 | `08_fsdp_further` |
# | 8.4 FSDP that overlaps | 5 | `08_fsdp_further` |
# | 8.5 A checkpoint for any number of ranks | 3 | `08_fsdp_further` |

# %% [markdown]
# ## 7. See it: the ledger with sliders
#
# The explorer shows the model states of one rank with the bytes of the ZeRO paper and, for stage 3, two gathered units,
# each a fortieth of the model. Two things to try: with 42.5 billion parameters on 64 ranks only stage 3 fits into 80
# GB; on one rank all stages are equal.

# %%
explore.Explorer(
    ch08.ledgers,
    billions_of_parameters=(0.5, 70.5, 7.5),
    ranks_as_a_power_of_two=(0, 12, 6),
    stage=(0, 3, 3),
)

# %% [markdown]
# *At the start: of 7.5 billion parameters stage 0 holds 120 GB on each of 64 ranks, stage 3 less than 3.*

# %% [markdown]
# ## 8. On a cluster: your script under torchrun
#
# After 8.6 your own script runs on a cluster:
#
# ```
# torchrun --nproc-per-node 8 mine/train.py --bfloat16 \
#     --text ../data/text/the_long_shed.txt --out runs/sharded
# ```
#
# * **The mesh** gets a second dimension if links inside a machine are faster (`08_fsdp_further`).
# * **Gathers overlap with computing** only on GPUs.
# * **Checkpoints** go to a file system that all machines see. `dcp.async_save` copies the shards to the host's memory
#   and writes while training goes on.
#
# `cluster/train.py` adds gradient clipping, the position in the data, and checkpoints that are verified. Launch files
# for SLURM and Kubernetes lie beside it.

# %% [markdown]
# ## 9. Remember
#
# 1. With Adam, model states take 16 bytes a parameter, in float32 and in mixed precision. ZeRO divides the optimizer
#    state, then the gradients, then the parameters among the ranks.
# 2. Stages 1 and 2 send what data parallelism sends, stage 3 one and a half times as much. Only with stage 3 does the
#    memory go on shrinking with more ranks.
# 3. Shard each block, then the root. With the root alone, a rank's peak holds all parameters and gradients.
# 4. Wrap first, then make the optimizer. Every rank calls forward.
# 5. A checkpoint holds model *and* optimizer, and loads on any number of ranks.
#
# **Sources**
#
# * S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, 2019,
#   [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): sections 3.1, 5 and 7, table 1.
# * NVIDIA, *Megatron Core*: [distributed
#   optimizer](https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html).
# * Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, 2023, [arXiv
#   2304.11277](https://arxiv.org/abs/2304.11277): section 3.2 units and peak memory, section 3.3 prefetch.
# * J. Austin et al., *How to Scale Your Model*, 2025, [part 12](https://jax-ml.github.io/scaling-book/gpus).
# * PyTorch: [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html).
