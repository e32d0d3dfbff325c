"""tools/tiers.py: which unit tests are quick."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest
import tiers

TESTS = tiers.ROOT / "tests"
FILES = {path.relative_to(TESTS).as_posix(): path for path in TESTS.rglob("test_*.py")}
WRONG = "checks/test_wrong_answers.py::TestExercise{}::test_a_wrong_answer_gets_its_hint[{}]"


def test_the_first_answer_of_an_exercise_with_a_common_mistake_is_quick() -> None:
    first = WRONG.format("3_1", "forgets-sum-not-mean")
    of_another = WRONG.format("3_2", "forgets-sum-not-mean")
    ids = [first, WRONG.format("3_1", "adds-sum-not-mean"), of_another]
    assert quick([*ids, WRONG.format("3_1", "is_odd-on-tuesdays")]) == {first, of_another}


def test_a_second_answer_with_the_same_mistake_is_in_the_soak() -> None:
    ids = [WRONG.format(exercise, f"{name}-odd") for exercise in ("3_1", "3_2") for name in "ab"]
    assert list(tiers.of_tests(ids).values()) == ["long", "in the soak"] * 2


def test_a_technique_is_quick_on_its_most_ranks() -> None:
    name = "chapters/test_equality.py::test_a_technique_equals_one_process[ddp-{}]"
    assert quick(name.format(ranks) for ranks in (1, 2, 4)) == {name.format(4)}


def quick(ids: Iterable[str]) -> set[str]:
    return {id for id, tier in tiers.of_tests(ids).items() if tier == tiers.QUICK}


@pytest.mark.parametrize(
    ("test", "tier"),
    [
        ("checks/test_wrong_answers.py::TestExercise3_1::test_the_solution_passes", "in notebooks"),
        ("checks/test_wrong_answers.py::TestExercise3_1::test_unanswered_it_says_so", "quick"),
        ("chapters/test_equality.py::test_a_technique_equals_one_process[ddp-2]", "quick"),
        ("chapters/test_equality.py::test_the_contract_sees_a_mistake[ddp-2]", "quick"),
        ("estimate/test_estimate.py::test_a_row[gpt]", "quick"),
        ("modules/test_new.py::test_it", "quick"),
        ("two_hosts/test_two_hosts.py::test_it", "long"),
        ("new/test_new.py::test_it", "long"),
    ],
)
def test_a_test_has_its_tier(test: str, tier: str) -> None:
    assert tiers.of_tests([test]) == {test: tier}
    assert tiers.of_file(test.partition("::")[0]) in (tier, None)


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in tiers.RULE])
def test_a_row_is_about_something(pattern: str) -> None:
    files, _, tests = pattern.partition("::")
    found = [path for name, path in FILES.items() if fnmatchcase(name, files)]
    assert found, "no file"
    words = [word for word in tests.replace("::", "*").split("*") if word]
    assert all(word in path.read_text(encoding="utf-8") for word in words for path in found)


def test_what_is_common_is_met_in_several_exercises() -> None:
    text = "".join(p.read_text(encoding="utf-8") for p in TESTS.glob("wrong_answers/ch*/*.py"))
    exercises = Counter(slug for _, slug in set(tiers.in_text(text)))
    assert {slug for slug in tiers.COMMON if exercises[slug] < 2} == set()


def test_both_tiers_together_are_all_tests() -> None:
    """Of two folders that have tests of both."""
    every, quick, long = map(collected, ([], ["--tier=quick"], ["--tier=long"]))
    assert quick and long and not quick & long
    assert quick | long == every


def collected(options: list[str]) -> set[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    said = subprocess.check_output(
        [*command, *options, "tests/notebooks", "tests/tools"], cwd=tiers.ROOT, text=True
    )
    return {line for line in said.splitlines() if "::" in line}


def test_what_is_left_out_is_counted() -> None:
    number = int(tiers.left_out().split()[0].replace(",", ""))
    assert 500 < number < 2_500
