"""What a release consists of besides code: version, citation, change log, lock file, templates."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import lock
import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements-lock.txt").read_text(encoding="utf-8").splitlines()
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"


def test_the_version_is_the_same_everywhere_and_a_finished_one_is_in_the_change_log() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PROJECT["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev0)?", version)
    assert citation["version"] == version
    assert ("date-released" in citation) == (not version.endswith(".dev0"))
    assert (
        "\n## [Unreleased]\n" in log if version.endswith(".dev0") else f"\n## [{version}] - " in log
    )


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.citation-file-format", ["CITATION.cff"]),
        ("vendor.github-issue-forms", ["check.yml", "fault.yml"]),
        ("vendor.github-issue-config", ["config.yml"]),
    ],
)
def test_the_files_fit_their_published_schemas(schema: str, files: list[str]) -> None:
    paths = [str((ROOT if name.endswith(".cff") else TEMPLATES) / name) for name in files]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema]
    command += ["--default-filetype", "yaml", *paths]
    checked = subprocess.run(command, check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_lock_pins_each_package_of_a_learner_inside_its_range() -> None:
    pinned = dict(line.split("==") for line in LOCK if not line.startswith("#"))
    for text in PROJECT["dependencies"]:
        asked = Requirement(text)
        assert asked.specifier.contains(pinned[asked.name]), text
    assert len(pinned) > 3 * len(PROJECT["dependencies"]), "what packages need is pinned too"


def test_the_lock_holds_names_and_versions_only() -> None:
    assert all(re.fullmatch(r"#.*|[a-z0-9-]+==[\w.]+", line) for line in LOCK)


def test_a_package_is_followed_through_its_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = {
        "course": ["b[fast]>=1", "mac-only; sys_platform == 'nowhere'", "dev-only; extra == 'dev'"],
        "b": ["c", "d; extra == 'fast'", "e; extra == 'slow'"],
        "d": ["b"],
    }
    monkeypatch.setattr(lock.installed, "requires", asks.get)
    assert lock.closure("course") == {"b", "c", "d"}
