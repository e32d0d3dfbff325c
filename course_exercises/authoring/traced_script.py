"""The learner's script as one rank of many: its `program` is traced, and none of the others exists."""

import runpy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import course_planner as estimate
from course_exercises.authoring.scripts import flags
from course_planner import Layout


def defined_in(path: Path) -> dict[str, Any]:
    """What a script defines, by name. Its `main` is not called, as on an import."""
    with mock.patch.object(sys, "argv", [str(path)]):
        return runpy.run_path(str(path), run_name="train")


def as_one_rank(
    path: Path, layout: Layout, rank: int = 0, *, vocabulary: int, **options: int
) -> estimate.Trace:
    """Traces a step of the script as `rank` of `layout.dp` data ranks, each of `layout.tp` tensor ranks.

    The script has a function `program(mesh, options, vocabulary)` that returns the model, its optimizer
    and `step(inputs, targets)`. Its mesh has the dimensions "data" and "tensor", its options are those
    of the script's command line, of which some are given here (`kv_heads=8`), and a step gets
    `layout.micro_batch` windows. Raises what the script raises, and what `estimate.trace` does.
    """
    script = defined_in(path)
    options = {"batch": layout.sequences(), "tensor": layout.tp, **options}
    chosen = _parsed(script["options_of_the_command_line"], path, options)

    def program(_, layout):
        sizes = layout.dp, layout.tp
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        _, _, step = script["program"](mesh, chosen, vocabulary)

        def one_step():
            tokens = torch.randint(vocabulary, (layout.micro_batch, chosen.context + 1))
            step(tokens[:, :-1], tokens[:, 1:])

        return one_step

    with warnings.catch_warnings():
        # the logits are a view, and nobody changes them in place
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        return estimate.trace(program, layout, rank)


def _parsed(parse: Callable[[], Any], path: Path, options: dict[str, int]) -> Any:
    """What the script's own parser makes of options; the text and the folder are not there."""
    arguments = flags({"text": "text.txt", "out": "out", **options})
    with mock.patch.object(sys, "argv", [str(path), *arguments]):
        return parse()
