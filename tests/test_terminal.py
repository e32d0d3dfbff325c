"""Programs that a chapter runs as in a terminal: what they print, how they fail, how they end."""

import subprocess
import sys

import psutil
import pytest

from course_utils.terminal import run_in_terminal, torchrun

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
if dist.get_rank() == 0:
    print(f"{sys.argv[1]}: {total.item():.0f} ranks")
dist.destroy_process_group()
"""


def test_what_a_program_prints_comes_back():
    assert run_in_terminal(sys.executable, "-c", "print('hello')") == "hello\n"


def test_a_program_that_fails_shows_the_end_of_its_errors():
    said = run_in_terminal(
        sys.executable, "-c", "print('lost'); raise SystemExit('no such street')"
    )
    assert said == "no such street\n"


def test_torchrun_starts_ranks_that_meet(tmp_path):
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT)
    assert torchrun(2, script, "all") == "all: 2 ranks\n"


def test_time_that_is_up_ends_the_program(tmp_path):
    mark = tmp_path / "pid"
    script = f"import os, pathlib, time\npathlib.Path({str(mark)!r}).write_text(str(os.getpid()))\n"
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_terminal(sys.executable, "-c", script + "time.sleep(600)", timeout=10)
    assert not psutil.pid_exists(int(mark.read_text()))
