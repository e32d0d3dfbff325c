"""The scripts that chapters write, on machines with fewer GPUs than local ranks, and with enough."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh

from course_exercises.sources import chapters
from course_exercises.sources.answers import percent_cells

LOCAL_RANK, LOCAL_RANKS = 1, 2
PLACE = {"RANK": 1, "LOCAL_RANK": LOCAL_RANK, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": LOCAL_RANKS}
OF_A_GPU = {"nccl", "cuda"}  # what a group and a mesh are made for


class Joined(BaseException):
    """The script has chosen its device and joins the others with it."""


def scripts() -> list:
    """Those that choose a device; the others compute on the CPU with gloo."""
    sources = [path for chapter in chapters.chapters() for path in chapter.sources]
    cells = [(path.stem[:2], cell.source) for path in sources for cell in percent_cells(path)]
    return [
        pytest.param(cell, id=f"{chapter}-{Path(cell.splitlines()[0]).name}")
        for chapter, cell in cells
        if cell.startswith("# %%writefile") and "cuda" in cell
    ]


def joins(kind: str, *args, **kwargs) -> None:
    raise Joined(kind)


@pytest.fixture
def gpus_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rank 1 of two on a machine of its own; a script gets no further than to its group."""
    taken = []
    for name, value in PLACE.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", ["script.py", "1", "2", "1"])  # sizes, where it takes some
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: taken.append(torch.device(to).index))
    monkeypatch.setattr(dist, "init_process_group", joins)
    monkeypatch.setattr(device_mesh, "init_device_mesh", joins)
    return taken


@pytest.mark.parametrize("script", scripts())
@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_script_takes_gpus_only_where_each_local_rank_has_one(
    script: str,
    gpus: int,
    gpus_taken: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one GPU, `is_available()` would send rank 1 to a device that is not there."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    (file := tmp_path / "script.py").write_text(script, encoding="utf-8")
    with pytest.raises(Joined) as joined:
        runpy.run_path(str(file), run_name="__main__")
    enough = gpus >= LOCAL_RANKS
    assert (joined.value.args[0] in OF_A_GPU) == enough
    assert gpus_taken == ([LOCAL_RANK] if enough else [])


def test_scripts_were_found() -> None:
    """One in each chapter from 03 to 11 but 06 and 08, whose script is the learner's own, and 09, whose two
    nodes are one machine."""
    assert {int(script.id[:2]) for script in scripts()} == {3, 4, 5, 7, 11}
