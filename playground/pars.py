"""Proves the pars of the schedules page: the shortest step that any schedule under the cap can have.

python -m playground.pars     writes playground/pars.json, in some minutes; needs `pip install ortools`

CP-SAT, the solver of OR-Tools, finds a schedule and proves that none is shorter. Micro-batches are alike,
so each stage may take them in their order: two that overtake each other can change names from there on.
"""

import json
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from course_utils.lesson.schedules import Placement, looped, v_shaped

PARS = Path(__file__).with_name("pars.json")
RANKS, MICRO_BATCHES = (2, 3, 4), range(1, 9)
KINDS = ((1, "FB", looped), (1, "FBW", looped), (2, "FB", looped), (2, "FBW", v_shaped))


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


def boards() -> Iterator[Board]:
    """Every board of the page."""
    for p, m, (v, kinds, place) in product(RANKS, MICRO_BATCHES, KINDS):
        yield from (Board(p, m, v, kinds, cap, place) for cap in range(v, m * v + 1))


def shortest(board: Board) -> int:
    """The shortest step in ticks. Raises RuntimeError where the solver gives up."""
    # here: only who changes the boards needs it
    from ortools.sat.python import cp_model

    model, stages, last = cp_model.CpModel(), board.ranks * board.chunks, board.kinds[-1]
    alone = board.micro_batches * stages * sum(board.costs[kind] for kind in board.kinds)
    end = model.new_int_var(0, alone, "end")
    ops = {
        key: model.new_fixed_size_interval_var(
            model.new_int_var(0, alone, ""), board.costs[key[0]], str(key)
        )
        for key in product(board.kinds, range(stages), range(board.micro_batches))
    }

    def before(first, then):
        model.add(ops[then].start_expr() >= ops[first].end_expr())

    for stage, batch in product(range(stages), range(board.micro_batches)):
        if stage:
            before(("F", stage - 1, batch), ("F", stage, batch))
            before(("B", stage, batch), ("B", stage - 1, batch))
        for first, then in pairwise(board.kinds):  # of a stage: forward, backward, weights
            before((first, stage, batch), (then, stage, batch))
        for kind in board.kinds if batch else ():
            before((kind, stage, batch - 1), (kind, stage, batch))
        model.add(end >= ops[last, stage, batch].end_expr())
    for rank in range(board.ranks):
        mine = {board.place(rank, chunk, board.ranks) for chunk in range(board.chunks)}
        model.add_no_overlap([op for (_, stage, _), op in ops.items() if stage in mine])
        flights = []
        for stage, batch in product(mine, range(board.micro_batches)):
            begin, over = ops["F", stage, batch].start_expr(), ops[last, stage, batch].end_expr()
            kept = model.new_int_var(1, alone, "")
            flights.append(model.new_interval_var(begin, kept, over, ""))
        model.add_cumulative(flights, [1] * len(flights), board.cap)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = 600
    if solver.solve(model) != cp_model.OPTIMAL:
        raise RuntimeError(f"{board.key}: no proof in ten minutes.")
    return round(solver.objective_value)


def main() -> None:
    """Write all pars, in forward passes of a rank."""
    found = {}
    for board in boards():
        ticks, chunks = shortest(board), board.chunks
        found[board.key] = ticks / chunks if ticks % chunks else ticks // chunks
        print(board.key, found[board.key], flush=True)
    PARS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
