"""The set-up: which Python it takes, when it installs, and the one sentence when it cannot."""

import ast
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.util import cache_from_source
from pathlib import Path

import pytest
import setup_env
import torch

ROOT = Path(__file__).resolve().parents[2]
needs_make = pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")


def script(path: Path, body: str) -> Path:
    """An executable that stands for a Python; in `body`, $* are the arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A folder with what the set-up reads, and no environment yet."""
    (tmp_path / "requirements.txt").write_text("torch\n-e .\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    return tmp_path


def environment(
    course: Path, pip: str = "exit 0", complete: str = "complete", folder: str = ".venv"
) -> Path:
    """Put an environment into `course` whose Python is a script; return that script."""
    body = (
        f'case "$*" in *"pip install"*) {pip};; *find_spec*) echo {complete};; '
        f"*version_info*) echo 3.12;; esac"
    )
    return script(course / folder / "bin/python", body)


# --- which Python ------------------------------------------------------------------------------


def test_a_python_too_old_can_read_the_file() -> None:
    source = (ROOT / "tools/setup_env.py").read_text()
    ast.parse(source, feature_version=(3, 4))
    with pytest.raises(SyntaxError):  # so that the line above means something
        ast.parse(source + "\nx: int = 1_0\n", feature_version=(3, 4))


def old_pythons() -> list[str]:
    folders = [*Path.home().glob(".pyenv/versions/*/bin"), Path("/usr/bin")]
    names = ["python2.7", "python3.6", "python3.8", "python3.10"]
    return [str(folder / name) for name in names for folder in folders if (folder / name).exists()]


@pytest.mark.skipif(not old_pythons(), reason="no Python older than 3.11 is installed to try")
def test_a_python_too_old_gets_one_sentence(course: Path) -> None:
    (course / "tools").mkdir()
    copy = shutil.copy(ROOT / "tools/setup_env.py", course / "tools")
    for python in old_pythons():
        command = [python, copy, "--python", python]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        assert run.returncode == 1
        assert run.stderr.strip().count("\n") == 0, run.stderr
        assert run.stderr.strip().startswith("The course needs Python 3.11, 3.12 or 3.13, and ")


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"python3": "3.11", "python3.12": "3.12", "python3.13": "3.13"}, "python3.13"),
        ({"python3": "3.11", "python3.14": "3.14"}, "python3"),
        ({"python3": "2.7", "python3.11": "3.11"}, "python3.11"),
    ],
)
def test_the_newest_supported_python_is_taken(
    versions: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in versions.items():
        script(tmp_path / name, f"echo {version}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert setup_env.find_python("") == expected


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("echo 3.14", "and python3 is Python 3.14: install one of these from"),
        ("echo 3.12; exit 1", "it has no venv module: install it"),
        ("exit 127", "and there is no Python here: install one of these from"),
    ],
)
def test_no_usable_python_is_explained(
    body: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "python3", body)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(setup_env.SetupError, match=sentence):
        setup_env.find_python("")


def test_a_python_that_is_asked_for_is_the_only_one_tried(tmp_path: Path) -> None:
    with pytest.raises(setup_env.SetupError, match="there is no /nowhere/python3.12 here"):
        setup_env.find_python("/nowhere/python3.12")
    assert setup_env.find_python(sys.executable) == sys.executable


# --- when it installs --------------------------------------------------------------------------


def test_it_installs_once_and_again_when_the_requirements_change(course: Path) -> None:
    environment(course, pip=f"echo pip >> {course}/calls")
    calls = course / "calls"
    for _ in range(3):
        setup_env.set_up(str(course), "", ["dev"])
    assert calls.read_text().count("pip") == 1
    setup_env.set_up(str(course), "", [])  # the learner's part is included
    assert calls.read_text().count("pip") == 1
    setup_env.set_up(str(course), "", ["bench"])
    assert setup_env.Environment(str(course)).installed()[1] == {"bench", "dev"}
    assert calls.read_text().count("pip") == 2
    (course / "requirements.txt").write_text("torch\nnumpy\n-e .\n")
    setup_env.set_up(str(course), "", [])
    assert calls.read_text().count("pip") == 3


@pytest.mark.parametrize(("status", "with_pip"), [(0, False), (2, True)])
def test_uv_installs_where_it_is_and_pip_where_it_cannot(
    course: Path, status: int, with_pip: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f'case "$*" in "pip install"*) echo "$*" >> {course}/uv; exit {status};; esac'
    script(course / "bin/uv", body)
    monkeypatch.setenv("PATH", f"{course}/bin:{os.environ['PATH']}")
    python = environment(course, pip=f"echo pip >> {course}/pip")
    setup_env.set_up(str(course), "", ["dev"])
    assert (course / "uv").read_text() == f"pip install --python {python} -e .[dev]\n"
    assert (course / "pip").exists() == with_pip
    installer = json.loads((course / ".venv/course.json").read_text())["installer"]
    assert installer == ("pip" if with_pip else "uv")


def test_pip_installs_where_it_is_asked_for(course: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(course / "bin/uv", f"echo >> {course}/uv")
    monkeypatch.setenv("PATH", f"{course}/bin:{os.environ['PATH']}")
    environment(course, pip=f"echo pip >> {course}/pip")
    setup_env.set_up(str(course), "", ["dev"], installer="pip")
    assert (course / "pip").exists() and not (course / "uv").exists()
    assert json.loads((course / ".venv/course.json").read_text())["installer"] == "pip"


@pytest.mark.skipif(
    not Path(torch.__file__).is_relative_to(ROOT / ".venv"), reason="PyTorch is not the set-up's"
)
def test_pytorch_was_compiled_by_whoever_installed_it() -> None:
    """A module that nothing imports: otherwise each process compiles PyTorch where it cannot write."""
    source = Path(torch.__file__).with_name("utils") / "collect_env.py"
    assert Path(cache_from_source(source)).exists(), "an old environment: delete .venv, make setup"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for PyTorch's index of CPU builds; no NVIDIA driver is there."""
    (tmp_path / "index" / "torch").mkdir(parents=True)
    (tmp_path / "index" / "torch" / "index.html").write_text("torch")
    page = lambda url, timeout: io.BytesIO(Path(url, "index.html").read_bytes())
    monkeypatch.setattr(setup_env, "urlopen", page)
    monkeypatch.setattr(setup_env, "CPU_INDEX", str(tmp_path / "index"))
    monkeypatch.setattr(setup_env, "DRIVER", str(tmp_path / "driver"))
    smi = tmp_path / "programs" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text("#!/bin/sh\nexit 9\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=os.pathsep)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path / "index"


def test_without_a_driver_both_packages_of_torch_come_without_cuda(
    course: Path, index: Path, capsys: pytest.CaptureFixture
) -> None:
    listed = 'dependencies = [\n    "torch>=2.11",\n    "torchvision>=0.26",\n    "numpy",\n]\n'
    (course / "pyproject.toml").write_text(f"[project]\n{listed}")
    environment(course, pip=f'echo "$*" >> {course}/asked')
    setup_env.set_up(str(course), "", [], torch="auto")
    first, second = (course / "asked").read_text().splitlines()
    assert first.endswith(f"torch>=2.11 torchvision>=0.26 --index-url {index}")
    assert second.endswith("-e .")
    assert "without CUDA's libraries (--torch cuda" in capsys.readouterr().out


@pytest.mark.parametrize("reason", ["a driver", "Windows's", "asked for", "no answer", "a Mac"])
def test_otherwise_torch_is_the_usual_one(
    reason: str, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert setup_env.cpu_index("auto") == str(index)
    if reason == "a driver":
        Path(setup_env.DRIVER).touch()
    elif reason == "Windows's":
        (index.parent / "programs" / "nvidia-smi").write_text("#!/bin/sh\nexit 0\n")
    elif reason == "a Mac":
        monkeypatch.setattr(sys, "platform", "darwin")
    elif reason == "no answer":
        (index / "torch" / "index.html").unlink()
    capsys.readouterr()
    assert setup_env.cpu_index("cuda" if reason == "asked for" else "auto") is None
    assert ("does not answer" in capsys.readouterr().out) == (reason == "no answer")


def test_the_oldest_versions_have_an_environment_of_their_own(course: Path) -> None:
    listed = 'dependencies = [\n    "torch>=2.11,<2.16",\n    "numpy>=2.1,<3",\n]\n'
    (course / "pyproject.toml").write_text(f"[project]\n{listed}")
    for folder in (".venv", ".venv-oldest"):
        environment(course, pip=f'echo "$*" >> {course}/asked{folder}', folder=folder)
    setup_env.set_up(str(course), "", [], oldest=True)
    asked = (course / "asked.venv-oldest").read_text()
    assert f"-c {course}/.venv-oldest/lowest.txt" in asked
    assert (course / ".venv-oldest/lowest.txt").read_text() == "torch==2.11\nnumpy==2.1\n"
    assert not (course / "asked.venv").exists()


def test_it_installs_again_when_a_package_is_gone(course: Path) -> None:
    environment(course, pip=f"echo pip >> {course}/calls")
    setup_env.set_up(str(course), "", [])
    environment(course, pip=f"echo pip >> {course}/calls", complete="incomplete")
    with pytest.raises(setup_env.SetupError, match="is broken .* delete that folder and run"):
        setup_env.set_up(str(course), "", [])
    assert (course / "calls").read_text().count("pip") == 2


def test_a_failed_installation_is_tried_again(course: Path) -> None:
    environment(course, pip="echo 'ReadTimeoutError' >&2; exit 1")
    with pytest.raises(setup_env.SetupError):
        setup_env.set_up(str(course), "", [])
    environment(course, pip=f"echo pip >> {course}/calls")
    setup_env.set_up(str(course), "", [])
    assert (course / "calls").exists()


def test_the_probe_knows_this_course_from_a_moved_one(tmp_path: Path) -> None:
    probe = [sys.executable, "-c", setup_env.PROBE_PACKAGES]
    assert setup_env.call([*probe, str(ROOT)])[1] == "complete\n"
    assert setup_env.call([*probe, str(tmp_path)])[1] == "incomplete\n"


# --- one sentence when it fails ----------------------------------------------------------------


def test_a_broken_environment_is_explained(course: Path) -> None:
    python = environment(course)
    python.unlink()
    python.symlink_to("/nowhere/python3.12")
    with pytest.raises(setup_env.SetupError, match="is broken .its Python does not start.: delete"):
        setup_env.set_up(str(course), "", [])


def test_an_environment_of_another_python_is_explained(course: Path) -> None:
    script(course / ".venv/bin/python", "echo 3.10")
    with pytest.raises(setup_env.SetupError, match="is broken .it is for Python 3.10.: delete"):
        setup_env.set_up(str(course), "", [])
    environment(course)
    with pytest.raises(setup_env.SetupError, match="The course needs Python 3.11, 3.12 or 3.13"):
        setup_env.set_up(str(course), str(script(course / "old", "echo 3.6")), [])
    other = script(course / "other", "echo 3.13")
    with pytest.raises(setup_env.SetupError, match="is for Python 3.12: delete that folder to"):
        setup_env.set_up(str(course), str(other), [])


CAUSES = {
    "OSError: [Errno 28] No space left on device": "The disk is full: .* make room and run",
    "NewConnectionError('[Errno 111] Connection refused')\nERROR: No matching distribution found "
    "for torch==2.14.1": "The Python package index cannot be reached: .* run the command again",
    "Retrying after connection broken by 'ProxyError'": "behind a proxy, set HTTPS_PROXY",
    "SSLError(SSLCertVerificationError('CERTIFICATE_VERIFY_FAILED'))": "set|point PIP_CERT to",
    "PermissionError: [Errno 13] Permission denied: '.venv'": "make the folder writable or clone",
    "ERROR: No matching distribution found for torch==2.14.1": "There is no torch==2.14.1 for this",
    "ERROR: something new": "(?s)ERROR: something new.*for the reason above: run the command again",
}


@pytest.mark.parametrize("written", CAUSES)
def test_what_pip_writes_becomes_one_sentence(course: Path, written: str) -> None:
    quoted = written.replace("'", "")
    environment(course, pip=f"echo '{quoted}' >&2; exit 1")
    with pytest.raises(setup_env.SetupError, match=CAUSES[written]):
        setup_env.set_up(str(course), "", [])


# --- the commands around it --------------------------------------------------------------------


def make(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """A make of its own, which the options of a `make test PYTHON=...` around it do not reach."""
    command = [shutil.which("make"), "--no-print-directory", *arguments]
    outer = {name for name in os.environ if name.startswith("MAKE")}
    outer |= {"PYTHON", "INSTALLER"}
    env = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=env | variables,
        timeout=60,
    )


@needs_make
def test_lab_passes_its_options_on_and_stays_on_this_machine() -> None:
    said = make("-n", "lab", "ARGS=--no-browser --port 8888").stdout
    assert "tools/setup_env.py" in said
    assert "--ip=127.0.0.1" in said and said.strip().endswith("--no-browser --port 8888")
    assert "/lab/tree/notebooks" in said and "token" not in said


@needs_make
def test_make_without_any_python_is_explained(tmp_path: Path) -> None:
    for name in ("sh", "id"):
        (tmp_path / name).symlink_to(shutil.which(name))
    run = make("lab", PATH=str(tmp_path))
    assert run.returncode != 0
    assert "Python 3.11, 3.12 or 3.13, and here there is none: install one" in run.stderr


@pytest.mark.parametrize(("fails", "red"), [("", False), ("test", True), ("test-all", True)])
def test_ci_runs_both_commands_and_installs_with_pip(tmp_path: Path, fails: str, red: bool) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    said = 'echo "$1 $CI $INSTALLER $(cat)" >> calls; [ "$1" != "$FAILS" ] || exit 2'
    script(tmp_path / "bin/make", said)
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    run = subprocess.run(
        [tmp_path / ".ci/run"], env={"PATH": path, "FAILS": fails}, input=b"typed", check=False
    )
    assert (run.returncode != 0) == red
    assert (tmp_path / "calls").read_text() == "test true pip \ntest-all true pip \n"


@needs_make
def test_make_hands_the_installer_on() -> None:
    assert '--installer "pip"' in make("-n", "test", INSTALLER="pip").stdout
    assert "--installer" not in make("-n", "test").stdout


def test_there_is_one_list_of_versions() -> None:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["-e ."]
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(setup_env.lowest(str(ROOT))) == len(listed)  # each has a lower end
    assert "- -r requirements.txt" in (ROOT / "environment.yml").read_text()
