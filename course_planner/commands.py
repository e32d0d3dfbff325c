"""python -m course_utils trace PROGRAM, and plan: the arithmetic for a model of one's own."""

import argparse
import importlib.util
import json
import logging
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
from tqdm import tqdm

import course_planner as estimate
from course_planner import Hardware, Layout, Plan, Trace, options, published
from course_planner.descriptions import sizes_of
from course_planner.figures.plans import fit_and_time
from course_utils.launch.story.frames import is_own
from course_utils.lesson import terminal

_EXAMPLE = Path(__file__).with_name("example.py")
_TRACE = """\
Runs two steps of your training program as one rank of as many as you like, and says what the second
one sends, computes and holds. Nothing is computed and nothing is sent, so a laptop is enough.

PROGRAM is a Python file with a function program(mesh, layout) that builds what a rank trains and
returns its step, a function without arguments. `mesh` is a DeviceMesh with the dimensions "dp", "cp",
"pp" and "tp", `layout` what you say with --layout. The process group is open already. Modules are made
on "meta", sharded, then brought to memory with to_empty; no tensor has a value, so that nothing may ask
for one (loss.item()). The same function trains on real ranks. The smallest way to begin:
"""
_PLAN = """\
Tries every way to split a model among GPUs, and shows the quickest that fit: seconds of a step (nine
times in ten between the two in brackets), bytes of the fullest rank, and what most of the time is.
Calculated, with constants of a cluster that nobody has measured; chapter 12 says how to do better.
"""
_LAYOUT = """\
layout:
  key=value, with commas between. dp, tp, pp, cp: ranks that share out the data, the matrices, the
  layers, the sequence. Left out, dp takes what is left, and the others are 1. Your program reads what
  else it wants of it: ep, zero, micro_batch, micro_batches, chunks, schedule (gpipe, 1f1b, interleaved,
  zb-h1, zb-h2), sequence_parallel, recompute, reshard, order=tp/cp/dp/pp (innermost first).
"""
_MODEL = f"""\
model:
  one of {", ".join(published.LLAMA)}, or layers=48,width=6144,heads=48,vocab=64000, and what differs
  from a GPT: kv_heads, ffn, gated, tied, bias, positions, experts, top_k. Both together:
  8B,vocab=32000.
"""
_HARDWARE = f"""\
hardware:
  one of {", ".join(published.GPUS)} (of 80 GB, eight in a node), and what differs: H100,inter_bandwidth=12.5e9.
  peak in FLOP/s, hbm_bytes in B, hbm_bandwidth in B/s, node in GPUs; intra_bandwidth and
  inter_bandwidth in B/s for each GPU, as nccl-tests' busbw; intra_latency and inter_latency in s.
"""


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds both commands to the course's command line."""
    form = argparse.RawDescriptionHelpFormatter
    example = textwrap.indent(_EXAMPLE.read_text(encoding="utf-8"), "    ")
    parser = commands.add_parser(
        "trace",
        help="your program as one rank of thousands: what it sends, computes and holds",
        description=f"{_TRACE}\n{example}",
        epilog=f"{_LAYOUT}\n{_HARDWARE}",
        formatter_class=form,
    )
    parser.add_argument("program", type=Path, metavar="PROGRAM", help="a Python file")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="how many there are")
    parser.add_argument("--layout", required=True, metavar="LAYOUT", help="tp=8,pp=16,dp=128")
    parser.add_argument(
        "--rank",
        type=int,
        nargs="+",
        default=[0],
        metavar="R",
        help="which to trace, one or several (default: 0)",
    )
    _add_common(parser)
    parser.set_defaults(run=_in_sentences(_trace))

    parser = commands.add_parser(
        "plan",
        help="how to split a model among GPUs, whether it fits, how long a step takes",
        description=_PLAN,
        epilog=f"{_MODEL}\n{_HARDWARE}",
        formatter_class=form,
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="how many there are")
    parser.add_argument("--model", required=True, metavar="MODEL", help="70B, or layers=48,...")
    parser.add_argument("--seq", type=int, required=True, metavar="S", help="tokens in a sequence")
    parser.add_argument("--batch", type=int, required=True, metavar="B", help="sequences in a step")
    parser.add_argument("--keep", type=int, default=5, metavar="K", help="plans (default: 5)")
    _add_common(parser)
    parser.set_defaults(run=_in_sentences(_plan))


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hardware", default="H100", metavar="HARDWARE", help="default: H100")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all of it for a program")
    parser.add_argument(
        "--picture", type=Path, metavar="PNG", help="draw a rank's memory and a step's time"
    )


def _in_sentences(run: Callable) -> Callable:
    """What the user got wrong ends the command with its sentence."""

    def command(asked: argparse.Namespace) -> None:
        try:
            for path in filter(None, (asked.json, asked.picture)):
                terminal.must_be_writable(path)
            run(asked)
        except ValueError as error:
            sys.exit(str(error))

    return command


# ---- trace ---------------------------------------------------------------------------------------


def _trace(asked: argparse.Namespace) -> None:
    layout = options.layout_of(asked.layout, asked.ranks)
    hardware = options.hardware_of(asked.hardware)
    with _errors_of(asked.program):
        program = _program_in(asked.program)
        traces = {rank: _traced(program, layout, rank) for rank in asked.rank}
    seconds = {
        rank: estimate.traced_seconds(trace, layout, hardware) for rank, trace in traces.items()
    }
    print(f"{asked.program.name} on {layout.gpus:,} ranks: {sizes_of(layout)}")
    for rank, trace in traces.items():
        _print_trace(rank, trace, seconds[rank], hardware, asked.hardware)
    if asked.picture:
        _draw_trace(asked, layout, hardware, traces, seconds)
    if asked.json:
        rows = [_as_data(rank, trace, seconds[rank]) for rank, trace in traces.items()]
        _write(asked.json, {"layout": layout, "hardware": hardware}, ranks=rows)


def _program_in(file: Path) -> Callable:
    """The function `program` of a file, whose folder is searched for its other modules."""
    if not file.is_file():
        raise ValueError(f"There is no file {file}; say which one has your program.")
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file.resolve())
    if spec is None:
        raise ValueError(f"{file} is no Python file: its name does not end in .py.")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = getattr(module, "program", None)
    if not callable(program):
        raise TypeError(
            f"{file} has no function program(mesh, layout); python -m course_utils trace --help "
            "shows one."
        )
    return program


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
    """What the program raises becomes a sentence with its line; PyTorch's own logs are silent."""
    logging.disable(logging.ERROR)
    try:
        yield
    except SyntaxError as error:
        what = "".join(traceback.format_exception_only(error)).strip()
        raise ValueError(f"The program cannot be read.\n{what}") from error
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if f.filename == str(file.resolve()) or is_own(f.filename)]
        what = "".join(traceback.format_exception_only(error)).strip()
        if own:
            where = f"{own[-1].filename}, line {own[-1].lineno}: {own[-1].line}"
            raise ValueError(f"The program stopped at {where}\n{what}") from error
        if not isinstance(error, ValueError | TypeError | RuntimeError | ImportError):
            raise
        raise ValueError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)


def _traced(program: Callable, layout: Layout, rank: int) -> Trace:
    """The trace, with a bar: a second step has about as many operations as the first."""
    counts: dict[str, int] = {}
    with tqdm(unit=" operations", disable=None, leave=False) as bar:

        def progress(phase: str) -> None:
            if phase not in counts:
                counts[phase] = 0
                bar.reset(counts.get("first step") if phase == "second step" else None)
                bar.set_description(f"rank {rank}, {phase}")
            counts[phase] += 1
            bar.update()

        return estimate.trace(program, layout, rank, progress)


def _print_trace(
    rank: int, trace: Trace, seconds: Mapping[str, float], hardware: Hardware, name: str
) -> None:
    fits = "fits" if trace.peak <= hardware.hbm_bytes else "does not fit"
    kinds = ", ".join(f"{kind} {_giga(size)}" for kind, size in trace.held.items() if size)
    print(f"\nrank {rank}, one step")
    print(f"  holds at most {_giga(trace.peak)} GB: {kinds}")
    print(f"  which {fits} in {_giga(hardware.hbm_bytes)} GB of {name}")
    print(f"  computes {_short(trace.flops / 1e12)} TFLOP and sends")
    rows = [
        [c.group, c.op, c.when, f"{c.calls:,}", _short(c.payload / 1e6), _giga(c.sent)]
        for c in trace.calls
    ]
    _print_table(["group", "call", "when", "calls", "MB each", "GB sent"], rows, words=3)
    print(f"  seconds on {name}, as if nothing went on beside anything else:")
    print("   ", ", ".join(f"{kind} {_short(time)}" for kind, time in seconds.items()))
    print(f"  most of it: {_limit(seconds)}")


def _limit(seconds: Mapping[str, float]) -> str:
    """The kind that takes longest."""
    return max(seconds, key=seconds.get, default="nothing")


def _draw_trace(asked, layout, hardware, traces, seconds) -> None:
    figure = fit_and_time(
        {f"rank {rank}": trace.held for rank, trace in traces.items()},
        {f"rank {rank}": parts for rank, parts in seconds.items()},
        hardware.hbm_bytes,
        f"seconds of a step on {asked.hardware}, as if nothing went on beside anything else",
        f"{asked.program.name} on {layout.gpus:,} ranks: {sizes_of(layout)}",
    )
    _save(figure, asked.picture)


def _as_data(rank: int, trace: Trace, seconds: Mapping[str, float]) -> dict:
    return {
        "rank": rank,
        "flops": trace.flops,
        "peak": trace.peak,
        "held": trace.held,
        "calls": [asdict(call) for call in trace.calls],
        "seconds": seconds,
        "limit": _limit(seconds),
    }


# ---- plan ----------------------------------------------------------------------------------------


def _plan(asked: argparse.Namespace) -> None:
    model, hardware = options.model_of(asked.model), options.hardware_of(asked.hardware)
    with tqdm(unit=" layouts", disable=None, leave=False) as bar:
        sizes = (asked.gpus, asked.batch, asked.seq)
        plans, refused = estimate.search(
            model, *sizes, hardware, keep=asked.keep, progress=bar.update
        )
    count = estimate.parameters(model)
    print(
        f"{count / 1e9:,.1f} billion parameters on {asked.gpus:,} GPUs ({asked.hardware}), "
        f"{asked.batch:,} sequences of {asked.seq:,} tokens in a step"
    )
    _print_plans(plans)
    for why, number in refused.most_common():
        print(f"refused {number:,}: {estimate.REASONS[why]}")
    if plans and asked.picture:
        _draw_plans(asked, hardware, plans)
    if asked.json:
        asked_for = {"gpus": asked.gpus, "batch": asked.batch, "seq": asked.seq}
        rows = [asdict(plan) | {"limit": plan.limit} for plan in plans]
        records = {"model": model, "hardware": hardware}
        _write(asked.json, records, **asked_for, plans=rows, refused=refused)
    if not plans:
        raise ValueError("No layout is legal and fits: take more GPUs, or another batch.")


def _print_plans(plans: Sequence[Plan]) -> None:
    rows = [
        [
            plan.limit,
            f"{plan.time.seconds:.3g} ({plan.time.low:.3g} to {plan.time.high:.3g})",
            _giga(plan.memory["total"]),
            estimate.described(plan.layout),
        ]
        for plan in plans
    ]
    if rows:
        _print_table(["most of it", "seconds a step", "GB", "layout"], rows, words=1)


def _draw_plans(asked, hardware: Hardware, plans: Sequence[Plan]) -> None:
    best = plans[0]
    figure = fit_and_time(
        {f"plan {place}": plan.memory for place, plan in enumerate(plans, 1)},
        {f"plan {place}": plan.time.parts for place, plan in enumerate(plans, 1)},
        hardware.hbm_bytes,
        f"seconds of a step of {asked.batch} sequences; most of plan 1: {best.limit}",
        f"plan 1: {estimate.described(best.layout)}",
    )
    _save(figure, asked.picture)


# ---- what both write -----------------------------------------------------------------------------


def _giga(size: float) -> str:
    return _short(size / 1e9)


def _short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _print_table(head: list[str], rows: list[list[str]], words: int) -> None:
    """Columns of equal width; the first `words` to the left, and the last if it is long text."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place < words or place == len(head) - 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        print("   ", "  ".join(cells).rstrip())


def _save(figure, path: Path) -> None:
    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


def _write(path: Path, records: Mapping[str, object], **more: object) -> None:
    data = {name: asdict(record) for name, record in records.items()} | more
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
