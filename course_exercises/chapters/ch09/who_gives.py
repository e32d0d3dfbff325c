"""Exercise 9.7, `who_gives`: what it asks for, and how it is checked."""

from dataclasses import dataclass
from math import ceil

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.authoring.draw import Draw

taking_over = Exercise(
    "9.7",
    "who_gives",
    points=2,
    minutes=25,
    kind="core",
    parameters=("parts", "steps", "count"),
    hints=[
        (
            "Write down for each part the steps at which somebody has it. Which of these steps can the whole group begin "
            "from?"
        ),
        (
            "All parts have to be of one step, so the step is the latest that occurs for every part. Who is not at that step "
            "needs its part from somebody who is. What about a member that is ahead?"
        ),
        (
            "For each part make two lists: members at that step, and members at another one. Deal the second list out over "
            "the first in turns. No step that occurs for every part: raise a ValueError."
        ),
    ],
    misconceptions={
        "not-a-plan": "Return the step and a dictionary: under the rank of each member that gets its part, the rank of the "
        "one that gives it.",
        "furthest-alone": "This is the step of the member that is furthest, and nobody has every part at that step. Parts of "
        "two steps are no model: take the latest step at which somebody has each part.",
        "too-far-back": "The group can begin from a later step: every part is there at one.",
        "left-behind": "A member that is behind the step gets nothing, and would train with what it has.",
        "ahead": "A member that is ahead of the step keeps its part. It cannot undo a step, so it gets its part, too.",
        "for-nothing": "A member gets a part that it has already, at this very step.",
        "other-part": "A member gets its part from one that holds another part.",
        "giver-elsewhere": "A member gets its part from one that is not at this step itself.",
        "one-giver": "Several members have this part, and one of them gives more often than it has to. Each sends over its "
        "own link: deal the members out in turns.",
        "no-common-step": "Raise a ValueError where no step has every part: then only a checkpoint helps. Return a plan in all other "
        "cases, also where nobody needs anything.",
    },
    failures={"ValueError": "no-common-step"},
)


@dataclass(frozen=True)
class _Case:
    parts: tuple[int, ...]
    steps: tuple[int, ...]
    count: int

    def __str__(self) -> str:
        return f"parts {list(self.parts)}, steps {list(self.steps)}"

    @property
    def common(self) -> set[int]:
        """The steps at which every part is there."""
        at = [{s for p, s in self.members() if p == part} for part in range(self.count)]
        return set.intersection(*at)

    def members(self) -> list[tuple[int, int]]:
        return list(zip(self.parts, self.steps, strict=True))


def _drawn(draw: Draw, behind: dict[int, list[int]]) -> _Case:
    """Of each part, members so many steps behind the latest; in any order."""
    latest = draw.integer(20, 90)
    members = [(part, max(0, latest - b)) for part, each in behind.items() for b in each]
    parts, steps = zip(*draw.sample(members, len(members)), strict=True)
    return _Case(parts, steps, len(behind))


def _check_plan(answer, case: _Case) -> tuple[int, dict[int, int]]:
    got = answer(list(case.parts), list(case.steps), case.count)
    expect_type(got, (tuple, list), likely=None if got is None else "not-a-plan")
    ranks = range(len(case.parts))
    if len(got) != 2 or not isinstance(got[1], dict) or not {*got[1], *got[1].values()} <= {*ranks}:
        raise Wrong("not-a-plan", expected="a step and {rank: rank}", got=got)
    step, plan = got
    likely = {
        "furthest-alone": lambda got: got == max(case.steps),
        "too-far-back": lambda got: got in case.common,
    }
    expect(step, max(case.common), what=f"the step for {case}", likely=likely)
    for rank in ranks:
        _check_member(case, step, plan, rank)
    return step, plan


def _check_member(case: _Case, step: int, plan: dict[int, int], rank: int) -> None:
    own, giver = case.steps[rank], plan.get(rank)
    if giver is None:
        fault = "left-behind" if own < step else "ahead" if own > step else None
    elif own == step:
        fault = "for-nothing"
    elif case.parts[giver] != case.parts[rank]:
        fault = "other-part"
    else:
        fault = None if case.steps[giver] == step else "giver-elsewhere"
    if fault:
        asked = "nothing" if own == step else f"part {case.parts[rank]} of step {step}"
        came = "nothing" if giver is None else f"it from rank {giver}"
        raise Wrong(fault, expected=f"rank {rank} gets {asked}, for {case}", got=came)


def _check_turns(case: _Case, step: int, plan: dict[int, int], part: int) -> None:
    givers = [r for r, member in enumerate(case.members()) if member == (part, step)]
    times = {giver: list(plan.values()).count(giver) for giver in givers}
    most = ceil(sum(times.values()) / len(givers))
    if max(times.values()) > most:
        expected = f"each gives part {part} at most {most} times, for {case}"
        raise Wrong("one-giver", expected=expected, got=f"{{giver: times}} = {times}")


@taking_over.requires("whole copies of the model, and one that comes late")
def whole_copies_and_one_that_comes_late(answer, draw):
    _check_plan(answer, _drawn(draw, {0: [0, 0, 99]}))
    _check_plan(answer, _drawn(draw, {0: [0, 0, 0, 1, 99]}))


@taking_over.requires("each member has a part, and gets that part")
def each_member_gets_its_part(answer, draw):
    for count in draw.sample(range(2, 5), 2):
        _check_plan(answer, _drawn(draw, {part: [0, 0, 99] for part in range(count)}))


@taking_over.requires("some members finished the step in which one died, and others did not")
def some_finished_the_step(answer, draw):
    for _ in range(3):
        torn = {0: [0, 1, 99], 1: [1, 1, 99]}  # nobody has part 1 of the latest step
        _check_plan(answer, _drawn(draw, torn))
        _check_plan(answer, _drawn(draw, {0: [0, 1], 1: [0, 1, 1], 2: [1, 0]}))


@taking_over.requires("those who have a part give it in turns", needs_earlier=True)
def those_who_have_a_part_give_in_turns(answer, draw):
    givers, newcomers = draw.integer(2, 4), draw.integer(3, 6)
    case = _drawn(draw, {0: [0] * givers + [99] * newcomers, 1: [0, 0, 1, 1, 1, 1]})
    step, plan = _check_plan(answer, case)
    for part in range(case.count):
        _check_turns(case, step, plan, part)


@taking_over.requires("nobody needs anything")
def nobody_needs_anything(answer, draw):
    count = draw.integer(2, 4)
    _check_plan(answer, _drawn(draw, {part: [0, 0] for part in range(count)}))


@taking_over.requires("a part that is lost, and parts of no common step, are refused")
def what_is_lost_is_refused(answer, draw):
    torn = _drawn(draw, {0: [0, 0], 1: [1, 1]})
    gone = _drawn(draw, {0: [0, 0, 1], 1: [0, 1, 1]})
    for case in (torn, _Case(gone.parts, gone.steps, 3)):
        try:
            got = answer(list(case.parts), list(case.steps), case.count)
        except ValueError:
            continue
        raise Wrong("no-common-step", expected=f"a ValueError for {case}, count {case.count}", got=got)
