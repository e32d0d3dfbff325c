"""What the fork server has done is done: no rank does it again."""

import subprocess
import sys

from tests.support.on_gloo import launch

JOINS = """
import importlib.metadata

import torch.distributed as dist

import course_utils.launch.ranks.preloaded


def look(**_):
    raise AssertionError("every package that is installed was looked through")


importlib.metadata.entry_points = look
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_a_rank_that_joins_its_group_does_not_look_for_gloo_among_all_packages():
    ran = subprocess.run(
        [sys.executable, "-c", JOINS], check=False, stderr=subprocess.PIPE, text=True
    )
    assert ran.returncode == 0, ran.stderr


def modules(rank, prefix):
    """Those that the rank had before its function was called."""
    return [name for name in sys.modules if name.startswith(prefix)]


def test_a_rank_has_the_exercises_and_no_rules_that_nobody_has_asked_for():
    (exercises,) = launch(modules, 1, "course_exercises.chapters.ch03.")
    (rules,) = launch(modules, 1, "course_strict")
    assert "course_exercises.chapters.ch03.average_gradients" in exercises
    assert rules == []
