"""launch(..., debug=True): pdb in a rank, through the cell. A fake `input` is the learner."""

import builtins
import pdb  # noqa: T100
import tempfile
import time

import pytest
import torch
import torch.distributed as dist

from course_utils.launch import RankFailure
from tests.support.leftovers import nothing_left
from tests.support.on_gloo import launch


@pytest.fixture
def learner(monkeypatch):
    """A function that says what the learner will answer; it returns the list of prompts."""

    def will_answer(*answers):
        prompts, rest = [], list(answers)

        def fake_input(prompt=""):
            prompts.append(prompt)
            answer = rest.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer() if callable(answer) else answer

        monkeypatch.setattr(builtins, "input", fake_input)
        return prompts

    return will_answer


def _total(rank):
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return total.item()


def _stops(rank):
    secret = 40 + rank
    if rank == 1:
        breakpoint()  # noqa: T100
    secret += 1
    return secret, _total(rank)


def test_a_breakpoint_talks_through_the_cell(learner, capsys):
    prompts = learner("p secret + 100", "n", "p secret + 200", "secret = 7", "c")
    assert launch(_stops, 2, debug=True) == [(41, 3.0), (7, 3.0)]
    assert prompts == ["[rank 1] (Pdb) "] * 5
    shown = capsys.readouterr().out
    assert "[rank 1] -> secret += 1\n" in shown
    assert "[rank 1] 141\n" in shown and "[rank 1] 242\n" in shown


@pytest.mark.parametrize(
    "ends", ["c", "q", EOFError(), NotImplementedError()], ids=["c", "q", "end", "nobody"]
)
def test_an_exception_is_looked_at_where_the_learners_line_is(ends, learner, capsys):
    def divides(rank, number):
        if rank == 1:
            torch.nn.Linear(3, 3)(torch.ones(number))
        dist.barrier()

    learner("p number * 1000", "d", ends)
    with pytest.raises(RankFailure) as caught:
        launch(divides, 2, 5, debug=True)
    assert "rank 1 raised RuntimeError" in str(caught.value)
    assert "rank 0 was waiting in barrier" in str(caught.value)
    shown = capsys.readouterr().out
    assert shown.startswith("[rank 1] RuntimeError: ")
    stopped, _, below = shown.partition("[rank 1] -> torch.nn.Linear(3, 3)(torch.ones(number))\n")
    assert "[rank 1] 5000\n" in below and "module.py" in below and "module.py" not in stopped


def test_ranks_that_stop_wait_their_turn(learner):
    def both(rank):
        breakpoint()  # noqa: T100
        return _total(rank)

    prompts = learner("p 1", "c", "p 2", "c")
    assert launch(both, 2, debug=True) == [3.0, 3.0]
    first, _, third, _ = prompts
    assert prompts == [first, first, third, third] and first != third


def test_a_step_into_a_collective_gives_the_turn_to_who_is_needed(learner):
    def both(rank):
        total = torch.tensor(float(rank + 1))
        breakpoint()  # noqa: T100
        dist.all_reduce(total)
        return total.item()

    prompts = learner("n", "c", "c")
    assert launch(both, 2, debug=True) == [3.0, 3.0]
    assert prompts[0] == prompts[2] != prompts[1]


def test_nobody_is_accused_while_a_debugger_is_open(learner):
    def slow():
        time.sleep(4)
        return "c"

    learner(slow)
    assert launch(_stops, 2, debug=True, timeout=1) == [(41, 3.0), (42, 3.0)]


def test_who_was_let_go_and_stops_again_is_held_as_before(learner):
    def sleeps(rank):
        breakpoint()  # noqa: T100
        seconds = 3
        time.sleep(seconds)
        return seconds

    learner(f"b {sleeps.__code__.co_firstlineno + 3}", "c", "n", "c")
    assert launch(sleeps, 1, debug=True, timeout=1) == [3]


def test_after_the_debugger_a_hang_is_found(learner):
    def hangs(rank):
        breakpoint()  # noqa: T100
        if rank == 0:
            dist.barrier()

    learner("c", "c")
    with pytest.raises(RankFailure, match="rank 0 waits in barrier"):
        launch(hangs, 2, debug=True)


def _by_pdb(rank):
    if rank == 0:
        pdb.set_trace()  # noqa: T100


def _by_torch(rank):
    for _ in range(2):
        dist.breakpoint(rank=1, skip=1)


@pytest.mark.parametrize(("fn", "rank"), [(_by_pdb, 0), (_by_torch, 1)])
def test_other_ways_to_stop(fn, rank, learner, capsys):
    prompts = learner("w", "c")
    assert launch(fn, 2, debug=True) == [None, None]
    assert prompts == [f"[rank {rank}] (Pdb) "] * 2
    assert f"{fn.__name__}()" in capsys.readouterr().out


def test_steps_end_with_the_function(learner, capsys):
    learner("n", "n", "n", "n")
    assert launch(_stops, 2, debug=True)[0] == (41, 3.0)
    shown = capsys.readouterr().out
    assert "--Return--" in shown and ".py(" in shown and "distributed_c10d.py" not in shown


def test_leaving_the_debugger_ends_the_call(learner):
    learner("q")
    with pytest.raises(RankFailure, match="rank 1 raised .*BdbQuit: the debugger was left with q"):
        launch(_stops, 2, debug=True)


def test_an_interrupt_at_the_prompt_ends_all(learner, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    learner(KeyboardInterrupt())
    with nothing_left(tmp_path), pytest.raises(KeyboardInterrupt, match="launch was interrupted"):
        launch(_stops, 2, debug=True)


@pytest.mark.parametrize("fn", [_stops, _by_pdb, _by_torch])
def test_without_a_debugger_ranks_say_how_to_get_one(fn):
    with pytest.raises(RankFailure, match=r"or call launch\(\.\.\., debug=True\)") as caught:
        launch(fn, 2)
    assert caught.value.error == "RuntimeError" and caught.value.line is not None
