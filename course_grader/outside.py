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
_VARIABLES = ("PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_FAMILIES = ("LC_", "PYTHON", "COURSE_", "OMP_", "MKL_", "KMP_", "GLOO_", "TORCH")


def environment() -> dict[str, str]:
    """The variables that Python, PyTorch and the course look at, and no other."""
    known = {key: text for key, text in os.environ.items() if key in _VARIABLES}
    return known | {key: text for key, text in os.environ.items() if key.startswith(_FAMILIES)}


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
