"""Which lines are the learner's own, and what to call them."""

import functools
import importlib.util
import itertools
import linecache
import os
import sys
import sysconfig
from typing import NamedTuple

import course_utils
from course_utils.comm import private

# Folders with these names hold installed packages, wherever they are: a virtual environment's, the system's, the
# user's own (pip --user), those of a module system.
_INSTALLED = ("/site-packages/", "/dist-packages/")
_COMPILED = "/torchinductor_"  # torch.compile's folder for what it makes of functions
# Packages whose lines stand in a learner's stack; PYTHONPATH may find them in a folder of any name.
_PACKAGES = ("torch", "torchvision", "IPython", "ipykernel", "cloudpickle", "numpy", "matplotlib")


def _folder(package):
    spec = importlib.util.find_spec(package)
    return os.path.dirname(spec.origin) if spec and spec.origin else os.devnull


_DISTRIBUTED = "/torch/distributed/"
_DDP = "/torch/nn/parallel/distributed.py"
_WRAPPERS = ("wrapper", "inner", "inner_func", "fsdp_hook_wrapper")  # say nothing to a learner

LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in {
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *map(_folder, _PACKAGES),
        *map(str, course_utils.PACKAGES),
    }
)
_elsewhere = ()


def know_libraries(folders: tuple[str, ...]) -> None:
    """In the kernel: libraries lie in these folders on other hosts."""
    global _elsewhere
    _elsewhere = tuple({*_elsewhere, *folders})
    is_own.cache_clear()


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    @property
    def source(self) -> str:
        """The line's text, without its indentation; empty if nobody knows it."""
        linecache.checkcache(self.file)  # a script may have changed since it was last quoted
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """The line in words: "cell line 7" or "train.py, line 7". Without the cell's number, which grows with every
        run, and is 1 for each cell under nbval."""
        if is_cell(self.file):
            return f"cell line {self.line}"
        return f"{os.path.basename(self.file)}, line {self.line}"


@functools.cache
def is_own(file: str) -> bool:
    """True for a cell or a file of the learner, False for Python, its packages and ours."""
    if file.startswith("<") and not linecache.getlines(file):
        return False  # "<frozen runpy>", "<string>"
    real = os.path.realpath(file)
    return not (
        real.startswith(LIBRARIES + _elsewhere)
        or any(name in real for name in _INSTALLED)
        or is_compiled(real)
    )


def as_text(frames: list[Frame]) -> str:
    """Returns a stack, outermost frame first, as Python prints it, from the learner's first line on."""
    shown = list(itertools.dropwhile(lambda frame: not is_own(frame.file), frames)) or frames
    lines = [f'  File "{f.file}", line {f.line}, in {f.function}\n    {f.source}\n' for f in shown]
    return "".join(["Stack (most recent call last):\n", *lines]) if lines else ""


def is_compiled(file: str) -> bool:
    """True for a file that torch.compile has written."""
    return _COMPILED in file


def passes_through(file: str, function: str) -> str:
    """What a frame of PyTorch tells a learner of the way to a call: a function of torch.distributed, "backward",
    DistributedDataParallel's "forward"; "" if nothing."""
    if _DISTRIBUTED in file:
        return "" if function in _WRAPPERS else function
    if function == private.BACKWARD:
        return "backward"  # DistributedDataParallel's buckets: the wait itself is in C++
    return "forward" if file.endswith(_DDP) else ""


def own(frames: list[Frame]) -> list[Frame]:
    """Returns those of the frames that are the learner's."""
    return [frame for frame in frames if is_own(frame.file)]


def cells() -> dict[str, tuple]:
    """The texts of the cells by the name of their file, which nobody has written: entries of linecache, without the
    date at which it would forget them."""
    known = [(name, entry) for name, entry in linecache.cache.items() if len(entry) == 4]
    return {
        name: (size, None, lines, full)
        for name, (size, _, lines, full) in known
        if not os.path.exists(name)
    }


def is_cell(file):
    """Only IPython makes /tmp/ipykernel_4711/123.py of a cell. It knows the cell's number too, but that is no help:
    it grows with every run, and nbval runs every cell as number 1."""
    ipython = sys.modules.get("IPython")
    return bool(ipython and ipython.get_ipython()) and file in cells()
