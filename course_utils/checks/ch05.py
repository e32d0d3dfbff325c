"""The checks of chapter 05: the bubble, three schedules, micro-batch gradients, an exchange.

A schedule is judged in this order: its form, then whether it can run (the sentence is the legality
checker's), then its time, then its memory. Which mistake a bad schedule has is read from the
schedule itself, such as from the number of forward passes before the first backward pass.
"""

import contextlib
import copy
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from course_utils import schedules
from course_utils.checks import (
    Exercise,
    OwnPart,
    Wrong,
    expect,
    expect_type,
    forbidden,
    run,
    same,
)
from course_utils.checks.ranks import finish_device_work, waits
from course_utils.hardware import device
from course_utils.intercept import hand_work, listening
from course_utils.schedules import Op, Schedule, Simulation, first_illegal_move, simulate

# ---- 5.1 -----------------------------------------------------------------------------------------

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
def _(answer, draw):
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


@bubble.requires("one stage, and one micro-batch")
def _(answer, draw):
    _check_bubble(answer, [(1, draw.integer(2, 9)), (draw.integer(2, 9), 1), (1, 1)], {})


@bubble.requires("with several chunks per rank", failures={"positional argument": "no-chunks"})
def _(answer, draw):
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


# ---- 5.2 to 5.4: what the three schedules' exercises share ---------------------------------------

FORWARD, BACKWARD = 1, 2  # units of time of one op
BUILT_IN = [
    function
    for _, function in inspect.getmembers(schedules, inspect.isfunction)
    if function.__module__ == schedules.__name__
]

Budget = Callable[["_Case", int], int]  # how many activations rank r may hold
Suspect = Callable[[Schedule, "_Case"], bool]

FORM = {
    "flat-list": "You return one list of ops. A schedule has one list for each rank: every rank "
    "does its own work.",
    "not-one-list-per-rank": "The outer list has one entry per rank, and each entry is the list of "
    "all that this rank does, in order.",
    "idle-entries": "Leave the gaps out. A rank waits by itself where an op needs something that "
    "has not come.",
    "not-ops": 'An entry is an Op of kind "F" or "B", such as `Op("F", 3)` for the forward pass of '
    "micro-batch 3.",
    "counted-from-one": "Micro-batches are numbered from 0, as everything in Python is.",
    "missing": "Some work is never done. Every rank runs F and B of every micro-batch, in each of its "
    "chunks.",
    "shared-list": "All ranks share one list, as after `[[]] * stages`: what you append for one rank "
    "stands in every rank's. Make a new list for each.",
    "doubled": "Some work is done twice.",
    "unknown-work": "An op belongs to no micro-batch or chunk of this step.",
    "cannot-run": "The schedule cannot run: no rank can do this op before what it needs is there. "
    "F needs the F of the piece of the model before it. B needs the B of the piece after it, and its "
    "own F. A rank does not skip an op that has to wait.",
    "built-in-schedule": "You call a function of `course_utils.schedules`, and this exercise is to "
    "write a schedule. Build the lists of ops yourself; look at the built-in one by plotting it.",
    "slow": "The schedule can run, and some rank waits longer than it must: ranks after it get their "
    "forward passes too late, or ranks before it their gradients.",
}
ONE_AT_A_TIME = {
    "one-at-a-time": "Every micro-batch goes all the way forward and back before the next one "
    "starts: one stage works, the others wait.",
}
PAIRS = {
    "doubled": "Some work is done twice. The F of the pairs go on in their order where the warm-up "
    "ended; the B of the pairs begin at the start of theirs, and the B at the end go on where the pairs "
    "ended.",
    "missing": "Some work is never done: every rank runs F and B of every micro-batch, in each of its "
    "chunks. After the last pair, as many B remain as the warm-up had F.",
}
ORDER = {
    "backwards-order": "Some rank does not run its backward passes in the order of its forward "
    "passes. The gradient of micro-batch 0 comes back first. The F and the B of a pair belong to "
    "different micro-batches: the B to the oldest that is still open.",
}
MEMORY = {
    "too-many-activations": "A rank has run too many forward passes whose backward pass has not come "
    "yet. Every one of them holds its activations.",
}


@dataclass(frozen=True)
class _Case:
    stages: int
    micro_batches: int
    chunks: int = 1

    def __str__(self) -> str:
        parts = [(self.stages, "stage"), (self.micro_batches, "micro-batch")]
        parts += [(self.chunks, "chunk")] if self.chunks > 1 else []
        return ", ".join(f"{count} {_plural(count, noun)}" for count, noun in parts)

    def time(self) -> int:
        """The shortest time of a step, in units of time, with the bubble of (interleaved) 1F1B."""
        return (self.chunks * self.micro_batches + self.stages - 1) * (FORWARD + BACKWARD)

    def work(self) -> Counter:
        """What every rank has to do."""
        return Counter(
            Op(kind, number, chunk)
            for kind in "FB"
            for number in range(self.micro_batches)
            for chunk in range(self.chunks)
        )


def _plural(count: int, noun: str) -> str:
    plurals = {"micro-batch": "micro-batches", "entry": "entries"}
    return noun if count == 1 else plurals.get(noun, f"{noun}s")


class _Judge:
    """Judges an answer by the form, legality, time and memory of its schedules.

    `call` calls the answer for a case; `budget` says how many activations a rank may hold.
    `suspects` are mistakes in the order of the work, by name, the more telling first: the first
    one that a bad schedule shows is named.
    """

    def __init__(self, call: Callable, budget: Budget, suspects: Mapping[str, Suspect]) -> None:
        self.call = call
        self.budget = budget
        self.suspects = suspects

    def legal(self, answer, case: _Case, strange_work: str | None = None) -> Schedule:
        """The answer's schedule; raises Wrong where it cannot run. `strange_work` names the
        mistake behind an op that belongs to no micro-batch, and behind work that is missing."""
        with forbidden.called(*BUILT_IN) as names:
            got = self.call(answer, case)
        if names:
            used = f"schedules.{names[0]}"
            raise Wrong("built-in-schedule", expected="a schedule of your own", got=used)
        schedule = _form(got, case)
        sentence = first_illegal_move(schedule, case.stages, case.micro_batches, case.chunks)
        if sentence:
            slug = _wrong_work(schedule, case)
            if slug in ("unknown-work", "missing") and strange_work:
                slug = strange_work
            raise Wrong(
                slug or self._suspect(schedule, case) or "cannot-run",
                expected=f"a schedule that can run, with {case}",
                got=sentence,
            )
        return schedule

    def in_time(self, answer, case: _Case) -> None:
        """Raises Wrong unless the schedule keeps to the budget of time."""
        schedule = self.legal(answer, case)
        needed, allowed = _simulated(schedule, case).makespan, case.time()
        if needed > allowed + 1e-9:
            raise Wrong(
                self._suspect(schedule, case) or "slow",
                expected=f"at most {allowed} units of time, with {case} (F {FORWARD}, B {BACKWARD})",
                got=f"{needed:g}: {needed - allowed:g} too many",
            )

    def in_memory(self, answer, case: _Case) -> None:
        """Raises Wrong unless every rank keeps to its budget of memory."""
        schedule = self.legal(answer, case)
        for rank, held in enumerate(_simulated(schedule, case).peak_in_flight):
            allowed = self.budget(case, rank)
            if held > allowed:
                raise Wrong(
                    self._suspect(schedule, case) or "too-many-activations",
                    expected=f"rank {rank} holds the activations of at most {allowed}, with {case}",
                    got=f"{held}: {held - allowed} too many",
                )

    def _suspect(self, schedule: Schedule, case: _Case) -> str | None:
        return next((s for s, fits in self.suspects.items() if fits(schedule, case)), None)


def _simulated(schedule: Schedule, case: _Case) -> Simulation:
    """The schedule on stages whose ops take FORWARD and BACKWARD for each chunk."""
    return simulate(schedule, FORWARD * case.chunks, BACKWARD * case.chunks)


def _form(got: object, case: _Case) -> Schedule:
    """What the answer gave, as lists; raises Wrong unless it is a list of ops for each rank."""
    slug = "returns-nothing" if got is None else "not-one-list-per-rank"
    expect_type(got, (list, tuple), likely=slug)
    if got and all(isinstance(entry, Op) for entry in got):
        raise Wrong("flat-list", expected="a list of lists, one for each rank", got=_shown(got))
    if len(got) != case.stages:
        raise Wrong(
            "not-one-list-per-rank",
            expected=f"one list for each rank, with {case}",
            got=f"{len(got)} {_plural(len(got), 'entry')}",
        )
    for row in got:
        expect_type(row, (list, tuple), likely="not-one-list-per-rank")
        for op in row:
            if op is None:
                raise Wrong("idle-entries", expected="ops only", got="None among them")
            if not isinstance(op, Op) or op.kind not in ("F", "B"):
                raise Wrong("not-ops", expected='ops such as Op("F", 3)', got=op)
    return [list(row) for row in got]


def _shown(row: Sequence[Op], most: int = 8) -> str:
    return " ".join(map(str, row[:most])) + (" ..." if len(row) > most else "")


def _wrong_work(schedule: Schedule, case: _Case) -> str | None:
    """What is wrong with the work itself, whatever its order."""
    done = {op for row in schedule for op in row}
    if {op.micro_batch for op in done} == set(range(1, case.micro_batches + 1)):
        return "counted-from-one"
    wanted = case.work()
    if done - set(wanted):
        return "unknown-work"
    counts = [Counter(row)[op] for row in schedule for op in wanted]
    if case.stages > 1 and set(counts) == {case.stages}:
        return "shared-list"
    if max(counts) > 1:
        return "doubled"
    return "missing" if any(Counter(row) != wanted for row in schedule) else None


def _warm_ups(schedule: Schedule) -> list[int]:
    """How many forward passes each rank runs before its first backward pass."""
    kinds = ["".join(op.kind for op in row) for row in schedule]
    return [row.index("B") if "B" in row else len(row) for row in kinds]


def _one_at_a_time(schedule: Schedule, case: _Case) -> bool:
    return case.micro_batches > 1 and set(_warm_ups(schedule)) == {case.chunks}


def _backwards_in_another_order(schedule: Schedule, case: _Case) -> bool:
    """Whether some rank takes the micro-batches of a chunk in order forward, and not backward."""

    def in_order(row: Sequence[Op], kind: str, chunk: int) -> bool:
        numbers = [op.micro_batch for op in row if (op.kind, op.chunk) == (kind, chunk)]
        return numbers == sorted(numbers)

    return any(
        in_order(row, "F", chunk) and not in_order(row, "B", chunk)
        for row in schedule
        for chunk in range(case.chunks)
    )


def _flow(draw) -> _Case:
    """A pipeline with more than twice as many micro-batches as stages."""
    stages = draw.integer(3, 5)
    return _Case(stages, draw.integer(2 * stages + 1, 14))


# ---- 5.2 -----------------------------------------------------------------------------------------

gpipe_exercise = Exercise(
    "5.2",
    "gpipe",
    points=2,
    minutes=20,
    kind="first",
    parameters=("stages", "micro_batches"),
    hints=[
        "What does one rank do, from its first op to its last? Does it differ from rank to rank?",
        (
            "All ranks do the same, in the same order; they only start at other times, and times are "
            "no part of a schedule. First the F of micro-batch 0, 1, 2, ..., then the B."
        ),
        (
            "Build one rank's list from two comprehensions, one over the F and one over the B, and "
            "return a copy of it for each stage."
        ),
    ],
    misconceptions={
        **FORM,
        **ONE_AT_A_TIME,
        "backwards-early": "A backward pass comes before the last forward pass. That is another "
        "schedule: GPipe runs all forward passes first.",
    },
)
_gpipe = _Judge(
    lambda answer, case: answer(case.stages, case.micro_batches),
    budget=lambda case, rank: case.micro_batches,
    suspects={"one-at-a-time": _one_at_a_time},
)


@gpipe_exercise.requires("the schedule can run: all the work, in an order that works", at_home=True)
def _(answer, draw):
    _gpipe.legal(answer, _flow(draw))


@gpipe_exercise.requires(
    "no slower than (micro_batches + stages - 1) * (F + B)", needs_earlier=True
)
def _(answer, draw):
    _gpipe.in_time(answer, _flow(draw))


@gpipe_exercise.requires("all forward passes before the first backward pass", needs_earlier=True)
def _(answer, draw):
    case = _flow(draw)
    for rank, first in enumerate(_warm_ups(_gpipe.legal(answer, case))):
        if first < case.micro_batches:
            raise Wrong(
                "backwards-early",
                expected=f"{case.micro_batches} F before the first B",
                got=f"{first} on rank {rank}",
            )


@gpipe_exercise.requires(
    "one stage, one micro-batch, and more stages than micro-batches", needs_earlier=True
)
def _(answer, draw):
    stages, some = draw.integer(3, 6), draw.integer(2, 5)
    for case in (_Case(1, some), _Case(stages, 1), _Case(stages, 2), _Case(1, 1)):
        _gpipe.in_time(answer, case)


# ---- 5.3 -----------------------------------------------------------------------------------------


def _mirrored(schedule: Schedule, case: _Case) -> bool:
    warm_ups = _warm_ups(schedule)
    return case.stages > 2 and warm_ups == sorted(warm_ups) and len(set(warm_ups)) > 2


def _short(least: Callable[[_Case, int], int]) -> Suspect:
    """Whether some rank has fewer forward passes before its first backward than `least`."""
    return lambda schedule, case: any(
        first < min(least(case, rank), case.chunks * case.micro_batches)
        for rank, first in enumerate(_warm_ups(schedule))
    )


def _more_by(extra: int, most: Callable[[_Case, int], int]) -> Suspect:
    """Whether the first rank runs `extra` forward passes more than `most` before its first B."""
    return lambda schedule, case: _warm_ups(schedule)[0] == most(case, 0) + extra


def _all_forward_first(schedule: Schedule, case: _Case) -> bool:
    return set(_warm_ups(schedule)) == {case.chunks * case.micro_batches}


def _all_as_the_first(most: Callable[[_Case, int], int]) -> Suspect:
    """Whether every rank runs as many forward passes before its first B as the first rank may."""
    return lambda schedule, case: set(_warm_ups(schedule)) == {most(case, 0)}


def _until_first_backward(case: _Case, rank: int) -> int:
    """1F1B: the F of micro-batch 0 reaches the last rank while these ones follow it."""
    return case.stages - rank


alternating = Exercise(
    "5.3",
    "one_forward_one_backward",
    points=3,
    minutes=30,
    kind="core",
    parameters=("stages", "micro_batches"),
    hints=[
        (
            "The last rank can run B0 right after F0. How many forward passes can the rank before it "
            "run until the gradient of micro-batch 0 comes back to it? And rank 0?"
        ),
        (
            "Rank r runs stages - 1 - r forward passes as a warm-up, but never more than there are "
            "micro-batches. Then it runs pairs: the next F, the next B. At the end the B that remain."
        ),
        (
            "Three parts for each rank: `ahead` F; then for n from 0 to micro_batches - ahead - 1 the "
            "F of micro-batch n + ahead and the B of micro-batch n; then the last `ahead` B."
        ),
    ],
    misconceptions={
        **FORM,
        **ONE_AT_A_TIME,
        **PAIRS,
        **ORDER,
        **MEMORY,
        "mirrored": "Your warm-up grows from the first rank to the last. It is the first rank that "
        "waits longest for a gradient, and so runs the most forward passes first.",
        "warm-up-short": "Some rank begins its backward passes too early. It lacks a forward pass, "
        "or waits in every turn for a gradient that is still on its way.",
        "all-forward-first": "Your schedule is GPipe's: every rank runs all forward passes first, "
        "and holds the activations of all micro-batches.",
        "same-warm-up": "Every rank has the same warm-up. Only the first one needs it so long: the "
        "nearer to the end, the sooner the first gradient comes.",
        "one-too-many": "The warm-up is one forward pass too long. Count the forward pass of the "
        "first pair too: it comes before the first backward pass.",
        "warm-up-not-capped": "With fewer micro-batches than stages, something is done that is not there, or "
        "left out. The warm-up ends where the micro-batches end; no pair follows, and then come all B.",
    },
)
_1f1b = _Judge(
    lambda answer, case: answer(case.stages, case.micro_batches),
    budget=_until_first_backward,
    suspects={
        "one-at-a-time": _one_at_a_time,
        "mirrored": _mirrored,
        "all-forward-first": _all_forward_first,
        "same-warm-up": _all_as_the_first(_until_first_backward),
        "warm-up-short": _short(_until_first_backward),
        "one-too-many": _more_by(1, _until_first_backward),
        "backwards-order": _backwards_in_another_order,
    },
)


@alternating.requires("the schedule can run: all the work, in an order that works", at_home=True)
def _(answer, draw):
    _1f1b.legal(answer, _flow(draw))


@alternating.requires("no slower than (micro_batches + stages - 1) * (F + B)", needs_earlier=True)
def _(answer, draw):
    _1f1b.in_time(answer, _flow(draw))


@alternating.requires(
    "rank r holds at most the activations of stages - r micro-batches", needs_earlier=True
)
def _(answer, draw):
    _1f1b.in_memory(answer, _flow(draw))


@alternating.requires(
    "one stage, one micro-batch, and more stages than micro-batches",
    failures={"IndexError": "warm-up-not-capped", "ValueError": "warm-up-not-capped"},
    needs_earlier=True,
)
def _(answer, draw):
    stages, some = draw.integer(4, 6), draw.integer(2, 5)
    for case in (_Case(1, some), _Case(stages, 2), _Case(stages, 1), _Case(1, 1)):
        _1f1b.legal(answer, case, strange_work="warm-up-not-capped")
        _1f1b.in_time(answer, case)
        _1f1b.in_memory(answer, case)


# ---- 5.4 -----------------------------------------------------------------------------------------


def _megatrons(case: _Case, rank: int) -> int:
    """Megatron-LM's forward passes up to the first backward pass."""
    return (case.chunks - 1) * case.stages + 2 * (case.stages - rank) - 1


def _fewest(case: _Case, rank: int) -> int:
    """As many are enough for the same time, where messages take none."""
    return (case.chunks - 1) * case.stages + case.stages - rank


def _first_backward_chunk(schedule: Schedule) -> int | None:
    return next((op.chunk for row in schedule for op in row if op.kind == "B"), None)


def _chunk_0_first(schedule: Schedule, case: _Case) -> bool:
    forward = [op for op in schedule[0] if op.kind == "F"][: case.micro_batches]
    return case.micro_batches > case.stages and not any(op.chunk for op in forward)


def _other_groups(schedule: Schedule, case: _Case) -> bool:
    """Whether rank 0 changes the chunk after another number of forward passes than `stages`."""
    chunks = [op.chunk for op in schedule[0] if op.kind == "F"]
    return chunks[0] == 0 and any(chunks) and chunks.index(1) != case.stages


def _chunks_in_a_row(schedule: Schedule, case: _Case) -> bool:
    forward = [op for op in schedule[0] if op.kind == "F"]
    return forward[0].micro_batch == forward[1].micro_batch


interleaving = Exercise(
    "5.4",
    "interleaved",
    points=3,
    minutes=70,
    kind="stretch",
    parameters=("stages", "micro_batches", "chunks"),
    hints=[
        (
            "Write down the F of one rank for 2 stages, 4 micro-batches and 2 chunks. When micro-batch "
            "0 comes back to rank 0 for chunk 1, how many others has rank 0 started? Every rank runs "
            "its F in this same order."
        ),
        (
            "Micro-batches go in groups of `stages`: a group through chunk 0, the same group through "
            "chunk 1, and so on, then the next group. The B go in the same groups, with the chunks from "
            "the last to the first. The warm-up is 2 * (stages - 1 - rank), and `stages` more for every "
            "chunk but one."
        ),
        (
            "Make one list of all F in this order and one of all B. Rank r takes its warm-up from the "
            "first list, but never more than all; then, in turn, the next F and the next B; then the "
            "rest of the B."
        ),
    ],
    misconceptions={
        **FORM,
        **PAIRS,
        **ORDER,
        **MEMORY,
        "chunks-missing": "Only chunk 0 is there. Every rank runs each micro-batch through each of "
        "its chunks: the third argument of Op.",
        "pieces-not-chunks": "The third argument of Op is the number of the chunk on its rank, from 0 "
        "to chunks - 1, not that of the piece in the whole model.",
        "other-groups": "Your groups have another size. The chunk changes after every `stages` "
        "micro-batches: then the first of them has passed all ranks, and comes back.",
        "chunks-not-reversed": "Your first backward pass is one through chunk 0. The gradient comes "
        "from the end of the model: backward passes begin with the last chunk.",
        "chunks-in-a-row": "A rank runs its chunks of one micro-batch one after the other. Between two "
        "chunks the micro-batch has to pass all other ranks: meanwhile, take the next micro-batch.",
        "all-forward-first": "Every rank runs all forward passes first, and holds the activations of "
        "all micro-batches in all chunks.",
        "chunk-0-first": "A rank runs all micro-batches through chunk 0 before it begins with chunk "
        "1. Change the chunk after every `stages` micro-batches.",
        "same-warm-up": "Every rank has the same warm-up. The nearer a rank is to the end, the sooner "
        "its first gradient comes.",
        "warm-up-short": "Some rank begins its backward passes too early. It lacks a forward pass, "
        "or waits in every turn for a gradient that is still on its way: the first micro-batch has "
        "to pass all chunks before its gradient starts.",
        "one-too-many": "The warm-up is one forward pass too long. Count the forward pass of the "
        "first pair too: it comes before the first backward pass.",
        "warm-up-not-capped": "With few micro-batches, the warm-up is longer than all the forward "
        "passes. It ends where they end.",
    },
)
_interleaved = _Judge(
    lambda answer, case: answer(case.stages, case.micro_batches, case.chunks),
    budget=_megatrons,
    suspects={
        "chunks-not-reversed": lambda s, case: case.chunks > 1 and _first_backward_chunk(s) == 0,
        "chunks-in-a-row": _chunks_in_a_row,
        "all-forward-first": _all_forward_first,
        "chunk-0-first": _chunk_0_first,
        "other-groups": _other_groups,
        "same-warm-up": _all_as_the_first(_megatrons),
        "warm-up-short": _short(_fewest),
        "one-too-many": _more_by(1, _megatrons),
        "backwards-order": _backwards_in_another_order,
    },
)


def _groups(draw) -> _Case:
    """Some groups of as many micro-batches as there are stages, and several chunks."""
    stages = draw.integer(3, 4)
    chunks = draw.integer(2, stages - 1)  # fewer than stages: groups of `chunks` are a mistake
    return _Case(stages, stages * draw.integer(3, 4), chunks)


@interleaving.requires("the schedule can run: all the work, in an order that works", at_home=True)
def _(answer, draw):
    case = _groups(draw)
    schedule = _form(_interleaved.call(answer, case), case)
    if not any(op.chunk for row in schedule for op in row):
        raise Wrong("chunks-missing", expected=f"chunks 0 to {case.chunks - 1}", got="chunk 0 only")
    highest = max(op.chunk for row in schedule for op in row)
    if highest >= case.chunks:
        expected = f"chunks 0 to {case.chunks - 1}, with {case}"
        raise Wrong("pieces-not-chunks", expected=expected, got=f"chunk {highest}")
    _interleaved.legal(answer, case)


@interleaving.requires(
    "no slower than (chunks * micro_batches + stages - 1) * (F + B)", needs_earlier=True
)
def _(answer, draw):
    _interleaved.in_time(answer, _groups(draw))


@interleaving.requires(
    "rank r holds at most (chunks - 1) * stages + 2 * (stages - r) - 1 activations",
    needs_earlier=True,
)
def _(answer, draw):
    _interleaved.in_memory(answer, _groups(draw))


@interleaving.requires(
    "as many micro-batches as stages, one stage, and one chunk",
    failures={"IndexError": "warm-up-not-capped", "ValueError": "warm-up-not-capped"},
    needs_earlier=True,
)
def _(answer, draw):
    stages, chunks = draw.integer(3, 5), draw.integer(2, 3)
    few, alone = _Case(stages, stages, 2), _Case(1, draw.integer(2, 5), chunks)
    for case in (few, alone, _Case(1, 1, 1), _Case(stages, 2 * stages, 1)):
        _interleaved.legal(answer, case, strange_work="warm-up-not-capped")
        _interleaved.in_time(answer, case)
        _interleaved.in_memory(answer, case)


# ---- 5.5 -----------------------------------------------------------------------------------------

Gradients = dict[str, Tensor | None]

accumulation = Exercise(
    "5.5",
    "micro_batch_gradients",
    points=2,
    minutes=20,
    kind="core",
    parameters=("model", "loss_function", "inputs", "targets", "size"),
    hints=[
        (
            "Write the mean over 5 samples with the means over the first 3 and the last 2. With which "
            "weights does it become the same number?"
        ),
        (
            "A micro-batch of k samples out of N has the weight k / N. What multiplies a loss also "
            "multiplies its gradients."
        ),
        (
            "Set the old gradients to None. For each micro-batch: forward, the loss times len(x) / "
            "len(inputs), backward. `backward()` adds up the gradients by itself, and you add up the "
            "weighted losses."
        ),
    ],
    misconceptions={
        "no-backward": "No parameter has a gradient: `backward()` is never called, or the last thing "
        "you do is clear what it gave.",
        "no-graph": "There is no graph behind this loss: under `torch.no_grad()`, or behind `.item()` "
        "and `.detach()`, nothing is recorded. Call `backward()` on what the model gave; a number for "
        "the sum is taken after it.",
        "running-total": "You call `backward()` on a running total: it goes through the earlier "
        "micro-batches again in every turn. Call it on this micro-batch's loss alone.",
        "windows": "Your micro-batches overlap: micro-batch i begins at sample i * size, not at i.",
        "targets-not-cut": "Inputs and targets have to be cut alike: sample i of one belongs to "
        "sample i of the other.",
        "other-weights": "Every micro-batch's gradient has to count once, with the share of its "
        "samples, `len(x) / len(inputs)`.",
        "loss-otherwise": "The mean loss is the sum of the micro-batches' losses, each times the share "
        "of its samples, `len(x) / len(inputs)`.",
        "sum-not-mean": "Your gradients are too large by the number of micro-batches: every loss is "
        "a mean already, and you add up these means. Adam would hide it, SGD does not.",
        "samples-summed": "Your gradients are those of the summed loss: they are too large by the "
        "number of samples.",
        "divided-twice": "The mean over the micro-batches is divided once more.",
        "divided-by-samples": "You divide by the number of samples what is a mean over a micro-batch "
        "already: the gradients are too small by its size.",
        "mean-of-means": "You give every micro-batch the same weight. The last one is smaller: its "
        "samples would count more than the others.",
        "one-size-for-all": "You give the last micro-batch the weight of a full one. Its weight is "
        "the number of its own samples over the number of all.",
        "count-rounded-down": "`len(inputs) // size` leaves out the smaller micro-batch at the end. "
        "And even with their true number, one weight for all would give its samples too much.",
        "last-lost": "The samples of the last, smaller micro-batch play no part.",
        "last-only": "Only the last micro-batch's gradient is left: the earlier ones were cleared. "
        "Clear once, before the first micro-batch.",
        "loss-not-mean": "You return the sum of the micro-batches' losses: asked is the mean over all "
        "samples.",
        "loss-of-last": "You return the last micro-batch's loss: asked is the mean over all samples.",
        "loss-unweighted": "You return the mean of the micro-batches' losses. Weigh the last one by "
        "its size, as you do for the gradients.",
        "none-gradient": "A frozen or unused parameter has no gradient: its `.grad` is None. Skip it.",
        "zeros-for-none": "A parameter without a gradient has received one. A `.grad` of zeros is "
        "not the same as None: weight decay and momentum would move the parameter.",
        "tied-twice": "A tied parameter, one tensor in two layers, was scaled once per layer.",
        "old-gradients": "What stood in `.grad` before is still in it. Clear the gradients before "
        "the first micro-batch.",
        "parameters-moved": "The parameters have changed. The optimizer's step is not part of this.",
        "whole-batch": "The model has seen more than `size` samples at once: that is the memory that "
        "micro-batches are to save.",
        "other-sizes": "The micro-batches have other sizes than asked: `size` samples each, and the "
        "rest in the last. `split(n)` cuts pieces of n samples, `chunk(n)` cuts n pieces.",
        "other-order": "The micro-batches hold other samples than asked: the batch is cut in its order, "
        "the first `size` samples first.",
        "evaluation-mode": "The model is not in training mode, in its forward passes or afterwards: "
        "`model.eval()` switches dropout off and makes batch norm use other numbers. That these are "
        "micro-batches of a training step does not change.",
        "loss-with-graph": "You return a loss that is still tied to its graph, and keeps alive what "
        "the graph keeps. Asked is a number: `.item()`.",
        "graph-kept": "A micro-batch's graph has outlived its backward pass: its activations are "
        "still there when the next forward pass begins. `retain_graph=True` does that, for a second "
        "backward pass; here each graph has one.",
        "one-backward": "A forward pass began before the micro-batch before it was through its "
        "backward pass: its activations are kept. Call backward in every turn of the loop.",
    },
    failures={
        "a second time": "running-total",
        "'float' object has no attribute 'backward'": "no-graph",
        "does not require grad": "no-graph",
        "to match target batch_size": "targets-not-cut",
    },
    at_home=True,
)


def _plain(features: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, classes))


class _Awkward(nn.Module):
    """A frozen layer, one that the loss does not use, and a weight that two layers share."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = nn.Linear(features, features)
        self.frozen = nn.Linear(features, features).requires_grad_(False)
        self.unused = nn.Linear(features, 3)
        self.tied = nn.Linear(features, features)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.tied(self.frozen(self.first(x)).tanh()).tanh())


@dataclass
class _Batch:
    """A model, a batch for it, and what the model saw of it."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    size: int
    seen: list[int] = field(default_factory=list)  # samples of each forward pass
    open: int = 0  # forward passes whose backward pass has not come
    most_open: int = 0
    evaluated: bool = False  # was some part of the model in evaluation mode?
    activations: list[weakref.ref] = field(default_factory=list)  # memory kept for backward
    fed: list[Tensor] = field(default_factory=list)  # the samples of each forward pass
    outlived: bool = False  # was any of it still there when a later forward pass began?

    def watch(self) -> None:
        self.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.model.register_forward_hook(self._forward)
        for module in self.model.modules():
            if isinstance(module, nn.Tanh):  # its output is kept, and only for backward
                module.register_forward_hook(self._keep)

    def not_training(self) -> bool:
        return not all(module.training for module in self.model.modules())

    def _begin(self, model, inputs, keywords):
        self.evaluated |= self.not_training()
        self.fed.append((*inputs, *keywords.values())[0])
        self.outlived |= any(memory() is not None for memory in self.activations)

    def _keep(self, module, inputs, output):
        with contextlib.suppress(NotImplementedError):  # tensors of torch.func show no memory
            self.activations.append(weakref.ref(output.untyped_storage()))

    def _forward(self, model, inputs, output):
        self.seen.append(len(output) if output.dim() > 1 else 1)  # 1: a sample without a batch
        if output.requires_grad:
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            output.register_hook(self._backward)

    def _backward(self, gradient):
        self.open -= 1

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.inputs.split(self.size), self.targets.split(self.size), strict=True))


def _loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def _batch(draw, make: Callable[[int, int], nn.Module], samples: int, size: int) -> _Batch:
    torch.manual_seed(draw.seed())
    features, classes = draw.integer(3, 6), draw.integer(3, 5)
    targets = draw.integers(samples, low=0, high=classes - 1)
    return _Batch(make(features, classes), 2 * draw.tensor(samples, features), targets, size)


def _uneven(draw, full: int) -> tuple[int, int]:
    """A number of samples and a size: some full micro-batches and a smaller one."""
    size = draw.integer(4, 6)  # unlike the number of micro-batches, which tells mistakes apart
    return full * size + draw.integer(2, size - 2), size


def _gradients(model: nn.Module) -> Gradients:
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def _gradient(model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[float, Gradients]:
    """The mean loss of these samples, and its gradients; leaves the model alone."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    loss = _loss(model(inputs), targets)
    loss.backward()
    return loss.item(), _gradients(model)


def _weighted(parts: list[Gradients], weights: Sequence[float]) -> Gradients:
    """The weighted sum by name; None where no part has a gradient."""
    return {
        name: None if parts[0][name] is None else sum(w * p[name] for w, p in zip(weights, parts))
        for name in parts[0]
    }


def _gradient_mistakes(batch: _Batch) -> dict[str, Gradients | bool]:
    """What each mistake makes of the gradients, by misconception."""
    parts = batch.parts()
    each = [_gradient(batch.model, x, y)[1] for x, y in parts]
    count, total = len(each), len(batch.inputs)
    own = [len(x) for x, _ in parts]
    uneven = own[-1] != own[0]
    mean = [n / total for n in own]
    dropped = [[w * (i < count - 1) for i, w in enumerate(ws)] for ws in _weightings(batch)]
    whole = sum(own[:-1])
    windows = [
        _gradient(batch.model, *(t[i : i + batch.size] for t in (batch.inputs, batch.targets)))[1]
        for i in range(count)
    ]
    totals = [w * (count - i) for i, w in enumerate(mean)]
    return {
        "no-backward": lambda got: all(gradient is None for gradient in got.values()),
        "running-total": count > 1 and _weighted(each, totals),
        "windows": lambda got: (
            count > 1 and any(same(got, _weighted(windows, ws)) for ws in _weightings(batch))
        ),
        "sum-not-mean": count > 1 and _weighted(each, [1] * count),
        "samples-summed": _weighted(each, own),
        "last-only": lambda got: (
            count > 1
            and any(same(got, _weighted(each[-1:], [w])) for w in (1, 1 / count, mean[-1]))
        ),
        "mean-of-means": uneven and _weighted(each, [1 / count] * count),
        "one-size-for-all": uneven and _weighted(each, [batch.size / total] * count),
        "count-rounded-down": uneven
        and total > batch.size
        and _weighted(each, [1 / (total // batch.size)] * count),
        "last-lost": lambda got: (
            uneven
            and any(
                same(got, _weighted(each, weights))
                for weights in (*dropped, [n / whole * (n == own[0]) for n in own])
            )
        ),
        "divided-by-samples": _weighted(each, [1 / total] * count),
        "divided-twice": count > 1 and _weighted(each, [w / count for w in mean]),
        "other-weights": True,
    }


def _weightings(batch: _Batch) -> list[list[float]]:
    """Weights that people give to the micro-batches."""
    own = [len(x) for x, _ in batch.parts()]
    return [[1.0] * len(own), [1 / len(own)] * len(own), [n / len(batch.inputs) for n in own]]


def _check_gradients(answer, batch: _Batch, likely: Mapping | None = None) -> float:
    """Compares the gradients with the whole batch's; returns what the answer returned."""
    _, expected = _gradient(batch.model, batch.inputs, batch.targets)
    mistakes = {**(likely or {}), **_gradient_mistakes(batch)}
    before = copy.deepcopy(batch.model.state_dict())
    batch.watch()
    value = answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
    if batch.evaluated or batch.not_training():
        raise Wrong("evaluation-mode", expected="training mode", got="evaluation mode")
    if any(not torch.equal(tensor, before[k]) for k, tensor in batch.model.state_dict().items()):
        raise Wrong("parameters-moved", expected="the same parameters as before", got="others")
    expect(_gradients(batch.model), expected, what="the gradients", likely=mistakes)
    return value


@accumulation.requires("equal micro-batches give the gradients of the batch's mean loss")
def _(answer, draw):
    size = draw.integer(4, 6)  # unlike the number of micro-batches, which tells mistakes apart
    _check_gradients(answer, _batch(draw, _plain, 3 * size, size))


@accumulation.requires("so they do where the last micro-batch is smaller, or the only one")
def _(answer, draw):
    size = draw.integer(4, 6)
    for samples, own in (_uneven(draw, 3), (size - 1, size), (draw.integer(2, 4), 1)):
        _check_gradients(answer, _batch(draw, _plain, samples, own))


@accumulation.requires("the result is the mean loss of the whole batch")
def _(answer, draw):
    equal = draw.integer(4, 6)
    for samples, size in ((3 * equal, equal), _uneven(draw, 3)):
        batch = _batch(draw, _plain, samples, size)
        losses = [_gradient(batch.model, x, y)[0] for x, y in batch.parts()]
        mean, _ = _gradient(batch.model, batch.inputs, batch.targets)
        got = answer(batch.model, _loss, batch.inputs, batch.targets, size)
        expect_type(got, (float, Tensor))
        if isinstance(got, Tensor) and got.requires_grad:
            raise Wrong("loss-with-graph", expected="a number", got=got)
        likely = {
            "loss-not-mean": sum(losses),
            "loss-of-last": lambda got, losses=losses, own=(samples % size or size) / samples: (
                same(got, losses[-1]) or same(got, losses[-1] * own)
            ),
            "loss-unweighted": sum(losses) / len(losses),
            "loss-otherwise": True,
        }
        expect(got, mean, what="the loss", likely=likely)


@accumulation.requires(
    "frozen and unused parameters keep no gradient, and a tied one has one",
    failures={"TypeError": "none-gradient", "AttributeError": "none-gradient"},
)
def _(answer, draw):
    batch = _batch(draw, _Awkward, *_uneven(draw, 2))
    _, expected = _gradient(batch.model, batch.inputs, batch.targets)
    without = [name for name in expected if expected[name] is None]
    for name in without:  # as if the parameter had learned until now
        parameter = batch.model.get_parameter(name)
        parameter.grad = torch.ones_like(parameter)

    def old(got):
        return all(got[name] is not None and got[name].all() for name in without)

    def zeros(got):
        return any(got[name] is not None for name in without)

    def twice(got):
        others = [n for n in expected if n != "first.weight"]
        return all(same(got[n], expected[n]) for n in others)

    likely = {"old-gradients": old, "zeros-for-none": zeros, "tied-twice": twice}
    _check_gradients(answer, batch, likely)


@torch.no_grad()
def _step(model: nn.Module) -> None:
    """One step of SGD, by hand."""
    for parameter in model.parameters():
        parameter -= 0.1 * parameter.grad


@accumulation.requires("three steps of SGD end with the parameters of whole-batch training")
def _(answer, draw):
    batch = _batch(draw, _plain, *_uneven(draw, 3))
    alone = copy.deepcopy(batch.model)
    for step in range(3):
        answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
        _, gradients = _gradient(alone, batch.inputs, batch.targets)
        for name, parameter in alone.named_parameters():
            parameter.grad = gradients[name]
        expect(
            _gradients(batch.model),
            gradients,
            what=f"the gradients of step {step}",
            likely={"old-gradients": step > 0},
        )
        for model in (batch.model, alone):
            _step(model)
    expect(batch.model.state_dict(), alone.state_dict(), what="the parameters")


@accumulation.requires("one micro-batch of `size` samples at a time, and no more activations")
def _(answer, draw):
    size = draw.integer(4, 6)
    batch = _batch(draw, _plain, 2 * size + 1, size)  # `chunk(5)` would cut 11 into 3, 3, 3, 2
    batch.watch()
    answer(batch.model, _loss, batch.inputs, batch.targets, batch.size)
    if max(batch.seen, default=0) > batch.size:
        raise Wrong("whole-batch", expected=f"at most {batch.size} samples", got=max(batch.seen))
    sizes = [len(x) for x, _ in batch.parts()]
    if batch.seen != sizes:
        slug = "other-order" if sorted(batch.seen) == sorted(sizes) else "other-sizes"
        raise Wrong(slug, expected=f"micro-batches of {sizes} samples", got=batch.seen)
    if not same(batch.fed, [x for x, _ in batch.parts()]):
        raise Wrong("other-order", expected="the samples in their order", got="another order")
    if batch.most_open > 1:
        raise Wrong("one-backward", expected="1 micro-batch in flight", got=batch.most_open)
    if batch.outlived:
        got = "those of the one before are still there"
        raise Wrong("graph-kept", expected="no activations when a forward pass begins", got=got)


# ---- 5.6 -----------------------------------------------------------------------------------------

exchanging = Exercise(
    "5.6",
    "exchange",
    points=3,
    minutes=30,
    kind="core",
    parameters=("activations", "gradients"),
    hints=[
        (
            "Draw three ranks in a line, each with an arrow to both sides. Which of them has a partner "
            "that receives, if each begins with `dist.send`?"
        ),
        (
            "`dist.isend` and `dist.irecv` only start a message, and return a handle; `wait()` on the "
            "handle ends it. Start everything, then wait for everything. The ends of the line have "
            "one neighbour only."
        ),
        (
            "For each neighbour that exists: make the outgoing tensor contiguous, make room like it, "
            "start the send and the receive. `dist.batch_isend_irecv` starts a list of P2POp at once. "
            "Wait for every handle, then return the two rooms, None where there is no neighbour."
        ),
    ],
    misconceptions={
        "both-send": "Two neighbours wait in `send` to each other, and neither receives. Start the "
        "messages with `isend` and `irecv` and wait afterwards, or let one of two neighbours "
        "receive first.",
        "both-receive": "Two neighbours wait in `recv` from each other, and neither has sent. Start "
        "the messages with `isend` and `irecv` and wait afterwards.",
        "unanswered": "A rank waits for a message whose other end does not exist: every send needs "
        "a recv on the neighbour, and every recv a send.",
        "two-stages-only": "Two stages manage, and a longer line hangs: a stage in the middle has "
        "two neighbours, and waits for one of them while the other waits for it.",
        "beyond-the-ends": "A rank talks to one that does not exist. Activations go to rank + 1, "
        "gradients to rank - 1; the first rank has no previous one, and the last no next one.",
        "room-at-the-ends": "Where a rank has no neighbour nothing comes: return None there, not the "
        "empty room.",
        "truth-of-a-tensor": "`if activations:` asks whether its numbers are true. Ask "
        "`if activations is not None:`.",
        "talks-to-itself": "A rank sends to itself, or receives from itself. The previous rank is "
        "`rank - 1`, the next one is `rank + 1`.",
        "alone": "With one rank there is nobody to talk to: return (None, None).",
        "swapped-results": "The two results have changed places: first what comes from the previous "
        "rank, then what comes from the next one.",
        "own-returned": "A rank returns what it was handed itself, not what its neighbours sent.",
        "one-way-only": "Only one of the two directions works. Activations go to the next rank, and "
        "gradients to the previous one.",
        "not-waited": "A message was started and nobody waited for it: its tensor may not be there "
        "yet, or not be sent. Call `wait()` on every handle before you return.",
        "into-what-is-sent": "You receive into a tensor that was handed in. It may still be on its "
        "way to the neighbour: receive into a new one.",
        "handed-in-changed": "A tensor that was handed in has changed.",
        "belongs-to-a-graph": "What you return belongs to the graph of what was handed in, as a "
        "clone of it does: that graph stays in memory, and backward would run through it. Make the "
        "room with `torch.empty_like`.",
        "zeros-left-out": "A tensor of zeros is not handed over. Only None says that there is no "
        "neighbour: ask `is not None`.",
        "more-than-the-tensors": "More bytes are sent than the tensors have. Shape and dtype of "
        "what comes are known on both sides: no message about them is needed, and no object whose "
        "pickle carries them.",
        "built-in-collective": "You called a collective, in which every rank takes part. A stage "
        "talks to its neighbours only: use send and receive.",
        "not-a-neighbour": "A rank talks to one that is not its neighbour. In a long pipeline this "
        "traffic crosses the whole cluster.",
        "shapes-assumed": "The room for what comes in has the wrong size. Activations from the "
        "previous rank look like the gradients that go back to it, and gradients from the next rank "
        "like the activations that went there.",
        "room-kept": "The room for what comes in is the same in every call, and so what an earlier call has "
        "returned changes under the hands of whoever keeps it. Make a new one in each call.",
        "dtype-lost": "The room for what comes in has the wrong dtype: `torch.empty` makes float32. "
        "`torch.empty_like` takes the tensor's own.",
        "needs-contiguous": "`send` and `recv` need contiguous memory. Send `tensor.contiguous()`, "
        "and make the room with the same shape, but contiguous.",
    },
    failures={
        "Boolean value of Tensor": "truth-of-a-tensor",
        "names itself": "talks-to-itself",
        "same as the rank of the current process": "talks-to-itself",
        "there is no rank": "beyond-the-ends",
    },
)

Handed = tuple[Tensor | None, Tensor | None]  # to the next rank, to the previous rank
MESSAGES = ("send", "recv_", "recv_any_source_")


@dataclass
class _Exchanged:
    """What a rank saw of one call."""

    received: object
    changed: bool = False  # have the tensors changed that were handed in?
    calls: list[tuple[str, int | None]] = field(default_factory=list)  # name and peer
    sent: int = 0  # bytes
    graph: bool = False  # does what it returned belong to a graph?
    reused: bool = False  # was something received into a tensor that was handed in?
    returned_before: bool = False  # has an earlier call returned this very memory?
    unwaited: list[str] = field(default_factory=list)  # messages that nobody waited for


def _exchanged(rank, answer, own: list[Handed], prepare) -> list[_Exchanged]:
    """Runs the answer on this rank's tensors of each case; `prepare` gives them their layout."""
    reports, returned = [], set()
    for handed in own:
        report = _one_exchange(answer, handed, prepare)
        tensors = filter(torch.is_tensor, tree_leaves(report.received))
        came = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        report.returned_before = bool(came & returned)
        returned |= came
        reports.append(report)
    return reports


def _one_exchange(answer, own: Handed, prepare) -> _Exchanged:
    handed = [None if t is None else prepare(t.to(device())) for t in own]
    before = [None if t is None else (t.detach().clone(), t.stride()) for t in handed]
    report = _Exchanged(None)
    memory = {t.untyped_storage().data_ptr() for t in handed if t is not None}
    messages: list[tuple[str, dist.Work]] = []

    def hear(name, arguments):
        report.calls.append((name, arguments.get("dst", arguments.get("src"))))
        if name not in MESSAGES:
            return None
        if name == "send":
            report.sent += arguments["tensors"][0].nbytes
        else:
            report.reused |= arguments["tensors"][0].untyped_storage().data_ptr() in memory
        return lambda result: hand_work(result, lambda work: messages.append((name, work)))

    with waits() as asked, listening(hear):
        report.received = answer(*handed)
    finish_device_work()
    unwaited = [m for m in messages if not any(m[1] is other for other in asked)]
    report.unwaited = [name for name, _ in unwaited]
    for _, work in unwaited:
        work.wait()  # so that what comes next is the same in every run
    report.graph = any(t.requires_grad for t in tree_leaves(report.received) if torch.is_tensor(t))
    report.changed = not same(
        [(t, t.stride()) for t in handed if t is not None], [b for b in before if b is not None]
    )
    return report


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t()


def _in_a_graph(tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() * 1


def _line(ranks: int, make: Callable[[int], Tensor]) -> list[Handed]:
    """What each rank of a line is handed; `make(link)` makes a tensor for the link from rank
    `link` to the next."""
    to_next = [*(make(link) for link in range(ranks - 1)), None]
    to_previous = [None, *(make(link) for link in range(ranks - 1))]
    return list(zip(to_next, to_previous, strict=True))


def _check_exchange(
    answer, cases: list[list[Handed]], prepare=_as_it_is, alone: bool = False
) -> None:
    """Hands out each case, in turn; with `alone`, nothing but the tensors may be sent."""
    ranks = len(cases[0])
    reports = run(_exchanged, ranks, answer, OwnPart([*zip(*cases, strict=True)]), prepare)
    for seen in zip(*reports, strict=True):
        _check_messages(seen)
    if any(each.returned_before for report in reports for each in report):
        got = "the memory of what an earlier call has returned"
        raise Wrong("room-kept", expected="new tensors from each call", got=got)
    for i, case in enumerate(cases):
        seen = [report[i] for report in reports]
        to_next = [None if t is None else prepare(t) for t, _ in case]
        to_previous = [None if t is None else prepare(t) for _, t in case]
        expected = list(zip([None, *to_next[:-1]], [*to_previous[1:], None], strict=True))
        own = list(zip(to_next, to_previous, strict=True))
        _check_received([report.received for report in seen], expected, own)
        if any(report.changed for report in seen):
            raise Wrong("handed-in-changed", expected="the tensors as they were", got="others")
        if any(report.graph for report in seen):
            got = "one that requires a gradient"
            raise Wrong("belongs-to-a-graph", expected="a tensor by itself", got=got)
        for report, tensors in zip(seen, own, strict=True):
            whole = sum(t.nbytes for t in tensors if t is not None)
            if alone and report.sent > whole:
                got = f"{report.sent} bytes"
                raise Wrong("more-than-the-tensors", expected=f"{whole} bytes", got=got)


def _check_messages(seen: Sequence[_Exchanged]) -> None:
    """Raises Wrong unless every rank sent and received point to point, with its neighbours, and
    waited for all of it. What this finds might still give the right tensors, by chance."""
    for rank, report in enumerate(seen):
        for name, peer in report.calls:
            if name not in MESSAGES:
                raise Wrong("built-in-collective", expected="send and recv", got=name.strip("_"))
            if peer is None or abs(peer - rank) != 1:
                other = "any rank" if peer is None else f"rank {peer}"
                got = f"rank {rank}: {'send to' if name == 'send' else 'recv from'} {other}"
                raise Wrong("not-a-neighbour", expected="messages with neighbours only", got=got)
    for rank, report in enumerate(seen):
        if report.reused:
            got = f"rank {rank} receives into a tensor that it was handed"
            raise Wrong("into-what-is-sent", expected="a new tensor", got=got)
        if report.unwaited:
            got = f"on rank {rank} nobody waits for a {report.unwaited[0].split('_')[0]}"
            raise Wrong("not-waited", expected="a wait() for every message", got=got)


def _check_received(got: list, expected: list[Handed], own: list[Handed]) -> None:
    if not all(result is None for result in got):
        for result in got:
            expect_type(result, (tuple, list))
    likely = {
        "zeros-left-out": lambda got: any(
            g is None and e is not None and not e.any()
            for pairs in zip(got, expected, strict=True)
            for g, e in zip(*pairs, strict=True)
        ),
        "swapped-results": [pair[::-1] for pair in expected],
        "own-returned": lambda got: same(got, own) or same(got, [pair[::-1] for pair in own]),
        "room-at-the-ends": lambda got: not (got[0][0] is got[-1][1] is None),
        "one-way-only": lambda got: any(
            all(pair[i] is None or not pair[i].any() for pair in got) for i in (0, 1)
        ),
    }
    expect(got, expected, each="rank", likely=likely)


AT_AN_END = ("TypeError", "AttributeError", "ValueError")
ENDS = dict.fromkeys(AT_AN_END, "beyond-the-ends")
HANGS = {"finished without": "unanswered", "waits in recv": "both-receive", "timeout": "both-send"}


def _whole_numbers(draw) -> Callable[[int], Tensor]:
    """Makes tensors of one shape, which differs when it is transposed."""
    rows, columns = draw.sample(range(2, 6), 2)
    return lambda link: draw.whole(rows, columns)


@exchanging.requires("two stages hand over at the same time", failures=HANGS | ENDS)
def _(answer, draw):
    _check_exchange(answer, [_line(2, _whole_numbers(draw))])


@exchanging.requires("three stages do, and four", failures=ENDS | {"timeout": "two-stages-only"})
def _(answer, draw):
    for ranks in (3, 4):
        _check_exchange(answer, [_line(ranks, _whole_numbers(draw))])


@exchanging.requires(
    "a single stage hands over nothing",
    failures=dict.fromkeys(
        (*AT_AN_END, "exception", "timeout", "names itself", "there is no rank"), "alone"
    ),
)
def _(answer, draw):
    _check_exchange(answer, [_line(1, _whole_numbers(draw))])


@exchanging.requires(
    "shapes that differ from stage to stage, several times in a row",
    failures=dict.fromkeys(("mismatch", "signal", "timeout"), "shapes-assumed"),
)
def _(answer, draw):
    shapes = [(draw.integer(2, 3), 4), (draw.integer(4, 5), 2, 3), (draw.integer(5, 6), 7)]
    ranks, times = draw.integer(3, 4), draw.integer(2, 3)
    cases = [_line(ranks, lambda link: draw.whole(*shapes[link])) for _ in range(times)]
    _check_exchange(answer, cases, alone=True)


@exchanging.requires(
    "double precision, and activations that belong to a graph",
    failures=dict.fromkeys(("mismatch", "signal", "timeout"), "dtype-lost"),
)
def _(answer, draw):
    ranks = draw.integer(2, 3)
    double = draw.tensor(draw.integer(2, 4), 2, dtype=torch.float64)
    _check_exchange(answer, [_line(ranks, lambda link: double * (link + 1))])
    _check_exchange(answer, [_line(ranks, _whole_numbers(draw))], _in_a_graph)


@exchanging.requires(
    "tensors of zeros",
    failures=dict.fromkeys(("timeout", "exception", "mismatch"), "zeros-left-out"),
    needs_earlier=True,
)
def _(answer, draw):
    ranks, rows = draw.integer(2, 3), draw.integer(2, 4)
    _check_exchange(answer, [_line(ranks, lambda link: torch.zeros(rows, 3))])


@exchanging.requires(
    "tensors that are not contiguous",
    failures=dict.fromkeys(("exception", "timeout", "mismatch", "signal"), "needs-contiguous"),
)
def _(answer, draw):
    _check_exchange(answer, [_line(draw.integer(2, 3), _whole_numbers(draw))], _transposed)
