"""How long a chapter takes to read, computed from its text and not claimed.

python tools/minutes.py          the minutes of each chapter, without and with its exercises' texts

200 words of prose a minute, 20 lines of code; of imports and of scripts, which one skims, 60. The
time that an exercise takes to solve is not in it.
"""

import re
import sys
from pathlib import Path

from source import Cell, read_source

ROOT = Path(__file__).resolve().parents[1]
WORDS, LINES, SKIMMED = 200, 20, 60  # a minute
IMPORT = re.compile(r"(from \S+ )?import ")


def minutes(cells: list[Cell]) -> float:
    """Minutes that it takes to read these cells once, answers left out."""
    return sum(map(_of_prose_or_code, cells))


def lesson(cells: list[Cell]) -> list[Cell]:
    """The cells of a chapter without its part "Exercises"."""
    kept, inside = [], False
    for cell in cells:
        heading = re.match(r"## (.*)", cell.source) if cell.kind == "markdown" else None
        inside = "Exercise" in heading[1] if heading else inside
        kept += [] if inside else [cell]
    return kept


def _of_prose_or_code(cell: Cell) -> float:
    if cell.kind == "markdown":
        return len(re.findall(r"\w[\w'-]*", cell.source)) / WORDS
    lines = [line for line in cell.source.split("\n") if line.strip()]
    if cell.is_answer:
        lines = lines[: next(i for i, line in enumerate(lines) if "BEGIN SOLUTION" in line)]
    if lines and lines[0].startswith("%%writefile"):
        return len(lines) / SKIMMED
    imports = sum(bool(IMPORT.match(line)) for line in lines)
    return imports / SKIMMED + (len(lines) - imports) / LINES


def main() -> int:
    """Print a line a chapter."""
    print("chapter                lesson  with the exercises' texts")
    for path in sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py")):
        cells = read_source(path)
        print(f"{path.stem:<22} {minutes(lesson(cells)):6.0f}  {minutes(cells):6.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
