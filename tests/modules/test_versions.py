"""The range of PyTorch's versions: one list, a sentence for anything older."""

import importlib.metadata
import re
import tomllib
import warnings
from pathlib import Path

import pytest

from course_utils.comm import versions

ROOT = Path(__file__).resolve().parents[2]


def installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.15.0", "3.0.0a0+git1234567"])
def test_what_is_new_enough_is_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    versions.refuse_unsupported()


@pytest.mark.parametrize("version", ["2.10.0", "2.9.1+cpu", "1.13.1"])
def test_what_is_older_gets_one_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, version)
    with pytest.raises(ImportError, match=rf"needs PyTorch 2\.11 or newer.*{re.escape(version)}"):
        versions.refuse_unsupported()


def test_no_pytorch_at_all_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="it is not installed"):
        versions.refuse_unsupported()


def test_windows_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions.sys, "platform", "win32")
    with pytest.raises(ImportError, match="on Windows, WSL"):
        versions.refuse_unsupported()


def test_the_oldest_and_the_newest_are_the_ends_of_the_requirements() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    major, minor = map(int, versions.NEWEST.split("."))
    assert f"torch>={versions.OLDEST},<{major}.{minor + 1}" in listed


def test_the_warnings_of_old_versions_are_left_out(recwarn: pytest.WarningsRecorder) -> None:
    with warnings.catch_warnings():
        versions.quieten()
        warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use ...", FutureWarning)
        warnings.warn("the learner's own", UserWarning)
    assert [str(warning.message) for warning in recwarn] == ["the learner's own"]
