"""Runs the whole fault table of `launch` again and again, and counts what goes wrong.

    python tests/soak_launch.py --rounds 20

Each row has to end as the table says, leave no process, no temporary file and no listening port,
and the next call has to work. One line a round; the exit code is 1 if anything went wrong. A
round takes about a minute and a half; other work on the machine does not matter, on the contrary.
"""

import argparse
import contextlib
import ctypes
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import psutil
import torch
from fault_table import FAULTS
from leftovers import nothing_left

from course_utils.launch import RankFailure, launch

FOLDER = Path(tempfile.mkdtemp(prefix="soak-launch-"))


def failure_of(fn, *args, **options):
    try:
        launch(fn, *args, **options)
    except RankFailure as failure:
        return failure
    raise AssertionError("launch returned")


def row_of(fault):
    def row():
        fault.check(failure_of(fault.fn, fault.nprocs, timeout=fault.timeout))

    row.__name__ = fault.fn.__name__
    return row


# --- rows that need more than one call ----------------------------------------------------------


def _barrier_that_ends_never(rank):
    torch.distributed.barrier()
    time.sleep(1000)


def interrupted():
    timer = threading.Timer(1.0, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        launch(_barrier_that_ends_never, 2)
    except KeyboardInterrupt:
        return
    raise AssertionError("launch returned")


KERNEL = """
import time
from course_utils.launch import launch

def work(rank):
    print("rank", rank)
    time.sleep(1000)

launch(work, 2)
"""


def kernel_killed():
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL],
        env={**os.environ, "TMPDIR": str(FOLDER), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
    )
    assert kernel.stdout.readline() == b"[rank 0] rank 0\n"
    below = psutil.Process(kernel.pid).children(recursive=True)
    assert len(below) >= 5  # two ranks, fork server, resource tracker, janitor
    kernel.kill()
    kernel.communicate()
    _, alive = psutil.wait_procs(below, timeout=2)
    assert not alive, f"left behind: {alive}"
    assert not list(FOLDER.glob("pymp-*"))


def _flood(rank):
    for _ in range(1000):
        sys.stdout.write(1000 * (99 * "x" + "\n"))
    os.write(1, b"the end")


def prints_100_mb():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        launch(_flood, 2)
    text = shown.getvalue()
    assert text.count("[rank 0] the end\n") == text.count("[rank 1] the end\n") == 1
    assert text.count("bytes left out") == 2 and len(text) < 1_000_000


def _half_a_line(rank):
    print("whole line\nhalf a l", end="")
    os.kill(os.getpid(), signal.SIGKILL)


def prints_half_a_line_and_dies():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert failure_of(_half_a_line, 2).kind == "signal"
    assert shown.getvalue() == "".join(
        f"[rank {rank}] whole line\n[rank {rank}] half a l\n" for rank in range(2)
    )


def returns_100_mb():
    for rank, got in enumerate(launch(lambda rank: torch.full((25_000_000,), rank), 2)):
        assert got.shape == (25_000_000,) and got[-1] == rank


def _launches(rank):
    return launch(_rank, 2)


def launch_inside_launch():
    assert "launch was called inside a rank" in str(failure_of(_launches, 2))


def three_launches_at_once():
    results = []
    threads = [threading.Thread(target=lambda: results.append(launch(_rank, 2))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[0, 1]] * 3


def wrong_arguments():
    for fn, nprocs in [
        (_rank, 0),
        (_rank, -1),
        (_rank, 1.5),
        (_rank, 65),
        (lambda: 0, 2),
        (torch.nn.Linear, 2),
    ]:
        try:
            launch(fn, nprocs)
        except (TypeError, ValueError):
            continue
        raise AssertionError(f"launch accepted {fn}, {nprocs}")


def argument_that_cannot_be_pickled():
    assert failure_of(lambda rank, lock: 0, 2, threading.Lock()).kind == "pickle"


def _speak(rank):
    print("one")
    os.write(1, b"two\n")
    ctypes.CDLL(None).printf(b"three\n")


def prints_from_c():
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        launch(_speak, 2)
    assert sorted(shown.getvalue().splitlines()) == sorted(
        f"[rank {rank}] {word}" for rank in range(2) for word in ("one", "two", "three")
    )


def after_threads_were_set():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert launch(_rank, 2) == [0, 1]
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _files_up_to(size):
    """No file may grow beyond `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def full_temporary_folder():
    with _files_up_to(0):
        try:
            launch(_rank, 2)
        except OSError as error:
            assert "launch cannot write to the temporary folder" in str(error)
        else:
            raise AssertionError("launch returned")


def missing_temporary_folder():
    tempfile.tempdir = str(FOLDER / "missing")
    try:
        launch(_rank, 2)
    except OSError as error:
        assert "launch cannot write to the temporary folder" in str(error)
    else:
        raise AssertionError("launch returned")
    finally:
        tempfile.tempdir = str(FOLDER)


def _rank(rank):
    return rank


ROWS = [
    *map(row_of, FAULTS),
    interrupted,
    kernel_killed,
    prints_100_mb,
    prints_half_a_line_and_dies,
    returns_100_mb,
    launch_inside_launch,
    three_launches_at_once,
    wrong_arguments,
    argument_that_cannot_be_pickled,
    prints_from_c,
    after_threads_were_set,
    full_temporary_folder,
    missing_temporary_folder,
]


def run_round():
    """Runs each row once; returns the names of rows with leftovers and of those with flakes."""
    leftovers, flakes = [], []
    for row in ROWS:
        try:
            with nothing_left(FOLDER), contextlib.redirect_stdout(io.StringIO()):
                _checked(row, flakes)
                assert launch(_rank, 2) == [0, 1], "the next call does not work"
        except AssertionError as error:
            leftovers.append(row.__name__)
            print(f"  {row.__name__}: {error}", flush=True)
    return leftovers, flakes


def _checked(row, flakes):
    try:
        row()
    except BaseException:  # noqa: BLE001 - every wrong end of a row counts
        flakes.append(row.__name__)
        print(f"  {row.__name__}: {traceback.format_exc()}", file=sys.stderr, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    launch(_rank, 2)  # multiprocessing's own folder lies elsewhere
    tempfile.tempdir = str(FOLDER)
    total = [0, 0]
    for number in range(1, rounds + 1):
        start = time.monotonic()
        wrong = run_round()
        total = [before + len(names) for before, names in zip(total, wrong)]
        print(
            f"round {number}/{rounds}: {len(ROWS)} rows, {len(wrong[0])} leftovers, "
            f"{len(wrong[1])} flakes, {time.monotonic() - start:.0f} s",
            flush=True,
        )
    print(f"{rounds} rounds: {total[0]} leftovers, {total[1]} flakes")
    shutil.rmtree(FOLDER)
    sys.exit(any(total))


if __name__ == "__main__":
    main()
