"""Exercise 5.1, `bubble_share`: what it asks for, and how it is checked."""

from collections.abc import Callable, Mapping, Sequence

from course_exercises.authoring import Exercise, expect, expect_type

bubble = Exercise(
    "5.1",
    "bubble_share",
    points=1,
    minutes=5,
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
        "of-ideal": "That is the bubble as a share of the ideal time, of the work alone. The total "
        "time contains the bubble too.",
        "all-stages": "You count one idle pass per stage. The first micro-batch needs no waiting "
        "in the first stage: there are stages - 1.",
        "counted-twice": "You count the wait twice. At the start it is one of stages - 1 forward "
        "passes, at the end one of as many backward passes: together stages - 1 of both.",
        "swapped": "Stages and micro-batches have changed places: more stages make the bubble "
        "larger, more micro-batches make it smaller.",
        "busy-share": "That is the share of time in which a rank works. The bubble is the rest.",
        "no-overlap": "That is the idle share without micro-batches, where one stage works at a time.",
        "passes-not-share": "You return how many passes a rank is idle. Asked is a share: divide by the "
        "passes of the total time.",
        "one-rank-of-all": "You divide the work of one rank by the time of all ranks. Each of them "
        "works for micro_batches passes.",
        "otherwise": "Draw the smallest cases. One stage is never idle: 0. With 2 stages and 1 "
        "micro-batch each rank is idle half of the time: 1/2; with 2 micro-batches it is 1/3.",
        "percent": "You return percent: asked is a share, from 0 to 1.",
        "few-micro-batches": "With fewer micro-batches than stages something else comes out. It is the "
        "same count there: stages - 1 idle passes, and one pass of work for each micro-batch.",
        "rounded-down": "The share is rounded down to a whole number: `//` drops the fraction.",
        "no-chunks": "`chunks` is the third parameter, and 1 where nobody gives it: "
        "`bubble_share(stages, micro_batches, chunks=1)`.",
        "chunks-as-stages": "You count every chunk as a stage of its own. A rank has several pieces, "
        "and works on one of them while the others wait for their turn.",
        "chunks-ignored": "Chunks play no part in your formula, and they shorten the bubble.",
        "chunks-lengthen": "With more chunks your bubble grows. Each wait now lasts for one chunk "
        "only, a part of the stage.",
        "share-divided": "You divide the whole share by the number of chunks. The bubble becomes that "
        "much shorter, and the total time becomes shorter with it.",
    },
    failures={"TypeError": "wrong-parameters"},
)


def _shares(share: Callable[..., float], cases: Sequence[tuple[int, ...]]) -> list[float]:
    return [share(*case) for case in cases]


def _check_bubble(answer, cases, likely: Mapping[str, Callable[..., float]]) -> None:
    got = _shares(answer, cases)
    for value in got:
        expect_type(value, (float, int))
    mistakes = {slug: _shares(share, cases) for slug, share in likely.items()} | {"otherwise": True}
    expect(
        got,
        _shares(lambda p, m, v=1: (p - 1) / (v * m + p - 1), cases),
        what=f"for (stages, micro_batches{', chunks' * (len(cases[0]) > 2)}) = {list(cases)}",
        likely=mistakes,
    )


@bubble.requires("the idle share of the total time, with one chunk per rank")
def the_idle_share_of_the_total_time(answer, draw):
    cases = [(p, draw.integer(p + 2, 20)) for p in draw.sample(range(3, 9), 3)]
    _check_bubble(
        answer,
        cases,
        {
            "of-ideal": lambda p, m: (p - 1) / m,
            "rounded-down": lambda p, m: 0,
            "passes-not-share": lambda p, m: p - 1,
            "one-rank-of-all": lambda p, m: 1 - m / (p * (m + p - 1)),
            "percent": lambda p, m: 100 * (p - 1) / (m + p - 1),
            "busy-share": lambda p, m: m / (m + p - 1),
            "all-stages": lambda p, m: p / (m + p),
            "counted-twice": lambda p, m: 2 * (p - 1) / (m + 2 * (p - 1)),
            "swapped": lambda p, m: (m - 1) / (m + p - 1),
            "no-overlap": lambda p, m: (p - 1) / p,
        },
    )
    few = [(p, draw.integer(2, p - 1)) for p in draw.sample(range(3, 9), 3)]
    _check_bubble(answer, few, {"few-micro-batches": lambda p, m, v=1: answer(p, m)})


@bubble.requires("one stage, and one micro-batch", needs_earlier=True)
def one_stage_and_one_micro_batch(answer, draw):
    _check_bubble(answer, [(1, draw.integer(2, 9)), (draw.integer(2, 9), 1), (1, 1)], {})


@bubble.requires(
    "with several chunks per rank",
    failures={"positional argument": "no-chunks"},
    needs_earlier=True,
)
def with_several_chunks_per_rank(answer, draw):
    cases = [(p, p * draw.integer(2, 6), draw.integer(2, 4)) for p in draw.sample(range(3, 9), 3)]
    _check_bubble(
        answer,
        cases,
        {
            "chunks-ignored": lambda p, m, v: (p - 1) / (m + p - 1),
            "chunks-as-stages": lambda p, m, v: (v * p - 1) / (m + v * p - 1),
            "chunks-lengthen": lambda p, m, v: v * (p - 1) / (m + v * (p - 1)),
            "share-divided": lambda p, m, v: (p - 1) / (m + p - 1) / v,
            "of-ideal": lambda p, m, v: (p - 1) / (v * m),
        },
    )
