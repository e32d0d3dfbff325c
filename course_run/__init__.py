"""launch's explanations for a script: `python -m course_utils run` and `explain`."""
