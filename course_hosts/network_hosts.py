"""Hosts on one machine that only a cable joins: network namespaces, and pairs of veth devices.

with two_hosts() as hosts:
    subprocess.run([*hosts["a"].prefix, "true"])  # in host a, at 10.77.0.1; b is at 10.77.0.2
    hosts["b"].cut_off()  # pulls the cable
    hosts["b"].plug_in()

with host_beside_this() as (here, there): ...  # this machine, and one host with a cable to it

A namespace has interfaces, addresses and connections of its own; files and processes are shared.
Needs Linux, root, iproute2 and util-linux. The namespaces have no names: each lives as long as a process
is in it, first of all one that does nothing else. That one ends with the block, and with this process,
however it ends (it is a job of the janitor's); the system then takes away namespace and cable.
"""

import contextlib
import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from course_utils.launch.keepers.janitor import JOB, janitor

CABLE = "cable0"  # a namespace's name for its end
_PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_TEST_NETWORKS = ipaddress.ip_network("198.18.0.0/15")  # RFC 2544: nobody's, for tests


class NoHosts(RuntimeError):
    """This machine cannot have such hosts; says what is missing, and what to do."""


@dataclass
class NetworkHost:
    """A host: its address, its name for its end of the cable, and a process in its network."""

    address: str
    cable: str
    process: int

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs the command in this host."""
        return ("nsenter", f"--net=/proc/{self.process}/ns/net")

    def reaches(self, other: "NetworkHost") -> bool:
        """Whether an answer comes back: here that the port is closed."""
        program = "import socket as s, sys; sys.exit(s.create_connection(sys.argv[1:], 3))"
        command = [*self.prefix, sys.executable, "-c", program, other.address, "9"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True).stderr
        return "ConnectionRefusedError" in answer

    def cut_off(self) -> None:
        self.set_up("link", "set", self.cable, "down")

    def plug_in(self) -> None:
        self.set_up("link", "set", self.cable, "up")

    def set_up(self, *arguments: str) -> None:
        """`ip` with these arguments, in this host."""
        _run(*self.prefix, "ip", *arguments)


def why_not() -> str | None:
    """Returns why this machine cannot have such hosts, and what to do, or None if it can."""
    try:
        with two_hosts():
            return None
    except NoHosts as reason:
        return str(reason)


@contextlib.contextmanager
def two_hosts() -> Iterator[dict[str, NetworkHost]]:
    """Hosts a and b, each with a network of its own. Raises NoHosts."""
    with ExitStack() as opened:
        a, b = (_namespace(opened, f"10.77.0.{number}") for number in (1, 2))
        _join(opened, a, b)
        yield {"a": a, "b": b}


@contextlib.contextmanager
def host_beside_this() -> Iterator[tuple[NetworkHost, NetworkHost]]:
    """This machine, and a host with a network of its own. Raises NoHosts."""
    ours, theirs = _free_addresses()
    with ExitStack() as opened:
        here = NetworkHost(ours, f"course{os.getpid()}", os.getpid())
        there = _namespace(opened, theirs)
        _join(opened, here, there)
        yield here, there


def _namespace(opened, address):
    _require_tools()
    job = uuid.uuid4().hex
    janitor.keep_with(opened, "job", job)
    # it says that the namespace is there, and holds it
    command = ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"]
    holder = subprocess.Popen(
        command,
        env=os.environ | {JOB: job},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # an interrupt from the terminal is not for it
    )
    opened.callback(_end, holder)
    if not holder.stdout.readline():
        raise _refused(command[:2], holder.stderr.read())
    host = NetworkHost(address, CABLE, holder.pid)
    host.set_up("link", "set", "lo", "up")
    return host


def _require_tools():
    if sys.platform != "linux":
        raise NoHosts("network namespaces are Linux's; a virtual machine with Linux has them")
    for tool, package in _PACKAGES.items():
        if shutil.which(tool) is None:
            raise NoHosts(f"there is no `{tool}` here; install {package}")
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root; start Jupyter or the command as root")


def _end(holder):
    holder.kill()
    holder.communicate()


def _join(opened, one, other):
    """Lays a cable between two hosts, and gives its ends their addresses."""
    ends = [("name", host.cable, "netns", str(host.process)) for host in (one, other)]
    _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    # A process that outlives the block keeps a host's network, and would keep the cable.
    opened.callback(_remove_cable, one)
    for host in (one, other):
        host.set_up("address", "add", f"{host.address}/30", "dev", host.cable)
        host.plug_in()


def _remove_cable(host):
    command = [*host.prefix, "ip", "link", "delete", host.cable]
    subprocess.run(command, check=False, capture_output=True)  # it may be gone: with a host


def _free_addresses():
    """Two addresses of a network of their own, which is none of this machine's."""
    taken = {each.address for found in psutil.net_if_addrs().values() for each in found}
    while True:
        number = secrets.randbelow(_TEST_NETWORKS.num_addresses // 4)
        pair = [str(_TEST_NETWORKS[4 * number + which]) for which in (1, 2)]
        if not taken.intersection(pair):
            return pair


def _run(*command):
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise _refused(command, error.stderr) from None


def _refused(command, said):
    return NoHosts(
        f"`{' '.join(command)}` fails here ({said.strip()}); in a container, start it with "
        "--cap-add NET_ADMIN and --cap-add SYS_ADMIN"
    )
