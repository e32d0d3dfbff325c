"""What Linux tells of a process's memory (proc(5), smaps_rollup)."""

import re
from pathlib import Path

HERE = Path("/proc/self/smaps_rollup")


def told() -> bool:
    """Whether this system tells it."""
    return HERE.exists()


def held(process: int | str = "self") -> dict[str, int]:
    """Kilobytes of each kind: Pss, Private_Dirty, AnonHugePages and so on."""
    text = HERE.parents[1].joinpath(str(process), HERE.name).read_text()
    return {name: int(n) for name, n in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}


def private() -> int:
    """Kilobytes that this process shares with no other."""
    return sum(size for name, size in held().items() if name.startswith("Private_"))
