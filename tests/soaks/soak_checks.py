"""Tries all answers of exercises with many seeds: python -m tests.soaks.soak_checks 100 1.1 1.2

Counts the right answers that were rejected and the wrong ones that were accepted, both of which
must be none, and the wrong ones whose first hint was that of another mistake, because two mistakes
happened to give the same result. Those of the corpus may get any hint.
"""

import sys
from collections import Counter

from course_exercises.authoring import load_answer
from course_exercises.authoring.framework import attempt
from course_exercises.authoring.guard import undisturbed
from course_exercises.checks.catalogue import exercises
from tests.wrong_answers import ANY, Answer, load_all, load_corpus


def first_failure(exercise, answer, seed):
    """The first line that failed, or None."""
    with undisturbed():
        return next((line for line in attempt(exercise, answer, seed) if not line.ok), None)


def soak(exercise, seeds):
    """Print what went wrong for one exercise."""
    listed = load_all(exercise.id) + load_corpus(exercise.id)
    answers = [*listed, Answer(exercise.id, load_answer(exercise.id), None)]
    found = Counter()
    for answer in answers:
        for seed in range(seeds):
            line = first_failure(exercise, answer.answer, str(seed))
            if (word := _wrong(answer, line)) is not None:
                found[word] += 1
                said = f" ({line.misconception}: {line.requirement})" if line else ""
                print(f"  seed {seed}: {answer.answer.__name__} is {word}{said}", flush=True)
    print(
        f"{exercise.id} {exercise.name}: {len(answers)} answers, {seeds} seeds: "
        f"{found['rejected']} right ones rejected, {found['accepted']} wrong ones accepted, "
        f"{found['misnamed']} misnamed",
        flush=True,
    )


def _wrong(answer, line):
    """What is wrong with that verdict, if anything."""
    if answer.names is None:
        return "rejected" if line else None
    if line is None:
        return "accepted"
    return None if answer.named_here in (line.misconception, ANY) else "misnamed"


if __name__ == "__main__":
    count, *wanted = sys.argv[1:]
    for each in exercises():
        if not wanted or each.id in wanted:
            soak(each, int(count))
