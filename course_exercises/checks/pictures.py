"""What `check` shows of a right answer, beneath its lines, in a notebook."""

import contextlib
from typing import Any

from course_utils.launch.ranks import figures
from course_utils.lesson import schedules

# The exercises that ask for a schedule, and what is drawn: always the same, so that a stored notebook is, too.
SCHEDULES = {"5.2": (4, 8), "5.3": (4, 8), "5.4": (4, 8, 2)}


def show(exercise_id: str, answer: Any) -> None:
    """Shows the schedule that a right answer gives; nothing for other exercises, and without a notebook."""
    if exercise_id not in SCHEDULES or not figures.in_a_notebook():
        return
    from course_utils.figures import ch05  # here: it takes a second, and few checks draw

    with contextlib.suppress(Exception):  # the answer runs once more, with a case of its own
        rows = [list(row) for row in answer(*SCHEDULES[exercise_id])]
        ch05.shelves({"your schedule": schedules.simulate(rows)})
        figures.show_open()
