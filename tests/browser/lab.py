"""JupyterLab servers of their own for the browser tests, on copies of what they show."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT = 120  # seconds
SETTINGS = {
    # cells out of sight are in the page too, so that a test can find them
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false"},
}


@dataclass(frozen=True)
class Lab:
    """A running server."""

    address: str
    token: str
    folder: Path  # its root

    def url(self, notebook: str) -> str:
        """Where JupyterLab opens `notebook`, a path below the server's root."""
        return f"{self.address}/lab/tree/{notebook}?reset&token={self.token}"


@contextlib.contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """Serve copies of the notebooks from `folder`; end the server and its kernels afterwards."""
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    (folder / "data").symlink_to(ROOT / "data")  # 02 and 13 hand its path to scripts
    with serving(folder) as lab:
        yield lab


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Lab]:
    """Serve `folder`; end the server and its kernels afterwards."""
    lab = Lab(f"http://127.0.0.1:{free_ports(1)[0]}", secrets.token_hex(16), folder)
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(
            _command(lab),
            cwd=folder,
            env=_environment(lab),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_it_answers(lab, server)
            yield lab
        finally:
            _stop(server)


def _command(lab: Lab) -> list[str]:
    port = lab.address.rpartition(":")[2]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1"]
    command += [
        f"--port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={lab.folder}",
    ]
    command += ["--expose-app-in-browser"]
    return command + (["--allow-root"] if hasattr(os, "getuid") and os.getuid() == 0 else [])


def _environment(lab: Lab) -> dict[str, str]:
    """No setting, workspace or progress of whoever runs the tests is read or written."""
    own = lab.folder / "jupyter"
    for name, values in SETTINGS.items():
        path = own / "settings" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    return {
        **os.environ,
        "COURSE_PROGRESS": str(lab.folder / "progress.json"),
        "JUPYTERLAB_SETTINGS_DIR": str(own / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
        "JUPYTER_CONFIG_DIR": str(own / "config"),
        "JUPYTER_RUNTIME_DIR": str(own / "runtime"),
        "JUPYTER_TOKEN": lab.token,
    }


def _wait_until_it_answers(lab: Lab, server: subprocess.Popen) -> None:
    question = f"{lab.address}/api/status?token={lab.token}"
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end and server.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(question, timeout=5):
            return
        time.sleep(0.2)
    log = (lab.folder / "lab.log").read_text()
    raise RuntimeError(f"JupyterLab did not start within {START_TIMEOUT} s:\n{log}")


def _stop(server: subprocess.Popen) -> None:
    server.terminate()  # the server ends its kernels
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
