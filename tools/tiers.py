"""Which unit tests `make test` runs, "quick", and which `make test-all` adds, "long": one rule.

The first row of RULE that fits a test's id, "folder/file.py::Class::test[case]", decides. Of the wrong
answers, an exercise's first with each of the COMMON mistakes is quick; of the techniques, each on its
most ranks. Neither command runs what a check in a solved notebook does, nor a mistake's second wrong
answer, which the nightly soak tries. What is quick has six minutes of a processor, collecting included;
build/tests/summary.txt tells what it takes.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

QUICK, LONG = "quick", "long"
IN_NOTEBOOKS = "in notebooks"  # strict nbval of the solved ones runs the same check
IN_SOAK = "in the soak"  # tests/soaks/soak_checks.py tries it every night
RULE = [
    # the exercises: solution and stub, and what is common
    ("checks/test_wrong_answers.py::*::test_another_right_answer*", LONG),
    ("checks/test_wrong_answers.py::*::test_a_wrong_answer*", LONG),  # but for COMMON
    ("checks/test_wrong_answers.py::*::test_the_solution*", IN_NOTEBOOKS),
    ("checks/test_wrong_answers.py*", QUICK),
    ("checks/test_progress.py::*kernel*", LONG),
    ("checks/test_checks_guard.py::*trace*", LONG),
    ("checks/test_stages.py::test_the_course_s*", IN_NOTEBOOKS),
    ("checks/test_stages.py::test_the_version*", QUICK),
    ("checks/test_stages.py*", LONG),
    ("checks/test_staircases.py*", LONG),
    ("checks/test_mutations.py*", LONG),
    ("checks/test_checks_ch12.py*", LONG),
    ("checks/test_variants.py*", LONG),
    ("checks/test_pasted.py*", LONG),
    ("checks/*", QUICK),
    # launch: one of each kind of failure
    ("launch/test_launch.py::test_a_fork_server_that_was_killed*", LONG),
    ("launch/test_launch.py*", QUICK),
    ("launch/test_launch_faults.py*", QUICK),
    ("launch/test_launch_hangs.py::test_hang*", QUICK),
    # techniques, and what chapters build
    ("chapters/test_pipeline_engine.py*", LONG),
    ("chapters/test_equality.py::test_a_technique*", LONG),  # but for the most ranks
    ("chapters/test_equality.py::test_an_interrupted*", LONG),
    ("chapters/test_equality.py::test_mini_fsdp*", LONG),
    ("chapters/*", QUICK),
    # the planner's tables; programs are traced in the rest
    ("estimate/test_estimate.py*", QUICK),
    # a few submissions
    ("grade/test_grade.py::TestCommand::test_a_class*", QUICK),
    # what is cheap
    ("modules/test_capstone.py*", LONG),
    ("modules/test_hardware.py::*share*", LONG),
    ("modules/test_mnist.py*", LONG),
    ("modules/test_network_hosts.py*", LONG),
    ("modules/test_private.py::test_what*", LONG),
    ("modules/test_growing.py*", LONG),
    ("modules/test_terminal.py*", LONG),
    ("modules/*", QUICK),
    ("notebooks/test_notebook_builder.py*", LONG),
    ("notebooks/*", QUICK),
    ("pages/*", QUICK),
    ("sources/*", QUICK),
    ("tools/test_benchmarks.py*", LONG),
    ("tools/test_changed_cells.py*", LONG),
    ("tools/test_class.py*", LONG),
    ("tools/test_gpu_session.py*", LONG),
    ("tools/test_run_tests.py*", LONG),
    ("tools/test_setup.py*", LONG),
    ("tools/test_tiers.py::test_both*", LONG),
    ("tools/*", QUICK),
    ("*", LONG),
]
COMMON = {  # what several exercises share
    "not-waited",
    "not-every-rank",
    "sum-not-mean",
    "divided-twice",
    "two-ranks",
    "one-rank-only",
    "unchanged",
    "none-gradient",
    "returns-nothing",
}
# what stands for the long tests in the summary of `make test`, after the number of wrong answers
REST = (
    "other right answers, variants, the rest of launch, several hosts, torchrun, nbgrader and hostile "
    "submissions, traced programs, rules of NCCL, public bug reports, set-ups"
)
ROOT = Path(__file__).resolve().parents[1]
IN_TEST = re.compile(r"checks/test_wrong_answers\.py::(\w+)::test_a_wrong_answer\w+\[\w+?-(.+)\]")
TECHNIQUE = re.compile(r"chapters/test_equality\.py::(test_a_technique\w+\[.+)-\d+\]")
IN_FILE = re.compile(r'\bwrong\("([\d.]+)", names="([\w-]+)"')
USUAL = re.compile(r'\busual\(\s*"([\d.]+)", \w+,([^)]*)\)')


def of_tests(ids: Iterable[str]) -> dict[str, str]:
    """The tier of each test of `ids`, which stand in the order of their files."""
    found, named, most = {}, set(), {}
    for id in ids:
        found[id] = next(tier for pattern, tier in RULE if fnmatchcase(id, pattern))
        if answer := IN_TEST.fullmatch(id):
            if answer.groups() in named:
                found[id] = IN_SOAK
            elif answer[2] in COMMON:
                found[id] = QUICK
            named.add(answer.groups())
        if technique := TECHNIQUE.fullmatch(id):
            most[technique[1]] = id  # the last has the most ranks
    return found | dict.fromkeys(most.values(), QUICK)


def of_file(file: str) -> str | None:
    """The tier of all tests in a file, "folder/file.py"; None where they differ."""
    for pattern, tier in RULE:
        files, _, tests = pattern.partition("::")
        if fnmatchcase(file, files):
            return None if tests else tier
    raise AssertionError("the last row fits all")


def in_text(text: str) -> list[tuple[str, str]]:
    """The wrong answers that a file's text makes: of each its exercise and its mistake."""
    usual = [
        (id, name) for id, names in USUAL.findall(text) for name in re.findall(r'"(.+?)"', names)
    ]
    return IN_FILE.findall(text) + usual


def left_out() -> str:
    """What the quick tests leave to the long ones."""
    files = sorted((ROOT / "tests" / "wrong_answers").glob("ch*/*.py"))
    wrong = {each for file in files for each in in_text(file.read_text(encoding="utf-8"))}
    return f"{sum(name not in COMMON for _, name in wrong):,} wrong answers, {REST}"
