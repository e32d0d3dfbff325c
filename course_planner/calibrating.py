"""The constants of `step_time`, fitted to steps that somebody measured.

Least squares on the logarithm of the time, with a pull towards the defaults: a constant that the
rows say nothing about stays where it was, and three rows are enough to move the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from course_planner.descriptions import Hardware, Layout, Model, require
from course_planner.timing import Calibration, step_time

# What each constant can be: a large product reaches no peak, a collective no link's nominal rate.
BOUNDS = {
    "matrices": (0.2, 0.9),
    "attention": (0.1, 0.8),
    "intra": (0.1, 0.95),
    "inter": (0.05, 0.95),
    "overlap": (0.0, 1.0),
}
REACH = 0.5  # a constant's logit between its bounds may move by this for one row off by ERROR
ERROR = 0.05
MANY = 8  # more rows than these say no more together: what one cluster's share, all are off by
OUTLIER = 3 * ERROR  # beyond it a row pulls with its sign alone (Huber 1964)
ROUNDS = 25
UNSEEN = 6  # rows that were left out count as many beside the defaults' spread


@dataclass(frozen=True)
class Row:
    """A step that was measured: its seconds, and on which hardware if not on calibrate's."""

    model: Model
    layout: Layout
    seq: int
    seconds: float
    hardware: Hardware | None = None
    name: str = ""


def calibrate(
    rows: Iterable[Row], hardware: Hardware, start: Calibration | None = None
) -> Calibration:
    """The constants with which `step_time` comes nearest to `rows`.

    Gauss-Newton in the logits of the constants between BOUNDS, from `start` or else the defaults,
    towards which they are pulled. spread is the error of each row by the constants of the others,
    to first order, with the start's as much as that of UNSEEN rows. The same rows give the same
    constants.
    """
    rows = list(rows)
    require(bool(rows), "There is no row to calibrate with.")
    start = start or Calibration()
    low, high = np.array(list(BOUNDS.values())).T
    begin = np.clip([getattr(start, name) for name in BOUNDS], low + 1e-3, high - 1e-3)
    begin = np.log((begin - low) / (high - begin))
    measured = np.log([row.seconds for row in rows])

    def made(steps: np.ndarray) -> Calibration:
        values = low + (high - low) / (1 + np.exp(-begin - steps))
        return replace(start, **dict(zip(BOUNDS, values.tolist())))

    def missed(steps: np.ndarray) -> np.ndarray:
        known = made(steps)
        predicted = [
            step_time(row.model, row.layout, row.seq, row.hardware or hardware, known).seconds
            for row in rows
        ]
        return np.log(predicted) - measured

    steps = np.zeros(len(BOUNDS))
    for _ in range(ROUNDS):
        change, _ = _step(missed, steps)
        steps = steps + change
        if np.abs(change).max() < 1e-3:
            break
    left_out = _step(missed, steps)[1]
    squares = UNSEEN * start.spread**2 + np.minimum(left_out**2, 1).sum()
    return replace(made(steps), spread=float(np.sqrt(squares / (UNSEEN + len(rows)))))


def _step(missed, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One step of Gauss-Newton, with the pull towards zero in the same equations; and what each row
    would be off by if the others alone were fitted (its residual by one less its leverage)."""
    here = missed(steps)
    change = 1e-4
    slopes = np.stack(
        [(missed(steps + change * unit) - here) / change for unit in np.eye(len(steps))], axis=1
    )
    size = np.maximum(np.abs(here), 1e-12)
    weights = np.sqrt(np.minimum(1, OUTLIER / size) * min(1, MANY / len(here))) / ERROR
    rows = weights[:, None] * slopes
    curvature = rows.T @ rows + np.eye(len(steps)) / REACH**2
    found = -np.linalg.solve(curvature, rows.T @ (weights * here) + steps / REACH**2)
    leverage = np.einsum("ij,ij->i", rows, np.linalg.solve(curvature, rows.T).T)
    longest = np.abs(found).max()
    return found * min(1.0, 0.5 / max(longest, 1e-12)), here / np.maximum(1 - leverage, 0.05)
