"""Which versions of PyTorch the course runs on, and what the older ones do in another way.

The chapters are written for the newest; pyproject.toml has the range, `make oldest` tests its
other end. What differs stands here and nowhere else.
"""

import importlib.metadata
import re
import sys
import warnings

OLDEST, NEWEST = "2.11", "2.15"

# Warnings of PyTorch 2.11 about its own parts: newer versions do not give them.
_OF_OLD_VERSIONS = (
    r"Full backward hook is firing when gradients are computed with respect to module outputs",
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
)


def older_than(version: str) -> bool:
    """True if the PyTorch that is installed is older than `version` ("2.12")."""
    return _numbers(installed()) < _numbers(version)


def installed() -> str:
    """The version of PyTorch, such as "2.14.1"."""
    return importlib.metadata.version("torch")


def refuse_unsupported() -> None:
    """Raises ImportError, with a sentence, on Windows, and where PyTorch is missing or older than OLDEST."""
    if sys.platform == "win32":
        raise ImportError("The course needs Linux or macOS: on Windows, WSL (wsl --install).")
    try:
        too_old, found = older_than(OLDEST), installed()
    except importlib.metadata.PackageNotFoundError:
        too_old, found = True, None
    if too_old:
        here = f"{found} is installed" if found else "it is not installed"
        raise ImportError(
            f"The course needs PyTorch {OLDEST} or newer, and in {sys.prefix} {here}: open the "
            f'notebook with the course\'s own environment (make lab), or pip install "torch>={OLDEST}".'
        )


def quieten() -> None:
    """In the ranks of this process: leaves out what only older versions warn of, so that all print the same."""
    for message in _OF_OLD_VERSIONS:
        warnings.filterwarnings("ignore", message)


def _numbers(version):
    """(2, 11) of "2.11.0+cu130": what tells one version's behaviour from another's."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
