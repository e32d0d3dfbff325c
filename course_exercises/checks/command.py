"""python -m course_utils progress: the chapters, their exercises and the learner's points."""

import argparse
import sys

from course_exercises.checks import progress


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the command `progress`."""
    shown = commands.add_parser("progress", help="the chapters, their exercises and your points")
    action = shown.add_mutually_exclusive_group()
    action.add_argument("--export", metavar="FILE", help="write it into a new file, to take away")
    action.add_argument("--import", metavar="FILE", dest="source", help="add what such a file has")
    action.add_argument(
        "--reset", metavar="WHAT", help='forget an exercise ("3.1"), a chapter ("3") or "all"'
    )
    shown.set_defaults(run=_progress)


def _progress(options: argparse.Namespace) -> None:
    try:
        if options.export is not None:
            print(progress.export(options.export))
        elif options.source is not None:
            print(progress.import_from(options.source))
        elif options.reset is not None:
            print(progress.reset(options.reset))
        else:
            print(progress.progress_text())
    except (LookupError, OSError) as error:
        sys.exit(progress.sentence(error))
