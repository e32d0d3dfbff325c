"""The course's command line: python -m course_utils doctor | progress | grade | trace | plan."""

import argparse
import sys

from course_exercises.checks import progress
from course_grader import command as grade
from course_planner import commands as estimate
from course_utils import hardware


def main(arguments: list[str] | None = None) -> None:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="python -m course_utils")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    _add_progress(commands)
    grade.add_to(commands)
    estimate.add_to(commands)
    options = parser.parse_args(arguments)
    options.run(options)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser("doctor", help="what this machine has, and why a GPU may be idle")
    doctor.add_argument(
        "--cluster",
        metavar="WHAT",
        help="look at every host of a cluster; what COURSE_CLUSTER may be",
    )
    doctor.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> None:
    if options.cluster is not None:
        _cluster_doctor(options.cluster)
        return
    hardware.report()
    print(hardware.doctor())


def _cluster_doctor(cluster: str) -> None:
    try:
        from course_hosts import cluster_doctor  # needs ipyparallel, which not everybody has

        sys.exit(not cluster_doctor.report(cluster))
    except (ImportError, ValueError, RuntimeError) as error:
        sys.exit(str(error))


def _add_progress(commands: argparse._SubParsersAction) -> None:
    shown = commands.add_parser("progress", help="the chapters, their exercises and your points")
    action = shown.add_mutually_exclusive_group()
    action.add_argument("--export", metavar="FILE", help="write it into a new file, to take away")
    action.add_argument("--import", metavar="FILE", dest="take_in", help="add what such a file has")
    action.add_argument(
        "--reset", metavar="WHAT", help='forget an exercise ("3.1"), a chapter ("3") or "all"'
    )
    shown.set_defaults(run=_progress)


def _progress(options: argparse.Namespace) -> None:
    try:
        if options.export is not None:
            print(progress.export(options.export))
        elif options.take_in is not None:
            print(progress.take_in(options.take_in))
        elif options.reset is not None:
            print(progress.reset(options.reset))
        else:
            print(progress.progress_text())
    except (LookupError, OSError) as error:
        sys.exit(progress.sentence(error))


if __name__ == "__main__":
    main()
