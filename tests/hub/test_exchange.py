"""nbgrader's exchange between real users of one machine, with the settings that docs/class_machine.md gives."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub import ROOT, open_folder, run_as, system_users

CHAPTER = "00_start_here"
ADA, BEN = "course-test-cleo", "course-test-dan"
GUIDE = (ROOT / "docs" / "class_machine.md").read_text(encoding="utf-8")
SETTINGS = GUIDE.partition("/etc/jupyter/nbgrader_config.py")[2].split("```")[1]


def nbgrader(*words: str) -> list[str]:
    return [sys.executable, "-m", "nbgrader", *words]


@pytest.fixture
def folder() -> Iterator[Path]:
    with open_folder() as opened:
        yield opened


def test_a_submission_reaches_the_instructor_and_no_other_learner(folder):
    course, exchange = folder / "course", folder / "exchange"
    options = ["--course=parallelism", f"--Exchange.root={exchange}"]
    assert 'c.Exchange.root = "/srv/nbgrader/exchange"' in SETTINGS
    assert "chmod 1777 /srv/nbgrader/exchange" in GUIDE
    exchange.mkdir()
    exchange.chmod(0o1777)
    build = [sys.executable, ROOT / "tools" / "assignments.py", "build", "--folder", course, "00"]
    subprocess.run(build, check=True, capture_output=True)
    release = nbgrader("release_assignment", CHAPTER, *options, f"--Exchange.cache={course}/cache")
    subprocess.run(release, check=True, capture_output=True, cwd=course)
    with system_users(folder, [ADA, BEN]):
        home = folder / "homes" / ADA
        for verb in ("fetch_assignment", "submit"):
            done = run_as(ADA, *nbgrader(verb, CHAPTER, *options), folder=home)
            assert done.returncode == 0, done.stderr
        [handed_in] = (exchange / "parallelism" / "inbound").iterdir()
        assert handed_in.owner() == ADA
        # Whoever cannot list the folder does not know the name, whose end is drawn at random.
        assert run_as(BEN, "ls", handed_in.parent, folder=folder).returncode != 0
        collect = nbgrader("collect", CHAPTER, *options, f"--Exchange.cache={course}/cache")
        subprocess.run(collect, check=True, capture_output=True, cwd=course)
        assert (course / "submitted" / ADA / CHAPTER / f"{CHAPTER}.ipynb").exists()
    assert not home.exists()
