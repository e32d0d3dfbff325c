"""The course's own answers pass where they are graded, so what each check needs reaches the process that judges;
and nobody waits for the ranks of their chapters."""

import pytest

from course_exercises.checks import catalogue
from course_exercises.sources.answers import source_of
from course_grader import checking, grade_files

SOURCES = sorted({source_of(exercise.id) for exercise in catalogue.exercises()})


@pytest.fixture(scope="module")
def graded():
    """The grades of all chapters by name, and the jobs of which ranks were asked for in vain."""
    waited = []

    def quick_is_enough(job):
        """But where a machine is so busy that a chapter's cell has not enough time."""
        again = checked.fget(job)
        if again and "it starts ranks" in job._outcome().get("feedback", ""):
            waited.append(job._task.exercise.id)
        return again

    checked = checking._Job.may_pass_thoroughly
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checking._Job, "may_pass_thoroughly", property(quick_is_enough))
        notebooks = [source.with_suffix(".ipynb") for source in SOURCES]
        grades = {g.chapter: g for g in grade_files(notebooks, jobs=2, isolated=None)}
    return grades, waited


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_answer_needs_the_runs_of_its_chapter(source, graded):
    grades, waited = graded
    marks = grades[source.stem].exercises
    assert not [mark.feedback for mark in marks if mark.status != "passed"]
    own = [each.id for each in catalogue.exercises() if source_of(each.id) == source]
    assert sorted(mark.exercise for mark in marks) == sorted(own)
    assert not set(own).intersection(waited)
