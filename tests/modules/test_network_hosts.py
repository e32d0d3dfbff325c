"""course_hosts/network_hosts.py where a machine cannot have such hosts, and what is left of them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from course_hosts import network_hosts
from course_hosts.network_hosts import NoHosts, host_beside_this, two_hosts, why_not

makers = pytest.mark.parametrize("make", [two_hosts, host_beside_this])


def without_a_tool(monkeypatch, tool):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: None if name == tool else name)


def refused_by(monkeypatch, folder, tool):
    """Here the tool says no."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    (folder / tool).write_text("#!/bin/sh\necho Operation not permitted >&2\nexit 1\n")
    (folder / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@makers
def test_on_another_system(make, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(NoHosts, match="are Linux's; a virtual machine with Linux has them"), make():
        pass


@makers
@pytest.mark.parametrize(
    ("tool", "package"), [("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")]
)
def test_without_a_tool(make, tool, package, monkeypatch):
    without_a_tool(monkeypatch, tool)
    with pytest.raises(NoHosts, match=f"there is no `{tool}` here; install {package}"), make():
        pass


@makers
def test_without_root(make, monkeypatch):
    without_a_tool(monkeypatch, None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoHosts, match="need root; start Jupyter or the command as root"), make():
        pass


@makers
def test_where_the_system_refuses(make, monkeypatch, tmp_path):
    refused_by(monkeypatch, tmp_path, "unshare")
    said = r"`unshare --net` fails here \(Operation not permitted\); in a container, start it with"
    with pytest.raises(NoHosts, match=said), make():
        pass


def test_the_reason_is_the_sentence_of_the_error(monkeypatch):
    without_a_tool(monkeypatch, "ip")
    assert why_not() == "there is no `ip` here; install iproute2"


needs_hosts = pytest.mark.skipif(bool(reason := why_not()), reason=f"two hosts: {reason}")


@needs_hosts
def test_a_cable_that_cannot_be_laid_leaves_no_host(monkeypatch, tmp_path):
    begun, begin = [], subprocess.Popen
    monkeypatch.setattr(
        network_hosts.subprocess, "Popen", lambda *a, **o: begun.append(begin(*a, **o)) or begun[-1]
    )
    refused_by(monkeypatch, tmp_path, "ip")
    with pytest.raises(NoHosts, match="`nsenter .* ip link set lo up` fails here"), two_hosts():
        pass
    [holder] = [process for process in begun if process.args[0] == "unshare"]
    assert holder.returncode is not None


@needs_hosts
def test_hosts_have_networks_of_their_own_and_no_names():
    with two_hosts() as hosts:
        networks = {os.stat(f"/proc/{host.process}/ns/net").st_ino for host in hosts.values()}
        named = {path.stat().st_ino for path in Path("/run/netns").glob("*")}
        assert len(networks - {os.stat("/proc/self/ns/net").st_ino}) == 2
        assert not networks & named
        assert why_not() is None  # others beside them
