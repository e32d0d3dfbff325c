"""One rank among fake ones, against real ranks and against the arithmetic."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils import flop_counter

import course_planner as estimate
from course_planner import Layout, Model, fake
from course_planner.counting import layer_parameters
from course_utils.comm import versions
from course_utils.launch import launch
from tests.benchmarks import bench_trace
from tests.estimate.traced_ranks import real
from tests.support.traced_programs import decoder

SEQ = 128
DENSE = Model(4, 128, 8, 512, kv_heads=4, ffn=384, gated=True, tied=False, bias=False)
MIXTURE = replace(DENSE, experts=4, top_k=2)
LAYOUTS = {
    "data": (DENSE, Layout(dp=4, zero=3, micro_batch=4, micro_batches=2)),
    "data x tensor": (DENSE, Layout(dp=2, tp=2, zero=3, micro_batch=4)),
    "data x context": (DENSE, Layout(dp=2, cp=2, zero=3, micro_batch=4)),
    "data x experts": (MIXTURE, Layout(dp=4, ep=2, zero=3, micro_batch=4)),
    "data x interleaved stages": (
        DENSE,
        Layout(
            dp=2, pp=2, zero=3, micro_batch=2, micro_batches=4, chunks=2, schedule="interleaved"
        ),
    ),
    "data x tensor x interleaved stages": (
        DENSE,
        Layout(
            dp=2, tp=2, pp=2, zero=3, micro_batch=2, micro_batches=4, chunks=2, schedule="interleaved"
        ),
    ),
}  # fmt: skip
ALL = pytest.mark.parametrize("model, layout", LAYOUTS.values(), ids=LAYOUTS)


def traced(
    model: Model, layout: Layout, rank: int = 0, dtype=torch.bfloat16, seq: int = SEQ
) -> estimate.Trace:
    return estimate.trace(partial(decoder, model=model, seq=seq, dtype=dtype), layout, rank)


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


@ALL
def test_a_fake_rank_does_what_a_real_one_does(model, layout):
    program = partial(decoder, model=model, seq=SEQ)
    steps = launch(real, layout.gpus, program, layout, timeout=300, backend="gloo")
    for rank in {0, layout.gpus - 1}:
        fake = traced(model, layout, rank, torch.float32)
        assert fake.record.calls == [call for call in steps[rank].calls if call.op != "barrier"]
        assert fake.flops == steps[rank].flops
        # AdamW's counts of steps, a number for each parameter, are real ones in both
        assert 0 <= steps[rank].peak - fake.peak < 8 * 100


@pytest.mark.parametrize("name", ["data", "data x tensor", "data x context"])
def test_all_ranks_together_multiply_what_the_arithmetic_says(name):
    model, layout = LAYOUTS[name]
    tokens = SEQ * layout.micro_batch * layout.micro_batches * layout.dp
    flops = layout.gpus * traced(model, layout).flops
    # the CPU's attention computes query by key again in its backward pass: 5 products, not 4
    again = tokens * model.layers * 2 * SEQ * model.width
    assert flops == estimate.flops(model, SEQ, tokens, "korthikanti") + again


@pytest.mark.parametrize("name", ["data", "data x context"])
def test_a_rank_holds_its_share_of_the_parameters(name):
    model, layout = LAYOUTS[name]
    held = traced(model, layout).held["parameters"]
    assert held * layout.gpus == 2 * estimate.parameters(model)  # in bfloat16


def test_what_stays_after_a_step_and_the_most_before_the_first():
    def program(mesh, layout):
        torch.zeros(1000)  # at once given up
        layer = torch.nn.Linear(10, 10, bias=False)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)

        def step():
            layer(torch.ones(5, 10)).sum().backward()
            optimizer.step()

        return step

    found = estimate.trace(program, Layout())
    states = dict.fromkeys(("parameters", "gradients", "optimizer"), 4 * 10 * 10)
    assert found.kept == states | {"gathered": 0, "activations": 0}
    assert found.building == 4 * 1000


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=64, zero=3, micro_batches=2),
        Layout(dp=64, pp=2, zero=3, reshard=False, micro_batches=4),
        Layout(
            dp=64, pp=2, zero=3, reshard=False, micro_batches=4, chunks=2, schedule="interleaved"
        ),
    ],
    ids=estimate.described,
)
def test_what_zero_3_gathers_and_has_not_sent_yet_is_counted(layout):
    """Of 16 tokens: a layer here keeps 60 bytes a token and number of its width where the arithmetic's
    paper has 39 (norms in float32, a gated MLP), and of 128 tokens the test would measure that. PyTorch
    before 2.15 has a layer's gradients once more at the peak of the first layout: 8.6 % of it."""
    seq, model = 16, replace(DENSE, layers=8, width=1024, ffn=4096, kv_heads=8, vocab=1024)
    held = estimate.memory(model, layout, seq)
    # of the program everything is bfloat16: shards, gradients, and what is not sharded yet
    states = sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))
    whole = held["parameters"] // 4 * layout.dp if layout.pp > 1 else layer_parameters(model)
    own = states / 2 + held["activations"] + held["temporary"] - 2 * whole
    assert traced(model, layout, seq=seq).peak == pytest.approx(own, rel=0.09)


def test_up_to_2_14_a_stage_keeps_what_it_receives_in_a_step():
    """`torch.distributed.pipelining` has a buffer for each micro-batch's message from the first step on;
    since 2.15 it makes one when it receives, and lets go of it."""
    layout = Layout(pp=2, micro_batch=2, micro_batches=4, schedule="1f1b")
    twice = replace(layout, micro_batches=8)  # of which no more are in flight
    tokens = 8 * layout.micro_batch * SEQ
    message = 2 * layout.micro_batch * SEQ * DENSE.width
    kept = message if versions.older_than("2.15") else 0
    assert traced(DENSE, twice).peak - traced(DENSE, layout).peak == 4 * (tokens + kept)


LARGE = """
import json
from dataclasses import replace
from tests.benchmarks import bench_trace

layout = replace(bench_trace.LAYOUT, micro_batches=1, schedule="gpipe")
found = bench_trace.measure(layout, stage=layout.pp - 1)
print(json.dumps([found.as_calculated(layout), found.bytes]))
"""


def test_16384_ranks_to_the_last_digit_in_one_and_a_half_gigabytes():
    """A process of its own, whose memory counts; `make bench` has 16 micro-batches, of two stages."""
    assert bench_trace.LAYOUT.gpus == 16_384
    assert estimate.parameters(bench_trace.MODEL) > 405e9
    program = [sys.executable, "-W", "ignore", "-c", LARGE]
    root = Path(__file__).parents[2]
    ran = subprocess.run(program, check=False, cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    exact, size = json.loads(ran.stdout)
    assert exact
    assert size <= bench_trace.BYTES


@pytest.mark.parametrize("heads", [8, 2])
def test_attention_on_the_cpu_counts_as_on_a_gpu_whatever_heads_the_keys_have(heads):
    """PyTorch 2.11 counts no attention with fewer heads of keys than of queries."""
    formulas, known = fake._formulas(), flop_counter.flop_registry
    q, k = torch.empty(1, 8, 16, 4), torch.empty(1, heads, 16, 4)
    repeated = k.repeat_interleave(8 // heads, dim=1)
    for way, before in (("", ()), ("_backward", (q,))):
        cpu, gpu = (
            getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention{kind}{way}")
            for kind in ("_for_cpu", "")
        )
        expected = known[gpu](*before, q, repeated, repeated, out_val=q)
        assert formulas[cpu](*before, q, k, k, out_val=q) == expected
