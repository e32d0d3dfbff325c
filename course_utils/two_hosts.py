"""Two hosts on one machine, to try a cluster on: chapter 09 has its hosts from here.

    with TwoHosts() as two:
        with cluster(two.client):
            launch(train, 4)       # two ranks here, two on the other host
        two.fall_silent()          # pulls the cable of the other host
        two.come_back()

Where the system allows it (Linux, root, iproute2 and util-linux), the other host has a network of its
own: a network namespace, joined to this machine's by a virtual cable (a pair of veth devices). Files and
processes are shared. Elsewhere two engines on this machine play the hosts, and the one that falls silent
is stopped. All ends with the block, and with this process, however it ends: the namespace lives as long
as a process is in it, and the cable as long as both of its ends. The system takes away what is left of
them in its own time, so the block removes its cable itself.
"""

import ipaddress
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import ipyparallel
import psutil

from course_utils import cluster

_TEST_NETWORKS = ipaddress.ip_network("198.18.0.0/15")  # RFC 2544: nobody's, for tests
_TOOLS = ("ip", "unshare", "nsenter")
_CABLE = "cable0"  # the other host's name for its end
_START = 120.0  # seconds for what is started, on a busy machine
_END = 3.0  # seconds for what is told to end


class TwoHosts:
    """Two hosts with an engine each, behind a controller with CurveZMQ.

    client:  of the engines (`ipyparallel.Client`); file: with which others connect
    about:   what plays the second host, and why it is no other, in a sentence
    """

    def __init__(self) -> None:
        self._opened = ExitStack()
        with ExitStack() as begun:
            self._folder = begun.enter_context(tempfile.TemporaryDirectory(prefix="course-hosts-"))
            cluster.keep(begun, "folder", self._folder)  # it has the keys
            self._cable, address, prefix = self._second_host(begun)
            self.controller = self._start(begun, "controller", *_listening_at(address))
            files = Path(self._folder, "security")
            self.file = str(_written(files / "ipcontroller-client.json"))
            file = f"--file={_written(files / 'ipcontroller-engine.json')}"
            self.engines = [  # this machine's is the first
                self._start(begun, "engine", file, f"--IPEngine.id={number}", prefix=each)
                for number, each in enumerate(((), prefix))
            ]
            self.client = begun.enter_context(
                cluster.with_engines(self._connect, len(self.engines), _START)
            )
            self._opened = begun.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def close(self) -> None:
        """Ends all that was started; may be called again."""
        self.come_back()
        self._opened.close()

    def fall_silent(self) -> None:
        """Nothing is heard of the second host any more."""
        if self._cable:
            _run("ip", "link", "set", self._cable, "down")
        else:
            self.engines[1].send_signal(signal.SIGSTOP)

    def come_back(self) -> None:
        """It can be heard again."""
        if self._cable and self._cable in psutil.net_if_addrs():
            _run("ip", "link", "set", self._cable, "up")
        elif not self._cable and self.engines[1].is_running():
            self.engines[1].send_signal(signal.SIGCONT)

    def _second_host(self, begun):
        """This host's end of the cable, its address, and what is put before the second's commands."""
        reason = why_not()
        if not reason:
            try:
                with ExitStack() as tried:
                    made = _namespace(tried)
                    begun.push(tried.pop_all())
                self.about = "The second host is a network namespace, with a cable to this machine."
                return made
            except subprocess.CalledProcessError as error:
                reason = f"`{' '.join(error.cmd)}` fails: {error.stderr.strip()}"
        self.about = f"Two engines on this machine play the hosts: {reason}."
        return None, "127.0.0.1", ()

    def _connect(self):
        return ipyparallel.Client(self.file, timeout=_START)

    def _start(self, begun, what, *arguments, prefix=()):
        command = (sys.executable, "-m", f"ipyparallel.{what}", *arguments)
        return _started(begun, *prefix, *command, f"--profile-dir={self._folder}")


def why_not() -> str | None:
    """Why this machine can have no second host with a network of its own, or None if it may."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"there is no `{missing[0]}`"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


def _namespace(begun):
    ours, theirs = _free_addresses()
    cable = f"course{os.getpid()}"[:15]
    holder = _started(begun, "unshare", "--net", "sleep", "infinity")
    _wait(lambda: holder.cmdline()[:1] == ["sleep"], "a network namespace")
    inside = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
    end = ("name", _CABLE, "netns", str(holder.pid))
    _run("ip", "link", "add", "name", cable, "type", "veth", "peer", *end)
    begun.callback(_remove, cable)
    for prefix, device, address in (((), cable, ours), (inside, _CABLE, theirs)):
        _run(*prefix, "ip", "address", "add", f"{address}/30", "dev", device)
        _run(*prefix, "ip", "link", "set", device, "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    return cable, ours, inside


def _remove(cable):
    # it may be gone: with the namespace
    subprocess.run(["ip", "link", "delete", cable], check=False, capture_output=True)


def _free_addresses():
    """Two addresses of a network of their own, which is none of this machine's."""
    taken = {each.address for found in psutil.net_if_addrs().values() for each in found}
    while True:
        number = secrets.randbelow(_TEST_NETWORKS.num_addresses // 4)
        pair = [str(_TEST_NETWORKS[4 * number + which]) for which in (1, 2)]
        if not taken.intersection(pair):
            return pair


def _listening_at(address):
    return f"--ip={address}", f"--location={address}", cluster.ENCRYPTED, "--log-level=ERROR"


def _started(begun, *command):
    """A process that ends with the block, and with this process."""
    process = psutil.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    begun.callback(_end, process)
    cluster.keep(begun, "rank", process.pid)
    return process


def _end(process):
    process.terminate()
    try:
        process.wait(_END)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(_END)
    with suppress(ProcessLookupError):  # a controller that was killed leaves its schedulers
        os.killpg(process.pid, signal.SIGKILL)


def _written(file):
    _wait(file.exists, f"{file.name}, which ipcontroller writes")
    return file


def _wait(condition, what):
    end = time.monotonic() + _START
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"waited for {what} in vain: run this again on a less busy machine.")
        time.sleep(0.05)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)
