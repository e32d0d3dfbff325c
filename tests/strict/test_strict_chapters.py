"""Cells of chapters that once mixed devices, or made groups as gloo allows: under NCCL's rules."""

import ast
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

from course_utils import hardware
from course_utils.launch import RankFailure, launch
from tests.support.needing_rules import needs_rules

pytestmark = needs_rules
SOURCES = Path(__file__).parents[2] / "solutions"


def tree(chapter: str) -> ast.Module:
    return ast.parse((SOURCES / f"{chapter}.py").read_text(encoding="utf-8"))


def function(chapter: str, name: str, **names):
    """A function of a chapter among `names`. What load_code would bring runs half of the chapter."""
    found = [node for node in tree(chapter).body if getattr(node, "name", None) == name]
    exec(compile(ast.Module(found, []), chapter, "exec"), names)  # noqa: S102 - the course's own
    return names[name]


def test_rows_of_the_kernel_are_brought_to_the_ranks_device():
    """05's batch of 30 rows lies where the kernel computes: the failure is PyTorch's, of a shape."""
    cell = function(
        "05_pipeline_further",
        "thirty_rows_in_torch",
        inputs=torch.ones(32, 64),
        targets=torch.ones(32, 64),
        new_model=lambda: [nn.Linear(64, 64), nn.Linear(64, 64)],
        cut=lambda model, stages: [layer.to(hardware.device()) for layer in model],
        hardware=hardware,
        mse_loss=mse_loss,
        pipelining=pipelining,
        warnings=warnings,
    )
    with pytest.raises(RankFailure) as caught:
        launch(cell, 2, rules="nccl")
    assert "[7, 64]" in str(caught.value) and "[8, 64]" in str(caught.value)


def test_groups_that_nccl_makes_otherwise_are_gloos():
    """NCCL connects all ranks at once where gloo's members alone meet: on GPUs this cell of 07 would
    wait for ever, which no CPU shows. It asks for gloo by name."""
    calls = [node for node in ast.walk(tree("07_hybrid_further")) if isinstance(node, ast.Call)]
    launched = [
        {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        for call in calls
        if ast.unparse(call.func) == "launch" and ast.unparse(call.args[0]) == "crossed_lines"
    ]
    assert launched == [{"backend": "gloo"}]
