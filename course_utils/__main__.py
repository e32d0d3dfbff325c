"""The course's command line: python -m course_utils doctor | progress."""

import argparse

from course_utils import hardware
from course_utils.checks import progress_map


def main(arguments: list[str] | None = None) -> None:
    """Runs one command."""
    parser = argparse.ArgumentParser(prog="python -m course_utils")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="what this machine has, and why a GPU may be idle")
    commands.add_parser("progress", help="the chapters, their exercises and your points")
    if parser.parse_args(arguments).command == "doctor":
        hardware.report()
        print(hardware.doctor())
    else:
        progress_map()


if __name__ == "__main__":
    main()
