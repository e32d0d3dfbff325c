"""launch over several hosts: two engines on this machine play them, and the ranks are theirs.

With hosts that have a network of their own: tests/two_hosts.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.support.fault_table import FAULTS

ipyparallel = pytest.importorskip("ipyparallel", reason="ipyparallel is not installed")

from course_hosts import cluster as cluster_module
from course_hosts import cluster_doctor, hosts
from course_hosts.cluster import cluster
from course_utils import __main__ as command
from course_utils.launch import RankFailure, launch
from course_utils.launch.ranks import elsewhere

# Rows of each kind, and those in which something crosses that a machine has for itself.
_SHOWN = (
    *("raises", "raises_in_backward", "meets_the_others_in_except", "calls_os_exit", "is_killed"),
    *("uses_bad_memory", "skips_a_collective", "skips_backward", "both_receive_first"),
    *("has_a_heartbeat", "asks_for_input", "returns_a_generator", "uses_a_lock"),
)
ROWS = {fault.fn.__name__: fault for fault in FAULTS if fault.fn.__name__ in _SHOWN}


@pytest.fixture(scope="module")
def client():
    with cluster_module.on_this_machine(2) as own:
        yield own


@pytest.fixture
def names(client):
    with cluster(client) as names:
        yield names


@pytest.mark.parametrize("name", ROWS)
def test_a_fault_is_told_as_on_one_machine(names, name):
    row = ROWS[name]
    with pytest.raises(RankFailure) as caught:
        launch(row.fn, row.nprocs, timeout=row.timeout)
    row.check(caught.value)


def test_the_table_has_all_that_is_shown():
    assert len(ROWS) == len(_SHOWN)


# ---- what crosses -------------------------------------------------------------------------------


def tells(rank: int, weights: torch.Tensor) -> dict:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    print(f"half of {total.item():g}")
    return {
        "engine": os.getppid(),
        "sum": total,
        "weights": weights.sum().item(),
        "local": (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]),
        "variable": os.environ.get("SET_IN_THE_CELL"),
        "folder": os.getcwd(),
    }


def test_ranks_are_spread_and_get_what_ranks_of_one_machine_get(names, monkeypatch, capsys):
    monkeypatch.setenv("SET_IN_THE_CELL", "yes")
    assert len(names) == 2
    told = launch(tells, 5, torch.ones(1000))
    servers = [each["engine"] for each in told]
    assert servers[0] == servers[1] != servers[2] == servers[3] == servers[4]
    assert [each["local"] for each in told] == [
        *[("0", "2"), ("1", "2")],
        *[("0", "3"), ("1", "3"), ("2", "3")],
    ]
    assert all(each["sum"] == 10 and each["weights"] == 1000 for each in told)
    assert {each["variable"] for each in told} == {"yes"}
    assert {each["folder"] for each in told} == {os.getcwd()}
    assert capsys.readouterr().out == "".join(f"[rank {rank}] half of 10\n" for rank in range(5))


def test_fewer_ranks_than_hosts(names):
    assert len(launch(tells, 1, torch.ones(1))) == 1


def draws(rank: int) -> None:
    import matplotlib.pyplot as plt

    plt.plot([rank, 1])
    plt.show()


def test_figures_cross(names, capsys):
    launch(draws, 2)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"[rank {rank}] ") for rank, line in enumerate(lines))


def test_what_is_the_same_for_ranks_of_a_host_travels_once():
    call, own = [b"call"], [b"own"]
    assert hosts._once([call, call, own, call]) == ([[b"call"], [b"own"]], [0, 0, 1, 0])


def test_the_block_is_over_when_it_is_over(client):
    with cluster(client):
        assert elsewhere.starts()
    assert not elsewhere.starts()


def test_another_version_is_refused_with_both(client, monkeypatch):
    here = cluster_module.agent.versions()
    monkeypatch.setattr(cluster_module.agent, "versions", lambda: here | {"PyTorch": "1.0"})
    said = rf"has PyTorch {re.escape(here['PyTorch'])}.* has 1\.0"
    with pytest.raises(RuntimeError, match=said), cluster(client):
        pass


def test_engines_without_keys_are_refused():
    class Open:
        curve_serverkey = b""

    with pytest.raises(RuntimeError, match="without CurveZMQ"), cluster(Open()):
        pass


# ---- COURSE_CLUSTER -----------------------------------------------------------------------------

TWICE = """
import os
from course_utils.launch import launch

def server(rank):
    return os.getppid()

if __name__ == "__main__":
    print(launch(server, 4), launch(server, 4))
"""


def test_a_program_that_knows_nothing_of_it_runs_over_a_cluster_and_leaves_nothing(tmp_path):
    (program := tmp_path / "twice.py").write_text(TWICE)
    (folder := tmp_path / "temporary").mkdir()
    here = os.environ | {"COURSE_CLUSTER": "2", "TMPDIR": str(folder)}
    process = psutil.Popen(
        [sys.executable, program],
        env=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    printed, said = process.communicate(timeout=300)
    assert said == ""
    first, second = re.findall(r"\[.*?\]", printed)
    assert first == second  # it has not started them again
    a, b, c, d = map(int, re.findall(r"\d+", first))
    assert a == b != c == d
    assert gone([a, c], 20)
    assert not list(folder.glob("course-*"))


@pytest.fixture
def environment(monkeypatch):
    """As in a kernel that has launched nothing yet."""
    monkeypatch.setattr(cluster_module, "_asked_for", [])
    monkeypatch.setattr(cluster_module, "_ANSWER", 3.0)
    with contextlib.ExitStack() as kernel:
        # In this module alone: the janitor has an end of its own to register.
        monkeypatch.setattr(cluster_module, "atexit", SimpleNamespace(register=kernel.callback))
        yield lambda value: monkeypatch.setenv("COURSE_CLUSTER", str(value))


def connection_file(client):
    return next(Path(client.cluster.profile_dir).glob("security/*client.json"))


def test_a_connection_file(client, environment):
    environment(connection_file(client))
    told = launch(tells, 2, torch.ones(1))
    assert told[0]["engine"] != told[1]["engine"]


def test_a_block_goes_before_the_environment(names, environment):
    environment("nonsense")
    assert len(launch(tells, 1, torch.ones(1))) == 1


@pytest.mark.parametrize("value", ["0", "-1", "17", "2.5", "two", "/there/is/none.json"])
def test_what_course_cluster_cannot_be(environment, value):
    environment(value)
    with pytest.raises(ValueError, match=re.escape(f"COURSE_CLUSTER={value}: it is how many")):
        launch(tells, 1, torch.ones(1))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"ssh": "", "location": 3}', "key"])
def test_a_file_that_connects_nobody(environment, tmp_path, text):
    (file := tmp_path / "some.json").write_text(text)
    environment(file)
    with pytest.raises(ValueError, match="this is no connection file of a client"):
        launch(tells, 1, torch.ones(1))


def test_a_cluster_without_engines_and_one_that_is_gone(environment, tmp_path):
    with cluster_module.on_this_machine(1) as own:
        file = tmp_path / "client.json"
        file.write_text(connection_file(own).read_text())
        own.shutdown(block=True)
        environment(file)
        with pytest.raises(RuntimeError, match="no engine is there"):
            launch(tells, 1, torch.ones(1))
    with pytest.raises(RuntimeError, match="does not answer within 3 seconds"):
        launch(tells, 1, torch.ones(1))


def test_an_engine_that_has_ended_is_no_host():
    with cluster_module.on_this_machine(2) as own:
        pids = [own[engine].apply_sync(os.getpid) for engine in (0, 1)]
        os.kill(pids[0], signal.SIGKILL)  # the controller lists it until it has missed a heartbeat
        (only,) = cluster_module.look(own)
        assert only.call("about")["name"]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="no engine is there. Start `ipengine`"):
            cluster_module.look(own)


def test_an_engine_that_does_not_answer(client, monkeypatch):
    assert len(cluster_module.look(client)) == 2  # both have imported the course
    monkeypatch.setattr(cluster_module, "_START", 3.0)
    pid = client[1].apply_sync(os.getpid)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(
            RuntimeError, match="engine 1 is in the controller's list, and does not"
        ):
            cluster_module.look(client)
    finally:
        os.kill(pid, signal.SIGCONT)


# ---- the doctor ---------------------------------------------------------------------------------


@pytest.fixture
def examine(client, monkeypatch, capsys):
    """What the doctor says of the two engines, as lines, and whether all is well."""
    monkeypatch.setattr(cluster_module, "client_for", lambda _: contextlib.nullcontext(client))

    def examine():
        well = cluster_doctor.report("2")
        return capsys.readouterr().out.splitlines(), well

    return examine


def test_a_cluster_that_is_well(examine):
    lines, well = examine()
    assert well
    assert [line[:5] for line in lines] == ["ok   "] * 9
    told = ("as here.", "GB of memory", "within 1 s", "two ranks start there") * 2
    assert all(words in line for words, line in zip(told, lines))
    assert "all-reduce of 4 MB between them gives the right sum" in lines[-1]


def test_a_host_with_another_version_gets_no_ranks(examine, monkeypatch):
    here = cluster_module.agent.versions()
    monkeypatch.setattr(cluster_module.agent, "versions", lambda: here | {"PyTorch": "1.0"})
    lines, well = examine()
    assert not well
    assert len(lines) == 6
    assert re.search(rf"PyTorch {re.escape(here['PyTorch'])}.*, but PyTorch 1.0 here", lines[0])


def test_a_clock_that_is_wrong(examine, monkeypatch):
    wrong = type("clock", (), {"time": lambda: time.time() + 100, "monotonic": time.monotonic})
    monkeypatch.setattr(cluster_doctor, "time", wrong)
    lines, well = examine()
    assert not well
    assert "its clock is 100 s behind this machine's" in lines[2]


def test_ranks_that_do_not_start(examine, monkeypatch):
    monkeypatch.setattr(cluster_doctor, "_nothing", os._exit)
    lines, well = examine()
    assert not well
    assert "two ranks do not start there" in lines[3]


def test_the_command(monkeypatch):
    asked = []
    monkeypatch.setattr(cluster_doctor, "report", asked.append)
    with pytest.raises(SystemExit) as ended:
        command.main(["doctor", "--cluster", "2"])
    assert (asked, ended.value.code) == (["2"], True)


# ---- what is lost -------------------------------------------------------------------------------


def waits(rank: int, folder: str) -> None:
    Path(folder, f"rank-{rank}").write_text(f"{os.getpid()} {os.getppid()}")
    if rank < 2:
        dist.barrier()
    time.sleep(1000)


def started(folder: Path, ranks: int) -> list[list[int]]:
    """The processes of all ranks, and the fork servers above them, when all have begun."""
    end = time.monotonic() + 300  # a busy machine's fork servers take a minute
    while time.monotonic() < end:
        texts = [path.read_text() for path in sorted(folder.glob("rank-*"))]
        if len(texts) == ranks and all(texts):
            return [list(map(int, text.split())) for text in texts]
        time.sleep(0.05)
    raise AssertionError("the ranks have not begun")


def gone(processes: list[int], seconds: float) -> bool:
    living = [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)]
    return not psutil.wait_procs(living, timeout=seconds)[1]


def test_an_engine_that_is_killed_takes_its_ranks_along_and_is_named(tmp_path):
    """And the next launch says so at once."""
    with cluster(2) as names:
        killer = threading.Thread(target=_kill_engine_of_rank_2, args=[tmp_path])
        killer.start()
        with pytest.raises(RankFailure) as caught:
            launch(waits, 4, str(tmp_path))
        killer.join()
        assert caught.value.kind == "lost"
        assert str(caught.value).startswith(f"rank 2 was on host {names[1]}, which does not answer")
        assert "Meanwhile" in str(caught.value)
        assert gone([process for process, _ in started(tmp_path, 4)], 20)
        with pytest.raises(hosts.HostLost, match=re.escape(names[1])):
            launch(tells, 2, torch.ones(1))


def _kill_engine_of_rank_2(folder):
    _, server = started(folder, 4)[2]
    engine = psutil.Process(server).parent()
    engine.send_signal(signal.SIGKILL)


@pytest.fixture
def kernel(tmp_path):
    """A process that has launched two ranks over two engines of its own, and waits for them."""
    program = tmp_path / "kernel.py"
    program.write_text(_KERNEL)
    here = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, program, str(tmp_path)]
    process = psutil.Popen(command, env=here, stderr=subprocess.PIPE, text=True)
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait(60)


def test_ranks_end_when_nothing_is_heard_of_the_kernel(tmp_path, kernel):
    """It is stopped, as if behind a cable that was pulled: nobody tells the agents. And told so when
    it goes on."""
    processes = [process for process, _ in started(tmp_path, 2)]
    kernel.suspend()
    assert gone(processes, 20)
    kernel.resume()
    _, said = kernel.communicate(timeout=60)
    assert "which has ended it: it had heard nothing from here for 12 seconds" in said


def test_nothing_is_left_when_the_kernel_is_killed(tmp_path, kernel):
    started(tmp_path, 2)
    processes = [process.pid for process in kernel.children(recursive=True)]
    assert len(processes) > 8  # controller, engines, their fork servers, ranks
    kernel.kill()
    assert gone(processes, 20)


_KERNEL = """
import sys
from course_hosts.cluster import cluster
from course_utils.launch import launch
from tests.launch.test_launch_hosts import waits

if __name__ == "__main__":
    with cluster(2):
        launch(waits, 2, sys.argv[1])
"""
