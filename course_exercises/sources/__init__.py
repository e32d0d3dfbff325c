"""Code out of notebooks and their sources, without running the rest of them.

answers      load_answer and load_code, which `course_exercises.authoring` hands on
chapters     which notebooks there are
"""
