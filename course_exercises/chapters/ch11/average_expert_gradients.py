"""Exercise 11.5, `average_expert_gradients`: what it asks for, and how it is checked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from course_exercises.authoring import Exercise, Wrong, expect, run
from course_exercises.chapters.ch11.shared import NOT_WAITED, blaming, check_waited, follow_calls
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
    misconceptions={
        "mean-over-copies": "The experts' gradients are too large: the sum over the copies was divided by their "
        "number. The tokens of all ranks are in it, so it is divided by the number of all ranks.",
        "divided-by-the-group": "The experts' gradients are divided by the size of the experts' group. Divide by the "
        "number of all ranks: each gradient is a mean of all ranks' means.",
        "not-divided": "Sums and no means: the gradients are not divided by the number of ranks.",
        "experts-over-everybody": "The experts' gradients are added up over all ranks. The ranks of an experts' "
        "group have *different* experts under other names: only the copies, the ranks of `data`, have the same. (`experts` may be the "
        "first part of a name, with no dot before it.)",
        "experts-over-their-group": "The experts' gradients are added up over the group of their own dimension. Its "
        "ranks have different experts; the copies are in the group of `data`.",
        "experts-left-alone": "The experts' gradients have not been added up over their copies: these drift apart.",
        "others-over-data": "What is no expert is added up over `data` only. Every rank has tokens of its own, also in "
        "an experts' group.",
        "others-over-experts": "What is no expert is added up over the experts' group only. Every rank has tokens of its own, "
        "also the other copies of the group.",
        "divided-twice": "The experts' gradients are divided by the experts' group once more. One division by the number of all "
        "ranks makes the mean.",
        "not-a-sum": "The gradients of the ranks are not added up: the operation of the call is another one. A mean begins with "
        "a sum.",
        "as-before": "The gradients are as they were. Work on `.grad` itself, or put the result there.",
        "experts-only": "Only the experts' gradients are averaged; the rest belongs to it.",
        "by-name": "A parameter is taken for an expert's that is none, or the other way round: `experts` has to be one "
        "of the parts of its name, between the dots.",
        "first-dimension": "It works for a mesh whose first dimension is `data`, and not in another order: ask for the "
        "groups by name.",
        "skips-missing": "A rank whose parameter has no gradient skips a call in which the others wait. Zeros stand in "
        "for it.",
        "missing-stays": "A trainable parameter without a gradient counts as zero: its `.grad` has to be there "
        "afterwards, with what the other ranks found.",
        "frozen": "A frozen parameter takes part: it has no gradient and gets none.",
        "not-waited": NOT_WAITED,
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
    return got, sent.unwaited


def _check_averages(answer, grid: _Grid) -> None:
    reports = run(_averaged, grid.ranks, answer, grid)
    check_waited([unwaited for _, unwaited in reports])
    got = [gradients for gradients, _ in reports]
    for rank, gradients in enumerate(got):
        for name, value in gradients.items():
            if name in grid.frozen and value is not None:
                raise Wrong("frozen", expected=f"no gradient of {name}", got="one")
            if name not in grid.frozen and value is None:
                where = f"rank {rank}, {name}"
                raise Wrong("missing-stays", expected="a gradient", got=f"None ({where})")
    everybody = list(range(grid.ranks))

    def held(
        expert, other, is_expert=lambda name: name.startswith("experts."), how=torch.sum
    ) -> list[dict]:
        """All ranks' gradients, by two functions that give (ranks to add up, divisor)."""
        found = []
        for rank in everybody:
            own = {}
            for name in grid.gradients[rank]:
                over, divisor = (expert if is_expert(name) else other)(rank)
                total = grid.summed(rank, name, over, how)
                own[name] = None if total is None else total / divisor
            found.append(own)
        return found

    def copies(rank: int) -> list[int]:
        return grid.group(rank, 0)

    def neighbours(rank: int) -> list[int]:
        return grid.group(rank, 1)

    n, (data, experts) = grid.ranks, grid.sizes

    def mean(rank: int) -> tuple[list[int], int]:
        return everybody, n

    def alone(divisor: int) -> Callable:
        return lambda rank: ([rank], divisor)

    right = held(lambda r: (copies(r), n), mean)
    likely = {
        "mean-over-copies": held(lambda r: (copies(r), data), mean),
        "divided-by-the-group": held(lambda r: (copies(r), experts), mean),
        "not-divided": lambda got: any(
            _alike(got, each)
            for each in (
                held(lambda r: (copies(r), 1), lambda r: (everybody, 1)),
                held(lambda r: (copies(r), 1), mean),
            )
        ),
        "experts-over-everybody": held(mean, mean),
        "experts-over-their-group": lambda got: any(
            _alike(got, held(lambda r, d=d: (neighbours(r), d), mean)) for d in (1, experts, n)
        ),
        "experts-left-alone": lambda got: any(
            _alike(got, held(alone(d), mean)) for d in (1, data, experts, n)
        ),
        "others-over-data": lambda got: any(
            _alike(got, held(lambda r, d=d: (copies(r), d), lambda r, e=e: (copies(r), e)))
            for d in (data, n)
            for e in (data, n)
        ),
        "others-over-experts": lambda got: any(
            _alike(got, held(lambda r: (copies(r), n), lambda r, d=d: (neighbours(r), d)))
            for d in (experts, n)
        ),
        "divided-twice": held(lambda r: (copies(r), n * experts), mean),
        "not-a-sum": lambda got: any(
            _alike(got, held(lambda r, d=d: (copies(r), d), lambda r, d=d: (everybody, d), how=how))
            for d in (1, n)
            for how in (torch.amax, torch.amin)
        ),
        "as-before": held(alone(1), alone(1)),
        "experts-only": held(lambda r: (copies(r), n), alone(1)),
        "by-name": held(lambda r: (copies(r), n), mean, is_expert=lambda name: "experts" in name),
    }
    expect(got, right, each="rank", likely=likely)


def _alike(got: list[dict], expected: list[dict]) -> bool:
    return all(
        torch.allclose(a[name], b[name], rtol=1e-4, atol=1e-5)
        for a, b in zip(got, expected, strict=True)
        for name in b
        if b[name] is not None
    )


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
    failures={name: "first-dimension" for name in ("exception", "mismatch", "timeout")},
    needs_earlier=True,
)
def a_mesh_in_another_order(answer, draw):
    with blaming("first-dimension", known=True):
        _check_averages(answer, _grid(draw, draw.choice([(1, 2), (2, 1), (1, 3)]), NAMES[::-1]))


@averaging.requires(
    "an expert that nobody chose has no gradient",
    failures={name: "skips-missing" for name in ("timeout", "mismatch", "exception")},
    needs_earlier=True,
)
def an_expert_that_nobody_chose_has_no_gradient(answer, draw):
    _check_averages(answer, _grid(draw, (2, draw.choice([1, 2])), missing=True))


@averaging.requires("a frozen parameter", failures={"exception": "frozen"}, needs_earlier=True)
def a_frozen_parameter(answer, draw):
    frozen = (draw.choice(["norm.weight", "norm.bias", "experts_router.weight"]),)
    _check_averages(answer, _grid(draw, (1, 2), frozen=frozen))
