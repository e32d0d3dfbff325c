"""Two hosts on one machine: network namespaces, joined by a virtual cable (a pair of veth devices).

with two_hosts() as hosts:
    hosts["a"].run("true")        # a command in host a, at 10.77.0.1; b is at 10.77.0.2
    hosts["b"].cut_off()          # pulls the cable
    hosts["b"].plug_in()

A namespace has interfaces, addresses and connections of its own; files and processes are shared.
Needs root and iproute2's `ip`. Leaving the block removes both namespaces, and the cable with them.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

CABLE = "cable0"  # each host's name for its end


@dataclass
class NetworkHost:
    namespace: str
    address: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Put before a command, it runs the command in this host."""
        return ("ip", "netns", "exec", self.namespace)

    def run(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True, capture_output=True)

    def reaches(self, other: "NetworkHost") -> bool:
        """Whether an answer comes back: here that the port is closed."""
        program = "import socket as s, sys; sys.exit(s.create_connection(sys.argv[1:], 3))"
        command = [*self.prefix, sys.executable, "-c", program, other.address, "9"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True).stderr
        return "ConnectionRefusedError" in answer

    def cut_off(self) -> None:
        _ip("-n", self.namespace, "link", "set", CABLE, "down")

    def plug_in(self) -> None:
        _ip("-n", self.namespace, "link", "set", CABLE, "up")


def why_not() -> str | None:
    """Returns why this machine cannot have two hosts, or None if it can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (Debian's package iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with two_hosts() as hosts:
            hosts["a"].run("true")
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` fails: {error.stderr.decode().strip()}"
    return None


@contextlib.contextmanager
def two_hosts() -> Iterator[dict[str, NetworkHost]]:
    id = uuid.uuid4().hex[:6]
    hosts = {
        name: NetworkHost(f"course-{id}-{name}", f"10.77.0.{number}")
        for number, name in enumerate("ab", start=1)
    }
    try:
        for host in hosts.values():
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        a, b = hosts.values()
        end = ("name", CABLE, "netns")
        _ip("link", "add", *end, a.namespace, "type", "veth", "peer", *end, b.namespace)
        for host in hosts.values():
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", CABLE)
            _ip("-n", host.namespace, "link", "set", CABLE, "up")
        yield hosts
    finally:
        for host in hosts.values():
            command = ["ip", "netns", "delete", host.namespace]
            subprocess.run(command, check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
