"""launch where learners use it: in the cells of a real kernel, and in a plain script.

The kernel is one of Jupyter's own, started and interrupted as JupyterLab does it. Each test looks
at what is left of the kernel's processes and files from outside.
"""

import base64
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from queue import Empty

import psutil
import pytest
from kernels import KernelWithoutPorts

SECONDS = 2  # after which nothing may be left
PICTURE = "(a picture)"  # stands for one in what a cell shows


class Kernel:
    """A running kernel with a temporary folder of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.manager = KernelWithoutPorts(kernel_name="python3")
        self.manager.start_kernel(
            cwd=str(folder), env={**os.environ, "TMPDIR": str(folder), "JUPYTER_PLATFORM_DIRS": "1"}
        )
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.pid
        self.run("import os, sys, time, torch, torch.distributed as dist")
        self.run("import matplotlib.pyplot as plt")
        self.run("import functools; from course_utils.launch import RankFailure, launch")
        self.run("launch = functools.partial(launch, backend='gloo')")  # cells use CPU tensors

    def start(self, code):
        self._message = self.client.execute(code)

    def wait(self, for_text=None, timeout=90):
        """Returns what the cell prints and, if it fails, how its error is shown. With `for_text`,
        returns as soon as that was printed."""
        shown, end = "", time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != self._message:
                continue
            content = message["content"]
            shown += content.get("text", "")
            shown += "\n".join(content.get("traceback", []))
            data = content.get("data", {})
            shown += PICTURE if _is_png(data) else data.get("text/plain", "")
            if for_text and for_text in shown:
                return shown
            if content.get("execution_state") == "idle":
                return shown
        raise AssertionError(f"not finished after {timeout} seconds: {shown}")

    def run(self, code):
        self.start(code)
        return self.wait()

    def processes(self):
        return psutil.Process(self.pid).children(recursive=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with _kernel(tmp_path_factory.mktemp("kernel")) as kernel:
        yield kernel


@contextmanager
def _kernel(folder):
    kernel = Kernel(folder)
    try:
        yield kernel
    finally:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)


def _wait_until(condition, seconds=SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def _is_png(data):
    return base64.b64decode(data.get("image/png", "")).startswith(b"\x89PNG")


def _alive(processes):
    return [process for process in processes if _lives(process)]


def _lives(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it has ended between the two
        return False


ENDLESS = """
def work(rank):
    print("rank", rank, "has pid", os.getpid(), flush=True)
    if rank == 0:
        dist.barrier()
    {}

launch(work, 2)
"""
# The second holds Python's lock for ever, so that no Python code of the rank can react.
LOOPS = ["time.sleep(1000)", "import itertools; sum(itertools.repeat(1))"]


def test_cells(kernel):
    shown = kernel.run(
        "def work(rank, factor):\n"
        "    t = torch.tensor(rank * factor)\n"
        "    dist.all_reduce(t)\n"
        "    print('sum', t.item())\n"
        "    return t.item()\n"
        "\n"
        "launch(work, 3, 10)"
    )
    assert shown == "[rank 0] sum 30\n[rank 1] sum 30\n[rank 2] sum 30\n[30, 30, 30]"

    shown = kernel.run("%%time\nresults = launch(work, 2, 1)")
    assert shown.startswith("[rank 0] sum 1\n[rank 1] sum 1\nCPU times")

    shown = kernel.run(
        "def mean(values):\n"
        "    return sum(values) / len(values)\n"
        "\n"
        "def work(rank):\n"
        "    if rank == 1:\n"
        "        mean([])\n"
        "    dist.barrier()"
    )
    shown = kernel.run("launch(work, 2)")
    assert shown == (
        "RankFailure: rank 1 raised ZeroDivisionError: division by zero\n"
        "    cell line 6, in work:  mean([])\n"
        "    cell line 2, in mean:  return sum(values) / len(values)\n"
        "Meanwhile rank 0 was waiting in barrier (cell line 7)."
    )

    shown = kernel.run(
        "try:\n    launch(work, 2)\nexcept RankFailure as failure:\n    print(failure)"
    )
    assert shown.startswith("rank 1 raised ZeroDivisionError: division by zero\n")


FIGURES = """
def draw(rank):
    plt.plot([rank, 1])
    print("half a line", end=" ")
    plt.show()
    figure, _ = plt.subplots(1, 2)
    figure.show()
    print("rank", rank, "goes on with", plt.get_fignums())
    plt.figure()

launch(draw, 2)
"""


def test_figures_of_ranks(kernel):
    """Below the line that names it, in the order in which the ranks print."""
    shown = kernel.run(FIGURES)
    of_each = [
        "[rank {0}] half a line \n[rank {0}] <Figure size 640x480 with 1 Axes>\n",
        PICTURE,
        "[rank {0}] <Figure size 640x480 with 2 Axes>\n",
        PICTURE,
        "[rank {0}] rank {0} goes on with []\n[rank {0}] <Figure size 640x480 with 0 Axes>\n",
        PICTURE,
    ]
    assert (
        shown == "".join(part.format(rank) for rank in (0, 1) for part in of_each) + "[None, None]"
    )
    assert not [p.name for p in kernel.folder.iterdir() if p.name.startswith("course-")]


def test_endless_figures(kernel):
    shown = kernel.run(
        "def draw(rank):\n"
        "    for _ in range(30):\n"
        "        plt.figure()\n"
        "        plt.show()\n"
        "\n"
        "launch(draw, 1)"
    )
    assert shown.count(PICTURE) == 20
    assert shown.endswith(
        f"{PICTURE}[rank 0] further figures are left out: a rank shows 20 of them\n[None]"
    )


def test_exit_in_a_cell(kernel):
    """In a kernel, exit is an object of IPython's that holds the kernel."""
    shown = kernel.run("def work(rank):\n    exit()\n\nlaunch(work, 2)")
    assert shown.startswith("RankFailure: rank 0 called sys.exit(None) before it returned.")


def test_hang_in_a_cell(kernel):
    shown = kernel.run(
        "def work(rank):\n"
        "    t = torch.ones(3)\n"
        "    if rank != 1:\n"
        "        dist.all_reduce(t)\n"
        "\n"
        "launch(work, 4)"
    )
    assert shown == (
        "RankFailure: a rank waits for a call that no other rank will make.\n"
        "  ranks 0, 2 and 3 wait in all_reduce\n"
        "    cell line 4, in work:  dist.all_reduce(t)\n"
        "  rank 1 finished without calling it\n"
        "Every rank of a group has to make the same collective calls, in the same order,\n"
        "with tensors of the same shape and data type."
    )


def test_a_cell_may_cache_a_function_and_name_torchs_switches(kernel):
    shown = kernel.run(
        "@functools.cache\n"
        "def half(n):\n"
        "    return n / 2\n"
        "\n"
        "def work(rank):\n"
        "    torch.backends.cudnn.benchmark = torch.backends.cuda.matmul.allow_tf32 = False\n"
        "    return half(rank), torch.ops.aten.add(1, rank).item()\n"
        "\n"
        "launch(work, 2)"
    )
    assert shown == "[(0.0, 1), (0.5, 2)]"


def test_a_cells_autograd_function_may_be_once_differentiable(kernel):
    shown = kernel.run(
        "import torch\n"
        "\n"
        "class Double(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        return 2 * x\n"
        "\n"
        "    @staticmethod\n"
        "    @torch.autograd.function.once_differentiable\n"
        "    def backward(ctx, gradient):\n"
        "        return 2 * gradient\n"
        "\n"
        "def work(rank):\n"
        "    x = torch.ones((), requires_grad=True)\n"
        "    Double.apply(x).backward()\n"
        "    return x.grad.item()\n"
        "\n"
        "launch(work, 2)"
    )
    assert shown == "[2.0, 2.0]"


@pytest.mark.parametrize("loop", LOOPS, ids=["sleeps", "holds_the_lock"])
def test_interrupt(kernel, loop):
    before = {p.pid for p in kernel.processes()}
    kernel.start(ENDLESS.format(loop))
    kernel.wait(for_text="[rank 0] rank 0 has pid")
    ranks = [p for p in kernel.processes() if p.pid not in before and p.ppid() != kernel.pid]
    assert len(ranks) >= 2
    start = time.monotonic()
    kernel.manager.interrupt_kernel()
    shown = re.sub(r"\x1b\[[\d;]*m", "", kernel.wait())
    assert "KeyboardInterrupt: launch was interrupted, and its ranks have ended." in shown
    assert set(re.findall(r"\w+\.py", shown)) == {"launching.py"}  # besides the cell's own line
    assert time.monotonic() - start < 1 + SECONDS
    _wait_until(lambda: not _alive(ranks))
    assert [p.name for p in kernel.folder.iterdir() if p.name.startswith("course-")] == []
    assert kernel.run("launch(lambda rank: rank, 2)") == "[0, 1]"


def _fork_servers(kernel):
    below = psutil.Process(kernel.pid).children()
    return [p for p in below if re.search("fork(s|server)", " ".join(p.cmdline()))]


def test_an_interrupt_in_the_first_second_of_the_first_launch(tmp_path):
    """It is for the launch: the fork server, which still imports torch, goes on."""
    with _kernel(tmp_path) as kernel:
        kernel.start("print('begins'); launch(lambda rank: rank, 2)")
        kernel.wait(for_text="begins")
        _wait_until(lambda: _fork_servers(kernel), 60)
        before = _fork_servers(kernel)
        kernel.manager.interrupt_kernel()
        shown = re.sub(r"\x1b\[[\d;]*m", "", kernel.wait())
        assert "KeyboardInterrupt: launch was interrupted, and its ranks have ended." in shown
        assert set(re.findall(r"\w+\.py", shown)) == {"launching.py"}
        assert kernel.run("launch(lambda rank: rank, 2)") == "[0, 1]"
        assert _fork_servers(kernel) == before


@pytest.mark.parametrize("end", ["kill", "restart"])
def test_end_of_the_kernel(end, tmp_path):
    with _kernel(tmp_path) as kernel:
        kernel.start(ENDLESS.format(LOOPS[end == "kill"]))
        kernel.wait(for_text="[rank 0] rank 0 has pid")
        processes = kernel.processes()
        assert len(processes) >= 5  # two ranks, fork server, resource tracker, janitor
        if end == "kill":
            os.kill(kernel.pid, signal.SIGKILL)
        else:
            kernel.manager.restart_kernel(now=True)
        _wait_until(lambda: not _alive(processes))
        _wait_until(lambda: not [*tmp_path.glob("course-*"), *tmp_path.glob("pymp-*")])


SCRIPT = """
import ctypes
import torch
import torch.distributed as dist
from course_utils.launch import RankFailure, launch

print("the script runs")

def work(rank):
    t = torch.tensor(rank)
    dist.all_reduce(t)
    ctypes.CDLL(None).printf(b"C writes\\n")
    return t.item()

print(launch(work, 2, backend="gloo"))  # no `if __name__ == "__main__"` is needed

def draw(rank):
    from matplotlib import pyplot
    pyplot.figure()

launch(draw, 1)

def broken(rank):
    return 1 / rank

try:
    launch(broken, 2)
except RankFailure as failure:
    print(failure)
"""


def test_plain_script(tmp_path):
    """In a temporary folder whose name is longer than a socket's address, as on clusters; and called
    from a folder with a file that has the name of a module of Python's."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    temporary = tmp_path / ("job-4711-" * 12)
    temporary.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "queue.py").write_text("raise RuntimeError('mine')")
    done = subprocess.run(
        [sys.executable, str(path)],
        # With PYTHONUNBUFFERED, Python itself makes C's output unbuffered.
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": ""},
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == (
        "the script runs\n[rank 0] C writes\n[rank 1] C writes\n[1, 1]\n"
        "[rank 0] <Figure size 640x480 with 0 Axes> "
        "(a notebook shows it here; a script keeps it with savefig)\n"
        "rank 0 raised ZeroDivisionError: division by zero\n"
        "    train.py, line 24, in broken:  return 1 / rank\n"
        "Meanwhile rank 1 finished.\n"
    )
    assert done.stderr == ""
    left = {path.name.split("_")[0] for path in temporary.iterdir()}
    assert left <= {"torchinductor"}  # PyTorch's own lasting cache


WATCHING = "import threading; print([t.name for t in threading.enumerate()].count('preload'))"


def test_a_kernel_starts_the_fork_server_before_the_first_launch_and_a_program_does_not(kernel):
    """The thread that starts it lives on, and looks whether it is needed."""
    assert kernel.run(WATCHING) == "1\n"
    program = ["import course_utils.launch", WATCHING]
    program.append("print(course_utils.launch.keepers.server._server)")
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(program)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\nNone\n"
