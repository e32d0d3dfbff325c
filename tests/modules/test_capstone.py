"""course_hosts/capstone.py: the file that chapter 13 makes of cells, and the nodes that it runs on."""

import linecache
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from course_hosts import capstone, network_hosts
from course_hosts.network_hosts import CABLE
from course_hosts.nodes import Gate, Nodes, gone_within, kill, processes_of
from course_utils.lesson.terminal import loopback

# ---- the file ------------------------------------------------------------------------------------

IMPORTS = """\
import math
import os  # nothing below needs it
from pathlib import Path
"""
NEEDED = """\
print("only for the notebook")
FACTOR = 3


def twice(x):  # kept, with its comment
    return 2 * x


def never_used():
    return math.inf
"""
ANSWERS = """\
from functools import cache

@cache
def area(r):
    # the circle's
    return FACTOR * twice(math.pi) * r**2


class Square:
    def __init__(self, side):
        self.side = side
"""
ENDING = "if __name__ == '__main__':\n    print(round(area(1), 3), Square(4).side)\n"


class Kernel:
    """Runs cells as IPython does: each is a file of the folder that Python's linecache knows."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.names = folder, {"__name__": "__main__"}

    def run(self, *cells: str) -> None:
        for cell in cells:
            name = str(self.folder / f"{hash(cell)}.py")
            linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
            exec(compile(cell, name, "exec"), self.names)  # noqa: S102 - as a kernel does


@pytest.fixture
def kernel(tmp_path):
    yield Kernel(tmp_path / "cells")
    for name in [name for name in linecache.cache if name.startswith(str(tmp_path))]:
        del linecache.cache[name]


def written(kernel, path, *names):
    answers = [kernel.names[name] for name in names]
    capstone.write_file(
        path, [getattr(answer, "__wrapped__", answer) for answer in answers], ENDING
    )
    return path.read_text()


def printed(program):
    return subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=True
    ).stdout


def test_the_file_has_the_answers_with_what_they_need_and_no_more(kernel, tmp_path):
    kernel.run(IMPORTS, NEEDED, ANSWERS)
    text = written(kernel, tmp_path / "mine.py", "area", "Square")
    assert printed(tmp_path / "mine.py") == "18.85 4\n"
    assert text.startswith("import math\nfrom functools import cache\n\n\n")
    for part in ("FACTOR = 3", "def twice(x):  # kept", "@cache\ndef area", "# the circle's"):
        assert part in text
    for part in ("never_used", "only for the notebook", "import os", "Path"):
        assert part not in text


def test_an_answer_that_was_run_again_is_there_as_it_is_now(kernel, tmp_path):
    """The first cell keeps its place before the second when it is run again."""
    other = ANSWERS.replace("FACTOR * ", "10 * ")
    kernel.run(IMPORTS, NEEDED, ANSWERS, other, ANSWERS)
    written(kernel, tmp_path / "mine.py", "area", "Square")
    assert printed(tmp_path / "mine.py") == "18.85 4\n"


def test_stubs_are_named_and_answers_are_not(kernel, capsys):
    kernel.run(
        "def done(x):\n    return x\n",
        "def stub(x):\n    raise NotImplementedError\n",
        "class Half:\n    def a(self):\n        pass\n    def b(self):\n        raise NotImplementedError\n",
    )
    names = kernel.names
    assert capstone.written({"13.2": names["done"]})
    assert not capstone.written({id: names[id] for id in ("done", "stub", "Half")})
    lines = ["stub stub: not attempted yet", "Half Half: not attempted yet"]
    assert capsys.readouterr().out.splitlines() == lines


# ---- inside the file -----------------------------------------------------------------------------


class Sums:
    """A training whose state is the sum of what it was handed."""

    def __init__(self):
        self.seen = torch.zeros(())

    def step(self, images, labels):
        self.seen = self.seen + (images.sum() + labels.sum()).cpu()
        return self.seen.item()

    def state_dict(self):
        return {"seen": self.seen.clone()}

    def load_state_dict(self, state):
        self.seen = state["seen"].clone()


IMAGES = torch.tensor([[1.0], [10.0], [100.0]])
LABELS = torch.tensor([1000, 2000, 3000])


@pytest.fixture
def group(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    monkeypatch.delenv("NODE", raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_watched_counts_samples_and_takes_back_what_a_kill_undid(group, tmp_path):
    watched = capstone.Watched(Sums(), IMAGES, tmp_path)
    assert watched.step(torch.tensor([0, 2]), LABELS[[0, 2]]) == 4101
    saved = watched.state_dict()
    watched.step(torch.tensor([2, 1, 2]), LABELS[[2, 1, 2]])
    assert (watched.done, watched.used.tolist()) == (2, [1, 1, 3])
    assert (saved["done"], saved["used"].tolist()) == (1, [1, 0, 1]), "a state that stays"
    again = capstone.Watched(Sums(), IMAGES, tmp_path)
    again.load_state_dict(saved)
    again.step(torch.tensor([1]), LABELS[[1]])
    again.finish()
    result = torch.load(tmp_path / "result.pt", weights_only=True)
    assert (result["done"], result["used"].tolist()) == (2, [1, 1, 1])
    assert result["training"]["seen"].item() == 4101 + 2010


def test_a_load_is_not_changed_by_later_steps(group, tmp_path):
    watched = capstone.Watched(Sums(), IMAGES, tmp_path)
    state = watched.state_dict()
    watched.load_state_dict(state)
    watched.step(torch.tensor([0]), LABELS[[0]])
    assert state["used"].tolist() == [0, 0, 0]


def test_on_a_node_it_waits_at_the_gate_and_keeps_a_diary(group, monkeypatch, tmp_path):
    monkeypatch.setenv("NODE", "A")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    (tmp_path / "events").mkdir()
    gate, asked = Gate(tmp_path / "gate"), []
    gate.open()
    watched = capstone.Watched(Sums(), IMAGES, tmp_path)
    monkeypatch.setattr(watched.worker, "wait_at_gate", asked.append)
    for _ in range(2):
        watched.step(torch.tensor([0]), LABELS[[0]])
    assert asked == [0, 1]
    [diary] = (tmp_path / "events").iterdir()
    lines = diary.read_text().splitlines()
    assert [('"born"' in line, '"step": 2' in line) for line in lines] == [
        (True, False),
        (False, False),
        (False, True),
    ]


# ---- the nodes -----------------------------------------------------------------------------------

PROGRAM = """\
import os, psutil, torch
import torch.distributed as dist
from course_hosts.capstone import run_as_program


class Sum:
    def step(self, images, labels):
        total = images.sum()
        dist.all_reduce(total)
        return total.item()

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def train(training, numbers, labels, folder, steps, batch, every):
    folder.mkdir(exist_ok=True)
    own = {name: [a.address for a in found] for name, found in psutil.net_if_addrs().items()}
    torch.save(own, folder / os.environ["NODE"])
    saved = folder / "state"
    if saved.exists():
        training.load_state_dict(torch.load(saved, weights_only=True))
    while training.done < steps:
        training.step(numbers[:batch], labels[:batch])
        if dist.get_rank() == 0:
            torch.save(training.state_dict(), folder / "unfinished")
            os.replace(folder / "unfinished", saved)
        dist.barrier()


if __name__ == "__main__":
    run_as_program(Sum, train, steps=4, batch=2, every=1)
"""


@pytest.mark.parametrize("why_not", ["nobody lends a cable", None], ids=["agents", "hosts"])
def test_a_node_dies_and_the_other_ends_the_training(why_not, monkeypatch, tmp_path):
    reason = network_hosts.why_not()
    if why_not is None and reason:
        pytest.skip(f"two hosts did not run: {reason}")
    monkeypatch.setattr(network_hosts, "why_not", lambda: why_not)
    monkeypatch.setenv("PYTHONPATH", str(Path(capstone.__file__).parents[1]))
    assert (why_not or "two hosts") in capstone.kind_of_nodes()
    program, folder = tmp_path / "program.py", tmp_path / "run"
    program.write_text(PROGRAM)
    with capstone.two_nodes(folder, str(program)) as nodes:
        torch.save((IMAGES, LABELS), folder / "data.pt")
        nodes.start("A")
        nodes.start("B")
        nodes.train(ranks=2, first=0, until=2)
        nodes.kill_node("B")
        nodes.train(ranks=1, first=2)
    result = torch.load(folder / "result.pt", weights_only=True)
    assert (result["done"], result["used"].tolist()) == (4, [4, 4, 0])
    own = {name: torch.load(folder / "saved" / name, weights_only=True) for name in "AB"}
    if why_not:
        assert own["A"] == own["B"] and CABLE not in own["A"]
    else:
        assert "10.77.0.1" in own["A"][CABLE] and "10.77.0.2" in own["B"][CABLE]
    assert not processes_of(nodes.id)


# ---- a kernel that is killed ---------------------------------------------------------------------

KERNEL = """\
import sys, time, torch
from pathlib import Path
from course_hosts import capstone, network_hosts

folder, program, why_not = sys.argv[1:]
network_hosts.why_not = lambda: why_not
with capstone.two_nodes(Path(folder), program) as nodes:
    torch.save((torch.ones(3, 1), torch.ones(3)), Path(folder, "data.pt"))
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
def test_a_kernel_that_is_killed_leaves_no_process_and_no_host(why_not, hosts, tmp_path):
    if hosts and (reason := network_hosts.why_not()):
        pytest.skip(f"two hosts did not run: {reason}")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-c", KERNEL, str(tmp_path / "run"), str(program), why_not]
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
