"""The ring and the ledger of the playground, against what the course computes and what ranks do."""

import json
import random
from itertools import pairwise

import pytest

from course_exercises.authoring import load_answer
from course_utils.comm.rings import bus_factor
from playground import ledger, ring


def send(link: str, rank: int, piece: int) -> str:
    answer = json.loads(ring.move(link, rank, piece))
    assert answer["link"] != link, answer["said"]
    return answer["link"]


def around(n: int) -> str:
    """All ranks send in every step: piece r of rank r goes first."""
    link = f"n{n}"
    for step in range(2 * (n - 1)):
        for rank in range(n):
            link = send(link, rank, (rank - step) % n)
    return link


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_ring_of_the_course_is_at_par(n):
    shown = json.loads(ring.view(around(n)))
    assert shown["over"]
    assert shown["most"] == shown["par"] == ring.MEGABYTES * bus_factor("all_reduce", n)
    assert shown["steps"] == shown["stepsPar"] == 2 * (n - 1)


@pytest.mark.parametrize("seed", range(60))
def test_random_moves_add_each_rank_once_and_are_never_below_par(seed):
    """The rules against numbers: rank r's pieces hold 10 ** r, so a digit 2 is a rank counted twice."""
    dice, n = random.Random(seed), 2 + seed % 3
    link, numbers = f"n{n}", [[10**rank] * n for rank in range(n)]
    whole = sum(10**rank for rank in range(n))
    while True:
        shown = json.loads(ring.view(link))
        refused = [rank["refused"] for rank in shown["ranks"]]
        for rank, row in enumerate(refused):
            for piece, why in enumerate(row):
                mine, theirs = numbers[rank][piece], numbers[(rank + 1) % n][piece]
                needless = theirs == whole or (mine != whole and "2" in str(mine + theirs))
                assert bool(why) == needless
        moves = [(r, p) for r, row in enumerate(refused) for p, why in enumerate(row) if not why]
        assert shown["over"] == all(number == whole for row in numbers for number in row)
        if not moves:
            break
        rank, piece = dice.choice(moves)
        link, to = send(link, rank, piece), (rank + 1) % n
        mine = numbers[rank][piece]
        numbers[to][piece] = mine if mine == whole else mine + numbers[to][piece]
    assert shown["over"] != bool(shown["stuck"])
    assert not shown["over"] or (
        shown["most"] >= shown["par"] and shown["steps"] >= shown["stepsPar"]
    )


def test_a_piece_comes_when_what_stood_there_has_left():
    link = "n3"
    for piece in (1, 2, 0):
        link = send(link, 1, piece)
    assert json.loads(ring.move(link, 0, 0))["said"].startswith("Step 3: rank 1 adds piece 0")


def test_an_address_is_played_as_far_as_it_can_be():
    assert ring.read("n2/0000") == (2, [(0, 0)])
    assert ring.read("n2/0093") == (2, [(0, 0)])
    assert "count them twice" in json.loads(ring.move("n3/00", 0, 0))["said"]


def test_the_cell_of_the_ring_runs_on_ranks(capsys):
    exec(ring.cell(around(3)), {"__name__": "__main__"})  # noqa: S102 - what a learner pastes
    told = [f"rank {rank} has the sum: True; it sent 16 MB" for rank in range(3)]
    assert capsys.readouterr().out.splitlines() == told


def test_the_ledger_is_that_of_exercise_8_1():
    right, dice = load_answer("8.1"), random.Random(0)
    for _ in range(100):
        billions, ranks = dice.randint(1, 400), dice.randint(1, 2000)
        for stage, way in enumerate(("DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3")):
            exact = right(billions * 10**9 * ranks, ranks, stage) / ranks / 10**9
            assert sum(ledger.held(way, billions, ranks).values()) == pytest.approx(exact)


@pytest.mark.parametrize("way", ledger.WAYS)
def test_the_fewest_ranks_fit_and_one_fewer_do_not(way):
    def fits(ranks):
        return sum(ledger.held(way, billions, ranks).values()) <= memory

    for billions, memory in ((7.5, 40), (1.5, 24), (2, 40), (70, 80), (20, 40), (0.5, 1)):
        fewest = ledger.fewest(way, billions, memory)
        if fewest is None:
            assert not fits(10**6)
        else:
            assert fits(fewest) and (fewest == 1 or not fits(fewest - 1))


def test_tensor_parallelism_stays_in_a_node_and_a_pipeline_has_as_many_stages_as_layers():
    assert [sum(ledger.held("tensor parallel", 8, ranks).values()) for ranks in (4, 8, 64)] == [
        32,
        16,
        16,
    ]
    assert [sum(ledger.held("pipeline", 8, ranks).values()) for ranks in (8, 32, 64)] == [16, 4, 4]


def test_what_one_may_predict_is_the_truth_and_what_mistakes_give():
    told = {guess["value"]: guess["said"] for guess in json.loads(ledger.guesses(7.5, 64))}
    assert list(told) == [1.64, 1.88, 16.64, 31.41, 120]
    assert told[16.64] == "That is right."  # ZeRO, 1910.02054, figure 1
    assert "That is ZeRO 1. Stage 1 shards" in told[31.41]
    assert "one sort of bytes out" in told[1.64]
    told = {guess["value"]: guess["said"] for guess in json.loads(ring.guesses(4))}
    assert told[18] == "That is right." and "half of the way" in told[9] and len(told) == 5


@pytest.mark.parametrize("n", [2, 3, 4])
def test_values_to_choose_from_are_told_apart(n):
    values = [guess["value"] for guess in json.loads(ring.guesses(n))]
    assert len(values) > 2
    assert all(more > 1.05 * less for less, more in pairwise(values))


def test_the_cell_of_the_ledger_runs_on_ranks(capsys):
    exec(ledger.cell(64).replace("train, 4,", "train, 2,"), {"__name__": "__main__"})  # noqa: S102
    ddp, sharded = capsys.readouterr().out.splitlines()
    assert "{'parameters': 4.0, 'gradients': 4.0, 'optimizer': 8.0}" in ddp
    assert "{'parameters': 2.0, 'gradients': 2.0, 'optimizer': 4.0}" in sharded
