"""Chapters 2 and 3: every rank has the whole model and a share of the rows."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import Job, Trained, mean_loss, mistake, sgd, technique, trained

RANKS = (1, 2, 3, 4)  # of what is the course's own
RANKS_OF_TORCH = (2, 3)
JOBS = ("even", "uneven", "awkward", "convolutional", "language")

data_parallel_step = load_answer("2.4")
average_gradients = load_answer("3.1")
ring_all_reduce = load_answer("3.2")
OverlappedDDP = load_answer("3.4")
HandDataParallel = load_code(2, "HandDataParallel")
average_in_one_bucket = load_code(3, "average_in_one_bucket")


def rows(batch: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Every parts-th row, beginning with `part`: shares that differ by at most one row."""
    inputs, targets = batch
    return inputs[part::parts].to(device()), targets[part::parts].to(device())


def share_of_loss(model: nn.Module, inputs: Tensor, targets: Tensor, whole: int) -> Tensor:
    """This rank's loss, so that the mean over the ranks is that over the `whole` targets."""
    outputs = model(inputs).flatten(0, -2)
    return cross_entropy(outputs, targets.flatten(), reduction="sum") * (
        dist.get_world_size() / whole
    )


def train(job: Job, model: nn.Module, synchronise: Callable[[], None], micro_batches=1) -> None:
    """The loop that ranks with a model of their own share: accumulate, synchronise, update."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = sgd(model)
    for batch in job.batches:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            inputs, targets = rows(batch, rank * micro_batches + micro, ranks * micro_batches)
            last = micro == micro_batches - 1
            with nullcontext() if last else model.no_sync():
                share_of_loss(model, inputs, targets, batch[1].numel()).backward()
        synchronise()
        optimizer.step()


def in_one_process(devices: int, rank: int, job: Job) -> Trained:
    """One process for all devices; here the same device occurs several times."""
    model = job.model()
    optimizer = sgd(model)
    for inputs, targets in job.batches:
        inputs, targets = inputs.to(device()), targets.to(device())
        data_parallel_step(model, optimizer, mean_loss, inputs, targets, [device()] * devices)
    return trained(model)


for count in RANKS:
    technique([1], JOBS, f"data_parallel_by_hand_{count}")(partial(in_one_process, count))


def wrapped(wrap: Callable[[nn.Module], nn.Module], rank: int, job: Job) -> Trained:
    """One process whose loop calls wrap(model) on the whole batch."""
    model = job.model()
    parallel, optimizer = wrap(model), sgd(model)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        mean_loss(parallel(inputs.to(device())), targets.to(device())).backward()
        optimizer.step()
    return trained(model)


def by_hand(devices: int, model: nn.Module) -> nn.Module:
    """The rank's device, as often as there are to be replicas."""
    return HandDataParallel(model, devices=[device()] * devices)


for count in RANKS:
    technique([1], ("even", "uneven", "language"), f"hand_data_parallel_{count}")(
        partial(wrapped, partial(by_hand, count))
    )
technique([1], JOBS, "torch_data_parallel")(partial(wrapped, nn.DataParallel))


@technique(RANKS, ("even", "language"))
def gradients_averaged_in_one_bucket(rank: int, job: Job) -> Trained:
    model = job.model()
    train(job, model, lambda: average_in_one_bucket(model))
    return trained(model)


@technique(RANKS, JOBS)
def gradients_averaged_by_hand(rank: int, job: Job) -> Trained:
    model = job.model()
    train(job, model, lambda: average_gradients(model))
    return trained(model)


@technique(RANKS, JOBS)
def gradients_round_a_ring(rank: int, job: Job) -> Trained:
    model = job.model()

    def average() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                ring_all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    train(job, model, average)
    return trained(model)


@technique(RANKS, JOBS)
def overlapped_ddp(rank: int, job: Job) -> Trained:
    """Each rank builds its model from a seed of its own: construction makes them equal."""
    model = OverlappedDDP(job.model(seed=rank), bucket_bytes=2048)
    train(job, model, model.finish_gradient_synchronization)
    return trained(model.module)


@technique(RANKS, JOBS)
def overlapped_ddp_accumulating(rank: int, job: Job) -> Trained:
    model = OverlappedDDP(job.model(seed=rank))
    train(job, model, model.finish_gradient_synchronization, micro_batches=3)
    return trained(model.module)


@technique(RANKS_OF_TORCH, JOBS)
def torch_ddp(rank: int, job: Job) -> Trained:
    model = DistributedDataParallel(job.model(seed=rank), find_unused_parameters=True)
    train(job, model, lambda: None)
    return trained(model.module)


@technique(RANKS_OF_TORCH, JOBS)
def torch_ddp_accumulating(rank: int, job: Job) -> Trained:
    model = DistributedDataParallel(
        job.model(seed=rank), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    train(job, model, lambda: None, micro_batches=3)
    return trained(model.module)


@technique(RANKS_OF_TORCH, JOBS)
def torch_ddp_with_join(rank: int, job: Job) -> Trained:
    """Ranks without a row stop early; Join answers for them and hands them the last model."""
    model = DistributedDataParallel(job.model(seed=rank), find_unused_parameters=True)
    optimizer = sgd(model)
    with Join([model]):
        for batch in job.batches:
            inputs, targets = rows(batch, rank, dist.get_world_size())
            if len(inputs) == 0:
                break
            optimizer.zero_grad()
            share_of_loss(model, inputs, targets, batch[1].numel()).backward()
            optimizer.step()
    result = trained(model.module)
    return result if len(inputs) else Trained(result.parameters, None)


@mistake([2], JOBS)
def forgets_to_divide(rank: int, job: Job) -> Trained:
    model = job.model()

    def add() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    train(job, model, add)
    return trained(model)


@mistake([2], JOBS)
def forgets_to_communicate(rank: int, job: Job) -> Trained:
    model = job.model()
    train(job, model, lambda: None)
    return trained(model)


@mistake([3], ["uneven"])
@technique([3], ["even"])
def averages_unequal_means(rank: int, job: Job) -> Trained:
    """Right on even batches only: the mean of the ranks' means."""
    model = job.model()
    optimizer = sgd(model)
    for batch in job.batches:
        inputs, targets = rows(batch, rank, dist.get_world_size())
        optimizer.zero_grad()
        loss = mean_loss(model(inputs), targets) if len(inputs) else model(inputs).sum()
        loss.backward()
        average_gradients(model)
        optimizer.step()
    return trained(model)
