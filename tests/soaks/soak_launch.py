"""Runs all tests of `launch` again and again in one process, and counts what goes wrong.

    python -m tests.soaks.soak_launch --rounds 20

A round is the fault table and all other tests of launch, but for the random programs and the
thousands of launches of the other soaks. Each test has to pass, each file of tests has to leave no
process, no temporary file and no listening port, and what launch says in a test has to be the same
in every round. One line a round; the exit code is 1 if anything went wrong. Other work on the
machine does not matter, on the contrary.
"""

import argparse
import contextlib
import io
import itertools
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from course_utils.launch import RankFailure, launch
from tests.support.leftovers import nothing_left

_FOLDER = Path(__file__).parents[1] / "launch"
_PARTS = ("_faults", "_hangs", "", "_ends", "_frames", "_compile", "_kernel")
_FILES = [f"test_launch{part}.py" for part in _PARTS]
_OPTIONS = ["-q", "--no-header", "--no-summary", "-n", "0", "-p", "no:cacheprovider"]
# Here the alarm comes a moment before or after the end of the function.
_EITHER_WAY = "test_alarms_end_with_the_function"


class Watch:
    """A plugin of pytest that notes what is wrong in a run, and what launch has said in each test."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._now = []
        self.said = {}
        self.left = []
        self.flakes = []

    def hear(self, message: str) -> None:
        """To be called with the message of each failure."""
        self._now.append(message)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self):
        before, tempfile.tempdir = tempfile.tempdir, str(self._folder)
        try:
            with nothing_left(self._folder):
                return (yield)
        except AssertionError as error:
            self.left.append(str(error))
            return True
        finally:
            tempfile.tempdir = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._now = []
        result = yield
        # Failures of launches at once, from threads, come in any order.
        self.said[item.nodeid] = [] if item.name == _EITHER_WAY else sorted(self._now)
        return result

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.flakes.append(f"{report.nodeid}: {report.longreprtext}")


def run_round(watch: Watch, folder: str) -> None:
    """Runs each file of tests once."""
    for file in _FILES:
        with contextlib.redirect_stdout(io.StringIO()):
            pytest.main([*_OPTIONS, f"--basetemp={folder}", str(_FOLDER / file)], [watch])


def _listening(watches: list[Watch]) -> None:
    """From now on the newest of `watches` hears what every failure says."""
    make = RankFailure.__init__

    def make_and_tell(failure, message, *args, **kwargs):
        watches[-1].hear(message)
        make(failure, message, *args, **kwargs)

    RankFailure.__init__ = make_and_tell


def _changed(watch: Watch, first: Watch) -> list[str]:
    """What was said in another way than in the first round."""
    return [
        f"{name}: first {_but_for(first.said[name], said)}, now {_but_for(said, first.said[name])}"
        for name, said in watch.said.items()
        if said != first.said.get(name, said)
    ]


def _but_for(messages: list[str], others: list[str]) -> list[str]:
    """The messages that are not among `others`."""
    return list((Counter(messages) - Counter(others)).elements())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
    launch(abs, 2)  # multiprocessing's own folder lies elsewhere
    folder, tests = (Path(tempfile.mkdtemp(prefix=f"soak-{name}-")) for name in ("launch", "tests"))
    watches = []
    _listening(watches)
    for number in range(1, rounds + 1):
        start = time.monotonic()
        watches.append(Watch(folder))
        run_round(watches[-1], str(tests))
        newest = watches[-1]
        wrong = {
            "leftovers": newest.left,
            "flakes": newest.flakes,
            "other messages": _changed(newest, watches[0]),
        }
        for what in itertools.chain(*wrong.values()):
            print(what, flush=True)
        counts = ", ".join(f"{len(found)} {name}" for name, found in wrong.items())
        seconds = time.monotonic() - start
        print(
            f"round {number}/{rounds}: {len(newest.said)} tests, "
            f"{sum(map(len, newest.said.values()))} messages, {counts}, {seconds:.0f} s",
            flush=True,
        )
    for path in (folder, tests):
        shutil.rmtree(path, ignore_errors=True)
    total = sum(len(w.left) + len(w.flakes) + len(_changed(w, watches[0])) for w in watches)
    print(f"{rounds} rounds: {total} complaints")
    sys.exit(bool(total))


if __name__ == "__main__":
    main()
