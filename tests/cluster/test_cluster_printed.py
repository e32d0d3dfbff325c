"""The commands that the pages print: each can restart, and one survives kill after kill."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.run as torchrun

from tests.support.elastic_runs import ROOT, check_samples, difference, undisturbed
from tests.support.printed_commands import PrintedRun, commands

LOCAL = "docs/hosts.md"
PAGES = [
    *(LOCAL, "cluster/README.md", "cluster/before_the_first_run.md", "cluster/train.py"),
    "solutions/09_elastic.py",
]
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"


@pytest.mark.parametrize("page", PAGES)
def test_every_printed_command_restarts_its_workers_with_a_store_of_their_own(page):
    found = commands(page)
    assert found, f"{page} prints no command"
    for command in found:
        assert command.startswith(f"{VARIABLE} "), command
        assert "--max-restarts" in command, command


@pytest.mark.parametrize("file", ["slurm.sbatch", "pytorchjob.yaml", "jobset.yaml"])
def test_every_launch_file_does_too(file):
    text = (ROOT / "cluster" / file).read_text()
    name = VARIABLE.removesuffix("=1")
    assert VARIABLE in text or re.search(rf'name: {name}\n *value: "1"', text)
    assert "--max-restarts=100" in text or "maxRestarts: 100" in text


def test_torchrun_knows_the_options_of_the_local_command():
    (command,) = commands(LOCAL)
    agent = torchrun.parse_args(shlex.split(command)[2:])
    assert agent.max_restarts == 100 and agent.local_addr == "127.0.0.1"


def test_torchrun_binds_to_the_cores_beside_a_gpu_and_ends_where_there_is_none(tmp_path: Path):
    page = (ROOT / "cluster/before_the_first_run.md").read_text()
    (option,) = set(re.findall(r"--numa-binding=\w+", page))
    (tmp_path / "nothing.py").touch()
    command = [sys.executable, "cluster/agent.py", option, "--rdzv-backend=c10d"]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", tmp_path / "nothing.py"]
    without = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        command, check=False, env=without, cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode and "No accelerator available for NUMA binding" in run.stderr


def test_a_worker_killed_again_and_again_under_the_local_command_changes_nothing(
    tmp_path: Path, request
):
    """With torchrun's default store, four kills were enough for this run to hang."""
    (command,) = commands(LOCAL)
    kills, samples, batch, steps_per_epoch = request.config.getoption("--kills"), 100, 16, 7
    epochs = 2 * kills // steps_per_epoch + 1
    options = (
        f"--samples {samples} --batch {batch} --epochs {epochs} --width 16 --save-every 2".split()
    )
    undisturbed(tmp_path / "alone", ["--data", "data/MNIST/raw", *options])
    with PrintedRun(shlex.split(command), tmp_path / "killed", options) as run:
        run.start_agent("a")
        run.wait_for_group(2)
        for kill in range(kills):
            run.gate.open_to(2 * kill + 3)  # past a save, and a step further
            run.wait_for_step(2 * kill + 3, world=2)
            run.kill_worker("a")
            run.wait_for_group(2)
        run.gate.open()
        run.wait_until_done()
    # as with a store that outlives the workers; such a restart costs another one, or hangs
    assert "connectFullMesh" not in (run.folder / "agent-a.log").read_text()
    check_samples(run.folder, samples, batch, epochs)
    assert difference(tmp_path / "alone", run.folder) <= 1e-6
