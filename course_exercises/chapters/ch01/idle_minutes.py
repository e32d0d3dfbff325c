"""Exercise 1.2, `idle_minutes`: what it asks for, and how it is checked."""

from course_exercises.authoring import Exercise, any_of, expect, expect_type
from course_exercises.chapters.ch01.shared import (
    LINE,
    LIST_FAILURES,
    drawn_minutes,
    given_back,
    longer,
    other_roads,
    roundings,
)

idle = Exercise(
    "1.2",
    "idle_minutes",
    points=3,
    minutes=20,
    kind="core",
    parameters=("minutes", "truck", "orders"),
    hints=[
        (
            "Each building works `orders * minutes[b]`. So you need one number more: when does the "
            "last order leave the line?"
        ),
        (
            "An order starts in a building when two things are true: the order has arrived, and the "
            "building has finished the order before. Keep for each building from when on it is free."
        ),
        (
            "Go through the orders one by one, and for each through the buildings; note when it leaves "
            "each of them. Or think: the first order takes its delivery time, and behind it the others "
            "leave at the pace of the slowest building."
        ),
    ],
    misconceptions={
        "other-than-idle": "You return something else than idle minutes: the minutes of work, a share of the time, "
        "minutes per order, or all with the sign turned. A building is idle for the whole time minus its work.",
        "orders-miscounted": "The orders are not counted right. Each building works on all of them; the first one "
        "leaves after its delivery time, and `orders - 1` follow it.",
        "starts-too-early": "A building of yours starts an order too early: before the order has come from the "
        "building before, or while it still works on another one.",
        "part-of-the-time": "You leave out a part of the time. Every building's idle minutes count from minute 0, "
        "before its first order arrives, until the last order has left the whole line.",
        **LINE,
    },
    things="minutes",
    failures=LIST_FAILURES,
)


def _idle(answer, minutes, truck, orders):
    buildings, pace, way, others = len(minutes), max(minutes), sum(minutes), orders - 1
    roads, work = truck * (buildings - 1), [orders * each for each in minutes]
    end = way + roads + others * pace
    idle = [end - each for each in work]
    starts = [sum(minutes[:b]) + truck * b for b in range(buildings)]
    leaves = [
        start + each + others * max(minutes[: b + 1])
        for b, (start, each) in enumerate(zip(starts, minutes, strict=True))
    ]

    def minus(whole, parts):
        return [a - b for a, b in zip(whole, parts, strict=True)]

    def until(*ends, busy=work):
        """Whether it is what is idle until another end, as it is or with 0 for what is negative."""
        each = [minus([other] * buildings, busy) for other in ends]
        return any_of(*each, *([max(0, m) for m in one] for one in each))

    ticks, lock_step = pace + truck, (orders + buildings - 1) * pace
    got = given_back(answer, minutes, truck, orders)
    expect_type(got, (list, tuple))
    expect(
        list(got),
        idle,
        what=f"minutes={list(minutes)}, truck={truck}, orders={orders}",
        each="building",
        likely={
            "other-than-idle": any_of(
                work,
                [each / end for each in work],
                [each / end for each in idle],
                [each / orders for each in idle],
                [-each for each in idle],
            ),
            "orders-miscounted": any_of(
                [each + pace for each in idle],
                minus([way + roads] * buildings, minutes),
                minus([end] * buildings, minutes),
            ),
            # where the last building is the slowest, it is the same as counting between orders
            "starts-too-early": until(
                way + roads, *([orders * minutes[-1]] if minutes[-1] < pace else [])
            ),
            "part-of-the-time": any_of(
                minus(idle, starts),
                minus(leaves, work),
                *([n * (pace - each) for each in minutes] for n in (orders, others)),
            ),
            "waits-too-long": until(
                orders * (way + roads),
                orders * way,
                lock_step,
                lock_step + roads,
                (orders + buildings - 1) * ticks,
            ),
            "pace": until(*(way + roads + others * minutes[b] for b in (0, -1))),
            "roads": until(*(end - roads + other for other in other_roads(truck, buildings))),
            "trucks": lambda got: (
                until(*(way + roads + others * max(pace, trip) for trip in (truck, 2 * truck)))(got)
                or until(*(way + other + others * ticks for other in (0, roads)))(got)
                or until(end, busy=[orders * (each + truck) for each in minutes])(got)
            ),
            "rounded-down": any_of(*map(list, zip(*map(roundings, idle), strict=True))),
        },
    )


@idle.requires("one order: while one building works, the others do nothing", at_home=True)
def one_order_while_one_building_works_the_others(answer, draw):
    _idle(answer, [2.0, 6.0, 3.0], 0.0, 1)


@idle.requires("several orders, the slowest building in the middle")
def several_orders_the_slowest_building_in_the_middle(answer, draw):
    first, last, slow = sorted(drawn_minutes(draw, 3))
    _idle(answer, [first, slow, last], 0.0, draw.integer(3, 9))


@idle.requires("the slowest building at the beginning, and at the end")
def the_slowest_building_at_the_beginning(answer, draw):
    rising = sorted(drawn_minutes(draw, 4))
    _idle(answer, rising, 0.0, draw.integer(3, 9))
    _idle(answer, rising[::-1], 0.0, draw.integer(3, 9))


@idle.requires("trucks that take longer than any building")
def trucks_that_take_longer_than_any_building(answer, draw):
    minutes = drawn_minutes(draw, draw.integer(3, 5))
    # with as many orders as buildings, a truck for each order costs what one for each road does
    _idle(answer, minutes, longer(draw, minutes), draw.integer(7, 12))
