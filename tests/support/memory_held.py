"""What Linux tells of a process's memory (proc(5), smaps_rollup)."""

import re
from pathlib import Path


def told() -> bool:
    """Whether this system tells it."""
    return _rollup("self").exists()


def held(process: int | str = "self") -> dict[str, int]:
    """Kilobytes of each kind: Pss, Private_Dirty, AnonHugePages and so on."""
    text = _rollup(process).read_text()
    return {name: int(n) for name, n in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}


def _rollup(process: int | str) -> Path:
    return Path(f"/proc/{process}/smaps_rollup")


def private() -> int:
    """Kilobytes that this process shares with no other."""
    return sum(size for name, size in held().items() if name.startswith("Private_"))
