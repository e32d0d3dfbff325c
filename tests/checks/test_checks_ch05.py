"""The budgets by which the checks of chapter 05 judge a schedule, against the course's own schedules;
and the helpers that tell one mistake from another."""

import matplotlib.pyplot as plt
import pytest
import torch
import torch.distributed as dist

from course_exercises.authoring import load_answer
from course_exercises.chapters.ch05.exchange import _as_it_is, _exchanged, _line
from course_exercises.chapters.ch05.gpipe import _gpipe
from course_exercises.chapters.ch05.interleaved import _interleaved
from course_exercises.chapters.ch05.one_forward_one_backward import _1f1b
from course_exercises.chapters.ch05.shared import Case, _wrong_work, simulated, warm_ups_of
from course_exercises.checks import learner
from course_utils.launch import launch
from course_utils.launch.ranks import figures
from course_utils.launch.ranks.arguments import OwnPart
from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op
from tests.support.needing_rules import needs_rules

SIZES = [(1, 1), (1, 3), (2, 2), (3, 1), (3, 6), (4, 12)]


@pytest.mark.parametrize("stages, micro_batches", SIZES)
def test_gpipe_and_1f1b_just_keep_to_their_budgets(stages, micro_batches):
    case = Case(stages, micro_batches)
    for judge, name in ((_gpipe, "gpipe"), (_1f1b, "one_forward_one_backward")):
        schedule = getattr(schedules, name)(stages, micro_batches)
        just_keeps_to_the_budgets(judge, case, schedule)


@pytest.mark.parametrize("stages, micro_batches", [(1, 2), (2, 2), (3, 6), (4, 12)])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaved_just_keeps_to_its_budgets(stages, micro_batches, chunks):
    case = Case(stages, micro_batches, chunks)
    schedule = schedules.interleaved(stages, micro_batches, chunks)
    just_keeps_to_the_budgets(_interleaved, case, schedule)


def just_keeps_to_the_budgets(judge, case, schedule):
    simulation = simulated(schedule, case)
    assert simulation.makespan == pytest.approx(case.time())
    work = case.chunks * case.micro_batches
    budgets = [min(judge.budget(case, rank), work) for rank in range(case.stages)]
    assert simulation.peak_in_flight == budgets


@pytest.mark.parametrize(
    "spoil, name",
    [
        (lambda row: row, None),
        (lambda row: row[1:], "other-work"),
        (lambda row: row + row[:1], "other-work"),
        (lambda row: [*row, Op("F", 9)], "other-work"),
        (lambda row: [Op(op.kind, op.micro_batch + 1) for op in row], "other-work"),
    ],
)
def test_what_is_wrong_with_the_work(spoil, name):
    rows = schedules.gpipe(2, 3)
    assert _wrong_work([spoil(row) for row in rows], Case(2, 3)) == name


def test_warm_ups_are_the_forward_passes_before_the_first_backward():
    assert warm_ups_of(schedules.one_forward_one_backward(3, 5)) == [3, 2, 1]
    assert warm_ups_of([[Op("F", 0), Op("F", 1)], []]) == [2, 0]


@pytest.fixture
def shown(monkeypatch):
    """The labels that each figure has had, of those that a check has shown."""
    found = []

    def show_open():
        found.append([[text.get_text() for text in ax.texts] for ax in plt.gcf().axes])
        plt.close("all")

    monkeypatch.setattr(figures, "show_open", show_open)
    return found


@pytest.mark.parametrize(
    "id, most", [("5.2", [8, 8, 8, 8]), ("5.3", [4, 3, 2, 1]), ("5.4", [11, 9, 7, 5])]
)
def test_a_notebook_shows_a_right_schedule_with_the_most_on_each_shelf(
    id, most, shown, monkeypatch
):
    monkeypatch.setattr(figures, "in_a_notebook", lambda: True)
    learner.check(id, load_answer(id))
    [(_, shelves)] = shown
    assert [int(label) for label in shelves] == most


def test_nothing_is_drawn_of_a_wrong_answer_nor_without_a_notebook(shown, monkeypatch):
    learner.check("5.2", load_answer("5.2"))
    monkeypatch.setattr(figures, "in_a_notebook", lambda: True)
    learner.check("5.3", load_answer("5.2"))
    assert not shown and not plt.get_fignums()


def starts_both_and_waits_for_one(to_next, to_previous):
    neighbour = 1 - dist.get_rank()
    own = to_next if to_previous is None else to_previous
    room = torch.empty_like(own)
    if neighbour == 1:  # one rank sends first, since NCCL's queue keeps the rest behind a message
        dist.isend(own, neighbour)
    dist.irecv(room, neighbour).wait()
    if neighbour == 0:
        dist.isend(own, neighbour)
    return (None, room) if to_previous is None else (room, None)


@pytest.mark.parametrize(
    "how", [{"backend": "gloo"}, pytest.param({"rules": "nccl"}, marks=needs_rules)]
)
def test_a_message_that_nobody_waits_for_is_seen_though_the_tensors_are_right(how):
    case = [*zip(_line(2, lambda link: torch.arange(3.0)))]
    program = _exchanged, 2, starts_both_and_waits_for_one
    reports = launch(*program, OwnPart(case), _as_it_is, **how)
    for [report] in reports:
        assert report.unwaited == ["send"]
        assert sorted(name for name, _ in report.calls) == ["recv_", "send"]
