"""estimate.step_time against the steps that papers printed, and one constant utilisation

Each paper's rows, "left out": each row predicted by constants fitted to the paper's other rows;
nanotron's, which are hundreds, in halves. "Fitted": all rows with the constants that they gave.
The null model is the same FLOP/s for every row, the median of the rows it may see, left out
likewise. Where a paper has one row, nothing can be fitted, and the defaults predict it.
"""

import math
import statistics
from dataclasses import dataclass
from operator import attrgetter

import course_planner as estimate
from course_planner import Calibration, Row, published
from tests.benchmarks.measuring import met, print_table

FOLDS = 2
NODES = 32  # nanotron's runs up to here, with at most TENSOR tensor ranks
TENSOR = 8
BOUNDS = {
    "Megatron SC21": 0.04,
    "MT-NLG": 0.05,
    "Korthikanti": 0.10,
    "zero bubble": 0.03,
    "torchtitan": 0.15,
    "nanotron": 0.15,
}  # of the median error


@dataclass(frozen=True)
class Judged:
    """A paper's rows; their predictions left out, fitted, and by the null model, in seconds."""

    rows: list[Row]
    left_out: list[float]
    fitted: list[float]
    null: list[float]

    def error(self, predicted: list[float]) -> float:
        """The median over the rows of |predicted / measured - 1|."""
        return statistics.median(abs(p / r.seconds - 1) for p, r in zip(predicted, self.rows))


def rows_of(paper: str) -> list[Row]:
    found = published.rows(paper)
    if paper != "nanotron":
        return found
    most = NODES * published.H100.node
    return [row for row in found if row.layout.gpus <= most and row.layout.tp <= TENSOR]


def judge(paper: str) -> Judged:
    rows = rows_of(paper)
    folds = FOLDS if len(rows) > 100 else len(rows)
    left_out, null = [0.0] * len(rows), [0.0] * len(rows)
    for fold in range(folds):
        seen = [row for index, row in enumerate(rows) if index % folds != fold]
        known = _constants(paper, seen)
        rate = statistics.median(map(_rate, seen)) if seen else math.nan
        for index in range(fold, len(rows), folds):
            left_out[index] = _predicted(paper, rows[index], known)
            null[index] = rows[index].seconds * _rate(rows[index]) / rate
    known = _constants(paper, rows)
    return Judged(rows, left_out, [_predicted(paper, row, known) for row in rows], null)


def _constants(paper: str, rows: list[Row]) -> Calibration:
    return estimate.calibrate(rows, published.HARDWARE[paper]) if rows else Calibration()


def _predicted(paper: str, row: Row, known: Calibration) -> float:
    hardware = row.hardware or published.HARDWARE[paper]
    return estimate.step_time(row.model, row.layout, row.seq, hardware, known).seconds


def _rate(row: Row) -> float:
    """The FLOP/s of a GPU that a step reached."""
    tokens = row.layout.sequences() * row.seq
    return estimate.flops(row.model, row.seq, tokens) / row.layout.gpus / row.seconds


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's, of numbers without ties."""
    places = [
        {index: place for place, index in enumerate(sorted(range(len(x)), key=x.__getitem__))}
        for x in (first, second)
    ]
    return statistics.correlation(*([place[i] for i in range(len(first))] for place in places))


def regrets(judged: Judged) -> list[float]:
    """For each model, cluster and batch: by how much the layout chosen is slower than the best."""
    groups: dict[tuple, list[tuple[float, float]]] = {}
    for row, predicted in zip(judged.rows, judged.left_out):
        key = (row.model, row.seq, row.layout.gpus, row.layout.sequences())
        groups.setdefault(key, []).append((predicted, row.seconds))
    return [
        min(group)[1] / min(seconds for _, seconds in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]


def main() -> None:
    judged = {paper: judge(paper) for paper in published.HARDWARE}
    table = []
    for paper, found in judged.items():
        bound = f"{BOUNDS[paper]:.0%}" if paper in BOUNDS else "none"
        numbers = [found.error(x) for x in (found.left_out, found.fitted, found.null)]
        percent = ["none" if math.isnan(x) else f"{x:.1%}" for x in numbers]
        table.append([paper, len(found.rows), percent[0], bound, percent[1], percent[2]])
    print_table(
        ["paper", "rows", "error left out", "bound", "error fitted", "null model, left out"], table
    )
    for paper, bound in BOUNDS.items():
        error = judged[paper].error(judged[paper].left_out)
        print(f"- {paper}: median error at most {bound:.0%}: {met(error <= bound)}")
    _print_choices(judged["nanotron"])


def _print_choices(found: Judged) -> None:
    measured = list(map(attrgetter("seconds"), found.rows))
    rates = [
        [row.layout.sequences() * row.seq / row.layout.gpus / s for row, s in zip(found.rows, x)]
        for x in (measured, found.left_out)
    ]
    order, lost = rank_correlation(*rates), statistics.median(regrets(found))
    print(f"- nanotron, rank correlation {order:.2f}, at least 0.8: {met(order >= 0.8)}")
    print(
        f"- nanotron, the chosen layout {lost:.1%} slower than the best in the median, "
        f"at most 10%: {met(lost <= 0.1)}",
        flush=True,
    )


if __name__ == "__main__":
    main()
