"""The answer of python -m course_utils trace: a program's second step, as one rank or several."""

import argparse
import importlib.util
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

import course_planner as estimate
from course_planner import Hardware, Layout, Model, Trace, comparing, options
from course_planner.descriptions import require, sizes_of
from course_planner.printing import fitting, gib, many, print_table, save, short, write
from course_utils.launch.story.frames import is_own


def run(asked: argparse.Namespace) -> None:
    """Answers on stdout, and in the files that are asked for. ValueError for a program that is wrong."""
    layout = options.layout_of(asked.layout, asked.ranks)
    hardware = options.hardware_of(asked.hardware)
    model = _model(asked, layout)
    with _errors_of(asked.program):
        program = _program_in(asked.program)
        traces = {rank: _traced(program, layout, rank) for rank in asked.rank}
    seconds = {
        rank: estimate.traced_seconds(trace, layout, hardware) for rank, trace in traces.items()
    }
    print(f"{asked.program.name} on {many(layout.gpus, 'rank')}: {sizes_of(layout)}")
    for rank, trace in traces.items():
        _print_trace(rank, trace, seconds[rank], hardware, asked.hardware)
        if model:
            _print_beside_plan(asked, model, layout, rank, trace)
    if asked.picture:
        _draw(asked, layout, hardware, traces, seconds)
    if asked.json:
        rows = [_as_data(rank, trace, seconds[rank]) for rank, trace in traces.items()]
        write(asked.json, {"layout": layout, "hardware": hardware}, ranks=rows)
    if told := comparing.mismatch(traces):
        raise ValueError(f"\nThe program is wrong: {told}")


def _model(asked: argparse.Namespace, layout: Layout) -> Model | None:
    if asked.model is None:
        return None
    require(
        asked.seq is not None, "--model needs --seq: how many tokens a sequence of the program has."
    )
    model = options.model_of(asked.model)
    layout.check(model, asked.seq)
    return model


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
    kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in trace.held.items() if size)
    print(f"\nrank {rank}, one step")
    print(f"  holds at most {gib(trace.peak)} GiB: {kinds}")
    print(f"  which {fitting({'total': trace.peak}, hardware, name)}")
    print(f"  computes {short(trace.flops / 1e12)} TFLOP and sends")
    rows = [
        [c.group, c.op, c.when, f"{c.calls:,}", short(c.payload / 1e6), short(c.sent / 1e9)]
        for c in trace.calls
    ]
    print_table(["group", "call", "when", "calls", "MB each", "GB sent"], rows, words=3)
    print(f"  seconds on {name}, as if nothing went on beside anything else:")
    print("   ", ", ".join(f"{kind} {short(time)}" for kind, time in seconds.items()))
    print(f"  most of it: {_limit(seconds)}")


def _limit(seconds: Mapping[str, float]) -> str:
    """The kind that takes longest."""
    return max(seconds, key=seconds.get, default="nothing")


def _print_beside_plan(
    asked: argparse.Namespace, model: Model, layout: Layout, rank: int, trace: Trace
) -> None:
    stage = _stage(layout, rank)
    planned = estimate.memory(model, layout, asked.seq, stage)["total"]
    print(f"  the plan of {asked.model} has {gib(planned)} GiB for it, and")
    rows = [
        [*key, *(f"{calls:,}" for calls, _ in both), *(short(sent / 1e9) for _, sent in both)]
        for key, both in comparing.unplanned(trace, model, layout, asked.seq, stage).items()
    ]
    head = ["group", "call", "when", "calls traced", "planned", "GB sent traced", "planned"]
    if rows:
        print("  other calls:")
        print_table(head, rows, words=3)
    else:
        print("  the same calls.")


def _stage(layout: Layout, rank: int) -> int:
    """Which stage of the pipeline a rank is in."""
    inner = math.prod(getattr(layout, name) for name in layout.order[: layout.order.index("pp")])
    return rank // inner % layout.pp


def _draw(asked, layout, hardware, traces, seconds) -> None:
    from course_planner.figures.plans import fit_and_time

    figure = fit_and_time(
        {f"rank {rank}": trace.held for rank, trace in traces.items()},
        {f"rank {rank}": parts for rank, parts in seconds.items()},
        hardware.hbm_bytes,
        f"seconds of a step on {asked.hardware}, as if nothing went on beside anything else",
        f"{asked.program.name} on {layout.gpus:,} ranks: {sizes_of(layout)}",
    )
    save(figure, asked.picture)


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
