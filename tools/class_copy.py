"""Writes what a class gets into a folder: python tools/class_copy.py FOLDER (`make class DIR=FOLDER`)

The notebooks, the packages that they import, the data, cluster/ and the set-up, with a README for
learners; no answers, no tests (which hold right answers too), no history. All of it comes from the
last commit, so that what somebody has solved and saved in this clone stays here.
"""

import argparse
import fnmatch
import io
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = Path(__file__).with_name("class_readme.md")
FOLDERS = [".binder", ".devcontainer", ".vscode", "cluster", "data", "notebooks"]
FILES = [
    ".gitignore", "AGENTS.md", "LICENSE", "Makefile", "environment.yml", "pyproject.toml",
    "requirements.txt", "requirements-lock.txt", "tools/setup_env.py",
]  # fmt: skip
TARGETS = {"help", "setup", "lab"}  # what of the Makefile works without the rest of tools/
LEFT_OUT = {"course_grader"}  # it judges with the answers beside it, and no other package uses it


class ClassError(Exception):
    """Why there is no copy, in a sentence."""


def write(folder: Path, commit: str = "HEAD") -> None:
    """Write the learner's copy of `commit` into `folder`, new or empty; raise ClassError."""
    try:
        refuse(folder)
        wanted = [*FOLDERS, *FILES, *packages(commit)]
        archive = io.BytesIO(git("archive", "--format=tar", commit, "--", *wanted))
        with tarfile.open(fileobj=archive) as files:
            files.extractall(folder, filter="data")
        for name, cut in {"Makefile": cut_makefile, "pyproject.toml": cut_settings}.items():
            text = (folder / name).read_text(encoding="utf-8")
            (folder / name).write_text(cut(text), encoding="utf-8")
        shutil.copyfile(README, folder / "README.md")
    except OSError as error:
        raise ClassError(f"{folder} cannot be written: {error.strerror}.") from None


def refuse(folder: Path) -> None:
    """Raise ClassError where a copy would mix with other files."""
    if folder.is_relative_to(ROOT):
        raise ClassError(f"{folder} lies inside the course: name a folder outside of it.")
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ClassError(f"{folder} exists and is not an empty folder: name another one.")


def packages(commit: str) -> list[str]:
    """The folders of the packages that pyproject.toml installs and learners need."""
    settings = tomllib.loads(git("show", f"{commit}:pyproject.toml").decode())
    patterns = settings["tool"]["setuptools"]["packages"]["find"]["include"]
    folders = git("ls-tree", "-d", "--name-only", commit).decode().split()
    found = {name for pattern in patterns for name in fnmatch.filter(folders, pattern)}
    return sorted(found - LEFT_OUT)


def cut_makefile(makefile: str) -> str:
    """The Makefile with TARGETS only, in its rules and in what it says of them."""
    paragraphs = [
        paragraph
        for paragraph in makefile.strip().split("\n\n")
        if not (rule := re.match(r"([\w-]+):", paragraph)) or rule[1] in TARGETS
    ]
    lines = [
        line
        for line in "\n\n".join(paragraphs).split("\n")
        if not (named := re.match(r"(?:#   |\t@echo ')make ([\w-]+)", line)) or named[1] in TARGETS
    ]
    phony = f".PHONY: {' '.join(sorted(TARGETS))}"
    return re.sub(r"(?m)^\.PHONY:.*$", phony, "\n".join(lines)) + "\n"


def cut_settings(settings: str) -> str:
    """pyproject.toml without the entry points of packages that are left out."""
    return re.sub(rf'(?m)^\w+ = "({"|".join(LEFT_OUT)})\b.*\n', "", settings)


def git(*arguments: str) -> bytes:
    """What git prints; raise ClassError where it cannot."""
    try:
        run = subprocess.run(["git", "-C", ROOT, *arguments], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", b"").decode(errors="replace").strip() or error
        raise ClassError(
            f"The copy is made from a clone of the course with git: {reason}"
        ) from None
    return run.stdout


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="new or empty, outside of the course")
    name = parser.parse_args().folder
    try:
        if not name:
            raise ClassError("Name the folder: make class DIR=/path/to/folder.")
        folder = Path(name).expanduser().resolve()
        write(folder)
    except ClassError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"A learner's copy of the last commit is in {folder}: notebooks, set-up, no answers.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
