"""The checks' framework: what an answer does, and what the learner then reads."""

import inspect
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_exercises.authoring import Exercise, Wrong, expect, failures, run
from course_exercises.authoring.draw import Draw
from course_exercises.authoring.framework import Line, Outcome, judge, registered
from course_exercises.checks import catalogue, check, hint, learner
from course_exercises.checks.learner import render
from course_utils.hardware import device
from course_utils.launch import RankFailure


@pytest.fixture(autouse=True)
def course_without_exercises(monkeypatch):
    """Exercises that a test defines are not the course's."""
    monkeypatch.setattr(learner, "_hints_shown", {})
    yield
    for id in [id for id in registered if id not in catalogue.modules()]:
        del registered[id]


def make(name="mean", parameters=("values",), failures=None):
    return Exercise(
        "90.1",
        name,
        points=2,
        parameters=parameters,
        hints=["gentle", "closer", "the idea"],
        misconceptions={
            "sum-not-mean": "You summed and did not divide.",
            "waits": "A rank waits for ever.",
            "division": "You divide by zero.",
        },
        failures=failures,
    )


def mean_exercise(**kwargs):
    exercise = make(**kwargs)

    @exercise.requires("it is the mean")
    def _(answer, draw):
        values = draw.tensor(draw.integer(2, 5))
        expect(answer(values), values.mean(), likely={"sum-not-mean": values.sum()})

    @exercise.requires("of integers too")
    def _(answer, draw):
        values = draw.integers(5, low=1)
        expect(answer(values), values.float().mean(), likely={"sum-not-mean": values.sum()})

    return exercise


def shown(exercise, answer):
    return render(judge(exercise, answer)).splitlines()


def right(values):
    return values.float().mean()


PASSED = [
    "90.1 mean                                              (2 points)",
    "  ok  it is the mean",
    "  ok  of integers too",
    "  passed: 2 points",
]


def test_a_right_answer_prints_the_same_in_every_run():
    exercise = mean_exercise()
    assert [shown(exercise, right) for _ in range(3)] == [PASSED] * 3


def test_a_mistake_is_named_with_what_was_expected_and_what_came():
    lines = shown(mean_exercise(), lambda values: values.sum())
    assert lines[1] == "  no  it is the mean"
    assert lines[2].startswith("      expected: ")
    assert lines[3].startswith("      got:      ")
    assert lines[4] == "      likely:   You summed and did not divide."
    assert lines[-1] == '  next: hint("90.1")'
    assert sum("You summed" in line for line in lines) == 1, "said once"


def test_later_requirements_run_after_a_failure():
    outcome = judge(mean_exercise(), lambda values: values.mean())
    assert [line.ok for line in outcome.lines] == [True, False]
    assert outcome.status == "failed"


def stub(values):
    raise NotImplementedError


@pytest.mark.parametrize("answer", [stub, None, ...])
def test_an_unanswered_exercise_says_so(answer):
    assert shown(mean_exercise(), answer) == ["90.1 mean: not attempted yet"]


def test_a_stub_that_ranks_call_is_not_attempted():
    exercise = make()

    @exercise.requires("on two ranks")
    def _(answer, draw):
        run(_call, 2, answer)

    assert shown(exercise, stub) == ["90.1 mean: not attempted yet"]


def test_not_implemented_by_torch_is_no_stub():
    lines = shown(mean_exercise(), lambda values: nn.Module()(values))
    assert "NotImplementedError: Module [Module] is missing" in lines[2]


def branch_missing(values):
    if values.is_floating_point():
        return values.mean()
    raise NotImplementedError


def test_an_answer_done_in_part_says_what_is_missing():
    lines = shown(mean_exercise(), branch_missing)
    number = inspect.getsourcelines(branch_missing)[1] + 3
    sentence = f"a part that this needs is not written yet: line {number} raises"
    assert lines[1:3] == ["  ok  it is the mean", "  no  of integers too"]
    assert lines[3].strip() == f"{sentence} NotImplementedError"


class Untouched:
    def __init__(self):
        raise NotImplementedError

    def value(self):
        raise NotImplementedError


class Begun:
    def __init__(self):
        pass

    def value(self):
        raise NotImplementedError


def test_a_class_is_unanswered_only_while_every_method_is():
    exercise = make("Counter", parameters=())

    @exercise.requires("it has a value")
    def _(answer, draw):
        answer().value()

    assert shown(exercise, Untouched) == ["90.1 Counter: not attempted yet"]
    assert "not written yet" in shown(exercise, Begun)[2]


@pytest.mark.parametrize(
    ("answer", "slug", "sentence"),
    [
        (int, "wrong-kind", "must be a function, and you passed the class int; pass mean itself"),
        (3, "wrong-kind", "must be a function, and you passed 3"),
        (torch.zeros(2, 2), "wrong-kind", "you passed tensor of shape (2, 2)"),
        (lambda: 1, "wrong-parameters", "called as mean(values), and yours is mean()"),
        (lambda a, b: 1, "wrong-parameters", "and yours is mean(a, b)"),
    ],
)
def test_an_answer_of_the_wrong_kind_gets_its_sentence(answer, slug, sentence):
    outcome = judge(mean_exercise(), answer)
    assert outcome.misconceptions == [slug]
    assert sentence in " ".join(render(outcome).split())
    assert [line.ok for line in outcome.lines] == [False, None]


def test_an_object_instead_of_a_class_gets_its_sentence():
    exercise = make("Counter", parameters=())
    exercise.requires("it exists")(lambda answer, draw: answer())
    assert "Counter must be a class, and you passed" in shown(exercise, Begun())[2]
    assert "you passed the function" in shown(exercise, right)[2]


@pytest.mark.parametrize("answer", [lambda values, scale=1: right(values), lambda *a: right(*a)])
def test_more_parameters_with_defaults_are_fine(answer):
    assert shown(mean_exercise(), answer) == PASSED


def test_a_long_requirement_hangs_below_its_first_line():
    exercise, said = make(), "it is the mean of all the values that there are, " * 4
    outcome = Outcome(exercise, "failed", "7", [Line(said, ok) for ok in (True, False, None)])
    lines = render(outcome).splitlines()[1:-2]
    assert max(map(len, lines)) <= 96 and len(lines) == 9
    assert [line[:8] for line in lines[::3]] == ["  ok  it", "  no  it", "  --  it"]
    assert all(re.match(" {6}[a-z(]", line) for line in [*lines[1::3], *lines[2::3]])


def test_a_sentence_that_goes_on_is_wrapped_as_one():
    said = (
        "rank 0 waits\n  cell line 3\n  rank 1 finished\nEvery rank has to\nmake the call.\nSay so."
    )
    outcome = Outcome(make(), "failed", "7", [Line("it ends", False, text=said)])
    assert render(outcome).splitlines()[2:-1] == [
        *("      rank 0 waits", "        cell line 3", "        rank 1 finished"),
        *("      Every rank has to make the call.", "      Say so."),
    ]


def test_an_answer_without_return_is_told_so():
    outcome = judge(mean_exercise(), lambda values: None)
    assert outcome.misconceptions == ["returns-nothing"] * 2
    assert sum("without a `return`" in line for line in render(outcome).splitlines()) == 1


def divides(values):
    count = 0
    return values / count if values is None else 1 // count


def test_an_exception_is_its_kind_and_the_learners_own_line():
    lines = shown(mean_exercise(), divides)
    number = inspect.getsourcelines(divides)[1] + 2
    assert lines[2] == "      ZeroDivisionError: integer division or modulo by zero"
    assert lines[3].startswith(f"        test_checks.py, line {number}, in divides:  return values")
    assert "Traceback" not in "\n".join(lines)
    assert "      the same in 1 more requirement" in lines


def test_an_exception_deep_inside_torch_shows_the_learners_line():
    lines = shown(mean_exercise(), lambda values: torch.zeros(2, 3) @ torch.zeros(2, 3))
    assert "mat1 and mat2 shapes cannot be multiplied" in lines[2]
    assert lines[3].startswith("        test_checks.py, line ")


def test_an_answer_that_the_check_cannot_use_is_no_crash(monkeypatch):
    monkeypatch.setattr(failures, "own", lambda frames: [])
    exercise = make()
    exercise.requires("first of two")(lambda answer, draw: answer(1)[0])
    lines = shown(exercise, lambda values: 3)
    assert "the check could not use what your answer gave: TypeError" in lines[2]


def test_a_parameter_of_another_name_is_told_so(monkeypatch):
    monkeypatch.setattr(failures, "own", lambda frames: [])
    exercise = make()
    exercise.requires("by name")(lambda answer, draw: answer(values=3))
    lines = shown(exercise, lambda numbers: numbers)
    assert "the check calls your answer with its parameters' names" in lines[2]


def test_a_librarys_parameters_are_not_told_as_the_answers(monkeypatch):
    monkeypatch.setattr(failures, "own", lambda frames: [])
    exercise = make()
    exercise.requires("sum")(lambda answer, draw: torch.nn.Module.__call__(answer(1), axis=0))
    lines = shown(exercise, lambda values: torch.nn.Identity())
    assert (
        "the check could not use what your answer gave: TypeError: Identity.forward()" in lines[2]
    )


@pytest.mark.parametrize("kind", ["lost", "a kind that code in a worker has made up"])
def test_a_failure_of_any_kind_is_printed(kind):
    def answer(values):
        raise RankFailure("the host b was lost", 0, kind, ranks=["was on host b, lost"])

    printed = render(judge(mean_exercise(), answer))
    assert "the host b was lost" in printed


@pytest.mark.parametrize(
    ("failures", "named"),
    [
        ({"ZeroDivisionError": "division", "exception": "waits"}, "division"),
        ({"exception": "waits"}, "waits"),
        ({"timeout": "waits"}, "exception"),
        ({"modulo by zero": "division", "ZeroDivisionError": "waits"}, "division"),
        ({"modulo by one": "division", "ZeroDivisionError": "waits"}, "waits"),
        (None, "exception"),
    ],
)
def test_failures_are_mapped_to_misconceptions(failures, named):
    outcome = judge(mean_exercise(failures=failures), divides)
    assert outcome.misconceptions == [named] * 2


def test_a_requirements_own_mapping_goes_first():
    exercise = make(failures={"exception": "waits"})
    exercise.requires("one", failures={"exception": "division"})(lambda answer, draw: answer(1))
    assert judge(exercise, divides).misconceptions == ["division"]


def endless(values):
    while True:
        pass


def test_an_endless_loop_in_a_rank_is_no_hang():
    exercise = make(failures={"endless": "waits", "timeout": "division"})

    @exercise.requires("ranks")
    def _(answer, draw):
        run(_call, 2, answer, timeout=5.0)  # in which two ranks start on a busy machine

    outcome = judge(exercise, endless)
    assert outcome.misconceptions == ["waits"]
    assert "while True" in render(outcome) or "pass" in render(outcome)


def test_a_failure_met_before_keeps_its_name():
    exercise = make()
    exercise.requires("one")(lambda answer, draw: answer(1))
    exercise.requires("two", failures={"exception": "waits"})(lambda answer, draw: answer(1))
    assert judge(exercise, divides).misconceptions == ["exception"] * 2
    exercise.rules.pop(0)
    assert judge(exercise, divides).misconceptions == ["waits"]


def test_a_failure_met_before_keeps_its_name_on_more_ranks():
    exercise = make()
    exercise.requires("two")(lambda answer, draw: run(_call, 2, answer))
    exercise.requires("three", failures={"exception": "waits"})(
        lambda answer, draw: run(_call, 3, answer)
    )
    outcome = judge(exercise, divides)
    assert outcome.misconceptions == ["exception"] * 2
    assert outcome.lines[0].text != outcome.lines[1].text  # of what the others did meanwhile


def test_an_endless_loop_is_ended_and_the_rest_left_out():
    exercise = make(failures={"endless": "waits", "timeout": "division"})
    exercise.requires("one", seconds=0.3)(lambda answer, draw: answer(1))
    exercise.requires("two", seconds=60)(lambda answer, draw: answer(1))
    lines = shown(exercise, endless)
    number = inspect.getsourcelines(endless)[1] + 1
    assert lines[2] == "      still running after 0.3 seconds"
    assert lines[3].startswith(f"        test_checks.py, line {number}, in endless:  while True")
    assert "      likely:   A rank waits for ever." in lines
    assert "  --  two (not looked at yet)" in lines


@pytest.mark.parametrize("status", [0, 3, None])
def test_leaving_python_is_a_sentence(status):
    lines = shown(mean_exercise(), lambda values: exit(status))  # noqa: PLR1722 - a learner's
    assert lines[2].startswith(f"      your code left Python with exit({status})")


def test_an_interrupt_is_the_learners():
    def interrupted(values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(mean_exercise(), interrupted)


def test_needs_earlier_leaves_out_what_would_repeat():
    exercise = make()
    exercise.requires("one")(lambda answer, draw: expect(1, 2))
    exercise.requires("two", needs_earlier=True)(lambda answer, draw: expect(1, 2))
    exercise.requires("three")(lambda answer, draw: None)
    assert [line.ok for line in judge(exercise, right).lines] == [False, None, True]


def test_prints_are_shown_only_after_a_failure():
    def noisy(values):
        print("shape", tuple(values.shape))
        print("a sum")
        return values.sum()

    def noisy_and_right(values):
        print("shape")
        return right(values)

    lines = shown(mean_exercise(), noisy)
    assert "  your code printed:" in lines
    assert "      shape (5,)" in lines
    assert lines.count("      a sum") == 1, "though it was printed for each requirement"
    assert shown(mean_exercise(), noisy_and_right) == PASSED


def test_each_line_is_shown_once_and_without_folders():
    def noisy(values):
        print("/opt/course/lib/site-packages/torch/graph.py:7: UserWarning: old\nstep\nstep")
        return values.sum()

    lines = shown(mean_exercise(), noisy)
    assert "      torch/graph.py:7: UserWarning: old" in lines
    assert lines.count("      step") == 1


def _call(rank, answer):
    return answer(torch.tensor([rank + 1.0], device=device()))


def ranks_exercise(failures=None):
    exercise = make(failures=failures)

    @exercise.requires("two ranks get the mean")
    def _(answer, draw):
        expect(
            run(_call, 2, answer),
            [torch.tensor([1.5])] * 2,
            each="rank",
            likely={"sum-not-mean": [torch.tensor([3.0])] * 2},
        )

    return exercise


def all_reduce_mean(values):
    dist.all_reduce(values)
    return values / dist.get_world_size()


def all_reduce_sum(values):
    print("summing")
    dist.all_reduce(values)
    return values


def test_answers_run_on_real_ranks():
    assert judge(ranks_exercise(), all_reduce_mean).status == "passed"
    lines = shown(ranks_exercise(), all_reduce_sum)
    assert lines[2] == "      expected: 1.5   (rank 0, at [0])"
    assert "      [rank 1] summing" in lines


def rank_1_divides(values):
    return values / (1 // (1 - dist.get_rank()))


def test_answers_run_on_the_cpu_where_there_are_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    exercise = make(parameters=("rank",))

    @exercise.requires("the device of the kernel and of two ranks")
    def _(answer, draw):
        expect([answer(0), *run(answer, 2)], ["cpu"] * 3)

    assert device().type == "cuda"
    assert judge(exercise, lambda rank: device().type).status == "passed"


def test_an_exception_in_a_rank_is_its_rank_and_line():
    outcome = judge(ranks_exercise({"ZeroDivisionError": "division"}), rank_1_divides)
    assert outcome.misconceptions == ["division"]
    text = " ".join(render(outcome).split())
    assert "rank 1 raised ZeroDivisionError" in text
    assert str(inspect.getsourcelines(rank_1_divides)[1] + 1) in text
    assert "values / (1 // (1 - dist.get_rank()))" in text


def rank_1_leaves_out_the_collective(values):
    if dist.get_rank() == 0:
        dist.all_reduce(values)
    return values


def test_a_hang_of_ranks_is_mapped():
    outcome = judge(ranks_exercise({"timeout": "waits"}), rank_1_leaves_out_the_collective)
    assert outcome.misconceptions == ["waits"]
    assert outcome.lines[0].kind == "timeout"


def test_time_in_ranks_is_not_the_kernels():
    exercise = make()

    @exercise.requires("slow ranks", seconds=0.5)
    def _(answer, draw):
        run(lambda rank: time.sleep(1), 1)

    assert judge(exercise, right).status == "passed"


def test_inputs_are_fresh_and_a_seed_fixes_them(monkeypatch):
    seen = []
    exercise = make()
    exercise.requires("one")(lambda answer, draw: seen.append(draw.tensor(3).tolist()))
    exercise.requires("two")(lambda answer, draw: seen.append(draw.tensor(3).tolist()))
    for seed in (None, None, "5", "5"):
        judge(exercise, right, seed)
    monkeypatch.setenv("COURSE_SEED", "5")
    judge(exercise, right)
    pairs = [seen[i : i + 2] for i in range(0, 10, 2)]
    assert pairs[0] != pairs[1]
    assert pairs[2] == pairs[3] == pairs[4]
    assert pairs[2][0] != pairs[2][1]


def test_an_outcome_can_be_had_again():
    exercise = mean_exercise()
    first = judge(exercise, lambda values: values.sum() * 2)
    again = judge(exercise, lambda values: values.sum() * 2, first.seed)
    assert first.lines == again.lines


def test_draws_are_within_their_bounds():
    draw = Draw("1")
    assert {draw.integer(1, 3) for _ in range(100)} == {1, 2, 3}
    assert {draw.choice("ab") for _ in range(100)} == {"a", "b"}
    assert sorted(draw.sample([1, 2, 3], 3)) == [1, 2, 3]
    assert 2 <= draw.number(2, 3) <= 3
    assert draw.tensor(2, 3).shape == (2, 3)
    assert draw.tensor(2, dtype=torch.float64).dtype == torch.float64
    values = draw.integers(1000, low=-1, high=1)
    assert values.dtype == torch.int64
    assert set(values.tolist()) == {-1, 0, 1}
    assert draw.whole(9).dtype == torch.float32
    assert draw.seed() != draw.seed()


def test_an_unknown_misconception_is_the_authors_mistake():
    with pytest.raises(ValueError, match="has no misconception 'typo'"):
        make(failures={"timeout": "typo"})
    with pytest.raises(ValueError, match="has no misconception 'typo'"):
        make().requires("one", failures={"timeout": "typo"})
    exercise = make()

    @exercise.requires("one")
    def _(answer, draw):
        raise Wrong("typo")

    with pytest.raises(ValueError, match="has no misconception 'typo'"):
        judge(exercise, right)


@pytest.fixture
def course(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_PROGRESS", str(tmp_path / "progress.json"))
    exercise = mean_exercise()
    monkeypatch.setattr(catalogue, "chapters", list)
    return exercise


def test_check_prints_and_returns_nothing(course, capsys):
    assert check("90.1", right) is None
    assert capsys.readouterr().out.splitlines() == PASSED


def test_check_keeps_the_progress(course):
    from course_exercises.checks import progress

    check("90.1", stub)
    check("90.1", divides)
    assert progress.passed() == set()
    check("90.1", right)
    assert progress.passed() == {"90.1"}


@pytest.mark.parametrize("id", ["90.7", "x", 3.14, None, right, "", "90", ["90.1"]])
def test_an_unknown_exercise_is_a_sentence(course, capsys, id):
    assert check(id, right) is None
    assert hint(id) is None
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("There is no exercise")


def test_an_id_without_its_quotes_is_understood(course, capsys):
    check(90.1, right)
    hint(90.1)
    passed, hinted = capsys.readouterr().out.split("90.1 mean, ")
    assert passed.splitlines() == PASSED
    assert hinted.startswith("hint 1 of 3:")


def test_one_mistake_is_told_at_a_time(course, capsys):
    """Where it is met again, that is counted; what else fails beside it may follow from it."""
    exercise = make(name="answer")
    for number, slug in enumerate(("division", "division", None, "waits", "division", "waits")):

        @exercise.requires(f"requirement {number}")
        def _(answer, draw, number=number, slug=slug):
            if slug:
                raise Wrong(slug, got=number)

    assert shown(exercise, right)[1:-1] == [
        "  no  requirement 0",
        "      got:      0",
        "      likely:   You divide by zero.",
        "      the same in 2 more requirements",
        "  ok  requirement 2",
        "  no  requirement 3",
        "  no  requirement 5",
        "  Repair the likely mistake first: other lines may fail for the same reason.",
    ]


def test_what_has_no_name_is_told_beside_a_mistake():
    exercise = make(name="answer")
    for slug in (None, "waits"):
        exercise.requires(str(slug))(lambda answer, draw, slug=slug: refuse(slug))
    lines = shown(exercise, right)
    assert "      got:      None" in lines and "      likely:   A rank waits for ever." in lines
    assert not any("Repair" in line for line in lines)


def refuse(slug):
    raise Wrong(slug, got=str(slug))


def test_hints_come_one_by_one(course, capsys):
    for _ in range(4):
        assert hint("90.1") is None
    assert capsys.readouterr().out.splitlines() == [
        "90.1 mean, hint 1 of 3:",
        "  gentle",
        "90.1 mean, hint 2 of 3:",
        "  closer",
        "90.1 mean, hint 3 of 3:",
        "  the idea",
        "90.1 mean: you have seen all 3 hints. The last was:",
        "  the idea",
    ]
    check("90.1", divides)
    assert capsys.readouterr().out.splitlines()[-1] == "  next: read the last hint again"


def test_hints_begin_with_the_first_also_after_a_check(course, capsys):
    check("90.1", lambda values: values.mean())
    hint("90.1")
    assert capsys.readouterr().out.splitlines()[-2:] == ["90.1 mean, hint 1 of 3:", "  gentle"]


def test_a_stored_hint_is_the_same_in_a_fresh_kernel():
    # hints are counted in the kernel, not in the file: nbval compares their output
    assert learner._hints_shown == {}


def test_lines_are_not_wider_than_a_notebook():
    exercise = make()

    @exercise.requires("one")
    def _(answer, draw):
        raise Wrong("waits", expected="word " * 60, got="word " * 60)

    assert max(map(len, shown(exercise, right))) <= 100


def test_a_requirement_has_a_name_that_a_traceback_shows():
    unnamed = [
        e.id for e in catalogue.exercises() for rule in e.rules if rule.function.__name__ == "_"
    ]
    assert unnamed == []
