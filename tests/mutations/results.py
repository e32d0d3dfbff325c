"""The result of an exercise: its mutants, each with what became of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.mutations.generate import Mutant, mutants
from tests.mutations.judging import Case, judge_all
from tests.mutations.verdicts import Verdict, Verdicts, answer_cell, digest_of_check, key


@dataclass
class Result:
    """How many mutants there were and what became of them. `killed` includes those `late`, which
    did not end. `stale` are proofs that fit no mutant that survives; `broken` says why the solution
    itself did not pass, so that nothing was judged."""

    mutants: int = 0
    killed: int = 0
    equivalent: int = 0
    survivors: list[Mutant] = field(default_factory=list)
    late: list[Mutant] = field(default_factory=list)
    stale: list[tuple[str, str]] = field(default_factory=list)
    broken: str = ""


def result_of(
    exercise_id: str, known: Verdicts, proofs: Mapping[tuple[str, str], str], jobs: int
) -> Result:
    """Judges the mutants of an exercise whose verdicts are not known, and sums up all of them."""
    source, check = answer_cell(exercise_id).source, digest_of_check(exercise_id)
    made = mutants(source)
    keys = {Case(exercise_id, m.source): key(check, m.source) for m in made}
    new = [case for case, its_key in keys.items() if known.get(its_key) is None]
    if new:
        [(_, solution)] = judge_all([Case(exercise_id, source)], 1)
        if solution.fate != "survived":
            return Result(broken=solution.said)
    for case, verdict in judge_all(new, jobs):
        known.keep(keys[case], verdict)
    return summed_up(made, [known.get(its_key) for its_key in keys.values()], proofs)


def summed_up(
    made: list[Mutant], judged: list[Verdict], proofs: Mapping[tuple[str, str], str]
) -> Result:
    """The result of mutants with these verdicts, of which some are proven equivalent."""
    result, open_proofs = Result(mutants=len(made)), set(proofs)
    for mutant, verdict in zip(made, judged, strict=True):
        pair = (mutant.before, mutant.after)
        if verdict.fate != "survived":
            result.killed += 1
            result.late += [mutant] if verdict.fate == "time" else []
        elif pair in proofs:
            result.equivalent += 1
            open_proofs.discard(pair)
        else:
            result.survivors.append(mutant)
    result.stale = sorted(open_proofs)
    return result
