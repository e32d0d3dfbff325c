"""tests/mutations: the mutants of a small answer, and what the command makes of their verdicts."""

import functools
import json
import subprocess
import sys

import pytest

pytest.importorskip("resource", reason="mutants are judged in forks with a limit of memory")

from course_exercises.sources.chapters import ROOT
from tests.mutations import __main__ as command
from tests.mutations import results
from tests.mutations.equivalent import EQUIVALENT
from tests.mutations.generate import MOST, Mutant, every_mutant, mutants
from tests.mutations.results import summed_up
from tests.mutations.verdicts import Verdict, Verdicts, answer_cell, digest_of_check, key

CELL = '''\
def answer(x: list[int] = 3, *more) -> "1 + 1":
    """Adds 1 + 1."""
    given = 1 + x
    ### BEGIN SOLUTION
    {line}
    ### END SOLUTION
    return given + 1
'''


def changed(line):
    """What becomes of the only line of an answer."""
    return [mutant.after for mutant in every_mutant(CELL.format(line=line))]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("y = a + b", ["y = a - b"]),
        ("y = a * (b - c)", ["y = a / (b - c)", "y = a * (b + c)"]),
        ("y = a // b", ["y = a / b"]),
        ("y = (a + b) % c", ["y = a + b", "y = (a - b) % c"]),
        ("y += a", ["y = a", "y -= a", "pass"]),
        ("y = -a", ["y = a"]),
        ("y = a < b", ["y = a <= b"]),
        ("y = a <= b < c", ["y = a < b < c", "y = a <= b <= c"]),
        ("y = a is not None", ["y = a is None"]),
        ("y = a in b", ["y = a not in b"]),
        ("y = a and b", ["y = a or b"]),
        ("y = not a", ["y = a"]),
        ("y = b if a else c", ["y = b if not a else c"]),
        ("y = [b for b in a if b]", ["y = [b for b in a if not b]"]),
        ("y = True", ["y = False"]),
        ("y = 0", ["y = 1"]),
        ("y = 1", ["y = 2", "y = 0"]),
        ("y = 2.5", ["y = 3.5"]),
        ("y = 'text'", []),
        ("y = rank", ["y = rank + 1", "y = 0"]),
        ("y = self.rank", ["y = self.rank + 1", "y = 0"]),
        ("y = dist.get_rank()", ["y = dist.get_rank() + 1", "y = 0"]),
        ("y = world_size", ["y = world_size + 1", "y = world_size - 1"]),
        ("y = -world_size", ["y = world_size", "y = -(world_size + 1)", "y = -(world_size - 1)"]),
        ("dist.all_reduce(a)", ["pass", "dist.all_reduce(a, op=dist.ReduceOp.MAX)"]),
        ("y = ReduceOp.SUM", ["y = ReduceOp.MAX"]),
        ("f(a, group=b)", ["pass", "f(a)"]),
        ("y = a.detach().clone()", ["y = a.detach()", "y = a.clone()"]),
        ("work.wait()", ["pass"]),
        ("y = sorted(a)", ["y = a"]),
        ("y.grad = a", ["pass"]),
        ("raise ValueError(1 + 1)", ["pass"]),
        ("y = f(a, b)", ["y = f(b, a)"]),
        ("y = f(*a, b)", []),
        ("y = min(a, b)", ["y = max(a, b)"]),
        ("y = math.ceil(a)", ["y = math.floor(a)"]),
        ("return a, b", ["return (b, a)"]),
        ("y = range(a)", ["y = range(a + 1)", "y = range(a - 1)"]),
        ("y = a[b:]", ["y = a[b + 1:]"]),
        ("y = f'{a + 1}'", []),
        ("y: int = a", []),
    ],
)  # fmt: skip
def test_each_operator_changes_one_thing(line, expected):
    assert sorted(changed(line)) == sorted(expected)


def test_only_the_answer_is_changed_and_each_change_differs_from_the_others():
    made = every_mutant(CELL.format(line="y = 1 + 1 + given"))
    assert {mutant.line for mutant in made} == {5}
    assert len({mutant.source for mutant in made}) == len(made)
    assert all(CELL.format(line=mutant.after) == mutant.source for mutant in made)


def test_in_loops_break_and_continue_are_swapped_and_dropped():
    loop = "for y in a:\n        if y:\n            break\n        f(y)"
    assert sorted(changed(loop)) == ["continue", "if not y:", "pass", "pass"]


def test_a_long_answer_gets_an_even_choice_of_mutants():
    long = CELL.format(line="\n    ".join(f"y{i} = a + {i}" for i in range(2 * MOST)))
    assert len(every_mutant(long)) > MOST
    lines = [mutant.line for mutant in mutants(long)]
    assert len(lines) == MOST
    assert lines[0] < 10 and lines[-1] > 5 + 2 * MOST - 10
    assert mutants(long) == mutants(long)


def test_a_verdict_lasts_until_the_check_or_the_mutant_changes(tmp_path):
    known = Verdicts("3.1", tmp_path)
    assert known.get(key("check", "mutant")) is None
    known.keep(key("check", "mutant"), Verdict("killed", "sum-not-mean", "a requirement"))
    again = Verdicts("3.1", tmp_path)
    assert again.get(key("check", "mutant")) == Verdict("killed", "sum-not-mean", "a requirement")
    assert again.get(key("other check", "mutant")) is None
    assert again.get(key("check", "other mutant")) is None


def test_the_digest_of_a_check_is_that_of_its_own_exercise():
    assert digest_of_check("0.1") == digest_of_check("0.1")
    assert digest_of_check("0.1") != digest_of_check("0.2")


@pytest.fixture
def command_with_verdicts(monkeypatch, tmp_path):
    """The command for exercise 0.2, whose only mutant has this fate, and these proofs."""

    def run(fate, proofs=None):
        def judge_all(cases, jobs):
            solution = answer_cell("0.2").source
            for case in cases:
                yield case, Verdict("survived" if case.source == solution else fate)

        monkeypatch.setattr(command, "prepare", lambda: None)
        monkeypatch.setattr(command, "EQUIVALENT", {"0.2": proofs or {}})
        monkeypatch.setattr(command, "Verdicts", functools.partial(Verdicts, folder=tmp_path))
        monkeypatch.setattr(results, "judge_all", judge_all)
        return command.main(["0.2"])

    return run


PAIR = (
    "return tensor.numel() * tensor.element_size()",
    "return tensor.numel() / tensor.element_size()",
)


def test_the_command_passes_where_all_are_killed(command_with_verdicts, capsys):
    assert command_with_verdicts("killed") == 0
    assert "1 of 1 mutants killed: 100.0%" in capsys.readouterr().out


def test_the_command_fails_where_one_survives_and_shows_it(command_with_verdicts, capsys):
    assert command_with_verdicts("survived") == 1
    printed = capsys.readouterr().out
    assert f"      - {PAIR[0]}\n      + {PAIR[1]}\n" in printed
    assert "0 of 1 mutants killed: 0.0%" in printed


def test_a_mutant_killed_by_time_is_shown_and_counts_as_killed(command_with_verdicts, capsys):
    assert command_with_verdicts("time") == 0
    assert "by time, line" in capsys.readouterr().out


def test_a_proof_takes_a_survivor_out_of_the_count(command_with_verdicts, capsys):
    assert command_with_verdicts("survived", {PAIR: "why"}) == 0
    assert "1 more are proven equivalent" in capsys.readouterr().out


@pytest.mark.parametrize("fate", ["killed", "survived"])
def test_a_proof_that_fits_no_survivor_is_reported(command_with_verdicts, capsys, fate):
    stale = (PAIR[0] + " * 1", PAIR[1])
    assert command_with_verdicts(fate, {stale: "why", PAIR: "why"}) == 1
    assert str(stale) in capsys.readouterr().out


def test_a_proof_of_what_a_check_rejects_is_reported():
    mutant = Mutant("source", 1, "before", "after")
    result = summed_up([mutant], [Verdict("killed")], {("before", "after"): "why"})
    assert result.stale == [("before", "after")]


def test_no_exercise_has_proofs_but_those_of_the_course():
    for id, proofs in EQUIVALENT.items():
        lines = answer_cell(id).source
        assert all(proofs.values())
        for before, _ in proofs:
            assert " ".join(before.split()) in " ".join(lines.split()), (id, before)


HOSTILE = """
import json, sys
from tests.mutations import judging

cases = [judging.Case("0.2", source) for source in json.loads(sys.argv[1])]
judging.prepare()
verdicts = dict(judging.judge_all(cases[:-1], 2))
judging.SECONDS = 1.0
verdicts.update(judging.judge_all(cases[-1:], 1))
print(json.dumps([[verdicts[case].fate, verdicts[case].said] for case in cases]))
"""


def test_judging_survives_what_a_mutant_does():
    bodies = [
        "return tensor.numel() * tensor.element_size()",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "return bytearray(20 * 2**30)",
        "return 1 +",  # no Python, so no answer at all
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ]
    head = "import os, signal\n\ndef message_bytes(tensor):\n    "
    done = subprocess.run(
        [sys.executable, "-c", HOSTILE, json.dumps([head + body for body in bodies])],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert json.loads(done.stdout) == [
        ["survived", ""],
        ["killed", "ended with code 3"],
        ["killed", "ended with code -9"],
        ["killed", "a float32 tensor of any shape"],
        ["killed", "NameError: name 'message_bytes' is not defined"],
        ["time", "did not end"],
    ]
