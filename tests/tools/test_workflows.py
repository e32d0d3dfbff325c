"""The workflows of .github/: sound by GitHub's own schema, and all over three commands."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import run_tests
import yaml

FOLDER = Path(__file__).parents[2] / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
CI_SECONDS = 5400  # of .ci/run
ALL = run_tests.STEPS | run_tests.REST


def test_they_fit_githubs_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.github-workflows", *map(str, WORKFLOWS)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def jobs(path: Path) -> dict[str, dict]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


def command_of(job: dict) -> str:
    """The one command of a job that tests."""
    found = [step["run"] for step in job["steps"] if step.get("run", "").startswith("make ")]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_runs_tests_and_tells_what_was_skipped(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert command_of(job) in ("make test", "make test-all", "make oldest ARGS=all")
        assert "summary.txt" in job["steps"][-1]["run"]
        assert job["steps"][-1]["if"] == "always()", "it is wanted most when a test failed"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_has_the_time_that_its_steps_may_take(path: Path) -> None:
    """A job that is ended by GitHub tells nothing of the tests that passed."""
    for job in jobs(path).values():
        steps = run_tests.STEPS if command_of(job) == "make test" else ALL
        seconds = sum(run_tests.limit(name, beside_gpus=path.stem == "gpu") for name in steps)
        assert 60 * job["timeout-minutes"] >= seconds


def test_both_commands_together_have_the_time_that_ci_gives() -> None:
    assert sum(run_tests.limit(name, beside_gpus=False) for name in ALL) <= CI_SECONDS


def test_every_night_and_every_release_runs_all() -> None:
    text = (FOLDER / "all.yml").read_text(encoding="utf-8")
    when = yaml.safe_load(text)[True]  # YAML 1.1 reads the key `on` as a truth
    assert re.fullmatch(r"\d+ \d+ \* \* \*", when["schedule"][0]["cron"])
    assert when["release"] == {"types": ["published"]}
    assert {command_of(job) for job in jobs(FOLDER / "all.yml").values()} == {"make test-all"}


def test_a_pull_request_runs_what_it_touches() -> None:
    [step] = [s for s in jobs(FOLDER / "test.yml")["cpu"]["steps"] if "touched" in s.get("run", "")]
    assert (run_tests.ROOT / "tools/touched.py").is_file() and "tools/touched.py" in step["run"]
    assert "github.event_name == 'pull_request'" in step["if"]


def test_every_version_of_pytorch_that_is_allowed_is_tested() -> None:
    """And each with a torchvision of its own: no other fits it."""
    found = jobs(FOLDER / "torch-versions.yml")
    project = tomllib.loads((run_tests.ROOT / "pyproject.toml").read_text())["project"]
    low, high = re.search(r"torch>=2\.(\d+),<2\.(\d+)", project["dependencies"][0]).groups()
    assert command_of(found["oldest"]) == "make oldest ARGS=all"  # takes the lowest by itself
    tested = {row["torch"] for row in found["later"]["strategy"]["matrix"]["include"]}
    assert tested == {f"2.{minor}" for minor in range(int(low) + 1, int(high))}
    held = found["later"]["steps"][-2]["env"]
    assert held["INSTALLER"] == "pip" and "PIP_CONSTRAINT" in held
