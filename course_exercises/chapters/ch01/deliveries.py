"""Exercise 1.1, `deliveries`: what it asks for, and how it is checked."""

import math
from statistics import median

from course_exercises.authoring import Exercise, Wrong, expect, expect_type
from course_exercises.chapters.ch01.shared import (
    LIST_FAILURES,
    LISTS,
    drawn_minutes,
    given_back,
    longer,
    near,
    rounds,
)

deliveries = Exercise(
    "1.1",
    "deliveries",
    points=2,
    minutes=12,
    kind="first",
    parameters=("minutes", "truck", "factories"),
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
        "swapped": "Throughput comes first, then delivery time: you return them the other way.",
        "one-at-a-time": "You let an order in when the one before has left the whole line. In a "
        "full line each building works on an order of its own.",
        "average-pace": "You take the average building, or the middle one. Orders queue before the "
        "slowest: that one sets the pace.",
        "each-building-delivers": "You count an order for every building. Only the last one delivers, "
        "and the slowest sets its pace.",
        "fastest-pace": "You take the fastest building. It waits for the slowest.",
        "some-pace": "You take one building by its place in the line. The slowest one sets the "
        "pace, wherever it stands.",
        "paces-added": "You add up the paces of the buildings. They work on the same orders, one "
        "after the other.",
        "inverted": "That is the time between two orders. Throughput is orders per minute.",
        "another-unit": "Throughput is in orders per minute, not per hour or per second.",
        "rounded": "You round. Return the number as it is; `//` rounds down too.",
        "factories-forgotten": "Your throughput is that of one line, and every factory has one.",
        "slow-trucks": "Your trucks slow the line down. There are always enough of them: an order "
        "is longer under way, and orders leave as often as before.",
        "roads-forgotten": "The way from building to building is missing in the delivery time.",
        "road-too-many": "You count a road for every building. The last building sends nothing on.",
        "one-road": "You count one road. There is one between any two neighbours.",
        "way-back": "You count the trucks' way back. The order is not on them then.",
        "slowest-everywhere": "You let the order stay in every building as long as in the slowest. "
        "Where it never waits, it stays in each as long as that one works on it.",
        "one-building": "You count one building. The order goes through all of them.",
        "not-a-pair": "Return both numbers: `return throughput, delivery_time`.",
        "factories-in-delivery": "The number of factories is in your delivery time. An order is in one "
        "of them, and there it takes as long as ever.",
        **LISTS,
    },
    failures=LIST_FAILURES,
)


def _both(answer, minutes, truck, factories):
    got = given_back(answer, minutes, truck, factories)
    expect_type(got, (tuple, list), likely="not-a-pair" if got is not None else None)
    if len(got) != 2:
        raise Wrong("not-a-pair", expected="throughput and delivery time", got=got)
    way, road = sum(minutes), truck * (len(minutes) - 1)
    rate, time = factories / max(minutes), way + road
    case = f"minutes={list(minutes)}, truck={truck}, factories={factories}"
    swapped = math.isclose(got[0], time) and math.isclose(got[1], rate)
    expect(
        got[0],
        rate,
        what=f"the throughput of {case}",
        likely={
            "swapped": swapped,
            "factories-forgotten": 1 / max(minutes),
            "one-at-a-time": lambda value: near(
                value, *(lines / days for lines in (1, factories) for days in (way, way + road))
            ),
            "average-pace": lambda value: near(
                value, factories * len(minutes) / way, factories / median(minutes)
            ),
            "each-building-delivers": factories * len(minutes) / max(minutes),
            "fastest-pace": factories / min(minutes),
            "some-pace": lambda value: any(near(value, factories / work) for work in minutes),
            "paces-added": factories * sum(1 / work for work in minutes),
            "inverted": lambda value: near(value, 1 / rate, max(minutes)),
            "another-unit": lambda value: near(value, 60 * rate, rate / 60),
            "rounded": lambda value: rounds(value, rate),
            "slow-trucks": lambda value: near(
                value, factories / (max(minutes) + truck), factories / max(*minutes, truck)
            ),
        },
    )
    expect(
        got[1],
        time,
        what=f"the delivery time of {case}",
        likely={
            "roads-forgotten": way,
            "road-too-many": way + truck * len(minutes),
            "factories-in-delivery": lambda value: near(
                value, *(w * f for w in (time, way) for f in (factories, 1 / factories))
            ),
            "one-road": way + truck,
            "way-back": way + 2 * road,
            "slowest-everywhere": lambda value: near(
                value, *(len(minutes) * max(minutes) + r for r in (0, road))
            ),
            "one-building": lambda value: value in minutes,
            "rounded": lambda value: rounds(value, time),
        },
    )


@deliveries.requires(
    "one line of 3, 6, 2 and 4 minutes, free trucks: an order every 6 minutes", at_home=True
)
def one_line_of_3(answer, draw):
    _both(answer, [3.0, 6.0, 2.0, 4.0], 0.0, 1)


@deliveries.requires("several factories with a line each")
def several_factories_with_a_line_each(answer, draw):
    _both(answer, drawn_minutes(draw, 4), 0.0, draw.integer(2, 5))


@deliveries.requires("trucks that take longer than any building")
def trucks_that_take_longer_than_any_building(answer, draw):
    minutes = drawn_minutes(draw, draw.integer(3, 5))
    _both(answer, minutes, longer(draw, minutes), draw.integer(2, 5))


@deliveries.requires("a line of a single building, which needs no truck")
def a_line_of_a_single_building(answer, draw):
    _both(answer, [float(draw.integer(2, 9))], float(draw.integer(1, 5)), draw.integer(2, 4))
