"""What launch does on one machine, over two hosts, which two of ipyparallel's engines play.

    python -m tests.soaks.soak_hosts --programs 200
    python -m tests.soaks.soak_hosts --kills 50 [--seed 1]
    python -m tests.soaks.soak_hosts --starts 50

--programs  the whole table of faults, each told in the same words; then so many right programs of
            `run_programs` run, and as many broken ones are explained
--kills     ranks, engines, the controller, the kernel and the cable are killed, frozen and pulled at
            random, and nothing is left (`host_kills`); the cable needs root
--starts    a cluster is started, used once and ended, again and again, beside two busy loops

The exit code is 1 if anything went wrong.
"""

import argparse
import os
import random
import subprocess
import sys
import time

from course_hosts.cluster import cluster
from course_utils.launch import RankFailure, launch
from tests.soaks import host_kills, run_programs
from tests.support.fault_table import FAULTS


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


def programs(number: int) -> list[str]:
    """Runs so many right programs and as many broken ones; what was said of those that went wrong."""
    run_programs.begin_worker()
    found = []
    for broken in (False, True):
        outcomes = [run_programs.run(seed, broken) for seed in range(number)]
        print(*run_programs.table(outcomes, broken), sep="\n", flush=True)
        found += [outcome.message for outcome in outcomes if outcome.wrong]
    return found


def starts(number: int) -> list[str]:
    """Starts as many clusters, one after the other, beside two busy loops; what went wrong."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    found = []
    try:
        for start in range(1, number + 1):
            began = begun = time.monotonic()
            try:
                with cluster(2):
                    begun = time.monotonic()
                    wrong = [] if len(set(launch(_server, 2))) == 2 else ["one server for both"]
            except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
                wrong = [f"{type(error).__name__}: {error}"]
            found += wrong
            seconds = f"{begun - began:.1f} s to start, {time.monotonic() - begun:.1f} s after"
            print(f"{start:3}  {'; '.join(wrong) or seconds}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return found


def _server(rank):
    return os.getppid()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--starts", type=int)
    options = parser.parse_args()
    if options.kills:
        print(f"{options.kills} kills, --seed {options.seed}", flush=True)
        found = list(host_kills.run(options.kills, options.seed))
    elif options.starts:
        found = starts(options.starts)
    else:
        with cluster(2):
            if faults_told_otherwise():
                sys.exit(1)
            found = programs(options.programs)
    print(f"{len(found)} complaints")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
