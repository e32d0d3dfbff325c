"""`python -m course_utils run`: a stranger's script runs as under torchrun, and is explained."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from course_run import command
from course_utils.lesson.terminal import torchrun
from tests.support.ports import free_ports

RANKS = 2
HELPERS = {
    "lib/__init__.py": "from .inner import NAME\n",
    "lib/inner.py": "NAME = 'inner'\n",
    "lib/main.py": "import sys\nfrom .inner import NAME\nprint(__name__, NAME, sys.argv[1:], sys.path[0])\n",
    "lib/step.py": "import torch.distributed as dist\n\ndef total(x):\n    dist.all_reduce(x)\n    return x\n",
}
DRIVER = """
import json, os, subprocess, sys
from pathlib import Path
folder, commands, ports = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
for number, command in enumerate(commands):
    own = {"MASTER_PORT": str(ports[number]), "TORCHELASTIC_USE_AGENT_STORE": "False"}  # a store for each
    done = subprocess.run(
        [sys.executable, "-u", *command], env=os.environ | own, stdin=subprocess.DEVNULL,
        capture_output=True, text=True,
    )
    told = [done.returncode, done.stdout, done.stderr]
    (folder / f"{number}-{os.environ['RANK']}.json").write_text(json.dumps(told))
"""
SCRIPTS = {
    "plain": """
        import os, sys
        print(__name__, os.path.basename(__file__), __package__, __spec__, sys.argv, sys.path[0])
        print(sys.stdin.read() == "", os.getcwd(), __doc__)
    """,
    "variables": """
        import os
        names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "MASTER_ADDR",
                 "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS",
                 "OMP_NUM_THREADS"]
        print({name: os.environ[name] for name in names})
        print(int(os.environ["MASTER_PORT"]) > 0, "TORCHELASTIC_RUN_ID" in os.environ)
    """,
    "package": """
        from lib import NAME
        import lib.inner as inner
        print(NAME, inner.__name__)
    """,
    "arguments": """
        import argparse, sys
        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--lr", type=float)
            parser.add_argument("words", nargs="*")
            print(parser.parse_args())
            return 0
        if __name__ == "__main__":
            sys.exit(main())
    """,
    "ends": """
        import atexit, os, threading, time
        from concurrent.futures import ThreadPoolExecutor
        atexit.register(print, "at exit")
        pool = ThreadPoolExecutor(1)
        pool.submit(print, "in a pool").result()
        threading.Thread(target=lambda: (time.sleep(0.3), print("late"))).start()
        print("end")
    """,
    "processes": """
        import multiprocessing as mp
        class Thing:
            pass
        def work(number, things):
            things.put((number, type(things.get()).__module__, __name__))
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                context = mp.get_context(method)
                things = context.Queue()
                things.put(Thing())
                child = context.Process(target=work, args=(3, things))
                child.start()
                child.join()
                print(things.get(), child.exitcode)
    """,
    "much": """
        import os
        for number in range(5_000):
            print(number, "of", os.environ["RANK"], 30 * "x")
    """,
    "no_world": """
        import torch, torch.distributed as dist
        print(dist.is_initialized(), dist.is_torchelastic_launched(), torch.get_num_threads())
    """,
    "training": """
        import os, sys, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, TensorDataset
        from lib.step import total
        def main():
            rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=ranks)
            torch.manual_seed(1)
            data = TensorDataset(torch.arange(16.0).reshape(8, 2))
            model = DistributedDataParallel(torch.nn.Linear(2, 1))
            for (x,) in DataLoader(data, batch_size=4, num_workers=1):
                model(x + rank).sum().backward()
            print(round(total(model.module.weight.grad.sum()).item(), 3), dist.get_backend())
            if rank == 0:
                torch.save(model.module.state_dict(), sys.argv[1] + ".pt")
            dist.destroy_process_group()
        if __name__ == "__main__":
            main()
    """,
    "mesh": """
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from lib.step import total
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        print(total(torch.ones(2)).tolist(), mesh["tp"].get_local_rank())
    """,
}
COMMANDS = {name: [f"{name}.py"] for name in SCRIPTS} | {
    "arguments": ["arguments.py", "--lr", "0.1", "a", "-5"],
    "training": ["training.py", "{}"],
    "module": ["-m", "lib.main", "-x"],
}


def text(script: str) -> str:
    first, *lines = script.strip("\n").splitlines()
    indent = len(first) - len(first.lstrip())
    return "\n".join(line[indent:] for line in [first, *lines]) + "\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger")
    for name, content in HELPERS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    for name, script in SCRIPTS.items():
        (folder / f"{name}.py").write_text(text(script))
    return folder


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.fixture(scope="module")
def under_torchrun(folder):
    """The exit code and the output of each command on each rank: one agent runs them all in turn."""
    (folder / "driver.py").write_text(DRIVER)
    commands = [[word.format("torchrun") for word in words] for words in COMMANDS.values()]
    before = os.getcwd()
    os.chdir(folder)
    try:
        ports = json.dumps(free_ports(len(commands)))
        said = torchrun(RANKS, folder / "driver.py", folder, json.dumps(commands), ports)
    finally:
        os.chdir(before)
    files = [[folder / f"{n}-{rank}.json" for rank in range(RANKS)] for n in range(len(commands))]
    assert all(each.exists() for ranks in files for each in ranks), said
    return dict(
        zip(COMMANDS, [[json.loads(each.read_text()) for each in ranks] for ranks in files])
    )


def by_rank(output: str, ranks: int = RANKS) -> list[list[str]]:
    marked = [f"[rank {rank}] " for rank in range(ranks)]
    return [
        [line.removeprefix(mark) for line in output.splitlines() if line.startswith(mark)]
        for mark in marked
    ]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_runs_as_under_torchrun(name, under_torchrun, capsys, folder):
    first, *words = [word.format("run") for word in COMMANDS[name]]
    module = first == "-m"
    given = words if module else [first, *words]
    code = command.run(RANKS, given, module)
    told = capsys.readouterr()
    assert told.err == ""
    theirs = under_torchrun[name]
    assert [code] * RANKS == [code for code, _, _ in theirs], theirs
    assert by_rank(told.out) == [output.splitlines() for _, output, _ in theirs]
    assert len(told.out.splitlines()) == sum(map(len, by_rank(told.out)))
    if name == "training":
        assert Path("run.pt").read_bytes() and Path("torchrun.pt").exists()


BROKEN = """
import os, signal, sys, time
import torch, torch.distributed as dist
from lib.step import total
what, guilty = sys.argv[1], int(sys.argv[2])
me = int(os.environ["RANK"]) == guilty
if not (me and what == "no world"):
    dist.init_process_group()
    total(torch.ones(3))
    if me and what == "raises":
        raise ValueError("mine")
    if me and what == "exits":
        sys.exit(3)
    if me and what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if me and what == "other":
        total(torch.ones(4))
    elif not (me and what in ("skips", "leaves")):
        total(torch.ones(3))
    if what != "skips":
        dist.destroy_process_group()
"""
SAID = {
    "skips": (
        "  ranks {0} and {1} wait in all_reduce\n    step.py, line 4, in total:  dist.all_reduce(x)",
        "  rank {guilty} finished without calling it",
    ),
    "leaves": (
        "rank {guilty} called destroy_process_group while other ranks still communicated.",
        "    broken.py, line 20, in <module>:  dist.destroy_process_group()",
        "Meanwhile ranks {0} and {1} were waiting in all_reduce (step.py, line 4).",
    ),
    "no world": (
        "  ranks {0} and {1} wait in init_process_group",
        "    broken.py, line 7, in <module>:  dist.init_process_group()",
        "  rank {guilty} finished without calling it",
    ),
    "raises": (
        "rank {guilty} raised ValueError: mine",
        '    broken.py, line 10, in <module>:  raise ValueError("mine")',
        "Meanwhile ranks {0} and {1} were waiting in all_reduce (step.py, line 4).",
    ),
    "exits": (
        "rank {guilty} called sys.exit(3) before it returned.",
        "    broken.py, line 12, in <module>:  sys.exit(3)",
    ),
    "killed": ("rank {guilty} was killed by SIGKILL", "the system does this when memory runs out"),
    "other": (
        "the ranks' calls do not match.",
        "  rank {guilty}: all_reduce of float32 [4]",
        "    step.py, line 4, in total:  dist.all_reduce(x)",
    ),
}


@pytest.mark.parametrize("guilty", [0, 1, 2])
@pytest.mark.parametrize("what", SAID)
def test_what_is_broken_is_explained(what, guilty, folder, capsys):
    (folder / "broken.py").write_text(BROKEN.lstrip())
    assert command.run(3, ["broken.py", what, str(guilty)]) == 1
    told = capsys.readouterr().err
    others = [str(rank) for rank in range(3) if rank != guilty]
    for words in SAID[what]:
        assert words.format(*others, guilty=guilty).strip() in told, told
    assert "course_utils" not in told and "runpy" not in told, told
    assert told.count("Traceback") == (what == "raises"), told


def test_nccl_without_a_gpu_is_refused_with_advice(folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (folder / "nccl.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group('nccl')\n"
    )
    assert command.run(2, ["nccl.py"]) == 1
    told = capsys.readouterr().err
    assert "raised ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!" in told
    assert "Without a backend, init_process_group() takes the one that fits" in told


def test_an_attempt_may_fail_and_another_go_well(folder, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (folder / "again.py").write_text(
        "import torch, torch.distributed as dist\n"
        "try:\n    dist.init_process_group('nccl')\n"
        "except ValueError:\n    dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\ndist.all_reduce(total)\nprint(total.item())\n"
    )
    assert command.run(2, ["again.py"]) == 0
    assert by_rank(capsys.readouterr().out) == [["2.0"]] * 2


def run_in_a_terminal(folder, *words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "course_utils", "run", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def test_ctrl_c_ends_all_with_two_lines(folder):
    (folder / "long.py").write_text("import os, time\nprint(os.getpid())\ntime.sleep(1000)\n")
    with run_in_a_terminal(folder, "-n", "2", "long.py") as program:
        # live: each line comes while the ranks sleep
        ranks = [int(program.stdout.readline().split()[-1]) for _ in range(2)]
        program.send_signal(signal.SIGINT)
        rest, errors = program.communicate()
    assert (program.returncode, rest) == (130, "")
    assert errors == "\nrun was interrupted, and its ranks have ended.\n"
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_a_failure_is_on_stderr_and_in_the_exit_code(folder):
    (folder / "options.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr')\nparser.parse_args()\n"
    )
    with run_in_a_terminal(folder, "-n", "2", "options.py", "--rl", "1") as program:
        told, errors = program.communicate()
    assert program.returncode == 1
    for printed in by_rank(told):
        assert printed[-1] == "options.py: error: unrecognized arguments: --rl 1"
    assert errors.startswith(
        "rank 0 called sys.exit(2) before it returned.\n    options.py, line 4"
    )


@pytest.mark.parametrize(
    ("n", "script", "said"),
    [
        (2, "absent.py", "there is no file absent.py in"),
        (0, "plain.py", "the number of ranks, from 1 to 64"),
    ],
)
def test_what_cannot_run_is_told(n, script, said):
    with pytest.raises((ValueError, OSError), match=said):
        command.run(n, [script])


def test_output_is_not_kept(folder, capsys):
    from course_utils.launch.ranks.output import Output

    output = Output(1, str(folder), live=False)
    output.flow()
    for _ in range(50):
        output.add(100_000 * b"x" + b"\n")
    for step in range(1000):
        output.add(f"\r{step} of 1000".encode())
    assert len(capsys.readouterr().out) > 5_000_000
    assert len(output._start + output._end) == len("999 of 1000")
    output.add(b"\rdone\n")
    assert capsys.readouterr().out == "[rank 1] done\n"
