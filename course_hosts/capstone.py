"""What chapter 13 does with the learner's own training: the file that it becomes, and the hosts on
which the file runs.

    write_file(path, answers, ending)      # the answers and what they need, in one file
    Watched(training, images, folder)      # inside the file: counts samples, and waits at the gate
    with two_nodes(folder, program) as nodes: ...

The file is assembled of the cells in which the answers stand and of what these need: an answer stays a
cell that nbgrader and the grader know, and the program is the learner's own. The chapter's stations
run in the notebook; the grader starts no torchrun.
"""

import ast
import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from course_hosts import network_hosts
from course_hosts.network_hosts import NetworkHost
from course_hosts.nodes import TIMING, Nodes, Worker, environment, rendezvous, torchrun
from course_utils.hardware import device
from course_utils.lesson.statements import CodeCell, Statement, closure, statements_of

# --- one file of the notebook's cells -------------------------------------------------------------


def written(answers: dict[str, Any]) -> bool:
    """Whether all of these answers, by the ids of their exercises, are more than stubs; prints a
    line for each that is not."""
    missing = [id for id, answer in answers.items() if _is_stub(answer)]
    for id in missing:
        print(f"{id} {answers[id].__name__}: not attempted yet")
    return not missing


def write_file(path: Path, answers: list[Any], ending: str) -> None:
    """Writes a program: the answers, functions and classes of the notebook, with all that they need
    of its cells, and `ending` below them."""
    path.write_text(_sources(answers) + "\n\n" + ending, encoding="utf-8")


def _functions(answer: Any) -> list[FunctionType]:
    inside = vars(answer).values() if isinstance(answer, type) else [answer]
    return [function for function in inside if isinstance(function, FunctionType)]


def _is_stub(answer: Any) -> bool:
    """Whether a function of an answer still raises the stub's exception."""
    return any("NotImplementedError" in f.__code__.co_names for f in _functions(answer))


def _sources(answers: list[Any]) -> str:
    """The statements that define the answers, and those that these need, in their order."""
    own = {answer.__name__: _functions(answer)[0].__code__.co_filename for answer in answers}
    cells = [CodeCell(text, "", name, 0) for name, text in _cells(list(own.values()))]
    statements = [s for cell in cells for s in statements_of(cell)]
    needed = [statements[i] for i in sorted(closure(statements, set(), frozenset(own)))]
    imports = [_text(s) for s in needed if isinstance(s.node, (ast.Import, ast.ImportFrom))]
    others = [_text(s) for s in needed if not isinstance(s.node, (ast.Import, ast.ImportFrom))]
    return "\n\n\n".join(["\n".join(imports), *others]) + "\n"


def _text(statement: Statement) -> str:
    """A statement as it is written, with its comments and decorators."""
    node = statement.node
    first = min(part.lineno for part in [node, *getattr(node, "decorator_list", [])])
    return "\n".join(statement.cell.source.splitlines()[first - 1 : node.end_lineno])


def _cells(last: list[str]) -> Iterator[tuple[str, str]]:
    """Name and text of the cells that this kernel has run; the answers' own, as they are now, at the
    end, since a cell keeps its place here when it is run again."""
    folder = Path(last[0]).parent
    names = [name for name in linecache.cache if Path(name).parent == folder]
    for name in [*(name for name in names if name not in last), *last]:
        yield name, "".join(linecache.getlines(name))


# --- inside the file ------------------------------------------------------------------------------


class Watched:
    """A training whose samples are counted, and that waits where the notebook wants it to.

    It is handed the numbers of the samples instead of the samples, so that their use can be
    counted. Step and counts are a part of its state: what a kill undoes is taken off the count.
    """

    def __init__(self, training: Any, images: Tensor, folder: Path) -> None:
        """The process group is initialised."""
        self.training, self.images, self.folder = training, images, folder
        self.done, self.used = 0, torch.zeros(len(images), dtype=torch.int64)
        self.worker = Worker(folder) if "NODE" in os.environ else None
        if self.worker:
            self.worker.note("born", 0, at=psutil.Process().create_time())

    def step(self, numbers: Tensor, labels: Tensor) -> float:
        if self.worker:
            self.worker.wait_at_gate(self.done)
        # a new tensor: the old one may be in a state that was handed out
        self.used = self.used + torch.bincount(numbers.cpu(), minlength=len(self.used))
        loss = self.training.step(self.images[numbers.cpu()].to(device()), labels.to(device()))
        self.done += 1
        if self.worker:
            self.worker.note("step", self.done)
        return loss

    def state_dict(self) -> dict:
        return {"training": self.training.state_dict(), "done": self.done, "used": self.used}

    def load_state_dict(self, state: dict) -> None:
        self.training.load_state_dict(state["training"])
        self.done, self.used = state["done"], state["used"]

    def finish(self) -> None:
        """Rank 0 writes the last state where the notebook looks for it."""
        state = self.state_dict()
        if dist.get_rank() == 0:
            torch.save(state, self.folder / "result.pt")


def run_as_program(make: Callable, train: Callable, steps: int, batch: int, every: int) -> None:
    """What the file does under torchrun: trains `make()` on the samples in the folder that it is
    called with. On the CPU, also where there are GPUs: here two hosts are one machine."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    folder = Path(sys.argv[1])
    images, labels = torch.load(folder / "data.pt", weights_only=True)
    dist.init_process_group("gloo")
    watched = Watched(make(), images, folder)
    train(watched, torch.arange(len(images)), labels, folder / "saved", steps, batch, every)
    watched.finish()
    dist.destroy_process_group()


# --- two hosts, or two agents that play them ------------------------------------------------------


class _NodesOnHosts(Nodes):
    """Nodes A and B, each in a host of its own; A has the rendezvous store."""

    def __init__(self, folder: Path, program: str, hosts: dict[str, NetworkHost]) -> None:
        super().__init__(folder, program)
        self._hosts = {name.upper(): host for name, host in hosts.items()}

    def start(self, node: str) -> None:
        host, endpoint = self._hosts[node], f"{self._hosts['A'].address}:29400"
        timing = TIMING | {"is_host": int(node == "A")}
        command = [*host.prefix, *torchrun("1:2", 1, 5, endpoint)]
        command += rendezvous(self.id, timing, host.address)
        variables = environment(self.id, host.cable) | {"NODE": node}
        self.launch_agent(node, [*command, self.program, str(self.folder)], variables)
        self._note("start", node, "its agent starts")


@contextlib.contextmanager
def two_nodes(folder: Path, program: str) -> Iterator[Nodes]:
    """Nodes A and B: two hosts with a cable between them where this machine can have them, and else
    two agents on it."""
    if network_hosts.why_not():
        with Nodes(folder, program) as nodes:
            yield nodes
    else:
        with network_hosts.two_hosts() as hosts, _NodesOnHosts(folder, program, hosts) as nodes:
            yield nodes


def kind_of_nodes() -> str:
    """A sentence: what the nodes of `two_nodes` are on this machine."""
    reason = network_hosts.why_not()
    if reason:
        return f"Two agents on this machine play the nodes: {reason}."
    return "The nodes are two hosts: network namespaces, joined by a virtual cable."
