"""Plausible wrong answers, and other right ones, to the exercises of chapter 01."""

import math
from statistics import median

from tests.wrong_answers import right, wrong


@wrong("1.1", names="one-at-a-time")
def the_inverse_of_the_delivery_time(minutes, truck, factories):
    way = sum(minutes) + truck * (len(minutes) - 1)
    return factories / way, way


@wrong("1.1", names="average-pace")
def the_average_building(minutes, truck, factories):
    pace = sum(minutes) / len(minutes)
    return factories / pace, sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="fastest-pace")
def the_fastest_building(minutes, truck, factories):
    return factories / min(minutes), sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="factories-forgotten")
def one_line_only(minutes, truck, factories):
    return 1 / max(minutes), sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="factories-in-delivery")
def more_factories_deliver_sooner(minutes, truck, factories):
    way = sum(minutes) + truck * (len(minutes) - 1)
    return factories / max(minutes), way / factories


@wrong("1.1", names="roads-forgotten")
def free_trucks(minutes, truck, factories):
    return factories / max(minutes), sum(minutes)


@wrong("1.1", names="road-too-many")
def a_road_behind_the_last_building(minutes, truck, factories):
    return factories / max(minutes), sum(work + truck for work in minutes)


@wrong("1.1", names="slow-trucks")
def the_building_waits_for_its_truck(minutes, truck, factories):
    way = sum(minutes) + truck * (len(minutes) - 1)
    return factories / max(work + truck for work in minutes), way


@wrong("1.1", names="swapped")
def the_other_way_round(minutes, truck, factories):
    return sum(minutes) + truck * (len(minutes) - 1), factories / max(minutes)


@wrong("1.1", names="returns-nothing")
def prints_it(minutes, truck, factories):
    print(factories / max(minutes), sum(minutes) + truck * (len(minutes) - 1))


@wrong("1.1", names="some-pace")
def the_last_building_delivers(minutes, truck, factories):
    return factories / minutes[-1], sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="paces-added")
def adds_the_paces(minutes, truck, factories):
    paces = sum(1 / work for work in minutes)
    return factories * paces, sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="inverted")
def minutes_for_an_order(minutes, truck, factories):
    return max(minutes) / factories, sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="one-road")
def a_single_road(minutes, truck, factories):
    return factories / max(minutes), sum(minutes) + truck


@wrong("1.1", names="slowest-everywhere")
def waits_in_every_building(minutes, truck, factories):
    return factories / max(minutes), len(minutes) * max(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="one-building")
def the_slowest_building_alone(minutes, truck, factories):
    return factories / max(minutes), max(minutes)


@wrong("1.1", names="not-a-pair")
def gives_names_to_them(minutes, truck, factories):
    return {"throughput": factories / max(minutes), "delivery": sum(minutes)}


@wrong("1.1", names="average-pace")
def the_middle_building(minutes, truck, factories):
    return factories / median(minutes), sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="each-building-delivers")
def every_building_counts(minutes, truck, factories):
    rate = factories * len(minutes) / max(minutes)
    return rate, sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="factories-in-delivery")
def one_factory_after_the_other(minutes, truck, factories):
    way = sum(minutes) + truck * (len(minutes) - 1)
    return factories / max(minutes), way * factories


@wrong("1.1", names="another-unit")
def counts_in_hours(minutes, truck, factories):
    return 60 * factories / max(minutes), sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="rounded")
def whole_orders_only(minutes, truck, factories):
    return factories // max(minutes), sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="way-back")
def trucks_drive_back(minutes, truck, factories):
    return factories / max(minutes), sum(minutes) + 2 * truck * (len(minutes) - 1)


@wrong("1.1", names="list-is-no-number")
def divides_by_the_list(minutes, truck, factories):
    return factories / minutes, sum(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="past-the-end")
def takes_one_building_too_many(minutes, truck, factories):
    way = 0.0
    for b in range(len(minutes) + 1):
        way += minutes[b] + truck
    return factories / max(minutes), way - truck


@right("1.1")
def from_two_orders_in_a_row(minutes, truck, factories):
    def leaves(orders):
        free = [0.0] * len(minutes)
        for _ in range(orders):
            arrival = 0.0
            for b, work in enumerate(minutes):
                free[b] = max(arrival, free[b]) + work
                arrival = free[b] + truck
        return free[-1]

    return [factories / (leaves(12) - leaves(11)), leaves(1)]


@wrong("1.1", names="list-changed")
def sorts_the_buildings(minutes, truck, factories):
    minutes.sort()
    return factories / minutes[-1], sum(minutes) + truck * (len(minutes) - 1)


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


def needed(job):
    return math.ceil((job.state_bytes + job.sample_bytes) / job.gpu_bytes)


def fits(job):
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared < job.compute_seconds else "one"


def cut(job, gpus_a_copy):
    if gpus_a_copy > job.gpus:
        return "none"
    return "both" if job.gpus // gpus_a_copy >= 2 else "model"


@wrong("1.3", names="exchange-ignored")
def the_more_the_faster(job):
    if needed(job) == 1:
        return "data" if job.gpus > 1 else "one"
    return cut(job, needed(job))


@wrong("1.3", names="exchange-feared")
def compares_with_the_share_only(job):
    if needed(job) == 1:
        return "data" if job.exchange_seconds < job.compute_seconds / 100 else "one"
    return cut(job, needed(job))


@wrong("1.3", names="activations-forgotten")
def counts_the_state(job):
    gpus_a_copy = math.ceil(job.state_bytes / job.gpu_bytes)
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="cut-what-fits")
def always_a_line(job):
    return cut(job, max(2, needed(job)))


@wrong("1.3", names="copy-what-does-not-fit")
def never_looks_at_memory(job):
    return fits(job)


@wrong("1.3", names="never-both")
def cuts_or_copies(job):
    if needed(job) == 1:
        return fits(job)
    return "model" if needed(job) <= job.gpus else "none"


@wrong("1.3", names="one-copy-only")
def copies_whatever_is_left(job):
    if needed(job) == 1:
        return fits(job)
    if needed(job) > job.gpus:
        return "none"
    return "both" if job.gpus > needed(job) else "model"


@wrong("1.3", names="rounded-down")
def floor_instead_of_ceiling(job):
    gpus_a_copy = int((job.state_bytes + job.sample_bytes) // job.gpu_bytes)
    return fits(job) if needed(job) == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="no-limit")
def there_is_always_a_gpu(job):
    if needed(job) == 1:
        return fits(job)
    return "both" if job.gpus // needed(job) >= 2 else "model"


@wrong("1.3", names="full-is-not-too-full")
def wants_a_byte_to_spare(job):
    gpus_a_copy = int((job.state_bytes + job.sample_bytes) // job.gpu_bytes) + 1
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="another-word")
def says_it_in_words(job):
    return {"data": "data parallel", "model": "model parallel"}.get(fits(job), fits(job))


@wrong("1.3", names="whole-batch")
def stores_a_sample_for_every_gpu(job):
    gpus_a_copy = math.ceil((job.state_bytes + job.gpus * job.sample_bytes) / job.gpu_bytes)
    return fits(job) if gpus_a_copy == 1 else cut(job, gpus_a_copy)


@wrong("1.3", names="gives-up")
def wants_a_gpu_to_spare(job):
    if needed(job) >= job.gpus:
        return "none"
    return fits(job) if needed(job) == 1 else cut(job, needed(job))


@wrong("1.3", names="copy-what-does-not-fit")
def looks_at_the_time_first(job):
    if fits(job) == "one":
        return "one"
    return "data" if needed(job) == 1 else cut(job, needed(job))


@wrong("1.3", names="never-both")
def copies_where_it_divides(job):
    if needed(job) == 1:
        return fits(job)
    if needed(job) > job.gpus:
        return "none"
    return "both" if job.gpus > needed(job) and job.gpus % needed(job) == 0 else "model"


@wrong("1.3", names="activations-not-cut")
def cuts_the_state_only(job):
    if needed(job) == 1:
        return fits(job)
    if job.sample_bytes >= job.gpu_bytes:
        return "none"
    return cut(job, math.ceil(job.state_bytes / (job.gpu_bytes - job.sample_bytes)))


@wrong("1.3", names="exchange-feared")
def compares_the_exchange_with_the_share(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    return "data" if job.exchange_seconds < job.compute_seconds / job.gpus else "one"


@wrong("1.3", names="one-gpu")
def shares_where_nothing_is_lost(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared <= job.compute_seconds else "one"


@wrong("1.3", names="no-such-field")
def guesses_a_field(job):
    return "one" if job.model_bytes < job.gpu_bytes else "model"


@wrong("1.3", names="returns-nothing")
def forgets_the_last_case(job):
    if needed(job) > 1:
        return cut(job, needed(job))
    if fits(job) == "one":
        return "one"


@right("1.3")
def tries_every_number_of_gpus(job):
    for gpus_a_copy in range(1, job.gpus + 1):
        if job.state_bytes + job.sample_bytes <= gpus_a_copy * job.gpu_bytes:
            break
    else:
        return "none"
    if gpus_a_copy == 1:
        saved = job.compute_seconds - job.compute_seconds / job.gpus
        return "data" if job.exchange_seconds < saved else "one"
    return "both" if 2 * gpus_a_copy <= job.gpus else "model"
