"""Tries all answers of exercises with many seeds: python -m tests.soaks.soak_checks 100 1.1 1.2

Counts the right answers that were rejected and the wrong ones that were accepted, both of which
must be none; and the wrong ones whose hint was that of another mistake, which may happen where two
mistakes give the same result under a seed, but not under the first. Those of the corpus may get any hint.

With --margins in front, tries the right answers only, and says how much of its tolerance a comparison
of theirs has used at most: a tenth, or a right answer may be rejected under another seed.

The exit status is 1 where a right answer was rejected, a wrong one accepted, or misnamed under the first seed.
"""

import sys
from collections import Counter
from unittest import mock

from course_exercises.authoring import compare, load_answer
from course_exercises.authoring.framework import judge
from course_exercises.checks.catalogue import exercises
from tests.wrong_answers import ANY, Answer, load_all, load_corpus


def soak(exercise, seeds):
    """Print what went wrong for one exercise; return how much of that no seed excuses."""
    listed = load_all(exercise.id) + load_corpus(exercise.id)
    answers = [*listed, Answer(exercise.id, load_answer(exercise.id), None)]
    found, fatal = Counter(), 0
    for answer in answers:
        for seed in range(seeds):
            outcome = judge(exercise, answer.answer, str(seed))
            if (word := _wrong(answer, outcome)) is not None:
                found[word] += 1
                fatal += word != "misnamed" or seed == 0
                said = outcome.misconceptions
                print(f"  seed {seed}: {answer.answer.__name__} is {word} {said}", flush=True)
    print(
        f"{exercise.id} {exercise.name}: {len(answers)} answers, {seeds} seeds: "
        f"{found['rejected']} right ones rejected, {found['accepted']} wrong ones accepted, "
        f"{found['misnamed']} misnamed",
        flush=True,
    )
    return fatal


def margins(exercise, seeds):
    """Print the largest share of a tolerance that the right answers to one exercise use; return how often
    one was rejected."""
    answers = [a for a in load_all(exercise.id) if a.names is None]
    answers.append(Answer(exercise.id, load_answer(exercise.id), None))
    worst, rejected = (0.0, ""), 0
    for answer in answers:
        for seed in range(seeds):
            used, passed = _tolerance_used(exercise, answer.answer, str(seed))
            rejected += not passed
            worst = max(worst, (used, f" ({answer.answer.__name__}, seed {seed})" if used else ""))
    print(
        f"{exercise.id} {exercise.name}: {len(answers)} right answers, {seeds} seeds: "
        f"{rejected} rejected, at most {worst[0]:.1%} of a tolerance used{worst[1]}",
        flush=True,
    )
    return rejected


def _tolerance_used(exercise, answer, seed):
    """The largest share that an accepted comparison of a check has used, and whether it has passed."""
    shares, plain = [0.0], compare.tolerance_used

    def noted(*given):
        used = plain(*given)
        if used.numel() and used.max() <= 1:  # else a question whether this is another value
            shares.append(used.max().item())
        return used

    with mock.patch.object(compare, "tolerance_used", noted):
        passed = judge(exercise, answer, seed).status == "passed"
    return max(shares), passed


def _wrong(answer, outcome):
    """What is wrong with that verdict, if anything."""
    passed = outcome.status == "passed"
    if answer.names is None:
        return None if passed else "rejected"
    if passed:
        return "accepted"
    misnamed = answer.named_here not in (ANY, *outcome.misconceptions[:1])
    return "misnamed" if misnamed else None


if __name__ == "__main__":
    given = sys.argv[1:]
    tried = margins if given[0] == "--margins" else soak
    count, *wanted = given[1:] if tried is margins else given
    chosen = [each for each in exercises() if not wanted or each.id in wanted]
    sys.exit(sum(tried(each, int(count)) for each in chosen) > 0)
