"""Programs as people start them in a terminal, for chapters that show how."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import platformdirs
import torch.distributed as dist

from course_utils import hardware
from course_utils.comm.fair import FairClock
from course_utils.launch.keepers.janitor import janitor

_TICK = 1.0  # seconds between two looks at a program that runs
# torchrun's traceback, which says that a rank has failed, between what that has said and its report
_AGENTS_OWN = re.compile(
    r'Traceback [^\n]+\n  File "<frozen runpy>".*?ChildFailedError: *\n', re.DOTALL
)
_TO_END = 40.0  # seconds: torchrun gives its workers 30
# torchrun starts workers with -u: each piece of a line would be written by itself, and lines of two ranks
# mix. Python imports this at its start, in place of a module of that name that may lie behind it.
_WHOLE_LINES = """
import importlib.machinery, importlib.util, os, sys
if sys.stdout and sys.stdout.write_through:
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
behind = sys.path[sys.path.index(os.path.dirname(__file__)) + 1:]
if found := importlib.machinery.PathFinder.find_spec(__name__, behind):
    found.loader.exec_module(importlib.util.module_from_spec(found))
"""


def scratch() -> Path:
    """Makes the folder for a chapter's scripts and results; returns Path("scratch").

    It lies beside the notebook. Where that folder cannot be written (a course that is installed
    once for everybody), the notebook goes on in the user's own cache folder, and says where.
    """
    folder = Path("scratch")
    if not os.access(folder if folder.exists() else ".", os.W_OK):
        own = platformdirs.user_cache_path("parallelism-course") / Path.cwd().name
        own.mkdir(parents=True, exist_ok=True)
        os.chdir(own)
        print(f"The course's folder is read-only. The chapter's files go to {own / folder}.")
    folder.mkdir(exist_ok=True)
    return folder


def loopback() -> str:
    """The name of this machine's loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def store_on(port: int) -> dist.TCPStore:
    """A store that only this machine can reach; port 0: a free one. OSError if it is taken."""
    listening = socket.create_server(("127.0.0.1", port))  # TCPStore would take all interfaces
    port, listening = listening.getsockname()[1], listening.detach()  # the store closes it itself
    own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening}
    return dist.TCPStore("127.0.0.1", port, **own)


@contextmanager
def caught_terminal() -> Iterator[list[str]]:
    """Yields a list that holds, at the end, the lines that child processes wrote to stderr."""
    lines: list[str] = []
    with tempfile.TemporaryFile("w+") as file:
        terminal = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
            file.seek(0)
            lines += re.sub(r"\x1b\[[0-9;]*m", "", file.read()).splitlines()  # 3.13 colours them


def run_in_terminal(
    *command: str | Path, timeout: float = 100.0, variables: Mapping[str, str] | None = None
) -> str:
    """Runs a program, with more `variables` in its environment; returns what it printed, or the end of its
    errors where it failed.

    Its ranks find each other through the loopback interface and take one thread each. While it
    runs, a line under the cell counts the seconds. It is ended when the notebook is interrupted,
    and after `timeout` seconds, without those in which a busy machine had no processor for it. Raises
    TimeoutError with a sentence then.
    """
    own = {"GLOO_SOCKET_IFNAME": loopback(), "OMP_NUM_THREADS": "1", **hardware.QUIET}
    own["PYTHONUNBUFFERED"] = ""  # else a line and its end are two writes, too
    if "--max-restarts" in command:  # each start of the ranks meets in a store of its own
        own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (
        tempfile.TemporaryDirectory(prefix="course-terminal-") as logs,  # torchrun's own would stay
        subprocess.Popen(
            command,
            env=os.environ | own | _in_folder(logs) | (variables or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # all that it starts can be ended with it
        ) as program,
        ExitStack() as opened,
    ):
        janitor.keep_with(opened, "rank", program.pid)
        opened.callback(_end, program)
        printed, errors = _patiently(program, timeout)
    return printed if program.returncode == 0 else _AGENTS_OWN.sub("", errors)[-3000:]


def _in_folder(logs: str) -> dict[str, str]:
    """Has torchrun log into a folder, and its workers write whole lines."""
    Path(logs, "sitecustomize.py").write_text(_WHOLE_LINES)
    path = [logs, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PET_LOG_DIR": logs, "PYTHONPATH": os.pathsep.join(path)}


def _end(program):
    """Ends a program that is not over, and what it has left behind, such as mp.spawn's ranks."""
    program.terminate()
    with suppress(subprocess.TimeoutExpired):
        program.wait(_TO_END)
    with suppress(ProcessLookupError, PermissionError):  # nobody is left; on a Mac, only zombies
        os.killpg(program.pid, signal.SIGKILL)


def _patiently(program, timeout):
    """What the program prints to its two streams, when it has ended."""
    started, spent, progress = time.monotonic(), 0.0, _Progress()
    clock = FairClock(program.pid)
    try:
        while True:
            try:
                return program.communicate(timeout=_TICK)
            except subprocess.TimeoutExpired as late:
                spent += clock.passed()
                seconds = time.monotonic() - started
                progress.show(f"still running after {seconds:.0f} seconds ...")
                if spent >= timeout:
                    raise TimeoutError(_sentence(program, seconds, late)) from None
    finally:
        progress.clear()


def _sentence(program, seconds, late):
    said = b"".join(part or b"" for part in (late.stdout, late.stderr))
    last = said.decode(errors="replace").strip()[-500:]
    return (
        f"{' '.join(map(str, program.args))}\nwas still running after {seconds:.0f} seconds and was "
        "ended. Run the cell again when fewer programs are running, or give run_in_terminal a "
        f"larger `timeout`. {'It had printed:' if last else 'It had printed nothing.'}\n{last}"
    )


class _Progress:
    """A line under the cell, once it takes longer than one likes to wait without a word.

    Not while a notebook is tested: what is stored must not depend on how long it took.
    """

    def __init__(self):
        self._begins = time.monotonic() + 5
        self._handle = None

    def show(self, text):
        if time.monotonic() < self._begins or "PYTEST_CURRENT_TEST" in os.environ:
            return
        from IPython.display import HTML, display

        if self._handle is None:
            self._handle = display(HTML(""), display_id=True)  # None where there is no notebook
        if self._handle is not None:
            self._handle.update(HTML(f"<i>{text}</i>"))

    def clear(self):
        if self._handle is not None:
            self.show("")


def torchrun(ranks: int, script: Path, *arguments: str | Path) -> str:
    """Runs `script` on `ranks` ranks of this machine, as the command torchrun does.

    Chapter 3 explains the options. The ranks meet in a store of this process, on 127.0.0.1
    (docs.pytorch.org/docs/stable/elastic/run.html). torchrun's own would listen on all interfaces, and
    whoever reaches it can have its agent run a program. And the ranks' own would choose a port that is free
    until they have imported PyTorch.
    """
    store = store_on(0)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    options = [
        *("--nproc-per-node", str(ranks), "--rdzv-backend", "static"),
        *("--master-addr", "127.0.0.1", "--master-port", str(store.port)),
    ]
    module = [sys.executable, "-m", "torch.distributed.run"]
    variables = meeting | {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # else they would make one there
    return run_in_terminal(*module, *options, script, *arguments, variables=variables)
