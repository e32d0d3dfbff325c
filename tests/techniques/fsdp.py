"""Chapter 8: every rank holds a share of every parameter, gradient and optimizer state."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from course_utils.checks import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import LEARNING_RATE, Job, Trained, mistake, sgd, technique
from tests.techniques import trained as trained_whole
from tests.techniques.data_parallel import average_gradients, rows, share_of_loss

RANKS = (1, 2, 3)  # of what is the course's own
JOBS = ("uneven", "awkward", "language", "tied language")

ShardedOptimizer, FlatLayout = load_answer("8.2"), load_answer("8.3")
MiniFSDP, reshard = load_answer("8.4"), load_answer("8.5")
checkpoint_of, restore = load_code(8, "checkpoint_of"), load_code(8, "restore")


def train(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int = 1,
    before_micro_batch: Callable[[bool], None] = lambda is_last: None,
    before_update: Callable[[], None] = lambda: None,
) -> None:
    """Each rank works on rows of its own; who averages the gradients, and when, is the caller's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in job.batches:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            before_micro_batch(micro == micro_batches - 1)
            inputs, targets = rows(batch, rank * micro_batches + micro, ranks * micro_batches)
            share_of_loss(model, inputs, targets, batch[1].numel()).backward()
        before_update()
        optimizer.step()


# ---- by hand -------------------------------------------------------------------------------------


def zero(stage: type, rank: int, job: Job) -> Trained:
    """The chapter's stages: each is its own optimizer, for models without tied parameters."""
    model = job.model()
    shared_out = stage(model, torch.optim.SGD, lr=LEARNING_RATE)
    train(job, model, shared_out)
    return Trained(
        {name: p.cpu() for name, p in shared_out.whole_parameters().items()},
        {name: g.cpu() for name, g in shared_out.whole_gradients().items()},
    )


for name in ("Zero1", "Zero2", "Zero3", "Zero3Prefetching"):
    technique([2, 3], ["uneven", "language"], name)(partial(zero, load_code(8, name)))


@technique(RANKS, JOBS)
def sharded_optimizer(rank: int, job: Job) -> Trained:
    model = job.model()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=LEARNING_RATE)
    train(job, model, optimizer, before_update=lambda: average_gradients(model))
    return trained_whole(model)


def trained_mini(model: nn.Module) -> Trained:
    named = model.module.named_parameters()
    gradients = {name: whole_gradient(p, model.shapes[name]) for name, p in named}
    return Trained({n: p.cpu() for n, p in model.full_parameters().items()}, gradients)


def whole_gradient(kept: nn.Parameter, shape: torch.Size) -> Tensor | None:
    """Of a matrix each rank has a shard, flat and padded."""
    if kept.grad is None or len(shape) < 2:
        return None if kept.grad is None else kept.grad.cpu()
    layout = FlatLayout([shape], dist.get_world_size())
    flat = kept.new_empty(dist.get_world_size() * layout.shard_size)
    dist.all_gather(layout.shards(flat), kept.grad)
    return layout.unflatten(flat)[0].cpu()


@technique(RANKS, [*JOBS, "convolutional"])
def mini_fsdp(rank: int, job: Job) -> Trained:
    """Each rank builds its model from a seed of its own: construction makes them equal."""
    model = MiniFSDP(job.model(seed=rank))
    train(job, model, sgd(model), before_update=model.finish_gradient_synchronization)
    return trained_mini(model)


@technique([2], JOBS)
def mini_fsdp_accumulating(rank: int, job: Job) -> Trained:
    model = MiniFSDP(job.model())
    finish = model.finish_gradient_synchronization
    train(job, model, sgd(model), micro_batches=3, before_update=finish)
    return trained_mini(model)


@technique([(4, 2, 1), (2, 3)], ["awkward", "tied language"])
def mini_fsdp_resumed_by_other_ranks(rank: int, job: Job) -> Trained:
    model = MiniFSDP(job.model())
    optimizer = sgd(model, job.momentum)
    if parts := taken_parts(job.folder):
        restore(model, optimizer, reshard(parts, dist.get_world_size())[rank])
    train(job, model, optimizer, before_update=model.finish_gradient_synchronization)
    torch.save(checkpoint_of(model, optimizer), job.folder / f"{rank}.pt")
    return trained_mini(model)


def taken_parts(folder: Path) -> list[dict]:
    """What the ranks before have saved; every rank gets all of it, and the folder is empty again."""
    paths = sorted(folder.iterdir())
    parts = [torch.load(path, weights_only=True) for path in paths]
    dist.barrier()  # all have read
    if dist.get_rank() == 0:
        for path in paths:
            path.unlink()
    dist.barrier()
    return parts


# ---- with PyTorch --------------------------------------------------------------------------------


def whole(tensor: Tensor | None) -> Tensor | None:
    """All of a tensor of which this rank holds a part; every rank has to call it."""
    if tensor is None:
        return None
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().cpu()


def trained(model: nn.Module) -> Trained:
    named = dict(model.named_parameters())
    return Trained(
        {name: whole(p).clone() for name, p in named.items()},
        {name: whole(p.grad) for name, p in named.items()},
    )


def shard_layers(model: nn.Module, **options) -> nn.Module:
    """Each block of a language model is gathered by itself, then what is left with the root."""
    for block in getattr(model, "blocks", []):
        fully_shard(block, **options)
    return fully_shard(model, **options)


@technique([2, 3], JOBS)
def torch_fully_shard(rank: int, job: Job) -> Trained:
    model = shard_layers(job.model())
    train(job, model, sgd(model))
    return trained(model)


@technique([2], ["language"])
def torch_fully_shard_of_the_root_only(rank: int, job: Job) -> Trained:
    model = fully_shard(job.model(), reshard_after_forward=True)
    train(job, model, sgd(model))
    return trained(model)


@technique([2], ["language"])
def torch_fully_shard_keeping_parameters_after_forward(rank: int, job: Job) -> Trained:
    model = shard_layers(job.model(), reshard_after_forward=False)
    train(job, model, sgd(model))
    return trained(model)


@technique([2], ["awkward", "language"])
def torch_fully_shard_accumulating(rank: int, job: Job) -> Trained:
    model = shard_layers(job.model())
    sync = model.set_requires_gradient_sync  # with the last micro-batch only
    train(job, model, sgd(model), micro_batches=3, before_micro_batch=sync)
    return trained(model)


@technique([2], ["language"])
def torch_fully_shard_with_activation_checkpointing(rank: int, job: Job) -> Trained:
    model = job.model()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    train(job, shard_layers(model), sgd(model))
    return trained(model)


@technique([2], ["language", "tied language"])
def torch_fully_shard_from_the_meta_device(rank: int, job: Job) -> Trained:
    values = job.model().state_dict()
    with torch.device("meta"):
        model = shard_layers(job.make_model())
    model.to_empty(device=device())
    whole_on_every_rank = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, values, options=whole_on_every_rank)
    train(job, model, sgd(model))
    return trained(model)


@technique([4], ["language"])
def torch_hsdp(rank: int, job: Job) -> Trained:
    """Shards within two ranks, copies across: `mesh` is (copies, shards)."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("copies", "shards"))
    model = shard_layers(job.model(), mesh=mesh)
    train(job, model, sgd(model))
    return trained(model)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Fills both from the checkpoint in `folder`, whatever number of ranks has written it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


@technique([(4, 2, 1)], ["uneven", "language"])
def torch_checkpoints_resumed_by_fewer_ranks(rank: int, job: Job) -> Trained:
    model = shard_layers(job.model())
    optimizer = sgd(model, job.momentum)
    if any(job.folder.iterdir()):
        resume(model, optimizer, job.folder)
    train(job, model, optimizer)
    result = trained(model)
    save(model, optimizer, job.folder)
    return result


@mistake([(2, 1)], ["language"])
def resumed_without_the_optimizers_state(rank: int, job: Job) -> Trained:
    model = shard_layers(job.model())
    if any(job.folder.iterdir()):
        resume(model, sgd(model, job.momentum), job.folder)
    optimizer = sgd(model, job.momentum)
    train(job, model, optimizer)
    result = trained(model)
    save(model, optimizer, job.folder)
    return result


@mistake([2], ["language"])
def optimizer_before_sharding(rank: int, job: Job) -> Trained:
    """The optimizer keeps the tensors that were the parameters once."""
    model = job.model()
    optimizer = sgd(model)
    train(job, shard_layers(model), optimizer)
    return trained(model)
