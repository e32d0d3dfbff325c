"""tests/checks/exercise_table.py: what it makes of the records of a run."""

from tests.checks import exercise_table
from tests.mutations.verdicts import Verdict

KILLED = [
    Verdict("killed", "sum-not-mean"),  # has its sentence
    Verdict("killed", "exception"),  # a kind of failure only
    Verdict("killed", None),  # nothing named at all
    Verdict("time"),
    Verdict("survived"),
]
RECORDED = [
    ("solution", "0.1", True),
    ("right", "0.1", True),
    *[("wrong", "0.1", passed) for passed in (True, True, False)],
    ("generic", "0.1", False),
    *[("wrong", "0.2", True)] * 2,
]


def test_a_line_for_each_exercise_and_the_shares(monkeypatch):
    verdicts = {"0.1": KILLED, "0.2": []}
    monkeypatch.setattr(exercise_table, "known_verdicts", verdicts.get)
    *lines, last = exercise_table.table(RECORDED).splitlines()[2:]
    assert [line.split() for line in lines] == [
        ["0.1", "average_over_ranks", "1", "3", "2", "1", "1/1", "3", "2"],
        ["0.2", "message_bytes", "1", "2", "2", "0", "0/0", "not", "judged", "here"],
        ["total", "2", "5", "4", "1", "1/1", "3", "2"],
    ]
    assert last == (
        "generic hints: 20% of the wrong answers (target: under 10 %), 67% of the killed mutants"
    )


def test_without_mutants_only_the_wrong_answers_count(monkeypatch):
    monkeypatch.setattr(exercise_table, "known_verdicts", lambda id: [])
    last = exercise_table.table(RECORDED).splitlines()[-1]
    assert last == "generic hints: 20% of the wrong answers (target: under 10 %)"
