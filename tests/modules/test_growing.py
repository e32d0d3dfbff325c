"""A group that shrinks and grows: what is shown with an older PyTorch, kills and joins by dice, and what is left."""

import contextlib
import io
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import psutil
import pytest
import torch
from torch import nn

from course_hosts.growing import Members, batch, recorded, why_not
from course_hosts.nodes import PATIENCE, gone_within
from course_utils.comm import versions
from course_utils.lesson.predictions import compare
from tests.modules import record_growing

ROOT = Path(__file__).parents[2]
NOTEBOOKS = ("notebooks", "solutions")
OWNER = """
import sys, time
from pathlib import Path
from course_hosts.growing import Members
with Members(Path(sys.argv[1]), sys.argv[2]) as members:
    members.start("a", "b")
    print(*(agent.pid for agent in members.agents.values()), flush=True)
    time.sleep(1000)
"""

STEPS = 20  # between two disturbances
SLOWLY = "    __import__('time').sleep(0.01)\n    dist.all_reduce"

needs_reconfigure = pytest.mark.skipif(bool(why_not()), reason="PyTorch is older than 2.14")


@needs_reconfigure
def test_what_is_recorded_is_what_happens(tmp_path):
    assert by_member(record_growing.run(tmp_path)) == by_member(recorded())


def by_member(events: list[dict]) -> dict[str, list[dict]]:
    """What each member noted, in its order, without times; parameters in four digits."""
    found: dict[str, list[dict]] = {}
    for event in events:
        rounded = [round(value, 4) for value in event.get("parameters", [])]
        own = event | {"time": 0, "parameters": rounded}
        found.setdefault(event["member"], []).append(own)
    return found


@pytest.mark.parametrize("folder", NOTEBOOKS)
def test_with_an_older_pytorch_the_cells_print_the_same(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(versions, "installed", lambda: "2.11.0")
    assert "here is 2.11.0" in why_not()
    names = {"compare": compare, "Path": Path}
    cells = cells_of_the_part(ROOT / folder / "09_elastic_further.ipynb")
    for cell in cells:
        if cell.source.startswith("%%writefile"):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(cell.source, names)  # noqa: S102 - the notebook's own
        if "nbval-ignore-output" not in cell.metadata.get("tags", []):
            stored = "".join(o.get("text", "") for o in cell.outputs)
            rounding = re.compile(r"\b(0e\+00|\de-(0[5-9]|1\d))\b")  # differs by machine
            assert rounding.sub("", printed.getvalue()) == rounding.sub("", stored), cell.source
    assert len(cells) == 10
    plt.close("all")  # another test may count what is open


def cells_of_the_part(path: Path) -> list:
    """The code cells of the notebook under `No restart at all`."""
    cells = nbformat.read(path, as_version=4).cells
    begins = next(i for i, cell in enumerate(cells) if "### No restart at all" in cell.source)
    ends = next(i for i, cell in enumerate(cells) if "### 9.7 " in cell.source)
    return [cell for cell in cells[begins:ends] if cell.cell_type == "code"]


@needs_reconfigure
@pytest.mark.parametrize("seed", range(2))
def test_kills_and_joins_at_any_moment_change_no_parameter(seed, tmp_path):
    assert disturbed_by_dice(seed, 4, tmp_path) < 1e-5


@needs_reconfigure
def test_a_member_that_waits_in_the_old_group_comes_to_the_new_one(tmp_path):
    """Member a does not look for lists: b leaves for the new group, and a waits for it in the old one."""
    text = record_growing.program(tmp_path).read_text()
    blind = 'sys.argv[2] == "a" or not member.called()'
    (tmp_path / "blind.py").write_text(text.replace("not member.called()", f"({blind})"))
    with Members(tmp_path / "members", tmp_path / "blind.py") as members:
        members.start("a", "b")
        members.train(until=5)
        members.start("c")
        members.train(until=20)
        ends = [e["parameters"] for e in members.events() if e["event"] == "end"]
    assert len(ends) == 3
    assert max((torch.tensor(end) - trained_alone(20)).abs().max().item() for end in ends) < 1e-5


def disturbed_by_dice(seed: int, times: int, folder: Path) -> float:
    """Kills and starts members while steps go on; returns the largest difference of a parameter from one
    process. `python -m tests.soaks.soak_growing` does it hundreds of times."""
    dice = random.Random(seed)
    steps = STEPS * (times + 1)
    text = record_growing.program(folder).read_text()
    text = text.replace("step < 20", f"step < {steps}").replace("    dist.all_reduce", SLOWLY)
    (folder / "slow.py").write_text(text)
    with Members(folder / "members", folder / "slow.py") as members:
        members.start("m0", "m1", "m2")
        for number in range(1, times + 1):
            members.gate.open_to(STEPS * number)
            time.sleep(dice.random() / 5)
            living = sorted(members.agents)
            if len(living) == 1 or len(living) < 4 and dice.random() < 0.4:
                members.start(f"m{number + 2}")
            else:
                members.kill(dice.choice(living))
        members.train(until=steps)
        ends = [e["parameters"] for e in members.events() if e["event"] == "end"]
    alone = trained_alone(steps)
    return max((torch.tensor(end) - alone).abs().max().item() for end in ends)


def trained_alone(steps: int) -> torch.Tensor:
    """The parameters of one process after so many steps."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batch(step)
        adam.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        adam.step()
    return nn.utils.parameters_to_vector(model.parameters())


@needs_reconfigure
def test_members_listen_here_alone_and_end_with_a_killed_owner(tmp_path):
    program = record_growing.program(tmp_path)
    command = [sys.executable, "-c", OWNER, str(tmp_path / "members"), str(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            started = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
            assert len(started) == 2
            for process in (psutil.Process(owner.pid), *started):
                listening = [c for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
                assert listening
                assert {c.laddr.ip for c in listening} == {"127.0.0.1"}
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    assert not gone_within(started, PATIENCE)


@needs_reconfigure
def test_a_program_that_ends_at_once_is_named_with_its_log(tmp_path):
    program = tmp_path / "ends.py"
    program.write_text("raise SystemExit('no model here')")
    with (
        pytest.raises(TimeoutError, match=r"read .*agent-\*\.log \(a has ended\)"),
        Members(tmp_path / "members", program) as members,
    ):
        members.start("a")
    assert "no model here" in (tmp_path / "members/agent-a.log").read_text()
