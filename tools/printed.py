"""What a finished notebook prints: numbers, and few bare truth values.

"largest difference: 3e-08" beside "0.052" is something to look at; "equal: True" is to be believed.
"""

import re

import nbformat

BARE = 10  # at most one printed line in so many may be a bare truth value
ROW = re.compile(r"  (equal|True|False|no prediction)$")  # of predictions.compare: it has numbers
TRUTH = re.compile(r"(^|[:=,(]\s*)(True|False)\W*$")


def lines(notebook: nbformat.NotebookNode) -> list[str]:
    """What the cells print, without the rows of `compare`."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs]
    printed = [line for text in texts for line in text.splitlines()]
    return [line for line in printed if line.strip() and not ROW.search(line)]


def truths(notebook: nbformat.NotebookNode) -> tuple[int, int]:
    """How many of the lines are a bare truth value, and how many there are."""
    found = lines(notebook)
    return sum(bool(TRUTH.search(line)) for line in found), len(found)


def problem(notebook: nbformat.NotebookNode) -> str | None:
    """A sentence for the author where the notebook asks for too much belief."""
    for line in lines(notebook):
        if line.startswith("Not measured: "):
            return f"it prints {line!r}: the names of `predicted` and `measured` differ."
        found = TRUTH.search(line)
        if found and found[2] == "False":
            return f"it prints {line.strip()!r}: print the number that shows the difference."
    bare, all_lines = truths(notebook)
    if bare * BARE > all_lines:
        return (
            f"{bare} of its {all_lines} printed lines are a bare truth value, and one in {BARE} may "
            "be: print the numbers (`check_equal`, `largest_difference`)."
        )
    return None
