"""Programs as people start them in a terminal, for chapters that show how."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_in_terminal(*command: str | Path, timeout: float = 100.0) -> str:
    """Runs a program; returns what it printed, or the end of its errors where it failed.

    Its ranks find each other through the loopback interface and take one thread each. It is ended
    when the notebook is interrupted, and after `timeout` seconds (then: TimeoutExpired).
    """
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    own = {"GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1"}
    own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a restart meets in a store of its own
    with subprocess.Popen(
        command,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            printed, errors = program.communicate(timeout=timeout)
        finally:
            program.terminate()  # torchrun ends its workers then; a program that is over stays over
    return printed if program.returncode == 0 else errors[-2000:]


def torchrun(ranks: int, script: Path, *arguments: str | Path) -> str:
    """Runs `script` on `ranks` ranks of this machine, as the command torchrun does.

    Chapter 3 explains the options. The ranks meet on a free port of 127.0.0.1
    (docs.pytorch.org/docs/stable/elastic/run.html).
    """
    meeting = [
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
    ]
    module = [sys.executable, "-m", "torch.distributed.run"]
    return run_in_terminal(*module, "--nproc-per-node", str(ranks), *meeting, script, *arguments)
