"""Exercise 5.1, `bubble_share`: what it asks for, and how it is checked."""

from collections.abc import Callable, Mapping, Sequence

from course_exercises.authoring import Exercise, expect, expect_type, same

bubble = Exercise(
    "5.1",
    "bubble_share",
    points=1,
    minutes=10,
    kind="first",
    parameters=("stages", "micro_batches"),
    hints=[
        (
            "Look at the last stage of a small pipeline. For how long does it wait before its first "
            "forward pass, and for how long does it work?"
        ),
        (
            "It waits for stages - 1 forward passes at the start, and for stages - 1 backward passes "
            "at the end. It works for one of each on every micro-batch. The total time is both "
            "together."
        ),
        (
            "Count in passes through one chunk, forward and backward together: stages - 1 of them are "
            "idle, chunks * micro_batches are work. The share is the idle ones over idle and work."
        ),
    ],
    misconceptions={
        "idle-miscounted": "You count other idle passes than there are. A rank waits for stages - 1 forward "
        "passes at the start and for as many backward passes at the end: together stages - 1 of both.",
        "another-total": "You divide by another time than a rank's total: by its work alone, which leaves the "
        "wait out, or by the time of all ranks together. Each rank works for micro_batches passes and waits "
        "for the idle ones; divide by the sum of both.",
        "not-the-share": "That is the number of idle passes, or percent, or the share of time in which a rank "
        "works. Divide the idle passes by those of the total time: a share is from 0 to 1.",
        "swapped": "Stages and micro-batches have changed places: more stages make the bubble larger, more "
        "micro-batches make it smaller.",
        "no-overlap": "That is the idle share without micro-batches, where one stage works at a time. Count the "
        "work of all micro-batches.",
        "few-micro-batches": "With fewer micro-batches than stages you count in another way. Count as before: "
        "stages - 1 idle passes, and one pass of work for each micro-batch.",
        "chunks-miscounted": "Your share is right with one chunk per rank and wrong with several. Each of the "
        "stages - 1 waits then lasts for one chunk, a part of a stage, and the work stays the same.",
        "no-chunks": "`chunks` is the third parameter, and 1 where nobody gives it: "
        "`bubble_share(stages, micro_batches, chunks=1)`.",
        "otherwise": "Draw the smallest cases. One stage is never idle: 0. With 2 stages and 1 "
        "micro-batch each rank is idle half of the time: 1/2; with 2 micro-batches it is 1/3.",
    },
    things="shares",
    failures={"TypeError": "wrong-parameters"},
)

Share = Callable[..., float]
WITH_ONE_CHUNK: Mapping[str, Sequence[Share]] = {
    "another-total": [lambda p, m: (p - 1) / m, lambda p, m: 1 - m / (p * (m + p - 1))],
    "rounded-down": [lambda p, m: 0],
    "not-the-share": [
        lambda p, m: p - 1,
        lambda p, m: 100 * (p - 1) / (m + p - 1),
        lambda p, m: m / (m + p - 1),
    ],
    "idle-miscounted": [lambda p, m: p / (m + p), lambda p, m: 2 * (p - 1) / (m + 2 * (p - 1))],
    "swapped": [lambda p, m: (m - 1) / (m + p - 1)],
    "no-overlap": [lambda p, m: (p - 1) / p],
}


def _shares(share: Share, cases: Sequence[tuple[int, ...]]) -> list[float]:
    return [share(*case) for case in cases]


def _check_bubble(answer, cases, likely: Mapping[str, Sequence[Share]], otherwise: str) -> None:
    """`likely` has the formulas of each mistake; `otherwise` is what all others have in common."""
    got = _shares(answer, cases)
    for value in got:
        expect_type(value, (float, int))
    slugs = (
        s for s, shares in likely.items() for share in shares if same(got, _shares(share, cases))
    )
    expect(
        got,
        _shares(lambda p, m, v=1: (p - 1) / (v * m + p - 1), cases),
        what=f"for (stages, micro_batches{', chunks' * (len(cases[0]) > 2)}) = {cases}",
        likely={next(slugs, otherwise): True},
    )


@bubble.requires("the idle share of the total time, with one chunk per rank")
def the_idle_share_of_the_total_time(answer, draw):
    cases = [(p, draw.integer(p + 2, 20)) for p in draw.sample(range(3, 9), 3)]
    _check_bubble(answer, cases, WITH_ONE_CHUNK, "otherwise")
    few = [(p, draw.integer(2, p - 1)) for p in draw.sample(range(3, 9), 3)]
    _check_bubble(answer, few, {}, "few-micro-batches")


@bubble.requires("one stage, and one micro-batch", needs_earlier=True)
def one_stage_and_one_micro_batch(answer, draw):
    cases = [(1, draw.integer(2, 9)), (draw.integer(2, 9), 1), (1, 1)]
    _check_bubble(answer, cases, {}, "otherwise")


@bubble.requires(
    "with several chunks per rank",
    failures={"positional argument": "no-chunks"},
    needs_earlier=True,
)
def with_several_chunks_per_rank(answer, draw):
    cases = [(p, p * draw.integer(2, 6), draw.integer(2, 4)) for p in draw.sample(range(3, 9), 3)]
    _check_bubble(answer, cases, {}, "chunks-miscounted")
