"""Exercise 4.5, `compare_cuts`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, any_of, expect, expect_type, same
from course_exercises.authoring.compare import show
from course_exercises.chapters.ch04.shared import Cuts, best_cuts, equal_layers, loads_of
from course_utils.trace import kept_for_backward

comparing = Exercise(
    "4.5",
    "compare_cuts",
    points=3,
    minutes=65,
    kind="stretch",
    parameters=("layers", "inputs", "seconds", "stages", "cut"),
    hints=[
        (
            "Separate three things: where a strategy cuts, what a stage holds, and the row that is "
            "made of both. The row is the same function for all strategies."
        ),
        (
            "`nn.Sequential` can be sliced: `layers[2:5]` is a stage. Its memory is a sum over its own "
            "`parameters()` and `buffers()`, with a gradient for each parameter that requires one, "
            "plus what `kept_for_backward` counts."
        ),
        (
            "Go through the stages in order. Inside `with kept_for_backward(stage)`, run the stage on "
            "what arrives; what arrives at the next one is the output, detached, and it requires a "
            "gradient if it is floating point. `nbytes` knows each dtype. Idle is 1 minus the seconds "
            "of all stages over stages times slowest."
        ),
    ],
    misconceptions={
        "equal-layers": "Equal layers are cut as `torch.tensor_split` does it: with n layers in s stages, the first n % s "
        "stages have n // s + 1 layers and the others n // s. Where n does not divide, equal sizes but for the last "
        "stage, i * n / s rounded, and `cut` for equal costs give other cuts; the ends of the chain are none.",
        "cut-asked-otherwise": "The cuts of two rows are exactly what `cut` returns for one cost a layer: `seconds` as "
        "they are for one row, and for the other the numbers of parameters, `numel()`, frozen ones included and "
        "whatever their dtype.",
        "slowest": "`slowest` is one number for each row, in seconds whatever the strategy balances. Cut `seconds` as "
        "the layers are cut, add up each piece, and take the largest sum.",
        "idle-one-batch": "1 - 1/stages is the idle share when one batch goes through alone. Here "
        "batches follow each other: a stage works its own seconds in every `slowest` seconds.",
        "idle": "`idle` is one share from 0 to 1 for all stages together. In `stages * slowest` seconds they work "
        "`sum(seconds)`: what is left, as a share of the first, is idle.",
        "gradients": "The gradients are not counted right. A parameter that learns takes its bytes twice, once itself "
        "and once as its gradient; a frozen one has no gradient, and plain SGD keeps nothing more.",
        "kept": "What a stage keeps for backward is not counted right. Run the whole stage inside one "
        "`kept_for_backward(stage)`, on what the stage before returned, and take `kept.bytes`: what two layers keep "
        "is there once, and outputs that backward needs are in it already.",
        "over-the-cut": "What arrives over a cut has to require a gradient where it is floating point: without, the first "
        "operations of a stage keep less. The batch that enters the first layer requires none.",
        "memory": "Look at one stage alone: the bytes of its parameters and of its buffers, such as BatchNorm's running "
        "mean, as each tensor's `nbytes` tells them, of its gradients, and what it keeps for backward of the batch "
        "that arrives there.",
    },
    things="shares",
    failures={
        "floating point": "over-the-cut",
        "mat1 and mat2": "kept",
        "'Kept'": "kept",
    },
    at_home=True,
)

STRATEGIES = ("equal layers", "equal parameters", "profiled time")


@dataclass
class _Case:
    """One call of compare_cuts: its arguments, and what belongs into the table."""

    layers: nn.Sequential
    inputs: Tensor
    seconds: list[float]
    stages: int

    def cuts(self) -> dict[str, Cuts]:
        return {
            "equal layers": equal_layers(self.seconds, self.stages),
            "equal parameters": best_cuts(self.numbers(), self.stages),
            "profiled time": best_cuts(self.seconds, self.stages),
        }

    def numbers(self, **how) -> list[int]:
        return [_numbers(layer, **how) for layer in self.layers]

    def parts(self, cuts: Cuts) -> list[nn.Sequential]:
        return [self.layers[a:b] for a, b in pairwise([0, *cuts, len(self.layers)])]

    def table(self, answer) -> dict[str, dict]:
        """The answer's table, whose form and cuts are right: what else stands in it depends on them."""
        asked: list[list[float]] = []

        def cut(costs: list[float], stages: int) -> Cuts:
            asked.append(list(costs))
            return best_cuts(costs, stages)

        table = answer(self.layers, self.inputs, list(self.seconds), self.stages, cut)
        expect_type(table, dict)
        for costs in (self.numbers(), self.seconds):
            if not any(same(costs, others) for others in asked):
                got = f"called with {show(asked)}" if asked else "not called"
                raise Wrong("cut-asked-otherwise", expected=f"cut({show(costs)}, ...)", got=got)
        expect(set(table), set(STRATEGIES), what="the rows")
        for name, cuts in self.cuts().items():
            expect_type(table[name], dict)
            keys = {"cuts", "memory", "slowest", "idle"}
            expect(set(table[name]), keys, what=f"the entries of {name!r}")
            slug = "equal-layers" if name == "equal layers" else "cut-asked-otherwise"
            expect(table[name]["cuts"], cuts, what=f"the cuts of {name!r}", likely={slug: True})
        return table


def _numbers(layer: nn.Module, trainable: bool = False, unit: str = "numel") -> int:
    counted = [p for p in layer.parameters() if p.requires_grad or not trainable]
    return sum(p.numel() if unit == "numel" else p.nbytes for p in counted)


def _held(part: nn.Sequential) -> int:
    buffers = sum(buffer.nbytes for buffer in part.buffers())
    return _numbers(part, unit="bytes") + buffers


def _learning(part: nn.Sequential) -> int:
    """The bytes of a stage's gradients."""
    return _numbers(part, trainable=True, unit="bytes")


def _kept(parts: list[nn.Sequential], inputs: Tensor, first=False, later=True) -> list[int]:
    """What each stage keeps for backward; `first` and `later`: whether what arrives at the first
    stage and at the later ones requires a gradient."""
    result = []
    for number, part in enumerate(parts):
        learns = later if number else first
        arriving = inputs.detach().requires_grad_(learns and inputs.is_floating_point())
        with kept_for_backward(part) as kept:
            inputs = part(arriving)
        result.append(kept.bytes)
    return result


def _kept_by_layer(parts: list[nn.Sequential], inputs: Tensor) -> list[int]:
    """What each stage keeps if every layer is asked by itself."""
    each = iter(_kept([layer for part in parts for layer in part], inputs))
    return [sum(next(each) for _ in part) for part in parts]


def _returned(parts: list[nn.Sequential], inputs: Tensor) -> list[int]:
    """The bytes that each stage returns."""
    outputs = list(accumulate(parts, lambda arriving, part: part(arriving), initial=inputs))
    return [tensor.nbytes for tensor in outputs[1:]]


@contextmanager
def _modes_restored(layers: nn.Sequential) -> Iterator[None]:
    modes = {module: module.training for module in layers.modules()}
    yield
    for module, mode in modes.items():
        module.training = mode


def _check_times(answer, case: _Case) -> None:
    table, total = case.table(answer), sum(case.seconds)
    for name, cuts in case.cuts().items():
        slowest = max(loads_of(case.seconds, cuts))
        what, likely = f"slowest of {name!r}", {"slowest": True}
        expect(table[name]["slowest"], slowest, what=what, likely=likely)
        idle = 1 - total / (case.stages * slowest)
        likely = {
            "idle-one-batch": 1 - 1 / case.stages,
            "rounded-down": any_of(*(round(idle, digits) for digits in range(1, 5))),
            "idle": True,
        }
        expect(table[name]["idle"], idle, what=f"idle of {name!r}", likely=likely)


def _check_memory(answer, case: _Case) -> None:
    modes = [module.training for module in case.layers.modules()]
    with _modes_restored(case.layers):
        table = case.table(answer)
        now = [module.training for module in case.layers.modules()]
    for name, cuts in case.cuts().items():
        parts = case.parts(cuts)
        own = [_held(part) + _learning(part) for part in parts]
        full = [a + b for a, b in zip(own, _kept(parts, case.inputs))]
        what, likely = f"memory of {name!r}", _memory_mistakes(case, parts, own, full)
        expect(table[name]["memory"], full, each="stage", what=what, likely=likely)
    expect(now, modes, what="training afterwards", each="module", likely={"mode-changed": True})


def _memory_mistakes(case: _Case, parts, own: list[int], full: list[int]) -> dict[str, object]:
    def kept(*others: list[int]) -> Callable[[object], bool]:
        """Whether a stage's own tensors are counted right, and this is what it keeps."""
        return any_of(*([a + b for a, b in zip(own, other)] for other in others))

    def plus(gradients: int) -> list[int]:
        return [have + gradients * _learning(part) for have, part in zip(full, parts)]

    def in_mode(training: bool) -> list[int]:
        with _modes_restored(case.layers):
            case.layers.train(training)
            return _kept(parts, case.inputs)

    right = _kept(parts, case.inputs)
    by_layer = [sum(_held(layer) + _learning(layer) for layer in part) for part in parts]
    everywhere = [_numbers(part, unit="bytes") + _held(part) for part in parts]
    outputs = [a + b for a, b in zip(right, _returned(parts, case.inputs))]
    gradients = any_of(*map(plus, (-1, 1, 2)), [a + b for a, b in zip(everywhere, right)])
    double = any(p.dtype == torch.float64 for p in case.layers.parameters())
    return {
        # of eight bytes, four more or fewer are not another number of gradients
        "gradients": False if double else gradients,
        "kept": kept([0] * len(parts), _kept_by_layer(parts, case.inputs), outputs),
        "over-the-cut": kept(
            _kept(parts, case.inputs, later=False), _kept(parts, case.inputs, first=True)
        ),
        "tied-twice": [a + b for a, b in zip(by_layer, right)],
        "mode-changed": kept(in_mode(True), in_mode(False)),
        "memory": lambda got: isinstance(got, list | tuple) and len(got) == len(parts),
    }


def _layer(width_in: int, width_out: int) -> nn.Sequential:
    """A layer whose first operation keeps its input for backward, if that needs a gradient."""
    return nn.Sequential(nn.GELU(), nn.Linear(width_in, width_out))


def _other_equal_layers(count: int, stages: int) -> list[Cuts]:
    """Equal layers by those who leave the rest to the last stage, round shares, or ask `cut`."""
    sizes, shares = (
        (count // stages, -(-count // stages)),
        [i * count / stages for i in range(1, stages)],
    )
    left = [[i * size for i in range(1, stages)] for size in sizes]
    rounded = [[by(share) for share in shares] for by in (round, math.floor)]
    return [*left, *rounded, best_cuts([1] * count, stages)]


def _case(draw, count: int, stages: int) -> _Case:
    """Layers for which the three strategies cut at different places."""
    torch.manual_seed(draw.seed())
    while True:
        widths = [draw.integer(3, 24) for _ in range(count + 1)]
        layers = nn.Sequential(*(_layer(a, b) for a, b in pairwise(widths)))
        seconds = [draw.integer(1, 99) / 1000 for _ in range(count)]
        case = _Case(layers, draw.tensor(draw.integer(2, 9), widths[0]), seconds, stages)
        equal, *others = case.cuts().values()
        mistakes = [cuts for cuts in _other_equal_layers(count, stages) if cuts != equal]
        if others[0] != others[1] and all(cuts not in others for cuts in [equal, *mistakes]):
            return case


def _even(draw) -> tuple[int, int]:
    """Numbers of layers and of stages that share them out equally."""
    return draw.choice([(6, 2), (8, 2), (6, 3), (9, 3), (12, 4)])


def _uneven(draw) -> tuple[int, int]:
    """Numbers of layers and of stages that do not: with `cut` for equal costs, with the rest in one
    stage and with shares rounded to the nearest, other cuts come out."""
    return draw.choice([(7, 3), (10, 3), (9, 4), (10, 4), (13, 4), (14, 4)])


def _frozen_case(draw) -> _Case:
    """Layers of which some are frozen, and for which that makes a difference."""
    while True:
        case = _case(draw, draw.integer(7, 9), 2)
        for layer in draw.sample(list(case.layers), 3):
            layer.requires_grad_(False)
        by_trainable = best_cuts(case.numbers(trainable=True), case.stages)
        if by_trainable != case.cuts()["equal parameters"]:
            return case


@comparing.requires("three rows, each with its strategy's cuts")
def three_rows_each_with_its_strategy_cuts(answer, draw):
    for count, stages in (_even(draw), _even(draw), _uneven(draw), _uneven(draw)):
        _case(draw, count, stages).table(answer)


@comparing.requires("the slowest stage and the idle share")
def the_slowest_stage_and_the_idle_share(answer, draw):
    for count, stages in (_even(draw), _uneven(draw)):
        _check_times(answer, _case(draw, count, stages))


@comparing.requires("the memory of every stage, to the byte")
def the_memory_of_every_stage(answer, draw):
    for count, stages in (_uneven(draw), _uneven(draw)):
        _check_memory(answer, _case(draw, count, stages))


@comparing.requires(
    "frozen layers, buffers, a tied layer; layers that keep the same tensor", needs_earlier=True
)
def frozen_layers_buffers_a_tied_layer_layers(answer, draw):
    with_frozen, with_buffers, with_tied = (
        _frozen_case(draw),
        *(_case(draw, draw.integer(6, 8), 2) for _ in range(2)),
    )
    _lengthen(with_buffers, lambda width: [nn.BatchNorm1d(width), nn.BatchNorm1d(width).eval()])
    _lengthen(with_tied, lambda width: [_layer(width, width)] * 2)
    with_frozen_prefix, with_relu = _case(draw, draw.integer(6, 8), 2), _relu_case(draw)
    for layer in with_frozen_prefix.layers[: max(c for [c] in with_frozen_prefix.cuts().values())]:
        layer.requires_grad_(False)
    for case in (with_frozen, with_buffers, with_tied, with_frozen_prefix, with_relu):
        _check_memory(answer, case)


def _relu_case(draw) -> _Case:
    """Layers of which every second one keeps its output, which the next one keeps as well."""
    case = _case(draw, 4, 2)
    layers = [part for layer in case.layers for part in (nn.ReLU(), layer[1])]
    return _Case(nn.Sequential(*layers), case.inputs, [0.001 * t for t in range(1, 9)], 2)


def _lengthen(case: _Case, make: Callable[[int], list[nn.Module]]) -> None:
    """Puts layers in front: what `make` returns for the width of the inputs."""
    first = make(case.inputs.shape[1])
    case.layers = nn.Sequential(*first, *case.layers)
    case.seconds = [0.001] * len(first) + case.seconds


@comparing.requires("token numbers as inputs, other dtypes, one stage", needs_earlier=True)
def token_numbers_as_inputs(answer, draw):
    torch.manual_seed(draw.seed())
    vocabulary, width, wider = draw.integer(5, 9), draw.integer(3, 8), draw.integer(9, 12)
    tokens = draw.integers(draw.integer(3, 6), 5, low=0, high=vocabulary - 1)
    layers = nn.Sequential(
        nn.Embedding(vocabulary, width),
        _layer(width, wider),
        *(_layer(wider, wider) for _ in range(draw.integer(0, 2))),
        _layer(wider, width),
        _layer(width, 2),
    )
    seconds = [draw.integer(1, 9) / 100 for _ in layers]
    for dtype in (torch.float32, torch.float64):
        for stages in (2, 1):
            case = _Case(layers.to(dtype), tokens, seconds, stages)
            _check_times(answer, case)
            _check_memory(answer, case)
