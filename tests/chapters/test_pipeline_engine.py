"""Chapter 5's engine runs every schedule: gradients of the whole batch, and the predicted peak."""

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

from course_exercises.sources.answers import load_code
from course_utils.lesson import schedules
from course_utils.lesson.equality import check_equal, flat
from course_utils.lesson.schedules import looped, v_shaped
from tests.modules.test_schedules import random_legal
from tests.support.on_gloo import launch

WIDTH = 6
ENGINE = {name: load_code(5, name) for name in ("Pipeline", "samples", "cut")}


def line(layers: int) -> nn.Sequential:
    """Layers of several kinds: with one weight, with none, with a frozen and an unused one."""
    torch.manual_seed(0)
    kinds = [
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)),
        lambda: Branches(),
    ]
    model = nn.Sequential(*[kinds[i % 3]() for i in range(layers)])
    model[0][0].bias.requires_grad_(False)
    return model


class Branches(nn.Module):
    """A residual layer with a parameter of its own, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.inner(x).tanh()


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, rows, WIDTH, generator=generator))


def gradients(model: nn.Module) -> torch.Tensor:
    return flat(torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())


def run(rank: int, cases, engine):
    """Two steps in a row of every case, so that nothing of the first is left for the second."""
    torch.set_num_threads(1)
    ranks, results = dist.get_world_size(), []
    for schedule, chunks, rows, place in cases:
        stages = engine["cut"](line(2 * ranks * chunks), ranks * chunks)
        own = {n: stages[n] for n in (place(rank, chunk, ranks) for chunk in range(chunks))}
        inputs, targets = batch(rows)
        samples = engine["samples"](stages, inputs)
        pipeline = engine["Pipeline"](list(own.values()), schedule, samples, mse_loss, place)
        for _ in range(2):
            for stage in stages:
                stage.zero_grad()
            loss = pipeline.step(inputs, targets)
        results.append((loss, pipeline.peak, {n: gradients(stage) for n, stage in own.items()}))
    return results


def cases(ranks: int):
    """(name, schedule, chunks, rows, placement): micro-batches fewer and more than ranks, rows that
    do not divide."""
    for m, rows in ((1, 3), (ranks + 1, 2 * ranks + 3), (2 * ranks, 4 * ranks)):
        for name in ("gpipe", "one_forward_one_backward", "zb_h1", "zb_h2"):
            yield f"{name} {m}", getattr(schedules, name)(ranks, m), 1, rows, looped
        for chunks in (1, 2, 3):
            plan = schedules.interleaved(ranks, m, chunks)
            yield f"interleaved {m} {chunks}", plan, chunks, rows, looped
        for make in (schedules.zb_v, schedules.dualpipe_v):
            yield f"{make.__name__} {m}", make(ranks, m), 2, rows, v_shaped


def random_cases(ranks: int):
    """Schedules whose ops happen to stand in an order that can run, far from every named one."""
    for seed in range(12):
        dice = random.Random(seed)
        m, chunks, kinds = dice.randint(2, 5), 1 + seed % 3, ("FB", "FBW")[seed // 3 % 2]
        place = looped if seed < 6 else v_shaped
        schedule = random_legal(dice, ranks, m, chunks, kinds, place)
        assert schedules.first_illegal_move(schedule, ranks, m, chunks, place) is None
        yield f"random, seed {seed}", schedule, chunks, 2 * m + 1, place


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("of", [cases, random_cases])
def test_every_schedule_has_the_whole_batchs_gradients_and_the_predicted_peak(ranks, of):
    names, *columns = zip(*of(ranks))
    runs = launch(run, ranks, list(zip(*columns)), ENGINE)
    for name, schedule, chunks, rows, place, *of_ranks in zip(names, *columns, *runs):
        model = line(2 * ranks * chunks)
        inputs, targets = batch(rows)
        loss = mse_loss(model(inputs), targets)
        loss.backward()
        losses, peaks, parts = zip(*of_ranks)
        of_stages = {number: part for each in parts for number, part in each.items()}
        got = torch.cat([of_stages[number] for number in sorted(of_stages)])
        check_equal(gradients(model), [got])
        last = schedules.homes(place, ranks, chunks)[ranks * chunks - 1][0]
        assert losses[last] == pytest.approx(loss.item(), abs=1e-6), name
        assert list(peaks) == schedules.simulate(schedule, place=place).peak_in_flight, name


def test_in_the_first_half_of_the_backward_pass_no_weight_gets_a_gradient():
    stage = load_code(5, "SplitStage")(line(3))
    inputs, gradient = batch(4)
    stage.forward(0, inputs.requires_grad_())
    assert stage.backward_to_input(0, gradient).shape == inputs.shape
    assert all(p.grad is None for p in stage.module.parameters())
    stage.backward_to_weights(0)
    assert any(p.grad is not None for p in stage.module.parameters())
