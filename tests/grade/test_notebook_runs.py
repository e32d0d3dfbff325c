"""What a notebook's run has not done is known, and nothing in it is without an end."""

import json
import subprocess
import sys

PROGRAM = """
import json
from course_grader import notebook
from course_utils.lesson.statements import CodeCell

notebook.SECONDS_OF_A_CELL = notebook._SECONDS_OF_THE_COURSES = 0.3


def cell(number, source):
    return CodeCell(source, "", f"cell {number}", 0)


lesson = [
    cell(1, "import time\\ntime.sleep(9)\\nFACTOR = 3"),
    cell(2, "def inner(): return FACTOR"),
    cell(3, "def helper(): return inner()"),
    cell(4, "NEVER = [time.sleep(9)]"),
]
own = cell(5, "def message_bytes(tensor): return helper(), NEVER")
asked = notebook.Asked("0.2", "message_bytes", None)
made = notebook.Notebook(asked, [*lesson[:3], own], lesson, [], False)
print(json.dumps([made.run().__name__, made.skipped]))
"""


def test_a_helpers_helper_that_was_cut_is_named_and_what_a_chapter_provides_has_a_limit():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=600
    )
    name, skipped = json.loads(ran.stdout)
    assert name == "message_bytes"
    assert skipped == ["cell 1 (it was still running after 0 seconds)"], ran.stderr
