import random
from fractions import Fraction
from itertools import pairwise, product

import pytest

from course_utils.lesson import schedules
from course_utils.lesson.schedules import (
    Op,
    bubble_time_of,
    dualpipe_v,
    first_illegal_move,
    gpipe,
    interleaved,
    looped,
    one_forward_one_backward,
    peak_in_flight_of,
    simulate,
    v_shaped,
    zb_h1,
    zb_h2,
    zb_v,
)

WITHOUT_CHUNKS = [gpipe, one_forward_one_backward, zb_h1, zb_h2]
SIZES = [(stages, m) for stages in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 5, 7, 8, 9, 16, 24)]


def every_schedule(stages, micro_batches):
    for make in WITHOUT_CHUNKS:
        yield make.__name__, 1, make(stages, micro_batches)
    for chunks in (1, 2, 3, 4):
        yield "interleaved", chunks, interleaved(stages, micro_batches, chunks)


def ops(text):
    """ "F3 B0.1" as ops."""
    for word in text.split():
        micro_batch, _, chunk = word[1:].partition(".")
        yield Op(word[0], int(micro_batch), int(chunk or 0))


def rows(*texts):
    return [list(ops(text)) for text in texts]


def text(row):
    return " ".join(map(str, row))


# ---- orders --------------------------------------------------------------------------------------


def test_an_op_is_written_short():
    assert text([Op("F", 3), Op("B", 0, 1), Op("W", 12)]) == "F3 B0.1 W12"
    assert list(ops("F3 B0.1 W12")) == [Op("F", 3), Op("B", 0, 1), Op("W", 12)]


def test_gpipe():
    assert gpipe(2, 3) == rows(*["F0 F1 F2 B0 B1 B2"] * 2)


def test_1f1b_as_megatron_draws_it():
    """2104.04473, figure 4, top, without the optimizer: four devices, eight micro-batches."""
    got = one_forward_one_backward(4, 8)
    assert text(got[0]) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert text(got[3]) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_interleaved_as_megatron_draws_it():
    """2104.04473, figure 4, bottom: four devices with two chunks, eight micro-batches."""
    got = interleaved(4, 8, 2)
    assert text(got[0]) == (
        "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1 F4.1 B2.1 F5.1 B3.1 F6.1 B0 F7.1 B1 "
        "B2 B3 B4.1 B5.1 B6.1 B7.1 B4 B5 B6 B7"
    )
    assert text(got[3]) == (
        "F0 F1 F2 F3 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 F4 B0 F5 B1 F6 B2 F7 B3 "
        "F4.1 B4.1 F5.1 B5.1 F6.1 B6.1 F7.1 B7.1 B4 B5 B6 B7"
    )


def test_interleaved_with_one_chunk_is_1f1b_with_a_longer_warm_up():
    got = interleaved(3, 6, 1)
    assert [sum(op.kind == "F" for op in row[: row.index(Op("B", 0))]) for row in got] == [5, 3, 1]


def test_zero_bubble_schedules_as_the_paper_draws_them():
    """2401.10241, figure 3: devices 1 and 4 of four, eight micro-batches."""
    h1, h2 = zb_h1(4, 8), zb_h2(4, 8)
    assert text(h1[0]) == (
        "F0 F1 F2 F3 B0 W0 F4 B1 W1 F5 B2 W2 F6 B3 W3 F7 B4 W4 B5 W5 B6 W6 B7 W7"
    )
    assert text(h1[3]) == (
        "F0 B0 F1 B1 F2 B2 F3 B3 W0 F4 B4 W1 F5 B5 W2 F6 B6 W3 F7 B7 W4 W5 W6 W7"
    )
    assert text(h2[0]) == (
        "F0 F1 F2 F3 F4 F5 F6 B0 W0 F7 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 B6 W6 B7 W7"
    )
    assert text(h2[3]) == (
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 W0 F7 B7 W1 W2 W3 W4 W5 W6 W7"
    )


def test_zb_v_on_three_ranks():
    got = zb_v(3, 5)
    assert text(got[0]) == (
        "F0 F1 F2 F3 F4 F0.1 B0.1 W0.1 F1.1 B1.1 W1.1 F2.1 B2.1 W2.1 B0 W0 F3.1 B3.1 W3.1 "
        "B1 W1 F4.1 B4.1 W4.1 B2 W2 B3 W3 B4 W4"
    )
    assert text(got[2]) == (
        "F0 F0.1 F1 F1.1 F2 F2.1 B0.1 W0.1 F3 B0 W0 F3.1 B1.1 W1.1 F4 B1 W1 F4.1 B2.1 W2.1 "
        "B2 B3.1 B3 B4.1 B4 W2 W3.1 W4.1 W3 W4"
    )


def test_dualpipe_v_on_two_ranks():
    """The middle part has pairs: F of one chunk, then B and W of the other."""
    got = dualpipe_v(2, 4)
    assert text(got[0]) == (
        "F0 F1 F2 F0.1 B0.1 W0.1 F1.1 F3 B1.1 W1.1 F2.1 B0 W0 B2.1 W2.1 F3.1 B1 W1 "
        "B3.1 W3.1 B2 W2 B3 W3"
    )
    assert text(got[1]) == (
        "F0 F0.1 F1 F1.1 F2 B0.1 W0.1 F2.1 B0 W0 F3 B1.1 W1.1 F3.1 B1 W1 "
        "B2.1 W2.1 B2 W2 B3.1 B3 W3.1 W3"
    )


def test_placements():
    assert [[looped(r, c, 3) for c in (0, 1)] for r in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [[v_shaped(r, c, 3) for c in (0, 1)] for r in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [v_shaped(0, c, 3) for c in range(4)] == [0, 5, 6, 11]


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_every_schedule_is_legal_and_whole(stages, micro_batches):
    for name, chunks, schedule in every_schedule(stages, micro_batches):
        assert first_illegal_move(schedule, stages, micro_batches, chunks) is None, (name, chunks)
        kinds = 3 if name.startswith("zb") else 2
        assert {len(row) for row in schedule} == {kinds * chunks * micro_batches}


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "4", True, None])
def test_wrong_numbers_are_refused(wrong):
    for make in WITHOUT_CHUNKS:
        with pytest.raises(ValueError, match=f"whole number of stages, at least 1; .* {wrong!r}"):
            make(wrong, 4)
        with pytest.raises(ValueError, match="whole number of micro-batches"):
            make(4, wrong)
    with pytest.raises(ValueError, match="whole number of chunks"):
        interleaved(4, 4, wrong)


# ---- legality ------------------------------------------------------------------------------------

ILLEGAL = {
    "stage 1 runs B1 before F1": rows("F0 F1 B0 B1", "F0 B0 B1 F1"),
    "stage 1 runs B0 and never F0": rows("F0 B0", "B0"),
    "stage 0 never runs B1": rows("F0 F1 B0", "F0 F1 B0 B1"),
    "stage 1 never runs F1": rows("F0 F1 B0 B1", "F0 B0"),
    "stage 0 runs F0 twice": rows("F0 F0 B0", "F0 B0"),
    "stage 1 runs B0 twice": rows("F0 F1 B0 B1", "F0 F1 B0 B0 B1"),
    "stage 0 runs W0 before B0": rows("F0 W0 B0", "F0 B0 W0"),
    "stage 1 never runs W0": rows("F0 B0 W0", "F0 B0"),
    "stage 1 runs F2, and the micro-batches are 0 to 1": rows("F0 F1 B0 B1", "F0 F1 F2 B0 B1 B2"),
    "stage 0 runs F-1, and the micro-batches are 0 to 1": rows("F-1 F0 F1 B0 B1", "F0 F1 B0 B1"),
    "stage 1 runs F0.1, and the chunks are 0 only": rows("F0 F1 B0 B1", "F0 F0.1 F1 B0 B1"),
    "stage 0 runs X0, and 'X' is none of F, B, W": rows("F0 F1 X0 B0 B1", "F0 F1 B0 B1"),
    "stage 0 is to run 'F0', which is no Op": [["F0", "B0"], ["F0", "B0"]],
    "it has 1 lists with 2 ops in them, and each of the 2 stages needs its own": rows("F0 B0"),
    "it has 2 lists with 0 ops in them, and each of the 2 stages needs its own": [[], []],
    "it is no list that holds a list of ops for each stage": None,
    (
        "stage 0 runs B0 before B0 arrived from stage 1, and stage 1 runs F1 before F1 arrived "
        "from stage 0: each waits for the other, a deadlock"
    ): rows("F0 B0 F1 B1", "F0 F1 B0 B1"),
}


@pytest.mark.parametrize("sentence", ILLEGAL, ids=lambda sentence: sentence[:40])
def test_the_first_illegal_move_is_named(sentence):
    given = ILLEGAL[sentence]
    m = 1 if not any("1" in text(row) for row in given or []) else 2
    assert first_illegal_move(given, stages=2, micro_batches=m, chunks=1) == sentence


def test_the_first_one_is_the_first_in_its_row():
    late, early = "F0 F1 F2 B0 B2 B1 B1", "F0 B1 F1 F2 B0 B2"
    assert first_illegal_move(rows(late, early)) == "stage 1 runs B1 before F1"
    assert first_illegal_move(rows(early, late)) == "stage 0 runs B1 before F1"
    assert first_illegal_move(rows("F0 F0 B1 F1 B0")) == "stage 0 runs F0 twice"
    assert first_illegal_move(rows("F0 B1 F0 F1 B0")) == "stage 0 runs B1 before F1"
    assert first_illegal_move(rows("F0 B2 B1 F1 F2 B0")) == "stage 0 runs B2 before F2"


def test_longer_circles_and_circles_of_one():
    three = rows("F0 B0 F1 B1", "F0 F1 B0 B1", "F1 F0 B0 B1")
    assert first_illegal_move(three) == (
        "stage 0 runs B0 before B0 arrived from stage 1, and stage 1 runs F1 before F1 arrived "
        "from stage 0: each waits for the other, a deadlock"
    )
    around = rows("F0 B0.1 F0.1 B0", "F0 F0.1 B0.1 B0")
    assert first_illegal_move(around) == "stage 0 runs B0.1 before F0.1"
    alone = rows("F0.1 F0 B0.1 B0")
    assert first_illegal_move(alone) == "stage 0 runs F0.1 before F0"
    circle = rows("F1 F0 B0 B1", "F0 B0 F1 B1", "F1 B1 F0 B0")
    assert first_illegal_move(circle) == (
        "stage 1 runs B0 before B0 arrived from stage 2, and stage 2 runs F1 before F1 arrived "
        "from stage 1: each waits for the other, a deadlock"
    )


def test_on_a_v_the_last_rank_waits_for_itself():
    turned, place = rows("F0 B0.1 F0.1 B0", "F0.1 F0 B0.1 B0"), {"place": v_shaped}
    assert first_illegal_move(turned, **place) == "stage 0 runs B0.1 before F0.1"
    turned[0] = list(ops("F0 F0.1 B0.1 B0"))
    assert first_illegal_move(turned, **place) == "stage 1 runs F0.1 before F0"
    turned[1] = list(ops("F0 F0.1 B0 B0.1"))
    assert first_illegal_move(turned, **place) == "stage 1 runs B0 before B0.1"
    turned[1] = list(ops("F0 F0.1 B0.1 B0"))
    assert first_illegal_move(turned, **place) is None
    assert "a deadlock" not in (first_illegal_move(zb_v(3, 5), **place) or "")
    assert "a deadlock" in first_illegal_move(zb_v(3, 5))


def test_what_is_not_given_is_read_from_the_schedule():
    assert first_illegal_move(gpipe(2, 2)) is None
    assert first_illegal_move(gpipe(2, 2), micro_batches=3) == "stage 0 never runs F2"
    assert first_illegal_move(gpipe(2, 2), chunks=2) == "stage 0 never runs F0.1"
    assert "each of the 3 stages" in first_illegal_move(gpipe(2, 2), stages=3)


def naive_ends(schedule, cost, latency, place=looped):
    """When each op ends, by going round until nothing changes; None if some never can."""
    stages = len(schedule)
    chunks = range(max(op.chunk for op in schedule[0]) + 1)
    homes = {place(r, c, stages): (r, c) for c in chunks for r in range(stages)}
    steps = {"F": -1, "B": 1}
    ends, changed = {}, True
    while changed:
        changed = False
        for rank, row in enumerate(schedule):
            for before, op in pairwise([None, *row]):
                needs = [] if before is None else [(rank, before, 0)]
                other = place(rank, op.chunk, stages) + steps.get(op.kind, len(homes))
                if other in homes:
                    home, chunk = homes[other]
                    needs.append((home, Op(op.kind, op.micro_batch, chunk), latency))
                if (rank, op) in ends or any((r, o) not in ends for r, o, _ in needs):
                    continue
                arrived = [ends[r, o] + (wait if r != rank else 0) for r, o, wait in needs]
                ends[rank, op] = max([0, *arrived]) + cost(rank, op)
                changed = True
    whole = len(ends) == sum(map(len, schedule))
    return ends if whole else None


def own_order_holds(row):
    done = set()
    for op in row:
        if op in done or (
            op.kind in "BW" and Op("FBW"["BW".index(op.kind)], op.micro_batch, op.chunk) not in done
        ):
            return False
        done.add(op)
    return True


@pytest.mark.parametrize("seed", range(40))
def test_a_swap_is_legal_exactly_if_it_can_be_run(seed):
    """Two ops swapped at random: the checker against a judge that goes round and round."""
    dice = random.Random(seed)
    stages, m = dice.choice([(2, 4), (3, 4), (3, 6), (4, 5)])
    for _, _, schedule in every_schedule(stages, m):
        row = schedule[dice.randrange(stages)]
        i, j = dice.sample(range(len(row)), 2)
        row[i], row[j] = row[j], row[i]
        runs = naive_ends(schedule, lambda rank, op: 1, 0) is not None
        legal = all(map(own_order_holds, schedule)) and runs
        assert (first_illegal_move(schedule) is None) == legal


@pytest.mark.parametrize("seed", range(10))
def test_what_is_dropped_or_doubled_is_found(seed):
    dice = random.Random(seed)
    stages, m = dice.choice([(1, 3), (2, 4), (3, 4), (4, 8)])
    for _, chunks, schedule in every_schedule(stages, m):
        rank = dice.randrange(stages)
        place = dice.randrange(len(schedule[rank]))
        op = schedule[rank].pop(place)
        found = first_illegal_move(schedule, stages, m, chunks)
        assert found in (
            f"stage {rank} never runs {op}",
            f"stage {rank} runs {Op('B', op.micro_batch, op.chunk)} and never {op}",
            f"stage {rank} runs {Op('W', op.micro_batch, op.chunk)} and never {op}",
        )
        schedule[rank].insert(place, op)
        schedule[rank].insert(dice.randrange(place + 1, len(schedule[rank]) + 1), op)
        assert first_illegal_move(schedule, stages, m, chunks) == f"stage {rank} runs {op} twice"


@pytest.mark.parametrize("seed", range(40))
def test_no_legal_swap_is_faster(seed):
    """GPipe's and 1F1B's time is the least that there can be without W."""
    dice = random.Random(seed)
    for make in (gpipe, one_forward_one_backward):
        schedule = make(3, 6)
        claimed = simulate(schedule).makespan
        row = schedule[dice.randrange(3)]
        i = dice.randrange(len(row) - 1)
        row[i], row[i + 1] = row[i + 1], row[i]
        if first_illegal_move(schedule) is None:
            assert simulate(schedule).makespan >= claimed


# ---- simulation ----------------------------------------------------------------------------------


def random_legal(dice, stages, m, chunks, kinds, place=looped):
    """A schedule in the order in which ops happen to be chosen, among those that can run."""
    last, done, schedule = stages * chunks - 1, set(), [[] for _ in range(stages)]
    homes = {place(r, c, stages): (r, c) for c in range(chunks) for r in range(stages)}
    left = {(kind, s, i) for kind in kinds for s in range(last + 1) for i in range(m)}

    def ready(kind, s, i):
        needs = {
            "F": [("F", s - 1, i)] if s else [],
            "B": [("F", s, i)] + ([("B", s + 1, i)] if s < last else []),
            "W": [("B", s, i)],
        }
        return all(need in done for need in needs[kind])

    while left:
        op = dice.choice(sorted(op for op in left if ready(*op)))
        left.remove(op)
        done.add(op)
        kind, s, i = op
        rank, chunk = homes[s]
        schedule[rank].append(Op(kind, i, chunk))
    return schedule


@pytest.mark.parametrize("seed", range(30))
def test_any_legal_schedule_takes_the_time_that_it_takes(seed):
    """Against a simulator that goes round until nothing changes, in exact arithmetic."""
    dice = random.Random(seed)
    stages, m, chunks = dice.randint(1, 4), dice.randint(1, 5), dice.randint(1, 3)
    kinds, place = dice.choice(["FB", "FBW"]), dice.choice([looped, v_shaped])
    schedule = random_legal(dice, stages, m, chunks, kinds, place)
    forward = [Fraction(dice.randint(1, 9)) for _ in range(stages)]
    weight = [Fraction(dice.randint(1, 9)) for _ in range(stages)]
    backward = [w + dice.randint(0, 9) for w in weight]
    latency = Fraction(dice.randint(0, 3), 2)

    def cost(rank, op):
        whole = {
            "F": forward[rank],
            "B": backward[rank] - (weight[rank] if kinds == "FBW" else 0),
            "W": weight[rank],
        }
        return whole[op.kind] / chunks

    assert first_illegal_move(schedule, stages, m, chunks, place) is None
    ends = naive_ends(schedule, cost, latency, place)
    simulation = simulate(schedule, forward, backward, weight, latency, place)
    assert {(s.rank, s.op): s.end for s in simulation.spans} == ends
    assert all(s.end - s.start == cost(s.rank, s.op) for s in simulation.spans)
    assert simulation.makespan == max(ends.values())
    assert simulation.work == m * (sum(forward) + sum(backward)) / stages


def test_what_is_told_about_a_simulation():
    simulation = simulate(one_forward_one_backward(2, 2))
    assert simulation.makespan == simulation.step == 9
    assert simulation.work == 6
    assert (simulation.bubble, simulation.idle_share) == (1 / 2, 1 / 3)
    assert simulation.peak_in_flight == [2, 1]
    told = [(s.rank, str(s.op), s.start, s.end) for s in simulation.spans]
    assert told == [
        *[(0, "F0", 0, 1), (0, "F1", 1, 2), (0, "B0", 4, 6), (0, "B1", 7, 9)],
        *[(1, "F0", 1, 2), (1, "B0", 2, 4), (1, "F1", 4, 5), (1, "B1", 5, 7)],
    ]


def test_latency_is_between_ranks_only():
    assert simulate(gpipe(3, 1), latency=0.25).makespan == 3 * 3 + 4 * 0.25
    assert simulate(gpipe(1, 4), latency=5).makespan == 12
    assert simulate(interleaved(1, 4, 3), 3, 6, latency=5).makespan == 4 * 9
    assert simulate(interleaved(2, 1, 2), 2, 4, latency=5).makespan == 4 * (1 + 2) + 6 * 5


def test_the_weights_part_matters_only_where_it_is_apart():
    assert simulate(gpipe(3, 4), weight=0.5).makespan == simulate(gpipe(3, 4)).makespan
    assert simulate(zb_h1(3, 4), 1, 2, weight=1).makespan == simulate(zb_h1(3, 4), 1, 2).makespan
    assert simulate(zb_h1(3, 4), 1, 2, weight=0).makespan > simulate(zb_h1(3, 4), 1, 2).makespan


def test_stages_of_different_speed():
    simulation = simulate(gpipe(2, 3), forward=[1, 3], backward=[2, 6])
    assert simulation.makespan == 1 + 3 * 3 + 3 * 6 + 2
    assert simulation.work == (3 * 3 + 3 * 9) / 2


def test_zb_h2_has_no_bubble_if_nobody_waits_for_the_others_between_steps():
    simulation = simulate(zb_h2(4, 8))
    assert (simulation.step, simulation.makespan, simulation.bubble) == (24, 27, 0)
    assert simulate(zb_h1(4, 8)).makespan == 27


# The paper's measured times in ms, its table 9, and its bubble rates, table 5: 1.5B parameters on
# eight stages. All that is left out is what it does not print.
PUBLISHED = [  # m, T_F, T_B, T_W, T_comm, 1F1B, ZB-H1, ZB-H2
    (24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (32, 18.513, 18.086, 9.331, 0.626, 0.1985, 0.1242, 0.0837),
    (64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"m={row[0]}")
def test_bubble_rates_that_were_published(row):
    """Zero bubble, 2401.10241, section 5.3: to the last digit that is printed."""
    m, forward, inputs, weight, latency, *rates = row
    for make, rate in zip((one_forward_one_backward, zb_h1, zb_h2), rates):
        simulation = simulate(make(8, m), forward, inputs + weight, weight, latency)
        assert round(simulation.idle_share, 4) == rate


def test_many_stages_and_micro_batches():
    simulation = simulate(one_forward_one_backward(128, 512))
    assert simulation.makespan == 3 * (512 + 127)
    assert simulation.peak_in_flight == list(range(128, 0, -1))


@pytest.mark.parametrize(
    "times, sentence",
    [
        ({"forward": -1}, "Times cannot be negative, .*: forward -1, "),
        ({"backward": -2}, "Times cannot be negative"),
        ({"latency": -0.5}, "Times cannot be negative"),
        ({"weight": 3}, "the weights' part of `backward` cannot be more than all of it"),
        ({"forward": [1, 1, 1]}, "There are 2 stages and 3 times for them"),
    ],
)
def test_times_that_cannot_be(times, sentence):
    with pytest.raises(ValueError, match=sentence):
        simulate(zb_h1(2, 2), **times)


def test_an_illegal_schedule_is_not_simulated():
    with pytest.raises(
        ValueError, match=r"^This schedule cannot run: stage 0 runs B0 before F0\.$"
    ):
        simulate(rows("B0 F0"))
    with pytest.raises(schedules.IllegalMove) as error:
        simulate(rows("F0 B0 F1 B1", "F0 F1 B0 B1"))
    assert error.value.move == first_illegal_move(rows("F0 B0 F1 B1", "F0 F1 B0 B1"))


# ---- closed forms --------------------------------------------------------------------------------

TIMES = [(1, 2, 1), (1, 2, Fraction(1, 2)), (2, 3, 1), (3, 4, 3), (1, 6, 3), (2, 9, 4), (5, 5, 1)]


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_bubbles_equal_their_closed_forms(stages, micro_batches):
    for forward, backward, weight in TIMES:
        times = tuple(map(Fraction, (forward, backward, weight)))
        for name, chunks, schedule in every_schedule(stages, micro_batches):
            simulation = simulate(schedule, *times)
            expected = bubble_time_of(name, stages, micro_batches, chunks, *times)
            if expected is not None:
                assert simulation.step - simulation.work == expected, (name, chunks, times)


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_bubbles_as_shares(stages, micro_batches):
    for name, chunks, schedule in every_schedule(stages, micro_batches):
        if name.startswith("zb") or (name == "interleaved" and micro_batches % stages):
            continue
        simulation = simulate(schedule)
        # Megatron-LM, 2104.04473, sections 2.2.1 and 2.2.2
        ideal = (stages - 1) / (chunks * micro_batches)
        assert simulation.bubble == pytest.approx(ideal, abs=1e-12)
        assert simulation.idle_share == pytest.approx(ideal / (1 + ideal), abs=1e-12)


def test_the_zero_bubble_papers_table_2():
    """Where the weights' part takes no longer than a forward pass."""
    for stages, (f, b, w) in product((2, 5), [(3, 4, 2), (3, 4, 3), (5, 6, 4)]):
        forms = {"one_forward_one_backward": f + b + w, "zb_h1": f + b - w, "zb_h2": f + b - 2 * w}
        for name, each in forms.items():
            assert bubble_time_of(name, stages, 20, 1, f, b + w, w) == (stages - 1) * each


def test_where_there_is_no_closed_form():
    for stages, m in SIZES:
        assert (bubble_time_of("interleaved", stages, m, 2) is None) == (m % stages > 0)
        assert (bubble_time_of("zb_h1", stages, m) is None) == (m < stages)
        assert (bubble_time_of("zb_h2", stages, m) is None) == (m < 2 * stages - 1)
        assert bubble_time_of("gpipe", stages, m) == 3 * (stages - 1)


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_peaks_equal_their_closed_forms(stages, micro_batches):
    for name, chunks, schedule in every_schedule(stages, micro_batches):
        got = simulate(schedule).peak_in_flight
        expected = peak_in_flight_of(name, stages, micro_batches, chunks)
        if name == "interleaved" and micro_batches % stages:
            assert all(a <= b for a, b in zip(got, expected)), (chunks, got, expected)
        else:
            assert got == expected, (name, chunks)


def test_memory_limits_of_the_zero_bubble_paper():
    for stages in (2, 4, 8):
        assert max(simulate(zb_h1(stages, 40)).peak_in_flight) == stages
        assert max(simulate(zb_h2(stages, 40)).peak_in_flight) == 2 * stages - 1


def test_names_that_are_not_there():
    with pytest.raises(ValueError, match="no schedule named '1F1B'; there are gpipe, one_forward"):
        peak_in_flight_of("1F1B", 2, 2)
    with pytest.raises(ValueError, match="no schedule named 'GPipe'"):
        bubble_time_of("GPipe", 2, 2)
