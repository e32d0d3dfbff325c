"""Exercise 12.4, `search`: what it asks for, and how it is checked."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from course_exercises.authoring import Exercise, Wrong, expect_type
from course_exercises.authoring.compare import show
from course_exercises.chapters.ch12.shared import Step, held, own
from course_planner import Call, Hardware, Layout, Model

searching = Exercise(
    "12.4",
    "search",
    points=4,
    minutes=45,
    kind="stretch",
    parameters=("model", "gpus", "batch", "seq", "hardware", "judge"),
    at_home=True,  # it is handed a function
    hints=[
        (
            "There are only a few thousand layouts of some hundred GPUs. Nobody needs to be clever: write loops, throw out what "
            "is not legal, ask the judge about the rest, and keep the fastest."
        ),
        (
            "tp runs over the divisors of the heads, pp over those of the layers, both over what divides the GPUs; dp is what is "
            "left. It has to divide the batch, and the micro-batch what remains of it. Do not forget the three kinds of "
            "recomputation and ZeRO's four stages."
        ),
        (
            "Nested loops over tp, pp, micro_batch, zero and recompute; dp = gpus / (tp pp) and micro_batches = batch / "
            "(dp micro_batch), where these divide. Layouts whose bytes are more than hbm_bytes are out. `min` by "
            "seconds, and a ValueError if nothing is left."
        ),
    ],
    misconceptions={
        "uses-estimate": "You let `course_planner` decide. `Layout(...)` may be made; what is legal, you decide yourself.",
        "no-layout": "Return a `Layout`, and nothing else.",
        "illegal": "This layout is not legal, and the judge does not look at that. Leave out every layout that breaks this "
        "rule before you ask the judge.",
        "does-not-fit": "This layout needs more memory than a GPU has. Leave out what needs more than `hbm_bytes`.",
        "at-most": "You raise a ValueError where a layout needs exactly what a GPU has, and with a byte more you find one. At "
        "most `hbm_bytes` fits: `<=`.",
        "other-aim": "You choose by something else than the seconds: by memory, by the number of data-parallel ranks, or the "
        "slowest. Return the fastest of the layouts that are legal and fit.",
        "tries-too-few": "Your search leaves layouts out: there is a faster one beside those that you try. Go through all divisors "
        "for tp, pp and micro_batch, from 1 to the whole number, not powers of two alone; through ZeRO 0 to 3, and through "
        "all three kinds of recomputation.",
        "slow": "This layout is legal and fits, and another one is more than 10 % faster. Go through all legal layouts, and "
        "take the one with the fewest seconds.",
        "no-error": "You do not say that nothing fits, so whoever asked finds out later, somewhere else. Raise a ValueError on "
        "purpose, with a sentence that names the GPUs and says that no layout is legal and fits.",
        "gives-up": "You raise a ValueError, and there are legal layouts that fit. Look at what this requirement needs, and "
        "leave nothing out: full recomputation, ZeRO 3 without stages and ZeRO 2 behind them, sizes that are no powers of "
        "two, and tensor groups of several nodes or of all GPUs.",
    },
    failures={"ValueError": "gives-up"},
)
REGRET = 0.10
_HURTS, _HARMLESS = 1.3 * REGRET, 0.7 * REGRET  # more than that and less, with something to spare


@dataclass(frozen=True)
class _Order:
    """A model to be trained on a cluster."""

    model: Model
    gpus: int
    batch: int
    seq: int
    hardware: Hardware

    def __str__(self) -> str:
        model = f"{self.model.layers} layers, {self.model.heads} heads"
        return f"{self.gpus} GPUs, {self.batch} sequences of {self.seq}, {model}"

    def judge(self, layout: Layout) -> tuple[float, float]:
        """Bytes of the fullest rank, and seconds of a step; also of a layout that cannot be."""
        return _bytes_of(self.model, layout, self.seq), self._seconds(layout)

    def _seconds(self, layout: Layout) -> float:
        model, m = self.model, layout.micro_batches
        tokens = self.seq * layout.micro_batch
        matrices = 12 * model.width**2
        again = 4 if layout.recompute == "full" else 3
        scores = 4 * self.seq * model.width * (again + (layout.recompute == "selective"))
        flops = tokens * (2 * again * matrices + scores) / layout.tp
        moved = 2 * again * (matrices + 20 * tokens * model.width) / layout.tp
        layers = model.layers / layout.pp
        kernels = [(m * layers * flops, m * layers * moved)]
        hardware = self.hardware
        bubble = (layout.pp - 1) / (m + layout.pp - 1)
        return Step(kernels, self._calls(layout), layout, bubble, hardware).seconds()

    def _calls(self, layout: Layout) -> list[Call]:
        model, m, layers = self.model, layout.micro_batches, self.model.layers / layout.pp
        hidden = 2 * self.seq * layout.micro_batch * model.width
        passes = 3 if layout.recompute == "full" else 2
        size = 2 * layers * 12 * model.width**2 / layout.tp
        calls = [Call("tp", "all_gather", round(4 * layers * m * passes), hidden, 0, "step")]
        if layout.pp > 1:
            calls.append(Call("pp", "send", 2 * m, hidden / layout.tp, 0, "step"))
        if layout.zero == 3:
            gathers = Call("dp", "all_gather", round(2 * layers * m), size / layers, 0, "step")
            return [*calls, gathers, Call("dp", "reduce_scatter", 1, size, 0, "step")]
        return [*calls, Call("dp", "all_reduce", 1, size, 0, "step")]

    def legal(self) -> Iterator[Layout]:
        """Every layout that may be chosen, whether it fits or not."""
        for tp, pp in itertools.product(_divisors(self.gpus), _divisors(self.model.layers)):
            if self.gpus % (tp * pp) or self.model.heads % tp or self.seq % tp:
                continue
            dp = self.gpus // (tp * pp)
            for b in _divisors(self.batch // dp) if self.batch % dp == 0 else ():
                more = {"dp": dp, "tp": tp, "pp": pp, "micro_batch": b}
                more["micro_batches"] = self.batch // (dp * b)
                for zero, recompute in itertools.product(range(4 if pp == 1 else 3), RECOMPUTE):
                    yield Layout(**more, zero=zero, recompute=recompute)

    def fitting(self) -> list[tuple[float, float, Layout]]:
        """The bytes, the seconds and the layouts that fit, the fastest first."""
        judged = [(*self.judge(layout), layout) for layout in self.legal()]
        return sorted(
            (each for each in judged if each[0] <= self.hardware.hbm_bytes), key=lambda e: e[1]
        )


RECOMPUTE = ("none", "selective", "full")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _bytes_of(model: Model, layout: Layout, seq: int) -> float:
    """Of the fullest rank, which is on the first stage or the last."""
    return max(sum(held(model, layout, seq, s).values()) for s in {0, layout.pp - 1})


def _powers(layout: Layout) -> bool:
    sizes = layout.dp, layout.tp, layout.pp, layout.micro_batch
    return all(size & (size - 1) == 0 for size in sizes)


# What a search may have kept to: it finds the fastest of the layouts that are so.
RESTRICTED: dict[str, Callable[[Layout], bool]] = {
    "zero 0": lambda layout: layout.zero == 0,
    "recompute none": lambda layout: layout.recompute == "none",
    "recompute none or full": lambda layout: layout.recompute != "selective",
    "recompute none or selective": lambda layout: layout.recompute != "full",
    "recompute full": lambda layout: layout.recompute == "full",
    "recompute selective": lambda layout: layout.recompute == "selective",
    "zero 3": lambda layout: layout.zero == 3,
    "zero up to 2": lambda layout: layout.zero < 3,
    "pp 1": lambda layout: layout.pp == 1,
    "tp 1": lambda layout: layout.tp == 1,
    "dp 1": lambda layout: layout.dp == 1,
    "micro_batch 1": lambda layout: layout.micro_batch == 1,
    "powers of two": _powers,
    "dp from 2 on": lambda layout: layout.dp > 1,
    "tp less than all GPUs": lambda layout: layout.tp < layout.gpus,
    "zero up to 1 behind stages": lambda layout: layout.zero < 2 or layout.pp == 1,
}
LEFT_OUT = (
    "zero 0",
    "recompute none",
    "recompute none or full",
    "pp 1",
    "tp 1",
    "micro_batch 1",
    "powers of two",
)
# What a search may have minimised instead of the seconds: of (bytes, seconds, layout)
AIMED: dict[str, Callable[[tuple], object]] = {
    "the least memory": lambda each: each[0],
    "the most data-parallel ranks": lambda each: (-each[2].dp, each[1]),
    "the most seconds": lambda each: -each[1],
}


def _best_of(fitting: list[tuple], mistake: str) -> float:
    """The seconds of what a search finds that makes this mistake; infinite where it finds nothing."""
    if mistake in AIMED:
        return min(fitting, key=lambda each: (AIMED[mistake](each), each[1]))[1]
    return next(
        (seconds for _, seconds, layout in fitting if RESTRICTED[mistake](layout)), math.inf
    )


def _regret(fitting: list[tuple], mistake: str) -> float:
    """By what share a search with this mistake is slower than the best."""
    return _best_of(fitting, mistake) / fitting[0][1] - 1


def _choices(fitting: list[tuple], mistake: str) -> list[tuple]:
    """What a search with this mistake may choose; several where they are equally good to it."""
    if mistake in AIMED:
        best = min(map(AIMED[mistake], fitting))
        return [each for each in fitting if AIMED[mistake](each) <= best]
    best = _best_of(fitting, mistake)
    return [
        each
        for each in fitting
        if RESTRICTED[mistake](each[2]) and math.isclose(each[1], best, rel_tol=1e-9)
    ]


RULES: dict[str, Callable[[_Order, Layout], bool]] = {
    "dp tp pp = gpus": lambda order, layout: layout.gpus == order.gpus,
    "dp micro_batch micro_batches = batch": lambda order, layout: layout.sequences() == order.batch,
    "the rest of Layout as it is": lambda order, layout: _chosen_part(layout) == layout,
    "tp divides the heads": lambda order, layout: order.model.heads % layout.tp == 0,
    "tp divides the sequence": lambda order, layout: order.seq % layout.tp == 0,
    "pp divides the layers": lambda order, layout: order.model.layers % layout.pp == 0,
    "zero 3 with pp = 1 only": lambda order, layout: layout.zero < 3 or layout.pp == 1,
}


def _chosen_part(layout: Layout) -> Layout:
    names = "dp", "tp", "pp", "zero", "recompute", "micro_batch", "micro_batches"
    return Layout(**{name: getattr(layout, name) for name in names})


def _broken_rule(order: _Order, layout: Layout) -> str | None:
    """The first rule that a layout breaks, if any: then it is no answer at all."""
    return next((rule for rule, kept in RULES.items() if not kept(order, layout)), None)


def _chosen(answer, order: _Order):
    return answer(order.model, order.gpus, order.batch, order.seq, order.hardware, order.judge)


def _check_choice(answer, order: _Order, *suspects: str) -> None:
    """`suspects`: the mistakes that this order is made for; they are looked for first."""
    fitting = order.fitting()
    got = _chosen(answer, order)
    expect_type(got, Layout, likely=None if got is None else "no-layout")
    if rule := _broken_rule(order, got):
        raise Wrong("illegal", expected=f"{rule}, with {order}", got=_described(got))
    held, seconds = order.judge(got)
    if held > order.hardware.hbm_bytes:
        limit = f"at most {order.hardware.hbm_bytes / 1e9:.0f} GB"
        raise Wrong("does-not-fit", expected=limit, got=f"{held / 1e9:.1f} GB: {_described(got)}")
    best = fitting[0][1]
    if seconds <= (1 + REGRET) * best:
        return
    chosen = held, seconds, got
    found = (s for s in (*suspects, *AIMED, *RESTRICTED) if chosen in _choices(fitting, s))
    slug, remark = "slow", ""
    if mistake := next(found, None):
        slug = "other-aim" if mistake in AIMED else "tries-too-few"
        remark = f": {'that' if mistake in AIMED else 'the fastest'} with {mistake}"
    raise Wrong(
        slug,
        expected=f"at most {100 * REGRET:.0f} % more than {best:.4g} s, with {order}",
        got=f"{seconds:.4g} s, {_described(got)}{remark}",
    )


def _described(layout: Layout) -> str:
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "tp", "pp", "zero"))
    return f"{sizes}, {layout.micro_batches} x {layout.micro_batch}, recompute {layout.recompute}"


def _order(draw, **fixed) -> _Order:
    """Any model on any cluster; `fixed` says what a requirement is about."""

    def chosen(name: str, options: list):
        return draw.choice(fixed.get(name, options))

    heads = chosen("heads", [8, 12, 16, 24, 32])
    model = Model(
        chosen("layers", [14, 16, 18, 20, 28]), heads * 128, heads, chosen("vocab", [32000])
    )
    gpus, node = chosen("gpus", [16, 32]), chosen("node", [4, 8])
    hardware = Hardware(
        peak=draw.integer(200, 400) * 1e12,
        hbm_bytes=chosen("memory", [16, 24, 40, 80]) * 10**9,
        hbm_bandwidth=draw.integer(15, 30) * 1e11,
        node=node,
        intra_bandwidth=draw.integer(150, 350) * 1e9,
        intra_latency=5e-6,
        inter_bandwidth=chosen("between", [5, 10, 20, 40]) * 1e9,
        inter_latency=15e-6,
    )
    batch = round(gpus * chosen("batch", [1, 2, 4]))
    return _Order(model, gpus, batch, chosen("seq", [1024, 2048, 4096]), hardware)


def _order_where(draw, holds: Callable[[_Order, list[tuple]], bool], **fixed) -> _Order:
    """One for which `holds(order, fitting)` is true. The rarest of those asked for comes once in 75
    draws, of which each is quick; nobody's answer shall be refused for bad luck."""
    for _ in range(10_000):
        order = _order(draw, **fixed)
        fitting = order.fitting()
        if fitting and holds(order, fitting):
            return order
    raise RuntimeError(f"no order of {fixed} does")  # a defect of the check


def _hurting(*mistakes: str, only: bool = True) -> Callable[[_Order, list[tuple]], bool]:
    """Where each of these mistakes costs more than may be regretted, with something to spare, and what
    else a search may leave out costs less; `only` says whether that matters."""

    def holds(order: _Order, fitting: list[tuple]) -> bool:
        regrets = {mistake: _regret(fitting, mistake) for mistake in (*RESTRICTED, *AIMED)}
        others = [mistake for mistake in LEFT_OUT if mistake not in mistakes] if only else []
        return all(_HURTS < regrets[mistake] < math.inf for mistake in mistakes) and all(
            regrets[mistake] < _HARMLESS for mistake in others
        )

    return holds


def _needing(mistake: str) -> Callable[[_Order, list[tuple]], bool]:
    """Where this mistake costs more than may be regretted, or finds nothing."""
    return lambda order, fitting: _regret(fitting, mistake) > _HURTS


def _only_full(order: _Order, fitting: list[tuple]) -> bool:
    """Where no other recomputation will do, and neither stages nor ZeRO 2 behind them are needed too."""
    others = "zero up to 1 behind stages", "pp 1"
    return _needing("recompute none or selective")(order, fitting) and all(
        _regret(fitting, mistake) < _HARMLESS for mistake in others
    )


def _over_nodes(order: _Order, fitting: list[tuple]) -> bool:
    """Where a tensor group has to leave its node, and need not be that of all GPUs."""
    alone = all(layout.tp > order.hardware.node for *_, layout in fitting)
    return alone and _regret(fitting, "tp less than all GPUs") < _HARMLESS


def _without(rule: str) -> Callable[[_Order, list[tuple]], bool]:
    """Where a search that forgets one rule of what is legal finds something faster."""
    return lambda order, fitting: _fastest_without(order, rule) < fitting[0][1]


def _fastest_without(order: _Order, rule: str) -> float:
    best = math.inf
    for tp, pp in itertools.product(_divisors(order.gpus), range(1, order.model.layers + 1)):
        dp = order.gpus // (tp * pp)
        if order.gpus % (tp * pp) or order.batch < dp:
            continue
        layout = Layout(dp=dp, tp=tp, pp=pp, micro_batches=order.batch // dp)
        stages = range(4) if pp == 1 else [3] if rule == "zero 3 with pp = 1 only" else range(3)
        for zero, recompute in itertools.product(stages, RECOMPUTE):
            tried = replace(layout, zero=zero, recompute=recompute)
            held, seconds = order.judge(tried)
            if _broken_rule(order, tried) == rule and held <= order.hardware.hbm_bytes:
                best = min(best, seconds)
    return best


def _distinguishable(*mistakes: str) -> Callable[[_Order, list[tuple]], bool]:
    """Where each of these mistakes hurts, and no layout is the choice of two of them."""

    def holds(order: _Order, fitting: list[tuple]) -> bool:
        if not _hurting(*mistakes)(order, fitting):
            return False
        chosen = [layout for mistake in mistakes for _, _, layout in _choices(fitting, mistake)]
        return len(set(chosen)) == len(chosen)

    return holds


@searching.requires("a model with room to spare: legal, and fast")
def a_model_with_room_to_spare(answer, draw):
    suspects = "the most seconds", "the least memory", "recompute full", "zero 3"
    order = _order_where(draw, _distinguishable(*suspects), memory=[80], heads=[8, 12, 16])
    _check_choice(lambda *given: own(answer, *given), order, *suspects)
    order = _order_where(draw, _hurting("recompute selective"), memory=[80], heads=[8], seq=[8192])
    _check_choice(answer, order, "recompute selective")


@searching.requires("model states that do not fit without ZeRO", needs_earlier=True)
def model_states_that_do_not_fit_without_zero(answer, draw):
    likely = {"memory": [24], "between": [40]}  # else once in several hundred draws
    _check_choice(answer, _order_where(draw, _hurting("zero 0"), **likely), "zero 0")


@searching.requires("activations that do not fit without recomputation", needs_earlier=True)
def activations_that_do_not_fit_without_recomputation(answer, draw):
    suspects = "recompute none", "recompute none or full"
    order = _order_where(draw, _distinguishable(*suspects), seq=[8192], memory=[24, 40])
    _check_choice(answer, order, *suspects)


@searching.requires("only full recomputation saves it", needs_earlier=True)
def only_full_recomputation_saves_it(answer, draw):
    order = _order_where(draw, _only_full, seq=[8192], memory=[16], heads=[25, 35])
    _check_choice(answer, order, "recompute none or selective")


@searching.requires("slow links between nodes", needs_earlier=True)
def slow_links_between_nodes(answer, draw):
    order = _order_where(draw, _hurting("pp 1"), between=[2, 5])
    _check_choice(answer, order, "pp 1", "the most data-parallel ranks")


@searching.requires("layers too wide for one GPU", needs_earlier=True)
def layers_too_wide_for_one_gpu(answer, draw):
    order = _order_where(draw, _hurting("tp 1"), heads=[24, 32, 40])
    _check_choice(answer, order, "tp 1", "the most data-parallel ranks")


@searching.requires("a number of GPUs that is no power of two", needs_earlier=True)
def a_number_of_gpus_that_is_no_power(answer, draw):
    order = _order_where(draw, _hurting(only=False), gpus=[24, 48])
    _check_choice(answer, order, "powers of two")


@searching.requires("all GPUs for one copy of the model", needs_earlier=True)
def all_gpus_for_one_copy_of_the_model(answer, draw):
    one = {"batch": [1], "heads": [24, 32, 40]}
    slow = one | {"gpus": [8], "node": [2], "between": [2, 5]}
    order = _order_where(draw, _hurting("dp from 2 on", only=False), **slow)
    _check_choice(answer, order, "dp from 2 on")
    odd = one | {"gpus": [4], "node": [4], "layers": [11, 13], "memory": [16, 24]}
    order = _order_where(draw, _needing("tp less than all GPUs"), **odd, seq=[4096, 8192])
    _check_choice(answer, order, "tp less than all GPUs")


@searching.requires("a tensor group that is larger than a node", needs_earlier=True)
def a_tensor_group_that_is_larger_than_a(answer, draw):
    few = {"gpus": [16], "node": [2], "batch": [1 / 4], "layers": [11, 13], "heads": [32, 40]}
    _check_choice(answer, _order_where(draw, _over_nodes, **few))


@searching.requires("stages with ZeRO 2, and not with ZeRO 3", needs_earlier=True)
def stages_with_zero_2(answer, draw):
    tight = {"gpus": [16], "batch": [4], "heads": [40], "between": [2, 5], "memory": [8]}
    mistake = "zero up to 1 behind stages"
    _check_choice(answer, _order_where(draw, _needing(mistake), **tight), mistake)
    _check_choice(answer, _order_where(draw, _without("zero 3 with pp = 1 only"), **tight))


@searching.requires("heads, layers, sequences and batches that do not divide", needs_earlier=True)
def heads_layers_sequences_and_batches_that_do_not(answer, draw):
    odd = {"heads": [9, 11, 15], "layers": [16, 24], "gpus": [16, 32]}
    _check_choice(answer, _order_where(draw, _without("tp divides the heads"), **odd))
    odd = {"layers": [13, 17, 22], "gpus": [16, 32], "between": [2, 5]}
    _check_choice(answer, _order_where(draw, _without("pp divides the layers"), **odd))
    odd = {"seq": [1001, 1502, 2003], "heads": [32, 40], "gpus": [16, 32]}
    _check_choice(answer, _order_where(draw, _without("tp divides the sequence"), **odd))
    odd = {"gpus": [16, 32], "batch": [1.5]}
    _check_choice(
        answer, _order_where(draw, _without("dp micro_batch micro_batches = batch"), **odd)
    )


@searching.requires("only ZeRO 3 saves it, in large micro-batches", needs_earlier=True)
def only_zero_3_saves_it(answer, draw):
    odd = {"layers": [11, 13], "heads": [33, 35, 37], "gpus": [16, 32], "batch": [4, 6]}
    odd |= {"memory": [8], "between": [2, 5], "seq": [256, 512]}
    order = _order_where(draw, _hurting("micro_batch 1", only=False), **odd)
    _check_choice(answer, order, "micro_batch 1")


@searching.requires("the last byte of a GPU", needs_earlier=True)
def the_last_byte_of_a_gpu(answer, draw):
    order = _order_where(draw, lambda order, fitting: min(held for held, *_ in fitting) % 1 == 0)
    least = int(min(held for held, *_ in order.fitting()))
    exact, roomier = (_with_memory(order, size) for size in (least, least + 1))
    try:
        _check_choice(answer, exact)
    except ValueError:
        slug = "at-most" if _finds_some(answer, roomier) else "gives-up"
        expected = _described(exact.fitting()[0][2])
        raise Wrong(slug, expected=expected, got="a ValueError") from None


def _with_memory(order: _Order, size: int) -> _Order:
    return replace(order, hardware=replace(order.hardware, hbm_bytes=size))


def _finds_some(answer, order: _Order) -> bool:
    try:
        return isinstance(_chosen(answer, order), Layout)
    except ValueError:
        return False


@searching.requires(
    "nothing fits",
    failures={"exception": "no-error"},
    needs_earlier=True,
)
def nothing_fits(answer, draw):
    order = _order(draw, gpus=[8, 16], heads=[32, 40], layers=[36, 48])
    try:
        got = _chosen(answer, _with_memory(order, 10**9))
    except ValueError as error:
        if len(str(error).split()) < 2 or str(error).startswith("min()"):
            raise Wrong("no-error", expected="a sentence", got=repr(error)) from None
        return
    got = _described(got) if isinstance(got, Layout) else show(got)
    raise Wrong("no-error", expected="a ValueError", got=got)
