"""The rules of the schedules page, as JSON: the course's own simulation and sentences decide.

An op may be placed as soon as all that it needs is placed, so each position can be timed: what is left
is added in an order that can run, and the simulation of all says when the placed ops start and end.
"""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

from course_exercises.checks.positions import Position, read
from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op, Simulation, looped, v_shaped
from playground.guesses import guesses as _guesses

NAMED = {
    "GPipe": schedules.gpipe,
    "1F1B": schedules.one_forward_one_backward,
    "interleaved 1F1B": schedules.interleaved,
    "ZB-H1": schedules.zb_h1,
    "ZB-H2": schedules.zb_h2,
    "ZB-V": schedules.zb_v,
    "DualPipe-V": schedules.dualpipe_v,
}
V_SHAPED = (schedules.zb_v, schedules.dualpipe_v)
_BEFORE = re.compile(r"before (\S+)")  # in a sentence of `first_illegal_move`


def view(link: str) -> str:
    """All that the page shows of a position."""
    position = read(link)
    result, timed = played(position), times(position)
    critical = _critical(position, timed)
    left = [set(position.ops) - set(row) for row in position.rows]
    ranks = [
        {
            "ops": [_shown(op, *timed[rank, op], (rank, op) in critical) for op in row],
            "left": {
                str(op): why_not(position, rank, op) for op in position.ops if op in left[rank]
            },
            "kept": _kept(position, row),
            "peak": max(_kept(position, row[:i]) for i in range(len(row) + 1)),
        }
        for rank, row in enumerate(position.rows)
    ]
    moves = [why for rank in ranks for why in rank["left"].values()]
    shown = {
        "ranks": ranks,
        "kinds": position.kinds,
        "chunks": position.chunks,
        "microBatches": position.micro_batches,
        "cap": position.cap,
        "time": max((end for _, end in timed.values()), default=0),
        "idle": result.idle_share if result else 0,
        "par": par(position),
        "names": names(position),
        "over": not moves,
        "stuck": bool(moves) and None not in moves,
    }
    return json.dumps(shown)


def playable(link: str) -> str:
    """As much of a position as can be played: an address may hold anything."""
    try:
        position = read(link)
    except ValueError:
        position = read(link.split("/")[0])
    rows = position.rows
    position = replace(position, rows=[[] for _ in range(position.ranks)])
    last = None
    while last != (last := str(position)):
        for rank, row in enumerate(rows[: position.ranks]):
            while row and not why_not(position, rank, row[0]):
                position.rows[rank].append(row.pop(0))
    return str(position)


def move(link: str, rank: int, name: str) -> str:
    """The position after an op is placed on a rank, and what there is to say."""
    position = read(link)
    op = next(each for each in position.ops if str(each) == name)
    if why := why_not(position, rank, op):
        return json.dumps({"link": link, "said": f"{name} cannot go there: {why}."})
    position.rows[rank].append(op)
    start, end = times(position)[rank, op]
    return json.dumps(
        {"link": str(position), "said": f"Rank {rank} runs {name} from {start:g} to {end:g}."}
    )


def why_not(position: Position, rank: int, op: Op) -> str | None:
    """Why an op may not be the next of a rank; None if it may."""
    after = [row + [op] * (r == rank) for r, row in enumerate(position.rows)]
    sentence = schedules.first_illegal_move(_completed(position, after), *position.sizes)
    if sentence and "arrived" not in sentence:
        first = _BEFORE.search(sentence)
        return (
            f"rank {rank} has to run {first[1]} first"
            if first
            else sentence.replace("stage", "rank")
        )
    if (needed := _needed(position, rank, op)) and needed[1] not in position.rows[needed[0]]:
        return f"rank {needed[0]} has to run {needed[1]} first"
    if op.kind == "F" and (kept := _kept(position, position.rows[rank])) >= position.cap:
        return (
            f"rank {rank} has {kept} in flight already, and no more may be; a {position.kinds[-1]} "
            "makes room"
        )
    return None


def played(position: Position) -> Simulation | None:
    """The placed ops as a simulation of their own: the course's idle share holds for a part, too."""
    timed = times(position)
    rows = [(rank, row) for rank, row in enumerate(position.rows) if row]
    if not rows:
        return None
    starts, ends = ([[timed[r, op][i] for op in row] for r, row in rows] for i in (0, 1))
    work = sum(end - start for start, end in timed.values()) / position.ranks
    return Simulation([row for _, row in rows], starts, ends, work)


def times(position: Position) -> dict[tuple[int, Op], tuple[float, float]]:
    """When each placed op starts and ends: what comes after it in the order changes nothing."""
    spans = schedules.simulate(_completed(position, position.rows), place=position.place).spans
    placed = {(rank, op) for rank, row in enumerate(position.rows) for op in row}
    return {(s.rank, s.op): (s.start, s.end) for s in spans if (s.rank, s.op) in placed}


def names(position: Position) -> list[str]:
    """The named schedules that begin as this position does, whichever micro-batch is whichever."""
    return [name for name, plan in _named(position.board).items() if _begins(plan, position.rows)]


@cache
def _named(board: str) -> dict[str, schedules.Schedule]:
    """Those that this board has room for."""
    empty = read(board)
    plans = {}
    for name, make in NAMED.items():
        more = {"chunks": 2} if make is schedules.interleaved else {}
        plan = make(empty.ranks, empty.micro_batches, **more)
        place = v_shaped if make in V_SHAPED else looped
        if place is not empty.place or set(plan[0]) != set(empty.ops):
            continue
        if max(schedules.simulate(plan, place=place).peak_in_flight) <= empty.cap:
            plans[name] = plan
    return plans


def _begins(plan, rows):
    return all(
        [(op.kind, op.chunk) for op in row] == [(op.kind, op.chunk) for op in whole[: len(row)]]
        for row, whole in zip(rows, plan)
    )


def par(position: Position) -> float:
    """The shortest step that this board allows."""
    return _pars()[position.board]


@cache
def _pars() -> dict[str, float]:
    return json.loads(Path(__file__).with_name("pars.json").read_text(encoding="utf-8"))


def guesses(board: str) -> str:
    """What one may predict of the shortest step."""
    empty = read(board)
    p, m = empty.ranks, empty.micro_batches
    mistakes = [
        (3 * m, "That is a rank's work alone. It has to wait as well, for the others."),
        (3 * p * m, "So it is without overlap, where one rank works at a time."),
        (
            3 * (m + p),
            "You count one pass too many: a rank waits for ranks - 1 of them forward, and for as many back.",
        ),
        (
            3 * (p + m - 1),
            "So it is for F and whole B where memory is no limit. On this board it is not.",
        ),
    ]
    return _guesses(par(empty), mistakes)


def _completed(position, rows):
    return [row + [op for op in position.ops if op not in row] for row in rows]


def _needed(position, rank, op):
    """The rank and the op that an op waits for from elsewhere; None for the ends of the line, and W."""
    stage = position.place(rank, op.chunk, position.ranks) + (1 if op.kind == "B" else -1)
    homes = schedules.homes(position.place, position.ranks, position.chunks)
    if op.kind == "W" or stage not in homes:
        return None
    home, chunk = homes[stage]
    return home, Op(op.kind, op.micro_batch, chunk)


def _kept(position, row):
    kinds = [op.kind for op in row]
    return kinds.count("F") - kinds.count(position.kinds[-1])


def _critical(position, timed):
    """The ops of one chain without a gap, from the start to what ends last."""
    if not timed:
        return set()
    now = max(timed, key=lambda key: timed[key][1])
    path = {now}
    while (start := timed[now][0]) > 0:
        rank, op = now
        own = [(rank, other) for other in position.rows[rank]]
        candidates = [_needed(position, rank, op), *own]
        now = next(key for key in candidates if key and timed[key][1] == start)
        path.add(now)
    return path


def _shown(op, start, end, critical):
    return {
        "name": str(op), "kind": op.kind, "chunk": op.chunk, "start": start, "end": end, "critical": critical,
        "microBatch": op.micro_batch,
    }  # fmt: skip
