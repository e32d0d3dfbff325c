"""ZB-V and DualPipe-V: what they claim on random sizes, torch's own rows, and the papers' idle times."""

import random
import re
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from course_utils.lesson.schedules import (
    Op,
    dualpipe_v,
    first_illegal_move,
    simulate,
    v_shaped,
    zb_v,
)
from tests.support.on_gloo import launch


def runs_as_claimed(make, p: int, m: int, most: int, time: int, weight: int):
    """A legal schedule within its memory; F and B of a chunk take `time`, W takes `weight`."""
    schedule = make(p, m)
    assert first_illegal_move(schedule, p, m, 2, v_shaped) is None, (make, p, m)
    result = simulate(schedule, 2 * time, 2 * (time + weight), 2 * weight, place=v_shaped)
    assert max(result.peak_in_flight) <= min(most, 2 * m), (make, p, m)
    return result


def hold_what_they_claim(dice: random.Random) -> None:
    """Two schedules of random sizes, in exact arithmetic."""
    p, m, weight = dice.randint(1, 12), dice.randint(1, 40), dice.randint(0, 9)
    # 2401.10241, section 6: no bubble if F, B and W take equally long, in 1F1B's memory
    result = runs_as_claimed(zb_v, p, m, 2 * p, 1, 1)
    if m >= 2 * p - 1:
        assert result.step == result.work, (p, m)
        assert result.peak_in_flight == [2 * p] * p
    # 2412.19437, table 2: PP + 1 activations, with PP = 2p
    time = weight + dice.randint(1, 9)
    result = runs_as_claimed(dualpipe_v, p, m, 2 * p + 1, time, weight)
    if m >= 2 * p:
        assert result.step - result.work == (p - 1) * (2 * time - weight), (p, m, time, weight)
        assert result.peak_in_flight == [min(2 * p + 1, 2 * m)] * p


@pytest.mark.parametrize("seed", range(200))
def test_v_schedules_hold_what_they_claim(seed):
    """10,000 sizes: python -m tests.modules.test_v_schedules"""
    hold_what_they_claim(random.Random(seed))


# ---- torch's rows --------------------------------------------------------------------------------

CLASSES = {zb_v: "ScheduleZBVZeroBubble", dualpipe_v: "ScheduleDualPipeV"}
SIZES = {2: (1, 2, 3, 4, 7), 3: (1, 4, 5, 6, 9), 4: (3, 7, 8, 15)}  # ranks: micro-batches


def rows_of_torch(rank, sizes):
    """{(maker, micro-batches): the rows of all ranks}, as torch writes them."""
    p, rows = dist.get_world_size(), {}
    for make, m in sizes:
        numbers, device = (rank, 2 * p - 1 - rank), torch.device("cpu")
        stages = [pipelining.PipelineStage(nn.Linear(1, 1), n, 2 * p, device) for n in numbers]
        schedule = getattr(pipelining, CLASSES[make])(stages, m, loss_fn=nn.MSELoss())
        order = schedule.pipeline_order
        rows[make, m] = [[str(action) for action in order[each] if action] for each in range(p)]
    return rows


@cache
def torchs(p: int):
    sizes = [(make, m) for make in CLASSES for m in SIZES[p] if make is zb_v or m >= 2 * p]
    return launch(rows_of_torch, p, sizes)[0]


def blocks(p: int, row: list[str]) -> list[list[Op]]:
    """Each of torch's actions as the ops that it is: 7B0 is both halves, a pair is both of its parts."""
    kinds = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    parts = [re.findall(r"(\d+)([FIBW])(\d+)", action) for action in row]
    return [
        [Op(k, int(i), int(int(n) >= p)) for n, kind, i in found for k in kinds[kind]]
        for found in parts
    ]


@pytest.mark.parametrize("p", SIZES)
def test_the_order_is_torchs(p):
    for (make, m), rows in torchs(p).items():
        ops = [[op for block in blocks(p, row) for op in block] for row in rows]
        assert ops == make(p, m), (make, m)


def idle_with_blocks(p: int, rows: list[list[str]], time: int, weight: int) -> list[int]:
    """The idle time of each rank, where each of torch's actions gives its results at its end."""
    cost = {"F": time, "B": time, "W": weight}
    ended, clocks, idle = {}, [0] * p, [0] * p
    left = [blocks(p, row) for row in rows]

    def needs(rank, block):
        for op in block:
            stage = v_shaped(rank, op.chunk, p) + {"F": -1, "B": 1, "W": 2 * p}[op.kind]
            if 0 <= stage < 2 * p:
                yield op.kind, op.micro_batch, stage

    while any(left):
        rank = next(r for r in range(p) if left[r] and ended.keys() >= set(needs(r, left[r][0])))
        block = left[rank].pop(0)
        start = max([clocks[rank], *(ended[need] for need in needs(rank, block))])
        idle[rank] += start - clocks[rank] if clocks[rank] else 0  # not before its first op
        clocks[rank] = start + sum(cost[op.kind] for op in block)
        for op in block:
            ended[op.kind, op.micro_batch, v_shaped(rank, op.chunk, p)] = clocks[rank]
    return idle


@pytest.mark.parametrize("p", SIZES)
@pytest.mark.parametrize("time, weight", [(1, 1), (3, 2), (1, 0)])
def test_dualpipe_v_in_pairs_is_idle_as_deepseek_counts(p, time, weight):
    """2412.19437, table 2: (PP/2 - 1)(F&B + B - 3W), where B is both halves and PP is 2p.

    F&B is one op. Here it takes as long as both, since nothing overlaps.
    """
    backward = time + weight
    for (make, _), rows in torchs(p).items():
        if make is dualpipe_v:
            expected = (p - 1) * (time + 2 * backward - 3 * weight)
            assert max(idle_with_blocks(p, rows, time, weight)) == expected


if __name__ == "__main__":
    dice = random.Random(0)
    for _ in range(10_000):
        hold_what_they_claim(dice)
    print("10,000 sizes of each: legal, within the memory, idle as claimed")
