"""Proves the pars of the schedules page: the shortest step that any schedule under the cap can have.

python -m playground.pars     writes playground/pars.json, in some minutes

A search goes through all schedules that could end by a time, and the time grows until one does. It
begins at a bound: a rank's work, what must happen before it, and the way back after it. Where a named
schedule meets the bound nothing is left to search. Micro-batches are alike, so each stage may take
them in their order: two that overtake each other can change names from there on.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from course_utils.lesson import schedules
from course_utils.lesson.schedules import Placement, looped, v_shaped

PARS = Path(__file__).with_name("pars.json")
RANKS, MICRO_BATCHES = (2, 3, 4), range(1, 9)
KINDS = ((1, "FB", looped), (1, "FBW", looped), (2, "FB", looped), (2, "FBW", v_shaped))
PATIENCE = 8  # seconds of a processor: a board for which that is too little has no par


class Board(NamedTuple):
    """What is to be scheduled, and how many passes each rank may have in flight."""

    ranks: int
    micro_batches: int
    chunks: int
    kinds: str  # "FB" or "FBW"
    cap: int
    place: Placement

    @property
    def costs(self) -> dict[str, int]:
        """In ticks, a pass forward through a chunk."""
        return {"F": 1, "B": 1 if "W" in self.kinds else 2, "W": 1}

    @property
    def key(self) -> str:
        line = "V" if self.place is v_shaped else "v"
        return f"p{self.ranks}m{self.micro_batches}{line}{self.chunks}-{self.kinds}-cap{self.cap}"


class State(NamedTuple):
    """What has ended, by virtual stage, and what each rank runs: (kind, stage, ticks left)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weights: tuple[int, ...]
    running: tuple[tuple[str, int, int] | None, ...]


def boards() -> Iterator[Board]:
    """Every board of the page."""
    for p, m, (v, kinds, place) in product(RANKS, MICRO_BATCHES, KINDS):
        yield from (Board(p, m, v, kinds, cap, place) for cap in range(v, m * v + 1))


def par(board: Board, known: int | None = None) -> int | None:
    """The shortest step in ticks; None where the search takes too long. `known` is a step under a
    smaller cap."""
    end = time.process_time() + PATIENCE
    limit, known = _bound(board), min(filter(None, [known, *_named(board)]), default=None)
    try:
        while limit != known and not _can_end(board, limit, end):
            limit += 1
    except TimeoutError:
        return None
    return limit


def _named(board: Board) -> list[int]:
    """The steps of the course's schedules that keep to the cap, in ticks."""
    makers = {
        (1, "FB", looped): (schedules.gpipe, schedules.one_forward_one_backward),
        (1, "FBW", looped): (schedules.zb_h1, schedules.zb_h2),
        (2, "FB", looped): (partial(schedules.interleaved, chunks=2),),
        (2, "FBW", v_shaped): (schedules.zb_v, schedules.dualpipe_v),
    }
    plans = [
        make(board.ranks, board.micro_batches)
        for make in makers[board.chunks, board.kinds, board.place]
    ]
    results = [schedules.simulate(plan, place=board.place) for plan in plans]
    return [int(r.makespan * board.chunks) for r in results if max(r.peak_in_flight) <= board.cap]


def _bound(board: Board) -> int:
    stages = board.ranks * board.chunks
    nothing = State(*[(0,) * stages] * 3, (None,) * board.ranks)
    # nothing reaches a rank before the forward passes of the ranks ahead of it
    return max(_least_end(board, nothing, rank, rank) for rank in range(board.ranks))


def _least_end(board: Board, state: State, rank: int, now: int) -> int:
    """No schedule that goes on from here at `now` ends earlier, for what this rank still has to do."""
    costs, m = board.costs, board.micro_batches
    mine, split = _stages(board, rank), "W" in board.kinds
    left = state.running[rank][2] - costs[state.running[rank][0]] if state.running[rank] else 0
    backward = sum(m - state.backward[s] for s in mine)
    work = left + backward * costs["B"] + sum(m - state.forward[s] for s in mine)
    end = now + work + (rank * costs["B"] + split if backward else 0)
    if split:
        end = max(end, now + work + sum(m - state.weights[s] for s in mine))
    if rank == 0 and (waiting := m - state.forward[0] - _runs(state, "F", 0)):
        trip = len(state.forward) * (costs["F"] + costs["B"]) + split
        end = max(end, now + ((waiting - 1) // board.cap + 1) * trip)
    return end


@cache
def _stages(board: Board, rank: int) -> list[int]:
    return [board.place(rank, chunk, board.ranks) for chunk in range(board.chunks)]


def _runs(state: State, kind: str, stage: int) -> bool:
    now = state.running[stage % len(state.running)]
    return now is not None and now[:2] == (kind, stage)


def _can_end(board: Board, limit: int, until: float) -> bool:
    """Whether some schedule ends within `limit` ticks: all of them, side by side, from event to event."""
    stages, m = board.ranks * board.chunks, board.micro_batches
    at: dict[int, set[State]] = defaultdict(set)
    at[0].add(State(*[(0,) * stages] * 3, (None,) * board.ranks))
    for now in range(limit + 1):
        for state in at.pop(now, ()):
            if min(state.weights if "W" in board.kinds else state.backward) == m:
                return True
            if time.process_time() > until:
                raise TimeoutError
            for running in product(*(_choices(board, state, r) for r in range(board.ranks))):
                if not any(running):
                    continue
                begun = state._replace(running=running)
                if all(_least_end(board, begun, r, now) <= limit for r in range(board.ranks)):
                    later = now + min(each[2] for each in running if each)
                    at[later].add(_after(begun, later - now))
    return False


def _choices(board: Board, state: State, rank: int) -> list[tuple[str, int, int] | None]:
    """What a rank may run from here: None is to wait for the next event.

    A tick is the shortest op, so one that lasts a tick fills a gap and delays nothing. Only a forward
    pass with chunks may be better left, because it takes the place of another one.
    """
    if state.running[rank]:
        return [state.running[rank]]
    costs, m, mine = board.costs, board.micro_batches, _stages(board, rank)
    forward, backward, weights = state[:3]
    kept = weights if "W" in board.kinds else backward
    found = []
    for s in mine:
        if forward[s] < (forward[s - 1] if s else m) and (
            sum(forward[t] - kept[t] for t in mine) < board.cap
        ):
            found.append(("F", s, costs["F"]))
        if backward[s] < (backward[s + 1] if s + 1 < len(backward) else forward[s]):
            found.append(("B", s, costs["B"]))
        if "W" in board.kinds and weights[s] < backward[s]:
            found.append(("W", s, costs["W"]))
    fills = any(ticks == 1 and (board.chunks == 1 or kind != "F") for kind, _, ticks in found)
    return found if fills else [*found, None]


def _after(state: State, ticks: int) -> State:
    done = {"F": list(state.forward), "B": list(state.backward), "W": list(state.weights)}
    running = []
    for each in state.running:
        if each and each[2] == ticks:
            done[each[0]][each[1]] += 1
            each = None
        running.append(each and (each[0], each[1], each[2] - ticks))
    return State(*map(tuple, done.values()), tuple(running))


def main() -> None:
    """Write all pars, in forward passes of a rank."""
    found, known = {}, None
    for board in boards():
        proven = par(board, known := None if board.cap == board.chunks else known)
        if proven is not None:
            known, whole = proven, proven % board.chunks == 0
            found[board.key] = proven // board.chunks if whole else proven / board.chunks
        print(board.key, found.get(board.key), flush=True)
    PARS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
