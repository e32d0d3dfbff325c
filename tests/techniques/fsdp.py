"""Chapter 8: every rank holds a share of every parameter, gradient and optimizer state."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import LEARNING_RATE, Job, Trained, mistake, sgd, technique
from tests.techniques import trained as trained_whole
from tests.techniques.data_parallel import average_gradients, rows, share_of_loss

RANKS = (1, 2, 3)  # of what is the course's own
JOBS = ("uneven", "awkward", "language", "tied language")

ShardedOptimizer, FlatLayout = load_answer("8.2"), load_answer("8.3")
MiniFSDP, reshard = load_answer("8.4"), load_answer("8.5")
checkpoint_of, restore = load_code(8, "checkpoint_of"), load_code(8, "restore")
wrap, whole, recompute = (load_code(8, name) for name in ("wrap", "whole", "recompute"))
Sharded = load_code(8, "Sharded")
recompute_between, compile_and_wrap = (
    load_code(8, name) for name in ("recompute_between", "compile_and_wrap")
)
wrap_hybrid, wrap_2d = load_code(8, "wrap_hybrid"), load_code(8, "wrap_2d")
save, resume, newest = (load_code(8, name) for name in ("save", "resume", "newest"))


def train(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int = 1,
    before_micro_batch: Callable[[bool], None] = lambda is_last: None,
    before_update: Callable[[], None] = lambda: None,
    sharing: int = 1,
) -> None:
    """Each `sharing` ranks work on rows of their own; who averages the gradients is the caller's."""
    rank, ranks = dist.get_rank() // sharing, dist.get_world_size() // sharing
    for batch in job.batches:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            before_micro_batch(micro == micro_batches - 1)
            inputs, targets = rows(batch, rank * micro_batches + micro, ranks * micro_batches)
            loss = share_of_loss(model, inputs, targets, batch[1].numel())
            (loss / sharing).backward()
        before_update()
        optimizer.step()


# ---- by hand -------------------------------------------------------------------------------------


@technique([2, 4], ["language"])
def sharded_by_hand(rank: int, job: Job) -> Trained:
    """The chapter's units, for models without tied parameters, whose sizes divide."""
    model = job.model()
    model.blocks = nn.ModuleList(Sharded(block) for block in model.blocks)
    for name in ("token", "position", "norm", "head"):
        setattr(model, name, Sharded(getattr(model, name)))
    train(job, model, sgd(model))
    units = {name: unit for name, unit in model.named_modules() if isinstance(unit, Sharded)}
    parameters = wholes_by_hand(units)
    for unit in units.values():
        unit.shard.data = unit.shard.grad
    return Trained(parameters, wholes_by_hand(units))


def wholes_by_hand(units: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{unit_name}.{name}": part.detach().cpu()
        for unit_name, unit in units.items()
        for name, part in unit.gathered().items()
    }


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
    parts = [torch.load(path, weights_only=True, map_location="cpu") for path in paths]
    dist.barrier()  # all have read
    if dist.get_rank() == 0:
        for path in paths:
            path.unlink()
    dist.barrier()
    return parts


# ---- with PyTorch --------------------------------------------------------------------------------


def whole_on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else whole(tensor.detach()).cpu().clone()


def trained(model: nn.Module) -> Trained:
    named = dict(model.named_parameters())
    return Trained(
        {name: whole_on_cpu(p) for name, p in named.items()},
        {name: whole_on_cpu(p.grad) for name, p in named.items()},
    )


def sharded(
    prepare: Callable[[nn.Module], nn.Module], rank: int, job: Job, sharing: int = 1
) -> Trained:
    model = prepare(job.model())
    train(job, model, sgd(model), sharing=sharing)
    return trained(model)


technique([2, 3], ["uneven", "awkward"], "fully_shard")(partial(sharded, fully_shard))
technique([2, 3], ["language", "tied language"], "fully_shard_of_blocks")(partial(sharded, wrap))
technique([2], ["language"], "fully_shard_without_reshard_after_forward")(
    partial(sharded, partial(wrap, reshard_after_forward=False))
)
technique([2], ["language"], "fully_shard_with_activation_checkpointing")(
    partial(sharded, lambda model: wrap(recompute(model)))
)
technique([2], ["language"], "fully_shard_with_checkpointing_by_operation")(
    partial(sharded, lambda model: wrap(recompute_between(model, [])))
)
technique([2], ["language"], "fully_shard_of_compiled_blocks")(
    partial(sharded, partial(compile_and_wrap, graphs=[]))
)
technique([4], ["language"], "hsdp")(partial(sharded, wrap_hybrid))
technique([4], ["language"], "fsdp_and_tensor")(partial(sharded, wrap_2d, sharing=2))


@technique([2], ["language"])
def fully_shard_accumulating(rank: int, job: Job) -> Trained:
    model = wrap(job.model())
    sync = model.set_requires_gradient_sync  # with the last micro-batch only
    train(job, model, sgd(model), micro_batches=3, before_micro_batch=sync)
    return trained(model)


@technique([2], ["language", "tied language"])
def fully_shard_from_the_meta_device(rank: int, job: Job) -> Trained:
    values = job.model().state_dict()
    with torch.device("meta"):
        model = wrap(job.make_model())
    model.to_empty(device=device())
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
    train(job, model, sgd(model))
    return trained(model)


def go_on(job: Job, optimizer_comes_back: bool = True) -> Trained:
    """Resumes what the ranks before have saved, if anything, trains and saves."""
    model = wrap(job.model())
    optimizer = sgd(model, job.momentum)
    saved = len(list(job.folder.iterdir()))
    if saved:
        state_of = optimizer if optimizer_comes_back else sgd(model, job.momentum)
        resume(model, state_of, newest(job.folder))
    train(job, model, optimizer)
    result = trained(model)
    save(model, optimizer, job.folder / f"step-{saved}")
    return result


@technique([(4, 2, 1)], ["language"])
def distributed_checkpoint_resumed_by_fewer_ranks(rank: int, job: Job) -> Trained:
    return go_on(job)


@mistake([(2, 1)], ["language"])
def resumed_without_the_optimizers_state(rank: int, job: Job) -> Trained:
    return go_on(job, optimizer_comes_back=False)


@mistake([2], ["language"])
def optimizer_before_sharding(rank: int, job: Job) -> Trained:
    """The optimizer keeps the tensors that were the parameters once."""
    model = job.model()
    optimizer = sgd(model)
    train(job, wrap(model), optimizer)
    return trained(model)


@mistake([2], ["language"])
def mini_fsdp_unfinished(rank: int, job: Job) -> Trained:
    """The update comes before the last gradients have been averaged."""
    model = MiniFSDP(job.model())
    train(job, model, sgd(model))
    model.finish_gradient_synchronization()
    return trained_mini(model)
