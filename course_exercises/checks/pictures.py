"""What `check` shows of a right answer, beneath its lines, in a notebook."""

import contextlib
from itertools import accumulate
from typing import Any

from course_utils.launch.ranks import figures
from course_utils.lesson import schedules

# The exercises that ask for a schedule, and what is drawn: always the same, so that a stored notebook is, too.
SCHEDULES = {"5.2": (4, 8), "5.3": (4, 8), "5.4": (4, 8, 2)}


def show(exercise_id: str, answer: Any) -> None:
    """Shows the schedule that a right answer gives; nothing for other exercises, and without a notebook."""
    if exercise_id not in SCHEDULES or not figures.in_a_notebook():
        return
    with contextlib.suppress(Exception):  # the answer runs once more, with a case of its own
        rows = [list(row) for row in answer(*SCHEDULES[exercise_id])]
        _draw_with_shelves(schedules.simulate(rows))
        figures.show_open()


def _draw_with_shelves(result: schedules.Simulation) -> None:
    """A simulated schedule, and below it what each rank's shelf holds meanwhile: how many micro-batches in a
    chunk, from the start of F to the end of B, up to the number on the right."""
    import matplotlib.pyplot as plt  # here: it takes a second, and few checks draw

    from course_utils import plots

    ranks = len(result.schedule)
    size = (plots.WIDTH, 1.5 + 0.6 * ranks)
    figure, (lanes, shelves) = plt.subplots(2, 1, figsize=size, sharex=True)
    plots.legend(figure, plots.gantt_lanes(lanes, result))
    unit = result.makespan / lanes.get_xlim()[1]
    for rank, fullest in enumerate(result.peak_in_flight):
        ops = [span for span in result.spans if span.rank == rank]
        changes = sorted((op.start, 1) if op.op.kind == "F" else (op.end, -1) for op in ops)
        times = [time / unit for time, _ in changes]
        held = accumulate(change for _, change in changes)
        tops = [rank + 0.43 - 0.86 * n / max(result.peak_in_flight) for n in held]
        color = plots.COLORS["activations"]
        shelves.fill_between(times, rank + 0.43, tops, step="post", color=color, linewidth=0)
        shelves.text(1.01, rank, fullest, transform=shelves.get_yaxis_transform(), va="center")
    shelves.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    shelves.set(
        ylim=lanes.get_ylim(), xlabel=lanes.get_xlabel(), title="its shelves, and the most on each"
    )
    lanes.set(xlabel="", title="your schedule")
