"""Exercise 11.5, `average_expert_gradients`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_exercises.authoring import Exercise, Wrong, expect, run, same
from course_exercises.authoring.ranks import must_have_sent, must_have_waited
from course_exercises.chapters.ch11.shared import blaming, follow_calls
from course_utils.hardware import device

averaging = Exercise(
    "11.5",
    "average_expert_gradients",
    points=3,
    minutes=20,
    kind="core",
    parameters=("model", "mesh"),
    hints=[
        (
            "Take the loss of the whole batch as the mean of four ranks' means. Write its gradient with respect to "
            "the router as a sum over ranks, then that with respect to one expert. What is already added up "
            "after backward?"
        ),
        (
            "Both sums have a term for every rank, and are divided by the number of *all* ranks. They differ in "
            "what is missing: for an expert, its other copies' terms only."
        ),
        (
            'All-reduce over everybody, or over the mesh\'s "data" group if the name has the part `experts`; then '
            "divide by the size of the whole mesh. Zeros take the place of a gradient that is missing, before the "
            "call."
        ),
    ],
    things="gradients",
    misconceptions={
        "other-divisor": "Your gradients, or those of the experts or of the rest, are divided by another number than that of all "
        "ranks, or not at all. Each is a mean of all ranks' means: also an expert's gradient has the tokens of all ranks in it, however few "
        "copies it was added up over.",
        "experts-over-others": "You add up the experts' gradients over too few ranks, or over other experts too. The same expert is on the "
        "ranks of `data`; those of an experts' group have *different* experts under other names. (`experts` may be the first "
        "part of a name, with no dot before it.)",
        "others-over-a-part": "You do not add up the gradients of what is no expert over all ranks. Every rank has tokens of its "
        "own, also in an experts' group and in another copy of it.",
        "by-name": "You take a parameter for an expert's that is none. `experts` has to be one of the parts of its name, "
        "between the dots, and not of a longer word.",
        "first-dimension": "Your function works for a mesh whose first dimension is `data`, and not in another order: ask for "
        "the groups by name.",
        "missing": "You leave out a trainable parameter that has no gradient. It counts as zero: put zeros there and take part in "
        "the call, in which the others wait. Afterwards its `.grad` is what the other ranks found.",
    },
)

NAMES = ("data", "experts")


class _Layer(nn.Module):
    """What a rank has of a layer: a router, and its own experts by their numbers."""

    def __init__(self, numbers: list[int], width: int) -> None:
        super().__init__()
        self.experts_router = nn.Linear(
            width, 3, bias=False
        )  # its name says experts, and it is none
        self.norm = nn.LayerNorm(width)
        self.experts = nn.ModuleDict({str(e): nn.Linear(width, width) for e in numbers})


@dataclass(frozen=True)
class _Grid:
    """Sizes of data and experts, the order of the mesh's dimensions, and every rank's gradients by name."""

    sizes: tuple[int, int]
    order: tuple[str, str]
    gradients: list[dict[str, Tensor | None]]
    frozen: tuple[str, ...] = ()
    width: int = 3

    @property
    def ranks(self) -> int:
        return self.sizes[0] * self.sizes[1]

    def place(self, rank: int) -> tuple[int, int]:
        """(data, experts) of a rank."""
        if self.order == NAMES:
            return divmod(rank, self.sizes[1])
        expert, data = divmod(rank, self.sizes[0])
        return data, expert

    def everybody(self, rank: int) -> list[int]:
        return list(range(self.ranks))

    def copies(self, rank: int) -> list[int]:
        """The ranks with the same experts."""
        return self.group(rank, 0)

    def group(self, rank: int, dimension: int) -> list[int]:
        """The ranks that differ from `rank` in this dimension at most."""
        fixed = 1 - dimension
        return [r for r in range(self.ranks) if self.place(r)[fixed] == self.place(rank)[fixed]]

    def summed(self, rank: int, name: str, over: list[int], how=torch.sum) -> Tensor | None:
        """By the parameter's position, as a call meets it: experts have other names elsewhere. `how`: of the
        stacked gradients (ranks, ...), along the first dimension."""
        if name in self.frozen:
            return None
        position = list(self.gradients[rank]).index(name)
        terms = [list(self.gradients[r].values())[position] for r in over]
        shape = next(iter(t.shape for t in terms if t is not None), None)
        terms = (
            [torch.zeros(shape) if t is None else t for t in terms] if shape else [torch.zeros(1)]
        )
        return how(torch.stack(terms), 0)


def _grid(draw, sizes: tuple[int, int], order=NAMES, missing: bool = False, frozen=()) -> _Grid:
    per_rank, width = draw.choice([1, 2]), 3
    gradients = []
    for rank in range(sizes[0] * sizes[1]):
        data, expert = divmod(rank, sizes[1]) if order == NAMES else divmod(rank, sizes[0])[::-1]
        numbers = [expert * per_rank + i for i in range(per_rank)]
        own = {}
        for name, parameter in _Layer(numbers, width).named_parameters():
            own[name] = None if name in frozen else draw.tensor(*parameter.shape)
        if missing and data == 0:
            own |= {name: None for name in own if name.startswith("experts.")}
        gradients.append(own)
    return _Grid(sizes, order, gradients, tuple(frozen), width)


def _averaged(rank, answer, grid: _Grid):
    shape = tuple(grid.sizes[NAMES.index(name)] for name in grid.order)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=grid.order)
    numbers = sorted(
        {int(n.split(".")[1]) for n in grid.gradients[rank] if n.startswith("experts.")}
    )
    model = _Layer(numbers, grid.width).to(device())
    for name, parameter in model.named_parameters():
        gradient = grid.gradients[rank][name]
        parameter.requires_grad_(name not in grid.frozen)
        parameter.grad = None if gradient is None else gradient.to(device())
    with follow_calls() as sent:
        answer(model, mesh)
    got = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return got, sent


def _check_averages(answer, grid: _Grid) -> None:
    reports = run(_averaged, grid.ranks, answer, grid)
    must_have_waited([sent.unwaited for _, sent in reports])
    got = [gradients for gradients, _ in reports]
    for rank, gradients in enumerate(got):
        for name, value in gradients.items():
            if name in grid.frozen and value is not None:
                raise Wrong("zeros-for-none", expected=f"no gradient of {name}", got="one")
            if name not in grid.frozen and value is None:
                where = f"rank {rank}, {name}"
                raise Wrong("missing", expected="a gradient", got=f"None ({where})")
    right = _held(grid, (grid.copies, grid.ranks), (grid.everybody, grid.ranks))
    expect(got, right, each="rank", likely=_mistakes(grid))
    must_have_sent([sent for _, sent in reports])


Sum = tuple[Callable[[int], list[int]], int]  # over which ranks, divided by what


def _is_expert(name: str) -> bool:
    return name.startswith("experts.")


def _held(grid: _Grid, expert: Sum, other: Sum, is_expert=_is_expert, how=torch.sum) -> list[dict]:
    """All ranks' gradients after these sums."""

    def of(rank: int, name: str) -> Tensor | None:
        over, divisor = expert if is_expert(name) else other
        total = grid.summed(rank, name, over(rank), how)
        return None if total is None else total / divisor

    return [{name: of(r, name) for name in own} for r, own in enumerate(grid.gradients)]


def _mistakes(grid: _Grid) -> dict:
    n, copies, everybody, (data, experts) = grid.ranks, grid.copies, grid.everybody, grid.sizes
    numbers = {1, data, experts, n}

    def group(rank: int) -> list[int]:
        return grid.group(rank, 1)

    def alone(rank: int) -> list[int]:
        return [rank]

    def one_of(*sums: tuple[Sum, Sum], **how) -> Callable[[list], bool]:
        return lambda got: any(same(got, _held(grid, *each, **how)) for each in sums)

    mean = everybody, n
    return {
        "unchanged": one_of(((alone, 1), (alone, 1))),
        "other-divisor": one_of(
            *(((copies, d), (everybody, e)) for d in (*numbers, n * experts) for e in numbers)
        ),
        "experts-over-others": one_of(
            *(((over, d), mean) for over in (everybody, group, alone) for d in numbers)
        ),
        "others-over-a-part": one_of(
            *(
                ((copies, d), (over, e))
                for over in (copies, group, alone)
                for d in numbers
                for e in numbers
            )
        ),
        "another-reduction": lambda got: any(
            one_of(((copies, d), (everybody, d)), how=how)(got)
            for how in (torch.amax, torch.amin)
            for d in (1, n)
        ),
        "by-name": one_of(((copies, n), mean), is_expert=lambda name: "experts" in name),
    }


@averaging.requires(
    "three copies of two groups, or two of three"
)  # where no two mistakes look alike
def three_copies_of_two_groups(answer, draw):
    _check_averages(answer, _grid(draw, draw.choice([(3, 2), (2, 3)])))


@averaging.requires("one copy, and one expert's rank", needs_earlier=True)
def one_copy_and_one_expert_rank(answer, draw):
    for sizes in ((1, draw.choice([2, 3])), (2, 1)):
        _check_averages(answer, _grid(draw, sizes))


@averaging.requires(
    "a mesh in another order",
    failures=dict.fromkeys(("exception", "mismatch", "timeout"), "first-dimension"),
    needs_earlier=True,
)
def a_mesh_in_another_order(answer, draw):
    with blaming("first-dimension", known=True):
        _check_averages(answer, _grid(draw, draw.choice([(1, 2), (2, 1), (1, 3)]), NAMES[::-1]))


@averaging.requires(
    "an expert that nobody chose has no gradient",
    failures=dict.fromkeys(("timeout", "mismatch", "exception"), "missing"),
    needs_earlier=True,
)
def an_expert_that_nobody_chose_has_no_gradient(answer, draw):
    _check_averages(answer, _grid(draw, (2, draw.choice([1, 2])), missing=True))


@averaging.requires(
    "a frozen parameter", failures={"exception": "none-gradient"}, needs_earlier=True
)
def a_frozen_parameter(answer, draw):
    frozen = (draw.choice(["norm.weight", "norm.bias", "experts_router.weight"]),)
    _check_averages(answer, _grid(draw, (1, 2), frozen=frozen))
