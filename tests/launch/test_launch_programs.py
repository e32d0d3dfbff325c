"""A few of the random programs of `soak_programs.py`, which tries hundreds."""

from concurrent.futures import ThreadPoolExecutor

from tests.soaks import soak_programs


def test_right_programs_run_and_wrong_ones_are_explained(tmp_path):
    seeds = (0, 1, 3)
    with ThreadPoolExecutor(len(seeds)) as pool:
        found = list(pool.map(lambda seed: soak_programs.complaint(seed, tmp_path), seeds))
    assert found == [None] * len(seeds)
