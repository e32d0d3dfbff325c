"""`python -m tests.benchmarks [name ...]`: measures and prints Markdown.

Each `bench_*.py` in this folder is one part: its docstring's first line is its heading, its
`main()` prints its tables. Names choose parts: `launch` stands for bench_launch.py. Every part has a
process of its own and a limit: one that hangs, or fails, is a row that says so, and the next follows.
"""

import datetime
import importlib
import platform
import signal
import sys
from pathlib import Path

import psutil
import torch

from course_utils import hardware
from tests.benchmarks import apart
from tests.benchmarks.measuring import print_table

LIMIT = 1800.0  # seconds for a part


def main(names: list[str]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it takes its part along
    parts = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    unknown = [name for name in names if f"bench_{name}" not in parts]
    if unknown:
        sys.exit(f"No benchmark is called {unknown[0]}; there are: {', '.join(parts)}.")
    print(_machine(), end="\n\n", flush=True)
    for part in parts:
        if not names or part.removeprefix("bench_") in names:
            module = importlib.import_module(f"tests.benchmarks.{part}")
            print(f"## {module.__doc__.splitlines()[0]}", end="\n\n", flush=True)
            reason = apart.run(f"from tests.benchmarks import {part}; {part}.main()", LIMIT)
            if reason:
                print_table([part, "has no table"], [["", reason]])


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    gpus = torch.cuda.device_count()
    return (
        f"Measured on {datetime.date.today()}: {hardware.cores()} CPU cores, {memory:.0f} GB of "
        f"memory, {gpus} GPUs, {platform.system()}, Python {platform.python_version()}, "
        f"PyTorch {torch.__version__}. "
        "Medians, with quartiles in brackets."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
