"""Records what `course_hosts.growing.recorded` returns: chapter 09's program and story, run with PyTorch 2.14 or newer.

    .venv/bin/python tests/modules/record_growing.py

On a quiet machine: the chapter shows its times where PyTorch is older.
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
from course_hosts.growing import RECORDED, Members

PROGRAM = "%%writefile scratch/member.py\n"


def program(folder: Path) -> Path:
    """Writes the chapter's program."""
    read = read_source(ROOT / "solutions/09_elastic_further.py")
    [text] = [cell.source for cell in read if cell.source.startswith(PROGRAM)]
    path = folder / "member.py"
    path.write_text(text.removeprefix(PROGRAM))
    return path


def run(folder: Path) -> list[dict]:
    """The events of all members in one run."""
    with Members(folder / "members", program(folder)) as members:
        load_code(9, "disturbed")(members)
        return members.events()


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
