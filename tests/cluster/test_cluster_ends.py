"""How a run of cluster/train.py ends: exit codes, errors that repeat, signals, devices, the check."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import run as torchrun

from course_hosts.nodes import Gate, environment
from tests.support.elastic_runs import GATED, ROOT, TRAIN, EventLog, Host
from tests.support.ports import free_ports

sys.path.insert(0, str(TRAIN.parent))
import agent
import check
import checkpoints
import group
import train

OPTIONS = "--samples 100 --batch 16 --epochs 2 --width 8 --layers 1 --save-every 4 --log-samples"
STEPS = 14
AGENT = TRAIN.parent / "agent.py"


def test_under_slurm_the_node_of_the_endpoint_hosts_the_store():
    """Whatever its machine is called; said first, so that somebody's own --rdzv-conf counts."""
    given = ["--rdzv-backend=c10d", "--rdzv-endpoint=node1:29400", "train.py"]
    assert agent.meeting(given, "node1") == ["--rdzv-conf=is_host=true"]
    assert agent.meeting(given, "node10") == ["--rdzv-conf=is_host=false"]
    assert agent.meeting(given, None) == agent.meeting(["train.py"], "node1") == []
    options = torchrun.parse_args([*agent.meeting(given, "node1"), *given])
    assert torchrun.config_from_args(options)[0].rdzv_configs["is_host"] == "true"


# --- under the agent ------------------------------------------------------------------------------


class AgentRun:
    """Starts of agent.py with two workers on one folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.gate = Gate(folder / "gate")

    def start(self, options: str = "", script: Path = GATED) -> psutil.Popen:
        meeting = "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1"
        command = [
            *(sys.executable, str(AGENT), *meeting.split(), "--nproc-per-node", "2"),
            *("--max-restarts", "100", str(script), "--checkpoints", str(self.folder)),
            *OPTIONS.split(),
            *options.split(),
        ]
        variables = environment("", Host().interface) | {"GATE": str(self.gate.path)}
        with (self.folder / "log").open("ab") as log:
            return psutil.Popen(command, env=variables, stdout=log, stderr=log, cwd=ROOT)

    def wait_for_steps(self, agent: psutil.Popen, step: int) -> None:
        """Waits until both ranks of the newest start have done `step`."""

        def done() -> bool:
            log = EventLog(self.folder)
            newest = max(log.incarnations, default=None)
            return newest is not None and len(log.ranks_of(newest, step)) == 2

        self.wait(agent, done)

    def wait(self, agent: psutil.Popen, condition: Callable[[], bool]) -> None:
        while not condition():
            assert agent.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)

    def leave(self, step: int, signals: dict[str, int]) -> int:
        """Trains to `step`, signals the agent or the workers, lets them go on; the exit code."""
        agent = self.start()
        try:
            self.gate.open_to(step)
            self.wait_for_steps(agent, step)
            workers = agent.children()
            for who, number in signals.items():
                for process in [agent] if who == "agent" else workers:
                    process.send_signal(number)
            for worker in workers:
                self.wait(agent, (self.folder / f"told-{worker.pid}").exists)
            self.gate.open()
            return agent.wait()
        finally:
            self.gate.open_to(0)
            if agent.poll() is None:
                agent.kill()

    def starts(self) -> int:
        return len(EventLog(self.folder).incarnations)


TOLD_AS_IT_STARTS = f"""
import os, signal, sys, time
sys.path.insert(0, {str(TRAIN.parent)!r})
import group

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":  # as SLURM does, to all processes of the job
    os.kill(os.getppid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1000)
leaving = group.Leaving()
leaving.listen(20)
print("told", leaving.signalled[signal.SIGUSR1])
"""


def test_who_was_told_while_it_started_is_told_again(tmp_path):
    (tmp_path / "late.py").write_text(TOLD_AS_IT_STARTS)
    options = ["--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    ran = subprocess.run(
        [sys.executable, agent.__file__, *options, tmp_path / "late.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ran.stdout, ran.returncode) == ("told True\n", 0), ran.stderr


def test_told_to_leave_it_saves_and_says_start_again_and_an_error_that_repeats_says_do_not(
    tmp_path,
):
    run = AgentRun(tmp_path / "told")
    # as SLURM does ahead of the time limit, and as it or Kubernetes does when it takes a node back
    assert run.leave(5, {"agent": signal.SIGUSR1, "workers": signal.SIGUSR1}) == group.AGAIN
    assert run.leave(9, {"agent": signal.SIGTERM}) == group.AGAIN
    log = EventLog(run.folder)
    names = sorted(log.incarnations)
    left = [log.of(name, "left")[0]["step"] for name in names]
    assert left == [6, 10]  # neither is a multiple of 4
    assert log.of(names[1], "resume")[0]["step"] == 6  # no step was lost
    before = run.starts()
    assert run.start("--seed 1").wait() == group.STOP
    assert run.starts() == before + 1  # one start, not 100
    assert "the order of the samples would change" in (run.folder / "log").read_text()


# --- one process ----------------------------------------------------------------------------------


@pytest.fixture
def agent_signals(monkeypatch, tmp_path) -> list[int]:
    """The process is a worker; returns the signals that its agent got. agent.py waits for a code."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv(group.EXIT_CODE_FILE, str(tmp_path / "code"))
    signals = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    return signals


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_options_end_the_agent_once_with_their_code(agent_signals, tmp_path, ranks):
    for _ in range(ranks):
        with pytest.raises(SystemExit), group.ending_agent_too():
            train.parse(["--checkpoints", "runs", "--bath", "16"])
    assert agent_signals == [(os.getppid(), signal.SIGTERM)]
    assert (tmp_path / "code").read_text() == str(group.WRONG_OPTIONS)


def test_more_nodes_than_there_are_is_a_wrong_option(monkeypatch, capsys):
    monkeypatch.setenv(group.EXIT_CODE_FILE, "")  # agent.py sets it
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["agent.py", "--nnodes=3:2", "--nproc-per-node=1", "train.py"])
    with pytest.raises(SystemExit) as end:
        agent.main()
    assert end.value.code == group.WRONG_OPTIONS
    assert "min_nodes=3, max_nodes=2" in capsys.readouterr().err


@pytest.mark.parametrize("end", [SystemExit(1), group.Left(agent_too=False)])
def test_other_ends_leave_the_agent_to_restart(agent_signals, tmp_path, end):
    with pytest.raises(SystemExit), group.ending_agent_too():
        raise end
    assert agent_signals == [] and not (tmp_path / "code").exists()


LOST = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def end_of_life(folder: Path, name: str, error: Exception, saved: int) -> BaseException:
    life = group.Life(folder, name)
    life.saved = saved
    with pytest.raises(BaseException) as caught, life.watched():
        raise error
    return caught.value


def test_the_second_life_that_ends_alike_with_no_step_gained_is_the_last(alone, tmp_path):
    bug = ValueError("a bug")
    assert end_of_life(tmp_path, "1", bug, saved=4) is bug
    assert end_of_life(tmp_path, "2", bug, saved=6) is bug  # it gained two steps
    other = ValueError("another")
    assert end_of_life(tmp_path, "3", other, saved=6) is other
    assert isinstance(end_of_life(tmp_path, "4", other, saved=6), group.Stop)
    stopped = json.loads((tmp_path / "stopped.json").read_text())
    assert stopped["reason"].endswith("gained no step: ValueError: another")
    group.Life(tmp_path, "5")
    assert not (tmp_path / "stopped.json").exists()  # somebody has started it again on purpose


def test_an_error_before_the_first_step_counts_from_the_newest_checkpoint(alone, tmp_path):
    def tried(name: str) -> BaseException:
        with pytest.raises(BaseException) as caught, group.Life(tmp_path, name).watched():
            raise OSError("Stale file handle")
        return caught.value

    assert isinstance(tried("1"), OSError)
    (tmp_path / "step-00004000-2").mkdir()  # what the lives between have saved
    assert isinstance(tried("6"), OSError)
    assert isinstance(tried("7"), group.Stop)


def test_a_start_makes_room_before_it_writes(alone, tmp_path):
    (tmp_path / "partial-00000004-1").mkdir()
    (tmp_path / "partial-00000004-1" / "__0_0.distcp").touch()
    checkpoints.Checkpoints(tmp_path, "2")
    assert [path.name for path in tmp_path.iterdir()] == ["owner"]


def test_errors_that_differ_in_their_numbers_are_alike(alone, tmp_path):
    def too_large(process: int) -> RuntimeError:
        return RuntimeError(f"CUDA out of memory. Process {process} has {process} MiB in use.")

    end_of_life(tmp_path, "1", too_large(4711), saved=4)
    assert isinstance(end_of_life(tmp_path, "2", too_large(815), saved=4), group.Stop)


def test_ranks_that_were_lost_are_no_error_that_repeats(alone, tmp_path):
    for error in (RuntimeError(LOST), dist.DistNetworkError("a port")):
        for name in "12":
            assert end_of_life(tmp_path, name, error, saved=4) is error


def test_a_rank_that_loses_another_stops_where_that_one_has_stopped(alone, tmp_path):
    life = group.Life(tmp_path, "1")
    life._write("stopped.json", reason="a bug")
    with pytest.raises(group.Stop, match="a bug"), life.watched():
        raise RuntimeError(LOST)


# --- a save in the background ---------------------------------------------------------------------


def test_a_save_in_the_background_returns_before_anything_is_written(alone, tmp_path, monkeypatch):
    trained_on, write_data = threading.Event(), dcp.FileSystemWriter.write_data

    def held(*arguments):
        assert threading.current_thread() is not threading.main_thread(), "the training waits"
        trained_on.wait()
        return write_data(*arguments)

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", held)
    checkpoints = train.Checkpoints(tmp_path, "1", in_background=True)
    value = torch.zeros(2)
    checkpoints.save(1, {"value": value}, {})
    assert not checkpoints.is_written()
    value += 1
    trained_on.set()
    assert checkpoints.finish() == 1
    folder, _ = checkpoints.newest_good()
    dcp.load(found := {"value": torch.ones(2)}, checkpoint_id=folder)
    assert found["value"].tolist() == [0, 0]


# --- devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "world", "gpus", "device", "words"),
    [
        (1, 2, 1, "cpu", "2 ranks and 1 GPU on this host: all ranks on the CPU"),
        (0, 1, 1, "cuda:0", "a GPU for each of 1 ranks"),
        (1, 2, 8, "cuda:1", "a GPU for each of 2 ranks"),
        (0, 1, 0, "cpu", "1 rank and no GPU on this host: all ranks on the CPU"),
    ],
)
def test_each_rank_of_a_host_has_a_gpu_or_none_has(rank, world, gpus, device, words):
    assert group.choose_device(rank, world, gpus) == (torch.device(device), words)


def test_a_rank_on_the_cpu_of_a_host_with_gpus_leaves_them_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("a GPU was asked"))
    states = train.random_states(torch.device("cpu"))
    assert set(states) == {"cpu", "python"}


def test_who_waits_for_a_rank_that_has_gone_gives_up_in_time():
    """PyTorch, which tries twice and each time for the whole timeout, is here one that never returns."""
    program = (
        "import time, group; group.dist.init_process_group = lambda *_, **__: time.sleep(1e6)\n"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", f"{program}group.start_group(1)"],
        cwd=ROOT / "cluster",
        env=os.environ | {"RANK": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    said = rank.communicate(timeout=120)[1]
    assert rank.returncode == 1
    assert said.endswith("the other ranks were not there within 1 s (--timeout)\n")


def test_a_host_with_too_few_gpus_beside_others_is_named():
    ranks = [("a", "a GPU for each of 2 ranks", "cuda"), ("b", "2 ranks and 1 GPU", "cpu")]
    with pytest.raises(group.Stop, match="others enough: b: 2 ranks and 1 GPU"):
        group.same_device_everywhere(ranks)


def test_two_agents_that_take_the_same_gpu_are_named():
    group.a_gpu_for_each([("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"), ("c", None), ("c", None)])
    with pytest.raises(group.Stop, match="same GPU of b: start one agent a host"):
        group.a_gpu_for_each([("a", "GPU-1"), ("b", "GPU-1"), ("b", "GPU-1")])


ON_A_HOST_WITH_ONE_GPU = """\
import torch, group
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, print
group.gpu_of = lambda device: f"GPU-{device.index}"
join = group.dist.init_process_group
group.dist.init_process_group = lambda _, **how: join("gloo", **how)  # for want of a GPU for NCCL
try:
    group.start_group(60)
except group.Stop as stop:
    print(stop)
"""


def test_a_second_agent_on_a_host_with_one_gpu_is_told_so_before_the_first_collective():
    """Each agent has one worker, and counts one GPU for it: the same."""
    [port] = free_ports(1)
    told = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ON_A_HOST_WITH_ONE_GPU],
            cwd=ROOT / "cluster",
            env=os.environ
            | told
            | {"RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert all("use the same GPU of" in words for words in said), said


def test_agents_that_play_hosts_on_this_machine_leave_its_gpus_alone():
    assert environment("job", "lo")["CUDA_VISIBLE_DEVICES"] == ""


# --- the check of the hosts -----------------------------------------------------------------------


def facts(**changes: object) -> list[check.Facts]:
    """Of three hosts with a rank each; `changes` are those of host c."""
    ranks = [
        check.Facts(rank, host, "cuda:0", {"PyTorch": "2.14.1"}, clock=1000.0)
        for rank, host in enumerate("abc")
    ]
    for name, value in changes.items():
        setattr(ranks[2], name, value)
    return ranks


WRONG = {
    "c: PyTorch is 2.13.0, on most ranks it is 2.14.1": {"versions": {"PyTorch": "2.13.0"}},
    "c: NCCL is 2.30, on most ranks it is None": {
        "versions": {"PyTorch": "2.14.1", "NCCL": "2.30"}
    },
    "c: its clock is off by -3.0 s": {"clock": 997.0},
    "c: /dev/shm has 64 MiB, NCCL wants 1024": {"shared_memory": 64 << 20},
    "c: only 8 MiB may be locked (ulimit -l): InfiniBand needs unlimited": {
        "locked_memory": 8 << 20
    },
    "c: cannot write to the folder of checkpoints: Read-only file system": {
        "wrote": "Read-only file system"
    },
    "c: does not see what others wrote to the folder: check-0: No such file or directory": {
        "unread": ["check-0: No such file or directory"]
    },
}


@pytest.mark.parametrize("line", WRONG)
def test_the_check_names_what_is_wrong_by_host(line):
    assert check.problems(facts(**WRONG[line])) == [line]


def test_the_check_finds_nothing_wrong_with_hosts_that_are_alike():
    assert check.problems(facts()) == []


def test_a_host_that_cannot_write_is_named_once_and_not_by_those_who_look_for_its_file():
    ranks = facts(wrote="Read-only file system")
    ranks[0].unread = ["check-2: No such file or directory"]
    assert [line[0] for line in check.problems(ranks)] == ["c"]


def test_the_check_of_this_machine_finds_nothing_wrong(alone, tmp_path, capsys):
    options = train.parse(["--checkpoints", str(tmp_path / "runs")])
    check.check_hosts(options, torch.device("cpu"))
    printed = capsys.readouterr().out
    assert "nothing is wrong" in printed and "all-reduce of 64 MiB over 1 ranks" in printed
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_check_says_why_a_folder_cannot_be_written(alone, tmp_path):
    (tmp_path / "runs").write_text("a file, not a folder")
    options = train.parse(["--checkpoints", str(tmp_path / "runs")])
    with pytest.raises(group.Stop, match="cannot write to the folder of checkpoints"):
        check.check_hosts(options, torch.device("cpu"))


def test_each_item_of_the_page_says_how_it_looks_when_it_is_wrong():
    page = (TRAIN.parent / "before_the_first_run.md").read_text(encoding="utf-8")
    items = re.split(r"(?m)^\d+\. ", page)[1:]
    assert len(items) == 10
    for item in items:
        assert "*When it is wrong:* " in item
    assert any("does not see what others wrote to the folder" in line for line in WRONG)
    assert "`does not see what others wrote to the folder`" in items[1]
