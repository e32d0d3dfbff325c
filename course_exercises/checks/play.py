"""A position of the playground on real ranks: `play(link)`, and `python -m course_utils play LINK`."""

import argparse
import sys
from pathlib import Path

from course_exercises.checks import positions
from course_exercises.sources.answers import load_code
from course_utils.launch import RankFailure, launch
from course_utils.lesson import schedules

FIGURE = "played.png"


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the command `play`."""
    played = commands.add_parser("play", help="run a position of the playground on real ranks")
    played.add_argument(
        "link", metavar="LINK", help="the address of the page, or what follows its #"
    )
    about = f"where the picture goes (default: {FIGURE})"
    played.add_argument("--figure", type=Path, default=FIGURE, metavar="FILE", help=about)
    played.set_defaults(run=_play)


def _play(options):
    try:
        play(options.link).savefig(options.figure)
    except (ValueError, OSError, RankFailure) as error:
        sys.exit(f"play: {error}")
    print(f"The picture: {options.figure}")


def play(link: str):
    """Runs a schedule of the playground with chapter 5's engine, a rank a process, at a pace.

    Prints whether every rank did its ops in the order that was played, and the idle share of both;
    returns a Figure, the run above what was played. Raises ValueError for an address that holds no
    position, or one that is not finished.
    """
    from course_utils import plots  # here: matplotlib takes a second, and `check` needs none

    position = positions.read(link)
    if move := schedules.first_illegal_move(position.rows, *position.sizes):
        raise schedules.IllegalMove(move)
    played = schedules.simulate(position.rows, place=position.place)
    sizes = position.ranks, position.rows, position.costs, position.place
    runs = launch(load_code(5, "pipeline_run"), *sizes)
    records = [run.record for run in runs]
    measured = _as_measured(records)
    order = [list(map(str, row)) for row in position.rows]
    print("as played, in each rank's order:", "yes" if measured.schedule == order else "no")
    print(
        f"idle share: {played.idle_share:.1%} as played, {measured.idle_share:.1%} on ranks (emulated)"
    )
    return plots.gantt({"On real ranks (emulated)": records, "As played (simulated)": played})


def _as_measured(records) -> schedules.Simulation:
    """What was measured in the place of a simulation's times, with the ops by name."""
    spans = [[span for span in each.spans if span.kind == "compute"] for each in records]
    names, starts, ends = (
        [[getattr(span, field) for span in row] for row in spans]
        for field in ("name", "start", "end")
    )
    work = sum(each.seconds("compute") for each in records) / len(records)
    return schedules.Simulation(names, starts, ends, work)
