"""estimate.step_time on this machine: predicted beside measured, for the course's own steps

The machine's FLOP/s, and gloo's bandwidth and latency, are measured on two ranks at once
(`here.this_machine`). The constants are calibrated with steps of one process, a whole model on
each rank. With both, the steps of two ranks that work together are predicted, and then compared:
chapter 3's DDP, chapter 6's tensor parallelism by hand, chapter 5's engine with 1F1B.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import course_planner as estimate
from course_exercises.authoring import load_answer, load_code
from course_planner import Layout, Model, Row, here
from course_utils.launch import launch
from course_utils.lesson import schedules
from course_utils.lesson.models import LanguageModel
from tests.benchmarks.measuring import of_the_slowest, print_table, side_by_side, step_seconds

RANKS, SEQ, ROWS = 2, 128, 8
MODEL = Model(4, 256, 8, 512, tied=False, positions=SEQ)
SHAPES = [MODEL, replace(MODEL, layers=2), replace(MODEL, width=128, ffn=512)]
ALONE = [(model, rows) for model in SHAPES for rows in (2, ROWS)]  # what calibrates
LAYOUTS = {
    "data parallel (DDP)": Layout(dp=RANKS, micro_batch=ROWS),
    "tensor parallel": Layout(tp=RANKS, micro_batch=ROWS, sequence_parallel=False),
    "pipeline (1F1B)": Layout(pp=RANKS, micro_batches=ROWS, sequence_parallel=False),
}
WARM_UP, TIMES = 2, 15


class Half(nn.Module):
    """A stage of two: the embeddings and the first blocks, or the others and the head."""

    def __init__(self, model: LanguageModel, stage: int) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        self.blocks = model.blocks[middle:] if stage else model.blocks[:middle]
        ends = ("norm", "head") if stage else ("token", "position")
        self.ends = nn.ModuleDict({name: getattr(model, name) for name in ends})

    def forward(self, x: Tensor) -> Tensor:
        if "token" in self.ends:
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.ends["token"](x) + self.ends["position"](positions)
        for block in self.blocks:
            x = block(x)
        return self.ends["head"](self.ends["norm"](x)) if "head" in self.ends else x


def measure(times: int = TIMES) -> dict[str, float]:
    """The seconds of each step, in the median; of the slowest rank."""
    codes = (
        load_code(6, "tensor_parallel"),
        load_answer("6.1"),
        load_answer("6.4"),
        load_code(5, "Pipeline"),
        load_code(5, "samples"),
    )
    reports = launch(_steps, RANKS, codes, times, backend="gloo", timeout=120 + 10 * times)
    return {name: statistics.median(found) for name, found in of_the_slowest(reports).items()}


def _steps(rank: int, codes: tuple, times: int) -> dict[str, list[float]]:
    """Runs on a rank: the seconds of each step, by its name."""
    torch.set_num_threads(1)
    cut, column, cut_loss, engine, samples = codes
    tokens = torch.randint(MODEL.vocab, (ROWS, SEQ))
    steps = {_name(model, rows): _step(_new(model), tokens[:rows], _loss) for model, rows in ALONE}
    whole, parts = DistributedDataParallel(_new(MODEL)), _new(MODEL)
    for block in parts.blocks:
        cut(block)
    parts.head = column(parts.head)
    data, tensor, stages = LAYOUTS
    steps[data] = _step(whole, tokens, _loss)
    steps[tensor] = _step(parts, tokens, partial(_loss, cross=cut_loss))
    halves = [Half(_new(MODEL), stage) for stage in range(RANKS)]
    plan = schedules.one_forward_one_backward(RANKS, ROWS)
    pipeline = engine([halves[rank]], plan, samples(halves, tokens[:1]), _loss)
    steps[stages] = _training(halves[rank], lambda: pipeline.step(tokens, tokens))
    candidates = {name: partial(step_seconds, step) for name, step in steps.items()}
    return side_by_side(candidates, times, WARM_UP)


def _new(model: Model) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(model.vocab, model.width, model.heads, model.layers, SEQ)


def _loss(logits: Tensor, targets: Tensor, cross: Callable = cross_entropy) -> Tensor:
    return cross(logits.flatten(0, 1), targets.flatten())


def _step(model: nn.Module, tokens: Tensor, loss: Callable) -> Callable[[], None]:
    return _training(model, lambda: loss(model(tokens), tokens).backward())


def _training(model: nn.Module, gradients: Callable[[], object]) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        gradients()
        optimizer.step()

    return step


def _name(model: Model, rows: int) -> str:
    return f"alone: {model.layers} layers of {model.width}, {rows} rows"


def main() -> None:
    hardware, measured = here.this_machine(RANKS), measure()
    print(
        f"A rank: {hardware.peak / 1e9:.0f} GFLOP/s, {2 * hardware.hbm_bandwidth / 1e9:.1f} GB/s; "
        f"gloo: {2 * hardware.intra_bandwidth / 1e9:.2f} GB/s, "
        f"{hardware.intra_latency * 1e6:.0f} µs a round.\n"
    )
    rows = [
        Row(model, Layout(micro_batch=rows), SEQ, measured[_name(model, rows)])
        for model, rows in ALONE
    ]
    known = estimate.calibrate(rows, hardware, here.CPU)
    asked = {_name(row.model, row.layout.micro_batch): (row.model, row.layout) for row in rows}
    asked |= {name: (MODEL, layout) for name, layout in LAYOUTS.items()}
    table = []
    for name, (model, layout) in asked.items():
        time = estimate.step_time(model, layout, SEQ, hardware, known)
        ratio = f"{time.seconds / measured[name]:.2f}"
        times = [f"{1000 * seconds:.0f}" for seconds in (time.seconds, measured[name])]
        use = "predicted" if name in LAYOUTS else "calibrated with it"
        table.append([name, *times, ratio, time.limit, use])
    print_table(["step", "ms predicted", "ms measured", "ratio", "most of it", ""], table)
    print(flush=True)


if __name__ == "__main__":
    main()
