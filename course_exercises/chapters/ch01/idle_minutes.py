"""Exercise 1.2, `idle_minutes`: what it asks for, and how it is checked."""

import math

from course_exercises.authoring import Exercise, expect, expect_type
from course_exercises.chapters.ch01.shared import (
    LIST_FAILURES,
    LISTS,
    drawn_minutes,
    given_back,
    longer,
    near,
    rounds,
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
        "not-each": "Return a list with a number for each building.",
        "share-not-minutes": "You return shares of the time. Asked are minutes.",
        "one-order-too-many": "You let one order too many leave at the pace of the slowest: the "
        "first one is in the delivery time already.",
        "one-order-only": "You count the minutes of one order. There are several.",
        "work-once": "You subtract the work of one order. Each building works on all of them.",
        "minus": "You subtract all the time from the work. The time comes first.",
        "per-order": "You return the idle minutes per order. Asked are all of them.",
        "rounded": "You round. Return the numbers as they are; `//` rounds down too.",
        "starts-while-busy": "A building of yours starts an order while it still works on the one "
        "before.",
        "starts-without-order": "A building of yours starts before its order has come from the "
        "building before.",
        "before-the-first": "You begin to count when the first order reaches a building. It stands "
        "idle from minute 0 on.",
        "between-orders-only": "You count only the waiting between two orders. Before the first and "
        "after its last order a building is idle too.",
        "busy-not-idle": "You return the minutes in which a building works. Asked are the others.",
        "one-at-a-time": "You let an order in when the one before has left the whole line. It may "
        "enter the first building as soon as that one is free.",
        "lock-step": "You let all buildings move on together, at the pace of the slowest. A fast "
        "building passes its order on at once.",
        "own-day": "You stop counting when a building has finished its own last order. It stands "
        "idle until the last order has left the whole line.",
        "first-sets-pace": "You take the first building for the one that sets the pace. It is the "
        "slowest one, wherever it stands.",
        "last-sets-pace": "You take the last building for the one that sets the pace. It is the "
        "slowest one, wherever it stands.",
        "roads-forgotten": "Your orders do not need time between two buildings.",
        "road-too-many": "You count a road for every building. The last building sends nothing on.",
        "slow-trucks": "Your orders queue for a truck. There are always enough of them.",
        "trucks-as-work": "You count the way to the next building as work. While its truck is under "
        "way, a building works on, or it does nothing.",
        **LISTS,
    },
    failures=LIST_FAILURES,
)


def _idle(answer, minutes, truck, orders):
    way, roads, others = sum(minutes), truck * (len(minutes) - 1), orders - 1

    def until(last):
        return [last - orders * work for work in minutes]

    end = way + roads + others * max(minutes)
    leaves = [
        sum(minutes[: b + 1]) + truck * b + others * max(minutes[: b + 1])
        for b in range(len(minutes))
    ]
    starts = [sum(minutes[:b]) + truck * b for b in range(len(minutes))]
    cut_off = [math.floor(work) for work in minutes]
    cut_off_end = sum(cut_off) + math.floor(truck) * (len(minutes) - 1) + others * max(cut_off)
    got = given_back(answer, minutes, truck, orders)
    expect_type(got, (list, tuple), likely="not-each" if got is not None else None)
    expect(
        list(got),
        until(end),
        what=f"minutes={list(minutes)}, truck={truck}, orders={orders}",
        each="building",
        likely={
            "busy-not-idle": [orders * work for work in minutes],
            "share-not-minutes": lambda value: _any(
                value,
                [1 - orders * work / end for work in minutes],
                [orders * work / end for work in minutes],
            ),
            "one-order-too-many": until(end + max(minutes)),
            "one-order-only": [way + roads - work for work in minutes],
            "work-once": [end - work for work in minutes],
            "minus": [orders * work - end for work in minutes],
            "per-order": [(end - orders * work) / orders for work in minutes],
            "starts-while-busy": until(way + roads) if orders > 1 else False,
            # where the last building is the slowest, it is the same as counting between orders
            "starts-without-order": minutes[-1] < max(minutes) and until(orders * minutes[-1]),
            "before-the-first": [u - s for u, s in zip(until(end), starts, strict=True)],
            "between-orders-only": lambda value: _any(
                value, *([n * (max(minutes) - work) for work in minutes] for n in (orders, others))
            ),
            "one-at-a-time": lambda value: _any(
                value, until(orders * (way + roads)), until(orders * way)
            ),
            "lock-step": lambda value: _any(
                value,
                *(until((orders + len(minutes) - 1) * max(minutes) + r) for r in (roads, 0)),
                until((orders + len(minutes) - 1) * (max(minutes) + truck)),
            ),
            "own-day": [last - orders * work for last, work in zip(leaves, minutes, strict=True)],
            "first-sets-pace": lambda value: _from_zero(
                value, until(way + roads + others * minutes[0])
            ),
            "last-sets-pace": lambda value: _from_zero(
                value, until(way + roads + others * minutes[-1])
            ),
            "roads-forgotten": until(way + others * max(minutes)),
            "road-too-many": until(end + truck),
            "slow-trucks": lambda value: _any(
                value,
                *(until(way + roads + others * max(*minutes, trip)) for trip in (truck, 2 * truck)),
                *(until(way + r + others * (max(minutes) + truck)) for r in (roads, 0)),
            ),
            "trucks-as-work": lambda value: _from_zero(
                value, [end - orders * (work + truck) for work in minutes]
            ),
            "rounded": lambda value: (
                (len(value) == len(minutes) and all(map(rounds, value, until(end))))
                or _any(
                    value,
                    until(cut_off_end),
                    [cut_off_end - orders * work for work in cut_off],
                )
            ),
        },
    )


def _from_zero(value, candidate):
    """Whether it is the candidate, or that with 0 for what is negative."""
    return _any(value, candidate, [max(0, minutes) for minutes in candidate])


def _any(value, *candidates):
    return any(
        len(value) == len(candidate) and all(map(near, value, candidate))
        for candidate in candidates
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
