"""The learner's own script on two nodes, for chapter 13: its steps wait at a gate, and its memory is measured.

    with two_nodes(folder, script, workers=2, arguments=["--epochs", "1"]) as nodes: ...
    held(folder)  # the most that a rank's tensors had, in bytes, by the number of ranks

The workers of an agent run this file, and it runs the script. A step that is on its way belongs to a life: the
script alone knows which one of the whole training it is.
"""

import contextlib
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from course_hosts import network_hosts
from course_hosts.network_hosts import NetworkHost
from course_hosts.nodes import TIMING, Nodes, Worker, environment, rendezvous, torchrun
from course_utils.lesson.terminal import loopback
from course_utils.trace.meters import Sampling, local


def held(folder: Path) -> dict[int, int]:
    """The most bytes that the tensors of a rank had at one moment, by the number of ranks in its life. A life that
    was killed has left nothing."""
    peaks: dict[int, int] = {}
    for path in (folder / "peaks").iterdir():
        ranks, peak = map(int, path.read_text().split())
        peaks[ranks] = max(peaks.get(ranks, 0), peak)
    return peaks


# --- the workers ----------------------------------------------------------------------------------


class _Steps:
    """Holds each step of the script at the gate, and keeps the diary."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.done, self.worker = folder, 0, None

    def before(self, optimizer: Optimizer, *_) -> None:
        if _of_zeros(optimizer):
            return
        if not self.worker:  # now there is a process group
            self.worker = Worker(self.folder)
            self.worker.note("born", 0, at=psutil.Process().create_time())
        self.worker.wait_at_gate(self.done)

    def after(self, optimizer: Optimizer, *_) -> None:
        if not _of_zeros(optimizer):
            self.done += 1
            self.worker.note("step", self.done)


def _of_zeros(optimizer: Optimizer) -> bool:
    """Whether it is the step with which get_state_dict makes an optimizer's state."""
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    return not any(local(each.grad).any() for each in parameters if each.grad is not None)


def _work(folder: Path, arguments: list[str]) -> None:
    """Runs the script, `arguments[0]`, as torchrun would have run it."""
    sys.argv[:] = arguments
    steps = _Steps(folder)
    register_optimizer_step_pre_hook(steps.before)
    register_optimizer_step_post_hook(steps.after)
    with Sampling() as meter:
        runpy.run_path(arguments[0], run_name="__main__")
    said = f"{steps.worker.ranks} {meter.peak}"
    (folder / "peaks" / f"{steps.worker.group}-{steps.worker.rank}").write_text(said)


# --- two hosts, or two agents that play them ------------------------------------------------------


class _Scripts(Nodes):
    """Nodes whose workers run a script with arguments, in `hosts` by the names of nodes, or all on this machine."""

    def __init__(
        self, folder: Path, script: Path, workers: int, arguments: Sequence, hosts: dict
    ) -> None:
        super().__init__(folder, __file__)
        (folder / "peaks").mkdir()
        self._count, self._hosts = workers, hosts
        self._arguments = [str(each) for each in (script, *arguments)]

    def start(self, node: str) -> None:
        """Starts a node's agent, which starts its workers."""
        here = NetworkHost("127.0.0.1", loopback(), 0)
        host = self._hosts.get(node, here)
        endpoint = (
            f"{self._hosts['A'].address}:29400" if self._hosts else f"127.0.0.1:{self._store.port}"
        )
        timing = TIMING | {"is_host": int(bool(self._hosts) and node == "A")}
        command = [
            *(host.prefix if self._hosts else ()),
            *torchrun("1:2", self._count, 5, endpoint),
        ]
        command += rendezvous(self.id, timing, host.address)
        variables = environment(self.id, host.cable) | {"NODE": node}
        command += [self.program, str(self.folder), *self._arguments]
        self.launch_agent(node, command, variables)
        self._note("start", node, "its agent starts")


@contextlib.contextmanager
def two_nodes(folder: Path, script: Path, workers: int, arguments: Sequence) -> Iterator[Nodes]:
    """Nodes A and B with so many workers each: two hosts with a cable between them where this machine can have them,
    and else two agents on it."""
    with contextlib.ExitStack() as opened:
        hosts = {}
        if not network_hosts.why_not():
            opened_hosts = opened.enter_context(network_hosts.two_hosts())
            hosts = {name.upper(): host for name, host in opened_hosts.items()}
        yield opened.enter_context(_Scripts(folder, script, workers, arguments, hosts))


def kind_of_nodes() -> str:
    """A sentence: what the nodes of `two_nodes` are on this machine."""
    reason = network_hosts.why_not()
    if reason:
        return f"Two agents on this machine play the nodes: {reason}."
    return "The nodes are two hosts: network namespaces, joined by a virtual cable."


if __name__ == "__main__":
    _work(Path(sys.argv[1]), sys.argv[2:])
