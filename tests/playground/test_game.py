"""The playground's rules against the course's schedules, on random orders; and its pars."""

import json
import random
import re

import pytest

from course_exercises.checks.positions import Position, read
from course_utils.lesson import schedules
from playground import game, pars
from tests.modules.test_schedules import random_legal
from tests.playground import search

COUNT = 1000  # 10,000 by hand: python -m tests.playground.test_game


FIRST = re.compile(r"rank (\d) has to run (\S+) first\.")


def an_order(dice: random.Random) -> Position:
    """All ops of a board on each rank: an order that can run, or that and a few exchanges."""
    p, m = dice.randint(2, 4), dice.randint(1, 8)
    v, kinds, place = dice.choice(pars.KINDS)
    m = min(m, 4) if v * len(kinds) == 6 else m  # a V has 6 passes of each on a rank
    order = random_legal(dice, p, m, v, kinds, place)
    for _ in range(dice.choice([0, 0, 1, 2])):
        row = dice.choice(order)
        i, j = dice.randrange(len(row)), dice.randrange(len(row))
        row[i], row[j] = row[j], row[i]
    return Position(p, m, v, kinds, dice.choice([m * v, dice.randint(v, m * v)]), order, place)


def try_out(dice: random.Random) -> bool:
    """Places an order op by op; returns whether it could be placed."""
    wanted = an_order(dice)
    link, todo, refused = wanted.board, [list(map(str, row)) for row in wanted.rows], {}
    while (open_ranks := {rank for rank, row in enumerate(todo) if row}) - refused.keys():
        rank = dice.choice(sorted(open_ranks - refused.keys()))
        answer = json.loads(game.move(link, rank, todo[rank][0]))
        if answer["link"] == link:
            refused[rank] = answer["said"].removeprefix(f"{todo[rank][0]} cannot go there: ")
        else:
            link, refused = answer["link"], {}
            todo[rank].pop(0)
    sentence = schedules.first_illegal_move(wanted.rows, place=wanted.place)
    result = None if sentence else schedules.simulate(wanted.rows, place=wanted.place)
    fits = result and max(result.peak_in_flight) <= wanted.cap
    assert (not open_ranks) == bool(fits), (str(wanted), refused)
    if fits:
        shown = json.loads(game.view(link))
        assert link == str(wanted) == game.playable(link)
        assert (shown["time"], shown["idle"]) == (result.makespan, result.idle_share)
        assert [rank["peak"] for rank in shown["ranks"]] == result.peak_in_flight
        assert shown["over"] and _is_a_chain(shown)
    for rank, said in refused.items():
        if first := FIRST.fullmatch(said):
            other, needed = int(first[1]), first[2]
            assert needed in todo[other], (str(wanted), said)
            at_the_turn = wanted.place is schedules.v_shaped and rank == wanted.ranks - 1
            if other == rank and not (at_the_turn and needed[0] == todo[rank][0][0]):
                alone = [wanted.rows[r] if r == rank else wanted.ops for r in range(wanted.ranks)]
                sentence = schedules.first_illegal_move(alone, place=wanted.place)
                assert sentence == f"stage {rank} runs {todo[rank][0]} before {needed}"
        else:
            assert " in flight already" in said
    return bool(fits)


def _is_a_chain(shown):
    """The critical ops follow each other without a gap, from the start of the step to its end."""
    spans = [
        (op["start"], op["end"]) for rank in shown["ranks"] for op in rank["ops"] if op["critical"]
    ]
    starts, ends = zip(*sorted(spans))
    return starts[0] == 0 and starts[1:] == ends[:-1] and ends[-1] == shown["time"]


def test_random_orders_have_the_courses_verdict_time_idle_share_and_memory():
    dice = random.Random(1)
    placed = sum(try_out(dice) for _ in range(COUNT))
    assert COUNT // 5 < placed < COUNT


REFUSED = {
    ("p2m2v1-FB-cap2/F0", 0, "B1"): "rank 0 has to run F1 first",
    ("p2m2v1-FB-cap2/F0", 0, "B0"): "rank 1 has to run B0 first",
    ("p2m2v1-FB-cap2/F0", 1, "F1"): "rank 0 has to run F1 first",
    ("p2m2v1-FB-cap2/F0", 0, "F0"): "rank 0 runs F0 twice",
    (
        "p2m2v1-FB-cap1/F0",
        0,
        "F1",
    ): "rank 0 has 1 in flight already, and no more may be; a B makes room",
    ("p2m1v2-FB-cap2/F0", 0, "F0.1"): "rank 1 has to run F0 first",
    ("p2m1V2-FBW-cap2/F0", 0, "F0.1"): "rank 1 has to run F0.1 first",
    ("p2m1V2-FBW-cap2/F0", 1, "F0.1"): "rank 1 has to run F0 first",
}


@pytest.mark.parametrize("link, rank, name", REFUSED)
def test_a_move_that_cannot_be_is_refused_with_its_reason(link, rank, name):
    answer = json.loads(game.move(link, rank, name))
    assert answer == {"link": link, "said": f"{name} cannot go there: {REFUSED[link, rank, name]}."}
    left = json.loads(game.view(link))["ranks"][rank]["left"]
    assert left.get(name, REFUSED[link, rank, name]) == REFUSED[link, rank, name]


@pytest.mark.parametrize("name, make", game.NAMED.items())
def test_named_schedules_are_recognised(name, make):
    plan = make(3, 6, 2) if name.startswith("interleaved") else make(3, 6)
    chunks = 1 + max(op.chunk for op in plan[0])
    kinds = "FBW" if any(op.kind == "W" for op in plan[0]) else "FB"
    place = schedules.v_shaped if kinds == "FBW" and chunks > 1 else schedules.looped
    cap = max(schedules.simulate(plan, place=place).peak_in_flight)
    position = Position(3, 6, chunks, kinds, cap, plan, place)
    assert game.names(position) == [name] or (name == "GPipe" and name in game.names(position))
    assert name not in game.names(read(str(position).replace(f"cap{cap}", f"cap{cap - 1}")))
    plan[0][0], plan[0][1:3] = (
        plan[0][2],
        [plan[0][1], plan[0][0]],
    )  # other micro-batches, the same order
    assert name in game.names(position)


def test_a_line_that_turns_has_names_of_its_own():
    assert game.names(read("p2m3v2-FB-cap6")) == ["interleaved 1F1B"]
    assert game.names(read("p2m3V2-FBW-cap6")) == ["ZB-V", "DualPipe-V"]
    assert game.names(read("p2m3V2-FB-cap6")) == game.names(read("p2m3v2-FBW-cap6")) == []


def test_an_address_that_holds_anything_is_played_as_far_as_it_can_be():
    assert game.playable("p2m1v1-FB-cap1/B0F0/F0B0") == "p2m1v1-FB-cap1"
    assert game.playable("p2m1v1-FB-cap1/F0F7/F0F0") == "p2m1v1-FB-cap1/F0/F0"
    assert game.playable("p2m1v1-FB-cap1/hello") == "p2m1v1-FB-cap1"
    for nowhere in ("p2m1V1-FBW-cap1", "p2m1v3-FB-cap3"):
        with pytest.raises(ValueError, match="is no position of the playground"):
            read(nowhere)
    with pytest.raises(ValueError, match="is no position of the playground"):
        read("https://example.org/#p9m1v1-FB-cap1")


def test_pars_are_those_of_a_search():
    """Boards with up to four micro-batches: the solver's proofs, and a search of another kind."""
    known = json.loads(pars.PARS.read_text(encoding="utf-8"))
    every = list(pars.boards())
    assert {board.key for board in every} == known.keys()
    for board in every:
        turned = board.place is schedules.v_shaped and board.ranks < 4
        if (board.chunks == 1 or turned) and board.micro_batches <= 4:
            assert search.shortest(board) == known[board.key] * board.chunks, board.key


def test_no_order_is_shorter_than_its_par():
    """The search against dice: random orders of a small board come down to the par, and not below."""
    known, dice = json.loads(pars.PARS.read_text(encoding="utf-8")), random.Random(2)
    small = [(2, 2, 1, "FB"), (2, 3, 1, "FBW"), (3, 2, 1, "FB"), (2, 2, 2, "FB")]
    sizes = [(*size, schedules.looped) for size in small]
    for p, m, v, kinds, place in [*sizes, (2, 2, 2, "FBW", schedules.v_shaped)]:
        best = {}
        for _ in range(1500):
            order = random_legal(dice, p, m, v, kinds, place)
            result = schedules.simulate(order, place=place)
            cap = max(result.peak_in_flight)
            best[cap] = min(best.get(cap, result.makespan), result.makespan)
        for cap, makespan in best.items():
            assert makespan >= known[Position(p, m, v, kinds, cap, [], place).board]
        assert min(best.values()) == known[Position(p, m, v, kinds, m * v, [], place).board]


if __name__ == "__main__":
    dice = random.Random(0)
    print(
        sum(try_out(dice) for _ in range(10_000)),
        "of 10,000 orders can be placed; all verdicts agree",
    )
