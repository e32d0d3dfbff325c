"""Helpers for the course. Refuses what is too old for it before anything else is imported."""

from course_utils import versions

versions.refuse_older()
