"""1.2, `idle_minutes`: answers written from the stub alone."""


def one_after_the_other(minutes, truck, orders):
    """Each order enters when the one before has left the whole line, as in training."""
    total = orders * (sum(minutes) + truck * (len(minutes) - 1))
    return [total - orders * own for own in minutes]


def trucks_forgotten(minutes, truck, orders):
    """The way between the buildings is left out of the total time."""
    total = sum(minutes) + (orders - 1) * max(minutes)
    return [total - orders * own for own in minutes]


def first_building_sets_the_pace(minutes, truck, orders):
    """Takes the first building for the slowest one."""
    total = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * minutes[0]
    return [total - orders * own for own in minutes]


def until_its_own_last_order(minutes, truck, orders):
    """Counts each building only until the last order has left that building, not the last one."""
    free, idle, arrivals = [], [], [0.0] * orders
    for own in minutes:
        end = 0.0
        for order, arrival in enumerate(arrivals):
            end = max(end, arrival) + own
            arrivals[order] = end + truck
        free.append(end)
        idle.append(end - orders * own)
    return idle


def only_the_steady_state(minutes, truck, orders):
    """Counts what each building waits for the slowest, and neither the filling nor the emptying."""
    return [orders * (max(minutes) - own) for own in minutes]


def one_interval_too_many(minutes, truck, orders):
    """As many intervals as orders: it forgets that there are orders - 1 between them."""
    total = sum(minutes) + truck * (len(minutes) - 1) + orders * max(minutes)
    return [total - orders * own for own in minutes]


def truck_keeps_the_building(minutes, truck, orders):
    """A building works on only when its truck has arrived, so the truck sets the pace too."""
    pace = max([own + truck for own in minutes[:-1]] + minutes[-1:])
    total = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * pace
    return [total - orders * own for own in minutes]


def from_its_first_order_on(minutes, truck, orders):
    """A building's count begins when its first order arrives, not at minute 0."""
    total = sum(minutes) + truck * (len(minutes) - 1) + (orders - 1) * max(minutes)
    idle, arrival = [], 0.0
    for own in minutes:
        idle.append(total - arrival - orders * own)
        arrival += own + truck
    return idle


ANSWERS = {
    "1.2": [
        one_after_the_other,
        trucks_forgotten,
        first_building_sets_the_pace,
        until_its_own_last_order,
        only_the_steady_state,
        one_interval_too_many,
        truck_keeps_the_building,
        from_its_first_order_on,
    ]
}
