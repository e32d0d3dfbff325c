"""Answers to 1.1, `deliveries`: wrong in a plausible way, or right in another."""

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
