"""Answers to 1.1, `deliveries`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


def way(minutes, truck):
    return sum(minutes) + truck * (len(minutes) - 1)


@right("1.1")
def from_two_orders_in_a_row(minutes, truck, lines):
    def leaves(orders):
        free = [0.0] * len(minutes)
        for _ in range(orders):
            arrival = 0.0
            for b, work in enumerate(minutes):
                free[b] = max(arrival, free[b]) + work
                arrival = free[b] + truck
        return free[-1]

    return [lines / (leaves(12) - leaves(11)), leaves(1)]


@wrong("1.1", names="not-the-pair")
def the_other_way_round(minutes, truck, lines):
    return way(minutes, truck), lines / max(minutes)


@wrong("1.1", names="waits-too-long")
def the_inverse_of_the_delivery_time(minutes, truck, lines):
    return lines / way(minutes, truck), way(minutes, truck)


@wrong("1.1", names="pace")
def the_average_building(minutes, truck, lines):
    return lines * len(minutes) / sum(minutes), way(minutes, truck)


@wrong("1.1", names="lines")
def more_lines_deliver_sooner(minutes, truck, lines):
    return lines / max(minutes), way(minutes, truck) / lines


@wrong("1.1", names="other-unit")
def minutes_for_an_order(minutes, truck, lines):
    return max(minutes) / lines, way(minutes, truck)


@wrong("1.1", names="rounded-down")
def whole_orders_only(minutes, truck, lines):
    return lines // max(minutes), way(minutes, truck)


@wrong("1.1", names="trucks")
def the_building_waits_for_its_truck(minutes, truck, lines):
    return lines / max(*minutes, truck), way(minutes, truck)


@wrong("1.1", names="roads")
def free_trucks(minutes, truck, lines):
    return lines / max(minutes), sum(minutes)


@wrong("1.1", names="roads")
def forgets_the_brackets(minutes, truck, lines):
    return lines / max(minutes), sum(minutes) + truck * len(minutes) - 1


@wrong("1.1", names="not-the-whole-way")
def waits_in_every_building(minutes, truck, lines):
    return lines / max(minutes), len(minutes) * max(minutes) + truck * (len(minutes) - 1)


@wrong("1.1", names="minutes-is-a-list")
def divides_by_the_list(minutes, truck, lines):
    return lines / minutes, way(minutes, truck)


@wrong("1.1", names="list-changed")
def sorts_the_buildings(minutes, truck, lines):
    minutes.sort()
    return lines / minutes[-1], way(minutes, truck)


@wrong("1.1", names="returns-nothing")
def prints_it(minutes, truck, lines):
    print(lines / max(minutes), way(minutes, truck))
