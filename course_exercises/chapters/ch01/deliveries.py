"""Exercise 1.1, `deliveries`: what it asks for, and how it is checked."""

from statistics import median

from course_exercises.authoring import Exercise, Wrong, any_of, expect, expect_type, same
from course_exercises.chapters.ch01.shared import (
    LINE,
    LIST_FAILURES,
    drawn_minutes,
    given_back,
    longer,
    other_roads,
    roundings,
)

deliveries = Exercise(
    "1.1",
    "deliveries",
    points=2,
    minutes=12,
    kind="first",
    parameters=("minutes", "truck", "lines"),
    hints=[
        "Think of a full line. One order has just left it: how long until the next one leaves?",
        (
            "One building sets the pace of a full line. The way of a single order leads through all "
            "buildings, and over every road between them."
        ),
        (
            "Throughput: a line delivers once in the time of its slowest building, and the lines add "
            "up. Delivery time: all buildings and all roads of one line; there is one road fewer than "
            "there are buildings."
        ),
    ],
    misconceptions={
        "not-the-pair": "Return both numbers, the throughput first: `return throughput, delivery_time`.",
        "lines": "The number of lines is not where it belongs. Lines side by side deliver that many times as often; "
        "an order is in one of them, where it takes as long as ever.",
        "other-unit": "You return the time between two orders, or orders in another time than a minute. Throughput "
        "is orders per minute.",
        "not-the-whole-way": "You count one building, or the slowest one's minutes for each. An order goes through "
        "all of them, and where it never waits it stays in each as long as that one works on it.",
        **LINE,
    },
    things="numbers",
    failures=LIST_FAILURES,
)


def _both(answer, minutes, truck, lines):
    got = given_back(answer, minutes, truck, lines)
    expect_type(got, (tuple, list), likely=None if got is None else "not-the-pair")
    if len(got) != 2:
        raise Wrong("not-the-pair", expected="throughput and delivery time", got=got)
    buildings, pace, way = len(minutes), max(minutes), sum(minutes)
    roads = truck * (buildings - 1)
    rate, time = lines / pace, way + roads
    case = f"minutes={list(minutes)}, truck={truck}, lines={lines}"
    paces = [way / buildings, median(minutes), pace / buildings, *minutes]
    expect(
        got[0],
        rate,
        what=f"the throughput of {case}",
        likely={
            "not-the-pair": same(got, [time, rate]),
            "lines": 1 / pace,
            "waits-too-long": any_of(1 / way, 1 / time, lines / way, lines / time),
            "pace": any_of(
                *(lines / other for other in paces),
                lines * sum(1 / work for work in minutes),
            ),
            "other-unit": any_of(1 / rate, pace, 60 * rate, rate / 60),
            "rounded-down": any_of(*roundings(rate)),
            "trucks": any_of(lines / (pace + truck), lines / max(pace, truck)),
        },
    )
    expect(
        got[1],
        time,
        what=f"the delivery time of {case}",
        likely={
            "roads": any_of(*(way + other for other in other_roads(truck, buildings))),
            "lines": any_of(way * lines, time * lines, way / lines, time / lines),
            "not-the-whole-way": any_of(*minutes, buildings * pace, buildings * pace + roads),
            "rounded-down": any_of(*roundings(time)),
        },
    )


@deliveries.requires(
    "one line of 3, 6, 2 and 4 minutes, free trucks: an order every 6 minutes", at_home=True
)
def one_line_of_3(answer, draw):
    _both(answer, [3.0, 6.0, 2.0, 4.0], 0.0, 1)


@deliveries.requires("several lines side by side")
def several_lines_side_by_side(answer, draw):
    _both(answer, drawn_minutes(draw, 4), 0.0, draw.integer(2, 5))


@deliveries.requires("trucks that take longer than any building")
def trucks_that_take_longer_than_any_building(answer, draw):
    minutes = drawn_minutes(draw, draw.integer(3, 5))
    _both(answer, minutes, longer(draw, minutes), draw.integer(2, 5))


@deliveries.requires("a line of a single building, which needs no truck")
def a_line_of_a_single_building(answer, draw):
    _both(answer, [float(draw.integer(2, 9))], float(draw.integer(1, 5)), draw.integer(2, 4))
