"""nbgrader's configuration for the course; yours to edit: `make assignments` keeps what is there.

The grader of the course does the autograding, within limits; nothing here executes a submission.
"""

import os

# The settings are text, without an import of the course: where this file raises, nbgrader goes on with
# its own defaults, which would execute the submissions.
c = get_config()  # noqa: F821 - nbgrader provides it

c.CourseDirectory.course_id = "parallelism"

# The folder that instructors and learners share: here in the course's own folder, so that nothing is
# made outside of it. For learners with accounts on this machine, name one that they can reach.
c.Exchange.root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "exchange")
c.Exchange.cache = os.path.join(os.path.dirname(os.path.abspath(__file__)), "exchange", "cache")

# Points for each requirement, and grading on a system without namespaces: see docs/grading.md.
# c.GradeExercises.points = "points.toml"
# c.GradeExercises.unprotected = True

# Any word makes a variant of the checks: other sizes, shapes and world sizes for this class.
# c.GradeExercises.variant = "spring-a"

# Where there is no shared folder: `nbgrader zip_collect` takes the files in
# downloaded/ASSIGNMENT/archive, whose names begin with the student's, as in ada_00_start_here.ipynb.
c.FileNameCollectorPlugin.named_regexp = (
    r".*/extracted/(?P<student_id>[^/_]+)[/_](?:.*[/_](?=\d\d_))?(?P<file_id>[^/]+)\.ipynb"
)

c.ClearSolutions.code_stub = {"python": "raise NotImplementedError"}
c.Execute.timeout = 300  # seconds for each cell, in `nbgrader validate`
c.Autograde.pre_convert_hook = "course_grader.nbgrader.find_renamed"
c.Autograde.exporter_class = "course_grader.nbgrader.SubmissionExporter"
c.Autograde.sanitize_preprocessors = [
    "course_grader.nbgrader.RestoreExercises",
    "nbgrader.preprocessors.OverwriteKernelspec",
    "nbgrader.preprocessors.OverwriteCells",
    "course_grader.nbgrader.GradeExercises",
    "nbconvert.preprocessors.sanitize.SanitizeHTML",  # no script may run in the formgrader
    "nbgrader.preprocessors.CheckCellMetadata",
]
c.SanitizeHTML.enabled = True
c.Autograde.autograde_preprocessors = [
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
