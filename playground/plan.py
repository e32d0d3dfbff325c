"""What the plan page says of a model on a cluster, as JSON: the planner's own answers.

Memory is in GiB, 2^30 bytes, as the planner prints it.
"""

import json
import re
from functools import cache
from typing import NamedTuple

from course_planner.catalogue import hardware_called, model_called
from course_planner.descriptions import Hardware, Layout, Model
from course_planner.memory import fits, fullest, model_states, stage_parameters, tensors
from course_planner.searching import search
from course_planner.stages import stages_of
from course_planner.timing import StepTime, step_time
from playground.guesses import guesses as _guesses

SEQ = 4096
KINDS = ("parameters", "gradients", "optimizer", "activations", "temporary")
LIMITS = {  # of a step's seconds: what the page asks for, and the planner's words
    "matrices": "the matrices' products",
    "attention": "attention's core",
    "memory": "reading and writing memory",
    "tensor": "sums between tensor ranks",
    "data": "what data ranks send",
    "bubble": "waiting in the pipeline",
}
AGAIN = {  # what backward computes again
    "none": "nothing",
    "selective": "attention's core",
    "half": "every second matrix product",
    "full": "whole layers",
}
_LINK = re.compile(r"(\d+x[A-Z\d]+)/tp(\d+)\.pp(\d+)\.z([0-3])\.b(\d+)\.(selective|half|full)")


class Board(NamedTuple):
    """What trains on how many GPUs, with how many sequences in a step."""

    gpus: int
    gpu: str
    model: str
    batch: int


BOARDS = {
    "8xH100": Board(8, "H100", "Llama-3-8B", 64),
    "64xH100": Board(64, "H100", "Llama-3-70B", 256),
    "8x4090": Board(8, "4090", "Llama-3.2-3B", 64),
}


def view(link: str) -> str:
    """All that the page shows of a layout, "8xH100/tp1.pp1.z3.b1.selective"; of one that cannot be, why not."""
    try:
        board, layout = read(link)
    except ValueError as error:
        return json.dumps({"why": str(error)})
    model, hardware = _described(board)
    held, time = fullest(model, layout, SEQ), step_time(model, layout, SEQ, hardware)
    shown = {
        "held": {kind: size / 2**30 for kind, size in held.items() if kind in KINDS},
        "total": tensors(held) / 2**30,
        "room": hardware.hbm_bytes / 2**30,
        "fits": fits(held, hardware),
        "dp": layout.dp,
        **_timed(time, board),
    }
    return json.dumps(shown)


def read(link: str) -> tuple[Board, Layout]:
    """The board and the layout of an address. Raises ValueError, with a sentence, where it cannot be."""
    found = _LINK.fullmatch(link)
    if not found or found[1] not in BOARDS:
        raise ValueError(f"{link!r} is no position of the plan page.")
    board, (tp, pp, zero, micro_batch) = BOARDS[found[1]], map(int, found.groups()[1:5])
    if board.gpus % (tp * pp):
        raise ValueError(f"{tp} tensor ranks x {pp} stages do not divide {board.gpus} GPUs.")
    dp = board.gpus // (tp * pp)
    if board.batch % (dp * micro_batch):
        raise ValueError(
            f"{board.batch} sequences are no multiple of {dp} data ranks x micro-batches of {micro_batch}."
        )
    rows = board.batch // (dp * micro_batch)
    layout = Layout(
        *(dp, tp, pp),
        zero=zero,
        micro_batch=micro_batch,
        micro_batches=rows,
        recompute=found[6],
    )
    layout.check(_described(board)[0], SEQ)
    return board, layout


def words(link: str) -> str:
    """What is asked about."""
    board, layout = read(link)
    return (
        f"{board.model} trains on {board.gpus} {board.gpu} GPUs, with {board.batch} sequences of {SEQ:,} tokens in a "
        f"step: {_split(layout)}. Adam runs in mixed precision with float32 gradients, and attention is flash attention."
    )


def vocabulary() -> str:
    """The page's words for what takes time, and for what is recomputed."""
    return json.dumps({"limits": LIMITS, "again": AGAIN})


def best(board: str) -> str:
    """The planner's own plan for a board."""
    asked = BOARDS[board]
    model, hardware = _described(asked)
    (plan,), _ = search(model, asked.gpus, asked.batch, SEQ, hardware, keep=1)
    shown = {
        "layout": f"{_split(plan.layout)}; recomputed: {AGAIN[plan.layout.recompute]}",
        "total": tensors(plan.memory) / 2**30,
        **_timed(plan.time, asked),
    }
    return json.dumps(shown)


def guesses(link: str) -> str:
    """What one may predict of the fullest rank's GiB."""
    board, layout = read(link)
    held = fullest(_described(board)[0], layout, SEQ)
    states = sum(held[kind] for kind in KINDS[:3]) / 2**30
    whole = model_states(_parameters(board, layout), 1, 0, gradient_bytes=4) / 2**30
    right = tensors(held) / 2**30
    mistakes = [
        (
            states,
            "You count parameters, gradients and the optimizer's state. Activations come on top.",
        ),
        (
            whole,
            "You count the whole state of the rank's part of the model. ZeRO shards it among data ranks.",
        ),
        (
            right - states,
            "You count activations and temporary tensors alone. The model's state comes on top.",
        ),
        (right * board.gpus, "You count the bytes of all ranks together. A rank holds its own."),
    ]
    return _guesses(right, mistakes)


def cell(link: str) -> str:
    """The cell of a notebook in which the planner says all that it knows of this layout."""
    board, layout = read(link)
    sizes = f"dp={layout.dp},tp={layout.tp},pp={layout.pp},zero={layout.zero}"
    sizes += f",micro_batch={layout.micro_batch},recompute={layout.recompute}"
    return (
        f"!python -m course_utils plan --model {board.model} --hardware {board.gpu} --gpus {board.gpus} \\\n"
        f"    --batch {board.batch} --seq {SEQ} --layout {sizes}"
    )


@cache
def _described(board: Board) -> tuple[Model, Hardware]:
    return model_called(board.model), hardware_called(board.gpu)


def _split(layout: Layout) -> str:
    sizes = {"tensor ranks": layout.tp, "stages": layout.pp, "context ranks": layout.cp}
    sizes["data ranks"] = layout.dp
    split = ", ".join(f"{n} {what}" for what, n in sizes.items() if n > 1)
    return (
        f"{split}; ZeRO {layout.zero}; {layout.micro_batches} micro-batches of {layout.micro_batch}"
    )


def _parameters(board: Board, layout: Layout) -> int:
    """Of the first stage, before ZeRO."""
    model = _described(board)[0]
    return sum(stage_parameters(model, layout, stages_of(model, layout, SEQ)[0]))


def _timed(time: StepTime, board: Board) -> dict:
    parts = dict(sorted(time.parts.items(), key=lambda part: -part[1]))
    tokens = board.batch * SEQ / time.seconds
    return {"seconds": time.seconds, "parts": parts, "limit": time.limit, "tokens": tokens}
