"""What launch does on one machine, over two hosts, which two of ipyparallel's engines play.

    python tests/soak_hosts.py --programs 200

The whole table of faults, each told in the same words; then the random programs of `soak_programs`:
the right ones run, and the wrong ones are explained by rank and line. The exit code is 1 if anything
went wrong.
"""

import sys

import random_programs
import soak_programs
from fault_table import FAULTS

from course_utils.cluster import cluster
from course_utils.launch import RankFailure, launch


def faults_told_otherwise() -> list[str]:
    """The rows of the table that do not hold here, each with what was said."""
    found = []
    for fault in FAULTS:
        name = fault.fn.__name__
        try:
            launch(fault.fn, fault.nprocs, timeout=fault.timeout)
        except RankFailure as failure:
            try:
                fault.check(failure)
            except AssertionError as wrong:
                found.append(f"{name}: {wrong}\n{failure}")
        else:
            found.append(f"{name}: nothing was said")
    print(f"{len(FAULTS)} faults: {len(found)} told otherwise\n" + "\n\n".join(found), flush=True)
    return found


if __name__ == "__main__":
    with cluster(2):
        if faults_told_otherwise():
            sys.exit(1)
        words = "right programs and as many wrong ones over two hosts"
        random_programs.soak(__doc__, soak_programs.complaint, words, programs=200, at_once=1)
