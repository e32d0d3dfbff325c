"""The answer of python -m course_utils plan: the quickest layouts that fit, or one's own layout."""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from tqdm import tqdm

from course_planner import counting, options, searching
from course_planner.calibrating import calibrate
from course_planner.descriptions import Hardware, Layout, Model, described, require, whole
from course_planner.memory import AVOIDED, fullest, tensors
from course_planner.printing import (
    fitting,
    gib,
    many,
    nothing_fits,
    print_table,
    save,
    short,
    write,
)
from course_planner.searching import Plan
from course_planner.timing import Calibration, step_time

DAY = 86_400


@dataclass(frozen=True)
class Question:
    """What is asked: all but the layout."""

    model: Model
    hardware: Hardware
    calibration: Calibration | None
    gpus: int
    batch: int
    seq: int
    tokens: float | None
    peak: float  # FLOP/s of a GPU in bfloat16, of which MFU is a share

    def rates(self, plan: Plan) -> dict[str, float | None]:
        """What a plan's seconds mean: tokens a second, MFU, and the days of the whole run."""
        step, seconds = self.batch * self.seq, plan.time.seconds
        flops = counting.flops(self.model, self.seq, step)
        return {
            "tokens_per_second": step / seconds,
            "mfu": flops / self.gpus / seconds / self.peak,
            "days": self.tokens and self.tokens / step * seconds / DAY,
        }


def run(asked: argparse.Namespace) -> None:
    """Answers on stdout, and in the files that are asked for. ValueError where there is no answer."""
    layout = _layout(asked)
    question = _question(asked, layout)
    if layout:
        plans, refused = [_plan_of(question, layout)], Counter()
    else:
        plans, refused = _searched(asked, question)
    _print_question(asked, question)
    if layout:
        _print_plan(asked, question, plans[0])
    else:
        _print_plans(question, plans)
    for why, number in refused.most_common():
        print(f"refused {number:,}: {searching.REASONS[why]}")
    if plans and asked.picture:
        _draw(asked, question, plans)
    if asked.json:
        size = {name: getattr(question, name) for name in ("gpus", "batch", "seq", "tokens")}
        rows = [asdict(plan) | {"limit": plan.limit} | question.rates(plan) for plan in plans]
        records = {"model": question.model, "hardware": question.hardware}
        write(asked.json, records, **size, plans=rows, refused=refused)
    if not plans:
        sizes = (question.model, question.gpus, question.batch, question.seq, question.hardware)
        tried = options.allowed(asked.only, asked.without)
        raise ValueError(nothing_fits(*sizes, asked.hardware, tried))


def _layout(asked: argparse.Namespace) -> Layout | None:
    """One's own, if there is one. Raises ValueError for options that are none."""
    whole(keep=asked.keep)
    counted = asked.tokens is None or asked.tokens >= 1
    require(counted, "--tokens are counted: 15e12 for 15 trillion.")
    if not asked.layout:
        return None
    searched = asked.only or asked.without
    require(not searched, "--only and --without are for a search: leave them out, or --layout.")
    return options.layout_of(asked.layout, asked.gpus, asked.batch, **options.PLANNED)


def _question(asked: argparse.Namespace, layout: Layout | None) -> Question:
    model, bf16 = options.model_of(asked.model), options.hardware_of(asked.hardware)
    hardware = options.with_precision(bf16, asked.hardware, asked.precision)
    known = None
    if asked.calibrate:
        known = calibrate(options.rows_in(asked.calibrate, model, bf16), bf16)
    gpus, batch = (layout.gpus, layout.sequences()) if layout else (asked.gpus, asked.batch)
    for name, number in (("gpus", gpus), ("batch", batch)):
        require(number is not None, f"--{name} is missing; only with --layout it can be left out.")
    return Question(model, hardware, known, gpus, batch, asked.seq, asked.tokens, bf16.peak)


def _plan_of(question: Question, layout: Layout) -> Plan:
    sizes = (question.model, layout, question.seq)
    time = step_time(*sizes, question.hardware, question.calibration)
    return Plan(layout, time, fullest(*sizes))


def _searched(asked: argparse.Namespace, question: Question) -> tuple[list[Plan], Counter[str]]:
    with tqdm(unit=" layouts", disable=None, leave=False) as bar:
        plans, refused = searching.search(
            question.model,
            question.gpus,
            question.batch,
            question.seq,
            question.hardware,
            question.calibration,
            keep=sys.maxsize,
            progress=bar.update,
            allowed=options.allowed(asked.only, asked.without),
        )
    return searching.differing(plans, asked.keep), refused


# ---- what is printed -----------------------------------------------------------------------------


def _print_question(asked: argparse.Namespace, question: Question) -> None:
    model = question.model
    print(f"{_millions(counting.parameters(model))} parameters", end="")
    if model.experts:
        print(f", of which a token visits {_millions(counting.active_parameters(model))},", end="")
    print(
        f" on {many(question.gpus, 'GPU')} ({asked.hardware}), "
        f"{many(question.batch, 'sequence')} of {question.seq:,} tokens in a step"
    )


def _millions(count: int) -> str:
    return f"{count / 1e9:,.1f} billion" if count >= 1e9 else f"{count / 1e6:,.1f} million"


def _print_plans(question: Question, plans: Sequence[Plan]) -> None:
    rows = []
    for plan in plans:
        rates = question.rates(plan)
        days = [_days(rates["days"])] if question.tokens else []
        row = [plan.limit, _interval(plan), _per_gpu(question, rates), f"{rates['mfu']:.0%}", *days]
        rows.append([*row, gib(tensors(plan.memory)), described(plan.layout)])
    head = ["most of it", "seconds a step", "tokens/s of a GPU", "MFU"]
    if rows:
        print_table([*head, *["days"] * bool(question.tokens), "GiB", "layout"], rows, words=1)
    _print_loss(question, plans)
    _print_before_sharding(question, plans)


def _print_loss(question: Question, plans: Sequence[Plan]) -> None:
    room = question.hardware.hbm_bytes
    fused = [str(n) for n, p in enumerate(plans, 1) if tensors(p.memory) + p.memory["loss"] > room]
    if fused:
        print(f"  only with a fused loss do these fit: {', '.join(fused)}")


def _print_before_sharding(question: Question, plans: Sequence[Plan]) -> None:
    made = 4 * counting.parameters(question.model)
    if made > question.hardware.hbm_bytes and any(plan.layout.zero == 3 for plan in plans):
        print(
            f"  made whole before ZeRO 3 shards it, the model needs {gib(made)} GiB: make it on the meta device"
        )


def _print_plan(asked: argparse.Namespace, question: Question, plan: Plan) -> None:
    rates, held = question.rates(plan), dict(plan.memory)
    total = tensors(held)
    loss, spare, _ = (held.pop(kind) for kind in (*AVOIDED, "total"))
    print(described(plan.layout))
    print("\nits fullest rank holds, in GiB")
    print_table(["kind", "GiB"], [[kind, gib(size)] for kind, size in held.items()], words=1)
    print(
        f"  together {gib(total)} GiB, which {fitting(plan.memory, question.hardware, asked.hardware)}; "
        f"a loss that is not fused takes {gib(loss)} more, and the allocator {gib(spare)} where there is room"
    )
    _print_before_sharding(question, [plan])
    print("\na step takes, in seconds")
    parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])
    share = [[kind, short(part), f"{part / plan.time.seconds:.0%}"] for kind, part in parts]
    print_table(["kind", "seconds", "share"], share, words=1)
    print(f"  together {_interval(plan)}; most of it: {plan.limit}")
    print(
        f"  {short(rates['tokens_per_second'])} tokens/s, {_per_gpu(question, rates)} of a GPU; "
        f"MFU {rates['mfu']:.1%} (6 N + 12 l h s a token, of the peak in bfloat16)"
    )
    if question.tokens:
        print(f"  {question.tokens:.3g} tokens take {_days(rates['days'])} days without a break")


def _interval(plan: Plan) -> str:
    return f"{plan.time.seconds:.3g} ({plan.time.low:.3g} to {plan.time.high:.3g})"


def _per_gpu(question: Question, rates: Mapping[str, float | None]) -> str:
    return short(rates["tokens_per_second"] / question.gpus)


def _days(days: float) -> str:
    return f"{days:,.1f}"


def _draw(asked: argparse.Namespace, question: Question, plans: Sequence[Plan]) -> None:
    from course_planner.figures.plans import fit_and_time  # and with it matplotlib

    best = plans[0]
    figure = fit_and_time(
        {
            f"plan {place}": plan.memory | dict.fromkeys(AVOIDED, 0)
            for place, plan in enumerate(plans, 1)
        },
        {f"plan {place}": plan.time.parts for place, plan in enumerate(plans, 1)},
        question.hardware.hbm_bytes,
        f"seconds of a step of {question.batch} sequences; most of plan 1: {best.limit}",
        f"plan 1: {described(best.layout)}",
    )
    save(figure, asked.picture)
