"""Elastic training on two hosts that only a cable joins; the cable is pulled and plugged in again."""

import subprocess
import sys

import pytest

from course_hosts.network_hosts import CABLE, NetworkHost, two_hosts, why_not
from course_hosts.nodes import PATIENCE
from tests.support.elastic_runs import (
    ROOT,
    ElasticRun,
    EventLog,
    Host,
    check_samples,
    difference,
    undisturbed,
)

SAMPLES, BATCH, EPOCHS = 100, 16, 3
OPTIONS = (
    f"--samples {SAMPLES} --batch {BATCH} --epochs {EPOCHS} --width 16 --layers 1 --save-every 2"
).split()


@pytest.fixture
def hosts():
    if reason := why_not():
        pytest.skip(f"two hosts did not run: {reason}")
    with two_hosts() as hosts:
        yield hosts


def test_a_host_that_is_cut_off_and_comes_back_changes_no_parameter(hosts, tmp_path):
    undisturbed(tmp_path / "one process", OPTIONS)
    places = {
        name: Host(host.address, CABLE, host.prefix, has_store=name == "a")
        for name, host in hosts.items()
    }
    folder = tmp_path / "two hosts"
    # Nobody tells a host that the other is out of reach: its ranks wait until the time-out. The agent
    # of b may outlast that and come back by itself, or give up and be started again.
    with ElasticRun(folder, OPTIONS, nodes="1:2", timeout=30, hosts=places, supervised=True) as run:
        run.start_agent("a")
        run.start_agent("b")
        run.wait_for_group(2)
        run.gate.open_to(5)
        run.wait_for_step(5, world=2)
        hosts["b"].cut_off()
        run.gate.open_to(9)
        run.wait_for_step(9, world=1)
        hosts["b"].plug_in()
        run.wait_for_group(2)
        run.gate.open()
        run.wait_until_done()
    worlds = iter(EventLog(folder).worlds())
    assert all(world in worlds for world in (2, 1, 2))  # in this order
    check_samples(folder, SAMPLES, BATCH, EPOCHS)
    assert difference(tmp_path / "one process", folder) <= 1e-5


def test_master_addr_is_the_host_of_rank_0_wherever_the_endpoint_is(hosts, tmp_path):
    """pytorch#137402: rank 0 is not on the host that the endpoint names."""
    script = tmp_path / "says.py"
    script.write_text("import os; print(os.environ['RANK'], os.environ['MASTER_ADDR'])")
    options = f"--nnodes 2 --rdzv-backend c10d --rdzv-endpoint {hosts['b'].address}:29400".split()
    agents = []
    for name, host in hosts.items():
        own = [f"--rdzv-conf=is_host={int(name == 'b')}", f"--local-addr={host.address}"]
        command = [*host.prefix, sys.executable, "cluster/agent.py", *options, *own, script]
        agents.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
    said = [agent.communicate(timeout=PATIENCE)[0].split() for agent in agents]
    assert said == [["0", hosts["a"].address], ["1", hosts["a"].address]]


def test_only_the_cable_joins_the_hosts(hosts):
    a, b = hosts.values()
    assert reaches_soon(a, b) and reaches_soon(b, a)
    b.cut_off()
    assert not a.reaches(b) and not b.reaches(a)
    b.plug_in()
    assert reaches_soon(a, b) and reaches_soon(b, a)


def reaches_soon(one: NetworkHost, other: NetworkHost) -> bool:
    """A link takes a moment to come up."""
    return any(one.reaches(other) for _ in range(100))
