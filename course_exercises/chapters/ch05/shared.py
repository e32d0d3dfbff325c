"""What the exercises of chapter 05 share."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from course_exercises.authoring import Wrong, expect_type, forbidden
from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op, Schedule, Simulation, first_illegal_move, simulate

FORWARD, BACKWARD = 1, 2  # units of time of one op
BUILT_IN = [
    function
    for _, function in inspect.getmembers(schedules, inspect.isfunction)
    if function.__module__ == schedules.__name__
]

Budget = Callable[["Case", int], int]  # how many activations rank r may hold
Suspect = Callable[[Schedule, "Case"], bool]

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
    "built-in-schedule": "You call a function of `course_utils.lesson.schedules`, and this exercise is to "
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
class Case:
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


class Judge:
    """Judges an answer by the form, legality, time and memory of its schedules.

    `call` calls the answer for a case; `budget` says how many activations a rank may hold.
    `suspects` are mistakes in the order of the work, by name, the more telling first: the first
    one that a bad schedule shows is named.
    """

    def __init__(self, call: Callable, budget: Budget, suspects: Mapping[str, Suspect]) -> None:
        self.call = call
        self.budget = budget
        self.suspects = suspects

    def legal(self, answer, case: Case, strange_work: str | None = None) -> Schedule:
        """The answer's schedule; raises Wrong where it cannot run. `strange_work` names the
        mistake behind an op that belongs to no micro-batch, and behind work that is missing."""
        with forbidden.called(*BUILT_IN) as names:
            got = self.call(answer, case)
        if names:
            used = f"schedules.{names[0]}"
            raise Wrong("built-in-schedule", expected="a schedule of your own", got=used)
        schedule = form(got, case)
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

    def in_time(self, answer, case: Case) -> None:
        """Raises Wrong unless the schedule keeps to the budget of time."""
        schedule = self.legal(answer, case)
        needed, allowed = _simulated(schedule, case).makespan, case.time()
        if needed > allowed + 1e-9:
            raise Wrong(
                self._suspect(schedule, case) or "slow",
                expected=f"at most {allowed} units of time, with {case} (F {FORWARD}, B {BACKWARD})",
                got=f"{needed:g}: {needed - allowed:g} too many",
            )

    def in_memory(self, answer, case: Case) -> None:
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

    def _suspect(self, schedule: Schedule, case: Case) -> str | None:
        return next((s for s, fits in self.suspects.items() if fits(schedule, case)), None)


def _simulated(schedule: Schedule, case: Case) -> Simulation:
    """The schedule on stages whose ops take FORWARD and BACKWARD for each chunk."""
    return simulate(schedule, FORWARD * case.chunks, BACKWARD * case.chunks)


def form(got: object, case: Case) -> Schedule:
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


def _wrong_work(schedule: Schedule, case: Case) -> str | None:
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


def warm_ups_of(schedule: Schedule) -> list[int]:
    """How many forward passes each rank runs before its first backward pass."""
    kinds = ["".join(op.kind for op in row) for row in schedule]
    return [row.index("B") if "B" in row else len(row) for row in kinds]


def one_at_a_time(schedule: Schedule, case: Case) -> bool:
    return case.micro_batches > 1 and set(warm_ups_of(schedule)) == {case.chunks}


def backwards_in_another_order(schedule: Schedule, case: Case) -> bool:
    """Whether some rank takes the micro-batches of a chunk in order forward, and not backward."""

    def in_order(row: Sequence[Op], kind: str, chunk: int) -> bool:
        numbers = [op.micro_batch for op in row if (op.kind, op.chunk) == (kind, chunk)]
        return numbers == sorted(numbers)

    return any(
        in_order(row, "F", chunk) and not in_order(row, "B", chunk)
        for row in schedule
        for chunk in range(case.chunks)
    )


def flow(draw) -> Case:
    """A pipeline with more than twice as many micro-batches as stages."""
    stages = draw.integer(3, 5)
    return Case(stages, draw.integer(2 * stages + 1, 14))


def short(least: Callable[[Case, int], int]) -> Suspect:
    """Whether some rank has fewer forward passes before its first backward than `least`."""
    return lambda schedule, case: any(
        first < min(least(case, rank), case.chunks * case.micro_batches)
        for rank, first in enumerate(warm_ups_of(schedule))
    )


def more_by(extra: int, most: Callable[[Case, int], int]) -> Suspect:
    """Whether the first rank runs `extra` forward passes more than `most` before its first B."""
    return lambda schedule, case: warm_ups_of(schedule)[0] == most(case, 0) + extra


def all_forward_first(schedule: Schedule, case: Case) -> bool:
    return set(warm_ups_of(schedule)) == {case.chunks * case.micro_batches}


def all_as_the_first(most: Callable[[Case, int], int]) -> Suspect:
    """Whether every rank runs as many forward passes before its first B as the first rank may."""
    return lambda schedule, case: set(warm_ups_of(schedule)) == {most(case, 0)}
