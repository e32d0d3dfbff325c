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
    things="parts",
    misconceptions={
        "not-a-plan": "Return the step and a dictionary: under the rank of each member that needs its part, the rank of "
        "the one that gives it.",
        "turned-round": "Your dictionary says to whom a member gives. Ask the other way round, since one may give to "
        "several: the keys are the ranks of those who get their part.",
        "not-whole": "No member has some part at this step, and parts of two steps are no model. Take the latest step that "
        "occurs for every part. It can be earlier than each part's latest.",
        "newcomer": "A newcomer's step is None, which cannot be compared with a number. It has nothing to give: leave it out "
        "where you look for the step.",
        "too-far-back": "The group can begin from a later step: every part is there at one.",
        "left-behind": "A member that is behind the step, or has just come, gets nothing, and would train with what it "
        "has. Give it its part.",
        "ahead": "In your plan a member that is ahead of the step keeps what it has. It cannot undo a step, so it must be "
        "given its part, too.",
        "for-nothing": "A member gets a part that it has already, at this very step. Leave it out of the plan.",
        "other-part": "A member gets its part from one that holds another part. Choose its giver among those with the same "
        "part.",
        "giver-elsewhere": "A member gets its part from one that is not at this step itself. Choose its giver among those "
        "that are.",
        "one-giver": "Several members have this part, and one of them gives more often than it has to. Each sends over its "
        "own link: deal the members of each part out in turns.",
        "refused": "You raise a ValueError, and there is a step at which every part is held by some member. Return the "
        "plan; where nobody needs anything, its dictionary is empty.",
        "no-common-step": "Raise a ValueError where no step has every part: then only a checkpoint helps.",
    },
    failures={"not supported between instances of": "newcomer", "ValueError": "refused"},
)
NEW = None


@dataclass(frozen=True)
class _Case:
    parts: tuple[int, ...]
    steps: tuple[int | None, ...]
    count: int

    def __str__(self) -> str:
        return f"parts {list(self.parts)}, steps {list(self.steps)}"

    @property
    def members(self) -> list[tuple[int, int | None]]:
        return list(zip(self.parts, self.steps, strict=True))

    @property
    def common(self) -> set[int]:
        """The steps at which every part is there."""
        at = [{s for p, s in self.members if p == part} for part in range(self.count)]
        return set.intersection(*at) - {NEW}

    def faults(self, step: int, plan: dict[int, int]) -> dict[int, str]:
        """{rank: what is wrong with what the plan does for it}."""
        found = {rank: self._fault(step, rank, plan.get(rank)) for rank in range(len(self.parts))}
        return {rank: fault for rank, fault in found.items() if fault}

    def _fault(self, step: int, rank: int, giver: int | None) -> str | None:
        part, own = self.members[rank]
        if giver is None:
            return (
                None if own == step else "ahead" if own is not NEW and own > step else "left-behind"
            )
        if own == step:
            return "for-nothing"
        if self.parts[giver] != part:
            return "other-part"
        return None if self.steps[giver] == step else "giver-elsewhere"


def _drawn(draw: Draw, behind: dict[int, list[int | None]]) -> _Case:
    """Of each part, members so many steps behind the latest; in any order."""
    latest = draw.integer(20, 90)
    members = [(p, NEW if b is NEW else latest - b) for p, each in behind.items() for b in each]
    parts, steps = zip(*draw.sample(members, len(members)), strict=True)
    return _Case(parts, steps, len(behind))


def _ask(answer, case: _Case):
    parts, steps = list(case.parts), list(case.steps)
    got = answer(parts, steps, case.count)
    if parts != list(case.parts) or steps != list(case.steps):
        raise Wrong("list-changed", expected=str(case), got=f"parts {parts}, steps {steps}")
    return got


def _check_plan(answer, case: _Case) -> tuple[int, dict[int, int]]:
    got = _ask(answer, case)
    expect_type(got, (tuple, list), likely=None if got is None else "not-a-plan")
    ranks = range(len(case.parts))
    if len(got) != 2 or not isinstance(got[1], dict):
        raise Wrong("not-a-plan", expected="a step and {rank: rank}", got=got)
    step, plan = got
    if any(rank not in ranks for rank in (*plan, *plan.values())):
        raise Wrong("not-a-plan", expected="a step and {rank: rank}", got=got)
    likely = {
        "not-whole": lambda got: got not in case.common,
        "too-far-back": lambda got: got in case.common,
    }
    expect(step, max(case.common), what=f"the step for {case}", likely=likely)
    if faults := case.faults(step, plan):
        rank, fault = next(iter(faults.items()))
        part, own = case.members[rank]
        asked = "nothing" if own == step else f"part {part} of step {step}"
        came = f"it from rank {plan[rank]}" if rank in plan else "nothing"
        right_if_turned = not case.faults(step, {giver: rank for rank, giver in plan.items()})
        raise Wrong(
            "turned-round" if right_if_turned else fault,
            expected=f"rank {rank} gets {asked}, for {case}",
            got=came,
        )
    return step, plan


def _check_turns(answer, case: _Case) -> None:
    step, plan = _check_plan(answer, case)
    for part in range(case.count):
        givers = [r for r, member in enumerate(case.members) if member == (part, step)]
        times = {giver: list(plan.values()).count(giver) for giver in givers}
        most = ceil(sum(times.values()) / len(givers))
        if max(times.values()) > most:
            expected = f"part {part} from each giver at most {most} x, for {case}"
            raise Wrong("one-giver", expected=expected, got=f"{{giver: times}} = {times}")


@taking_over.requires("whole copies of the model, and one that comes late")
def whole_copies_and_one_that_comes_late(answer, draw):
    _check_plan(answer, _drawn(draw, {0: [0, 0, NEW]}))
    _check_plan(answer, _drawn(draw, {0: [0, 0, 0, 1, NEW]}))


@taking_over.requires("each member has a part, and gets that part")
def each_member_gets_its_part(answer, draw):
    for count in draw.sample(range(2, 5), 2):
        _check_plan(answer, _drawn(draw, {part: [0, 0, NEW] for part in range(count)}))


@taking_over.requires("some members finished the step in which one died, and others did not")
def some_finished_the_step(answer, draw):
    for _ in range(3):
        torn = {0: [0, 1, NEW], 1: [1, 1, NEW]}  # nobody has part 1 of the latest step
        _check_plan(answer, _drawn(draw, torn))
        _check_plan(answer, _drawn(draw, {0: [0, 1], 1: [0, 1, 1], 2: [1, 0]}))
        _check_plan(answer, _drawn(draw, {0: [0, 2, 2], 1: [1, 2, NEW]}))


@taking_over.requires("those who have a part give it in turns", needs_earlier=True)
def those_who_have_a_part_give_in_turns(answer, draw):
    givers, newcomers = draw.integer(2, 4), draw.integer(3, 6)
    behind = {0: [0] * givers + [NEW] * newcomers, 1: [0, 0, 1, 1, 1, 1]}
    step = draw.integer(20, 90)
    for case in (
        _drawn(draw, behind),
        _Case((0, 1) * 4, (step,) * 4 + (NEW,) * 4, 2),
        _Case((0,) * 8, (step,) * 3 + (NEW,) * 5, 1),
        _Case((0, 0, 1, 0, 1, 0), (step, step, step, NEW, step, NEW), 2),
    ):
        _check_turns(answer, case)


@taking_over.requires("nobody needs anything, and a group that has not begun")
def nobody_needs_anything(answer, draw):
    count = draw.integer(2, 4)
    _check_plan(answer, _drawn(draw, {part: [0, 0] for part in range(count)}))
    _check_plan(answer, _Case((0, 1, 0), (0, 0, NEW), 2))


@taking_over.requires(
    "a part that is lost, and parts of no common step, are refused",
    failures={"not supported between instances of": "newcomer", "exception": "no-common-step"},
)
def what_is_lost_is_refused(answer, draw):
    torn = _drawn(draw, {0: [0, 0], 1: [1, 1]})
    gone = _drawn(draw, {0: [0, 0, 1], 1: [0, 1, 1]})
    new = _drawn(draw, {0: [0, NEW], 1: [NEW, NEW]})
    for case in (torn, _Case(gone.parts, gone.steps, 3), new):
        try:
            got = _ask(answer, case)
        except ValueError:
            continue
        raise Wrong(
            "no-common-step", expected=f"a ValueError for {case}, count {case.count}", got=got
        )
