"""Exercise 4.5, `compare_cuts`: what it asks for, and how it is checked."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.authoring.compare import show
from course_exercises.chapters.ch04.shared import Cuts, best_cuts, equal_layers, loads_of
from course_utils.trace import kept_for_backward

comparing = Exercise(
    "4.5",
    "compare_cuts",
    points=3,
    minutes=40,
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
        "rows-missing": "The table has one row for each of the three strategies, under its name, and "
        "each row has the four entries of the docstring.",
        "remainder-last": "Equal layers: where the number does not divide, the first stages have one "
        "layer more each. Yours are all of one size but the last, which takes what is left.",
        "shares-rounded": "You round i * n / s. Then the longer stages stand anywhere; asked is that the "
        "first n % s stages have one layer more each.",
        "cut-of-ones": "Equal layers: `cut` looks at the slowest stage alone, so for equal costs it "
        "may leave one stage short. Asked are the cuts of `torch.tensor_split`: the first stages "
        "have one layer more each.",
        "ends-included": "The beginning and the end of the line are no cuts: the form of exercise 4.3 "
        "has stages - 1 indices.",
        "not-equal-layers": "With n layers in s stages, the first n % s stages have n // s + 1 layers "
        "and the others n // s. A cut is the index of the first layer behind it.",
        "not-what-cut-returns": "This row's cuts are what `cut` returns for the costs of its strategy: "
        "one cost for each layer, handed over as they are.",
        "seconds-otherwise": "Cut the list of seconds as the layers are cut, add up each piece, and "
        "take the largest sum.",
        "idle-otherwise": "In `stages * slowest` seconds all stages together work `sum(seconds)`. What "
        "is left, as a share of the first, is idle.",
        "bytes-otherwise": "Look at one stage alone: bytes of its parameters, of their gradients, of "
        "its buffers, and what it keeps for backward of the batch that arrives there.",
        "same-cuts": "Another strategy's cuts stand in this row.",
        "bytes-not-numbers": "You hand `cut` the bytes of the layers. Asked is by the number of "
        "parameters, `numel()`, whatever their dtype.",
        "rounded": "You round. Return the number as it is.",
        "training-mode": "You measure, or leave the layers, in training mode. A frozen BatchNorm is in "
        "evaluation mode and keeps less: leave each layer in its mode.",
        "trainable-only": "You count the parameters that learn. A frozen one is held and computed "
        "with like any other: count it too.",
        "sum-not-slowest": "The slowest stage is the largest sum, not the sum of all.",
        "mean-not-slowest": "The slowest stage is the largest, not the mean.",
        "index-not-seconds": "You say which stage is the slowest. Asked are its seconds.",
        "slowest-layer": "A stage's seconds are the sum over its layers; you look at single layers.",
        "costs-not-seconds": "The slowest stage is in seconds for each strategy, whatever the strategy "
        "balances.",
        "idle-one-batch": "1 - 1/stages is the idle share when one batch goes through alone. Here "
        "batches follow each other: a stage works its own seconds in every `slowest` seconds.",
        "one-number": "Asked is one number for the whole line, not one for each stage.",
        "idle-of-one-stage": "That is the idle share of the stage with the least work. Asked is that "
        "of all stages together.",
        "idle-not-share": "Idle is a share from 0 to 1, of the time of all stages.",
        "busy-not-idle": "That is the share of time in which stages work. Idle is the rest.",
        "gradients-forgotten": "A parameter that learns takes its bytes twice: once itself, once as "
        "its gradient.",
        "activations-forgotten": "What the forward pass keeps for backward is memory too: use "
        "`kept_for_backward`.",
        "inputs-not-handed-on": "A stage gets what the stage before it returns; the batch enters the "
        "first one only.",
        "report-not-bytes": "`kept` is a report, and `kept.bytes` is the number in it.",
        "optimizer-counted": "You count state of an optimizer. Plain SGD keeps none: parameters, "
        "gradients, buffers and what is kept for backward are all.",
        "outputs-counted": "You count what a stage returns once more. Where backward needs it, "
        "`kept_for_backward` has counted it.",
        "kept-by-layer": "Two layers of a stage may keep the same tensor, as ReLU its output and the next "
        "layer its input. It is there once: run the whole stage inside one `kept_for_backward`.",
        "evaluation-mode": "You measure, or leave the layers, in evaluation mode. A training step is "
        "meant, in which BatchNorm and dropout keep more: leave the mode as it is.",
        "input-needs-gradient": "What arrives over a cut has to require a gradient. Without, "
        "the first operations of a stage keep nothing, and you count too little.",
        "first-input-leaf": "The batch that enters the first layer needs no gradient: only what comes "
        "over a cut does.",
        "list-of-stages": "Asked is a list with the bytes of each stage.",
        "whole-model": "That is the memory of the whole model: each stage holds its part.",
        "frozen-gradient": "A frozen parameter has no gradient.",
        "buffers-forgotten": "Buffers, such as BatchNorm's running mean, are held too.",
        "four-bytes": "Not every element has four bytes: ask the tensor, `nbytes`.",
        "tied-twice": "A parameter that a stage uses twice is held once. `stage.parameters()` yields "
        "it once, a walk over the layers twice.",
    },
    failures={
        "floating point": "first-input-leaf",
        "mat1 and mat2": "inputs-not-handed-on",
        "'Kept'": "report-not-bytes",
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
        numbers = [_numbers(layer) for layer in self.layers]
        return {
            "equal layers": equal_layers(self.seconds, self.stages),
            "equal parameters": best_cuts(numbers, self.stages),
            "profiled time": best_cuts(self.seconds, self.stages),
        }

    def parts(self, cuts: Cuts) -> list[nn.Sequential]:
        return [self.layers[a:b] for a, b in pairwise([0, *cuts, len(self.layers)])]

    def table(self, answer) -> dict[str, dict]:
        """The answer's table; Wrong where its form is not the one that is asked for, or where a
        strategy's cuts do not come from `cut`."""
        asked: list[list[float]] = []

        def cut(costs: list[float], stages: int) -> Cuts:
            asked.append(list(costs))
            return best_cuts(costs, stages)

        table = answer(self.layers, self.inputs, list(self.seconds), self.stages, cut)
        expect_type(table, dict)
        self._must_have_asked(asked)
        likely = {"rows-missing": True}
        expect(set(table), set(STRATEGIES), what="the rows", likely=likely)
        for name, row in table.items():
            expect_type(row, dict)
            keys = {"cuts", "memory", "slowest", "idle"}
            expect(set(row), keys, what=f"the entries of {name!r}", likely=likely)
        return table

    def _must_have_asked(self, asked: list[list[float]]) -> None:
        numbers, learning, bytes_ = (
            [_numbers(layer, **how) for layer in self.layers]
            for how in ({}, {"trainable": True}, {"unit": "bytes"})
        )
        if numbers not in asked:
            mistakes = {"trainable-only": learning, "bytes-not-numbers": bytes_}
            slugs = [slug for slug, costs in mistakes.items() if costs in asked]
            got = "not among what it was asked"
            slug = slugs[0] if slugs else "not-what-cut-returns"
            raise Wrong(slug, expected=f"cut({show(numbers)}, ...)", got=got)
        if not any(same(costs, list(self.seconds)) for costs in asked):
            expected = "cut(seconds, ...)"
            raise Wrong("not-what-cut-returns", expected=expected, got="not asked")


def _numbers(layer: nn.Module, trainable: bool = False, unit: str = "numel") -> int:
    counted = [p for p in layer.parameters() if p.requires_grad or not trainable]
    return sum(p.numel() if unit == "numel" else p.nbytes for p in counted)


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
    result = []
    for number, part in enumerate(parts):
        inputs = inputs.detach().requires_grad_(number > 0 and inputs.is_floating_point())
        total = 0
        for layer in part:
            with kept_for_backward(layer) as kept:
                inputs = layer(inputs)
            total += kept.bytes
        result.append(total)
    return result


def _in_mode(case: _Case, training: bool, measure: Callable[[], list[int]]) -> list[int]:
    """What is measured while all layers are in training or in evaluation mode."""
    modes = {module: module.training for module in case.layers.modules()}
    case.layers.train(training)
    try:
        return measure()
    finally:
        for module, mode in modes.items():
            module.training = mode


def _returned(parts: list[nn.Sequential], inputs: Tensor) -> list[int]:
    """The bytes that each stage returns."""
    outputs = list(accumulate(parts, lambda arriving, part: part(arriving), initial=inputs))
    return [tensor.nbytes for tensor in outputs[1:]]


def _held(part: nn.Sequential) -> dict[str, int]:
    """The bytes of a stage's tensors, by kind."""
    return {
        "parameters": _numbers(part, unit="bytes"),
        "gradients": _numbers(part, trainable=True, unit="bytes"),
        "buffers": sum(buffer.nbytes for buffer in part.buffers()),
    }


def _any_of(*values: object) -> Callable[[object], bool]:
    return lambda got: any(same(got, value) for value in values)


def _is_listed(got: object) -> bool:
    return isinstance(got, list | tuple)


def _remainder_left(case: _Case) -> list[Cuts]:
    """Equal layers by those who leave the rest to the last stage, rounding down or up."""
    count, stages = len(case.layers), case.stages
    return [[i * size for i in range(1, stages)] for size in (count // stages, -(-count // stages))]


def _shares_rounded(case: _Case) -> list[Cuts]:
    """Equal layers by those who round i * n / s, to the nearest or down."""
    shares = [i * len(case.layers) / case.stages for i in range(1, case.stages)]
    return [[rounded(share) for share in shares] for rounded in (round, math.floor)]


def _cuts_of_ones(case: _Case) -> Cuts:
    """Equal layers by those who give `cut` the same cost for each."""
    return best_cuts([1] * len(case.layers), case.stages)


def _cuts_by_trainable(case: _Case) -> Cuts:
    return best_cuts([_numbers(layer, trainable=True) for layer in case.layers], case.stages)


def _checked_cuts(answer, case: _Case) -> dict[str, dict]:
    """The answer's table, whose cuts are right: what else stands in a row depends on them."""
    table, expected = case.table(answer), case.cuts()
    likely = {
        "equal layers": {
            "remainder-last": _any_of(*_remainder_left(case)),
            "shares-rounded": _any_of(*_shares_rounded(case)),
            "cut-of-ones": _cuts_of_ones(case),
        },
        "equal parameters": {"trainable-only": _cuts_by_trainable(case)},
        "profiled time": {},
    }
    for name in STRATEGIES:
        others = {
            "same-cuts": _any_of(*expected.values()),
            "ends-included": [0, *expected[name], len(case.layers)],
            "not-equal-layers": name == "equal layers",
            "not-what-cut-returns": True,
        }
        what = f"the cuts of {name!r}"
        expect(table[name]["cuts"], expected[name], what=what, likely={**likely[name], **others})
    return table


def _check_times(answer, case: _Case) -> None:
    table, total = _checked_cuts(answer, case), sum(case.seconds)
    numbers, ones = [_numbers(layer) for layer in case.layers], [1] * len(case.layers)
    slowest_stages = {}
    for name, cuts in case.cuts().items():
        loads = loads_of(case.seconds, cuts)
        slowest_stages[name] = loads.index(max(loads))
    by_index = all(table[name]["slowest"] == stage for name, stage in slowest_stages.items())
    for name, cuts in case.cuts().items():
        loads = loads_of(case.seconds, cuts)
        slowest = max(loads)
        likely = {
            "one-number": _is_listed,
            "index-not-seconds": by_index,
            "sum-not-slowest": total,
            "mean-not-slowest": total / case.stages,
            "slowest-layer": max(case.seconds),
            "costs-not-seconds": _any_of(max(loads_of(numbers, cuts)), max(loads_of(ones, cuts))),
            "seconds-otherwise": True,
        }
        expect(table[name]["slowest"], slowest, what=f"slowest of {name!r}", likely=likely)
        busy = total / (case.stages * slowest)
        free = case.stages * slowest - total
        likely = {
            "one-number": _is_listed,
            "idle-one-batch": 1 - 1 / case.stages,
            "busy-not-idle": busy,
            "idle-of-one-stage": 1 - min(loads) / slowest,
            "idle-not-share": _any_of(free, free / case.stages, 100 * (1 - busy)),
            "rounded": _any_of(*(round(1 - busy, digits) for digits in range(1, 5))),
            "idle-otherwise": True,
        }
        expect(table[name]["idle"], 1 - busy, what=f"idle of {name!r}", likely=likely)


def _check_memory(answer, case: _Case) -> None:
    modes = {module: module.training for module in case.layers.modules()}
    table = _checked_cuts(answer, case)
    now = [module.training for module in modes]
    for module, mode in modes.items():
        module.training = mode
    for name, cuts in case.cuts().items():
        parts = case.parts(cuts)
        held, kept = [_held(part) for part in parts], _kept(parts, case.inputs)
        full = [sum(kinds.values()) + keeps for kinds, keeps in zip(held, kept)]
        likely = _memory_mistakes(case, parts, full, kept)
        expect(table[name]["memory"], full, each="stage", what=f"memory of {name!r}", likely=likely)
    before = list(modes.values())
    likely = {"evaluation-mode": sum(now) < sum(before), "training-mode": True}
    expect(now, before, what="training", likely=likely)


def _memory_mistakes(case, parts, full: list[int], kept: list[int]) -> dict[str, object]:
    held = [_held(part) for part in parts]

    def without(kind: str) -> list[int]:
        return [bytes_ - kinds[kind] for bytes_, kinds in zip(full, held)]

    def instead(**feeding: bool) -> list[int]:
        other = _kept(parts, case.inputs, **feeding)
        return [bytes_ - keeps + o for bytes_, keeps, o in zip(full, kept, other)]

    def instead_of_none(copies: int) -> list[int]:
        return [bytes_ + copies * kinds["gradients"] for bytes_, kinds in zip(full, held)]

    one_by_one = [
        sum(sum(_held(layer).values()) for layer in part) + keeps
        for part, keeps in zip(parts, kept)
    ]
    everywhere = [2 * h["parameters"] + h["buffers"] + keeps for h, keeps in zip(held, kept)]
    elements = [
        4
        * (_numbers(part) + _numbers(part, trainable=True) + sum(b.numel() for b in part.buffers()))
        + keeps
        for part, keeps in zip(parts, kept)
    ]
    kept_by_layer = [
        bytes_ - keeps + by_layer
        for bytes_, keeps, by_layer in zip(full, kept, _kept_by_layer(parts, case.inputs))
    ]
    mistakes = {
        "list-of-stages": lambda got: not _is_listed(got),
        "four-bytes": elements,
        "kept-by-layer": kept_by_layer,
        "gradients-forgotten": without("gradients"),
        "activations-forgotten": [bytes_ - keeps for bytes_, keeps in zip(full, kept)],
        "optimizer-counted": _any_of(instead_of_none(1), instead_of_none(2)),
        "outputs-counted": [bytes_ + n for bytes_, n in zip(full, _returned(parts, case.inputs))],
        "input-needs-gradient": instead(later=False),
        "first-input-leaf": instead(first=True),
        "whole-model": lambda got: len(parts) > 1 and len(set(got)) == 1,
        "frozen-gradient": everywhere,
        "buffers-forgotten": without("buffers"),
        "tied-twice": one_by_one,
        "evaluation-mode": _in_mode(case, False, instead),
        "training-mode": _in_mode(case, True, instead),
        "bytes-otherwise": True,
    }
    return {slug: value for slug, value in mistakes.items() if value != full}


def _layer(width_in: int, width_out: int) -> nn.Sequential:
    """A layer whose first operation keeps its input for backward, if that needs a gradient."""
    return nn.Sequential(nn.GELU(), nn.Linear(width_in, width_out))


def _case(draw, count: int, stages: int) -> _Case:
    """Layers for which the three strategies cut at different places."""
    torch.manual_seed(draw.seed())
    while True:
        widths = [draw.integer(3, 24) for _ in range(count + 1)]
        layers = nn.Sequential(*(_layer(a, b) for a, b in pairwise(widths)))
        seconds = [draw.integer(1, 99) / 1000 for _ in range(count)]
        case = _Case(layers, draw.tensor(draw.integer(2, 9), widths[0]), seconds, stages)
        equal, *others = case.cuts().values()
        mistakes = [*_remainder_left(case), *_shares_rounded(case), _cuts_of_ones(case)]
        mistakes = [cuts for cuts in mistakes if cuts != equal]
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
        if _cuts_by_trainable(case) != case.cuts()["equal parameters"]:
            return case


@comparing.requires("three rows, each with its strategy's cuts")
def three_rows_each_with_its_strategy_cuts(answer, draw):
    for count, stages in (_even(draw), _even(draw), _uneven(draw), _uneven(draw)):
        _checked_cuts(answer, _case(draw, count, stages))


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
