"""COURSE_LOG: which lines a launch writes, and that docs/processes.md shows them."""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course_utils.launch import RankFailure, launch

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "processes.md"
LINE = re.compile(r"\d\d:\d\d:\d\d\.\d{3} +(\d+)  (\w+) +(.*)\n")


def average(rank):
    total = torch.ones(1)
    dist.all_reduce(total)


def left_alone(rank):
    if rank == 0:
        dist.barrier()


def test_the_page_shows_what_a_launch_writes():
    launch(average, 2)
    with pytest.raises(RankFailure):
        launch(left_alone, 2)
    shown = re.search(
        r"<!-- events -->\n```\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    # Which of two processes is first is chance; the order of each one's own lines is not.
    assert by_process(Path(os.environ["COURSE_LOG"]).read_text()) == by_process(shown[1])


def by_process(log):
    lines = [LINE.fullmatch(line) for line in log.splitlines(keepends=True)]
    if not all(lines):
        return sorted(log.splitlines())
    told = []
    for _, event, about in map(re.Match.groups, lines):
        who = about.partition(",")[0] if event in ("joined", "called") else "kernel"
        about = re.sub(r"process \d+", "process P", re.sub(r"\S+\.py:\d+", "FILE", about))
        told.append(f"{who:<7}  {event:<9}  {about}")
    return sorted(told)


def test_without_the_variable_nothing_is_written(monkeypatch, tmp_path):
    log = Path(os.environ["COURSE_LOG"])
    monkeypatch.delenv("COURSE_LOG")
    launch(average, 1)
    assert not log.exists()


def test_a_log_that_cannot_be_written_stops_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_LOG", str(tmp_path / "no folder" / "log"))
    launch(average, 1)


def test_a_failed_test_shows_the_end_of_its_log(pytester):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    pytester.makepyfile(
        "import os\n"
        "def test_it():\n"
        "    open(os.environ['COURSE_LOG'], 'w').write('asked for nothing')\n"
        "    assert False\n"
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*events of its launches*", "asked for nothing"])
