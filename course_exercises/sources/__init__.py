"""Code out of notebooks and their sources, without running the rest of them.

statements   a notebook's code as statements: the names that each binds and those that it needs
answers      load_answer and load_code, which `course_exercises.authoring` hands on
"""
