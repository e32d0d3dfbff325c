"""cluster/slurm.sbatch under SLURM's own daemons: nodes that fail, a warning ahead of the time limit.

pytest tests/slurm --slurm
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cluster import Cluster, slurm_cluster, title
from course_hosts.nodes import Gate, environment
from tests.support.elastic_runs import GATED, ROOT, EventLog, check_samples, difference
from tests.support.elastic_runs import undisturbed as train_undisturbed

SAMPLES, BATCH, EPOCHS = 100, 16, 3
MODEL = (
    f"--samples={SAMPLES} --batch={BATCH} --epochs={EPOCHS} --width=16 --layers=1 --save-every=2"
)


class Job:
    """The batch script as it is printed, but for the GPUs, the model, and a gate for its steps."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.gate = Gate(folder / "gate")
        (folder / "cluster").symlink_to(ROOT / "cluster")
        script = (ROOT / "cluster" / "slurm.sbatch").read_text()
        for old, new in (
            ("--nproc-per-node=gpu", "--nproc-per-node=1"),
            ('cluster/train.py "${training[@]}"', f'{GATED} "${{training[@]}}"'),
        ):
            script = re.sub(rf"(?m)^        {re.escape(old)}( |$)", f"        {new}\\1", script)
        model = f"{MODEL} --log-samples --timeout=60 --grace=5"
        script = re.sub(r"(?s)--data=data/MNIST/raw.*?--bfloat16", model, script)
        script = script.replace("sleep 30", "sleep 1")
        (folder / "slurm.sbatch").write_text(script)
        variables = environment("", "cable0") | {"GATE": str(self.gate.path)}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        exported = ",".join(
            f"{name}={variables[name]}"
            for name in ("GATE", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
        )
        self.id = cluster.run(
            *("sbatch", "--parsable", "--gpus-per-node=0", "--cpus-per-task=2"),
            *(f"--export=ALL,PATH={path},{exported}", "slurm.sbatch"),
            cwd=folder,
        ).strip()
        self.runs = folder / "runs" / "course-train"

    def wait_for_step(self, step: int, world: int) -> None:
        """Waits until a group of this size has done the step."""

        def done() -> bool:
            log = EventLog(self.runs)
            return any(
                log.world(name) == world and log.last_step(name) >= step
                for name in log.incarnations
            )

        self.cluster.wait(done, f"step {step} on {world} nodes\n{self.log()}")

    def shorten(self) -> None:
        """Sets a time limit that is nearer than the 180 s of --signal=USR1@180."""
        words = self.cluster.run("squeue", "--noheader", "--jobs", self.id, "--format=%M").strip()
        minutes = int(words.split(":")[-2])  # [hours:]minutes:seconds since it began
        self.cluster.run("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes + 3}")

    def finish(self, alone: Path) -> None:
        """Opens the gate and waits for the end, which is that of a run that nobody disturbed."""
        self.gate.open()
        self.cluster.wait(
            lambda: self.cluster.state_of(self.id) not in ("RUNNING", "PENDING", "COMPLETING"),
            "the end of the job",
        )
        assert self.cluster.state_of(self.id) == "COMPLETED", self.log()
        check_samples(self.runs, SAMPLES, BATCH, EPOCHS)
        assert difference(alone, self.runs) <= 1e-5

    def log(self) -> str:
        logs = self.folder.glob("course-train-*.log")
        return "\n".join(log.read_text()[-5000:] for log in logs)


@pytest.fixture(scope="module")
def cluster(asked_for, tmp_path_factory):
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=3) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(asked_for, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    train_undisturbed(folder, MODEL.split())
    return folder


@pytest.fixture
def job(cluster, tmp_path):
    for node, state in cluster.states().items():
        if state.startswith("down"):
            cluster.start_node(node)
    cluster.wait(lambda: set(cluster.states().values()) == {"idle"}, "idle nodes")
    job = Job(cluster, tmp_path)
    yield job
    subprocess.run(cluster._inside(("scancel", job.id)), env=cluster._environment, check=False)


def test_a_job_goes_on_without_a_node_that_fails_and_each_agent_has_its_cores(job, undisturbed):
    job.gate.open_to(5)
    job.wait_for_step(5, world=2)
    agents = [p for p in job.cluster.processes() if "cluster/agent.py" in title(p).split()[1:2]]
    cores = {len(agent.cpu_affinity()) for agent in agents}
    assert cores == {min(2, psutil.cpu_count())}  # srun does not take --cpus-per-task over
    job.cluster.kill_node("n2")
    job.gate.open_to(9)
    job.wait_for_step(9, world=1)
    job.finish(undisturbed)


def test_a_job_that_loses_its_first_node_is_run_again_on_others(job, undisturbed):
    job.gate.open_to(5)
    job.wait_for_step(5, world=2)
    job.cluster.kill_node("n1")
    job.finish(undisturbed)
    assert len(EventLog(job.runs).incarnations) == 2


def test_a_job_that_nears_its_time_limit_is_warned_saves_and_goes_back_to_the_queue(
    job, undisturbed
):
    job.gate.open_to(5)
    job.wait_for_step(5, world=2)
    job.shorten()
    job.cluster.wait(lambda: len(list(job.folder.glob("told-*"))) == 2, "the warning")
    job.finish(undisturbed)
    log = EventLog(job.runs)
    first, second = sorted(log.incarnations)
    (left,) = {event["step"] for event in log.of(first, "left")}
    assert {event["step"] for event in log.of(second, "resume")} == {left}
