"""Answers to 9.7, `who_gives`: wrong in a plausible way, or right in another."""

from collections import defaultdict
from itertools import cycle

from tests.wrong_answers import right, wrong


def _latest(parts, steps, count):
    """The latest step that every part is there at."""
    return max(_common(parts, steps, count))


def _common(parts, steps, count):
    at = [{s for p, s in zip(parts, steps) if p == part} for part in range(count)]
    common = set.intersection(*at) - {None}
    if not common:
        raise ValueError("no step has every part: read a checkpoint")
    return common


def _in_turns(parts, steps, step):
    ranks, plan = range(len(parts)), {}
    for part in {*parts}:
        givers = cycle([r for r in ranks if (parts[r], steps[r]) == (part, step)])
        plan |= {r: next(givers) for r in ranks if parts[r] == part and steps[r] != step}
    return plan


@right("9.7")
def deals_out_in_turns(parts, steps, count):
    step = _latest(parts, steps, count)
    return step, _in_turns(parts, steps, step)


@right("9.7")
def asks_whoever_gave_least(parts, steps, count):
    held = defaultdict(set)
    for part, step in zip(parts, steps):
        if step is not None:
            held[step].add(part)
    whole = [step for step, there in held.items() if len(there) == count]
    if not whole:
        raise ValueError(f"none of the steps {sorted(held)} has all {count} parts")
    step, given, plan = max(whole), defaultdict(int), {}
    for rank, part in enumerate(parts):
        if steps[rank] != step:
            able = [r for r, p in enumerate(parts) if p == part and steps[r] == step]
            plan[rank] = min(able, key=lambda r: given[r])
            given[plan[rank]] += 1
    return step, plan


@wrong("9.7", names="not-a-plan")
def lists_pairs(parts, steps, count):
    step, plan = deals_out_in_turns(parts, steps, count)
    return step, list(plan.items())


@wrong("9.7", names="newcomer")
def compares_newcomers(parts, steps, count):
    at = [{s for p, s in zip(parts, steps) if p == part} for part in range(count)]
    step = max(set.intersection(*at))
    return step, _in_turns(parts, steps, max(steps))


@wrong("9.7", names="turned-round")
def says_to_whom(parts, steps, count):
    step, plan = deals_out_in_turns(parts, steps, count)
    return step, {giver: rank for rank, giver in plan.items()}


def _furthest(parts, steps):
    """{part: the member that is furthest}."""
    ranks = sorted(range(len(parts)), key=lambda r: -1 if steps[r] is None else steps[r])
    return {parts[r]: r for r in ranks}


@wrong("9.7", names="not-whole")
def begins_where_the_furthest_is(parts, steps, count):
    _latest(parts, steps, count)
    step = max(s for s in steps if s is not None)
    furthest = _furthest(parts, steps)
    return step, {r: furthest[p] for r, p in enumerate(parts) if steps[r] != step}


@wrong("9.7", names="not-whole")
def takes_the_least_of_the_latest(parts, steps, count):
    """Right where every part is there at that step."""
    _latest(parts, steps, count)
    furthest = _furthest(parts, steps)
    step = min(steps[furthest[part]] for part in range(count))
    held = {(p, s): r for r, (p, s) in enumerate(zip(parts, steps))}
    givers = {p: held.get((p, step), r) for p, r in furthest.items()}
    return step, {r: givers[p] for r, p in enumerate(parts) if steps[r] != step}


@wrong("9.7", names="refused")
def refuses_an_empty_plan(parts, steps, count):
    step, plan = deals_out_in_turns(parts, steps, count)
    if not plan:
        raise ValueError("nothing to do")
    return step, plan


@wrong("9.7", names="list-changed")
def marks_newcomers(parts, steps, count):
    for rank, step in enumerate(steps):
        steps[rank] = -1 if step is None else step
    got, plan = deals_out_in_turns(parts, [None if s < 0 else s for s in steps], count)
    return got, plan


@wrong("9.7", names="too-far-back")
def goes_back_to_the_earliest(parts, steps, count):
    step = min(_common(parts, steps, count))
    return step, _in_turns(parts, steps, step)


@wrong("9.7", names="left-behind")
def helps_newcomers_only(parts, steps, count):
    step = _latest(parts, steps, count)
    return step, {r: g for r, g in _in_turns(parts, steps, step).items() if steps[r] is None}


@wrong("9.7", names="ahead")
def leaves_those_ahead(parts, steps, count):
    step = _latest(parts, steps, count)
    return step, {r: g for r, g in _in_turns(parts, steps, step).items() if (steps[r] or 0) < step}


@wrong("9.7", names="for-nothing")
def sends_to_everybody(parts, steps, count):
    step = _latest(parts, steps, count)
    ranks = range(len(parts))
    able = {parts[r]: r for r in reversed(ranks) if steps[r] == step}
    return step, {r: able[parts[r]] for r in ranks}


@wrong("9.7", names="other-part")
def asks_the_first_at_this_step(parts, steps, count):
    step = _latest(parts, steps, count)
    return step, {r: steps.index(step) for r in range(len(parts)) if steps[r] != step}


@wrong("9.7", names="giver-elsewhere")
def asks_who_is_furthest(parts, steps, count):
    step, furthest = _latest(parts, steps, count), _furthest(parts, steps)
    return step, {r: furthest[p] for r, p in enumerate(parts) if steps[r] != step}


@wrong("9.7", names="one-giver")
def asks_the_first_of_the_part(parts, steps, count):
    step, plan = sends_to_everybody(parts, steps, count)
    return step, {r: giver for r, giver in plan.items() if steps[r] != step}


@wrong("9.7", names="no-common-step")
def takes_any_step(parts, steps, count):
    try:
        return deals_out_in_turns(parts, steps, count)
    except ValueError:
        return 0, {}
