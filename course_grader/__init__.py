"""Grades submitted notebooks: every exercise in a process of its own, within limits.

    from course_grader import grade_file
    grade = grade_file("handed_in/03_ddp.ipynb")
    grade.earned, grade.points, [mark.feedback for mark in grade.exercises], grade.reason

The rooms, in the order in which a submission passes through them:

    command       python -m course_utils grade; gathering: the notebooks in folders and archives
    grading       grade_files: from files to Grades, in their order
    submission    reads a notebook and tells its chapter; reading does it, in a process of its own
    checking      a job for each exercise, several at once; from a keeper's report to a mark
    keeper_client has keepers forked by keeper_server, a process that has imported all they need
    keeper        watches over one exercise: limits, the outcome, the end of all processes
    tree          looking at processes, and ending them; isolation, outside: what Linux can do
    judge         makes the verdict, where no code of a submission ever is
    worker        holds one answer and does with it what the judge asks; plain: how results travel
    answer        takes the answer out of the notebook; needed: which statements that takes
    integrity     what an answer changed around it
    limits        what a submission may use; marks: Grade and Mark, what comes out
    report        marks as text, CSV, JSON; pages: feedback; summary: a class; copies: equal answers
    roster        students, late days, totals; export, gradescope: for LMSs
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
