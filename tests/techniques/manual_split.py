"""Chapter 4: every rank, or every device of one process, has some of the layers."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from course_exercises.authoring import load_answer, load_code
from course_utils.hardware import device
from tests.techniques import Job, Trained, mean_loss, mistake, sgd, technique, trained
from tests.techniques.chains import chain, stages

JOBS = ("even", "uneven", "convolutional", "language")

TwoStages = load_code(4, "TwoStages")
FirstHalf, SecondHalf = load_code(4, "FirstHalf"), load_code(4, "SecondHalf")
first_stage_step, last_stage_step = (
    load_code(4, "first_stage_step"),
    load_code(4, "last_stage_step"),
)
ThreeBuildings = load_answer("4.1")
hand_over = load_answer("4.2")


def train(job: Job, model: nn.Module, split: nn.Module) -> Trained:
    """One process: `split` has the layers of `model`, spread over devices."""
    optimizer = sgd(split)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        outputs = split(inputs)
        mean_loss(outputs, targets.to(outputs.device)).backward()
        optimizer.step()
    return trained(model)


@technique([1], JOBS)
def two_stages_in_one_process(rank: int, job: Job) -> Trained:
    model = job.model()
    return train(job, model, TwoStages(*stages(model, 2), [device()] * 2))


@technique([1], ["convolutional", "language"])
def three_stages_in_one_process(rank: int, job: Job) -> Trained:
    model = job.model()
    return train(job, model, ThreeBuildings(chain(model), [device()] * 3))


def activations_shape(stage: nn.Module, inputs: Tensor) -> torch.Size:
    """The shape of what `stage` makes of one row."""
    with torch.no_grad():
        return stage(inputs[:1].to(device())).shape[1:]


def two_ranks(halves: list[nn.Module], job: Job, model: nn.Module, shared: str = "") -> Trained:
    """`shared` names a parameter that both halves use: its gradients are added."""
    rank = dist.get_rank()
    half, optimizer = halves[rank], sgd(halves[rank])
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        if rank == 0:
            first_stage_step(half, inputs)
        else:
            last_stage_step(half, targets, activations_shape(halves[0], inputs))
        if shared:
            dist.all_reduce(model.get_parameter(shared).grad)
        optimizer.step()
    return trained(model, half)


@technique([2], JOBS)
def two_ranks_by_hand(rank: int, job: Job) -> Trained:
    model = job.model()
    return two_ranks(stages(model, 2), job, model)


@technique([2], ["language"])
def language_model_in_two_halves(rank: int, job: Job) -> Trained:
    model = job.model()
    return two_ranks([FirstHalf(model, cut=2), SecondHalf(model, cut=2)], job, model)


@technique([2], ["tied language"])
def a_tied_table_in_two_halves(rank: int, job: Job) -> Trained:
    model = job.model()
    halves = [FirstHalf(model, cut=2), SecondHalf(model, cut=2)]
    return two_ranks(halves, job, model, shared="token.weight")


@mistake([2], ["tied language"])
def a_table_silently_untied(rank: int, job: Job) -> Trained:
    model = job.model()
    return two_ranks([FirstHalf(model, cut=2), SecondHalf(model, cut=2)], job, model)


class WithLoss(nn.Module):
    """The last stage, as exercise 4.2 wants it: it returns the loss."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, activations: Tensor, targets: Tensor) -> Tensor:
        return mean_loss(self.stage(activations), targets)


class AsTuple(nn.Module):
    """The first stage, as exercise 4.2 wants it: it returns a tuple of what crosses."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, inputs: Tensor) -> tuple[Tensor]:
        return (self.stage(inputs),)


@technique([2], JOBS)
def handed_over(rank: int, job: Job) -> Trained:
    model = job.model()
    halves = stages(model, 2)
    stage, optimizer = (AsTuple, WithLoss)[rank](halves[rank]), sgd(halves[rank])
    for batch in job.batches:
        optimizer.zero_grad()
        shape = activations_shape(halves[0], batch[0])
        room = torch.empty(len(batch[0]), *shape, device=device())
        hand_over(stage, batch[rank].to(device()), [room])
        optimizer.step()
    return trained(model, halves[rank])


@technique([2], ["even", "convolutional", "language"])
def torch_pipelining_in_one_piece(rank: int, job: Job) -> Trained:
    model = job.model()
    half = stages(model, 2)[rank]
    stage = PipelineStage(half, stage_index=rank, num_stages=2, device=device())
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=mean_loss)
    optimizer = sgd(half)
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs.to(device()))
        else:
            schedule.step(target=targets.to(device()))
        optimizer.step()
    return trained(model, half)


@mistake([2], JOBS)
def first_half_never_learns(rank: int, job: Job) -> Trained:
    """The gradient of the activations does not come back."""
    model = job.model()
    halves = stages(model, 2)
    optimizer = sgd(halves[rank])
    for inputs, targets in job.batches:
        optimizer.zero_grad()
        activations = halves[0](inputs.to(device())).detach()
        mean_loss(halves[1](activations), targets.to(device())).backward()
        if rank == 1:
            optimizer.step()
    return trained(model, halves[rank])
