"""Figures that ranks draw: shown under the cell, between the lines that the rank prints.

A rank has no connection to the notebook. Matplotlib there uses a backend of ours (`figure_backend`),
with which what is shown is written into the folder of the launch, and a line printed that names the
file; the kernel shows the picture where it reads the line.
"""

import os
import re
import sys
import tempfile

_FOLDER = "COURSE_FIGURES"
_NO_PLACE = "(a notebook shows it here; a script keeps it with savefig)"
# No program prints this control character by itself; what stands before it is half a line.
_LINE = re.compile(r"(.*)\x1efigure ([\w-]+\.png) (.*)")

MOST = 20  # figures that a call shows in one process: a loop may draw thousands
_shown = 0


def environment(folder: str) -> dict:
    """Variables with which figures of a rank, and of all below it, go into `folder`. Matplotlib is not
    imported before the learner does it: that takes time in every rank."""
    return {"MPLBACKEND": "module://course_utils.launch.ranks.figure_backend", _FOLDER: folder}


def announce(figure) -> None:
    """In a rank: writes the picture of a figure into the folder, and tells the kernel."""
    global _shown
    _shown += 1
    if _shown == MOST + 1:
        print(f"further figures are left out: a rank shows {MOST} of them")
    if _shown > MOST:
        return
    file, path = tempfile.mkstemp(prefix="figure-", suffix=".png", dir=os.environ.get(_FOLDER))
    with os.fdopen(file, "wb") as opened:
        # Without the software's name and version: the same picture is the same bytes.
        figure.savefig(opened, bbox_inches="tight", metadata={"Software": None})
    print(f"\x1efigure {os.path.basename(path)} {figure!r}")


def begin() -> None:
    """In a rank whose function is about to be called: forgets what a call that failed has drawn."""
    global _shown
    _shown = 0
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


def show_open() -> None:
    """Shows what is drawn and not shown yet, as a cell does at its end."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.show()


def announced(line: str) -> tuple[str, str, str] | None:
    """In the kernel: what a rank printed before it on the line, name and description of a picture."""
    if not (match := _LINE.fullmatch(line)):
        return None
    before, name, description = match.groups()
    return before, name, description if in_a_notebook() else f"{description} {_NO_PLACE}"


def show(path: str) -> None:
    """In the kernel: shows a picture below what was printed last."""
    if in_a_notebook() and os.path.exists(path):
        from IPython import display

        display.display(display.Image(filename=path, format="png"))


def in_a_notebook():
    ipython = sys.modules.get("IPython")
    return bool(ipython) and hasattr(ipython.get_ipython(), "kernel")
