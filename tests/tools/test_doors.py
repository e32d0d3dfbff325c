"""Where people open the course: the files that Codespaces and VS Code read, as far as no network is needed."""

import json
import re
from pathlib import Path

import setup_env

ROOT = Path(__file__).parents[2]
CONTAINER = ROOT / ".devcontainer"


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_container_is_made_by_a_target_that_exists():
    container = read(CONTAINER / "devcontainer.json")
    # containers.dev/implementors/json_reference: general properties, and those of a Dockerfile
    assert container.keys() <= {
        "name", "build", "hostRequirements", "postCreateCommand", "containerEnv", "customizations",
    }  # fmt: skip
    # in the workspace: whatever lies elsewhere goes when the container is built again
    [progress] = container["containerEnv"].values()
    assert progress == "${containerWorkspaceFolder}/.course/progress.json"
    assert (CONTAINER / container["build"]["dockerfile"]).is_file()
    command, target = container["postCreateCommand"].split()
    assert command == "make"
    assert f"\n{target}:\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_vscode_takes_the_environment_of_the_makefile_and_loads_no_widgets_from_elsewhere():
    settings = read(ROOT / ".vscode" / "settings.json")
    interpreter = settings["python.defaultInterpreterPath"]
    assert interpreter == "${workspaceFolder}/.venv/bin/python"
    assert "RUN := .venv/bin/python\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert settings["jupyter.widgetScriptSources"] == []


def test_a_page_names_each_door():
    page = (ROOT / "docs" / "open.md").read_text(encoding="utf-8")
    assert all(word in page for word in ("VS Code", "Codespaces", ".devcontainer"))


def test_binder_installs_the_course_with_pytorchs_cpu_builds():
    """The files and their names are repo2docker's (repo2docker.readthedocs.io, configuration files)."""
    wanted = (ROOT / ".binder" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert "-e ." in wanted and f"--extra-index-url {setup_env.CPU_INDEX}" in wanted
    python = (ROOT / ".binder" / "runtime.txt").read_text(encoding="utf-8").strip()
    assert python.removeprefix("python-") in setup_env.SUPPORTED


def test_without_make_there_is_a_command_for_each_target():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "without_make.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| `make ([\w-]+).*?` \| (.*) \|$", page))
    targets = set(re.search(r"\.PHONY: (.*)", makefile)[1].split()) - {"help"}
    assert targets <= rows.keys()
    for target in targets:
        recipe = re.search(rf"(?m)^{target}:\n((?:\t.*\n)+)", makefile)[1]
        for arguments in re.findall(r"`\.venv\S*/bin/python ([^`]*)`", rows[target]):
            command = re.escape(arguments.removesuffix(" FOLDER"))
            assert re.search(rf'(?m) {command}( "?\$\(.*)?$', recipe), target
