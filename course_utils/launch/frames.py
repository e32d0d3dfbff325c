"""Which lines are the learner's own, and what to call them."""

import functools
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass

_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),  # course_utils itself
    }
)


@dataclass(frozen=True)
class Frame:
    """A line of a stack."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line's text, without its indentation; empty if nobody knows it."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """The line in words: "cell line 7" or "train.py, line 7"."""
        if _is_cell(self.file):
            return f"cell line {self.line}"
        return f"{os.path.basename(self.file)}, line {self.line}"


@functools.cache
def is_own(file: str) -> bool:
    """True for a cell or a file of the learner, False for Python, its packages and ours."""
    if file.startswith("<") and not linecache.getlines(file):
        return False  # "<frozen runpy>", "<string>"
    return not os.path.realpath(file).startswith(_LIBRARIES)


def own(frames: list[Frame]) -> list[Frame]:
    """Returns those of the frames that are the learner's."""
    return [frame for frame in frames if is_own(frame.file)]


def _is_cell(file):
    """Only IPython knows that /tmp/ipykernel_4711/123.py is a cell. It knows the cell's number too,
    but that is no help: it grows with every run, and nbval runs every cell as number 1."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return bool(shell and shell.compile.format_code_name(file))
