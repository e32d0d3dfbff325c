"""What both commands print and write: numbers, tables, files."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from course_planner.descriptions import Hardware
from course_planner.searching import MARGIN, lacks


def gib(size: float) -> str:
    """Bytes in GiB, as PyTorch and nvidia-smi count a GPU's memory."""
    return short(size / 2**30)


def short(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def many(number: int, thing: str) -> str:
    """A number of things: 1 GPU, 8 GPUs."""
    return f"{number:,} {thing}{'s' if number != 1 else ''}"


def fits(held: Mapping[str, int], hardware: Hardware, name: str) -> str:
    """Whether a rank fits, and what is missing where it does not."""
    has, missing = f"{gib(hardware.hbm_bytes)} GiB of {name}", lacks(held, hardware)
    if missing <= 0:
        return f"fits in the {has}"
    return f"does not fit: it is {gib(missing)} GiB more than {MARGIN:.0%} of the {has}"


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
