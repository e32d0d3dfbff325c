"""Grades submitted notebooks: every exercise in a process of its own, within limits.

    from course_utils.grade import grade_file
    grade = grade_file("handed_in/03_ddp.ipynb")
    grade.earned, grade.points, [mark.feedback for mark in grade.exercises], grade.reason

The rooms, in the order in which a submission passes through them:

    command     python -m course_utils grade; report: its text, CSV and JSON
    grading     grade_files: from files to Grades, in their order
    submission  reads a notebook and tells its chapter; believes nothing that it says of itself
    checking    a job for each exercise, several at once; from a keeper's report to a mark
    server      the grader's hold on forks, the server from which its processes come
    keeper      watches over one exercise: limits, the outcome, the end of all processes
    tree        looking at processes, and ending them; isolation: what Linux can do besides
    worker      runs one answer under its check; the only process with code of a submission
    answer      takes the answer out of the notebook; integrity: is the check still itself?
    limits      what a submission may use; marks: Grade and Mark, what comes out
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
