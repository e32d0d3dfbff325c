"""What the exercises of chapter 05 share: how a schedule is judged."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from course_exercises.authoring import Wrong, expect_type, forbidden
from course_exercises.authoring.compare import show
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

WORK = (
    "Some work is done twice, or never, or does not belong to this step. Every rank runs one F and one B of each "
    "micro-batch, numbered from 0"
)
AFTER_THE_WARM_UP = (
    "After a warm-up of k forward passes the F of the pairs go on where it ended, their B begin with the first one, and "
    "k B remain after the last pair."
)
SCHEDULE = {
    "not-a-schedule": "A schedule has one list for each rank, and in it an Op for each thing that this rank does, in "
    'order, such as `Op("F", 3)`. Leave gaps out: a rank waits by itself where an op needs something that has not '
    "come.",
    "shared-list": "All ranks share one list, as after `[[]] * stages`: what you append for one rank stands in every "
    "rank's. Make a new list for each.",
    "other-work": f"{WORK}.",
    "cannot-run": "The schedule cannot run: a rank comes to an op before what it needs can be there, and does not skip "
    "it. F needs the F of the piece of the model before it; B needs the B of the piece after it, and its own F. Put "
    "the op behind what it needs.",
    "built-in-schedule": "You call a function of `course_utils.lesson.schedules`. Build the lists of ops yourself; look "
    "at the built-in schedule by plotting it.",
    "slow": "The schedule can run, and some rank waits longer than it must: ranks after it get their forward passes too "
    "late, or ranks before it their gradients. Draw it with `plots.gantt` and look for the first gap that an op could "
    "fill.",
}
PAIRS = {
    "other-work": f"{WORK}. {AFTER_THE_WARM_UP}",
    "warm-up-short": "Some rank begins its backward passes too early: it lacks a forward pass, or waits in every turn "
    "for a gradient that is still on its way. The first rank waits longest for its first gradient, so it runs the most "
    "forward passes before it: count how many fit in.",
    "too-many-activations": "A rank runs its forward passes too far ahead of its backward passes: each of them "
    "holds activations, and the ranks before it wait longer for their gradients. The nearer a rank is to the end, the sooner its first gradient comes, and the fewer it runs "
    "before; count the F of the first pair too.",
    "backwards-order": "Some rank does not run its backward passes in the order of its forward passes. The gradient of "
    "micro-batch 0 comes back first: each B, in a pair or after the last one, belongs to the oldest open micro-batch.",
    "warm-up-not-capped": "Your schedule works with many micro-batches, and not with few or with a single stage. The "
    "warm-up ends where the forward passes end; then no pair follows, and then come all B.",
}
FEW = dict.fromkeys(("IndexError", "ValueError"), "warm-up-not-capped")


@dataclass(frozen=True)
class Case:
    stages: int
    micro_batches: int
    chunks: int = 1

    def __str__(self) -> str:
        parts = [f"{self.stages} stage{'s' * (self.stages > 1)}"]
        parts += [f"{self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"]
        return ", ".join(parts + [f"{self.chunks} chunks"] * (self.chunks > 1))

    def time(self) -> int:
        """The shortest time of a step, in units of time, with the bubble of (interleaved) 1F1B."""
        return (self.passes() + self.stages - 1) * (FORWARD + BACKWARD)

    def passes(self) -> int:
        """How many forward passes a rank runs."""
        return self.chunks * self.micro_batches

    def work(self) -> Counter:
        """What every rank has to do."""
        numbers, chunks = range(self.micro_batches), range(self.chunks)
        return Counter(Op(kind, n, chunk) for kind in "FB" for n in numbers for chunk in chunks)


class Judge:
    """Judges an answer by the form, legality, time and memory of its schedules.

    `call` calls the answer for a case; `budget` says how many activations a rank may hold. `suspects`
    are mistakes in the order of the work, by name, the more telling first: the first one that a bad
    schedule shows is named.
    """

    def __init__(self, call: Callable, budget: Budget, suspects: Mapping[str, Suspect]) -> None:
        self.call = call
        self.budget = budget
        self.suspects = suspects

    def legal(self, answer, case: Case) -> Schedule:
        """The answer's schedule; raises Wrong where it cannot run."""
        with forbidden.called(*BUILT_IN) as names:
            got = self.call(answer, case)
        if names:
            used = f"schedules.{names[0]}"
            raise Wrong("built-in-schedule", expected="a schedule of your own", got=used)
        schedule = form(got, case)
        sentence = first_illegal_move(schedule, case.stages, case.micro_batches, case.chunks)
        if sentence:
            slug = _wrong_work(schedule, case)
            if slug == "other-work" and self.budget(case, 0) > case.passes():
                slug = "warm-up-not-capped"
            raise Wrong(
                slug or self._suspect(schedule, case) or "cannot-run",
                expected=f"a schedule that can run, with {case}",
                got=sentence,
            )
        return schedule

    def in_time(self, answer, case: Case) -> None:
        """Raises Wrong unless the schedule keeps to the budget of time."""
        schedule = self.legal(answer, case)
        needed, allowed = simulated(schedule, case).makespan, case.time()
        if needed > allowed + 1e-9:
            raise Wrong(
                self._suspect(schedule, case) or "slow",
                expected=f"at most {allowed} units of time, with {case} (F {FORWARD}, B {BACKWARD})",
                got=f"{needed:g}: {needed - allowed:g} too many",
            )

    def in_memory(self, answer, case: Case) -> None:
        """Raises Wrong unless every rank keeps to its budget of memory."""
        schedule = self.legal(answer, case)
        for rank, held in enumerate(simulated(schedule, case).peak_in_flight):
            allowed = self.budget(case, rank)
            if held > allowed:
                raise Wrong(
                    self._suspect(schedule, case) or "too-many-activations",
                    expected=f"rank {rank} holds the activations of at most {allowed}, with {case}",
                    got=f"{held}: {held - allowed} too many",
                )

    def _suspect(self, schedule: Schedule, case: Case) -> str | None:
        return next((s for s, fits in self.suspects.items() if fits(schedule, case)), None)


def simulated(schedule: Schedule, case: Case) -> Simulation:
    """The schedule on stages whose ops take FORWARD and BACKWARD for each chunk."""
    return simulate(schedule, FORWARD * case.chunks, BACKWARD * case.chunks)


def form(got: object, case: Case) -> Schedule:
    """What the answer gave, as lists; raises Wrong unless it is a list of ops for each rank."""
    expect_type(got, (list, tuple), likely=None if got is None else "not-a-schedule")
    if len(got) != case.stages or not all(isinstance(row, (list, tuple)) for row in got):
        expected = f"a list for each rank, with {case}"
        raise Wrong("not-a-schedule", expected=expected, got=f"{len(got)} entries: {show(got)}")
    for row in got:
        for op in row:
            if not isinstance(op, Op) or op.kind not in ("F", "B"):
                raise Wrong("not-a-schedule", expected='ops such as Op("F", 3)', got=show(op))
    return [list(row) for row in got]


def _wrong_work(schedule: Schedule, case: Case) -> str | None:
    """What is wrong with the work itself, whatever its order."""
    counts, wanted = [Counter(row) for row in schedule], case.work()
    if case.stages > 1 and all(count == _times(wanted, case.stages) for count in counts):
        return "shared-list"
    return "other-work" if any(count != wanted for count in counts) else None


def _times(counts: Counter, factor: int) -> Counter:
    return Counter({op: factor * count for op, count in counts.items()})


def warm_ups_of(schedule: Schedule) -> list[int]:
    """How many forward passes each rank runs before its first backward pass."""
    kinds = ["".join(op.kind for op in row) for row in schedule]
    return [row.index("B") if "B" in row else len(row) for row in kinds]


def backwards_in_another_order(schedule: Schedule, case: Case) -> bool:
    """Whether some rank takes the micro-batches of a chunk in order forward, and not backward."""

    def in_order(row: list[Op], kind: str, chunk: int) -> bool:
        numbers = [op.micro_batch for op in row if (op.kind, op.chunk) == (kind, chunk)]
        return numbers == sorted(numbers)

    return any(
        in_order(row, "F", chunk) and not in_order(row, "B", chunk)
        for row in schedule
        for chunk in range(case.chunks)
    )


def short(least: Budget) -> Suspect:
    """Whether some rank has fewer forward passes before its first backward than `least`."""
    return lambda schedule, case: any(
        first < min(least(case, rank), case.passes())
        for rank, first in enumerate(warm_ups_of(schedule))
    )


def long(most: Budget) -> Suspect:
    """Whether some rank has more forward passes before its first backward than `most`."""
    return lambda schedule, case: any(
        first > most(case, rank) for rank, first in enumerate(warm_ups_of(schedule))
    )


def flow(draw) -> Case:
    """A pipeline with more than twice as many micro-batches as stages."""
    stages = draw.integer(3, 5)
    return Case(stages, draw.integer(2 * stages + 1, 14))
