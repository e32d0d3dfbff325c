"""Grades submitted notebooks: every exercise in a process of its own, within limits.

    from course_grader import grade_file
    grade = grade_file("handed_in/03_ddp.ipynb")
    grade.earned, grade.points, [mark.feedback for mark in grade.exercises], grade.reason

README.md lists the files.
"""

from course_grader.grading import DEFAULT_VARIANT, grade_file, grade_files
from course_grader.limits import Limits
from course_grader.marks import Grade, Mark

__all__ = [
    "DEFAULT_VARIANT",
    "Grade",
    "Limits",
    "Mark",
    "grade_file",
    "grade_files",
]
