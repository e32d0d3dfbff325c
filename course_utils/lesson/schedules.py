"""Pipeline schedules as data: their orders, their legality, their simulation, their closed forms.

A schedule says what each rank does, in order: `schedule[rank]` is a list of Op. It holds no times:
a rank starts its next op as soon as it is free and what the op needs has arrived.

    F  the forward pass of a micro-batch through the rank's layers (or one chunk of them)
    B  its backward pass; where a schedule has W ops, only the gradient of the inputs
    W  the gradient of the weights; nobody else waits for it

With chunks, a rank holds several pieces of the model; a placement says which virtual stage each is.
Times have no unit of their own; one forward is usually the unit.

Sources: GPipe (arXiv 1811.06965, section 2.3); Megatron-LM (2104.04473, sections 2.2.1 and 2.2.2);
zero bubble (2401.10241, sections 2, 5.3 and 6); DualPipe (2412.19437, section 3.2.1).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, product
from typing import NamedTuple

KINDS = ("F", "B", "W")


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of work: "F", "B" or "W" of a micro-batch in one of the rank's chunks."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        chunk = f".{self.chunk}" if self.chunk else ""
        return f"{self.kind}{self.micro_batch}{chunk}"


Schedule = list[list[Op]]
Placement = Callable[[int, int, int], int]  # (rank, chunk, ranks): the virtual stage


# ---- the placements ------------------------------------------------------------------------------


def looped(rank: int, chunk: int, ranks: int) -> int:
    """The line begins again at rank 0 with each chunk (Megatron-LM, 2104.04473, section 2.2.2)."""
    return chunk * ranks + rank


def v_shaped(rank: int, chunk: int, ranks: int) -> int:
    """The line turns at its ends: with two chunks rank r has stages r and 2 * ranks - 1 - r."""
    return chunk * ranks + (ranks - 1 - rank if chunk % 2 else rank)


def homes(place: Placement, ranks: int, chunks: int) -> dict[int, tuple[int, int]]:
    """{virtual stage: (its rank, its chunk)}."""
    return {place(r, c, ranks): (r, c) for c in range(chunks) for r in range(ranks)}


# ---- the schedules -------------------------------------------------------------------------------


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forward passes, then all backward passes (GPipe, 1811.06965, section 2.3, figure 2c).

    The paper draws the backward passes in reverse order. Here they run in the order of the forward
    passes, as in torch.distributed.pipelining; neither time nor memory depends on it.
    """
    return _rows(stages, micro_batches, lambda rank: "f" * micro_batches + "b" * micro_batches)


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """1F1B with a flush (Megatron-LM, 2104.04473, section 2.2.1, figure 4, top).

    Rank r runs stages - r forward passes (if there are so many), then one backward and one forward
    in turn. The bubble is GPipe's, the memory is not: at most stages - r micro-batches in flight.
    """
    return _rows(stages, micro_batches, lambda r: "f" * (stages - r) + "bf" * micro_batches)


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, 2104.04473, section 2.2.2, figure 4, bottom).

    Groups of `stages` micro-batches go through chunk after chunk. Rank r runs
    2 * (stages - r - 1) + (chunks - 1) * stages forward passes, then one forward and one backward
    in turn. Megatron-LM wants a multiple of `stages` micro-batches. For other numbers the order is
    that of the next multiple, without the micro-batches that are not there: legal all the same.
    """
    _require(stages=stages, micro_batches=micro_batches, chunks=chunks)
    groups = [range(first, first + stages) for first in range(0, micro_batches, stages)]
    forward = [Op("F", i, c) for group in groups for c in range(chunks) for i in group]
    backward = [Op("B", i, c) for group in groups for c in reversed(range(chunks)) for i in group]
    rows = []
    for rank in range(stages):
        warm_up = min(2 * (stages - rank - 1) + (chunks - 1) * stages, len(forward))
        row = forward[:warm_up]
        for i, op in enumerate(backward):
            row += forward[warm_up + i : warm_up + i + 1]
            row.append(op)
        rows.append([op for op in row if op.micro_batch < micro_batches])
    return rows


def zb_h1(stages: int, micro_batches: int) -> Schedule:
    """ZB-H1 (zero bubble, 2401.10241, section 2.1, figure 3, top): at most 1F1B's p in flight.

    1F1B with B and W apart. Rank r is r micro-batches late with its W, so that every rank has p in
    flight.
    """
    m = micro_batches
    return _rows(stages, m, lambda r: "f" * (stages - r) + "bf" * r + "bwf" * m)


def zb_h2(stages: int, micro_batches: int) -> Schedule:
    """ZB-H2 (zero bubble, 2401.10241, section 2.2, figure 3, bottom): up to 2p - 1 in flight.

    Rank r runs 2 * (stages - r) - 1 forward passes first, and is 2r micro-batches late with its W.
    The bubble goes only if each rank begins its next step without waiting for the others (section
    4): see `Simulation.step`.
    """
    m = micro_batches
    return _rows(stages, m, lambda r: "f" * (2 * (stages - r) - 1) + "bf" * 2 * r + "bwf" * m)


def zb_v(stages: int, micro_batches: int) -> Schedule:
    """ZB-V (zero bubble, 2401.10241, section 6), two chunks of each rank, `v_shaped`.

    For F, B and W that take equally long; the order is that of torch's ScheduleZBVZeroBubble.
    """

    def row(rank: int) -> str:
        left = stages - rank
        ahead = "f" * (2 * left - 1) + "Ff" * rank + "FBW" * left
        steady = "fbwFBW" * (max(micro_batches, 2 * stages - 1) - stages)
        return ahead + steady + "bB" * rank + "bw" * left + "W" * rank + "w" * rank

    return _rows(stages, micro_batches, row)


def dualpipe_v(stages: int, micro_batches: int) -> Schedule:
    """DualPipe-V, two chunks of each rank, `v_shaped`, in the order of torch's ScheduleDualPipeV.

    DualPipe (DeepSeek-V3, 2412.19437, section 3.2.1) cut in half: github.com/deepseek-ai/DualPipe.
    A backward pass in one piece stands as B, W; what would overlap with it comes before it.
    """

    def row(rank: int) -> str:
        behind, (half, odd) = stages - rank - 1, divmod(rank + 1, 2)
        ahead = "ff" * behind + "fF" * (rank + 1) + "BWF" * behind
        steady = "fBWFbw" * (max(micro_batches, 2 * stages) - stages)
        end = "BWbw" * half + "BWb" * odd + "Bb" * half
        late = "w" * odd + "Ww" * half + "w" * behind  # the W that are left, the oldest first
        return ahead + steady + end + "b".join([*late[:behind], late[behind:]])

    return _rows(stages, micro_batches, row)


def _rows(stages: int, micro_batches: int, row: Callable[[int], str]) -> Schedule:
    """The ops of each rank. A letter is the next micro-batch in chunk 0, a capital that in chunk 1;
    where no micro-batch is left it is nothing. The ranks share their Op objects."""
    _require(stages=stages, micro_batches=micro_batches)
    numbers, schedule = range(micro_batches), []
    ops = {x: [Op(x.upper(), i, int(x.isupper())) for i in numbers] for x in "fbwFBW"}
    for rank in range(stages):
        left = {letter: iter(each) for letter, each in ops.items()}
        schedule.append([op for letter in row(rank) if (op := next(left[letter], None))])
    return schedule


def _require(**numbers: int) -> None:
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise ValueError(
                f"A schedule needs a whole number of {name.replace('_', '-')}, at least 1; "
                f"this is {number!r}."
            )


# ---- legality ------------------------------------------------------------------------------------


def first_illegal_move(
    schedule: Schedule,
    stages: int | None = None,
    micro_batches: int | None = None,
    chunks: int | None = None,
    place: Placement = looped,
) -> str | None:
    """Returns a sentence about the first move that no pipeline can make; None if all are legal.

    Every stage runs F and B of every micro-batch in every chunk once, and W too if the schedule has
    any; F before B before W; and no stage waits for what can never come. What is not given is read
    from the schedule. The sentence begins with a small letter and has no full stop:
    "stage 2 runs B3 before F3".
    """
    try:
        plan = _Plan(schedule, stages, micro_batches, chunks, place)
        _execute(plan, [0] * plan.costs, 0)
    except IllegalMove as illegal:
        return illegal.move
    return None


class IllegalMove(ValueError):
    """A schedule that no pipeline can run. `move` is the sentence of `first_illegal_move`."""

    def __init__(self, move: str) -> None:
        super().__init__(f"This schedule cannot run: {move}.")
        self.move = move


class _Plan:
    """A checked schedule as numbers, for `_execute`.

    Within a rank an op is (kind * chunks + chunk) * micro_batches + micro_batch; `each` is how many
    of those there can be, and rank * each comes on top in `ops` and `needs`: of each rank, in
    order, its ops, and what each waits for from another rank. `nothing` is the need of an op that
    has no other rank to wait for.
    """

    def __init__(self, schedule: Schedule, stages, micro_batches, chunks, place) -> None:
        if not isinstance(schedule, list) or not all(isinstance(row, list) for row in schedule):
            raise IllegalMove("it is no list that holds a list of ops for each stage")
        self.schedule = schedule
        self.stages = len(schedule) if stages is None else stages
        known = {id(op): op for row in schedule for op in row}  # ranks may share their Op objects
        if len(schedule) != self.stages or not known:
            raise IllegalMove(
                f"it has {len(schedule)} lists with {sum(map(len, schedule))} ops in them, and "
                f"each of the {self.stages} stages needs its own"
            )
        for op in known.values():
            if not isinstance(op, Op):
                raise IllegalMove(f"stage {self._who(op)} is to run {op!r}, which is no Op")
        self.micro_batches = micro_batches or 1 + max(op.micro_batch for op in known.values())
        self.chunks = chunks or 1 + max(op.chunk for op in known.values())
        self.each = len(KINDS) * self.chunks * self.micro_batches
        self.costs = self.stages * len(KINDS) * self.chunks
        self.nothing = self.stages * self.each
        self.split = any(op.kind == "W" for op in known.values())
        numbers = {key: self._number(op) for key, op in known.items()}
        rows = [[numbers[id(op)] for op in row] for row in schedule]
        self._check(rows)
        self.ops = [[n + rank * self.each for n in row] for rank, row in enumerate(rows)]
        self.place, self.homes = place, homes(place, self.stages, self.chunks)
        self.needs = [self._needs(rank, row) for rank, row in enumerate(rows)]

    def _who(self, op: object) -> int:
        """The first rank that runs this very object."""
        return next(r for r, row in enumerate(self.schedule) for other in row if other is op)

    def _number(self, op: Op) -> int:
        if op.kind not in KINDS:
            strange = f"{op.kind!r} is none of {', '.join(KINDS)}"
        elif op.micro_batch not in range(self.micro_batches):
            strange = f"the micro-batches are {_range(self.micro_batches)}"
        elif op.chunk not in range(self.chunks):
            strange = f"the chunks are {_range(self.chunks)}"
        else:
            kind = KINDS.index(op.kind)
            return (kind * self.chunks + op.chunk) * self.micro_batches + op.micro_batch
        raise IllegalMove(f"stage {self._who(op)} runs {op}, and {strange}")

    def op(self, number: int) -> Op:
        """The op with this number, with or without its rank."""
        rest, micro_batch = divmod(number % self.each, self.micro_batches)
        return Op(KINDS[rest // self.chunks], micro_batch, rest % self.chunks)

    def _check(self, rows: list[list[int]]) -> None:
        """Raises the first fault that shows without looking at the other ranks."""
        faults = [(*fault, rank) for rank, row in enumerate(rows) if (fault := self._fault(row))]
        if faults:
            _, sentence, rank = min(faults, key=lambda fault: (fault[0], fault[2]))
            raise IllegalMove(f"stage {rank} {sentence}")

    def _fault(self, row: list[int]) -> tuple[int, str] | None:
        """The first fault in one rank's row: its place there, and what the rank does."""
        end, size = len(row), self.chunks * self.micro_batches
        places = [end] * self.each
        for i in reversed(range(end)):
            places[row[i]] = i  # of an op that is doubled, the first
        doubled = ((i, n) for i, n in enumerate(row) if places[n] != i)
        faults = [(i, f"runs {self.op(n)} twice") for i, n in islice(doubled, 1)]
        kinds = len(KINDS) if self.split else len(KINDS) - 1
        for first in (size * kind for kind in range(kinds - 1)):
            pairs = zip(range(first, first + size), places[first:], places[first + size :])
            wrong = [(late, early, n) for n, early, late in pairs if late < early]
            for late, early, n in [min(wrong)] if wrong else []:
                after = "before" if early < end else "and never"
                faults.append((late, f"runs {self.op(n + size)} {after} {self.op(n)}"))
        if end in places[: kinds * size]:
            faults.append((end, f"never runs {self.op(places.index(end))}"))
        return min(faults, default=None)

    def _needs(self, rank: int, row: list[int]) -> list[int]:
        """What each op waits for: F for the stage before it, B for the stage behind it."""
        away = []
        for step, chunk in product((-1, 1, None), range(self.chunks)):  # F, B, W
            stage = self.place(rank, chunk, self.stages)
            other = step and self.homes.get(stage + step)
            away.append(other and other[0] * self.each + (other[1] - chunk) * self.micro_batches)
        size = self.micro_batches
        return [self.nothing if (by := away[n // size]) is None else n + by for n in row]


def _range(count: int) -> str:
    return "0 only" if count == 1 else f"0 to {count - 1}"


def _execute(
    plan: _Plan, costs: Sequence[float], latency: float
) -> tuple[list[list[float]], list[list[float]]]:
    """Runs every rank's ops; returns their starts and their ends. Raises if the ranks get stuck.

    A rank goes on until something that it needs is not there; it is put aside until that ends. No
    op is looked at more than twice, so the time grows with the number of ops and nothing else.
    `costs` are by rank, kind and chunk.
    """
    size = plan.micro_batches
    finished: list[float | None] = [None] * plan.nothing
    finished.append(-latency)  # what an op without needs waits for has arrived at time 0
    starts: list[list[float]] = [[] for _ in range(plan.stages)]
    ends: list[list[float]] = [[] for _ in range(plan.stages)]
    waiting: dict[int, int] = {}  # the op that is waited for: the rank that waits
    todo = list(range(plan.stages))
    while todo:
        rank = todo.pop()
        ops, needs, began, ended = plan.ops[rank], plan.needs[rank], starts[rank], ends[rank]
        now = ended[-1] if ended else 0
        for i in range(len(ended), len(ops)):
            need = needs[i]
            arrived = finished[need]
            if arrived is None:
                waiting[need] = rank
                break
            if need // plan.each != rank:  # what stays on the rank is there at once
                arrived += latency
            now = max(now, arrived)
            began.append(now)
            op = ops[i]
            now += costs[op // size]
            ended.append(now)
            finished[op] = now
            if op in waiting:
                todo.append(waiting.pop(op))
    if waiting:
        raise IllegalMove(_deadlock(plan, waiting, ends))
    return starts, ends


def _deadlock(plan: _Plan, waiting: dict[int, int], ends: list[list[float]]) -> str:
    """Says which ranks wait for each other in a circle."""
    needs = {rank: op for op, rank in waiting.items()}
    path = [min(needs)]
    while (rank := needs[path[-1]] // plan.each) not in path:
        path.append(rank)
    circle = path[path.index(rank) :]
    moves = []
    for rank in circle:
        other, need = needs[rank] // plan.each, plan.op(needs[rank])
        move = f"stage {rank} runs {plan.schedule[rank][len(ends[rank])]} before {need}"
        moves.append(move + (f" arrived from stage {other}" if other != rank else ""))
    if len(circle) == 1:
        return moves[0]
    whole = "each waits for the other" if len(circle) == 2 else "they wait in a circle"
    return f"{', and '.join(moves)}: {whole}, a deadlock"


# ---- simulation ----------------------------------------------------------------------------------


class TimedOp(NamedTuple):
    """What a rank did from `start` to `end`."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """What became of a schedule: the times at which each rank starts and ends each of its ops.

    `work` is the time that a rank computes, averaged over the ranks.
    """

    schedule: Schedule
    starts: list[list[float]]
    ends: list[list[float]]
    work: float

    @property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max(row[-1] for row in self.ends)

    @property
    def step(self) -> float:
        """The longest time that a rank needs from its first op to its last.

        It is what a step costs when many follow each other and no rank waits for the others in
        between; the zero-bubble paper counts so (2401.10241, section 5.3, "cost"). It is less than
        the makespan where ranks that begin later also end later, as under ZB-H2.
        """
        return max(ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends))

    @property
    def bubble(self) -> float:
        """The idle time of a step, as a share of the ideal time, in which every rank works."""
        return (self.step - self.work) / self.work

    @property
    def idle_share(self) -> float:
        """The idle time of a step, as a share of the step."""
        return (self.step - self.work) / self.step

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """The most micro-batches, times chunks, whose activations each rank keeps at once.

        From F on they are kept until W; until B in a schedule without W.
        """
        return [_peak(row) for row in self.schedule]

    @property
    def spans(self) -> Iterator[TimedOp]:
        """Every op of every rank with its times."""
        for rank, row in enumerate(self.schedule):
            for op, start, end in zip(row, self.starts[rank], self.ends[rank]):
                yield TimedOp(rank, op, start, end)


def _peak(row: list[Op]) -> int:
    kinds = [op.kind for op in row]
    change = {"F": 1, "B": 0, "W": -1} if "W" in kinds else {"F": 1, "B": -1}
    return max(accumulate(change[kind] for kind in kinds))


def simulate(
    schedule: Schedule,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 2.0,
    weight: float | Sequence[float] | None = None,
    latency: float = 0,
    place: Placement = looped,
) -> Simulation:
    """Runs a schedule on a model of a pipeline, where nothing but the order decides.

    schedule: any legal schedule; IllegalMove, a ValueError, says what is wrong with another.
    forward, backward: the time that a rank needs for a micro-batch in all its chunks together;
        or a list with one time for each rank, where the stages are not equally slow. `backward`
        is both gradients.
    weight: the part of `backward` that is the gradient of the weights; half of it if not given.
        It matters only where the schedule has W ops.
    latency: the time from the end of an op to the moment at which its result is at the next stage.
        Sending takes no time of the sender, and many messages may be on their way.
    place: which virtual stage each chunk of a rank is.

    256 stages with 4,096 micro-batches take a few seconds. Times may be Fractions: exact results.
    """
    plan = _Plan(schedule, None, None, None, place)
    forwards, backwards = (_by_rank(times, plan.stages) for times in (forward, backward))
    weights = [time / 2 for time in backwards] if weight is None else _by_rank(weight, plan.stages)
    inputs = [b - w if plan.split else b for b, w in zip(backwards, weights)]
    if min(*forwards, *inputs, *weights, latency) < 0:
        raise ValueError(
            "Times cannot be negative, and the weights' part of `backward` cannot be more than all "
            f"of it: forward {forward}, backward {backward}, weight {weight}, latency {latency}."
        )
    costs = [
        time / plan.chunks
        for times in zip(forwards, inputs, weights)
        for time in times
        for _ in range(plan.chunks)
    ]
    starts, ends = _execute(plan, costs, latency)
    work = plan.micro_batches * (sum(forwards) + sum(backwards)) / plan.stages
    return Simulation(schedule, starts, ends, work)


def _by_rank(times: float | Sequence[float], stages: int) -> list[float]:
    if not isinstance(times, Sequence):
        return [times] * stages
    if len(times) != stages:
        raise ValueError(f"There are {stages} stages and {len(times)} times for them: {times}.")
    return list(times)


# ---- closed forms --------------------------------------------------------------------------------


def bubble_time_of(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    forward: float = 1.0,
    backward: float = 2.0,
    weight: float | None = None,
) -> float | None:
    """The idle time of a step under the schedule `name`, without latency; times as in `simulate`.

    Zero bubble, 2401.10241, table 2. None where no closed form holds: with fewer micro-batches than
    a schedule needs to fill, and with chunks, where they are no multiple of the stages. The paper's
    forms for ZB-H1 and ZB-H2 are the first of each maximum; the others take over where the weights'
    part is longer than a forward pass, which the paper leaves out.
    """
    _require_name(name)
    fill = {"zb_h1": stages, "zb_h2": 2 * stages - 1}.get(name, 1)
    if micro_batches < fill or (name == "interleaved" and micro_batches % stages):
        return None
    weight = backward / 2 if weight is None else weight
    inputs = backward - weight
    each = {
        "zb_h1": max(forward + inputs - weight, inputs),
        "zb_h2": max(forward + inputs - 2 * weight, inputs - forward, 0),
    }
    return (stages - 1) * each.get(name, (forward + backward) / chunks)


def peak_in_flight_of(name: str, stages: int, micro_batches: int, chunks: int = 1) -> list[int]:
    """The most micro-batches, times chunks, that each rank keeps at once under the schedule `name`.

    Megatron-LM, 2104.04473, sections 2.2.1 and 2.2.2; zero bubble, 2401.10241, section 2.2. With
    chunks it is exact for a multiple of `stages` micro-batches, and a limit for other numbers.
    """
    _require_name(name)
    most = {
        "gpipe": [micro_batches] * stages,
        "one_forward_one_backward": [stages - r for r in range(stages)],
        "interleaved": [2 * (stages - r - 1) + (chunks - 1) * stages + 1 for r in range(stages)],
        "zb_h1": [stages] * stages,
        "zb_h2": [2 * stages - 1] * stages,
    }
    return [min(count, micro_batches * chunks) for count in most[name]]


def _require_name(name: str) -> None:
    if name not in (names := [function.__name__ for function in SCHEDULES]):
        raise ValueError(f"There is no schedule named {name!r}; there are {', '.join(names)}.")


SCHEDULES = [gpipe, one_forward_one_backward, interleaved, zb_h1, zb_h2]
