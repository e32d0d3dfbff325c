"""One contract for all techniques: the parameters of one process on the whole batch.

Every technique of the course, by hand or built in, alone or combined, trains the same model from
the same seed on the same global batches with SGD and must end with the parameters, and with the
last gradients, of the single-process run: float32, max |difference| <= 1e-5. SGD, because Adam
hides gradients that are wrong by a constant factor.

The techniques are in tests/techniques/, one file for each family: a new one is a function there.
"""

import importlib
import pkgutil
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_exercises.authoring import load_answer
from course_utils.hardware import device
from course_utils.launch import launch
from course_utils.lesson.equality import TOLERANCE
from tests import techniques
from tests.support.needing_rules import needs_rules
from tests.techniques import MISTAKES, TECHNIQUES, Job, Ranks, Run, Trained, alone, train_all
from tests.techniques.jobs import make_jobs

for module in pkgutil.iter_modules(techniques.__path__):
    importlib.import_module(f"{techniques.__name__}.{module.name}")
# ranks get the functions that they run, and need not import the files that these are in
cloudpickle.register_pickle_by_value(techniques)

SEEN = 100 * TOLERANCE  # how far a mistake has to lead at least
MOMENTUM = 0.9  # of jobs that are interrupted
PATIENCE = 180  # seconds for one launch, also on a busy machine


class Contract:
    """What the single process ends with, for each job; judges what the ranks end with."""

    def __init__(self, jobs: dict[str, Job]) -> None:
        self.jobs = jobs
        self.expected = launch(train_all, 1, alone, jobs)[0]

    def distances(self, run: Run, ranks: int, names: tuple[str, ...]) -> dict[str, float]:
        """How far the worst rank is from the single process, for each of the jobs `names`."""
        jobs = {name: self.jobs[name] for name in names}
        return self.judged(launch(train_all, ranks, run, jobs, timeout=PATIENCE))

    def distances_after(
        self, run: Run, ranks: tuple[int, ...], names: tuple[str, ...], folder: Path
    ) -> dict[str, float]:
        """The same for the last ranks of an interrupted training; its checkpoints go to `folder`."""
        for part, count in enumerate(ranks):
            jobs = {name: self.part(name, part, len(ranks), folder / name) for name in names}
            results = launch(train_all, count, run, jobs, timeout=PATIENCE)
        return self.judged(results)

    def part(self, name: str, part: int, parts: int, folder: Path) -> Job:
        """About as many batches for each part, the first the longest."""
        folder.mkdir(parents=True, exist_ok=True)
        batches = self.jobs[name].batches
        ends = [-(-len(batches) * i // parts) for i in (part, part + 1)]
        return replace(self.jobs[name], batches=batches[slice(*ends)], folder=folder)

    def judged(self, results: list[dict[str, Trained]]) -> dict[str, float]:
        """How far the worst rank is from the single process, for each job."""
        return {
            name: self.distance(name, [result[name] for result in results]) for name in results[0]
        }

    def distance(self, name: str, results: list[Trained]) -> float:
        """The largest |difference| in parameters or gradients; every parameter has an owner."""
        expected = self.expected[name]
        assert set().union(*(result.parameters for result in results)) == set(expected.parameters)
        took_part = [result.gradients for result in results if result.gradients is not None]
        assert set().union(*took_part) == set(expected.gradients), "in the last step"
        return max(
            *(difference(result.parameters, expected.parameters) for result in results),
            *(difference(gradients, expected.gradients) for gradients in took_part),
        )


def difference(some: dict[str, Tensor | None], whole: dict[str, Tensor | None]) -> float:
    """The largest |difference| of `some` of the tensors; infinite where only one side has one."""
    pairs = [(tensor, whole[name]) for name, tensor in some.items()]
    if any((a is None) != (b is None) for a, b in pairs):
        return float("inf")
    return max((a - b).abs().max().item() for a, b in pairs if a is not None)


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract(make_jobs())


@pytest.fixture(scope="module")
def contract_with_momentum() -> Contract:
    return Contract({name: replace(job, momentum=MOMENTUM) for name, job in make_jobs().items()})


def cases(table: dict[str, techniques.Technique], interrupted: bool) -> list:
    return [
        pytest.param(entry, ranks, id=f"{name}-{written(ranks)}")
        for name, entry in table.items()
        for ranks in entry.ranks
        if isinstance(ranks, tuple) == interrupted
    ]


def written(ranks: Ranks) -> str:
    return "-".join(map(str, ranks)) if isinstance(ranks, tuple) else str(ranks)


@pytest.mark.parametrize(("technique", "ranks"), cases(TECHNIQUES, interrupted=False))
def test_a_technique_equals_one_process(technique, ranks, contract):
    distances = contract.distances(technique.run, ranks, technique.jobs)
    assert {name: far for name, far in distances.items() if not far <= TOLERANCE} == {}


@pytest.mark.parametrize(("technique", "ranks"), cases(TECHNIQUES, interrupted=True))
def test_an_interrupted_training_equals_one_process(
    technique, ranks, contract_with_momentum, tmp_path
):
    names = technique.jobs
    distances = contract_with_momentum.distances_after(technique.run, ranks, names, tmp_path)
    assert {name: far for name, far in distances.items() if not far <= TOLERANCE} == {}


@needs_rules
def test_parts_that_ranks_with_gpus_have_saved_are_resumed(
    contract_with_momentum, tmp_path, monkeypatch
):
    """Under NCCL's rules each rank has a device of its own: a part of another rank loads with a
    `map_location` only, and a momentum that was loaded to the CPU belongs beside its parameter."""
    run = TECHNIQUES["mini_fsdp_resumed_by_other_ranks"].run
    monkeypatch.setenv("COURSE_RULES", "nccl")
    distances = contract_with_momentum.distances_after(run, (2, 3), ("awkward",), tmp_path)
    assert distances["awkward"] <= TOLERANCE


@pytest.mark.parametrize(("technique", "ranks"), cases(MISTAKES, interrupted=False))
def test_the_contract_sees_a_mistake(technique, ranks, contract):
    distances = contract.distances(technique.run, ranks, technique.jobs)
    assert {name: far for name, far in distances.items() if not far > SEEN} == {}


@pytest.mark.parametrize(("technique", "ranks"), cases(MISTAKES, interrupted=True))
def test_the_contract_sees_a_mistake_in_a_resume(
    technique, ranks, contract_with_momentum, tmp_path
):
    names = technique.jobs
    distances = contract_with_momentum.distances_after(technique.run, ranks, names, tmp_path)
    assert {name: far for name, far in distances.items() if not far > SEEN} == {}


def test_training_moves_the_model_and_needs_every_batch(contract):
    """A gradient of zero would let every technique pass."""
    never = {name: replace(job, batches=[]) for name, job in contract.jobs.items()}
    shorter = {name: replace(job, batches=job.batches[:-1]) for name, job in contract.jobs.items()}
    starts = launch(train_all, 1, alone, never)[0]
    almost = launch(train_all, 1, alone, shorter)[0]
    for name, expected in contract.expected.items():
        assert difference(starts[name].parameters, expected.parameters) > 0.01
        assert difference(almost[name].parameters, expected.parameters) > SEEN


def test_a_parameter_that_no_rank_has_is_missed(contract):
    whole = contract.expected["even"]
    part = Trained(
        {name: p for name, p in whole.parameters.items() if name != "linear2.bias"},
        whole.gradients,
    )
    assert contract.distance("even", [part, whole]) == 0
    with pytest.raises(AssertionError):
        contract.distance("even", [part, part])


def test_overlapped_ddp_and_torchs_own_give_the_same_bits_on_two_ranks(contract):
    """With two ranks there is one order in which to add, whatever the buckets are."""
    ours, torchs = TECHNIQUES["overlapped_ddp"], TECHNIQUES["torch_ddp"]
    jobs = {name: contract.jobs[name] for name in ours.jobs}
    expected = launch(train_all, 2, torchs.run, jobs)[0]
    for result in launch(train_all, 2, ours.run, jobs):
        for name in jobs:
            assert difference(result[name].parameters, expected[name].parameters) == 0, name
            assert difference(result[name].gradients, expected[name].gradients) == 0, name


def exact_job() -> tuple[nn.Module, Tensor]:
    """A model and a batch of 16 rows, of integers that are so small that no step ever rounds.

    Products and sums stay integers, and those in the gradients multiples of 1/32, of a few
    thousands at most: float32 holds them all exactly, so the order of the sums is free.
    """
    random = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))
    for p in model.parameters():
        p.data = torch.randint(-2, 3, p.shape, generator=random).float()
    return model, torch.randint(-2, 3, (16, 6), generator=random).float()


def exact_step(model: nn.Module, rows: Tensor, ranks: int) -> torch.optim.Optimizer:
    """Backward of this rank's loss; the mean over the ranks is the loss of the batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    (model(rows).square().sum() * ranks / 64).backward()
    return optimizer


def exact_step_of_mini_fsdp(rank: int, mini_fsdp: type) -> dict[str, Tensor]:
    module, rows = exact_job()
    model, ranks = mini_fsdp(module.to(device())), dist.get_world_size()
    optimizer = exact_step(model, rows.tensor_split(ranks)[rank].to(device()), ranks)
    model.finish_gradient_synchronization()
    optimizer.step()
    return {name: p.cpu() for name, p in model.full_parameters().items()}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_mini_fsdp_gives_the_bits_of_one_process_where_no_sum_rounds(ranks):
    model, rows = exact_job()
    exact_step(model, rows, ranks=1).step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for result in launch(exact_step_of_mini_fsdp, ranks, load_answer("8.4"), timeout=PATIENCE):
        assert result.keys() == expected.keys()
        assert all(torch.equal(result[name], expected[name]) for name in expected)
