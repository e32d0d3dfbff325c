"""The course's command line: python -m course_utils doctor, and what other packages add to it.

A package adds commands by an entry point of the group `course_utils.commands`, a function of argparse's
subparsers.
"""

import argparse
import sys
from importlib.metadata import entry_points


def main(arguments: list[str] | None = None) -> None:
    """Runs one command."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m course_utils")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_doctor(commands)
    known = sorted(entry_points(group="course_utils.commands"), key=lambda each: each.name)
    # of one command the package alone: the others take seconds to import
    for found in [each for each in known if each.name in given[:1]] or known:
        found.load()(commands)
    options = parser.parse_args(given)
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
    from course_utils import hardware  # and with it PyTorch

    hardware.report()
    print(hardware.doctor())


def _cluster_doctor(cluster: str) -> None:
    (found,) = entry_points(group="course_utils.hosts", name="doctor")
    try:
        sys.exit(not found.load()(cluster))
    except (ImportError, ValueError, RuntimeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
