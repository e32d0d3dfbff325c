"""What the exercises of chapter 12 share."""

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import course_planner as estimate
from course_exercises.authoring import Wrong, expect_type, same
from course_exercises.authoring.compare import show
from course_exercises.authoring.forbidden import called
from course_planner import Call, Hardware, Layout, Model

FORBIDDEN = [f for f in vars(estimate).values() if inspect.isfunction(f)]
USES_ESTIMATE = (
    "You call `course_planner`, which this exercise is about. `Model`, `Layout` and `Hardware` are there to "
    "be read; the arithmetic is yours."
)
OTHER_UNIT = "You return GB or GiB. Return bytes: divide by 1e9 only where something is printed."


def own(answer: Callable, *arguments):
    """What the answer returns; Wrong where it asks `course_planner`."""
    with called(*FORBIDDEN) as names:
        got = answer(*copy.deepcopy(arguments))  # what is expected is computed of these afterwards
    if names:
        raise Wrong("uses-estimate", expected="your own arithmetic", got=f"estimate.{names[0]}")
    return got


def check_keys(got, keys: tuple[str, ...]) -> None:
    if got is not None and (not isinstance(got, dict) or set(got) != set(keys)):
        expected = f"a dict with the keys {', '.join(keys)}"
        raise Wrong("not-the-dict", expected=expected, got=show(got))
    expect_type(got, dict)


def in_other_units(right: float) -> list[float]:
    return [right / 1e9, right / 2**30] if right > 1e6 else []


def among(slips: Mapping[str, Sequence[float]]) -> dict[str, Callable[[float], bool]]:
    """For `expect`: the values that each mistake may give."""
    return {
        slug: lambda got, values=values: any(same(got, value) for value in values)
        for slug, values in slips.items()
    }


def drawn(model: Model, layout: Layout, seq: int, stage: int) -> str:
    """What an answer was called with, as one computes with it."""
    tied = "tied" if model.tied else "not tied"
    sizes = f"{model.layers} layers, W {model.width}, {model.heads} heads, V {model.vocab} ({tied})"
    return f"{sizes}; {estimate.described(layout)}; {seq} tokens; stage {stage}"


def _model(draw, layers: int, heads: int, **more) -> Model:
    """A plain transformer, of a size at which no two mistakes give the same bytes."""
    width = heads * 8 * draw.integer(12, 20)
    vocab = 1000 * draw.integer(29, 61) + 24
    return Model(layers, width, heads, vocab, **more)


STATES = {"parameters": (2, 3), "gradients": (2, 2), "optimizer": (12, 1)}  # bytes, ZeRO from


def _tables(model: Model, layout: Layout, stage: int) -> int:
    """The tables of V x W on a stage."""
    both_here = layout.pp == 1 and model.tied
    return (stage == 0) + (stage == layout.pp - 1 and not both_here)


def matrices(
    model: Model,
    layout: Layout,
    stage: int,
    pp: int | None = None,
    tp: int | None = None,
    squares: int = 12,
    tables: Callable = _tables,
    tables_tp: int | None = None,
) -> float:
    """The parameters of a rank before ZeRO."""
    tp, pp = tp or layout.tp, pp or layout.pp
    layers = model.layers / pp * squares * model.width**2 / tp
    return layers + tables(model, layout, stage) * model.vocab * model.width / (tables_tp or tp)


def in_flight(layout: Layout, stage: int) -> int:
    return min(layout.micro_batches, layout.pp - stage)


def kept(model: Model, layout: Layout, seq: int, recompute: str | None = None) -> float:
    """What one layer keeps of one micro-batch."""
    recompute = recompute or layout.recompute
    tokens = seq * layout.micro_batch * model.width
    if recompute == "full":
        return 2 * tokens
    scores = 5 * model.heads * seq / model.width if recompute == "none" else 0
    return tokens * (34 + scores) / layout.tp


def held(model: Model, layout: Layout, seq: int, stage: int) -> dict[str, float]:
    count = matrices(model, layout, stage)
    held = {}
    for kind, (size, from_stage) in STATES.items():
        held[kind] = size * count / (layout.dp if layout.zero >= from_stage else 1)
    layers = model.layers // layout.pp
    held["activations"] = kept(model, layout, seq) * layers * in_flight(layout, stage)
    return held


def _layout(draw, **more) -> Layout:
    """More micro-batches than stages, and sizes whose quotients tell two mistakes apart."""
    sizes = {"tp": [4, 8], "pp": [6, 7], "dp": [11, 13], "micro_batch": [9, 15]}
    drawn = {name: draw.choice(options) for name, options in sizes.items()}
    return Layout(**{**drawn, "micro_batches": draw.choice([17, 19, 23]), **more})


def case(draw, tied: bool = True, **more) -> tuple[Model, Layout, int]:
    layout = _layout(draw, **more)
    model = _model(draw, layout.pp * draw.choice([7, 10]), 8 * draw.integer(2, 3), tied=tied)
    return model, layout, 512 * draw.integer(3, 7)


def inner_stage(draw, layout: Layout) -> int:
    """One that keeps another number of micro-batches than its mirror image, and more than two."""
    return draw.choice([1, layout.pp - 3])


GROUPS = ("tp", "pp", "dp")


PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def inside(layout: Layout, group: str, node: int, order: tuple[str, ...] | None = None) -> bool:
    order = order or layout.order
    further_in = order[: order.index(group)]
    return math.prod(getattr(layout, name) for name in further_in) * getattr(layout, group) <= node


def sent(op: str, n: int, calls: int, payload: float) -> int:
    """What a rank sends for all of these calls, as `Call.sent` has it."""
    share = PASSES[op] * (n - 1) / n if op in PASSES else 1
    return round(calls * share * payload)


def _call_seconds(
    call: Call,
    layout: Layout,
    hardware: Hardware,
    inside: Callable = inside,
    latency: Callable[[int, int], int] = lambda n, passes: (n - 1) * passes,
    factor: Callable[[int, int], float] = lambda n, passes: passes * (n - 1) / n,
    send: Callable = lambda latency, seconds: latency + seconds,
    count: Callable[[Call], int] = lambda call: call.calls,
) -> float:
    near = inside(layout, call.group, hardware.node)
    speed = hardware.intra_bandwidth if near else hardware.inter_bandwidth
    alpha = hardware.intra_latency if near else hardware.inter_latency
    n, seconds = getattr(layout, call.group), call.payload / speed
    if call.op == "send":
        return count(call) * send(alpha, seconds)
    passes = PASSES[call.op]
    return count(call) * (latency(n, passes) * alpha + factor(n, passes) * seconds)


def _roofline(kernels, hardware: Hardware) -> float:
    return sum(max(f / hardware.peak, b / hardware.hbm_bandwidth) for f, b in kernels)


def _together(computing: float, in_the_way: float, beside: float, bubble: float) -> float:
    return max((computing + in_the_way) / (1 - bubble), beside)


@dataclass(frozen=True)
class Step:
    """What the time of a step is made of."""

    kernels: list[tuple[float, float]]
    calls: list[Call]
    layout: Layout
    bubble: float
    hardware: Hardware

    def arguments(self) -> tuple:
        return list(self.kernels), list(self.calls), self.layout, self.bubble, self.hardware

    def drawn(self) -> str:
        """These, as one computes with them, without what this step has none of."""
        hw = self.hardware
        kernels = ", ".join(f"{flops:g}/{moved:g}" for flops, moved in self.kernels)
        parts = [f"kernels of FLOPs/bytes {kernels}", f"peak {hw.peak:g}, {hw.hbm_bandwidth:g} B/s"]
        if self.calls:
            sizes = ((name, getattr(self.layout, name)) for name in self.layout.order)
            groups = " x ".join(f"{name} {size}" for name, size in sizes if size > 1)
            parts.append(f"{groups}, from inside")
            parts += [f"{c.group} {c.op} {c.calls} x {c.payload:g} B" for c in self.calls]
            inside = f"{hw.intra_bandwidth:g} B/s + {hw.intra_latency:g} s"
            between = f"{hw.inter_bandwidth:g} B/s + {hw.inter_latency:g} s"
            parts.append(f"nodes of {hw.node}, {inside}; between {between}")
        return "; ".join(parts + [f"bubble {self.bubble:g}"] * (self.bubble > 0))

    def seconds(self, computing=_roofline, together=_together, **slip) -> float:
        """Rightly, or with a slip."""
        times = {True: 0.0, False: 0.0}
        for call in self.calls:
            times[call.group == "dp"] += _call_seconds(call, self.layout, self.hardware, **slip)
        own = computing(self.kernels, self.hardware)
        return together(own, times[False], times[True], self.bubble)
