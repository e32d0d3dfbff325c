"""Ranks that raise, exit, die, or make calls that do not match: the rows of the fault table
that fail at once. After each: the learner's message, nothing left, the next call works."""

import tempfile

import pytest

from course_utils.launch import RankFailure
from tests.support.fault_table import FAULTS
from tests.support.leftovers import nothing_left
from tests.support.on_gloo import launch


@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if f.kind != "timeout"], ids=lambda fault: fault.fn.__name__
)
def test_fault(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with nothing_left(tmp_path), pytest.raises(RankFailure) as caught:
        launch(fault.fn, fault.nprocs)
    fault.check(caught.value)
    assert launch(_number, 2) == [0, 1]


def _number(rank):
    return rank
