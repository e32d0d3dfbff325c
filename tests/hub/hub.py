"""A JupyterHub on this machine: its own programs, system users that are made for it and removed.

with jupyterhub(folder, ["ada", "ben"]) as hub:
    hub.start_server("ada")
    failed = hub.run("ada", "notebooks/00_start_here.ipynb")

The course is installed once, root's, and nobody else can write it. JupyterHub comes from PyPI into an
environment of its own, its proxy from npm, both into build/hub, where they stay. Everything listens on
127.0.0.1. Needs root: JupyterHub starts each user's server under the user's own name.
"""

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import nbformat
import psutil
from tornado.httpclient import HTTPRequest
from tornado.websocket import websocket_connect

from tests.support.ports import free_ports

ROOT = Path(__file__).parents[2]
PLACE = ROOT / "build" / "hub"
PYTHON = PLACE / "environment" / "bin" / "python"
PROXY = PLACE / "node_modules" / ".bin" / "configurable-http-proxy"
PROGRAMS = ("uv", "npm", "unshare", "useradd", "userdel")
PATIENCE = 600  # seconds, for a busy machine
SETTINGS = """
c.JupyterHub.bind_url = "http://127.0.0.1:{port}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{hub_port}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{proxy_port}"
c.ConfigurableHTTPProxy.command = ["{proxy}"]
c.ConfigurableHTTPProxy.pid_file = "{folder}/proxy.pid"
c.JupyterHub.db_url = "sqlite:///{folder}/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{folder}/cookie"
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allowed_users = {users!r}
c.Spawner.cmd = ["{python}", "-m", "jupyterhub.singleuser"]
c.Spawner.notebook_dir = "{root}"
c.Spawner.environment = {{"JUPYTER_PATH": "{place}/share"}}
c.Spawner.start_timeout = c.Spawner.http_timeout = {patience}
c.JupyterHub.services = [{{"name": "test", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"],
      "scopes": ["admin:users", "admin:servers", "access:servers"]}}
]
"""


def why_not() -> str | None:
    """Why JupyterHub cannot run here; None if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{missing[0]} is not here"
    if os.geteuid():
        return "it takes root, to start servers of other users"
    if hidden := _hidden(ROOT):
        return f"the course lies in {hidden}, which other users cannot enter"
    return None


def _hidden(path: Path) -> Path | None:
    """The first folder on the way to `path` that other users cannot enter."""
    return next((p for p in reversed([path, *path.parents]) if not p.stat().st_mode & 1), None)


def install() -> None:
    """Fetches JupyterHub and its proxy, where they are not here yet, and names the course's kernel."""
    PLACE.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        _call("uv", "venv", "--seed", "--python", sys.executable, PYTHON.parents[1])
        _call("uv", "pip", "install", "--python", PYTHON, "jupyterhub>=5", "jupyter_server")
    if not PROXY.exists():
        _call("npm", "install", "--prefix", PLACE, "configurable-http-proxy@5")
    spec = PLACE / "share" / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec.write_text(json.dumps({"argv": argv, "display_name": "Course", "language": "python"}))


def _call(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@contextlib.contextmanager
def open_folder() -> Iterator[Path]:
    """A temporary folder that other users can enter. pytest's own are closed again by every session
    of pytest that begins."""
    with tempfile.TemporaryDirectory(prefix="course-hub-") as folder:
        os.chmod(folder, 0o711)
        yield Path(folder)


@contextlib.contextmanager
def system_users(folder: Path, users: list[str]) -> Iterator[None]:
    """Makes users of this machine whose homes lie in `folder`; they are gone after the block."""
    homes = folder / "homes"
    homes.mkdir()
    try:
        for user in users:
            _call("useradd", "--create-home", "--home-dir", homes / user, user)
        yield
    finally:
        for user in users:
            subprocess.run(["userdel", "--remove", user], capture_output=True, check=False)
            shutil.rmtree(f"/tmp/torchinductor_{user}", ignore_errors=True)  # PyTorch's cache


def run_as(user: str, *command: str | Path, folder: Path) -> subprocess.CompletedProcess:
    """Runs a program as this user would in a terminal, in `folder`."""
    return subprocess.run(
        [
            *_PYTHON_SHOWN,
            "runuser",
            "-l",
            user,
            "-c",
            shlex.join(["cd", str(folder)]) + " && " + shlex.join(map(str, command)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def jupyterhub(folder: Path, users: list[str]) -> Iterator["Hub"]:
    """Starts a hub for new users; its settings lie in `folder`. All is gone after the block."""
    install()
    with system_users(folder, users):
        hub = Hub(folder, users)
        try:
            hub.start()
            yield hub
        finally:
            hub.stop()


class Hub:
    """A running hub, spoken to by its API (jupyterhub.readthedocs.io, JupyterHub REST API)."""

    def __init__(self, folder: Path, users: list[str]):
        self._folder, self._users = folder, users
        self._token = secrets.token_hex(16)
        self._port, hub_port, proxy_port = free_ports(3)
        self._process, self.left = None, []
        settings = SETTINGS.format(
            port=self._port,
            hub_port=hub_port,
            proxy_port=proxy_port,
            proxy=PROXY,
            folder=folder,
            users=set(users),
            python=PYTHON,
            root=ROOT,
            place=PLACE,
            patience=PATIENCE,
            token=self._token,
        )
        (folder / "jupyterhub_config.py").write_text(settings, encoding="utf-8")

    def start(self) -> None:
        command = [PYTHON, "-m", "jupyterhub", "-f", self._folder / "jupyterhub_config.py"]
        with (self._folder / "hub.log").open("w") as log:
            self._process = subprocess.Popen(
                [*_PYTHON_SHOWN, *command],
                cwd=self._folder,
                env=os.environ | {"TMPDIR": "/tmp"},  # the users' own, which they can write
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait(lambda: "JupyterHub is now running" in self.log())

    def stop(self) -> None:
        """Ends the hub, which ends its proxy and the servers; what it leaves is noted and ended."""
        if self._process:
            below = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(PATIENCE)
            _, self.left = psutil.wait_procs(below, timeout=10)
            for process in self.left:  # a hub that was stopped as it started leaves its proxy
                process.kill()

    def log(self) -> str:
        return (self._folder / "hub.log").read_text(encoding="utf-8", errors="replace")

    def ask(self, method: str, path: str, body: dict | None = None) -> dict | list:
        """Returns the answer of the hub, or of a user's server."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"token {self._token}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.loads(answer.read() or "{}")
        except urllib.error.HTTPError as error:
            error.msg += f": {error.read().decode(errors='replace')[:500]}\n{self.log()[-3000:]}"
            raise

    def start_server(self, user: str) -> None:
        self.ask("POST", f"/hub/api/users/{user}/server", {})
        self._wait(
            lambda: self.ask("GET", f"/hub/api/users/{user}")["servers"].get("", {})["ready"]
        )

    def stop_server(self, user: str) -> None:
        self.ask("DELETE", f"/hub/api/users/{user}/server")
        self._wait(lambda: not self.ask("GET", f"/hub/api/users/{user}")["servers"])

    async def run(self, user: str, notebook: str) -> list[tuple[str, str]]:
        """Runs all cells in a kernel of the user's server; returns the text and the output of each
        cell that raised, or whose verdict is not the stored one."""
        asked = asyncio.to_thread(
            self.ask, "POST", f"/user/{user}/api/kernels", {"name": "python3", "path": notebook}
        )
        url = f"ws://127.0.0.1:{self._port}/user/{user}/api/kernels/{(await asked)['id']}/channels"
        headers = {"Authorization": f"token {self._token}"}
        kernel = await websocket_connect(
            HTTPRequest(url, headers=headers, request_timeout=PATIENCE)
        )
        failed = []
        for cell in nbformat.read(ROOT / notebook, as_version=4).cells:
            if cell.cell_type == "code":
                printed, error = await _execute(kernel, cell.source)
                verdict = "".join(output.get("text", "") for output in cell.outputs)
                is_check = cell.metadata.get("nbgrader", {}).get("grade")
                if error or is_check and printed != verdict:
                    failed.append((cell.source, printed + error))
        kernel.close()
        return failed

    def memory(self, user: str) -> dict[str, int]:
        """MB of each of the user's processes, by its command (PSS: what is shared counts in parts)."""
        found = {}
        for process in processes_of(user):
            with contextlib.suppress(psutil.Error, FileNotFoundError, ProcessLookupError):
                found[f"{process.pid} {_short(process)}"] = process.memory_full_info().pss >> 20
        return found

    def _wait(self, condition) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self._process.poll() is None, self.log()[-3000:]
            assert time.monotonic() < end, self.log()[-3000:]
            time.sleep(0.2)


def processes_of(user: str) -> list[psutil.Process]:
    """The living processes of a system user."""
    return [p for p in psutil.process_iter(["username"]) if p.info["username"] == user]


def _short(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    known = ("jupyterhub.singleuser", "ipykernel_launcher", "forks", "janitor", "tracker")
    return next((word for word in known if word in line), line[:40])


async def _execute(kernel, source: str) -> tuple[str, str]:
    """Returns what a cell printed, and its error or nothing (jupyter-client's messaging protocol)."""
    number, printed, error = uuid.uuid4().hex, "", ""
    header = {"msg_id": number, "msg_type": "execute_request", "session": number, "username": ""}
    message = {
        "channel": "shell",
        "header": header | {"version": "5.3", "date": ""},
        "parent_header": {},
        "metadata": {},
        "content": {"code": source, "silent": False, "allow_stdin": False, "store_history": True},
    }
    await kernel.write_message(json.dumps(message))
    while True:
        text = await asyncio.wait_for(kernel.read_message(), PATIENCE)
        assert text is not None, "the kernel's connection was closed"
        if isinstance(text, bytes):
            continue  # a widget's picture: with buffers, a message is no text
        got = json.loads(text)
        content = got["content"]
        if got["parent_header"].get("msg_id") != number:
            continue
        if got["msg_type"] == "stream" and content["name"] == "stdout":
            printed += content["text"]
        elif got["msg_type"] == "error":
            error = "\n".join(content["traceback"])
        elif got["msg_type"] == "status" and content["execution_state"] == "idle":
            return printed, error


def _python_shown() -> str:
    """Shell commands that let other users see the Python of this environment, where it lies in a
    closed home: in the view of the files of what is started so, and nowhere else."""
    python = Path(sys.base_prefix)
    closed = _hidden(python)
    if closed is None:
        return ""
    return (
        f"set -e; mount --make-rprivate /; mkdir -p /mnt/python; mount --bind {python} /mnt/python; "
        f"mount -t tmpfs -o mode=755 hidden {closed}; mkdir -p {python}; "
        f"mount --move /mnt/python {python}; "
    )


_PYTHON_SHOWN = ["unshare", "--mount", "sh", "-c", _python_shown() + 'exec "$@"', "-"]
