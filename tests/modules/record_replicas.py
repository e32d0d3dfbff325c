"""Records what `course_hosts.replicas.recorded` returns: chapter 09's program and story, run with torchft.

    .venv/bin/python tests/modules/record_replicas.py

On a quiet machine: the chapter shows its times where torchft is not installed.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from source import read_source

from course_exercises.sources.answers import load_code
from course_hosts.replicas import RECORDED, Replicas

PROGRAM = "%%writefile scratch/replica.py\n"


def program(folder: Path) -> Path:
    """Writes the chapter's program."""
    read = read_source(ROOT / "solutions/09_elastic_further.py")
    [text] = [cell.source for cell in read if cell.source.startswith(PROGRAM)]
    path = folder / "replica.py"
    path.write_text(text.removeprefix(PROGRAM))
    return path


def run(folder: Path) -> list[dict]:
    """The events of both in one run."""
    with Replicas(folder / "replicas", program(folder)) as replicas:
        load_code(9, "disturbed")(replicas)
        return replicas.events()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        events = run(Path(folder))
    first = events[0]["time"]
    lines = [json.dumps(e | {"time": round(e["time"] - first, 4)}) for e in events]
    partial = RECORDED.with_suffix(".partial")
    partial.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    os.replace(partial, RECORDED)


if __name__ == "__main__":
    main()
