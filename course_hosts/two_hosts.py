"""Two hosts on one machine, to try a cluster on: chapter 09 has its hosts from here.

    with TwoHosts() as two:
        with cluster(two.client):
            launch(train, 4)       # two ranks here, two on the other host
        two.fall_silent()          # pulls the cable of the other host
        two.come_back()

Where the system allows it, the other host has a network of its own (`network_hosts`). Elsewhere two
engines on this machine play the hosts, and the one that falls silent is stopped. All ends with the
block, and with this process, however it ends.
"""

import os
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

from course_hosts import cluster, network_hosts
from course_utils.launch.keepers.janitor import janitor

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
            janitor.keep_with(begun, "folder", self._folder)  # it has the keys
            self._here, address, prefix = self._second_host(begun)
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
        if self._here:
            self._here.cut_off()
        else:
            self.engines[1].send_signal(signal.SIGSTOP)

    def come_back(self) -> None:
        """It can be heard again."""
        if self._here and self._here.cable in psutil.net_if_addrs():
            self._here.plug_in()
        elif not self._here and self.engines[1].is_running():
            self.engines[1].send_signal(signal.SIGCONT)

    def _second_host(self, begun):
        """This host, if a cable leads to the second; its address; the second's prefix."""
        if reason := network_hosts.why_not():
            self.about = f"Two engines on this machine play the hosts: {reason}."
            return None, "127.0.0.1", ()
        here, there = begun.enter_context(network_hosts.host_beside_this())
        self.about = "The second host is a network namespace, with a cable to this machine."
        return here, here.address, there.prefix

    def _connect(self):
        return ipyparallel.Client(self.file, timeout=_START)

    def _start(self, begun, what, *arguments, prefix=()):
        command = (sys.executable, "-m", f"ipyparallel.{what}", *arguments)
        return _started(begun, *prefix, *command, f"--profile-dir={self._folder}")


def _listening_at(address):
    return f"--ip={address}", f"--location={address}", cluster.ENCRYPTED, "--log-level=ERROR"


def _started(begun, *command):
    """A process that ends with the block, and with this process."""
    process = psutil.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    begun.callback(_end, process)
    janitor.keep_with(begun, "rank", process.pid)
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
