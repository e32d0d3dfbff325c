"""Answers to 1.2, `idle_minutes`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


@wrong("1.2", names="one-at-a-time")
def waits_for_the_line_to_be_empty(minutes, truck, orders):
    end = orders * (sum(minutes) + truck * (len(minutes) - 1))
    return [end - orders * work for work in minutes]


@wrong("1.2", names="lock-step")
def everybody_moves_at_once(minutes, truck, orders):
    ticks = orders + len(minutes) - 1
    end = ticks * max(minutes) + truck * (len(minutes) - 1)
    return [end - orders * work for work in minutes]


@wrong("1.2", names="busy-not-idle")
def counts_the_work(minutes, truck, orders):
    return [orders * work for work in minutes]


@wrong("1.2", names="own-day")
def goes_home_early(minutes, truck, orders):
    free = [0.0] * len(minutes)
    for _ in range(orders):
        arrival = 0.0
        for b, work in enumerate(minutes):
            free[b] = max(arrival, free[b]) + work
            arrival = free[b] + truck
    return [end - orders * work for end, work in zip(free, minutes)]


@wrong("1.2", names="last-sets-pace")
def the_end_decides(minutes, truck, orders):
    end = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * minutes[-1]
    return [end - orders * work for work in minutes]


@wrong("1.2", names="first-sets-pace")
def the_door_decides(minutes, truck, orders):
    end = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * minutes[0]
    return [end - orders * work for work in minutes]


@wrong("1.2", names="roads-forgotten")
def next_door(minutes, truck, orders):
    end = sum(minutes) + (orders - 1) * max(minutes)
    return [end - orders * work for work in minutes]


@wrong("1.2", names="road-too-many")
def ships_the_last_one_too(minutes, truck, orders):
    end = sum(minutes) + truck * len(minutes) + (orders - 1) * max(minutes)
    return [end - orders * work for work in minutes]


@wrong("1.2", names="slow-trucks")
def a_single_truck_for_each_road(minutes, truck, orders):
    free, road = [0.0] * len(minutes), [0.0] * len(minutes)
    for _ in range(orders):
        arrival = 0.0
        for b, work in enumerate(minutes):
            free[b] = max(arrival, free[b]) + work
            road[b] = max(free[b], road[b]) + truck
            arrival = road[b]
    return [free[-1] - orders * work for work in minutes]


def _end(minutes, truck, orders):
    return sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * max(minutes)


@wrong("1.2", names="not-each")
def adds_everything_up(minutes, truck, orders):
    return sum(_end(minutes, truck, orders) - orders * work for work in minutes)


@wrong("1.2", names="share-not-minutes")
def returns_shares(minutes, truck, orders):
    return [1 - orders * work / _end(minutes, truck, orders) for work in minutes]


@wrong("1.2", names="one-order-too-many")
def counts_the_first_order_twice(minutes, truck, orders):
    return [_end(minutes, truck, orders + 1) - orders * work for work in minutes]


@wrong("1.2", names="one-order-only")
def looks_at_one_order(minutes, truck, orders):
    return [_end(minutes, truck, 1) - work for work in minutes]


@wrong("1.2", names="work-once")
def subtracts_one_order(minutes, truck, orders):
    return [_end(minutes, truck, orders) - work for work in minutes]


@wrong("1.2", names="before-the-first")
def begins_with_the_first_order(minutes, truck, orders):
    end = _end(minutes, truck, orders)
    starts = [sum(minutes[:b]) + truck * b for b in range(len(minutes))]
    return [end - start - orders * work for start, work in zip(starts, minutes)]


@wrong("1.2", names="between-orders-only")
def counts_the_gaps(minutes, truck, orders):
    return [(orders - 1) * (max(minutes) - work) for work in minutes]


@wrong("1.2", names="minus")
def subtracts_the_other_way(minutes, truck, orders):
    return [orders * work - _end(minutes, truck, orders) for work in minutes]


@wrong("1.2", names="per-order")
def shares_them_among_the_orders(minutes, truck, orders):
    return [_end(minutes, truck, orders) / orders - work for work in minutes]


@wrong("1.2", names="rounded")
def counts_whole_minutes(minutes, truck, orders):
    return [round(_end(minutes, truck, orders) - orders * work) for work in minutes]


@wrong("1.2", names="starts-while-busy")
def works_on_several_at_once(minutes, truck, orders):
    free = [0.0] * len(minutes)
    for _ in range(orders):
        arrival = 0.0
        for b, work in enumerate(minutes):
            free[b] = arrival + work
            arrival = free[b] + truck
    return [free[-1] - orders * work for work in minutes]


@wrong("1.2", names="starts-without-order")
def works_on_nothing(minutes, truck, orders):
    free = [0.0] * len(minutes)
    for _ in range(orders):
        for b, work in enumerate(minutes):
            free[b] += work
    return [free[-1] - orders * work for work in minutes]


@wrong("1.2", names="slow-trucks")
def the_building_loads_the_truck(minutes, truck, orders):
    end = sum(minutes) + (orders - 1) * (max(minutes) + truck)
    return [end - orders * work for work in minutes]


@wrong("1.2", names="past-the-end")
def compares_with_the_next(minutes, truck, orders):
    return [orders * max(0.0, minutes[b + 1] - work) for b, work in enumerate(minutes)]


@wrong("1.2", names="not-each")
def names_the_buildings(minutes, truck, orders):
    end = _end(minutes, truck, orders)
    return {b: end - orders * work for b, work in enumerate(minutes)}


@right("1.2")
def by_the_formula(minutes, truck, orders):
    end = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * max(minutes)
    return [end - orders * work for work in minutes]


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


@wrong("1.2", names="list-changed")
def takes_the_buildings_away(minutes, truck, orders):
    end = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * max(minutes)
    idle = []
    while minutes:
        idle.append(end - orders * minutes.pop(0))
    return idle


@wrong("1.2", names="trucks-as-work")
def counts_the_trucks_as_work(minutes, truck, orders):
    end = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * max(minutes)
    return [end - orders * (work + truck) for work in minutes]


@wrong("1.2", names="first-sets-pace")
def lets_the_first_set_the_pace_and_stops_at_zero(minutes, truck, orders):
    end = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * minutes[0]
    return [max(0.0, end - orders * work) for work in minutes]


@wrong("1.2", names="rounded")
def drops_the_fractions_first(minutes, truck, orders):
    whole = [int(work) for work in minutes]
    end = sum(whole) + int(truck) * (len(whole) - 1) + (orders - 1) * max(whole)
    return [end - orders * work for work in minutes]
