"""What the exercises of chapter 01 share."""

import math

from course_exercises.authoring import Wrong

LISTS = {
    "list-is-no-number": "`minutes` is a list with a number for each building. `max`, `sum` or a loop "
    "make one number of it.",
    "past-the-end": "You reach for a building that does not exist: the last one has the index "
    "`len(minutes) - 1`.",
    "list-changed": "Your function changes the list that it was handed, and the caller goes on with "
    "it. Work on a copy: `sorted(minutes)`, `list(minutes)`.",
}
LIST_FAILURES = {"'list'": "list-is-no-number", "IndexError": "past-the-end"}


def given_back(answer, minutes, *others):
    """What the answer gives for a list of minutes, which it must leave as it is."""
    given = list(minutes)
    got = answer(given, *others)
    if given != list(minutes):
        raise Wrong("list-changed", expected=list(minutes), got=given)
    return got


def near(value, *candidates):
    return any(math.isclose(value, candidate, rel_tol=1e-6) for candidate in candidates)


def rounds(value, exact):
    return value in (exact // 1, *(round(exact, digits) for digits in range(4)))


def drawn_minutes(draw, count):
    """Different times; with a fraction, so that two mistakes hardly ever give the same result."""
    return [tenths / 10 for tenths in draw.sample(range(20, 400), count)]


def longer(draw, minutes):
    return round(max(minutes) + draw.integer(1, 200) / 10, 1)
