"""The workflows of .github/: sound by GitHub's own schema, and all over one command."""

import subprocess
import sys
from pathlib import Path

import pytest
import run_tests
import yaml

FOLDER = Path(__file__).parents[2] / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))


def test_they_fit_githubs_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.github-workflows", *map(str, WORKFLOWS)]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_runs_all_tests_and_tells_what_was_skipped(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        steps = job["steps"]
        assert sum(step.get("run") in ("make test", "make oldest") for step in steps) == 1
        assert "summary.txt" in steps[-1]["run"]
        assert steps[-1]["if"] == "always()", "the summary is wanted most when a test failed"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_has_the_time_that_its_steps_may_take(path: Path) -> None:
    """A job that is ended by GitHub tells nothing of the tests that passed."""
    seconds = sum(run_tests.limit(name, beside_gpus=path.stem == "gpu") for name in run_tests.STEPS)
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    for job in workflow["jobs"].values():
        assert 60 * job["timeout-minutes"] >= seconds
