"""The benchmarks' own machinery: a candidate that hangs costs one row, not all tables after it."""

import sys
import time

from tests.benchmarks.apart import Apart, run, serve


def test_a_candidate_that_hangs_is_left_out():
    from tests.benchmarks.measuring import side_by_side  # which the candidates need not import

    words = {"quick": "60", "hangs": "0.5", "ends": "60"}
    candidates = {
        name: Apart("tests.tools.test_benchmarks", name, limit=float(limit))
        for name, limit in words.items()
    }
    try:
        seconds = side_by_side(candidates, rounds=3, warm_up=0)
    finally:
        for candidate in candidates.values():
            candidate.close()
    assert {name: len(times) for name, times in seconds.items()} == {"quick": 3}
    assert candidates["quick"].reason is None
    assert candidates["hangs"].reason == "did not come back within 0.5 seconds"
    assert candidates["ends"].reason == "its process has ended"


def test_a_part_that_hangs_or_fails_says_so():
    assert run("pass", 60) is None
    assert run("import sys; sys.exit(3)", 60) == "its process has ended with code 3"
    assert run("import time; time.sleep(1000)", 0.5) == "did not come back within 0.5 seconds"


if __name__ == "__main__":
    serve({"quick": lambda: 1.0, "hangs": lambda: time.sleep(1000), "ends": sys.exit}[sys.argv[1]])
