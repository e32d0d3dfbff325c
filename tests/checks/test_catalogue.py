"""course_exercises/checks/catalogue.py, and the list of answers to try: what is imported, and when."""

import subprocess
import sys

from course_exercises.sources.chapters import ROOT

FINDS = """
import re, sys
from course_exercises.checks import catalogue
from tests.wrong_answers import answers_to
tried = [answer for id in catalogue.modules() for answer in answers_to(id)]
imported = lambda: [name for name in sys.modules if re.search(r"\\.ch\\d\\d\\.", name)]
print(len(tried) > 700, *imported())
catalogue.find("3.1")
next(answer for answer in answers_to("3.1")).load()
print(*sorted(imported()))
"""


def test_an_exercise_is_found_and_tried_without_importing_another() -> None:
    listing, finding = subprocess.check_output(
        [sys.executable, "-c", FINDS], cwd=ROOT, text=True
    ).splitlines()
    assert listing == "True"
    assert finding.split() == [
        "course_exercises.chapters.ch03.average_gradients",
        "course_exercises.chapters.ch03.shared",
        "tests.wrong_answers.ch03.average_gradients",
    ]
