"""The files that start cluster/train.py on SLURM and Kubernetes: read as their programs read them."""

import argparse
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import torch.distributed.run as torchrun
import yaml

from tests.support.elastic_runs import TRAIN
from tests.support.printed_commands import PRINT_WORDS, fewest_nodes, programs, run_slurm

CLUSTER = TRAIN.parent
sys.path.insert(0, str(CLUSTER))
import group
import train


def check_torchrun(words: list[str]) -> argparse.Namespace:
    """Reads a command as torchrun and then train.py do; both must know each option."""
    assert words[0] == "python" and words[1].endswith("/agent.py")
    agent = torchrun.parse_args(words[2:])
    assert agent.training_script.endswith("train.py")
    script = train.parse(agent.training_script_args)
    assert script.epochs == 10 and script.batch == 1024 and script.bfloat16
    return agent


@pytest.mark.parametrize(("live", "first", "number"), [("n[3-4]", "n3", 2), ("n4", "n4", 1)])
def test_slurm_starts_one_agent_on_each_node_that_lives(tmp_path, live, first, number):
    ended = run_slurm(tmp_path, PRINT_WORDS, live)
    assert ended.returncode == 0, ended.stderr
    words = ended.stdout.splitlines()[:-1]  # the last says how the attempt has ended
    srun, command = words[: words.index("python")], words[words.index("python") :]
    assert srun == [
        *("--overlap", "--no-kill", "--kill-on-bad-exit=0", "--cpus-per-task=32"),
        *(f"--nodelist={live}", f"--nodes={number}", f"--ntasks={number}"),
    ]
    agent = check_torchrun(command)
    assert torchrun.parse_min_max_nnodes(agent.nnodes) == (1, number)
    assert agent.rdzv_endpoint == f"{first}:24567" and agent.rdzv_backend == "c10d"
    assert agent.rdzv_id == "1234567-0-1"


ENDS_OF_SRUN = {
    0: (1, False, 0),
    78: (1, False, 78),  # exit code: attempts, requeued, exit code of the script
    2: (1, False, 2),
    203: (1, True, 0),
    129: (5, True, 0),
    137: (5, True, 0),  # killed: a node has failed
}


@pytest.mark.parametrize("code", ENDS_OF_SRUN)
def test_slurm_starts_again_only_where_it_may_help(tmp_path, code):
    attempts, requeued, status = ENDS_OF_SRUN[code]
    ended = run_slurm(tmp_path, srun=f"exit {code}")
    lines = [f"attempt {n + 1} of start 0 has ended with {code}" for n in range(attempts)]
    assert ended.stdout.splitlines() == lines + ["requeued"] * requeued
    assert ended.returncode == status


def test_slurm_tries_again_where_srun_itself_has_failed(tmp_path):
    ended = run_slurm(tmp_path, srun="exit ${SLURM_EXIT_ERROR:-1}")
    assert ended.stdout.splitlines()[4:] == ["attempt 5 of start 0 has ended with 129", "requeued"]


def test_slurm_asks_again_for_a_requeue_until_the_controller_answers(tmp_path):
    refuses = f"[ -e {tmp_path}/asked ] && echo requeued || {{ touch {tmp_path}/asked; exit 1; }}"
    ended = run_slurm(tmp_path, srun="exit 203", requeue=refuses)
    assert (ended.returncode, ended.stdout.splitlines()[1:]) == (0, ["requeued"])


def test_slurm_stops_where_one_node_has_said_so_and_another_has_lost_it(tmp_path):
    (tmp_path / "runs" / "course-train").mkdir(parents=True)
    stopped = tmp_path / "runs" / "course-train" / "stopped.json"
    ended = run_slurm(tmp_path, srun=f"echo {{}} > {stopped}; exit 129")
    assert ended.stdout.splitlines() == ["attempt 1 of start 0 has ended with 129"]
    assert ended.returncode == 78
    assert run_slurm(tmp_path, srun="exit 203").returncode == 0  # of a job before this one


def test_slurm_begins_again_under_another_id_when_all_agents_have_given_up(tmp_path):
    ended = run_slurm(tmp_path, srun='[[ "$*" = *rdzv-id=1234567-0-3* ]] || exit 129')
    assert ended.returncode == 0
    assert "attempt 3 of start 0 has ended with 0" in ended.stdout


def test_slurm_waits_for_other_nodes_where_the_model_needs_more_than_live(tmp_path):
    ended = run_slurm(tmp_path, PRINT_WORDS, live="n4", fewest="echo 2")
    assert ended.stdout == "1 nodes live, and the model needs 2\nrequeued\n"


def test_slurm_puts_the_job_back_when_its_first_node_has_left_it(tmp_path):
    """The other nodes do, since the script was on that one; what they run is taken from srun."""
    watch = tmp_path / "watch"
    srun = (
        f'if [[ "$*" = *" bash -c "* ]]; then printf "%s" "${{@: -1}}" > {watch}.partial; '
        f"mv {watch}.partial {watch}; else until [ -e {watch} ]; do sleep 0.01; done; fi"
    )
    assert run_slurm(tmp_path, srun).returncode == 0
    (tmp_path / "answers").write_text("n[3-4]\n\nn[3-4]\nn4\nn4\n")  # the second: no answer
    asked = f"tee -a {tmp_path}/asked"
    variables = programs(
        tmp_path,
        squeue=f"sed --in-place -e '1w /dev/stdout' -e 1d {tmp_path}/answers | {asked}",
        scontrol=(
            'case "$*" in "show hostnames n[3-4]") printf "n3\\nn4\\n";; '
            '"show hostnames n4") echo n4;; "show hostnames ") ;; '
            f'"requeue 1234567") echo requeue | {asked}; [ -e {tmp_path}/refused ] || '
            f"{{ touch {tmp_path}/refused; exit 1; }};; esac"
        ),
        sleep=f"[ -s {tmp_path}/answers ] || kill $PPID",
    )
    command = ["bash", "-c", watch.read_text()]
    subprocess.run(command, env=variables | {"SLURM_JOB_ID": "1234567"}, check=True)
    asked = (tmp_path / "asked").read_text().split()
    assert asked == ["n[3-4]", "n[3-4]", "n4", "requeue", "n4", "requeue"]


def test_slurm_takes_another_number_of_nodes_from_those_who_know_better(tmp_path, monkeypatch):
    monkeypatch.setenv("FEWEST_NODES", "2")
    ended = run_slurm(tmp_path, PRINT_WORDS, fewest="exit 78")
    assert "--nnodes=2:2" in ended.stdout.splitlines()


def test_slurm_does_not_begin_where_the_model_fits_on_no_number_of_its_nodes(tmp_path):
    ended = run_slurm(tmp_path, PRINT_WORDS, fewest="echo 3")
    assert ended.returncode == group.STOP
    assert ended.stdout == (
        "the job has 2 nodes, and the model needs 3: ask for more with --nodes\n"
    )
    ended = run_slurm(tmp_path, PRINT_WORDS, fewest=f"exit {group.STOP}")
    assert (ended.returncode, ended.stdout) == (group.STOP, "")


def run_pod(folder: Path, container: dict, fewest: str) -> subprocess.CompletedProcess:
    """What a container's command starts, a word on each line; `fewest` as in run_slurm."""
    variables = programs(folder, python=fewest_nodes(fewest)) | {"JOB_COMPLETION_INDEX": "0"}
    return subprocess.run(
        container["command"], env=variables, check=False, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", ["pytorchjob", "jobset"])
def test_pods_ask_for_as_many_nodes_as_the_model_needs(tmp_path, name):
    container = pod_of(name)["containers"][0]
    ended = run_pod(tmp_path, container, "echo 2")
    assert "--nnodes=2:2" in ended.stdout.splitlines()
    ended = run_pod(tmp_path, container, f"exit {group.STOP}")
    assert (ended.returncode, ended.stdout) == (group.STOP, "")


def pod_of(name: str) -> dict:
    spec = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())["spec"]
    if name == "pytorchjob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_options_for_sbatch_come_before_the_first_command():
    lines = (CLUSTER / "slurm.sbatch").read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(i < first for i, line in enumerate(lines) if line.startswith("#SBATCH"))
    # one agent on each node, and what a failed node and a time limit that nears need
    for option in ("ntasks-per-node=1", "no-kill", "requeue", "open-mode=append"):
        assert f"#SBATCH --{option}" in lines
    signals = [line for line in lines if line.startswith("#SBATCH --signal=")]
    assert signals == ["#SBATCH --signal=USR1@180"]  # to the steps; B: would be the script alone


def run_engines(folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """cluster/engines.sbatch, where srun prints what it is to run."""
    environment = programs(folder, srun=PRINT_WORDS) | {"SLURM_CPUS_PER_TASK": "32"}
    return subprocess.run(
        ["bash", CLUSTER / "engines.sbatch"],
        env=environment | {"HOME": str(folder)} | variables,
        check=False,
        capture_output=True,
        text=True,
    )


def test_engines_start_one_a_node():
    lines = (CLUSTER / "engines.sbatch").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines.index("#SBATCH --ntasks-per-node=1") < first


@pytest.mark.parametrize("own", [False, True])
def test_the_engines_get_the_file_with_the_keys(tmp_path, own):
    usual = tmp_path / ".ipython/profile_default/security/ipcontroller-engine.json"
    file = tmp_path / "own.json" if own else usual
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    words = run_engines(tmp_path, **({"ENGINE_FILE": str(file)} if own else {})).stdout.splitlines()
    assert words[-4:] == ["python", "-m", "ipyparallel.engine", f"--file={file}"]
    assert "--cpus-per-task=32" in words


def test_engines_without_keys_do_not_start(tmp_path):
    ended = run_engines(tmp_path)
    assert ended.returncode == 78
    assert "ipcontroller-engine.json is not there: start ipcontroller first" in ended.stdout


def test_the_pytorchjob_has_the_form_that_its_operator_reads(tmp_path):
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert set(spec) == {"nprocPerNode", "elasticPolicy", "pytorchReplicaSpecs"}
    assert set(spec["elasticPolicy"]) == {
        "rdzvBackend",
        "minReplicas",
        "maxReplicas",
        "maxRestarts",
    }
    worker = spec["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == spec["elasticPolicy"]["maxReplicas"]
    assert worker["restartPolicy"] == "ExitCode"  # from 128 on it starts the pod again
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    words = run_pod(tmp_path, container, "echo 1").stdout.splitlines()
    assert check_torchrun(["python", *words]).nnodes == f"1:{worker['replicas']}"
    check_volumes(worker["template"]["spec"])


@pytest.mark.parametrize("pod", [0, 1])
def test_the_jobset_has_the_form_that_its_controller_reads(tmp_path, pod):
    jobset = yaml.safe_load((CLUSTER / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(jobset["spec"]) == {"failurePolicy", "replicatedJobs"}
    (job,) = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    assert template["completionMode"] == "Indexed"
    final = template["podFailurePolicy"]["rules"][0]
    assert final["onExitCodes"]["values"] == [group.WRONG_OPTIONS, group.STOP]
    assert (
        final["onExitCodes"]["containerName"]
        == template["template"]["spec"]["containers"][0]["name"]
    )
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    (container,) = template["template"]["spec"]["containers"]
    environment = programs(tmp_path, python=fewest_nodes("echo 1"))
    environment |= {"JOB_COMPLETION_INDEX": str(pod)}
    words = subprocess.run(
        container["command"], env=environment, check=True, capture_output=True, text=True
    )
    agent = check_torchrun(["python", *words.stdout.splitlines()])
    assert torchrun.parse_min_max_nnodes(agent.nnodes)[1] == template["parallelism"]
    name = jobset["metadata"]["name"]
    assert agent.rdzv_endpoint == f"{name}-{job['name']}-0-0.{name}:29400"
    assert agent.rdzv_conf == f"is_host={int(pod == 0)}"
    check_volumes(template["template"]["spec"])


@pytest.mark.parametrize("name", ["pytorchjob", "jobset"])
def test_pods_and_jobs_fit_the_schema_that_kubernetes_publishes(name):
    whole = yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())
    if name == "jobset":
        (job,) = whole["spec"]["replicatedJobs"]
        resource = {"apiVersion": "batch/v1", "kind": "Job", "spec": job["template"]["spec"]}
    else:
        pod = whole["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
        resource = {"apiVersion": "v1", "kind": "Pod", "spec": pod["spec"]}
    kubernetes_validate.validate(resource, "1.31", strict=True)
    container = resource["spec"].get("template", resource)["spec"]["containers"][0]
    container["imagePolicy"] = "Always"  # no field of theirs
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, "1.31", strict=True)


def test_the_pods_get_all_files_of_the_folder():
    for name in ("pytorchjob", "jobset"):
        text = (CLUSTER / f"{name}.yaml").read_text()
        assert "--from-file=cluster\n" in text


def check_volumes(pod: dict) -> None:
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
