"""Replicas under torchft: what is shown where it is missing, whom they listen to, and what is left of them."""

import contextlib
import importlib.util
import io
import os
import re
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import nbformat
import psutil
import pytest

from course_hosts import replicas as module
from course_hosts.nodes import PATIENCE, gone_within
from course_hosts.replicas import Replicas, recorded, why_not
from course_utils.lesson.predictions import compare
from tests.modules import record_replicas
from tests.support.leftovers import living

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("notebooks", "solutions")
OWNER = """
import sys, time
from pathlib import Path
from course_utils.lesson.predictions import compare
from course_hosts.replicas import Replicas
with Replicas(Path(sys.argv[1]), sys.argv[2]) as replicas:
    replicas.start(0, 1)
    print(*(agent.pid for agent in replicas.agents.values()), flush=True)
    time.sleep(1000)
"""

needs_torchft = pytest.mark.skipif(bool(why_not()), reason="torchft is not installed")


@needs_torchft
def test_what_is_recorded_is_what_torchft_does(tmp_path):
    assert without_times(record_replicas.run(tmp_path)) == without_times(recorded())


def without_times(events: list[dict]) -> list[list[dict]]:
    """What each replica noted, in its order."""
    own = sorted(({**e, "time": 0} for e in events), key=lambda e: e["replica"])
    return [list(those) for _, those in groupby(own, key=lambda e: e["replica"])]


@pytest.mark.parametrize("folder", NOTEBOOKS)
def test_without_torchft_the_cells_print_the_same(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install" in why_not()
    names = {"compare": compare, "Path": Path}
    cells = cells_of_the_part(ROOT / folder / "09_elastic_further.ipynb")
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(cell.source, names)  # noqa: S102 - the notebook's own
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            stored = "".join(o.text for o in cell.outputs)
            rounding = re.compile(
                r"\b(0e\+00|\de-(0[5-9]|1\d))\b"
            )  # differs from machine to machine
            assert rounding.sub("", printed.getvalue()) == rounding.sub("", stored), cell.source
    assert len(cells) == 9


def cells_of_the_part(path: Path) -> list:
    """The code cells of the notebook under `No restart at all`."""
    cells = nbformat.read(path, as_version=4).cells
    begins = next(i for i, cell in enumerate(cells) if "### No restart at all" in cell.source)
    ends = next(i for i, cell in enumerate(cells) if "### How others do it" in cell.source)
    return [cell for cell in cells[begins:ends] if cell.cell_type == "code"]


@needs_torchft
def test_replicas_listen_here_alone_and_end_with_a_killed_owner(tmp_path):
    program = record_replicas.program(tmp_path)
    command = [sys.executable, "-c", OWNER, str(tmp_path / "replicas"), str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            started = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
            assert len(started) == 3
            addresses = [
                connection.laddr.ip
                for process in started
                for connection in process.net_connections()
                if connection.status == psutil.CONN_LISTEN
            ]
            assert len(addresses) >= 5  # the lighthouse; of each replica a manager and a store
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    assert not gone_within(started, PATIENCE)


def test_a_program_that_ends_at_once_is_named_with_its_log(tmp_path, monkeypatch):
    program = tmp_path / "ends.py"
    program.write_text("raise SystemExit('no model here')")
    monkeypatch.setattr(module, "_LIGHTHOUSE", "import time; time.sleep(1000)")
    with (
        pytest.raises(TimeoutError, match=r"read .*agent-\*\.log \(0 has ended\)"),
        Replicas(tmp_path / "replicas", program) as replicas,
    ):
        lighthouse = replicas.agents["lighthouse"]
        replicas.start(0)
    assert "no model here" in (tmp_path / "replicas/agent-0.log").read_text()
    assert not living(lighthouse)
