"""What both commands print and write: numbers, tables, files."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from course_planner.descriptions import Hardware, Layout, Model, described
from course_planner.memory import tensors
from course_planner.searching import needs


def gib(size: float) -> str:
    """Bytes in GiB, as PyTorch and nvidia-smi count a GPU's memory."""
    return short(size / 2**30)


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def many(number: int, thing: str) -> str:
    """A number of things: 1 GPU, 8 GPUs."""
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def fitting(held: Mapping[str, int], hardware: Hardware, name: str) -> str:
    """Whether a rank fits, and what is missing where it does not."""
    has, missing = f"{gib(hardware.hbm_bytes)} GiB of {name}", tensors(held) - hardware.hbm_bytes
    if missing <= 0:
        return f"fits in the {has}"
    return f"does not fit: it is {gib(missing)} GiB more than the {has}"


def nothing_fits(
    model: Model,
    gpus: int,
    batch: int,
    seq: int,
    hardware: Hardware,
    name: str,
    allowed: Callable[[Layout], bool] = lambda layout: True,
) -> str:
    """Why `search` finds no plan on GPUs of this `name`: what the leanest layout lacks, and what would help."""
    tried = needs(model, gpus, batch, seq, allowed)
    if not tried:
        return f"No layout of {many(gpus, 'GPU')} is legal: change what was refused, or what is to be tried."
    held, layout = tried[0]
    limit, needed = hardware.hbm_bytes, tensors(held)
    told = (
        f"No layout fits. The leanest needs {gib(needed)} GiB on its fullest rank, "
        f"{gib(needed - limit)} more than the {gib(limit)} of {name}:\n  {described(layout)}\n"
    )
    least = min(map(_states, (each for each, _ in tried)))
    if least <= limit:
        return (
            f"{told}Of these, {gib(_states(held))} GiB are parameters, gradients and optimizer, the rest is "
            "activations and what is held for a moment: take more GPUs, or a shorter sequence."
        )
    return (
        f"{told}Parameters, gradients and optimizer alone need {gib(least)} GiB, {gib(least - limit)} more "
        f"than there are: take at least {many(math.ceil(least * gpus / limit), 'GPU')}, whatever the batch."
    )


def _states(held: Mapping[str, int]) -> int:
    return sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))


def print_table(head: list[str], rows: list[list[str]], words: int) -> None:
    """Columns of equal width; the first `words` to the left, and the last if it is long text."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    for row in (head, *rows):
        cells = [
            cell.ljust(width) if place < words or place == len(head) - 1 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        print("   ", "  ".join(cells).rstrip())


def save(figure, path: Path) -> None:
    """Writes a figure as PNG."""
    import matplotlib.pyplot as plt

    figure.savefig(path, format="png", dpi=150)
    plt.close(figure)


def write(path: Path, records: Mapping[str, object], **more: object) -> None:
    """Writes dataclasses, and more beside them, as JSON."""
    data = {name: asdict(record) for name, record in records.items()} | more
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
