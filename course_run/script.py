"""In a rank: a script runs as torchrun would run it. Its world is made by `launch.ranks.script`."""

import atexit
import os
import runpy
import sys
import threading
import types
from pathlib import Path

import torch

# Variables of torchrun that not every rank has (docs.pytorch.org/docs/stable/elastic/run.html).
_TORCHRUNS = {
    "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
}  # fmt: skip


def run(rank: int, arguments: list[str], module: bool) -> None:
    """What `python train.py --its arguments` does, or `python -m` with a module's name."""
    execute(rank, arguments, module)
    # As at the end of Python. The rank's process goes on until all ranks are done.
    threading._shutdown()
    atexit._run_exitfuncs()


def execute(rank: int, arguments: list[str], module: bool = False) -> None:
    """The same but for the end of Python: this process goes on."""
    os.environ.update(_TORCHRUNS, ROLE_RANK=str(rank), ROLE_WORLD_SIZE=os.environ["WORLD_SIZE"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads.split(",")[0]))
    sys.argv[:], path = arguments, os.path.abspath(arguments[0])
    sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(path))
    try:
        if module:
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            main.__file__ = path
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))  # noqa: S102
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
