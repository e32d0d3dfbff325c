"""course_hosts/capstone.py: a script whose steps wait at a gate, and the two nodes that it runs on."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from course_hosts import capstone, network_hosts
from course_hosts.network_hosts import CABLE
from course_hosts.nodes import Nodes, gone_within, kill, processes_of

# Four steps, and a save after each; the first step of a life is one of zeros, as get_state_dict makes it.
SCRIPT = """\
import os, psutil, sys, torch
import torch.distributed as dist
from pathlib import Path

out, saved = Path(sys.argv[1]), Path(sys.argv[1], "state")
dist.init_process_group("gloo")
own = {name: [a.address for a in found] for name, found in psutil.net_if_addrs().items()}
torch.save(own, out / os.environ["NODE"])
weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.grad = torch.zeros(3)
optimizer.step()
done = torch.load(saved, weights_only=True) if saved.exists() else 0
large = torch.zeros(1000 * dist.get_world_size())
dist.barrier()
while done < 4:
    weight.grad = torch.ones(3)
    optimizer.step()
    dist.all_reduce(weight.grad)
    done += 1
    if dist.get_rank() == 0:
        torch.save(done, out / "unfinished")
        os.replace(out / "unfinished", saved)
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("why_not", ["nobody lends a cable", None], ids=["agents", "hosts"])
def test_a_node_dies_and_the_other_ends_the_training(why_not, monkeypatch, tmp_path, script):
    reason = network_hosts.why_not()
    if why_not is None and reason:
        pytest.skip(f"two hosts did not run: {reason}")
    monkeypatch.setattr(network_hosts, "why_not", lambda: why_not)
    assert (why_not or "two hosts") in capstone.kind_of_nodes()
    folder = tmp_path / "run"
    with capstone.two_nodes(folder, script, 2, [tmp_path]) as nodes:
        nodes.start("A")
        nodes.start("B")
        nodes.train(ranks=4, first=0, until=2)
        nodes.kill_node("B")
        nodes.train(ranks=2, first=0)
    assert torch.load(tmp_path / "state", weights_only=True) == 4
    steps = [event["step"] for event in nodes.events() if event["group"] == nodes.groups[-1]]
    assert max(steps) == 2, "the steps of this life"
    [(ranks, held)] = capstone.held(folder).items()
    assert ranks == 2 and 8000 < held < 10_000
    own = {name: torch.load(tmp_path / name, weights_only=True) for name in "AB"}
    if why_not:
        assert own["A"] == own["B"] and CABLE not in own["A"]
    else:
        assert "10.77.0.1" in own["A"][CABLE] and "10.77.0.2" in own["B"][CABLE]
    assert not processes_of(nodes.id)


# ---- a kernel that is killed ---------------------------------------------------------------------

KERNEL = """\
import sys, time
from pathlib import Path
from course_hosts import capstone, network_hosts

folder, script, why_not = sys.argv[1:]
network_hosts.why_not = lambda: why_not
with capstone.two_nodes(Path(folder, "run"), Path(script), 1, [folder]) as nodes:
    nodes.start("A")
    nodes.start("B")
    nodes.train(ranks=2, first=0, until=2)
    print("trained", flush=True)
    time.sleep(1000)
"""


def network_of(process: psutil.Process) -> int:
    """The number of its network; 0 where it has ended."""
    try:
        return os.stat(f"/proc/{process.pid}/ns/net").st_ino
    except OSError:
        return 0


@pytest.mark.skipif(sys.platform != "linux", reason="a job's processes are found on Linux only")
@pytest.mark.parametrize(
    ("why_not", "hosts"), [("nobody lends a cable", 0), ("", 2)], ids=["agents", "hosts"]
)
def test_a_kernel_that_is_killed_leaves_no_process_and_no_host(why_not, hosts, tmp_path, script):
    if hosts and (reason := network_hosts.why_not()):
        pytest.skip(f"two hosts did not run: {reason}")
    command = [sys.executable, "-c", KERNEL, str(tmp_path), str(script), why_not]
    kernel = psutil.Popen(
        command, cwd=Path(capstone.__file__).parents[1], stdout=subprocess.PIPE, text=True
    )
    started = []
    try:
        assert "trained\n" in iter(kernel.stdout.readline, "")
        started = kernel.children(recursive=True)
        networks = {network_of(process) for process in started} - {network_of(kernel)}
        # the janitor, two agents and their workers; of each host the process that holds it
        assert (len(started), len(networks)) == (5 + hosts, hosts)
        kernel.kill()
        assert not gone_within(started, 20)
        assert not [p for p in psutil.process_iter() if network_of(p) in networks]
    finally:
        for process in [kernel, *started]:
            kill(process)
        kernel.wait()


def test_nobody_is_waited_for_once_all_agents_have_ended(tmp_path):
    nodes = Nodes(tmp_path / "run", "nothing.py")
    nodes.agents = {"a": SimpleNamespace(poll=lambda: 1), "b": SimpleNamespace(poll=lambda: 0)}
    with pytest.raises(TimeoutError, match="all agents have ended"):
        nodes.train(2, 0)
