"""Traced ranks beside each other: wrong programs are told as `launch` tells them, right ones are not."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import course_planner as estimate
from course_planner import Layout, comparing
from course_utils.__main__ import main
from tests.estimate.test_estimate_commands import EXAMPLE, left
from tests.estimate.test_estimate_fake import DENSE, LAYOUTS, SEQ
from tests.support.traced_programs import decoder


def stepping(step):
    return lambda mesh, layout: lambda: step(dist.get_rank(), torch.ones(8))


def opposite_orders(rank, x):
    calls = [dist.all_reduce, lambda x: dist.all_gather([torch.empty(8) for _ in range(4)], x)]
    for call in calls if rank == 0 else calls[::-1]:
        call(x)


def nobody_receives(rank, x):
    dist.send(x, (rank + 1) % 4)


def one_reduction_less(rank, x):
    dist.all_reduce(x)
    if rank != 1:
        dist.all_reduce(x)


def another_size(rank, x):
    dist.all_reduce(x[: 8 - rank])


WRONG = {
    opposite_orders: ["rank 0: all_reduce of float32 [8]", "all_gather of float32 [8]"],
    nobody_receives: ["rank 0: send of float32 [8] to rank 1", "finished without receiving it"],
    one_reduction_less: ["all_reduce of float32 [8]", "rank 1 finished without calling it"],
    another_size: ["rank 0: all_reduce of float32 [8]", "all_reduce of float32 [7]"],
}


@pytest.mark.parametrize("step", WRONG)
@pytest.mark.parametrize("ranks", [(0, 1), (1, 2, 3, 0)], ids=str)
def test_ranks_that_do_not_meet_are_told(step, ranks):
    traces = {rank: estimate.trace(stepping(step), Layout(dp=4), rank) for rank in ranks}
    told = comparing.mismatch(traces)
    for words in WRONG[step]:
        assert words in told
    assert f"in {step.__name__}:" in told  # the program's line


def everybody_on_a_ring(rank, x):
    ops = [dist.P2POp(dist.isend, x, (rank + 1) % 4), dist.P2POp(dist.irecv, x, (rank - 1) % 4)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.broadcast(x, 2)
    dist.all_to_all([torch.empty(2) for _ in range(4)], list(x.chunk(4)))


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (0, 2), (0, 1, 2, 3)], ids=str)
def test_ranks_that_meet_are_not(ranks):
    program = stepping(everybody_on_a_ring)
    traces = {rank: estimate.trace(program, Layout(dp=4), rank) for rank in ranks}
    assert comparing.mismatch(traces) is None


@pytest.mark.parametrize("name", ["data x tensor", "data x interleaved stages"])
def test_a_right_program_is_beside_its_plan(name, monkeypatch):
    monkeypatch.setattr(comparing, "HAIR", 0.05)  # the loss and the norms of so small a model
    model, layout = LAYOUTS[name]
    program = partial(decoder, model=model, seq=SEQ, dtype=torch.bfloat16)
    traces = {rank: estimate.trace(program, layout, rank) for rank in (0, 1, layout.gpus - 1)}
    assert comparing.mismatch(traces) is None
    for rank, trace in traces.items():
        stage = rank * layout.pp // layout.gpus  # stages are outermost
        assert comparing.unplanned(trace, model, layout, SEQ, stage) == {}


def test_a_reduction_that_every_rank_forgets_is_missing_beside_the_plan():
    program = partial(decoder, model=DENSE, seq=SEQ, dtype=torch.bfloat16)
    layout = Layout(dp=4, zero=3)
    alone = estimate.trace(program, Layout(dp=1))
    found = comparing.unplanned(alone, DENSE, layout, SEQ, 0)
    assert found["dp", "reduce_scatter", "backward"][0] == [0, 0]
    assert found["dp", "reduce_scatter", "backward"][1][1] > 0


def test_the_command_compares_ranks_and_the_plan(tmp_path, capsys):
    file = tmp_path / "mine.py"
    lines = [
        "import torch, torch.distributed as dist",
        "def program(mesh, layout):",
        "    def step():",
        "        if dist.get_rank():",
        "            dist.all_reduce(torch.ones(8))",
        "    return step",
    ]
    file.write_text("\n".join(lines))
    said = left(capsys, "trace", file, "--ranks", 4, "--layout", "", "--rank", 0, 1)
    assert "a call lacks its partner" in said and "mine.py, line 5, in step" in said
    model = ["--model", "layers=16,width=8192,heads=64,vocab=32000", "--seq", "128"]
    main(["trace", str(EXAMPLE), "--ranks", "8", "--layout", "tp=2,zero=3", *model])
    shown = capsys.readouterr().out
    assert "the plan of layers=16,width=8192,heads=64,vocab=32000 has" in shown
    assert "other calls:" in shown and "dp     reduce_scatter  backward" in shown
    said = left(capsys, "trace", EXAMPLE, "--ranks", 8, "--layout", "tp=2", "--model", "8b")
    assert said.startswith("--model needs --seq")
