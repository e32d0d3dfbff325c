"""Grades submitted notebooks: every exercise in a process of its own, within limits.

    from course_utils.grade import grade_file
    grade = grade_file("handed_in/03_ddp.ipynb")
    grade.earned, grade.points, [mark.feedback for mark in grade.exercises], grade.reason

The rooms, in the order in which a submission passes through them:

    submission  reads the notebook and tells its chapter; believes nothing that it says of itself
    grading     one job for each exercise, several at once; Grades in the order of the files
    marks       Grade and Mark: what comes out
    limits      what a submission may use
"""

from course_utils.grade.grading import DEFAULT_VARIANT, grade_file, grade_files
from course_utils.grade.limits import Limits
from course_utils.grade.marks import Grade, Mark

__all__ = [
    "DEFAULT_VARIANT",
    "Grade",
    "Limits",
    "Mark",
    "grade_file",
    "grade_files",
]
