"""The checks of chapter 01: a line that delivers, a line that stalls, and six decisions."""

import math
from dataclasses import dataclass
from statistics import median

from course_utils.checks import Exercise, Wrong, expect, expect_type

LISTS = {
    "list-is-no-number": "`minutes` is a list with a number for each building. `max`, `sum` or a loop "
    "make one number of it.",
    "past-the-end": "You reach for a building that does not exist: the last one has the index "
    "`len(minutes) - 1`.",
    "list-changed": "Your function changes the list that it was handed, and the caller goes on with "
    "it. Work on a copy: `sorted(minutes)`, `list(minutes)`.",
}
LIST_FAILURES = {"'list'": "list-is-no-number", "IndexError": "past-the-end"}

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


def _of(answer, minutes, *others):
    """What the answer gives for a list of minutes, which it must leave as it is."""
    given = list(minutes)
    got = answer(given, *others)
    if given != list(minutes):
        raise Wrong("list-changed", expected=list(minutes), got=given)
    return got


def _both(answer, minutes, truck, factories):
    got = _of(answer, minutes, truck, factories)
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
            "one-at-a-time": lambda value: _near(
                value, *(lines / days for lines in (1, factories) for days in (way, way + road))
            ),
            "average-pace": lambda value: _near(
                value, factories * len(minutes) / way, factories / median(minutes)
            ),
            "each-building-delivers": factories * len(minutes) / max(minutes),
            "fastest-pace": factories / min(minutes),
            "some-pace": lambda value: any(_near(value, factories / work) for work in minutes),
            "paces-added": factories * sum(1 / work for work in minutes),
            "inverted": lambda value: _near(value, 1 / rate, max(minutes)),
            "another-unit": lambda value: _near(value, 60 * rate, rate / 60),
            "rounded": lambda value: _rounds(value, rate),
            "slow-trucks": lambda value: _near(
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
            "factories-in-delivery": lambda value: _near(
                value, *(w * f for w in (time, way) for f in (factories, 1 / factories))
            ),
            "one-road": way + truck,
            "way-back": way + 2 * road,
            "slowest-everywhere": lambda value: _near(
                value, *(len(minutes) * max(minutes) + r for r in (0, road))
            ),
            "one-building": lambda value: value in minutes,
            "rounded": lambda value: _rounds(value, time),
        },
    )


def _near(value, *candidates):
    return any(math.isclose(value, candidate, rel_tol=1e-6) for candidate in candidates)


def _rounds(value, exact):
    return value in (exact // 1, *(round(exact, digits) for digits in range(4)))


def _minutes(draw, count):
    """Different times; with a fraction, so that two mistakes hardly ever give the same result."""
    return [tenths / 10 for tenths in draw.sample(range(20, 400), count)]


def _longer(draw, minutes):
    return round(max(minutes) + draw.integer(1, 200) / 10, 1)


@deliveries.requires(
    "one line of 3, 6, 2 and 4 minutes, free trucks: an order every 6 minutes", at_home=True
)
def _(answer, draw):
    _both(answer, [3.0, 6.0, 2.0, 4.0], 0.0, 1)


@deliveries.requires("several factories with a line each")
def _(answer, draw):
    _both(answer, _minutes(draw, 4), 0.0, draw.integer(2, 5))


@deliveries.requires("trucks that take longer than any building")
def _(answer, draw):
    minutes = _minutes(draw, draw.integer(3, 5))
    _both(answer, minutes, _longer(draw, minutes), draw.integer(2, 5))


@deliveries.requires("a line of a single building, which needs no truck")
def _(answer, draw):
    _both(answer, [float(draw.integer(2, 9))], float(draw.integer(1, 5)), draw.integer(2, 4))


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
    got = _of(answer, minutes, truck, orders)
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
                (len(value) == len(minutes) and all(map(_rounds, value, until(end))))
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
        len(value) == len(candidate) and all(map(_near, value, candidate))
        for candidate in candidates
    )


@idle.requires("one order: while one building works, the others do nothing", at_home=True)
def _(answer, draw):
    _idle(answer, [2.0, 6.0, 3.0], 0.0, 1)


@idle.requires("several orders, the slowest building in the middle")
def _(answer, draw):
    first, last, slow = sorted(_minutes(draw, 3))
    _idle(answer, [first, slow, last], 0.0, draw.integer(3, 9))


@idle.requires("the slowest building at the beginning, and at the end")
def _(answer, draw):
    rising = sorted(_minutes(draw, 4))
    _idle(answer, rising, 0.0, draw.integer(3, 9))
    _idle(answer, rising[::-1], 0.0, draw.integer(3, 9))


@idle.requires("trucks that take longer than any building")
def _(answer, draw):
    minutes = _minutes(draw, draw.integer(3, 5))
    # with as many orders as buildings, a truck for each order costs what one for each road does
    _idle(answer, minutes, _longer(draw, minutes), draw.integer(7, 12))


decisions = Exercise(
    "1.3",
    "decide",
    points=3,
    minutes=20,
    kind="core",
    parameters=("job",),
    hints=[
        "Begin with room: how many bytes does one copy at work need, and how many GPUs is that?",
        (
            "Three questions, in this order. Does a copy fit on one GPU? If not, on how many, and how "
            "many such groups are there? If it fits, what would a step cost when all GPUs share it?"
        ),
        (
            "A copy needs its state and one sample's activations; divide by the memory of a GPU and "
            "round up. Compare with the number of GPUs, and with half of it. Only for a copy that "
            "fits on one GPU, compare the shared compute and the exchange with the whole compute."
        ),
    ],
    misconceptions={
        "another-word": 'Return one of "one", "data", "model", "both" and "none".',
        "cut-what-fits": "You cut a model that fits on one GPU. A cut makes room, and here there is "
        "room: a line would only make buildings wait for each other.",
        "copy-what-does-not-fit": "You put a whole copy on a GPU that it does not fit on.",
        "activations-forgotten": "You count the state only. A copy that works also stores the "
        "activations of at least one sample.",
        "whole-batch": "You count the activations of a whole batch, or of one sample for each GPU. "
        "A copy needs room for one sample at a time.",
        "gives-up": "You say that it cannot be done, and there is room enough.",
        "exchange-ignored": "More GPUs are not always faster: here the exchange costs more than "
        "the shared compute saves.",
        "exchange-feared": "Here sharing pays: what the compute saves is more than what the "
        "exchange costs.",
        "never-both": "The GPUs are enough for two or more cut copies. Use them: cut and copy.",
        "one-copy-only": "You have GPUs for one cut copy only: there is nothing to copy.",
        "activations-not-cut": "You store the activations of a sample on every GPU of the copy. Cutting "
        "spreads them too.",
        "one-gpu": "There is one GPU, and nobody to share with.",
        "rounded-down": "You rounded the GPUs of a copy down, so a part of it has no room.",
        "no-limit": "The copy needs more GPUs than there are.",
        "full-is-not-too-full": "A copy that fills its GPUs to the last byte fits.",
        "no-such-field": "A job has `gpus`, `gpu_bytes`, `state_bytes`, `sample_bytes`, "
        "`compute_seconds` and `exchange_seconds`.",
    },
    failures={"'Job' object has no attribute": "no-such-field"},
)


@dataclass(frozen=True)
class Job:
    """As the notebook defines it."""

    gpus: int
    gpu_bytes: float
    state_bytes: float
    sample_bytes: float
    compute_seconds: float
    exchange_seconds: float

    def __str__(self) -> str:
        copy = (self.state_bytes + self.sample_bytes) / 1e9
        return f"a copy of {copy:.0f} GB on {self.gpus} GPUs of {self.gpu_bytes / 1e9:.0f} GB"


WORDS = ("one", "data", "model", "both", "none")


def _decide(answer, job, what=""):
    got = answer(job)
    if got is not None and (not isinstance(got, str) or got not in WORDS):
        raise Wrong("another-word", expected="one of " + ", ".join(WORDS), got=repr(got))
    right = _right(job)
    likely = {_mistake(job, right, got): got} if got is not None else {}
    expect(got, right, what=what or str(job), likely=likely)


def _right(job, size=None, gpus_a_copy=None):
    size = size or job.state_bytes + job.sample_bytes
    gpus_a_copy = gpus_a_copy or math.ceil(size / job.gpu_bytes)
    if gpus_a_copy > job.gpus:
        return "none"
    if gpus_a_copy > 1:
        return "both" if job.gpus // gpus_a_copy >= 2 else "model"
    shared = job.compute_seconds / job.gpus + job.exchange_seconds
    return "data" if shared < job.compute_seconds else "one"


def _mistake(job, right, got):
    """The name of the mistake that says `got` where `right` is right."""
    size = job.state_bytes + job.sample_bytes
    everybodys = job.state_bytes + job.gpus * job.sample_bytes
    if size % job.gpu_bytes == 0:
        if got == _right(job, gpus_a_copy=size // job.gpu_bytes + 1):
            return "full-is-not-too-full"
    elif right == "data" and got == _right(job, size=everybodys):
        return "whole-batch"
    elif got == _right(job, size=job.state_bytes):
        return "activations-forgotten"
    elif size > job.gpu_bytes and got == _right(job, gpus_a_copy=size // job.gpu_bytes):
        return "rounded-down"
    elif size > job.gpu_bytes > job.sample_bytes and got == _right(
        job, gpus_a_copy=math.ceil(job.state_bytes / (job.gpu_bytes - job.sample_bytes))
    ):
        return "activations-not-cut"
    if job.gpus == 1 and got == "data":
        return "one-gpu"
    if got == "none":
        return "gives-up"
    if right in ("one", "data"):
        return {"one": "exchange-feared", "data": "exchange-ignored"}.get(got, "cut-what-fits")
    if got in ("one", "data"):
        return "copy-what-does-not-fit"
    return {"none": "no-limit", "both": "never-both", "model": "one-copy-only"}[right]


def _job(gpus, gpu_gb, state_gb, sample_gb, compute, exchange):
    giga = 10**9
    return Job(gpus, gpu_gb * giga, state_gb * giga, sample_gb * giga, compute, exchange)


@decisions.requires("a small model on several GPUs, where sharing pays")
def _(answer, draw):
    _decide(answer, _job(draw.integer(2, 8), 80, draw.integer(4, 20), 1, 1.0, 0.1))
    gpus = draw.integer(3, 8)
    _decide(answer, _job(gpus, 80, draw.integer(4, 20), 1, 1.0, 0.9 - 1 / gpus))


@decisions.requires("a small model whose exchange costs more than sharing saves")
def _(answer, draw):
    gpus = draw.integer(2, 4)
    _decide(answer, _job(gpus, 80, draw.integer(4, 20), 1, 1.0, 1.0))
    _decide(answer, _job(gpus, 80, draw.integer(4, 20), 1, 1.0, 1.02 - 1 / gpus))
    _decide(answer, _job(1, 80, draw.integer(4, 20), 1, 1.0, 0.0))


@decisions.requires("a copy that has to be cut, with room for one copy and for several")
def _(answer, draw):
    needed = draw.integer(4, 6)  # GPUs that a copy fills, the last of them by half
    state = 40 * needed - 21
    for gpus in (needed + 1, 2 * needed - 1, 2 * needed, 2 * needed + 1, 5 * needed):
        for exchange in (0.1, 2.0):  # how slow the exchange is matters for a copy that fits
            _decide(answer, _job(gpus, 40, state, 1, 1.0, exchange))


@decisions.requires("a copy that does not fit on all GPUs together")
def _(answer, draw):
    gpus = draw.integer(2, 6)
    _decide(answer, _job(gpus, 40, 80 * gpus + 10, 1, 1.0, 0.1))


@decisions.requires("a copy for which the activations of one sample fit, and those of two do not")
def _(answer, draw):
    _decide(answer, _job(draw.integer(2, 6), 80, draw.integer(10, 30), 45, 1.0, 0.1))


@decisions.requires("a copy whose activations are what does not fit")
def _(answer, draw):
    _decide(answer, _job(3, 24, 23, draw.integer(4, 16), 1.0, 0.1))
    _decide(answer, _job(3, 24, 23, draw.integer(17, 22), 1.0, 0.1))


@decisions.requires("a copy that fills its GPUs to the last byte")
def _(answer, draw):
    gpus = draw.integer(2, 4)
    _decide(answer, _job(2 * gpus - 1, 16, 16 * gpus - 3, 3, 1.0, 0.1))
    _decide(answer, _job(3, 16, 13, 3, 1.0, 0.1))


@decisions.requires("the six jobs of the notebook")
def _(answer, draw):
    for name, job in _six_jobs():
        _decide(answer, job, what=name)


def _six_jobs():
    """The jobs as the notebook makes them; its text names the sources of the numbers."""
    fast, slow = 300e9, 0.125e9
    sizes = {
        "BERT-large on 8 GPUs": (340e6, 24, 1024, 16, 512, 32, 8, 80, fast),
        "BERT-large on an office network": (340e6, 24, 1024, 16, 512, 4, 2, 80, slow),
        "GPT-2 on 2 GPUs of 24 GB": (1.5e9, 48, 1600, 25, 1024, 8, 2, 24, fast),
        "Llama 3 8B": (8.03e9, 32, 4096, 32, 2048, 32, 8, 80, fast),
        "Megatron 22B": (22e9, 48, 6144, 64, 2048, 4, 8, 80, fast),
        "GPT-3 175B": (175e9, 96, 12288, 96, 2048, 64, 32, 80, fast),
    }
    for name, (count, layers, hidden, heads, sequence, batch, gpus, memory, link) in sizes.items():
        yield (
            name,
            Job(
                gpus,
                memory * 1e9,
                16 * count,
                layers * sequence * hidden * (34 + 5 * heads * sequence / hidden),
                6 * count * sequence * batch / 140e12,
                2 * (gpus - 1) / gpus * 2 * count / link,
            ),
        )
