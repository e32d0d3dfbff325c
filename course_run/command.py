"""launch's explanations in a terminal: of a script (`run`), and of dumps from a cluster (`explain`)."""

import argparse
import contextlib
import math
import os
import sys
from pathlib import Path

from course_run import dumps, script
from course_utils.launch import RankFailure
from course_utils.launch.keepers import forks, server
from course_utils.launch.ranks import arguments, job, launching
from course_utils.launch.story.matching import Meetings

STILL = 600.0  # seconds: as long as NCCL's watchdog waits


def add_to(commands: argparse._SubParsersAction) -> None:
    """Adds the commands to argparse's subparsers."""
    about = "run a script on this machine as torchrun would, and say why it stopped"
    run = commands.add_parser("run", help=about)
    run.add_argument("-n", type=_ranks, required=True, metavar="RANKS", help="how many ranks")
    still = f"end the ranks after so many seconds without progress (default: {STILL:g})"
    run.add_argument("--timeout", type=_seconds, default=STILL, metavar="SECONDS", help=still)
    run.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    run.add_argument("script", metavar="SCRIPT")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the script's own")
    run.set_defaults(run=_run)
    explain = commands.add_parser(
        "explain", help="say why the ranks of a cluster's job stood still"
    )
    dumps_of = "the files that PyTorch's flight recorder wrote, one a rank"
    explain.add_argument("files", nargs="+", type=Path, metavar="DUMP", help=dumps_of)
    explain.set_defaults(run=_explain)


def _ranks(text):
    if not 1 <= (number := int(text)) <= arguments.MOST_RANKS:
        raise argparse.ArgumentTypeError(f"1 to {arguments.MOST_RANKS} ranks, not {number}")
    return number


def _seconds(text):
    if not 0 < (number := float(text)) <= arguments.LONGEST:
        raise argparse.ArgumentTypeError(f"more than 0 seconds and at most {arguments.LONGEST:,}")
    return number


def _run(options):
    given = [options.script, *options.arguments]
    try:
        forks.import_preloaded()
        server.fork_from_here()
        sys.exit(run(options.n, given, options.module, options.timeout))
    except KeyboardInterrupt:
        print("\nrun was interrupted, and its ranks have ended.", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        sys.exit(f"run: {error}")


def run(n: int, given: list[str], module: bool = False, still: float = STILL) -> int:
    """Runs a script, or with `module` a module, with its arguments on n ranks. Returns the exit code; what
    has stopped the ranks is on stderr. Raises ValueError and OSError for what cannot be run."""
    if not (module or os.path.exists(given[0])):
        raise FileNotFoundError(f"there is no file {given[0]} in {os.getcwd()}.")
    if n > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    call = job.Launch(arguments.check_ranks(n, still), still, math.inf, None, "gloo", script=True)
    packed = launching.packed_calls(script.run, [((given, module), {})] * n)
    try:
        with contextlib.ExitStack() as opened:
            ranks = launching.start_here(opened, call, packed)
            for rank in ranks:
                rank.output.flow()
            meetings = Meetings([rank.record for rank in ranks])
            launching.watch(ranks, meetings, call, nccl=False)
    except RankFailure as failure:
        if failure.kind == "exception":
            print(failure.traceback(failure.rank), file=sys.stderr)
        print(failure, file=sys.stderr)
        return 1
    return 0


def _explain(options):
    try:
        print(dumps.explained(options.files))
    except (ValueError, OSError) as error:
        sys.exit(f"explain: {error}")
