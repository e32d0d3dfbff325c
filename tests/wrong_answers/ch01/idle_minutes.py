"""Answers to 1.2, `idle_minutes`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


def end_of(minutes, truck, orders, pace=None):
    """When the last order leaves the line; `pace` by those who mistake it."""
    return sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * (pace or max(minutes))


def until(end, minutes, orders):
    return [end - orders * work for work in minutes]


@right("1.2")
def by_the_formula(minutes, truck, orders):
    return until(end_of(minutes, truck, orders), minutes, orders)


@right("1.2")
def by_counting_the_waiting(minutes, truck, orders):
    finished = [0.0] * orders
    idle, free = [], [0.0] * len(minutes)
    for b, work in enumerate(minutes):
        waited = 0.0
        for order in range(orders):
            arrival = finished[order] + (truck if b else 0.0)
            waited += max(0.0, arrival - free[b])
            free[b] = finished[order] = max(arrival, free[b]) + work
        idle.append(waited)
    return tuple(waited + free[-1] - free[b] for b, waited in enumerate(idle))


@wrong("1.2", names="other-than-idle")
def returns_shares(minutes, truck, orders):
    end = end_of(minutes, truck, orders)
    return [1 - orders * work / end for work in minutes]


@wrong("1.2", names="orders-miscounted")
def counts_the_first_order_twice(minutes, truck, orders):
    return until(end_of(minutes, truck, orders + 1), minutes, orders)


@wrong("1.2", names="starts-too-early")
def works_on_several_at_once(minutes, truck, orders):
    return until(end_of(minutes, truck, 1), minutes, orders)


@wrong("1.2", names="part-of-the-time")
def goes_home_early(minutes, truck, orders):
    ends = [end_of(minutes[: b + 1], truck, orders) for b in range(len(minutes))]
    return [end - orders * work for end, work in zip(ends, minutes)]


@wrong("1.2", names="waits-too-long")
def waits_for_the_line_to_be_empty(minutes, truck, orders):
    return until(orders * end_of(minutes, truck, 1), minutes, orders)


@wrong("1.2", names="pace")
def the_end_decides(minutes, truck, orders):
    return until(end_of(minutes, truck, orders, minutes[-1]), minutes, orders)


@wrong("1.2", names="roads")
def ships_the_last_one_too(minutes, truck, orders):
    return until(end_of(minutes, truck, orders) + truck, minutes, orders)


@wrong("1.2", names="trucks")
def counts_the_trucks_as_work(minutes, truck, orders):
    return until(
        end_of(minutes, truck, orders), minutes=[m + truck for m in minutes], orders=orders
    )


@wrong("1.2", names="trucks")
def a_single_truck_for_each_road(minutes, truck, orders):
    return until(end_of(minutes, truck, orders, max(*minutes, truck)), minutes, orders)


@wrong("1.2", names="rounded-down")
def counts_whole_minutes(minutes, truck, orders):
    return [round(idle) for idle in by_the_formula(minutes, truck, orders)]


@wrong("1.2", names="minutes-is-a-list")
def compares_with_the_next(minutes, truck, orders):
    return [orders * max(0.0, minutes[b + 1] - work) for b, work in enumerate(minutes)]


@wrong("1.2", names="list-changed")
def takes_the_buildings_away(minutes, truck, orders):
    end = end_of(minutes, truck, orders)
    return [end - orders * minutes.pop(0) for _ in range(len(minutes))]
