# %% [markdown]
# # 8. FSDP, further: accumulation, recomputation, meshes of two dimensions, checkpoints, an FSDP of your own
#
# The lesson shards a model with `fully_shard`. This notebook is about what is built on that: several backward passes
# before an update, recomputation, shards inside machines and copies across them, tensor parallelism on a second
# dimension, compiled blocks, shards in the host's memory, and checkpoints: torn in the middle, written while training
# goes on, and as safetensors. At the end you write an FSDP yourself.
#
# Run the parts in order: some use what an earlier one defines. None needs your answers from the lesson.

# %% tags=["nbval-ignore-output"]
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from course_utils import hardware
from course_utils.launch import RankFailure, launch
from course_utils.lesson import text
from course_utils.lesson.equality import check_equal, flat, largest_difference
from course_utils.lesson.predictions import compare
from course_utils.trace import Trace, kept_for_backward, memory_ledger, ring_bytes

hardware.report()

# %% [markdown]
# ## 1. The factory: quarters of a page, and two sites
#
# In the lesson four buildings share out every page and send the quarters round when the page is needed. With a
# thousand buildings on many sites that is a lot of travel for each page. So each site keeps a whole blueprint, shared
# out among its buildings: quarters travel inside the site, and only change notes travel between sites.
#
# | in the factory | in PyTorch | what it is |
# |---|---|---|
# | a whole blueprint on every site | HSDP | shards inside a machine, copies across machines |
# | change notes of several boxes, kept in the building | `set_requires_gradient_sync(False)` | gradients of micro-batches, not reduced yet |
# | a page is worked through twice, and the shelf stays nearly empty | activation checkpointing | forward again, in backward |
#
# ## 2. The smallest real run: `fully_shard` against one process
#
# All parts use the lesson's model and data, and compare with one process.

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
    """This rank's windows of each batch; 12 of them divide by 1, 2, 3 and 4 ranks."""
    for step in steps:
        inputs, targets = (part[rank::ranks] for part in text.windows(CONTEXT, WINDOWS, seed=step))
        yield inputs.to(hardware.device()), targets.flatten().to(hardware.device())


# %%
def train(model, optimizer, data):
    for inputs, targets in data:
        optimizer.zero_grad()
        cross_entropy(model(inputs).flatten(0, 1), targets).backward()
        optimizer.step()


alone = new_model()
train(alone, momentum_sgd(alone.parameters()), batches())
expected = flat(alone.parameters())
PARAMETERS = sum(parameter.numel() for parameter in alone.parameters())
print(f"{PARAMETERS:,} parameters")

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
    """All parameters, whole, as one vector. All ranks call it."""
    return flat(whole(parameter.detach()) for parameter in model.parameters())


# %%
def train_wrapped(rank, wrapping=wrap):
    model = wrapping(new_model())
    train(model, momentum_sgd(model.parameters()), batches(rank=rank, ranks=dist.get_world_size()))
    return wholes(model)


difference = check_equal(expected, launch(train_wrapped, 2))
print("fully_shard on 2 ranks, largest difference from one process:", difference)

# %% [markdown]
# ## 3. Predict, then measure: what accumulation saves, and what it costs
#
# A step has two micro-batches and one update (chapter 3). By default each backward reduces its gradients. With
# `set_requires_gradient_sync(False)` only the last one does. That saves messages, but gives up the memory that sharded
# gradients save: until the last backward every rank keeps whole gradients.
#
# **Predict** both, for a step of two micro-batches on 2 ranks. In each micro-batch the root unit stays gathered from
# forward to backward, so it is gathered once, and the blocks twice.

# %% tags=["prediction"]
n, P = 2, 4 * PARAMETERS  # ranks, and bytes of all parameters
blocks = 4 * LAYERS * (12 * WIDTH**2 + 13 * WIDTH)  # bytes of the parameters of all blocks
gathered = P + blocks  # of a step: blocks twice, the rest once
of_gathers, of_reductions = gathered * (n - 1) // n, P * (n - 1) // n
predicted = {
    "reduced twice, sent": 2 * of_gathers + 2 * of_reductions,
    "reduced once, sent": 2 * of_gathers + of_reductions,
    "reduced twice, gradients between": P // n,
    "reduced once, gradients between": P,
}

# %%
from torch.distributed.fsdp import FSDPModule

from course_utils.trace.meters import local, storage_bytes


def gradients_held(model):
    """Bytes of gradients: of the shards, and whole ones, which show while a unit is gathered."""
    held = [p.grad for p in model.parameters()]
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    held += [p.grad for p in model.parameters()]
    for unit in units:
        unit.reshard()
    return storage_bytes(local(gradient) for gradient in held if gradient is not None)


# %%
def accumulate(rank, reduce_once):
    """Three updates over two micro-batches each: the parameters, and what a step costs."""
    model = wrap(new_model())
    optimizer = momentum_sgd(model.parameters())
    waiting, n = 0, dist.get_world_size()
    for step, (inputs, targets) in enumerate(batches(rank=rank, ranks=n)):
        optimizer.zero_grad()
        with Trace() as trace:
            for last, half, answers in zip((False, True), inputs.chunk(2), targets.chunk(2)):
                model.set_requires_gradient_sync(last or not reduce_once)
                loss = cross_entropy(model(half).flatten(0, 1), answers) / 2
                loss.backward()
                if step == 0 and not last:  # the last step's trace is kept, so this is not counted
                    waiting = gradients_held(model)
        optimizer.step()
    return wholes(model), ring_bytes(trace.record().calls), waiting


# %%
measured = {}
for name, reduce_once in (("reduced twice", False), ("reduced once", True)):
    values, sent, waiting = zip(*launch(accumulate, n, reduce_once))
    measured |= {f"{name}, sent": sent[0], f"{name}, gradients between": waiting[0]}
    print(f"{name}, largest difference from one process:", check_equal(expected, values))

# %%
compare(predicted, measured)

# %% [markdown]
# Mind the loss: divide each micro-batch's mean by the number of micro-batches, or the gradients are too large by that
# factor.
#
# `model.set_reshard_after_backward(False)` is one more trade. It leaves the units gathered between the micro-batches:
# no gather before the next forward, and the whole parameters stay. Set it to True again before the last micro-batch, or
# call `reshard()` on every unit before `optimizer.step()`, which updates the shards. If you forget, there is no error,
# and the next forward computes with the old numbers.
#
# ## 4. By hand, then with PyTorch: recomputation, two dimensions, compiled blocks, and saves
#
# ### Activation checkpointing: compute twice, keep less
#
# FSDP does not shard activations. **Activation checkpointing** keeps only the input of a block and runs the block's
# forward a second time when backward comes to it ([Chen et al. 2016](https://arxiv.org/abs/1604.06174)). It costs a
# second forward, about a third more computing, and with `fully_shard` no further gather: backward has gathered the
# block already. Recompute first, wrap second.

# %%
from torch.utils.checkpoint import checkpoint


def recompute(model):
    """Each block keeps its input only, and runs forward again in backward."""
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def kept_and_sent(rank):
    """Bytes kept for backward and bytes sent, as usual and recomputing."""
    costs = []
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    for model in (wrap(new_model()), wrap(recompute(new_model()))):
        with Trace() as trace:
            with kept_for_backward(model) as kept:
                loss = cross_entropy(model(inputs).flatten(0, 1), targets)
            loss.backward()
        costs.append((kept.bytes, ring_bytes(trace.record().calls)))
    return costs


# %%
(usual, sent), (less, sent_again) = launch(kept_and_sent, 2)[0]
print(f"recomputing: sent {sent_again / sent:.2f} of the usual bytes, kept {less / usual:.2f}")
values = launch(train_wrapped, 2, lambda model: wrap(recompute(model)))
print("largest difference from one process:", check_equal(expected, values))

# %% [markdown]
# ### Activation checkpointing by operation
#
# Matrix products take nearly all of a block's computing. What lies between them takes little time and much memory.
# **Selective activation checkpointing** decides for each operation: the policy below keeps the results of matrix
# products, and all else is computed again.
#
# For each token, the four matrix products of a block take $3W^2$, $W^2$, $4W^2$ and again $4W^2$ multiplications.
# Recomputation stops as soon as it has what backward needs. **Predict** which share of forward's multiplications a step
# does again.

# %% tags=["prediction"]
predicted = {"recomputing all": 0.67, "by operation": 0.0}

# %%
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

PRODUCTS = ("mm", "addmm")  # PyTorch's names; the second one adds a bias


def keep_products(kept, context, operation, *operands, **options):
    """The policy, called at every operation. Adds the bytes of what it keeps to `kept`."""
    if operation.overloadpacket.__name__ not in PRODUCTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    *_, left, right = operands
    kept.append(4 * left.shape[0] * right.shape[1])
    return CheckpointPolicy.MUST_SAVE


def recompute_between(model, kept):
    """Each block keeps its input and the results of its matrix products."""
    contexts = partial(create_selective_checkpoint_contexts, partial(keep_products, kept))
    again = partial(checkpoint, use_reentrant=False, context_fn=contexts)
    for block in model.blocks:
        block.forward = partial(again, block.forward)
    return model


# %%
from torch.utils.flop_counter import FlopCounterMode


def multiplied(rank, prepare):
    """The FLOPs of a step's matrix products, the bytes of those kept, and the bytes sent."""
    kept = []
    model = wrap(prepare(new_model(), kept))
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    with FlopCounterMode(display=False) as counter, Trace() as trace:
        loss = cross_entropy(model(inputs).flatten(0, 1), targets)
        kept_in_forward = sum(kept)
        loss.backward()
    flops = counter.get_flop_counts()["Global"].items()
    products = sum(count for operation, count in flops if operation.__name__ in PRODUCTS)
    return products, kept_in_forward, ring_bytes(trace.record().calls)


once, _, sent = launch(multiplied, 2, lambda model, _: model)[0]
of_all, _, sent_of_all = launch(multiplied, 2, lambda model, _: recompute(model))[0]
by_operation, kept_results, sent_by_operation = launch(multiplied, 2, recompute_between)[0]

# %%
tokens = WINDOWS // 2 * CONTEXT  # of a rank
forward = LAYERS * 2 * tokens * 12 * WIDTH**2  # FLOPs of the blocks' matrix products
measured = {
    "recomputing all": round((of_all - once) / forward, 2),
    "by operation": round((by_operation - once) / forward, 2),
}

# %%
compare(
    predicted,
    measured,
    likely={
        "Backward does not need the result of the last product, so it is not computed again.": {
            "recomputing all": 1.0
        },
    },
)

# %%
print("sent, the same three times:", sent == sent_of_all == sent_by_operation)
print(f"kept when all is recomputed, of the usual bytes: {less / usual:.2f}")
print(f"kept when the products are kept: {(less + kept_results) / usual:.2f}")
values = launch(train_wrapped, 2, lambda model: wrap(recompute_between(model, [])))
print("by operation, largest difference from one process:", check_equal(expected, values))

# %% [markdown]
# No product is computed twice, and a third of the memory is saved. Recomputing everything saves seven eighths.
# Programs take a middle way: torchtitan keeps attention's result and every second product. Chapter 12's *selective*
# is Megatron-LM's choice: only attention is computed again.

# %% [markdown]
# ### Hybrid shards on a mesh of two dimensions
#
# With 1,000 ranks an all-gather has 1,000 partners, most of them far away. **HSDP**, hybrid
# sharding, shards among the ranks of one machine and replicates across machines. The mesh has two
# dimensions: `replicate` outside, `shard` inside (chapter 7). Gathers and reduce-scatters stay in
# the inner group, and the shards of the gradients are all-reduced in the outer one.
#
# **Predict** for 2 x 2 ranks what a ring sends in each group, and what a rank holds.

# %% tags=["prediction"]
predicted = {
    "inner group, sent": (gathered + P) // 2,
    "outer group, sent": P // 2,
    "parameters held": P // 2,
}

# %%
from torch.distributed.device_mesh import init_device_mesh


def wrap_hybrid(model):
    """Two copies of the model, each sharded among half of the ranks."""
    sizes = (2, dist.get_world_size() // 2)
    return wrap(
        model,
        mesh=init_device_mesh(hardware.device().type, sizes, mesh_dim_names=("replicate", "shard")),
    )


def hybrid(rank):
    """What a step sends and a rank holds."""
    model = wrap_hybrid(new_model())
    inputs, targets = next(batches(rank=rank, ranks=4))
    with Trace() as trace:
        cross_entropy(model(inputs).flatten(0, 1), targets).backward()
    outer = [call for call in trace.record().calls if call.ranks in ((0, 2), (1, 3))]
    inner = [call for call in trace.record().calls if call not in outer]
    return {
        "inner group, sent": ring_bytes(inner),
        "outer group, sent": ring_bytes(outer),
        "parameters held": memory_ledger(model)["parameters"],
    }


measured = launch(hybrid, 4)[0]
values = launch(train_wrapped, 4, wrap_hybrid)
print("2 x 2 ranks, largest difference from one process:", check_equal(expected, values))

# %%
compare(
    predicted,
    measured,
    likely={
        "A shard of the gradients is all-reduced, not all of them.": {"outer group, sent": P},
        "As if all four ranks shared out one copy.": {"parameters held": P // 4},
    },
)

# %% [markdown]
# Only the all-reduce of the outer group leaves the machine: each rank all-reduces its shard of the gradients, $P/2$
# bytes, between two machines. The price is memory: a rank holds a half of the model and not a quarter.
#
# Reduce-scatter inside and all-reduce across are the first two steps of a hierarchical all-reduce
# (`07_hybrid_further`). Its third, the all-gather, comes later, with parameters, before the next forward.
#
# ### FSDP x tensor parallelism
#
# On the same kind of mesh the inner dimension can serve tensor parallelism. `parallelize_module` cuts the layers
# among the ranks of a machine (chapter 6), then `fully_shard` shards each rank's part among the machines. A DTensor
# then has a placement for each mesh dimension. The order matters: tensor parallelism first, FSDP last.

# %%
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

PLAN = {
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(),
}


def mesh_2d():
    sizes = (dist.get_world_size() // 2, 2)
    return init_device_mesh(hardware.device().type, sizes, mesh_dim_names=("data", "tensor"))


def wrap_2d(model):
    """Cuts the MLPs among 2 ranks, then shards everything along the other dimension."""
    mesh = mesh_2d()
    parallelize_module(model, mesh["tensor"], PLAN)
    return wrap(model, mesh=mesh["data"])


# %%
def train_2d(rank):
    model = wrap_2d(new_model())
    data = batches(rank=rank // 2, ranks=dist.get_world_size() // 2)  # the same in a pair
    train(model, momentum_sgd(model.parameters()), data)
    up = model.blocks[0].feed_forward.up.weight
    return wholes(model), [placement.dim for placement in up.placements], tuple(local(up).shape)


values, dims, shapes = zip(*launch(train_2d, 4))
print("FSDP x TP on 2 x 2 ranks, largest difference:", check_equal(expected, values))
print("feed_forward.up.weight, dimension cut along data and along tensor:", *dims[0])
print("a rank holds", shapes[0], "of (128, 32)")

# %% [markdown]
# The two ranks of a tensor group must read the same windows: `rank // 2` is the coordinate in the
# data dimension. Both dimensions of the mesh cut dimension 0 of this weight: tensor parallelism gives
# each of its ranks half of the rows, and FSDP cuts that half once more.
#
# `clip_grad_norm_` needs all gradients on one mesh. Here those of the MLPs lie on both dimensions, and all others on
# `data` alone. So group the gradients that lie alike, and clip all of them by the norm of all.


# %%
def clip_over_meshes(parameters, max_norm):
    """Clips by the norm of all gradients, and returns it; they may lie on several meshes."""
    alike = {}
    for parameter in parameters:
        if parameter.grad is not None:
            place = parameter.device_mesh, parameter.placements
            alike.setdefault(place, []).append(parameter)
    norms = [whole(torch.stack([p.grad.norm() for p in group])) for group in alike.values()]
    norm = torch.cat(norms).norm()
    for group in alike.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm


# %%
def clip_2d(rank):
    """What PyTorch says; then, by hand, the norm and the clipped gradients."""
    model, said = wrap_2d(new_model()), "nothing"
    inputs, targets = next(batches(rank=rank // 2, ranks=dist.get_world_size() // 2))
    cross_entropy(model(inputs).flatten(0, 1), targets).backward()
    try:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.1)
    except RuntimeError as error:
        said = str(error).partition(", but got")[0]
    norm = clip_over_meshes(model.parameters(), max_norm=0.1).cpu()
    return said, norm, flat(whole(p.grad) for p in model.parameters())


said, norms, clipped = zip(*launch(clip_2d, 4))
single, (inputs, targets) = new_model(), next(batches())
cross_entropy(single(inputs).flatten(0, 1), targets).backward()
norm = nn.utils.clip_grad_norm_(single.parameters(), max_norm=0.1).cpu()
print("clip_grad_norm_ says:", said[0])
print("by hand, largest difference of the norm:", check_equal(norm, norms))
print("of the clipped gradients:", check_equal(flat(p.grad for p in single.parameters()), clipped))

# %% [markdown]
# The norm of a DTensor counts each number once, however many ranks hold it: the bias of an MLP's second layer is on
# both ranks of a tensor group. A sum over all ranks' own numbers would count it twice.

# %% [markdown]
# ### `torch.compile`, block by block
#
# `torch.compile` follows your Python code once, notes the operations in a graph, and lets a backend make kernels of
# it. Compile each block, then wrap: what `fully_shard` does before and after a block stays outside of its graph. The
# backend below makes no kernels. It keeps the graph and runs its operations one by one.
#
# **Predict** how many graphs a rank makes of its four blocks, in three steps.

# %% tags=["prediction"]
predicted = {"graphs": 1}


# %%
def compile_and_wrap(model, graphs):
    """Compiles each block, then makes it a unit. Adds what is compiled to `graphs`."""

    def keep_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for block in model.blocks:
        block.compile(backend=keep_graph)  # left out, it is inductor, PyTorch's own
    return wrap(model)


def train_compiled(rank):
    graphs = []
    return train_wrapped(rank, lambda model: compile_and_wrap(model, graphs)), len(graphs)


values, graphs = zip(*launch(train_compiled, 2))
print("compiled, largest difference from one process:", check_equal(expected, values))

# %%
compare(
    predicted,
    {"graphs": graphs[0]},
    likely={
        "The blocks have the same code and the same shapes, so one graph serves all four.": {
            "graphs": LAYERS
        },
        "A graph is made at the first call, and used again afterwards.": {"graphs": STEPS},
    },
)

# %% [markdown]
# The first batch of another shape needs another graph, and that step takes many times as long. `inductor` needs a
# compiler on the machine: Triton for a GPU, C++ for a CPU.
#
# ### CPU offload: shards in the host's memory
#
# With `CPUOffloadPolicy` a rank's shards, their gradients and the optimizer state stay in the host's memory, where the
# optimizer runs too. Every gather first copies a shard to the GPU, and every gradient's shard comes back. The ranks
# below are CPUs: they show that the result is the same. What would cross to a GPU is computed.

# %%
from torch.distributed.fsdp import CPUOffloadPolicy

offload = CPUOffloadPolicy(pin_memory=False)  # True on GPUs: such memory is copied faster
values = launch(train_wrapped, 2, partial(wrap, offload_policy=offload), backend="gloo")
print("offloaded, largest difference from one process:", check_equal(expected, values))
print(f"in a step {gathered // 2:,} bytes of a rank go to the GPU, and {P // 2:,} come back")
LINK = 25e9  # assumed: bytes a second between host and GPU
shard = 4 * 7.5e9 / 64
print(
    f"7.5 billion parameters on 64 ranks: {3 * shard / LINK:.2f} s a step on that link (computed)"
)

# %% [markdown]
# The GPU keeps activations and gathered units only. The copies can hide behind the computing of many tokens; the
# optimizer's step on the host cannot.

# %% [markdown]
# ### A half-written checkpoint is never taken for a whole one
#
# A rank can die while it writes. Below, rank 1 is killed (`SIGKILL`) in the middle of a save, after the other rank
# has written its file. Two things keep the half-written checkpoint from being loaded. DCP
# (`torch.distributed.checkpoint`) writes `.metadata` last, after every rank has reported that it is done. And
# `save_whole` gives the folder its name only then. Programs look for finished names only.

# %%
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def state_to_save(model, optimizer):
    """What a checkpoint holds. Its DTensors also say what this rank needs when it loads."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def save_whole(model, optimizer, folder, writer=dcp.FileSystemWriter):
    """Saves under another name, and renames when every rank is done. All ranks call it."""
    unfinished = folder.with_suffix(".unfinished")
    dcp.save(state_to_save(model, optimizer), storage_writer=writer(unfinished))
    if dist.get_rank() == 0:
        unfinished.rename(folder)
    dist.barrier()


def resume(model, optimizer, folder):
    """Fills model and optimizer, whatever number of ranks has saved. All ranks call it."""
    state = state_to_save(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


# %%
def begun():
    model = wrap(new_model())
    return model, momentum_sgd(model.parameters())


def train_and_save(rank, folder):
    """Two steps, a checkpoint, two more steps. Returns the parameters after two and after four."""
    model, optimizer = begun()
    train(model, optimizer, batches(range(2), rank, dist.get_world_size()))
    after_two = wholes(model)
    save_whole(model, optimizer, folder / "step-0002")
    train(model, optimizer, batches(range(2, 4), rank, dist.get_world_size()))
    return after_two, wholes(model)


# %%
import shutil

from course_utils.lesson.terminal import scratch


def loaded_from(rank, folder):
    """The parameters as they were loaded."""
    model, optimizer = begun()
    resume(model, optimizer, folder)
    return wholes(model)


CHECKPOINTS = (scratch() / "fsdp_further").resolve()
shutil.rmtree(CHECKPOINTS, ignore_errors=True)
CHECKPOINTS.mkdir(parents=True)
after_two, after_four = launch(train_and_save, 4, CHECKPOINTS)[0]
print("saved by 4 ranks:", *sorted(p.name for p in (CHECKPOINTS / "step-0002").iterdir()))

# %%
import os
import signal


class KilledWhileWriting(dcp.FileSystemWriter):
    """Rank 1 dies in a save: the other ranks' files are complete, its own is not there."""

    def write_data(self, plan, planner):
        if dist.get_rank() != 1:
            written = super().write_data(plan, planner)
            written.wait()
        dist.barrier()  # so that it is the same in every run
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def newest(folder):
    finished = (path for path in folder.glob("step-*") if not path.suffix)
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")))


# %%
def go_on_and_save(rank, folder, target, saving):
    """Resumes, trains two steps, and dies while it saves them."""
    model, optimizer = begun()
    resume(model, optimizer, newest(folder))
    train(model, optimizer, batches(range(2, 4), rank, dist.get_world_size()))
    saving(model, optimizer, folder / target, KilledWhileWriting)


def report_killed(*arguments):
    try:
        launch(go_on_and_save, 2, *arguments)
    except RankFailure as failure:
        print(f"rank {failure.rank} ended by a {failure.kind}")


# %%
report_killed(CHECKPOINTS, "step-0004", save_whole)
torn = CHECKPOINTS / "step-0004.unfinished"
print("in the torn folder:", *sorted(path.name for path in torn.iterdir()))
print("the newest whole one:", newest(CHECKPOINTS).name)

# %%
import logging


def error_of_loading(rank, folder):
    logging.disable()  # DCP logs the error first, with its whole traceback
    try:
        loaded_from(rank, folder)
    except dcp.CheckpointException as error:
        return type(error).__name__


print("loading the torn one raises:", launch(error_of_loading, 1, torn)[0])

# %% [markdown]
# A checkpoint does get lost when every save goes into the *same* folder. In the middle of a save, the old `.metadata`
# lies beside old and new files.

# %%
import warnings


def save_over(model, optimizer, folder, writer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that it overwrites, and names the path
        dcp.save(state_to_save(model, optimizer), storage_writer=writer(folder))


def save_two_steps(rank, folder):
    """A checkpoint of 2 ranks in a folder `last`."""
    model, optimizer = begun()
    resume(model, optimizer, newest(folder))
    dcp.save(state_to_save(model, optimizer), storage_writer=dcp.FileSystemWriter(folder / "last"))


shutil.rmtree(CHECKPOINTS / "last", ignore_errors=True)  # of an earlier run of this cell
launch(save_two_steps, 2, CHECKPOINTS)
report_killed(CHECKPOINTS, "last", save_over)
mixed = launch(loaded_from, 1, CHECKPOINTS / "last")
print("it loads without an error. Largest difference")
print("    from the state after two steps: ", largest_difference(after_two, mixed))
print("    from the state after four steps:", largest_difference(after_four, mixed))

# %% [markdown]
# Rank 0's half is from step 4 and rank 1's half from step 2: no run ever had this model, and there is no warning. Give
# every checkpoint a folder of its own. Chapter 9 adds how to detect a damaged file, and the way back to the last good
# checkpoint.
#
# ### A save that training does not wait for
#
# `dcp.async_save` copies the state to the host's memory and returns. A thread writes the copy while training goes on.
# The ranks' threads talk to each other too. They need a process group of their own, or their calls mix with those of
# training. Here `async_save` is called after step 2, and the thread begins to write after step 4.
#
# **Predict** which step's state is saved, and the bytes of a rank's copy. There are 2 ranks, and the optimizer is SGD
# with momentum.

# %% tags=["prediction"]
predicted = {"state after step": 2, "bytes copied": P}

# %%
import threading

from torch.distributed.checkpoint.staging import BlockingAsyncStager


class LateWriter(dcp.FileSystemWriter):
    def __init__(self, folder):
        super().__init__(folder)
        self.may_write = threading.Event()

    def write_data(self, plan, planner):
        self.may_write.wait()
        return super().write_data(plan, planner)


class CountingStager(BlockingAsyncStager):
    """Makes the copy, as DCP's own does, and counts its bytes."""

    def stage(self, state):
        copy = super().stage(state)
        momenta = [values["momentum_buffer"] for values in copy["optimizer"]["state"].values()]
        self.bytes = storage_bytes(map(local, [*copy["model"].values(), *momenta]))
        return copy


# %%
def save_beside_training(rank, folder):
    """Two steps, the start of a save, two more steps, and the save's end. Returns the bytes of the copy."""
    model, optimizer = begun()
    train(model, optimizer, batches(range(2), rank, dist.get_world_size()))
    writer, stager = LateWriter(folder / "beside"), CountingStager()
    saving = dcp.async_save(
        state_to_save(model, optimizer),
        storage_writer=writer,
        async_stager=stager,
        process_group=dist.new_group(backend="gloo"),
    )
    train(model, optimizer, batches(range(2, 4), rank, dist.get_world_size()))
    writer.may_write.set()
    saving.result()  # returns when the checkpoint is written
    return stager.bytes


# %%
shutil.rmtree(CHECKPOINTS / "beside", ignore_errors=True)  # of an earlier run of this cell
copied = launch(save_beside_training, 2, CHECKPOINTS)
loaded = launch(loaded_from, 1, CHECKPOINTS / "beside")
print("largest difference from the state after two steps:", check_equal(after_two, loaded))
print("from the state after four:", largest_difference(after_four, loaded))
saved_step = 2 if torch.allclose(after_two, *loaded, atol=1e-5) else 4

# %%
compare(
    predicted,
    {"state after step": saved_step, "bytes copied": copied[0]},
    likely={
        "The copy is made in the call. What training does later is not in it.": {
            "state after step": 4
        },
        "The optimizer's state is saved too.": {"bytes copied": P // 2},
    },
)

# %% [markdown]
# Training waits for the copy only, so the time $C$ of a save in chapter 9's $\sqrt{2CM}$ is that of the copy. The price
# is the host's memory, for every save that is not finished: wait for the last one before you begin the next.
#
# ### Weights for others: safetensors
#
# DCP's folder is for continuing the training. To hand weights to other programs, people use **safetensors**: a file
# that holds tensors and nothing that could run. It begins with 8 bytes, the length of the header. The header is JSON
# and says of each tensor the type, the shape, and where its bytes begin and end. Then come the bytes. So every rank can
# work out where its rows lie, and write them there itself.

# %%
import json


def header_of(model):
    """The first bytes of the file, and where each tensor begins in it."""
    entries, end = {}, 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + 4 * tensor.numel()
        entries[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [begin, end]}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)  # so that the numbers begin at a multiple of 8
    header = len(header).to_bytes(8, "little") + header
    return header, {name: len(header) + e["data_offsets"][0] for name, e in entries.items()}


def own_rows(tensor):
    """The rows of a DTensor that this rank holds: the last ranks may have fewer, or none."""
    first = dist.get_rank() * -(-len(tensor) // dist.get_world_size())
    return slice(first, first + len(local(tensor)))


# %%
def write_safetensors(model, path):
    """Every rank writes its own rows into the one file. All ranks call it."""
    header, begins = header_of(model)
    if dist.get_rank() == 0:
        path.write_bytes(header)
    dist.barrier()
    with path.open("r+b") as file:
        for name, tensor in model.state_dict().items():
            bytes_of_row = 4 * tensor.numel() // len(tensor)
            file.seek(begins[name] + own_rows(tensor).start * bytes_of_row)
            file.write(local(tensor).cpu().numpy().tobytes())
    dist.barrier()


# %%
def read_safetensors(path):
    """All tensors by name, as views of the file: only what is used is read."""
    file = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    length = file[:8].view(torch.int64).item()
    entries, numbers = json.loads(bytes(file[8 : 8 + length].numpy())), file[8 + length :]
    entries.pop("__metadata__", None)  # notes for readers, in files of other programs
    return {
        name: numbers[slice(*entry["data_offsets"])].view(torch.float32).view(entry["shape"])
        for name, entry in entries.items()
    }


# %% [markdown]
# Three ranks train and write, two read. **Predict** the bytes that they send each other for this, and the size of the
# file without its header.

# %% tags=["prediction"]
predicted = {"bytes sent": 0, "bytes of the tensors": P}


# %%
def train_and_write(rank, path):
    model, optimizer = begun()
    train(model, optimizer, batches(rank=rank, ranks=dist.get_world_size()))
    with Trace() as trace:
        write_safetensors(model, path)
    return sum(call.bytes for call in trace.record().calls)


def read_into_shards(rank, path):
    model, tensors = wrap(new_model()), read_safetensors(path)
    with Trace() as trace:
        for name, tensor in model.state_dict().items():
            local(tensor).copy_(tensors[name][own_rows(tensor)])
    return wholes(model), sum(call.bytes for call in trace.record().calls)


# %%
WEIGHTS = CHECKPOINTS / "model.safetensors"
sent_to_write = launch(train_and_write, 3, WEIGHTS)
values, sent_to_read = zip(*launch(read_into_shards, 2, WEIGHTS))
print("read by 2 ranks, largest difference from one process:", check_equal(expected, values))
length = int.from_bytes(WEIGHTS.read_bytes()[:8], "little")
measured = {
    "bytes sent": sum(sent_to_write) + sum(sent_to_read),
    "bytes of the tensors": WEIGHTS.stat().st_size - 8 - length,
}
print("the header begins:", WEIGHTS.read_bytes()[8:83].decode())

# %%
compare(
    predicted,
    measured,
    likely={
        "As if the whole model were gathered: every rank writes its own rows.": {
            "bytes sent": 2 * P
        },
        "As if the optimizer state were in the file, too.": {"bytes of the tensors": 2 * P},
    },
)

# %% [markdown]
# The package `safetensors` reads and writes the format for all types, and checks what it reads. DCP's
# `HuggingFaceStorageWriter` and `HuggingFaceStorageReader` need it: with `save_distributed=True` every rank writes a
# file of its own rows, and `enable_consolidation=True` puts the files together.
#
# ## 5. Break it: what fits and is wrong
#
# ### Another order of the parameters
#
# A flat vector has no names. If two ranks lay out the same parameters in different orders, pieces end up in the wrong
# layers. Such an order comes from a `set` of strings, which Python orders differently in every process, or from files
# listed by the operating system. Here rank 1 has the reverse order, the same in every run. Both ranks hold the same two
# layers. What is in them after one gather?

# %%


def two_layers(names):
    layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
    for name, layer in layers.items():
        nn.init.constant_(layer.weight, 1.0 if name == "first" else 2.0)
    return layers.to(hardware.device())


def gather_flat(layers):
    """All parameters in one flat vector; each rank owns a half, and gathers the other."""
    vector = nn.utils.parameters_to_vector(layers.parameters()).detach()
    halves = list(vector.chunk(dist.get_world_size()))
    dist.all_gather(halves, halves[dist.get_rank()].clone())
    nn.utils.vector_to_parameters(vector, layers.parameters())


# %%
def gather_in_order(rank, agreed):
    names = ["first", "second"]
    layers = two_layers(names if agreed or rank == 0 else reversed(names))
    gather_flat(layers)
    return {name: layers[name].weight.mean().item() for name in names}, list(layers)


for agreed in (True, False):
    for rank, (weights, order) in enumerate(launch(gather_in_order, 2, agreed)):
        print(f"rank {rank}, order {', '.join(order)}: {weights}")

# %% [markdown]
# In the second run the layer `second` is gone: its numbers are on no rank any more. All shapes fit, and training goes
# on. Compare the names once, with `dist.all_gather_object`. `fully_shard` goes by the order in which modules are
# registered, and does not compare it.
#
# ### Matrices drawn in shards
#
# A model that is built on `meta` has no numbers. After `to_empty`, `reset_parameters()` of each layer draws them, on
# each rank for its own shard (lesson, section 4). Here this happens on a mesh of two CPUs, with the same seed on both,
# as for a model that is built whole. There are 19 matrices. **Predict**: in how many of them does rank 1's half differ
# from rank 0's?

# %% tags=["prediction"]
predicted = {"matrices with two different halves": 0}


# %%
def drawn_in_shards(rank):
    """This rank's halves of all matrices, and the warnings."""
    with torch.device("meta"):
        model = build()
    wrap(model, mesh=init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for layer in model.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    said = {str(warning.message) for warning in seen}
    return [local(p.detach()) for p in model.parameters() if p.dim() > 1], said


# %%
(upper, said), (lower, _) = launch(drawn_in_shards, 2, backend="gloo")
differ = sum(not torch.equal(*halves) for halves in zip(upper, lower))
print("said, as a warning:", *said)

# %%
compare(
    predicted,
    {"matrices with two different halves": differ},
    {"That is right on GPUs.": {"matrices with two different halves": len(upper)}},
)

# %% [markdown]
# Both ranks drew the same numbers, although they hold different halves. On GPUs PyTorch advances every rank's generator
# to the place of its shard; on CPUs it does not, and the only sign is a warning. So on CPUs draw all values on rank 0
# (lesson, section 4).
#
# ### A full state dict on every rank
#
# A full state dict has whole tensors. With `cpu_offload=True` it is for the one rank that writes it. **Predict** the
# bytes on each of 4 ranks.

# %% tags=["prediction"]
n = 4
predicted = {
    "sharded": [P // n] * n,
    "full": [P] * n,
    "full, on the CPU": [P, 0, 0, 0],
}

# %%
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict


def state_dict_bytes(rank):
    """The bytes of three kinds of state dict on this rank."""
    model = wrap(new_model())
    settings = [{}, {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}]
    kinds = (get_model_state_dict(model, options=StateDictOptions(**s)) for s in settings)
    return [storage_bytes(map(local, values.values())) for values in kinds]


of_kinds = [list(kinds) for kinds in zip(*launch(state_dict_bytes, n))]

# %%
compare(predicted, dict(zip(predicted, of_kinds)))

# %% [markdown]
# The full one brings the whole model to every rank: exactly what does not fit. With `cpu_offload=True` rank 0 alone
# gets it, one tensor at a time, in the host's memory. Checkpoints do not need it: save the shards. To hand a model to
# somebody else, take the third kind; all ranks have to make the call.
#
# ### Clipping by a local norm
#
# Chapter 6 had this with tensor parallelism. With FSDP everything is cut, so every rank has a norm
# of its own, and each piece of a layer is scaled by a different factor.


# %%
def clip_by_local_norm(parameters, max_norm):
    """Wrong: the norm of what this rank holds."""
    gradients = [local(p.grad) for p in parameters]
    norm = flat(gradients).norm().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, max_norm / norm))
    return norm


def clip_by_whole_norm(parameters, max_norm):
    return whole(nn.utils.clip_grad_norm_(parameters, max_norm)).item()


# %%
def step_with_clipping(rank, clip):
    model = wrap(new_model())
    inputs, targets = next(batches(rank=rank, ranks=dist.get_world_size()))
    cross_entropy(model(inputs).flatten(0, 1), targets).backward()
    norm = clip(list(model.parameters()), max_norm=0.1)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return norm, wholes(model)


[(norm, clipped)] = launch(step_with_clipping, 1, clip_by_whole_norm)
print(f"one process: norm {norm:.2f}")
for clip in (clip_by_local_norm, clip_by_whole_norm):
    norms, values = zip(*launch(step_with_clipping, 2, clip))
    print(f"{clip.__name__}: norms", *(f"{norm:.2f}" for norm in norms), end=", ")
    print("largest difference of the parameters:", largest_difference(clipped, values))

# %% [markdown]
# `clip_grad_norm_` on DTensors computes the norm of the whole gradient. Norms of local shards, in logging or in your
# own clipping, are smaller. No comparison between ranks shows the mistake: their shards fit together, to one wrong
# model.

# %% [markdown]
# ## 6. Exercises: an FSDP of your own
#
# You begin with the layout of shards and end with a checkpoint for any number of ranks. 8.4 is the longest exercise of
# the course, with 130 lines in our answer: a weekend, or a project for two. 8.4 and 8.5 may use your `FlatLayout`.

# %%
from collections.abc import Callable, Iterable
from copy import deepcopy
from types import SimpleNamespace

from torch.nn.functional import linear, pad

from course_exercises import check, hint

# %% [markdown]
# ### 8.3 Flatten, pad, shard and unshard (2 points)
#
# Collectives need equal pieces. So tensors are laid end to end in one vector, and zeros are added until it divides.
# This is cheap because the pieces, and the tensors that come out again, are **views**: an all-gather writes into the
# pieces of an empty vector, and the tensors are there without a copy. You need no process group here.


# %% nbgrader={"grade_id": "8.3", "solution": true}
class FlatLayout:
    """How tensors of the given shapes lie in one vector that n ranks share.

    They lie end to end, in their order, each in row-major order; then come the zeros. `shard_size` is
    the number of elements of a shard, the same for every rank and as small as possible.
    """

    def __init__(self, shapes: list[torch.Size], world_size: int) -> None:
        ### BEGIN SOLUTION
        self.shapes, self.world_size = shapes, world_size
        self.sizes = [shape.numel() for shape in shapes]
        self.shard_size = -(-sum(self.sizes) // world_size)
        ### END SOLUTION

    def flatten(self, tensors: list[Tensor]) -> Tensor:
        """Returns a new vector (world_size * shard_size,) with all tensors, padded with zeros."""
        ### BEGIN SOLUTION
        flat = tensors[0].new_zeros(self.world_size * self.shard_size)
        for place, tensor in zip(self.unflatten(flat), tensors):
            place.copy_(tensor)
        return flat
        ### END SOLUTION

    def shards(self, flat: Tensor) -> list[Tensor]:
        """Returns the shard (shard_size,) of each rank, as views into `flat`."""
        ### BEGIN SOLUTION
        return list(flat.view(self.world_size, self.shard_size).unbind())
        ### END SOLUTION

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Returns the tensors, in their shapes, as views into `flat` (world_size * shard_size,)."""
        ### BEGIN SOLUTION
        parts = flat[: sum(self.sizes)].split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self.shapes)]
        ### END SOLUTION


# %% nbgrader={"grade_id": "8.3-check", "grade": true, "points": 2, "locked": true}
check("8.3", FlatLayout)

# %% [markdown]
# ### 8.4 FSDP that overlaps (5 points)
#
# Now all of stage 3. A **layer** here is a module with parameters of its own, which nothing but its own
# `forward` uses: a linear layer, an embedding, a norm. Its matrices are sharded; its vectors are so small
# that every rank keeps them. The optimizer gets the shards. `forward` needs the whole.
#
# You may not have met these tools.
#
# * `tensor.untyped_storage().resize_(0)` frees the memory but keeps the tensor, also where autograd has kept it for
#   backward. `resize_(bytes)` gets memory again; what was in it is lost. A write into a tensor that autograd has kept
#   is an error. Autograd does not see a write through `tensor.data`, taken beforehand.
# * `register_forward_pre_hook` and `register_forward_hook` call your function before and after a layer's forward.
#   `tensor.grad_fn.register_prehook` calls it when backward reaches this tensor. `register_post_accumulate_grad_hook`
#   calls it when a parameter's gradient is complete.
# * Attributes in `vars(layer)` are found before registered parameters: `vars(layer)["weight"] = whole`
#   shows forward the whole weight, while `layer.parameters()` still gives the shard.
#
# Three things decide whether the result is right and fast.
#
# * **Order.** Every rank uses the layers in the same order, so all gathers and all reductions match.
#   One communicator of NCCL runs its calls one after the other: a gather that is started behind a
#   reduction waits for it. So that the two can overlap, give each kind a group of its own
#   (`dist.new_group`).
# * **Prefetch.** Backward meets the layers in the reverse of forward's order. While one computes, the gather of the
#   next can run. Allow one layer ahead and one unfinished reduction: more would hold what sharding has just saved.
# * **Views.** A layer's output may be a view. An operation in place, such as `nn.ReLU(inplace=True)`, takes its
#   `grad_fn` out of the graph; its base's, `output._base.grad_fn`, stays in.
#
# Work in four steps, and run the check after each: it goes on after a line that fails, so it shows how far you are.
#
# | step | what you add | lines of the check that hold from here on |
# |---|---|---|
# | 1. shards | `__init__` broadcasts and keeps shards; `full_parameters` gathers them | the start, what a rank keeps |
# | 2. gather and free | a layer's matrices are gathered before its forward and its backward, and freed after each; its gradient is reduced at once | one process, memory, bytes, all sizes and kinds of layers |
# | 3. mixed precision | `compute_dtype` | the lines about it |
# | 4. prefetch | the next gather, and one reduction, run beside backward | the last line |


# %% nbgrader={"grade_id": "8.4", "solution": true}
class MiniFSDP(nn.Module):
    """Shares `module` out: of every parameter with two or more dimensions, a rank keeps a shard.

    Constructed on every rank around modules of the same architecture; it begins with rank 0's
    parameters and buffers. Afterwards `parameters()` has for each matrix this rank's shard, a vector
    of ceil(elements / world_size) elements padded with zeros, under its old name; vectors stay as they
    are. One step of training, with an optimizer that was given `model.parameters()`:

        loss_function(model(inputs), targets).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()

    A layer's whole matrices exist while its forward runs, and again while its backward runs. All
    ranks call the same layers in the same order. Tied parameters stay tied, those that are frozen at
    construction stay without gradient. With `compute_dtype`, weights are cast to it before they are
    sent, floating point inputs of a layer as well, and forward and backward compute in it. The
    parameters themselves, their gradients and the sums over the ranks stay as they were, float32.

    `shapes` has the whole shape of every parameter, by its name in `module`.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.compute_dtype = compute_dtype
        self.gathers, self.reductions = dist.new_group(), dist.new_group()
        self.calls: list[tuple] = []  # of layers, in the order in which their forwards ended
        self.pending: list[tuple] = []  # reductions that run
        weights = {p: self._weight(p) for p in module.parameters()}  # a tied one once
        self.weights = {weight.kept: weight for weight in weights.values()}
        for layer in module.modules():
            named = layer.named_parameters(recurse=False, remove_duplicate=False)
            own = SimpleNamespace(weights={name: weights[p] for name, p in named}, started=0)
            for name, weight in own.weights.items():
                layer.register_parameter(name, weight.kept)
            if own.weights:
                before = partial(self._before_forward, own)
                layer.register_forward_pre_hook(before, with_kwargs=True)
                layer.register_forward_hook(partial(self._after_forward, own))

    def _weight(self, parameter: nn.Parameter) -> SimpleNamespace:
        """What the optimizer sees (`kept`) and what forward sees (`whole`, with memory or without)."""
        sharded = parameter.dim() > 1
        layout = FlatLayout([parameter.shape], dist.get_world_size() if sharded else 1)
        flat = layout.flatten([parameter.detach()])
        kept = parameter
        if sharded:
            shard = layout.shards(flat)[dist.get_rank()].clone()
            kept = nn.Parameter(shard, parameter.requires_grad)
        flat = flat.to(self.compute_dtype or flat.dtype)
        [whole] = layout.unflatten(flat.data)
        weight = SimpleNamespace(
            kept=kept, whole=whole, flat=flat, sharded=sharded, layout=layout, work=None
        )
        if parameter.requires_grad:
            whole.requires_grad_()
            whole.register_post_accumulate_grad_hook(partial(self._gradient_ready, weight))
        weight.bytes = flat.nbytes
        self._free([weight])
        return weight

    def _start_gather(self, weights: Iterable[SimpleNamespace]) -> None:
        for weight in weights:
            memory = weight.flat.untyped_storage()
            if memory.nbytes() > 0:
                continue  # it is there, or on its way
            memory.resize_(weight.bytes)
            kept = weight.kept.detach().to(weight.flat.dtype)
            if weight.sharded:
                pieces = weight.layout.shards(weight.flat)
                weight.work = dist.all_gather(pieces, kept, group=self.gathers, async_op=True)
            else:
                weight.whole.data.copy_(kept)

    def _wait(self, weights: Iterable[SimpleNamespace]) -> None:
        for weight in weights:
            if weight.work is not None:
                weight.work.wait()
                weight.work = None

    def _free(self, weights: Iterable[SimpleNamespace]) -> None:
        self._wait(weights)
        for weight in weights:
            weight.flat.untyped_storage().resize_(0)

    def _before_forward(self, own, layer: nn.Module, inputs: tuple, keywords: dict) -> tuple:
        own.started = len(self.calls)
        self._start_gather(own.weights.values())
        self._wait(own.weights.values())
        for name, weight in own.weights.items():
            vars(layer)[name] = weight.whole
        return tuple(map(self._cast, inputs)), {k: self._cast(v) for k, v in keywords.items()}

    def _cast(self, value):
        floating = torch.is_tensor(value) and value.is_floating_point()
        return value.to(self.compute_dtype) if floating and self.compute_dtype else value

    def _after_forward(self, own, layer: nn.Module, inputs: tuple, output) -> None:
        for name in own.weights:
            del vars(layer)[name]
        self._free(own.weights.values())
        outputs = output if isinstance(output, (tuple, list)) else [output]
        learning = [y for y in outputs if torch.is_tensor(y) and y.requires_grad]
        if learning:
            prepare = partial(self._prepare_backward, self.calls, len(self.calls))
            self.calls.append((own.weights.values(), own.started))
            for node in {t.grad_fn for y in learning for t in (y, y._base) if t is not None}:
                node.register_prehook(prepare)

    def _prepare_backward(self, calls: list, index: int, gradients: tuple) -> None:
        """Backward arrives at the output of a call, and has left those that began after its end."""
        for weights, started in calls[index + 1 : index + 2]:
            if started > index:
                self._free(weights)  # a frozen weight gets no gradient, at which it would be freed
        for weights, _ in reversed(calls[max(index - 1, 0) : index + 1]):
            self._start_gather(weights)
        self._wait(calls[index][0])

    def _gradient_ready(self, weight: SimpleNamespace, whole: Tensor) -> None:
        self._free([weight])
        gradient, whole.grad = whole.grad.to(weight.kept.dtype), None
        if weight.sharded:
            self._finish_reductions()
            pieces = weight.layout.shards(weight.layout.flatten([gradient]))
            total = torch.empty_like(weight.kept, requires_grad=False)
            work = dist.reduce_scatter(total, pieces, group=self.reductions, async_op=True)
        else:
            total = gradient
            work = dist.all_reduce(total, group=self.reductions, async_op=True)
        self.pending.append((work, weight.kept, total))

    def _finish_reductions(self) -> None:
        for work, kept, total in self.pending:
            work.wait()
            total /= dist.get_world_size()
            if kept.grad is None:
                kept.grad = total
            else:
                kept.grad += total
        self.pending.clear()
        ### END SOLUTION

    def forward(self, *inputs, **keywords):
        return self.module(*inputs, **keywords)

    def finish_gradient_synchronization(self) -> None:
        """Returns when every `.grad` is the mean over all ranks; call it before the optimizer.

        Gradients of several backward passes add up. Where no rank has one, `.grad` stays None.
        Afterwards no layer is gathered.
        """
        ### BEGIN SOLUTION
        self._finish_reductions()
        for weights, _ in self.calls:
            self._free(weights)
        self.calls = []
        ### END SOLUTION

    def full_parameters(self) -> dict[str, Tensor]:
        """Returns every whole parameter by its name in `module`, on every rank; all must call it."""
        ### BEGIN SOLUTION
        full = {}
        for name, kept in self.module.named_parameters():
            full[name] = kept.detach().clone()
            if self.weights[kept].sharded:
                layout = self.weights[kept].layout
                flat = kept.new_empty(layout.world_size * layout.shard_size)
                dist.all_gather(layout.shards(flat), kept.detach())
                [full[name]] = layout.unflatten(flat)
        return full
        ### END SOLUTION


# %% nbgrader={"grade_id": "8.4-check", "grade": true, "points": 5, "locked": true}
check("8.4", MiniFSDP)

# %% [markdown]
# ### 8.5 A checkpoint for any number of ranks (3 points)
#
# Every rank saves its part, and no rank ever holds the whole. This is what a rank saves:


# %%
def on_device_of(parameter: nn.Parameter, value: object) -> object:
    """Tensors move to the parameter's device; numbers and Adam's `step` stay where they are."""
    moves = torch.is_tensor(value) and value.dim() > 0
    return value.to(parameter.device) if moves else value


def checkpoint_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    """Returns this rank's part of a checkpoint of a MiniFSDP (exercise 8.4) and its optimizer."""
    names = {kept: name for name, kept in model.module.named_parameters()}
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "shapes": model.shapes,
        "parameters": {name: kept.detach() for kept, name in names.items()},
        "optimizer": {names[kept]: state for kept, state in optimizer.state.items()},
    }


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict) -> None:
    """Puts back a part that was saved on this rank or resharded for it."""
    for name, kept in model.module.named_parameters():
        kept.data.copy_(checkpoint["parameters"][name])
        if name in checkpoint["optimizer"]:
            state = checkpoint["optimizer"][name]  # loaded to the CPU, perhaps, or by another rank
            optimizer.state[kept] = {key: on_device_of(kept, value) for key, value in state.items()}


# %% [markdown]
# Four ranks have saved, and two go on, or three, or sixteen. Write the function that turns one run's parts into parts
# for another. The saved parts come in any order: file names sorted as text put rank 10 before rank 2. If one is
# missing, the rest is no checkpoint.


# %% nbgrader={"grade_id": "8.5", "solution": true}
def reshard(checkpoints: list[dict], world_size: int) -> list[dict]:
    """Returns the parts for ranks 0 to `world_size` - 1, made of all parts of one checkpoint.

    A part is what `checkpoint_of` gives. `shapes` has the whole shape of each parameter by its name.
    With two or more dimensions a parameter is sharded as in exercise 8.4: flattened, padded with zeros,
    cut into equal shards. So are its optimizer's tensors, but not numbers and tensors without a
    dimension, such as Adam's `step`. All else is the same on every rank. A parameter without optimizer
    state is not in `optimizer`.

    `checkpoints` are in any order. Raises ValueError unless they are the parts of ranks 0 to n - 1, each
    once, of a run on n > 0 ranks; the message names a rank that is missing. Every tensor of the new
    parts has memory of its own, of exactly its size, and `checkpoints` stay as they are.
    """
    ### BEGIN SOLUTION
    parts = sorted(checkpoints, key=lambda part: part["rank"])
    ranks, saved = [part["rank"] for part in parts], max(part["world_size"] for part in parts)
    if ranks != list(range(saved)) or any(part["world_size"] != saved for part in parts):
        missing = sorted(set(range(saved)) - set(ranks))
        raise ValueError(f"Of {saved} ranks' parts, these are here: {ranks}; missing: {missing}.")

    def cut_anew(shape: torch.Size, values: list) -> list:
        if len(shape) < 2 or not torch.is_tensor(values[0]) or values[0].dim() == 0:
            return [deepcopy(values[0]) for _ in range(world_size)]
        [whole] = FlatLayout([shape], saved).unflatten(torch.cat(values))
        layout = FlatLayout([shape], world_size)
        return [shard.clone() for shard in layout.shards(layout.flatten([whole]))]

    shapes = parts[0]["shapes"]
    made = [
        {
            "rank": rank,
            "world_size": world_size,
            "shapes": shapes,
            "parameters": {},
            "optimizer": {},
        }
        for rank in range(world_size)
    ]
    for name, shape in shapes.items():
        for new, value in zip(made, cut_anew(shape, [part["parameters"][name] for part in parts])):
            new["parameters"][name] = value
        for key in parts[0]["optimizer"].get(name, {}):
            states = [part["optimizer"][name][key] for part in parts]
            for new, value in zip(made, cut_anew(shape, states)):
                new["optimizer"].setdefault(name, {})[key] = value
    return made
    ### END SOLUTION


# %% nbgrader={"grade_id": "8.5-check", "grade": true, "points": 3, "locked": true}
check("8.5", reshard)

# %% [markdown]
# ## 7. See it: what leaves a machine
#
# Machines of eight GPUs train the ZeRO paper's model of 7.5 billion parameters, in 16 bits. How many GB leave a
# machine in a step, with one ring through all ranks, and with hybrid shards? In the ring, one rank of each machine
# sends to the next machine, as much as every rank sends. Hybrid shards cross in eight all-reduces, each of an eighth
# of the gradients.


# %%
def leaves_a_machine(P, machines, ranks):
    """Bytes out of one machine in a step: one ring of all ranks, and HSDP."""
    n = machines * ranks
    return 3 * P * (n - 1) / n, ranks * (2 * (P / ranks) * (machines - 1) / machines)


for machines in (2, 8, 64):
    one_ring, hybrid_sent = leaves_a_machine(2 * 7.5e9, machines, 8)
    print(
        f"{machines:2} machines: one ring {one_ring / 1e9:.1f} GB, hybrid {hybrid_sent / 1e9:.1f} GB"
    )

# %% [markdown]
# *With one ring, nearly three times the bytes of the parameters leave each machine; with hybrid shards, less than
# twice. The all-reduces of hybrid shards can hide behind backward, while a layer cannot begin before its gather.*
#
# ## 8. On a cluster
#
# * **The mesh.** It decides what stays inside a machine: `init_device_mesh("cuda", (machines, 8),
#   mesh_dim_names=("replicate", "shard"))`. The last dimension is the one whose ranks are neighbours.
# * **Accumulate.** Reduce in every backward, unless memory is plentiful: whole gradients are what sharding has just
#   saved.
# * **Checkpoints.** Each has its own folder, which gets its name when it is whole, as in `cluster/train.py`.
# * **Clipping.** With tensor parallelism on a part of the layers, take the norm on each mesh and clip by the norm of
#   all: section 4.
# * **Explicit prefetch.** The host asks for a gather only when its Python code reaches that unit. Where that is too
#   late, say beforehand which units follow (`set_modules_to_backward_prefetch` does the same for backward, in
#   reversed order). Each further unit takes memory.
#
#   ```python
#   for block, *following in zip(model.blocks, model.blocks[1:], model.blocks[2:]):
#       block.set_modules_to_forward_prefetch(following)
#   ```
#
# * **Eight bits.** [torchao](https://docs.pytorch.org/ao/stable/) and Transformer Engine multiply in float8, and with
#   torchao `fully_shard` gathers weights in it. MXFP8 and NVFP4 (four bits) have a scale for each 32 or 16 numbers.
#   Float8 needs Ada GPUs or newer, these two Blackwell. The planner counts float8: `plan --precision fp8`.
# * **Branches.** If ranks take different branches inside a unit, they have gradients for different parameters, and
#   the reductions do not match. Since PyTorch 2.13 `set_reduce_scatter_unused_params(True)` sends zeros for those
#   without.
#
# Older code has `FullyShardedDataParallel`, FSDP1. These are its names and today's:
#
# | FSDP1 | `fully_shard`, FSDP2 |
# |---|---|
# | `auto_wrap_policy` | `fully_shard` on each block, then on the root |
# | `ShardingStrategy.FULL_SHARD`, `SHARD_GRAD_OP` | `reshard_after_forward=True`, `False` |
# | `HYBRID_SHARD` | a mesh of two dimensions |
# | `MixedPrecision`, `CPUOffload` | `MixedPrecisionPolicy`, `CPUOffloadPolicy` |
# | `no_sync()` | `set_requires_gradient_sync(False)` |
# | `sync_module_states=True` | `set_model_state_dict` with `broadcast_from_rank0=True` |
# | `model.clip_grad_norm_` | `nn.utils.clip_grad_norm_` |
# | `FSDP.state_dict_type` | `get_state_dict` with `StateDictOptions` |
# | one flat parameter a unit | a DTensor for each parameter, under the name it had before |
#
# ## 9. Remember
#
# 1. Reducing only after the last micro-batch saves messages, but keeps whole gradients.
# 2. Recompute first, wrap second; no further gather is needed.
# 3. With shards inside a machine and copies across, only the gradients' all-reduce leaves it.
# 4. Tensor parallelism first, FSDP last; a tensor group's ranks read the same rows.
# 5. A checkpoint has its own folder, which gets its name last. `async_save` needs a process group of its own.
#
# **Sources**
#
# * Y. Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, 2023,
#   [arXiv 2304.11277](https://arxiv.org/abs/2304.11277): section 3.2, hybrid sharding.
# * T. Chen et al., *Training Deep Nets with Sublinear Memory Cost*, 2016,
#   [arXiv 1604.06174](https://arxiv.org/abs/1604.06174): recomputation.
# * PyTorch: [fully_shard](https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html),
#   [torch.distributed.checkpoint](https://docs.pytorch.org/docs/stable/distributed.checkpoint.html),
#   [activation checkpointing](https://docs.pytorch.org/docs/stable/checkpoint.html).
# * Hugging Face: [safetensors](https://huggingface.co/docs/safetensors), the format.
