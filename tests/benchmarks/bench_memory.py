"""The memory of open notebooks, and how many learners a machine holds

All figures are PSS: what processes share counts in parts, so that they add up to what the machine
holds (proc(5), smaps_rollup). A chapter's peak is that of its kernel and of all below it, looked at
every half second while its cells run from top to bottom. COURSE_CHAPTERS="00 03" measures these only.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
from jupyter_client.manager import KernelManager

sys.path.append(str(Path(__file__).parents[2] / "tools"))

from execution import execute

from tests.benchmarks.measuring import print_table

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
MACHINE, SYSTEM = 32 * 1024, 2 * 1024  # MB, and what is left to the system
TOGETHER = 4
OPEN = """
from course_utils.launch import launch; from course_utils.launch.keepers import server
import matplotlib.pyplot, torch
_ = launch(lambda rank: rank, 2)
"""
LEAVE = "server.IDLE = 0\nserver.leave_if_idle()"


def main() -> None:
    alone, several = _open(1), _open(TOGETHER)
    server = _server()
    print_table(
        ["an open notebook, MB", "alone", f"each of {TOGETHER}"],
        [
            ["kernel, fork server and helpers, after a launch", alone[0], several[0]],
            ["the same after five minutes without a launch", alone[1], several[1]],
            ["a JupyterLab server, without kernels", server, ""],
        ],
    )
    peaks = {path.stem: _peak(path) for path in _chapters()}
    print_table(
        ["a chapter from top to bottom", "peak, MB", "learners at once on 32 GB"],
        [[name, peak, (MACHINE - SYSTEM) // (peak + server)] for name, peak in peaks.items()],
    )
    held = (MACHINE - SYSTEM) // (several[1] + server)
    print(f"- a machine of 32 GB holds {held} learners who read, with one notebook open\n")


def _chapters() -> list[Path]:
    wanted = tuple(os.environ.get("COURSE_CHAPTERS", "").split()) or ("",)
    return [path for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")) if path.name.startswith(wanted)]


def _open(count: int) -> tuple[int, int]:
    """Returns MB of each of `count` notebooks that are open at once: after a launch, and when their
    fork servers have left."""
    with contextlib.ExitStack() as stack:
        kernels = [stack.enter_context(_kernel()) for _ in range(count)]
        for kernel in kernels:
            kernel.execute_interactive(OPEN, timeout=600)
        busy = _pss_below_here()
        for kernel in kernels:
            kernel.execute_interactive(LEAVE, timeout=600)
        return busy // count, _pss_below_here() // count


@contextlib.contextmanager
def _kernel() -> Iterator:
    manager = KernelManager()
    manager.start_kernel(cwd=NOTEBOOKS)
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=600)
        yield client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _server() -> int:
    """Returns MB of a JupyterLab server that has begun to listen."""
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    with (
        tempfile.TemporaryDirectory() as home,
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"HOME": home}
        ) as process,
    ):
        for line in process.stderr:
            if "is running at" in line:
                break
        used = _pss_below_here()
        process.terminate()
        process.communicate()
    return used


def _peak(path: Path) -> int:
    """Returns MB at most while a notebook runs."""
    notebook, done, most = nbformat.read(path, as_version=4), threading.Event(), [0]

    def look():
        while not done.wait(0.5):
            most[0] = max(most[0], _pss_below_here())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        execute(notebook, path.parent)
    finally:
        done.set()
        looking.join()
    return most[0]


def _pss_below_here() -> int:
    """Returns MB of all processes below this one."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total >> 20
