# %% [markdown]
# # 8. FSDP: nobody holds the whole model
#
# In data parallelism every rank holds the same parameters, the same gradients and the same
# optimizer state. On 64 GPUs that is 64 equal copies. Each rank needs them to compute, but never
# all of them at the same moment. So let each rank keep a part, and fetch the rest when it is
# needed: **fully sharded data parallelism**, FSDP.
#
# You build it in three steps, called ZeRO 1, 2 and 3, and predict for each what a rank holds and
# what it sends. Then you use PyTorch's own `fully_shard`: how to wrap, mixed precision, models that fit
# on no rank, and checkpoints that another number of ranks can load. What is built on that
# (accumulation, recomputation, meshes of two dimensions, torn checkpoints, and an FSDP of your own)
# is in `08_fsdp_further`.

# %% tags=["nbval-ignore-output"]
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises import check, hint
from course_utils import hardware
from course_utils.figures import ch08
from course_utils.launch import RankFailure, launch
from course_utils.lesson import text
from course_utils.lesson.equality import equal
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, memory_ledger, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: the pages are shared out
#
# Four equal factories work from the same blueprint (chapter 3). Each has a whole copy, a whole
# folder of change notes, and a whole archive of how each page was changed before. The shelves are
# full, and the same things stand on them four times over. But a worker reads one page at a time.
#
# So the pages are shared out. Each factory keeps a quarter of every page, with the notes and the
# archive of that quarter. When page 3 comes up, the quarters are copied and sent round, every
# factory puts the page together, works with it, and throws the copies away. Then page 4.

# %%
figure = ch08.pages()
plt.show()

# %% [markdown]
# *Each of four factories keeps a different quarter of every page. Page 3 is in use: all four quarters
# have been sent round, so that for the moment every factory has it whole.*
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | factory | **rank** | one process with its own device and its own part of the batch |
# | page | **unit** | the layers whose parameters are fetched together, usually one block |
# | quarter of a page | **shard** | the part of a unit's parameters that a rank keeps |
# | sending the quarters round | **all-gather** | every rank gets the whole unit |
# | throwing the copies away | **reshard**, free | only the rank's own shard stays |
# | change notes, summed for each quarter | **reduce-scatter** | each rank gets the summed gradient of its own shard |
# | archive | **optimizer state** | momentum, or Adam's two averages: only for the rank's own shard |
#
# Who does the work has not changed. Each factory still makes whole products from its own material:
# it is data parallelism. Tensor parallelism (chapter 6) shares out the *work* of a page as well.

# %% [markdown]
# ## 2. The smallest real run: a layer that nobody holds
#
# One layer, two ranks, each with half of the rows of its weight. Gather, compute, throw away. In
# backward, a reduce-scatter adds up the gradients and gives each rank the half that it keeps.

# %%
from torch.nn.functional import linear


def half_a_layer_each(rank):
    torch.manual_seed(0)  # the same numbers on both ranks
    weight, inputs = (torch.randn(rows, 4).to(hardware.device()) for rows in (8, 6))
    mine = weight.chunk(2)[rank].clone()  # what this rank keeps: 4 of 8 rows
    whole = torch.empty_like(weight)
    dist.all_gather(list(whole.chunk(2)), mine)
    whole.requires_grad_()
    linear(inputs[rank::2], whole).square().sum().backward()  # its own half of the batch
    gradient = torch.empty_like(mine)
    dist.reduce_scatter(gradient, list(whole.grad.chunk(2)))
    del whole  # forward and backward are over
    return mine - 0.01 * gradient


def the_layer_alone():
    torch.manual_seed(0)
    weight, inputs = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4)
    linear(inputs, weight).square().sum().backward()
    return (weight - 0.01 * weight.grad).detach()


updated = torch.cat(launch(half_a_layer_each, 2))
print("the two halves together as one process:", equal(the_layer_alone(), [updated]))

# %% [markdown]
# Between two steps no rank holds the layer. The rest of the chapter is about doing this for a whole
# model, in the right order, and about what it costs.

# %% [markdown]
# ## 3. Predict, then measure: the ledger of memory
#
# ### Five entries
#
# What fills a GPU in training? There are five entries, and only three of them can be shared out
# among data-parallel ranks.
#
# * **Parameters**, **gradients** and **optimizer state**: the **model states**. They depend on the
#   model and not on the batch. These are what ZeRO shares out.
# * **Activations**: what forward keeps for backward (chapter 4). They grow with this rank's batch.
#   Each rank has its own, so there is nothing to share out. Recomputation makes them smaller
#   (in the further notebook).
# * **Temporary buffers**: what exists for a moment, such as a gathered unit, or the flat copy of
#   the gradients on their way into a reduce-scatter.
#
# The usual **mixed precision** recipe holds parameters and gradients in 16 bits, 2 bytes each. Adam
# keeps three numbers of 4 bytes for each parameter: a **master copy** of the parameter, and the two
# averages. Together 2 + 2 + 12 = 16 bytes for each parameter ([Rajbhandari et al.
# 2019](https://arxiv.org/abs/1910.02054), section 3.1). With float32 alone it is 4 + 4 + 8, again
# 16 bytes.
#
# ZeRO ("zero redundancy optimizer") shares out one kind after the other among the $n$ ranks
# (section 5 there): stage 1 the optimizer state, stage 2 also the gradients, stage 3 also the
# parameters. Whatever is shared out is divided by $n$.

# %%
PSI = 7.5e9  # the parameters of the paper's example
BYTES_EACH = {"parameters": 2, "gradients": 2, "optimizer": 12}
SHARED_OUT = {0: [], 1: ["optimizer"], 2: ["optimizer", "gradients"], 3: list(BYTES_EACH)}


def gigabytes(stage, n):
    """The ledger of the model states, in GB of 1e9 bytes."""
    whole = {kind: PSI * each / 1e9 for kind, each in BYTES_EACH.items()}
    return whole | {kind: whole[kind] / n for kind in SHARED_OUT[stage]}


# %% [markdown]
# **Predict** two numbers before you run the next cell. The model has 7.5 billion parameters. How
# many GB does it take on one of 64 GPUs without ZeRO? And with stage 3?

# %%
figure = ch08.stages(BYTES_EACH, SHARED_OUT, gigabytes)
plt.show()

# %% [markdown]
# *Full bars are held, empty ones are not. From stage to stage one more kind is cut into as many
# shards as there are ranks. At the right: a model of 7.5 billion parameters in mixed precision, on
# 64 GPUs.*
#
# The formula is checked against the paper's own table, which is rounded.

# %%
PUBLISHED = {  # ranks: GB in stages 1, 2, 3 (Rajbhandari et al. 2019, table 1, first model)
    4: (52.5, 41.3, 30),
    16: (35.6, 21.6, 7.5),
    64: (31.4, 16.6, 1.88),
    256: (30.4, 15.4, 0.47),
    1024: (30.1, 15.1, 0.12),
}
print(f"stage 0: {sum(gigabytes(0, 1).values()):.0f} GB, whatever the number of ranks\n")
print("ranks   stage 1   stage 2   stage 3   as published")
for n, published in PUBLISHED.items():
    computed = [sum(gigabytes(stage, n).values()) for stage in (1, 2, 3)]
    digits = [len(str(p).partition(".")[2]) for p in published]  # after the point, as printed there
    agree = all(f"{c + 1e-9:.{d}f}" == str(p) for c, p, d in zip(computed, published, digits))
    print(f"{n:5}" + "".join(f"{c:10.2f}" for c in computed) + f"   {agree}")

# %% [markdown]
# Stage 1 cannot get below 4 bytes for each parameter, stage 2 not below 2. Only stage 3 has no
# floor: twice the ranks, half the bytes. That is why it is the one for models that fit on no GPU.
#
# ### The model, and one process as the measure
#
# A language model of chapter 6's kind, with four blocks, learns from the course's story. Each rank
# takes its own windows of the batch. First one process trains on all of them. The optimizer is SGD
# with momentum: it has a state, and unlike Adam it does not hide gradients that are wrong by a
# factor (chapter 3).

# %%
from functools import partial

from course_utils.lesson.models import LanguageModel

CONTEXT, WINDOWS, STEPS, WIDTH, LAYERS = 16, 12, 3, 32, 4
VOCABULARY = len(text.vocabulary())  # 72
momentum_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def new_model() -> LanguageModel:
    torch.set_num_threads(1)  # so small a model loses time with more
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, WIDTH, heads=4, layers=LAYERS, context=CONTEXT)
    return model.to(hardware.device())


def batches(steps=range(STEPS), rank=0, ranks=1):
    """This rank's windows of each global batch; 12 of them divide by 1, 2, 3 and 4 ranks."""
    for step in steps:
        inputs, targets = (part[rank::ranks] for part in text.windows(CONTEXT, WINDOWS, seed=step))
        yield inputs.to(hardware.device()), targets.flatten().to(hardware.device())


# %%
from torch.nn.functional import cross_entropy


def train(model, optimizer, data):
    """Trains on `data` and returns the losses; gradients stay for whoever wants to look at them."""
    losses = []
    for inputs, targets in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = new_model()
losses_alone = train(alone, momentum_sgd(alone.parameters()), batches())
values_alone = {name: p.detach().cpu() for name, p in alone.named_parameters()}
gradients_alone = {name: p.grad.cpu() for name, p in alone.named_parameters()}
PARAMETERS = sum(p.numel() for p in alone.parameters())
print(f"{PARAMETERS:,} parameters; losses {', '.join(f'{loss:.3f}' for loss in losses_alone)}")

# %% [markdown]
# **Predict** the ledger of one process that trains this model with Adam in float32. Adam also keeps
# a step count of 4 bytes for each of the model's 53 tensors.

# %% tags=["prediction"]
P = 4 * PARAMETERS  # bytes of the parameters
predicted = {"parameters": P, "gradients": P, "optimizer": 2 * P + 4 * 53}

# %%
model = new_model()
adam = torch.optim.Adam(model.parameters())
train(model, adam, batches())
compare(predicted, memory_ledger(model, adam))

# %% [markdown]
# ### What a ring carries
#
# Count in $\Psi$, the number of parameters. Data parallelism all-reduces the gradients, and a ring
# sends $2\Psi(n-1)/n$ numbers from each rank for that (chapter 3). An all-reduce *is* a
# reduce-scatter followed by an all-gather, of $\Psi(n-1)/n$ each. So:
#
# * **Stages 1 and 2**: reduce-scatter the gradients, update one's own shard, all-gather the
#   parameters. $2\Psi(n-1)/n$: not a byte more than data parallelism.
# * **Stage 3**: all-gather the parameters for forward, all-gather them again for backward,
#   reduce-scatter the gradients. $3\Psi(n-1)/n$: one and a half times.
#
# That is section 7 of the paper, where the factor $(n-1)/n$ is left out. The memory of stages 1 and
# 2 is free; that of stage 3 costs half as much communication again.
#
# **Predict** the bytes for the 56,000 gradients of this model on 4 ranks, and whether the two
# halves give exactly the all-reduce's numbers.

# %% tags=["prediction"]
n = 4
predicted = {
    "all-reduce": 2 * P * (n - 1) // n,
    "reduce-scatter": P * (n - 1) // n,
    "all-gather": P * (n - 1) // n,
}


# %%
def all_reduce_in_halves(rank):
    """The ring bytes of an all-reduce and of its two halves, and whether they give the same."""
    gradients = torch.arange(PARAMETERS, device=hardware.device()).remainder(97.0) * (rank + 1)
    at_once, in_halves = gradients.clone(), torch.empty_like(gradients)
    piece = torch.empty(PARAMETERS // n, device=hardware.device())
    with Trace() as whole:
        dist.all_reduce(at_once)
    with Trace() as first:
        dist.reduce_scatter(piece, list(gradients.chunk(n)))
    with Trace() as second:
        dist.all_gather(list(in_halves.chunk(n)), piece)
    sent = [ring_bytes(trace.record().calls) for trace in (whole, first, second)]
    return sent, torch.equal(at_once, in_halves)


sent, equal_sums = launch(all_reduce_in_halves, n)[0]
compare(predicted, dict(zip(predicted, sent)))
print("the two halves give the all-reduce's numbers:", equal_sums)

# %% [markdown]
# ## 4. By hand, then with PyTorch: shard one thing after the other
#
# ### A unit: one flat vector, of which each rank owns a piece
#
# Collectives like one large tensor, and the 12 tensors of a block do not all divide by the number of
# ranks. So the parameters of a unit are laid end to end in one **flat** vector, padded with zeros
# until it divides. The parameters themselves become views of it (chapter 6 met views as a trap;
# here they are what makes it work). Whoever writes into the flat vector writes into the layers.

# %%
from torch.nn.functional import pad


class Flat:
    """The parameters of a module as one flat vector. This rank owns one piece of it."""

    def __init__(self, name, module):
        ranks, rank = dist.get_world_size(), dist.get_rank()
        named = [(n, p) for n, p in module.named_parameters(prefix=name) if p.requires_grad]
        self.module, self.names = module, [n for n, _ in named]
        self.parameters = [p for _, p in named]
        vector = nn.utils.parameters_to_vector(self.parameters).detach()
        self.flat = pad(vector, (0, -len(vector) % ranks))
        nn.utils.vector_to_parameters(self.flat, self.parameters)  # views of it from now on
        self.piece = nn.Parameter(self.flat.chunk(ranks)[rank])  # a view too

    def whole(self, piece):
        """Puts the pieces of all ranks together: {name: tensor} in the shape of the parameters."""
        parts = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, piece)
        sizes = [p.numel() for p in self.parameters]
        tensors = torch.cat(parts)[: sum(sizes)].split(sizes)
        return {n: t.view(p.shape) for n, t, p in zip(self.names, tensors, self.parameters)}


# %% [markdown]
# Two messages are all that a unit sends: its pieces come to every rank, and its gradients go to those who own
# them.


# %%
class Unit(Flat):
    """A flat vector whose pieces are gathered, and whose gradients are shared out."""

    def gather(self, async_op=False):
        """Every rank's piece comes to its place in the flat vector, and so into the layers."""
        places = list(self.flat.chunk(dist.get_world_size()))
        return dist.all_gather(places, self.piece.detach(), async_op=async_op)

    def reduce(self):
        """Averages the gradients over the ranks; this rank keeps only those of its piece."""
        ranks = dist.get_world_size()
        gradients = torch.zeros_like(self.flat)
        together = [zeros_if_none(p).flatten() for p in self.parameters]
        torch.cat(together, out=gradients[: sum(map(len, together))])
        self.piece.grad = torch.empty_like(self.piece)
        dist.reduce_scatter(self.piece.grad, list(gradients.div_(ranks).chunk(ranks)))
        for parameter in self.parameters:
            parameter.grad = None


def zeros_if_none(parameter):
    """The gradient; zeros where this rank's rows did not use the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


# %%
def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def units_of(model):
    """Each block is a unit, and each layer that stands outside the blocks."""
    for name, child in model.named_children():
        inner = child.named_children() if isinstance(child, nn.ModuleList) else [("", child)]
        for index, module in inner:
            if any(p.requires_grad for p in module.parameters()):
                yield Unit(f"{name}.{index}".rstrip("."), module)


class Wholes:
    """What the pieces of all ranks make together. All ranks call it."""

    def whole_parameters(self):
        """Every parameter, whole, by name."""
        return {n: t for unit in self.units for n, t in unit.whole(unit.piece.detach()).items()}

    def whole_gradients(self):
        """The averaged gradients of the last step, whole, by name."""
        return {n: t for unit in self.units for n, t in unit.whole(unit.piece.grad).items()}


# %% [markdown]
# ### ZeRO-1: only one's own piece of the optimizer's state
#
# SGD, momentum and Adam treat each number by itself. So a rank can update its piece without
# knowing the rest, and then it needs the state of its piece only. The optimizer below never sees
# the model: it gets one flat piece of each unit.


# %%
class Zero1(Wholes):
    """Every rank holds the model and its gradients, but one piece of the optimizer's state."""

    def __init__(self, model, optimizer_class, **settings):
        self.units = list(units_of(model))
        if sum(len(unit.parameters) for unit in self.units) > len(trainable(model)):
            raise ValueError("Two units share a parameter; put both layers into one unit.")
        self.optimizer = optimizer_class([unit.piece for unit in self.units], **settings)

    def zero_grad(self):
        self.optimizer.zero_grad()
        for unit in self.units:
            for parameter in unit.parameters:
                parameter.grad = None

    def step(self):
        for unit in self.units:
            unit.reduce()
        self.optimizer.step()
        for unit in self.units:
            unit.gather()


# %% [markdown]
# ### ZeRO-2: the gradients leave as soon as they are there
#
# ZeRO-1 holds all gradients until the step. But when backward has passed a block, its gradients are
# ready. So a hook counts them, and when the unit is complete it is reduced at once. What remains is
# the gradient of the rank's own piece.


# %%
class Zero2(Zero1):
    """Gradients are reduced unit by unit during backward, and only the rank's own piece stays."""

    def __init__(self, model, optimizer_class, **settings):
        super().__init__(model, optimizer_class, **settings)
        for unit in self.units:
            for parameter in unit.parameters:
                ready = partial(self.one_more_ready, unit)
                parameter.register_post_accumulate_grad_hook(ready)
        self.zero_grad()

    def zero_grad(self):
        super().zero_grad()
        self.missing = {unit: len(unit.parameters) for unit in self.units}

    def one_more_ready(self, unit, parameter):
        self.missing[unit] -= 1
        if self.missing[unit] == 0:
            self.complete(unit)

    def complete(self, unit):
        unit.reduce()

    def step(self):
        for unit, missing in self.missing.items():
            if missing > 0:  # some parameter was not used
                self.complete(unit)
        self.optimizer.step()
        self.after_update()

    def after_update(self):
        for unit in self.units:
            unit.gather()


# %% [markdown]
# ### ZeRO-3: the parameters come just in time
#
# Now the flat vector itself goes. A rank keeps a copy of its piece. Four moments matter for each
# unit:
#
# 1. before its forward: gather;
# 2. after its forward: free;
# 3. before its backward: gather again;
# 4. when its gradients are complete: reduce them, free.
#
# How is memory freed that autograd still holds? For backward, a linear layer keeps a view of its
# weight, and a view keeps the whole vector alive. So the *storage* under the vector is set to size
# 0: all tensors stay where they are, on a storage that is empty for the time being. `fully_shard`
# does the same.


# %%
class Zero3(Zero2):
    """A rank keeps its pieces; a unit is whole only from before its use until after it."""

    def __init__(self, model, optimizer_class, **settings):
        super().__init__(model, optimizer_class, **settings)
        for unit in self.units:
            unit.piece.data = unit.piece.data.clone()  # a view no longer
            self.free(unit)
            unit.module.register_forward_pre_hook(partial(self.before_forward, unit))
            unit.module.register_forward_hook(partial(self.after_forward, unit))
            unit.module.register_full_backward_pre_hook(partial(self.before_backward, unit))

    def fetch(self, unit):
        self.make_room(unit)
        unit.gather()

    def make_room(self, unit):
        unit.flat.untyped_storage().resize_(unit.flat.nbytes)

    def free(self, unit):
        unit.flat.untyped_storage().resize_(0)

    def before_forward(self, unit, module, inputs):
        self.fetch(unit)

    def after_forward(self, unit, module, inputs, output):
        self.free(unit)

    def before_backward(self, unit, module, gradients):
        self.fetch(unit)

    def complete(self, unit):
        super().complete(unit)
        self.free(unit)

    def after_update(self):
        pass  # the pieces are the parameters


# %% [markdown]
# Is each of them the same as one process? Momentum and three steps included:


# %%
def same(expected, got):
    """Whether two {name: tensor} hold the same, to 1e-5."""
    return expected.keys() == got.keys() and all(
        equal(tensor, [got[name].cpu()]) for name, tensor in expected.items()
    )


def as_alone(losses, values, gradients):
    """Compares with the single process: mean loss of each step, parameters, last gradients."""
    mean_losses = torch.tensor(losses, device=hardware.device()) / dist.get_world_size()
    dist.all_reduce(mean_losses)
    return {
        "losses": equal(torch.tensor(losses_alone), [mean_losses.cpu()]),
        "parameters": same(values_alone, values),
        "gradients": same(gradients_alone, gradients),
    }


# %%
def train_sharded(rank, stage):
    model = new_model()
    zero = stage(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    losses = train(model, zero, batches(rank=rank, ranks=dist.get_world_size()))
    return as_alone(losses, zero.whole_parameters(), zero.whole_gradients())


for stage in (Zero1, Zero2, Zero3):
    for n in (2, 3):
        first, *others = launch(train_sharded, n, stage)
        print(
            f"{stage.__name__}, {n} ranks, as alone:",
            first,
            "on all ranks:",
            others == [first] * (n - 1),
        )

# %% [markdown]
# ### Bytes on the wire, bytes held
#
# **Predict** for 4 ranks what a ring sends from each rank in a step, and what a rank holds when
# backward is over, just before the update, where the model states are at their largest. Adam this
# time. A stage gives it 8 tensors, a piece of each unit, in place of the 53 of the model. All units
# divide by 4, so nothing is padded.

# %% tags=["prediction"]
n = 4
predicted = {
    "stage 0, sent": 2 * P * (n - 1) // n,
    "stage 1, sent": 2 * P * (n - 1) // n,
    "stage 2, sent": 2 * P * (n - 1) // n,
    "stage 3, sent": 3 * P * (n - 1) // n,
    "stage 0, parameters": P,
    "stage 1, parameters": P,
    "stage 2, parameters": P,
    "stage 3, parameters": P // n,
    "stage 0, gradients": P,
    "stage 1, gradients": P,
    "stage 2, gradients": P // n,
    "stage 3, gradients": P // n,
    "stage 0, optimizer": 2 * P + 4 * 53,
    "stage 1, optimizer": 2 * P // n + 4 * 8,
    "stage 2, optimizer": 2 * P // n + 4 * 8,
    "stage 3, optimizer": 2 * P // n + 4 * 8,
}

# %% [markdown]
# A freed vector still has its shape, so the shapes do not tell what is held. `storage_bytes` asks the
# storages, and counts each once, however many tensors are views of it. A `Meter` reads them at every
# layer, in forward and backward.

# %%
from torch.nn.parallel import DistributedDataParallel as DDP

from course_utils.trace.meters import Meter, local, storage_bytes


def held(parameters, optimizer):
    """The ledger of the model states, by storages."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    state = [value for values in optimizer.state.values() for value in values.values()]
    return {
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes(gradients),
        "optimizer": storage_bytes(state),
    }


# %%
def costs_of_step(rank, stage):
    """Bytes sent in a step, the ledger after its backward, and the peak on the way."""
    model = new_model()
    meter = Meter(model)  # its hooks come before those that free
    if stage is None:
        network, parameters = DDP(model, gradient_as_bucket_view=True), list(model.parameters())
        zero = optimizer = torch.optim.Adam(parameters)
    else:
        network, zero = model, stage(model, torch.optim.Adam)
        parameters = [*model.parameters(), *(unit.piece for unit in zero.units)]
        optimizer, meter.kept = zero.optimizer, parameters
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    train(network, zero, [(inputs, targets)] * 2)  # DDP orders its buckets; Adam gets its state
    zero.zero_grad()
    meter.readings.clear()
    with Trace() as trace:
        cross_entropy(network(inputs).flatten(0, 1), targets).backward()
        ledger = held(parameters, optimizer)
        zero.step()
    return ring_bytes(trace.record().calls), ledger, meter.peaks()


# %%
costs = {i: launch(costs_of_step, n, stage) for i, stage in enumerate([None, Zero1, Zero2, Zero3])}
measured = {f"stage {i}, sent": costs[i][0][0] for i in costs}
for kind in ("parameters", "gradients", "optimizer"):
    measured |= {f"stage {i}, {kind}": costs[i][0][1][kind] for i in costs}

# %%
compare(
    predicted,
    measured,
    {
        "As if the parameters were gathered once: backward gathers them again.": {
            "stage 3, sent": 2 * P * (n - 1) // n
        },
        "As if what is sharded were sent more often: an all-reduce is these two halves.": {
            f"stage {i}, sent": 3 * P * (n - 1) // n for i in (1, 2)
        },
        "As if stage 1 sharded the gradients too: it shards only the optimizer's state.": {
            "stage 1, gradients": P // n
        },
    },
)
print("the same on all ranks:", all(cost == costs[i][0] for i in costs for cost in costs[i]))

# %% [markdown]
# Stages 1 and 2 send what data parallelism sends, stage 3 one and a half times as much. And that is
# the state between backward and update. What is the most that stage 3 holds on the way? Its pieces,
# and one whole unit beside them: $\Psi/n + \max_i \Psi_i$ ([Zhao et al.
# 2023](https://arxiv.org/abs/2304.11277)). The largest unit is a block, with $12W^2 + 13W$
# parameters. For gradients the same sum is an upper bound: when the first units are reduced, the
# others have no gradients yet.

# %% tags=["prediction"]
block = 4 * (12 * WIDTH**2 + 13 * WIDTH)  # bytes
predicted = {"stage 3, most bytes of parameters": P // n + block}
peaks = {i: costs[i][0][2] for i in costs}
compare(predicted, {"stage 3, most bytes of parameters": peaks[3][0]})
for stage in (2, 3):
    print(
        f"stage {stage}, gradients at most a block above the pieces:",
        peaks[stage][1] <= P // n + block,
    )

# %% [markdown]
# The two missing entries of the ledger are activations and temporary buffers. The activations of a
# rank are the same in every stage. Temporary is what was held above the pieces for a moment.

# %%
from course_utils import plots
from course_utils.trace import kept_for_backward


def activations_of_rank():
    """What forward keeps for backward for one of 4 ranks' windows."""
    model = new_model()
    with kept_for_backward(model) as kept:
        model(next(batches(rank=0, ranks=n))[0])
    return kept.bytes


ledgers = []
for (_, ledger, (most_parameters, most_gradients)), *_ in costs.values():
    above = most_parameters + most_gradients - ledger["parameters"] - ledger["gradients"]
    ledgers.append(ledger | {"activations": activations_of_rank(), "temporary": above})
plots.memory(ledgers, [f"stage {i}" for i in costs], "One of four ranks, measured")
plt.show()

# %% [markdown]
# *Stage by stage optimizer state, gradients and parameters shrink to a quarter. Temporary is a
# gradient on its way into DDP's bucket, or a unit that is whole for a moment. The activations are
# the same everywhere.*
#
# ### Prefetch: ask for the next page early
#
# Stage 3 as you have it waits: it asks for a unit when it needs it, and computes nothing until the
# unit has come. But the order of the units is known. So ask for the next one *before* computing
# with this one. While this one computes, the next one travels. The price is room for a second unit.


# %%
class Zero3Prefetching(Zero3):
    """Asks for the next unit's pieces before it computes with this one."""

    def __init__(self, model, optimizer_class, **settings):
        super().__init__(model, optimizer_class, **settings)
        self.coming = {}  # the units that are on their way

    def ask_for(self, position):
        if 0 <= position < len(self.units):
            unit = self.units[position]
            self.make_room(unit)
            self.coming[unit] = unit.gather(async_op=True)

    def fetch_and_ask(self, unit, direction):
        position = self.units.index(unit)
        if unit not in self.coming:  # the first one of a pass
            self.ask_for(position)
        self.coming.pop(unit).wait()
        self.ask_for(position + direction)

    def before_forward(self, unit, module, inputs):
        self.fetch_and_ask(unit, +1)

    def before_backward(self, unit, module, gradients):
        self.fetch_and_ask(unit, -1)


# %%
first, *others = launch(train_sharded, 2, Zero3Prefetching)
print("with prefetch as alone:", first, "on all ranks:", others == [first])

# %% [markdown]
# The order in which a rank asks and computes, in forward. The most bytes are now two neighbouring
# units: **predict** them.


# %%
def order_in_forward(rank, stage):
    """What a rank does, in order, from the first block to the last."""
    model, events = new_model(), []
    zero = stage(model, torch.optim.SGD, lr=0.1)

    def note_and_gather(name, gather, **settings):
        events.append(f"ask for {name}")
        return gather(**settings)

    for unit in zero.units[2:6]:  # the blocks
        name = unit.names[0].split(".norm1")[0]
        unit.gather = partial(note_and_gather, name, unit.gather)
        unit.module.register_forward_pre_hook(
            lambda module, inputs, name=name: events.append(f"compute {name}")
        )
    model(next(batches(rank=rank, ranks=2))[0])
    return events


just_in_time, early = (launch(order_in_forward, 2, s)[0] for s in (Zero3, Zero3Prefetching))
for left, right in zip(just_in_time, early):
    print(f"{left:20}  {right}")

# %% tags=["prediction"]
predicted = {"most bytes of parameters": P // n + 2 * block}
_, _, (most, _) = launch(costs_of_step, n, Zero3Prefetching)[0]
compare(predicted, {"most bytes of parameters": most})

# %% [markdown]
# What is gained depends on the link. On the ranks of this notebook nothing, since they share their
# cores with gloo. So the next picture is simulated: four blocks, 1 unit of time for a block's
# forward, 2 for its backward, and 0.8 for every gather or reduction. The link carries one message
# at a time.

# %%
figure = ch08.prefetching()
plt.show()

# %% [markdown]
# *Simulated. Blue computes, hatched grey waits, orange is the link. Just in time, every message
# stops the work. With prefetch only the first gather does, and backward still waits for each
# reduction. `fully_shard` sends those behind the backward of the next block as well.*
#
# The published gain: prefetch in backward made training of a model of 175 billion parameters about
# 18 % faster (Zhao et al. 2023, section 5). It needs links that are quick enough: a block of
# $12W^2$ parameters takes $24W^2$ bytes to gather in 16 bits, and computes $24tW^2$ operations for
# $t$ tokens. Both grow with $W^2$: whether the gather hides behind the work depends on the tokens
# of a rank, not on the size of the model.

# %% [markdown]
# ### With PyTorch: `fully_shard`
#
# PyTorch's own is `fully_shard`, also called FSDP2. It is called on a module and changes it in
# place: the parameters that the module has at that moment become one unit. Call it on each block
# first and on the whole model last; the root's unit then is what the blocks have left over. There
# is no flat vector here: each parameter becomes a DTensor (chapter 6) with the placement
# `Shard(0)`, and a unit's shards travel together. Names stay as they were.

# %%
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate


def wrap(model, **options):
    """A unit for each block, and one for the rest: embeddings, norm and head."""
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    """All of a DTensor, gathered; or the tensor itself. All ranks call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    for dim in range(tensor.device_mesh.ndim):  # one dimension of the mesh after the other
        placements = [Replicate()] * (dim + 1) + list(tensor.placements[dim + 1 :])
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def wholes(model):
    """All parameters and gradients of a wrapped model, whole, by name. All ranks call it."""
    named = dict(model.named_parameters())
    gradients = {name: whole(p.grad) for name, p in named.items()}
    return {name: whole(p.detach()) for name, p in named.items()}, gradients


# %% [markdown]
# Training code stays as it was, with two rules: the optimizer is made after the wrapping, and every
# rank calls `forward`. `fully_shard` averages the gradients.


# %%
def train_wrapped(rank, wrapping=wrap):
    model = wrapping(new_model())
    optimizer = momentum_sgd(model.parameters())
    losses = train(model, optimizer, batches(rank=rank, ranks=dist.get_world_size()))
    return as_alone(losses, *wholes(model)), {
        name: f"{type(p).__name__}, {tuple(local(p).shape)} of {tuple(p.shape)}"
        for name, p in model.named_parameters()
    }


# %%
for n in (2, 3):
    claims, shapes = zip(*launch(train_wrapped, n))
    print(
        f"fully_shard on {n} ranks as alone:",
        claims[0],
        "on all ranks:",
        claims.count(claims[0]) == n,
    )
for rank in range(n):
    print(
        f"rank {rank} holds of blocks.0.feed_forward.up.weight:",
        shapes[rank]["blocks.0.feed_forward.up.weight"],
    )

# %% [markdown]
# 128 rows on 3 ranks: 43, 43 and 42. Each parameter is cut by rows, and the last rank may get
# fewer, or none.
#
# ### What a wrapping costs: per layer, or only the root
#
# Two questions decide how a model is wrapped. What is gathered at once: a block, or everything? And
# is it freed after forward? The second is the argument `reshard_after_forward`. By default blocks
# are freed, and the root is not, since backward would need its head at once.
#
# **Predict** for 4 ranks: the bytes that a ring sends, and the most bytes of parameters that a rank
# holds. The blocks have $L(12W^2 + 13W)$ parameters; call the rest $R$.

# %% tags=["prediction"]
n, L = 4, LAYERS
R = P - L * block  # bytes of embeddings, last norm and head
predicted = {
    "per block, sent": (3 * L * block + 2 * R) * (n - 1) // n,
    "per block, kept, sent": 2 * P * (n - 1) // n,
    "root only, sent": 2 * P * (n - 1) // n,
    "per block, most": P // n + R + block,
    "per block, kept, most": P // n + P,
    "root only, most": P // n + P,
}


# %%
def wrap_kept(model):
    return wrap(model, reshard_after_forward=False)


def readings_of_step(wrapping):
    """The ring's bytes of a step, and the bytes of parameters and gradients at every layer."""
    model = wrapping(new_model())
    meter = Meter(model)
    inputs, targets = next(batches(rank=dist.get_rank(), ranks=dist.get_world_size()))
    with Trace() as trace:
        cross_entropy(model(inputs).flatten(0, 1), targets).backward()
    meter.read()
    return ring_bytes(trace.record().calls), meter.readings


def readings_of_wrappings(rank):
    wrappings = {"per block": wrap, "per block, kept": wrap_kept, "root only": fully_shard}
    return {name: readings_of_step(wrapping) for name, wrapping in wrappings.items()}


readings = launch(readings_of_wrappings, n)[0]
measured = {f"{name}, sent": sent for name, (sent, _) in readings.items()}
for name, (_, of_layers) in readings.items():
    measured[f"{name}, most"] = max(parameters for _, parameters, _ in of_layers)
compare(predicted, measured)

# %%
of_layers = {name: layers for name, (_, layers) in readings.items()}
figure = ch08.through_a_step(of_layers, P)
plt.show()
peaks = {name: max(p + g for _, p, g in layers) for name, layers in of_layers.items()}
print("root only needs more at its peak than no shards at all:", peaks["root only"] > 2 * P)
print("per block needs less than half of it:", peaks["per block"] < peaks["root only"] / 2)

# %% [markdown]
# *Per block, only one block is whole at a time. With the root alone, everything is whole from the
# first layer on, all gradients pile up until the end, and the shards lie beside them: more than
# data parallelism needs.*
#
# The curves count parameters and gradients, and no temporary buffers. `fully_shard` gathers into
# a buffer and copies from there: in backward the next block is already in its buffer, or on its way,
# while this one computes. That is its prefetch, and the room it takes is that of a second block.
#
# `fully_shard(model)` on the root alone runs, gives the right numbers, and shards everything that
# lies idle between steps. But at the peak it saves the optimizer's state alone, as ZeRO-1 does:
# parameters and gradients take more than without shards. It is easily done: one line less, and no error. The middle curve is a choice: `reshard_after_forward=False` keeps parameters from forward
# to backward and sends no more than data parallelism, as ZeRO-2 does. A whole number in its place,
# such as 8, frees after forward to shards among groups of 8 ranks, so that the second gather stays
# inside a machine.
#
# ### Mixed precision: a policy
#
# `MixedPrecisionPolicy` says in which type things travel and compute. Shards, and with them the
# update, stay float32. With `param_dtype=torch.bfloat16` a unit is cast before it is gathered.
# `reduce_dtype` is the type in which gradients are summed: float32 is safer where many ranks add
# up.
#
# **Predict** the ring's bytes with a policy of bfloat16 for parameters and float32 for sums.

# %% tags=["prediction"]
from torch.distributed.fsdp import MixedPrecisionPolicy

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
gathered = 2 * L * block + R  # bytes of float32: blocks twice, the rest once
predicted = {
    "float32, sent": (gathered + P) * (n - 1) // n,
    "bfloat16 and float32, sent": (gathered // 2 + P) * (n - 1) // n,
}


# %%
def step_in_two_types(rank, policy):
    """What a ring sends; the types in which the ranks compute, reduce, and keep."""
    model = wrap(new_model(), mp_policy=policy)
    types = {}
    up = model.blocks[0].feed_forward.up
    up.register_forward_hook(lambda module, inputs, y: types.update(computes=str(y.dtype)))
    inputs, targets = next(batches(rank=rank, ranks=n))
    with Trace() as trace:
        cross_entropy(model(inputs).flatten(0, 1).float(), targets).backward()
    calls = trace.record().calls
    for op in ("all_gather", "reduce_scatter"):
        types[op] = ", ".join(sorted({f"torch.{call.dtype}" for call in calls if call.op == op}))
    types |= {"gradient": str(up.weight.grad.dtype), "kept": str(up.weight.dtype)}
    return ring_bytes(calls), types


(full, _), (mixed, types) = (
    launch(step_in_two_types, n, p)[0] for p in (MixedPrecisionPolicy(), POLICY)
)
compare(predicted, dict(zip(predicted, (full, mixed))))
for name in ("all_gather", "computes", "reduce_scatter", "gradient", "kept"):
    print(f"{name:14}", types[name])

# %% [markdown]
# The update happens in float32, on float32 shards: they are the master copy. Parameters in bfloat16
# exist only while a unit is gathered. So mixed precision costs no second copy here.
#
# ### Meta device: build what fits on no rank
#
# `new_model()` makes the whole model on every rank before it is cut. That is just what a large
# model does not allow. On the device **meta** tensors have shapes and no memory. So: build there,
# wrap, which cuts shapes only, then let `to_empty` allocate the shards, and fill them.
# `set_model_state_dict` takes whole tensors, here from rank 0, and gives each rank its part, one
# tensor at a time.

# %%
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh


def from_meta(rank):
    """Trains a model that no rank but 0 ever held whole."""
    values = {name: p.detach() for name, p in new_model().named_parameters()} if rank == 0 else {}
    bytes_held = []
    with torch.device("meta"):
        model = LanguageModel(VOCABULARY, WIDTH, heads=4, layers=LAYERS, context=CONTEXT)
    wrap(model, mesh=init_device_mesh(hardware.device().type, (dist.get_world_size(),)))
    bytes_held.append(sum(local(p).nbytes for p in model.parameters() if not p.is_meta))
    model.to_empty(device=hardware.device())
    bytes_held.append(memory_ledger(model)["parameters"])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, values, options=options)
    losses = train(
        model, momentum_sgd(model.parameters()), batches(rank=rank, ranks=dist.get_world_size())
    )
    return bytes_held, as_alone(losses, *wholes(model))


# %%
n = 2
bytes_held, claims = launch(from_meta, n)[1]
compare(
    {"on meta": 0, "after to_empty": P // n}, dict(zip(("on meta", "after to_empty"), bytes_held))
)
print("from meta as alone:", claims)

# %% [markdown]
# A new model needs no copy of rank 0's: after `to_empty`, `reset_parameters()` of each layer draws
# numbers for this rank's shard. On GPUs every rank draws other ones. On a mesh of CPUs it goes wrong
# (PyTorch 2.11 to 2.15; shown in `08_fsdp_further`, section 5). From a checkpoint each rank reads only
# its part; that comes below.
#
# **CPU offload** in a word: with `offload_policy=CPUOffloadPolicy()` the shards, their gradients
# and the optimizer's state live in the host's memory and the update runs on the CPU. A GPU then
# holds gathered units and activations only, and every gather passes the slow way between host and
# GPU. It is for models that fit in no other way.

# %% [markdown]
# ### Checkpoints: four ranks save, two or one resume
#
# No rank has the model, so no rank can write it. With `torch.distributed.checkpoint` every rank
# writes a file of its own shards, and rank 0 a small file `.metadata` that says which part of which
# tensor lies where. To load, each rank looks up which pieces *its* shards need and reads those. So
# the number of ranks may be another one: this is **resharding**.
#
# `get_state_dict` gives model and optimizer state under the names of the whole model, as DTensors.
# A checkpoint without the optimizer's state is no checkpoint, as section 5 shows.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def to_save(model, optimizer):
    """What a checkpoint holds. Its DTensors also say what this rank needs when it loads."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save(model, optimizer, folder, writer=dcp.FileSystemWriter):
    """Saves under another name, and renames when every rank is done. All ranks call it."""
    unfinished = folder.with_suffix(".unfinished")
    dcp.save(to_save(model, optimizer), storage_writer=writer(unfinished))
    if dist.get_rank() == 0:
        unfinished.rename(folder)
    dist.barrier()


def resume(model, optimizer, folder):
    """Fills model and optimizer, whatever number of ranks has saved. All ranks call it."""
    state = to_save(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


# %%
def state_of(model, optimizer):
    """Parameters and momentum, whole, by name. All ranks call it."""
    state = to_save(model, optimizer)
    of_optimizer = state["optimizer"]["state"].items()
    momentum = {f"{name}, momentum": whole(s["momentum_buffer"]) for name, s in of_optimizer}
    values = {name: whole(tensor) for name, tensor in state["model"].items()}
    return {name: t.detach().cpu().clone() for name, t in (values | momentum).items()}


def train_and_save(rank, folder, writer=dcp.FileSystemWriter):
    """Two steps, a checkpoint, two more steps. Returns the states after two and after four."""
    model = wrap(new_model())
    optimizer = momentum_sgd(model.parameters())
    train(model, optimizer, batches(range(2), rank, dist.get_world_size()))
    after_two = state_of(model, optimizer)
    save(model, optimizer, folder / "step-0002", writer)
    train(model, optimizer, batches(range(2, 4), rank, dist.get_world_size()))
    return after_two, state_of(model, optimizer)


# %%
def resume_and_train(rank, folder):
    """The state as it was loaded, and after two more steps."""
    model = wrap(new_model())
    optimizer = momentum_sgd(model.parameters())
    resume(model, optimizer, folder)
    loaded = state_of(model, optimizer)
    train(model, optimizer, batches(range(2, 4), rank, dist.get_world_size()))
    return loaded, state_of(model, optimizer)


# %%
import shutil

from course_utils.lesson.terminal import scratch

CHECKPOINTS = (scratch() / "fsdp").resolve()
shutil.rmtree(CHECKPOINTS, ignore_errors=True)
CHECKPOINTS.mkdir(parents=True)
after_two, after_four = launch(train_and_save, 4, CHECKPOINTS)[0]
print("saved by 4 ranks:", *sorted(p.name for p in (CHECKPOINTS / "step-0002").iterdir()))
for n in (2, 1):
    loaded, finished = launch(resume_and_train, n, CHECKPOINTS / "step-0002")[0]
    bit_equal = all(torch.equal(tensor, loaded[name]) for name, tensor in after_two.items())
    print(f"resumed by {n}: parameters and momentum bit-equal: {bit_equal}", end="")
    print(", after two more steps as undisturbed:", same(after_four, finished))

# %% [markdown]
# What becomes of a save in the middle of which a rank dies is in the further notebook: `.metadata`, which is
# written last, and the new name keep anyone from loading a half of it, and saving every time into the
# *same* folder loses both. Chapter 9 adds what is still missing: a file that the disk has damaged, and
# the way back to the last good one.

# %% [markdown]
# ## 5. Break it: one bug hunt and three mistakes
#
# ### Bug hunt: size and speed at once
#
# The web article *Data Parallelism & Model Parallelism* closes with advice and no code: FSDP splits parameters,
# gradients and optimizer state over all GPUs, and so it solves both problems at once, the size of
# the model and the speed of training. Another one says that model sharding cuts a large model into
# smaller pieces and gives each GPU one. Before you run the cell: which of the numbers are smaller
# with FSDP than with DDP? And which blocks does a rank compute?


# %%
def counted(rank, wrapping):
    """Model states held, activations kept, bytes sent and blocks computed in a step."""
    model = new_model()
    blocks, network = list(model.blocks), wrapping(model)
    optimizer = momentum_sgd(network.parameters())
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    train(network, optimizer, [(inputs, targets)] * 2)
    computed = []
    for block in blocks:
        block.register_forward_hook(lambda *_: computed.append(1))
    with Trace() as trace:
        with kept_for_backward(model) as kept:
            loss = cross_entropy(network(inputs).flatten(0, 1), targets)
        loss.backward()
    states = sum(memory_ledger(network, optimizer).values())
    return states, kept.bytes, ring_bytes(trace.record().calls), sum(computed)


# %%
def both_counted(rank):
    return counted(rank, DDP), counted(rank, wrap)


with_ddp, with_fsdp = launch(both_counted, 4)[1]
kinds = ["model states held", "activations kept", "bytes sent", "blocks computed"]
for kind, of_ddp, of_fsdp in zip(kinds, with_ddp, with_fsdp):
    word = "the same" if of_ddp == of_fsdp else "less" if of_fsdp < of_ddp else "more"
    print(f"{kind:18} with FSDP: {word}, {of_fsdp / of_ddp:.2f} of DDP")

# %% [markdown]
# The first claim is half right: size, yes, for the model states. The speed of DDP is at best kept:
# the work is the same and more is sent, here 1.45 times as much. FSDP makes larger models or larger
# batches *possible*. And no rank has a piece of the model in the sense of chapter 4: each computes
# all four blocks, for its own rows. "Sharding" is how things are stored and not how the work is
# split.
#
# ### The optimizer made before the sharding
#
# One line in the wrong place. `fully_shard` replaces every parameter by a new one. The optimizer
# below still has the old ones. The same batch is trained on three times, so the loss should fall.


# %%
def train_three_times(rank, optimizer_first):
    model = new_model()
    if optimizer_first:
        optimizer = momentum_sgd(model.parameters())
        wrap(model)
    else:
        wrap(model)
        optimizer = momentum_sgd(model.parameters())
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = sum(id(p) not in known for p in model.parameters())
    losses = train(model, optimizer, list(batches([0], rank, dist.get_world_size())) * 3)
    return " ".join(f"{loss:.3f}" for loss in losses), strangers


for name, optimizer_first in (("after", False), ("before", True)):
    losses, strangers = launch(train_three_times, 2, optimizer_first)[0]
    print(f"optimizer made {name} the wrapping: losses {losses}; it misses {strangers} parameters")

# %% [markdown]
# No error and no warning: an optimizer skips parameters without gradients, and its old ones get
# none. On changing batches the loss wobbles and looks alive. Compare what the optimizer has with
# what the model has, once, at the start.
#
# ### Forward on one rank only
#
# Rank 0 wants to see a sample before training, or validates alone. With DDP that goes well for this
# model: DDP's forward sends nothing but buffers, and it has none. With FSDP forward gathers, and
# everybody has to take part.


# %%
def sample_on_rank_0(rank, sharded):
    model, (inputs, _) = new_model(), next(batches())
    model = wrap(model) if sharded else DDP(model)
    if rank == 0:
        with torch.no_grad():
            print("a sample of shape", tuple(model(inputs[:1]).shape))


_ = launch(sample_on_rank_0, 2, False, backend="gloo")  # NCCL's rank 0 would wait on the GPU
try:
    launch(sample_on_rank_0, 2, True, backend="gloo")
except RankFailure as failure:
    print(failure)

# %% [markdown]
# Rank 0 waits for pieces that rank 1 would have to send, but rank 1 has left. Under torchrun this
# is a silent hang, or a pairing of rank 0's all-gather with whatever rank 1 calls next. The same
# happens with an early `break`, with batches that run out on one rank (chapter 3), with a layer
# that only some ranks use, and with `state_dict` tricks under `if rank == 0`. The repair: all ranks
# call it, one prints.


# %%
def sample_on_all(rank):
    model = wrap(new_model())
    with torch.no_grad():
        sample = model(next(batches())[0][:1])
    if rank == 0:
        print("a sample of shape", tuple(sample.shape))


_ = launch(sample_on_all, 2)

# %% [markdown]
# ### A checkpoint without the optimizer's state
#
# Six steps, a checkpoint, six more. Once both model and optimizer are resumed, once only the model,
# as in many a script.


# %%
def begun():
    model = wrap(new_model())
    return model, momentum_sgd(model.parameters())


def interrupted(rank, folder):
    """Saves after 6 of 12 steps; then takes the other 6 again and again, from what was saved."""
    ranks = dist.get_world_size()

    def other_six(model, optimizer):
        losses = train(model, optimizer, batches(range(6, 12), rank, ranks))
        return losses, {name: p.cpu() for name, p in wholes(model)[0].items()}

    model, optimizer = begun()
    first_six = train(model, optimizer, batches(range(6), rank, ranks))
    save(model, optimizer, folder)
    results = {"undisturbed": other_six(model, optimizer)}
    for what in ("model and optimizer", "model only"):
        model, optimizer = begun()
        resume(model, optimizer, folder)
        if what == "model only":
            optimizer = momentum_sgd(model.parameters())  # a new one, as after a restart
        results[what] = other_six(model, optimizer)
    return {what: (first_six + losses, values) for what, (losses, values) in results.items()}


# %%
shutil.rmtree(CHECKPOINTS / "of-six", ignore_errors=True)
results = launch(interrupted, 2, CHECKPOINTS / "of-six")[0]
figure = ch08.resumed({what: losses for what, (losses, _) in results.items()})
plt.show()
losses, expected = results["undisturbed"]
for what in ("model and optimizer", "model only"):
    resumed, got = results[what]
    print(f"{what}:")
    print(
        f"    first loss after resuming as undisturbed: {abs(resumed[6] - losses[6]) < 1e-5}",
        end="",
    )
    print(f", the last: {abs(resumed[11] - losses[11]) < 1e-5}, parameters: {same(expected, got)}")

# %% [markdown]
# *Left: three losses on changing batches, hard to tell apart. Right: with model and optimizer the
# resumed run lies on the undisturbed one; with the model only it leaves it after the first step.*
#
# The first loss is exactly right, because the parameters are. Nothing looks broken. But the
# momentum is gone, so the run goes another way. With Adam the first step after such a restart is also
# larger than it should be: where an average has seen one gradient only, every parameter moves by the
# whole learning rate. Test a checkpoint as here: stop, resume, and compare with the run that was
# never stopped.

# %% [markdown]
# ## 6. Exercises: build your own FSDP

# %% [markdown]
# The arithmetic, and an optimizer that shares its state out. 8.3 to 8.5, an FSDP of your own from its layout
# to a checkpoint that fits any number of ranks, are in the further notebook. 8.2 runs on real ranks, where
# the process group is ready: `dist.get_rank()` and `dist.get_world_size()` work.

# %% [markdown]
# ### 8.1 The ledger as a function (2 points)
#
# Write the formulas of section 3 for any stage. Stage 0 shards nothing, stage 1 the optimizer state,
# stage 2 the gradients as well, stage 3 the parameters as well. A shard is a whole number of
# parameters, the same on every rank: where they do not divide, it is rounded up.


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
# ### 8.2 An optimizer that shares its state out (4 points)
#
# Stage 1 needs no new model, only a new optimizer. Every rank has all parameters and the same averaged
# gradients. Each parameter gets an **owner**: one rank that keeps its state and computes its update. The
# others receive the result.
#
# Whole parameters are shared out, and not single numbers, so that any optimizer may be inside, also one
# that looks at a whole matrix. And yours is a `torch.optim.Optimizer` itself: a learning rate scheduler
# changes `param_groups` of *your* object, and what it wrote there must count in the next step.
#
# Think of more ranks than parameters: an optimizer refuses an empty list of parameters, but not a group
# with an empty list.

# %% nbgrader={"grade_id": "8.2", "solution": true}
from collections.abc import Callable


class ShardedOptimizer(torch.optim.Optimizer):
    """Updates all parameters as `optimizer_cls(params, **kwargs)` does; a rank has a part of the state.

    `params` are parameters or parameter groups, the same on every rank; `optimizer_cls` is any
    optimizer whose update of a parameter needs no other one. Every parameter has one owner, also when
    it is frozen; a tied one comes once, as `model.parameters()` gives it. Counted in elements, no rank
    owns more than an equal share and one parameter more.

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
# ## 7. See it: a ledger with sliders
#
# The explorer shows the ledger of one rank for all four stages, and marks the one you chose. It
# counts the model states and, for stage 3, two gathered units, each a fortieth of the model.
# Activations come on top. Three things to try:
#
# * A model of 7.5 billion on 64 ranks: stages 1 and 2 fit into 80 GB. With 42.5 billion only stage
#   3 does.
# * Go to 1 rank: the stages are equal. There is nobody to share with.
# * Change the precision: the ledger of model states stays at 16 bytes for each parameter. What
#   moves is the share that each stage divides, and what travels.

# %%
PRECISIONS = {  # bytes for each parameter: parameters, gradients, optimizer
    "mixed, as in the paper": {"parameters": 2, "gradients": 2, "optimizer": 12},
    "float32": {"parameters": 4, "gradients": 4, "optimizer": 8},
}


def ledger_of_rank(billions, n, stage, precision):
    """The model states of a rank in GB, and two gathered units in stage 3."""
    each = PRECISIONS[precision]
    ledger = {k: billions * b / (n if k in SHARED_OUT[stage] else 1) for k, b in each.items()}
    units = 2 / 40 * billions * each["parameters"] if stage == 3 and n > 1 else 0
    return ledger | {"temporary": units}


# %%
from course_utils.lesson import explore


def draw_ledgers(billions_of_parameters, ranks, stage, precision):
    n, chosen = int(ranks), int(stage)
    ledgers = [ledger_of_rank(billions_of_parameters, n, row, precision) for row in range(4)]
    each = PRECISIONS[precision]["parameters"]
    sent = (3 if chosen == 3 else 2) * billions_of_parameters * each * (n - 1) / n
    fits = "fits into" if sum(ledgers[chosen].values()) <= 80 else "does not fit into"
    on = f"{n} rank{'' if n == 1 else 's'}"
    title = f"Stage {chosen} on {on} {fits} 80 GB; a ring sends {sent:,.1f} GB a step"
    return ch08.ledgers(ledgers, chosen, title)


explore.Explorer(
    draw_ledgers,
    billions_of_parameters=(0.5, 70.5, 7.5),
    ranks=["64", "1", "2", "8", "512", "4096"],
    stage=["3", "0", "1", "2"],
    precision=list(PRECISIONS),
)

# %% [markdown]
# *At the start: the paper's 7.5 billion on 64 ranks. Stage 0 needs 120 GB, stage 3 1.9 GB for the
# model states and less than one GB for two gathered units.*
#
# And the figure to remember: what more ranks buy.

# %%
figure = ch08.floors(gigabytes)
plt.show()
print("floors of stages 1 and 2:", *(f"{sum(gigabytes(s, 2**40).values()):.0f} GB" for s in (1, 2)))

# %% [markdown]
# *Model states of 7.5 billion parameters. Stage 1 flattens at 30 GB, the parameters and gradients
# in 16 bits; stage 2 at 15 GB; stage 3 halves with every doubling.*
#
# ## 8. On a cluster: the same model under torchrun
#
# The script trains the language model of section 4 and saves after every step. Started again, on
# any number of ranks that divides the 12 windows of a batch, it goes on from the newest checkpoint (with
# another number the mean of the ranks' means is no longer that of the batch). Here that is the one that four ranks
# saved in section 4. New beside section 4 are the lines for the process group.

# %%
from pathlib import Path

from course_utils.lesson.terminal import torchrun

script = Path("scratch/train_fsdp.py")
script.unlink(missing_ok=True)

# %%
# %%writefile scratch/train_fsdp.py
"""Trains a sharded language model up to a step, from the newest checkpoint. Start with torchrun."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from course_utils.lesson import text
from course_utils.lesson.models import LanguageModel

last_step, folder = int(sys.argv[1]), Path("scratch/fsdp_run")
local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
device = "cuda" if torch.cuda.device_count() >= local_ranks else "cpu"
if device == "cuda":
    torch.cuda.set_device(local_rank)
mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
rank, ranks = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = LanguageModel(len(text.vocabulary()), width=32, heads=4, layers=4, context=16).to(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def state():
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


finished = {int(path.name[5:]): path for path in folder.glob("step-*") if not path.suffix}
start = max(finished, default=0)
if finished:
    loaded = state()
    dcp.load(loaded, checkpoint_id=finished[start])
    set_state_dict(
        model,
        optimizer,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
    )
for step in range(start, last_step):
    tokens, targets = (part[rank::ranks].to(device) for part in text.windows(16, 12, seed=step))
    loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean_loss = loss.detach() / ranks
    dist.all_reduce(mean_loss)
    if rank == 0:
        print(f"step {step}, world size {ranks}: loss {mean_loss.item():.3f}")
    unfinished = folder / f"step-{step + 1:04}.unfinished"
    dcp.save(state(), checkpoint_id=unfinished)
    if rank == 0:
        unfinished.rename(unfinished.with_suffix(""))
    dist.barrier()
dist.destroy_process_group()

# %%
shutil.rmtree("scratch/fsdp_run", ignore_errors=True)  # of an earlier run of this cell
shutil.copytree(CHECKPOINTS / "step-0002", "scratch/fsdp_run/step-0002")
printed = torchrun(2, script, "4")
print(printed, end="")
alone = new_model()
losses_of_four = train(alone, momentum_sgd(alone.parameters()), batches(range(4)))
expected = [f"loss {loss:.3f}" for loss in losses_of_four[2:]]
print("as one process:", [line.partition(": ")[2] for line in printed.splitlines()] == expected)

# %% [markdown]
# Two steps on four ranks, two more on two, and the losses are those of one process. What changes on
# a cluster:
#
# * **The model is built on the meta device**, as in section 4.
# * **The mesh** has two dimensions where machines have fast links inside:
#   `init_device_mesh("cuda", (machines, 8), mesh_dim_names=("replicate", "shard"))`.
# * **Gathers overlap with computing** only on GPUs, where they run on a stream of their own. The
#   Python code runs ahead; `set_modules_to_forward_prefetch` asks even earlier.
# * **Checkpoints** go to a file system that all machines see. `dcp.async_save` copies the shards to
#   the host's memory and writes while training goes on.
# * **Things die.** Chapter 9 restarts them.
#
# The folder `cluster/` has the script to take away: `cluster/train.py` adds bfloat16, gradient
# clipping, the position in the data, checkpoints that are verified, and the way back to the last
# good one. Launch files for SLURM and Kubernetes lie beside it.

# %% [markdown]
# ### 8.6 Your own script, in shards
#
# `mine/train.py` (6.7) still keeps a copy of everything on each data rank. Shard it. If you have not written it yet,
# `mine.start(8)` gives you the course's own as chapter 6 leaves it.
#
# * `fully_shard` on each block and on the model takes the place of the averaged gradients, on the data ranks.
# * No rank ever has memory for a whole large matrix: build the model under `torch.device("meta")`, and give each part its
#   first values after the sharding. They are the same on any number of ranks, and so the parameters end as on one.
# * With the new option `--bfloat16` it computes in bfloat16, and keeps parameters and optimizer in float32.
# * At the end all ranks write a checkpoint with `torch.distributed.checkpoint`: the state dict of the model under
#   `"model"`, into the folder `checkpoint` of `--out`. The file `model.pt` stays.

# %%
from course_exercises import mine

check("8.6", mine.script(8))

# %% [markdown]
# ## 9. Remember
#
# 1. Model states cost 16 bytes for each parameter. ZeRO divides first the optimizer state, then the
#    gradients, then the parameters among the ranks. Activations stay.
# 2. Stages 1 and 2 send what data parallelism sends, $2\Psi$; stage 3 sends $3\Psi$ and has no
#    floor.
# 3. Shard each block and then the root. The root alone shards what lies idle, and at the peak holds
#    all parameters and all gradients.
# 4. Wrap first, then make the optimizer. Every rank calls forward. What you compute by hand from the
#    parameters of a rank, such as a norm, sees its shards only.
# 5. A checkpoint is model *and* optimizer, complete or not there at all, and loads on any number of
#    ranks.
#
# **Sources**
#
# * S. Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*,
#   2019, [arXiv 1910.02054](https://arxiv.org/abs/1910.02054): section 3.1 the ledger, section 5
#   the stages, section 7 communication, figure 1 and table 1.
# * Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, 2023,
#   [arXiv 2304.11277](https://arxiv.org/abs/2304.11277): section 3.2 units, peak memory and hybrid
#   sharding, section 5 prefetch measured.
# * PyTorch: [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html),
#   [FSDP2 tutorial](https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html).
