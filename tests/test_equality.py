"""One contract for all techniques: the parameters of one process on the whole batch.

Every technique of the course, by hand or built in, alone or combined, trains the same model from
the same seed on the same global batches with SGD and must end with the parameters, and with the
last gradients, of the single-process run: float32, max |difference| <= 1e-5. SGD, because Adam
hides gradients that are wrong by a constant factor.

A technique is a function `(rank, job) -> Trained` that runs on every rank. To add one, decorate
it with `@technique`. `rows(...)` gives a rank its share, which may be uneven, or empty.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_utils import mnist
from course_utils.checks import load_answer
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.models import MnistNet

TOLERANCE = 1e-5
LEARNING_RATE = 0.5
WORLD_SIZES = (1, 2, 3, 4)
# rows of each global batch; 11 and 13 divide by no world size, and 2 leaves ranks without a row
EVEN, UNEVEN = (24, 24, 24), (24, 11, 13, 2)


class Awkward(nn.Module):
    """A tied, a frozen and an unused layer; shapes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(784, 13)
        self.middle = nn.Linear(13, 13)
        self.unused = nn.Linear(13, 7)
        self.tied = nn.Linear(13, 13)
        self.tied.weight = self.middle.weight
        self.last = nn.Linear(13, 10)
        self.last.bias.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).tanh()
        return self.last(self.tied(self.middle(hidden).tanh()).tanh())


@dataclass(frozen=True)
class Job:
    """What to train on: global batches, the same for all; `answers` are those of the exercises."""

    make_model: Callable[[], nn.Module]
    batches: list[tuple[Tensor, Tensor]]  # images (N, 1, 28, 28), labels (N,)
    answers: dict[str, Callable]

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make_model().to(device())


@dataclass(frozen=True)
class Trained:
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor | None] | None  # of the last step; None if this rank missed it


def trained(model: nn.Module) -> Trained:
    named = dict(model.named_parameters())
    return Trained(
        {name: p.detach().cpu().clone() for name, p in named.items()},
        {name: None if p.grad is None else p.grad.cpu().clone() for name, p in named.items()},
    )


def alone(job: Job) -> Trained:
    """The single process on the whole batch: what all techniques must equal."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for images, labels in job.batches:
        optimizer.zero_grad()
        cross_entropy(model(images.to(device())), labels.to(device())).backward()
        optimizer.step()
    return trained(model)


def rows(batch: tuple[Tensor, Tensor], part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Every parts-th row, beginning with `part`: shares that differ by at most one row."""
    images, labels = batch
    return images[part::parts].to(device()), labels[part::parts].to(device())


def share_of_loss(model: nn.Module, images: Tensor, labels: Tensor, whole: int) -> Tensor:
    """This rank's loss, so that the mean over the ranks is the mean over the `whole` batch."""
    scale = dist.get_world_size() / whole
    return cross_entropy(model(images), labels, reduction="sum") * scale


TECHNIQUES: dict[str, Callable[[int, Job], Trained]] = {}


def technique(function: Callable[[int, Job], Trained]) -> Callable[[int, Job], Trained]:
    TECHNIQUES[function.__name__] = function
    return function


def train(job: Job, model: nn.Module, synchronise: Callable[[], None], micro_batches=1) -> None:
    """The loop that ranks with a model of their own share: accumulate, synchronise, update."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for batch in job.batches:
        optimizer.zero_grad()
        for micro in range(micro_batches):
            images, labels = rows(batch, rank * micro_batches + micro, ranks * micro_batches)
            last = micro == micro_batches - 1
            with nullcontext() if last else model.no_sync():
                share_of_loss(model, images, labels, len(batch[0])).backward()
        synchronise()
        optimizer.step()


@technique
def gradients_averaged_by_hand(rank: int, job: Job) -> Trained:
    model = job.model()
    train(job, model, lambda: job.answers["3.1"](model))
    return trained(model)


@technique
def gradients_round_a_ring(rank: int, job: Job) -> Trained:
    model = job.model()

    def average() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                job.answers["3.2"](parameter.grad)
                parameter.grad /= dist.get_world_size()

    train(job, model, average)
    return trained(model)


@technique
def overlapped_ddp(rank: int, job: Job) -> Trained:
    """Each rank builds its model from a seed of its own: construction makes them equal."""
    model = job.answers["3.4"](job.model(seed=rank), bucket_bytes=2048)
    train(job, model, model.finish_gradient_synchronization)
    return trained(model.module)


@technique
def overlapped_ddp_accumulating(rank: int, job: Job) -> Trained:
    model = job.answers["3.4"](job.model(seed=rank))
    train(job, model, model.finish_gradient_synchronization, micro_batches=3)
    return trained(model.module)


@technique
def torch_ddp(rank: int, job: Job) -> Trained:
    model = DistributedDataParallel(job.model(seed=rank), find_unused_parameters=True)
    train(job, model, lambda: None)
    return trained(model.module)


@technique
def torch_ddp_accumulating(rank: int, job: Job) -> Trained:
    model = DistributedDataParallel(
        job.model(seed=rank), find_unused_parameters=True, gradient_as_bucket_view=True
    )
    train(job, model, lambda: None, micro_batches=3)
    return trained(model.module)


@technique
def torch_ddp_with_join(rank: int, job: Job) -> Trained:
    """Ranks without a row stop early; Join answers for them and hands them the last model."""
    model = DistributedDataParallel(job.model(seed=rank), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    with Join([model]):
        for batch in job.batches:
            images, labels = rows(batch, rank, dist.get_world_size())
            if len(images) == 0:
                break
            optimizer.zero_grad()
            share_of_loss(model, images, labels, len(batch[0])).backward()
            optimizer.step()
    result = trained(model.module)
    return result if len(images) else Trained(result.parameters, None)


def data_parallel_by_hand(devices: list[torch.device], job: Job) -> Trained:
    """One process for all devices; a device may occur several times."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for images, labels in job.batches:
        images, labels = images.to(devices[0]), labels.to(devices[0])
        job.answers["2.4"](model, optimizer, cross_entropy, images, labels, devices)
    return trained(model)


def piece_of(model: MnistNet, rank: int) -> nn.Module:
    """The rank's half of the layers, for two ranks, with the names that they have in the whole."""
    first = OrderedDict(flat=nn.Flatten(), linear1=model.linear1, relu=nn.ReLU())
    return nn.Sequential((first, OrderedDict(linear2=model.linear2))[rank])


def line_by_hand(rank: int, job: Job, comes_back: bool = True) -> Trained:
    """Half of the layers each: activations to rank 1, their gradients back to rank 0."""
    piece = piece_of(job.model(), rank)
    optimizer = torch.optim.SGD(piece.parameters(), LEARNING_RATE)
    for images, labels in job.batches:
        optimizer.zero_grad()
        hidden = torch.empty(len(images), 50, device=device())
        if rank == 0:
            hidden = piece(images.to(device()))
            dist.send(hidden.detach(), dst=1)
            gradient = torch.empty_like(hidden)
            if comes_back:
                dist.recv(gradient, src=1)
                hidden.backward(gradient)
        else:
            dist.recv(hidden, src=0)
            cross_entropy(piece(hidden.requires_grad_()), labels.to(device())).backward()
            if comes_back:
                dist.send(hidden.grad, dst=0)
        optimizer.step()
    return trained(piece)


def line_with_pipelining(rank: int, job: Job) -> Trained:
    piece = piece_of(job.model(), rank)
    stage = PipelineStage(piece, stage_index=rank, num_stages=2, device=device())
    schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(piece.parameters(), LEARNING_RATE)
    for images, labels in job.batches:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(images.to(device()))
        else:
            schedule.step(target=labels.to(device()))
        optimizer.step()
    return trained(piece)


def put_together(pieces: list[Trained]) -> Trained:
    parameters, gradients = {}, {}
    for piece in pieces:
        parameters |= piece.parameters
        gradients |= piece.gradients
    return Trained(parameters, gradients)


def forgets_to_divide(rank: int, job: Job) -> Trained:
    model = job.model()

    def add() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)

    train(job, model, add)
    return trained(model)


def forgets_to_communicate(rank: int, job: Job) -> Trained:
    model = job.model()
    train(job, model, lambda: None)
    return trained(model)


def averages_unequal_means(rank: int, job: Job) -> Trained:
    """Right on even batches only: the mean of the ranks' means."""
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for batch in job.batches:
        images, labels = rows(batch, rank, dist.get_world_size())
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels) if len(images) else model(images).sum()
        loss.backward()
        job.answers["3.1"](model)
        optimizer.step()
    return trained(model)


# ---- the contract --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def jobs() -> dict[str, Job]:
    images, labels = mnist.tensors(train=True, limit=max(sum(EVEN), sum(UNEVEN)))
    answers = {name: load_answer(name) for name in ("2.4", "3.1", "3.2", "3.4")}

    def job(make_model, sizes) -> Job:
        cuts = [sum(sizes[:i]) for i in range(1, len(sizes))]
        parts = zip(
            images[: sum(sizes)].tensor_split(cuts), labels[: sum(sizes)].tensor_split(cuts)
        )
        return Job(make_model, list(parts), answers)

    return {
        "even": job(MnistNet, EVEN),
        "uneven": job(MnistNet, UNEVEN),
        "awkward": job(Awkward, UNEVEN),
    }


@pytest.fixture(scope="module")
def expected(jobs) -> dict[str, Trained]:
    return {name: alone(job) for name, job in jobs.items()}


def difference(some: dict[str, Tensor | None], others: dict[str, Tensor | None]) -> float:
    """The largest |difference| of two sets of tensors; infinite where only one has a tensor."""
    assert some.keys() == others.keys()
    pairs = [(some[name], others[name]) for name in some]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    return max((a - b).abs().max().item() for a, b in pairs if a is not None)


def distance(results: list[Trained], expected: Trained) -> float:
    """How far the worst rank is from the single process, in parameters or in gradients."""
    gradients = [result.gradients for result in results if result.gradients is not None]
    assert gradients, "somebody takes part in the last step"
    return max(
        *(difference(result.parameters, expected.parameters) for result in results),
        *(difference(own, expected.gradients) for own in gradients),
    )


def all_jobs(rank: int, function, jobs: dict[str, Job]) -> dict[str, Trained]:
    return {name: function(rank, job) for name, job in jobs.items()}


@pytest.mark.parametrize("ranks", WORLD_SIZES)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_equals_one_process(name, ranks, jobs, expected):
    results = launch(all_jobs, ranks, TECHNIQUES[name], jobs)
    for case in jobs:
        assert distance([result[case] for result in results], expected[case]) <= TOLERANCE, case


@pytest.mark.parametrize("count", WORLD_SIZES)
def test_data_parallel_by_hand_equals_one_process(count, jobs, expected):
    for case, job in jobs.items():
        result = data_parallel_by_hand([device()] * count, job)
        assert distance([result], expected[case]) <= TOLERANCE, case


@pytest.mark.parametrize(
    ("line", "case"),
    [(line_by_hand, "even"), (line_by_hand, "uneven"), (line_with_pipelining, "even")],
)
def test_a_model_cut_over_two_ranks_equals_one_process(line, case, jobs, expected):
    result = put_together(launch(line, 2, jobs[case]))
    assert distance([result], expected[case]) <= TOLERANCE


def test_the_contract_sees_a_half_that_never_learns(jobs, expected):
    result = put_together(launch(line_by_hand, 2, jobs["even"], False))
    assert difference(result.parameters, expected["even"].parameters) > 100 * TOLERANCE


def test_overlapped_ddp_and_torchs_own_give_the_same_bits_on_two_ranks(jobs):
    """With two ranks there is one order in which to add, whatever the buckets are."""
    ours = launch(all_jobs, 2, overlapped_ddp, jobs)
    torchs = launch(all_jobs, 2, torch_ddp, jobs)
    for case in jobs:
        assert distance([ours[0][case], ours[1][case]], torchs[0][case]) == 0, case


@pytest.mark.parametrize("mistake", [forgets_to_divide, forgets_to_communicate])
def test_the_contract_sees_a_mistake(mistake, jobs, expected):
    results = launch(all_jobs, 2, mistake, jobs)
    for case in jobs:
        far = distance([result[case] for result in results], expected[case])
        assert far > 100 * TOLERANCE, case


def test_the_contract_sees_a_mean_of_unequal_means(jobs, expected):
    results = launch(all_jobs, 3, averages_unequal_means, jobs)
    assert distance([result["even"] for result in results], expected["even"]) <= TOLERANCE
    far = distance([result["uneven"] for result in results], expected["uneven"])
    assert far > 100 * TOLERANCE


def test_training_moves_the_model_and_needs_every_batch(jobs, expected):
    """A gradient of zero would let every technique pass."""
    for case, job in jobs.items():
        start, end = trained(job.model()).parameters, expected[case].parameters
        assert difference(start, end) > 0.01
        shorter = alone(Job(job.make_model, job.batches[:-1], job.answers))
        assert difference(shorter.parameters, end) > 100 * TOLERANCE
