"""The constants of `step_time`, fitted to steps that somebody measured.

Least squares on the logarithm of the time, with a pull towards the defaults: a constant that the
rows say nothing about stays where it was, and three rows are enough to move the others.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from course_planner.descriptions import Hardware, Layout, Model, require
from course_planner.timing import Calibration, step_time

# How far each constant may be from its default before that costs as much as one row that is off by
# ERROR: as a factor's logarithm.
REACH = {
    "matrices": 0.3,
    "size": 1.0,
    "attention": 0.5,
    "memory": 0.5,
    "launch": 2.0,
    "crossing": 2.0,
    "intra": 0.3,
    "inter": 0.5,
    "ring": 0.5,
    "slowdown": 0.7,
    "overlap": 0.5,
}
OVERHEAD = 0.1
ERROR = 0.05
OUTLIER = 3 * ERROR  # beyond it a row pulls with its sign alone (Huber 1964)
ROUNDS = 25
LAUNCHES = (3e-4, 1.5e-3)


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

    Gauss-Newton in the logarithms of the constants, from `start` or else the defaults, towards
    which they are pulled. The same rows give the same constants.
    """
    rows = list(rows)
    require(bool(rows), "There is no row to calibrate with.")
    schedules = sorted({row.layout.schedule for row in rows})
    start = start or Calibration()
    names = list(REACH)
    reach = np.array([REACH[name] for name in names] + [OVERHEAD] * len(schedules))
    measured = np.log([row.seconds for row in rows])

    def made(steps: np.ndarray) -> Calibration:
        factors = np.exp(steps)
        constants = {n: getattr(start, n) * float(f) for n, f in zip(names, factors)}
        overheads = dict(zip(schedules, factors[len(names) :].tolist()))
        return replace(start, **constants, overheads=overheads)

    def missed(steps: np.ndarray) -> np.ndarray:
        known = made(steps)
        predicted = [
            step_time(row.model, row.layout, row.seq, row.hardware or hardware, known).seconds
            for row in rows
        ]
        return np.log(predicted) - measured

    starts = np.zeros((len(LAUNCHES), len(reach)))
    starts[:, names.index("launch")] = np.log(np.array(LAUNCHES) / start.launch)
    found = [_descend(missed, begin, reach) for begin in starts]
    steps = min(found, key=lambda steps: _cost(missed(steps), steps, reach))
    left = missed(steps)
    spread = max(float(np.median(np.abs(left))) * 1.4826, ERROR)
    return replace(made(steps), spread=spread)


def _descend(missed, steps: np.ndarray, reach: np.ndarray) -> np.ndarray:
    for _ in range(ROUNDS):
        change = _step(missed, steps, reach)
        steps = steps + change
        if np.abs(change).max() < 1e-3:
            break
    return steps


def _cost(left: np.ndarray, steps: np.ndarray, reach: np.ndarray) -> float:
    """Half the squares, from OUTLIER on straight lines; and the pull."""
    size = np.abs(left)
    rows = np.where(size < OUTLIER, size**2, 2 * OUTLIER * size - OUTLIER**2) / ERROR**2
    return float(rows.sum() + ((steps / reach) ** 2).sum()) / 2


def _step(missed, steps: np.ndarray, reach: np.ndarray) -> np.ndarray:
    """One step of Gauss-Newton, with the pull towards zero in the same equations."""
    here = missed(steps)
    change = 1e-4
    slopes = np.stack(
        [(missed(steps + change * unit) - here) / change for unit in np.eye(len(steps))], axis=1
    )
    weights = np.sqrt(np.minimum(1, OUTLIER / np.maximum(np.abs(here), 1e-12))) / ERROR
    left = np.concatenate([weights[:, None] * slopes, np.diag(1 / reach)])
    right = -np.concatenate([weights * here, steps / reach])
    found = np.linalg.lstsq(left, right, rcond=None)[0]
    longest = np.abs(found).max()
    return found * min(1.0, 0.5 / longest) if longest else found
