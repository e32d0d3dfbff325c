"""A few of the random programs of `run_programs.py` under NCCL's rules, which tries hundreds."""

import pytest

import course_strict as strict
from course_utils.comm import versions
from tests.soaks import programs, run_programs


@pytest.mark.skipif(versions.older_than(strict.OLDEST), reason="NCCL's rules need a newer PyTorch")
def test_right_programs_run_and_a_broken_rule_is_named():
    breaking = {}  # a seed for each rule
    for seed in range(300):
        name = programs.make(seed, broken=True, rules=True).mistake.name
        if name.startswith("under the rules"):
            breaking.setdefault(name, seed)
    assert len(breaking) > 4
    outcomes = [run_programs.run(seed, False, "nccl") for seed in range(4)]
    outcomes += [run_programs.run(seed, True, "nccl") for seed in breaking.values()]
    assert [outcome for outcome in outcomes if outcome.wrong] == []
