"""cluster/engines.sbatch under SLURM's own daemons: a notebook's cell over the nodes of a job.

pytest tests/slurm --slurm
"""

import json
import subprocess
import sys

import pytest

from cluster import ADDRESS, slurm_cluster, variables
from tests.support.elastic_runs import ROOT

pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")

CELL = """
import json, os, sys
import ipyparallel, torch
import torch.distributed as dist
from course_hosts.cluster import cluster
from course_utils.launch import launch

def adds(rank):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item(), os.environ["SLURMD_NODENAME"], len(os.sched_getaffinity(0))

client = ipyparallel.Client(sys.argv[1], timeout=300)
client.wait_for_engines(2, timeout=300)
with cluster(client) as names:
    print(json.dumps([names, launch(adds, 4)]))
"""


@pytest.fixture
def nodes(asked_for, tmp_path):
    (tmp_path / "slurm").mkdir()
    with slurm_cluster(tmp_path / "slurm", nodes=2) as nodes:
        yield nodes


def test_a_cell_runs_over_the_nodes_of_a_job_and_its_end_ends_them(nodes, tmp_path):
    python = (sys.executable, "-m")
    where = f"--ip={ADDRESS}", f"--location={ADDRESS}", f"--profile-dir={tmp_path}"
    nodes.daemon(*python, "ipyparallel.controller", *where, "--IPController.enable_curve=True")
    files = tmp_path / "security"
    keys = files / "ipcontroller-engine.json"
    nodes.wait(keys.exists, "the controller")
    exported = f"--export=ALL,PATH={sys.exec_prefix}/bin:/usr/bin:/bin,ENGINE_FILE={keys}"
    job = nodes.run(
        *("sbatch", "--parsable", "--gpus-per-node=0", "--cpus-per-task=2", exported),
        str(ROOT / "cluster" / "engines.sbatch"),
        cwd=tmp_path,
    ).strip()
    try:
        printed = nodes.run(
            *(sys.executable, "-c", CELL, str(files / "ipcontroller-client.json")), cwd=ROOT
        )
    except subprocess.CalledProcessError as error:
        logs = "\n".join(log.read_text() for log in tmp_path.glob("course-engines-*.log"))
        raise AssertionError(f"{error.stderr}\n{logs}\n{nodes.logs()}") from None
    names, results = json.loads(printed.splitlines()[-1])
    assert sorted(names) == ["n1", "n2"]  # in the order in which their engines came
    assert [total for total, _, _ in results] == [6.0] * 4
    assert [node for _, node, _ in results] == [names[0], names[0], names[1], names[1]]
    assert {cores for _, _, cores in results} == {2}  # srun does not take --cpus-per-task over
    nodes.run("scancel", job)
    nodes.wait(lambda: not engines(nodes), "the end of the engines")


def engines(nodes) -> list:
    return [p for p in nodes.processes() if "SLURMD_NODENAME" in variables(p)]
