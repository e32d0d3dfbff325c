"""The exercises: a folder a chapter, a file an exercise, named after what the learner writes.

What several of a chapter need is in its `shared.py`. `course_exercises.authoring.framework` says how to write
one, `course_exercises.checks.catalogue` finds it, and its wrong answers have the same place and name in
`tests/wrong_answers/`.
"""
