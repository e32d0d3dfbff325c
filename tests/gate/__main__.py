"""`python -m tests.gate [exercise ...]`: hands each answer to its check, and prints all that it says.

Set COURSE_SEED to fix the random inputs. Nothing is written into the progress.
"""

import sys

from course_exercises.checks.learner import examine, render

from . import ANSWERS


def main(exercises: list[str]) -> None:
    if unknown := [each for each in exercises if each not in ANSWERS]:
        sys.exit(
            f"There are no answers to {', '.join(unknown)}; there are to {', '.join(ANSWERS)}."
        )
    for exercise in exercises or ANSWERS:
        for answer in ANSWERS[exercise]:
            outcome = examine(exercise, answer)
            verdict = "ACCEPTED" if outcome.status == "passed" else "rejected"
            print(f"=== {exercise} {answer.__name__}, {verdict}. {answer.__doc__}")
            print(render(outcome), end="\n\n", flush=True)


main(sys.argv[1:])
