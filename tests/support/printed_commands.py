"""The commands that the pages print and the launch files start, and runs of them that tests disturb.

with PrintedRun(shlex.split(commands("docs/hosts.md")[0]), folder, options) as run:
    run.start_agent("a")          # and so on, as in elastic_runs.py
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from course_hosts.nodes import environment
from tests.support.elastic_runs import GATED, ROOT, ElasticRun, Host
from tests.support.ports import free_ports

TIMEOUT = 600  # seconds; train.py's own, which the printed commands do not change
PRINT_WORDS = r'printf "%s\n" "$@"'  # what stands for srun prints its words, each on a line


def commands(page: str) -> list[str]:
    """The lines of a page that start torchrun with a script, joined where they go on."""
    text = (ROOT / page).read_text(encoding="utf-8")
    text = re.sub(r"\\\n#? *", "", text)  # also in the comments of a chapter
    lines = [line.lstrip("# ").strip() for line in text.splitlines()]
    found = [line for line in lines if re.match(r"(\S+=\S+ )?(\S+/)?torchrun --", line)]
    return [line for line in found if line.endswith(".py") or ".py " in line]


# --- the batch script, with stand-ins for SLURM's commands ----------------------------------------


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Returns an environment in which these programs come first; each is a line of bash."""
    for name, line in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{line}\n")
        (folder / name).chmod(0o755)
    return os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}


def fewest_nodes(line: str) -> str:
    """What stands for python: the line of bash where train.py is asked for the fewest nodes."""
    asked = '"${1##*/}" = train.py && "$*" = *"--smallest-nodes=8 --gpu-memory=80"'
    return f"if [[ {asked} ]]; then {line}; else {PRINT_WORDS}; fi"


def run_slurm(
    folder: Path,
    srun: str,
    live: str = "n[3-4]",
    fewest: str = "echo 1",
    requeue: str = "echo requeued",
) -> subprocess.CompletedProcess:
    """Runs cluster/slurm.sbatch in `folder`, as on the first of the nodes n3 and n4, of which `live` live.

    `srun`, `fewest` and `requeue` are lines of bash; the second stands for train.py, asked for the
    fewest nodes.
    """
    variables = programs(
        folder,
        squeue=f'[[ "$*" = *"--jobs 1234567"* ]] && echo "{live}"',
        scontrol=(
            'case "$*" in "show hostnames n[3-4]") printf "n3\\nn4\\n";; '
            f'"show hostnames n4") echo n4;; "requeue 1234567") {requeue};; *) exit 1;; esac'
        ),
        sleep=":",
        srun=srun,
        python=fewest_nodes(fewest),
    )
    variables |= {
        "SLURM_JOB_NODELIST": "n[3-4]",  # as it was when the job began
        "SLURM_CPUS_PER_TASK": "32",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NAME": "course-train",
    }
    command = ["bash", str(ROOT / "cluster" / "slurm.sbatch")]
    return subprocess.run(
        command, env=variables, check=False, capture_output=True, text=True, cwd=folder
    )


def slurm_command(folder: Path) -> list[str]:
    """What the batch script starts on each of two nodes: the variable, the agent and its options."""
    variables = r'echo "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=$TORCH_DISABLE_SHARE_RDZV_TCP_STORE"'
    ended = run_slurm(folder, f"{variables}; {PRINT_WORDS}")
    assert ended.returncode == 0, ended.stderr
    words = ended.stdout.splitlines()[:-1]  # the last says how the attempt has ended
    return [words[0], *words[words.index("python") :]]


# --- runs -----------------------------------------------------------------------------------------


class PrintedRun(ElasticRun):
    """Agents that are started by a command as it is printed, with its environment and its options.

    What differs: all are on this machine, `workers` each, and the rendezvous takes a free port; the
    folder is `folder`; the model is that of `options`, in float32, and its steps wait for a gate.
    """

    def __init__(
        self,
        command: list[str],
        folder: Path,
        options: list[str],
        workers: int = 2,
        supervised: bool = False,
    ) -> None:
        super().__init__(folder, options, nodes="1", supervised=supervised)
        # who waits for a rank that died before they were connected does so until the time is up
        self.patience += TIMEOUT
        start = next(number for number, word in enumerate(command) if "=" not in word)
        script = next(number for number, word in enumerate(command) if word.endswith("/train.py"))
        agent, training = command[start:script], command[script + 1 :]
        self._variables = dict(word.split("=", 1) for word in command[:start])
        if agent[0].endswith("torchrun"):
            agent[:1] = ["-m", "torch.distributed.run"]
        else:
            assert agent[0] == "python"
            del agent[0]
        self._command = [
            *(sys.executable, *_changed(agent, "--rdzv-endpoint", self._endpoint)),
            *("--nproc-per-node", str(workers), "--local-addr", Host.address, str(GATED)),
            *[word for word in training if word != "--bfloat16"],
            *("--checkpoints", str(folder), "--grace", "5", "--log-samples", *options),
        ]

    def _find_store(self) -> str:
        """The store lives in an agent, as it does where the command is printed."""
        return f"{Host.address}:{free_ports(1)[0]}"

    def start_agent(self, name: str) -> None:
        variables = environment(self.id, Host.interface)
        del variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]  # if it is printed, it is there
        self._start(name, self._command, variables | self._variables)


def _changed(words: list[str], option: str, value: str) -> list[str]:
    """The words with another value of an option that is among them."""
    text = re.sub(f"{option}[= ]\\S+", f"{option}={value}", " ".join(words))
    assert value in text, f"no {option} in {text}"
    return text.split()
