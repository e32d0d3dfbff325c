"""What of the system a submission may see: Python, its packages, the course without its solutions.

Everything else, homes, other submissions, the gradebook, sockets and terminals, is not there for
it: isolation.py makes a root of these paths only.
"""

import getpass
import os
import sys
from pathlib import Path

import course_utils
from course_exercises.sources.chapters import ROOT

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SETTINGS = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "timezone"),
    *("hosts", "host.conf", "nsswitch.conf", "protocols", "services"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_VARIABLES = (  # whole names: of all that begin with PYTHON, one may hold a token
    *("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "USER", "LOGNAME", "VIRTUAL_ENV"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE", "PYTHONUTF8"),
    *("PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME", "COURSE_LOG", "COURSE_RULES"),
)
_ANSWERS = "BEGIN SOLUTION"


def environment() -> dict[str, str]:
    """The variables that Python, PyTorch and the course look at, and no other."""
    return {key: text for key, text in os.environ.items() if key in _VARIABLES}


def refuse_beside_answers() -> None:
    """Raises RuntimeError where a submission that no namespace holds could read the answers."""
    solutions = ROOT / "solutions"
    places = [ROOT / "tests", ROOT / ".git", *solutions.glob("*.ipynb")]
    places += [path for path in solutions.glob("*.py") if _ANSWERS in path.read_text("utf-8")]
    if found := next((path for path in places if path.exists()), None):
        raise RuntimeError(
            f"This system lets nobody make namespaces, and {found} has answers that a submission could read. Grade "
            "in a copy without them: unpack there what `python -m course_grader.gradescope zip 03 FILE` writes."
        )


def visible() -> list[str]:
    """The files and folders that can be read; those below others are left out."""
    python = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix]
    packages = [path for path in sys.path if path and Path(path).resolve() != ROOT]
    course = [*course_utils.PACKAGES, ROOT / "data"]
    devices = [Path("/dev", name) for name in _DEVICES]
    settings = [Path("/etc", name) for name in _SETTINGS]
    python += [os.path.realpath(path) for path in python]  # where a .venv is a link
    wanted = [*_SYSTEM, *python, *packages, *course, *settings, *devices]
    found = {os.path.normpath(path) for path in wanted if os.path.lexists(path)}
    return sorted(path for path in found if not _has_parent(path, found))


def hidden() -> list[str]:
    """What lies in `visible` and cannot be read all the same: the exercises, whose checks know what
    they expect."""
    return [str(ROOT / "course_exercises" / "chapters")]


def user() -> str:
    """The only line of /etc/passwd."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "course"
    return f"{name}:x:{os.getuid()}:{os.getgid()}::/nowhere:/bin/sh\n"


def _has_parent(path: str, others: set[str]) -> bool:
    """Whether a folder among the others holds it; what a link points to is somewhere else."""
    above = [str(parent) for parent in Path(path).parents]
    return any(parent in others and not os.path.islink(parent) for parent in above)
