"""An autograder for Gradescope, which works offline once it is built.

    python -m course_grader.gradescope zip 03 autograder.zip     to be uploaded
    python -m course_grader.gradescope run 03 FOLDER FILE        what runs there

Gradescope runs each submission in a container of its own, to be thrown away, so that it is graded
without namespaces where there are none.
"""

import argparse
import json
import re
import tempfile
import zipfile
from pathlib import Path

import course_utils
from course_exercises.checks import catalogue
from course_exercises.sources.chapters import ROOT
from course_grader import gathering, outside
from course_grader.grading import grade_files
from course_grader.marks import Grade

_PARTS = (*(folder.name for folder in course_utils.PACKAGES), "solutions", "data")
# What the course can do without there, and what it has written while somebody worked with it.
_LEFT_OUT = re.compile(r"\.(ipynb|pyc)$|-ubyte$|^solutions/scratch/")
_ANSWER = re.compile(r"### BEGIN SOLUTION.*?### END SOLUTION", re.DOTALL)
_STUB = "raise NotImplementedError"
_FILES = ("requirements.txt", "pyproject.toml", "README.md", "LICENSE")
_SETUP = """#!/bin/sh
set -e
apt-get update && apt-get install -y python3 python3-venv
cd /autograder/source
python3 -m venv environment
environment/bin/pip install -r requirements.txt
"""
_RUN = """#!/bin/sh
cd /autograder/source
environment/bin/python -m course_grader.gradescope run {chapter:02d} \\
    /autograder/submission /autograder/results/results.json
"""


def write_zip(chapter: int, path: Path) -> None:
    """Writes the archive: the course without its answers, which a submission could read there."""
    files = [ROOT / name for name in _FILES]
    files += [file for part in _PARTS for file in sorted((ROOT / part).rglob("*"))]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            name = str(file.relative_to(ROOT))
            if file.parent.name == "solutions" and file.suffix == ".py":
                archive.writestr(name, _ANSWER.sub(_STUB, file.read_text(encoding="utf-8")))
            elif file.is_file() and not _LEFT_OUT.search(name):
                archive.write(file, name)
        for name, text in (("setup.sh", _SETUP), ("run_autograder", _RUN.format(chapter=chapter))):
            member = zipfile.ZipInfo(name)
            member.external_attr = 0o100755 << 16
            archive.writestr(member, text)


def grade_folder(chapter: int, folder: Path) -> dict:
    """Grades the notebook in a folder of Gradescope's; returns what its results.json holds."""
    with tempfile.TemporaryDirectory() as temporary:
        try:
            found = list(gathering.notebooks([str(folder)], Path(temporary)))
        except ValueError as error:
            return {"score": 0, "output": str(error)}
        readable = [one for one in found if not one.reason]
        if not readable:
            return {"score": 0, "output": found[0].reason}
        if len(readable) > 1:
            return {"score": 0, "output": f"There are {len(readable)} notebooks; hand in one."}
        options = {"isolated": None, "unprotected": outside.refuse_beside_answers}
        return results(*grade_files([readable[0].path], chapter=chapter, **options))


def results(grade: Grade) -> dict:
    """What Gradescope shows of a grade."""
    if grade.reason:
        return {"score": 0, "output": grade.reason}
    tests = [
        {
            "name": f"{mark.exercise} {mark.name}",
            "score": mark.earned,
            "max_score": mark.points,
            "status": "passed" if mark.status == "passed" else "failed",
            "output": mark.feedback,
        }
        for mark in grade.exercises
    ]
    return {"score": grade.earned, "tests": tests}


def main(arguments: list[str] | None = None) -> None:
    """Makes the archive, or grades in it."""
    parser = argparse.ArgumentParser(prog="python -m course_grader.gradescope")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, about, files in (
        ("zip", "make the archive to be uploaded", ["file"]),
        ("run", "what runs on Gradescope", ["folder", "file"]),
    ):
        command = commands.add_parser(name, help=about)
        command.add_argument("chapter", type=int, choices=catalogue.chapters(), metavar="NN")
        for each in files:
            command.add_argument(each, type=Path)
    asked = parser.parse_args(arguments)
    if asked.command == "zip":
        write_zip(asked.chapter, asked.file)
    else:
        written = json.dumps(grade_folder(asked.chapter, asked.folder), indent=1)
        asked.file.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
