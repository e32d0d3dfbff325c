"""What the exercises of chapter 01 share."""

from course_exercises.authoring import Wrong

# Mistakes about a line, whatever is computed of it.
LINE = {
    "waits-too-long": "Your orders wait too long: until the whole line is empty, or until all buildings move on "
    "together. An order goes into a building as soon as it has arrived and that building is free.",
    "pace": "Your line has another pace than its slowest building: that of another one, of the average, "
    "or of several together. Orders queue before the slowest one, wherever it stands, so that it sets the pace.",
    "roads": "The time on the roads is missing or miscounted. There is one road between any two neighbours, so one fewer "
    "than there are buildings. Where `len(minutes) - 1` is multiplied it needs brackets, and the trucks' way back carries no "
    "order.",
    "trucks": "Your trucks cost the buildings time. There are always enough of them: an order is on its way for longer, "
    "and meanwhile the building works on the next one, or does nothing.",
    "minutes-is-a-list": "`minutes` is a list with a number for each building. `max`, `sum` or a loop make one number "
    "of it, and the last building has the index `len(minutes) - 1`.",
}
LIST_FAILURES = {"'list'": "minutes-is-a-list", "IndexError": "minutes-is-a-list"}


def given_back(answer, minutes, *others):
    """What the answer gives for a list of minutes, which it must leave as it is."""
    given = list(minutes)
    got = answer(given, *others)
    if given != list(minutes):
        raise Wrong("list-changed", expected=list(minutes), got=given)
    return got


def other_roads(truck, buildings):
    """The minutes on the roads by those who count none, one, one too many, no brackets, or the way back."""
    roads = truck * (buildings - 1)
    return [0, truck, roads + truck, truck * buildings - 1, 2 * roads]


def roundings(exact):
    return [exact // 1, *(round(exact, digits) for digits in range(4))]


def drawn_minutes(draw, count):
    """Different times; with a fraction, so that two mistakes hardly ever give the same result."""
    return [tenths / 10 for tenths in draw.sample(range(20, 400), count)]


def longer(draw, minutes):
    return round(max(minutes) + draw.integer(1, 200) / 10, 1)
