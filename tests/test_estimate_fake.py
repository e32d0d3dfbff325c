"""One rank among fake ones, against real ranks and against the arithmetic."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from course_utils import estimate
from course_utils.estimate import Layout, Model
from tests.traced_programs import decoder

SEQ = 32
DENSE = Model(4, 64, 8, 256, kv_heads=4, ffn=128, gated=True, tied=False, bias=False)
MIXTURE = replace(DENSE, experts=4, top_k=2)
LAYOUTS = {
    "data": (DENSE, Layout(dp=4, zero=3, micro_batch=2, micro_batches=2)),
    "data x tensor": (DENSE, Layout(dp=2, tp=2, zero=3, micro_batch=2)),
    "data x context": (DENSE, Layout(dp=2, cp=2, zero=3, micro_batch=2)),
    "data x experts": (MIXTURE, Layout(dp=4, ep=2, zero=3, micro_batch=2)),
    "data x tensor x interleaved stages": (
        DENSE,
        Layout(
            dp=2, tp=2, pp=2, zero=3, micro_batches=4, chunks=2, schedule="interleaved"
        ),
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize("model, layout", LAYOUTS.values(), ids=LAYOUTS)


def traced(model: Model, layout: Layout, rank: int = 0, dtype=torch.bfloat16) -> estimate.Trace:
    return estimate.trace(partial(decoder, model=model, seq=SEQ, dtype=dtype), layout, rank)


def ranks_of_all_stages(layout: Layout) -> range:
    """One rank of each stage: stages are outermost."""
    return range(0, layout.gpus, layout.gpus // layout.pp)


def counted(calls: list[estimate.Call]) -> set[estimate.Call]:
    """Without the loss's and the norms' few numbers, which `estimate.traffic` leaves out."""
    return {c for c in calls if (c.group, c.op) != ("tp", "all_reduce")}


@ALL
def test_a_rank_sends_what_the_arithmetic_says(model, layout):
    for stage, rank in enumerate(ranks_of_all_stages(layout)):
        got = counted(traced(model, layout, rank).calls)
        assert got == set(estimate.traffic(model, layout, SEQ, stage))
