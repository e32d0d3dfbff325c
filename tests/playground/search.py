"""Another way to the par of a small board: a search through all schedules that could end by a time.

The time grows from a bound until one does: a rank's work, what must happen before it, and the way back after it.
"""

from collections import defaultdict
from functools import cache
from itertools import count, product
from typing import NamedTuple

from playground.pars import Board


class State(NamedTuple):
    """What has ended, by virtual stage, and what each rank runs: (kind, stage, ticks left)."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    weights: tuple[int, ...]
    running: tuple[tuple[str, int, int] | None, ...]


def shortest(board: Board) -> int:
    """The shortest step in ticks."""
    return next(limit for limit in count(_bound(board)) if _can_end(board, limit))


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


def _can_end(board: Board, limit: int) -> bool:
    """Whether some schedule ends within `limit` ticks: all of them, side by side, from event to event."""
    stages, m = board.ranks * board.chunks, board.micro_batches
    at: dict[int, set[State]] = defaultdict(set)
    at[0].add(State(*[(0,) * stages] * 3, (None,) * board.ranks))
    for now in range(limit + 1):
        for state in at.pop(now, ()):
            if min(state.weights if "W" in board.kinds else state.backward) == m:
                return True
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
