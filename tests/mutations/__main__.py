"""`python -m tests.mutations [exercise ...]`: do the checks reject small changes of the solutions?

For each exercise, mutants of the solution run through its check until the first requirement fails.
A mutant that survives is printed as a diff: let a requirement reject it, or prove in
`equivalent.py` that it does the same as the solution. Verdicts are kept in build/, so that only
what changed is judged again. Exit status 1 if less than 95 % are killed, or if one survives.
"""

import argparse
import sys

from course_exercises.checks import catalogue
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.judging import prepare
from tests.mutations.results import Result, result_of
from tests.mutations.verdicts import Verdicts

TARGET = 0.95


def main(arguments: list[str] | None = None) -> int:
    """Judges the mutants of some exercises, or of all, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("exercises", nargs="*", metavar="exercise", help="3.1, for example")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    options = parser.parse_args(arguments)
    try:
        chosen = [catalogue.find(id) for id in options.exercises] or catalogue.exercises()
    except LookupError as error:
        parser.error(error.args[0])
    prepare()
    results = []
    for exercise in chosen:
        proofs = EQUIVALENT.get(exercise.id, {})
        results.append(result_of(exercise.id, Verdicts(exercise.id), proofs, options.jobs))
        print(described(f"{exercise.id} {exercise.name}", results[-1]), flush=True)
    return summary(results)


def described(title: str, result: Result) -> str:
    """A line for an exercise, and one for each mutant that needs somebody's attention."""
    counts = (
        f"{result.mutants:3} mutants, {result.killed:3} killed ({len(result.late)} by time), "
        f"{result.equivalent} equivalent, {len(result.survivors)} survived"
    )
    lines = [f"{title:<40} {counts}"]
    if result.broken:
        lines.append(f"    the solution does not pass its own check: {result.broken}")
    for word, some in (("survived", result.survivors), ("by time", result.late)):
        for mutant in some:
            lines += [f"    {word}, line {mutant.line} of the answer's cell"]
            lines += [f"      - {mutant.before}", f"      + {mutant.after}"]
    lines += [f"    equivalent.py proves what is no survivor: {pair}" for pair in result.stale]
    return "\n".join(lines)


def summary(results: list[Result]) -> int:
    """Prints the share of mutants killed, and returns the exit status."""
    killed = sum(result.killed for result in results)
    counted = sum(result.mutants - result.equivalent for result in results)
    share = killed / counted if counted else 1.0
    print(
        f"\n{killed} of {counted} mutants killed: {share:.1%} (target {TARGET:.0%}); "
        f"{sum(result.equivalent for result in results)} more are proven equivalent"
    )
    sound = not any(result.survivors or result.stale or result.broken for result in results)
    return 0 if sound and share >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
