"""Chapter 8: every rank holds a share of every parameter, gradient and optimizer state."""

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

from course_utils.hardware import device
from tests.techniques import Job, Trained, mistake, sgd, technique
from tests.techniques.data_parallel import rows, share_of_loss

JOBS = ("uneven", "awkward", "language", "tied language")


def train(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1
) -> None:
    """FSDP averages over the ranks while backward runs; with the last micro-batch only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for batch in job.batches:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            if micro_batches > 1:
                model.set_requires_gradient_sync(micro == micro_batches - 1)
            inputs, targets = rows(batch, rank * micro_batches + micro, ranks * micro_batches)
            share_of_loss(model, inputs, targets, batch[1].numel()).backward()
        optimizer.step()


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
    train(job, model, sgd(model), micro_batches=3)
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
