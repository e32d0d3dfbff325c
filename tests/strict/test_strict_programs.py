"""A few of the random programs of `soak_rules.py`, which tries hundreds."""

import pytest

import course_strict as strict
from course_utils.comm import versions
from tests.soaks import soak_rules


@pytest.mark.skipif(versions.older_than(strict.OLDEST), reason="NCCL's rules need a newer PyTorch")
def test_programs_that_keep_the_rules_run_and_a_broken_one_is_named(tmp_path):
    seeds = (0, 1, 2, 3, 4)
    assert len({soak_rules.wrong(seed).rule for seed in seeds}) > 2
    assert [soak_rules.complaint(seed, tmp_path) for seed in seeds] == [None] * len(seeds)
