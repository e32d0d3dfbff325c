"""Random programs under `launch`, judged as a learner would who reads the message.

    python -m tests.soaks.run_programs right 500 --workers 2
    python -m tests.soaks.run_programs broken 500 --seed 1000 --rules
    python -m tests.soaks.run_programs one 17         what is broken in it, and what launch says

A right program has to return what it must, a broken one has to be explained: the cause, the guilty
rank with what it did, and a line that is to blame or where it was missed. No process may be left.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.soaks import programs

LIMIT = 40  # seconds; what launch gets as `timeout`
GRACE = 5  # seconds until the processes of a launch have to be gone
OWNER = "RUN_PROGRAMS_OWNER"  # in the environment of everything a worker starts


@dataclass
class Outcome:
    seed: int
    name: str  # of the mistake
    seconds: float
    late: bool  # the time limit was reached
    loops: bool  # in the learner's own code
    wrong: dict[str, str]  # what is not right: why, by "cause", "rank", "line", "value" or "left"
    message: str


def own_processes():
    """The processes of this worker, also those whose parents are gone."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(OWNER) == str(os.getpid()) and process.status() != "zombie":
                found.add(process)
    return found


def begin_worker():
    multiprocessing.set_start_method(None, force=True)  # as in a kernel, not this worker's
    os.environ[OWNER] = str(os.getpid())
    run_text("def program(rank): return 1", 2)  # starts what all launches share


def run_text(text, world, rules=None):
    """What the ranks return, or the RankFailure; and the seconds."""
    from course_utils.launch import RankFailure, launch  # reads the environment of its worker

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.py")
        path.write_text(text)
        names = {"__name__": "__main__"}
        exec(compile(text, str(path), "exec"), names)  # noqa: S102 - as a cell is executed
        begin = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                ended = launch(names["program"], world, timeout=LIMIT, rules=rules)
        except RankFailure as failure:
            ended = failure
        return ended, time.monotonic() - begin


def left_of(before):
    """Processes that the launch has left."""
    until = time.monotonic() + GRACE
    while (left := own_processes() - before) and time.monotonic() < until:
        time.sleep(0.2)
    return left


def judge_right(program, ended):
    if isinstance(ended, Exception):
        return {"value": f"refused: {str(ended).splitlines()[0]}"}
    for name, want in program.want.items():
        got = [result[name] for result in ended]
        if got != (want or got[:1] * program.world):
            return {"value": f"{name} is {got}, not {want or 'the same everywhere'}"}
    return {}


def told_of(rank, message):
    """What the message says of a rank: whatever stands behind its number in a line."""
    for found in re.finditer(r"\branks? (\d+(?:(?:, | and |, and )\d+)*)", message):
        if str(rank) in re.findall(r"\d+", found[1]):
            yield message[found.end() :].splitlines()[0]


def quoted(program, message):
    """Whether a line that may be named stands in the message, with its number."""
    rows = message.splitlines()
    for number, line in enumerate(program.text.splitlines(), 1):
        if line.strip() in program.mistake.lines:
            place = rf"line {number}\b.*" + re.escape(line.strip())
            if any(re.search(place, row) for row in rows):
                return True
    return program.mistake.unseen and re.search(r"line \d", message)


def judge_broken(program, ended):
    mistake = program.mistake
    if not isinstance(ended, Exception):
        return dict.fromkeys(("cause", "rank", "line"), "success without a word")
    message, wrong = str(ended), {}
    lacking = [p for p in mistake.says if not re.search(p, message, re.IGNORECASE)]
    if lacking:
        wrong["cause"] = f"no word of {lacking[0]}"
    told = list(told_of(mistake.guilty, message))
    if not mistake.loops:  # then nobody runs: who waits is not explained by that
        told = [text for text in told if "was running" not in text]
        if "was running when the time was up" in message:
            wrong["cause"] = "said to be running"
    if not any(re.search(mistake.did, t, re.IGNORECASE) for t in told):
        wrong["rank"] = f"rank {mistake.guilty}: {told[:1] or 'not named'}"
    if not quoted(program, message):
        wrong["line"] = f"none of {sorted(mistake.lines)}"
    return wrong


def run(seed, broken, rules=None):
    program = programs.make(seed, broken, bool(rules))
    before = own_processes()
    ended, seconds = run_text(program.text, program.world, rules)
    wrong = (judge_broken if broken else judge_right)(program, ended)
    if left := left_of(before):
        wrong["left"] = f"left: {[' '.join(p.cmdline())[:60] for p in left]}"
    name = program.mistake.name if broken else ""
    message = str(ended) if isinstance(ended, Exception) else f"returned {ended}"
    late = seconds >= LIMIT or "time was up" in message
    return Outcome(seed, name, seconds, late, broken and program.mistake.loops, wrong, message)


def table(outcomes, broken):
    """The figures of a run, and a line for each program that is late or not fully right."""
    seconds = sorted(o.seconds for o in outcomes)
    count = len(outcomes)
    yield f"{count} programs, {sum(not o.wrong for o in outcomes)} fully right"
    for what in ("cause", "rank", "line", "left") if broken else ("value", "left"):
        good = sum(what not in o.wrong for o in outcomes)
        yield f"  {what:6} {good:4} right, {100 * good / count:.1f} %"
    late = [o for o in outcomes if o.late]
    yield (
        f"  seconds: median {statistics.median(seconds):.1f}, p90 "
        f"{seconds[int(0.9 * (count - 1))]:.1f}, longest {seconds[-1]:.1f}"
    )
    yield (
        f"  at the time limit: {sum(not o.loops for o in late)}, and "
        f"{sum(o.loops for o in late)} that loop in their own code"
    )
    for o in sorted(outcomes, key=lambda o: o.seed):
        unduly_late = o.late and not o.loops
        if o.wrong or unduly_late:
            why = "; ".join(f"{what}: {text}" for what, text in o.wrong.items()) or "late"
            yield f"  {o.seed:5} {o.name:28} {o.seconds:5.1f} s  {why}"


def soak(args):
    broken = args.what == "broken"
    rules = "nccl" if args.rules else None
    outcomes = []
    with ProcessPoolExecutor(
        args.workers, multiprocessing.get_context("spawn"), begin_worker
    ) as pool:
        seeds = range(args.seed, args.seed + args.number)
        for done in as_completed([pool.submit(run, seed, broken, rules) for seed in seeds]):
            outcomes.append(done.result())
            print(f"\r{len(outcomes)} of {args.number}", end="", file=sys.stderr, flush=True)
            if args.messages and outcomes[-1].wrong:
                o = outcomes[-1]
                print(f"\n## {o.seed} {o.name}, {o.seconds:.1f} s: {o.wrong}\n{o.message}\n")
    print("", *table(outcomes, broken), sep="\n")
    return any(o.wrong for o in outcomes)


def one(args):
    program = programs.make(args.number, not args.right, args.rules)
    rows = program.text.splitlines()
    print(*(f"{i:3} {row}" for i, row in enumerate(rows, 1)), sep="\n")
    print(f"\n{program.world} ranks; {program.mistake or program.want}\n")
    begin_worker()
    outcome = run(args.number, not args.right, "nccl" if args.rules else None)
    print(outcome.message, "", f"{outcome.seconds:.1f} s; wrong: {outcome.wrong}", sep="\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["right", "broken", "one"])
    parser.add_argument("number", type=int, help="how many, or the seed of one")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rules", action="store_true", help="with NCCL's rules")
    parser.add_argument("--right", action="store_true", help="one: the right program of the seed")
    parser.add_argument("--messages", action="store_true", help="print what was not right")
    given = parser.parse_args()
    sys.exit(one(given) if given.what == "one" else soak(given))
