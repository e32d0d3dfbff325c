"""Names the argument, or the variable of a function, that cannot be sent to the ranks."""

import inspect

from course_utils.launch.ranks.packing import culprit
from course_utils.launch.story.failure import RankFailure


def explain(fn, args: tuple, kwargs: dict, error: Exception) -> RankFailure:
    """Returns the failure of packing fn and its arguments, which has raised `error`."""
    name = getattr(fn, "__name__", type(fn).__name__)
    candidates = [(f"argument {i}", value) for i, value in enumerate(args, start=1)]
    candidates += [(f"argument {key}", value) for key, value in kwargs.items()]
    candidates += [(f"{variable}, used in {name},", value) for variable, value in _used(fn)]
    found = (culprit(words, value) for words, value in [*candidates, (name, fn)])
    what, error = next(filter(None, found), (name, error))
    return RankFailure(
        f"{what} cannot be pickled, so it cannot be sent to the ranks.\n"
        f"  {type(error).__name__}: {error}\n"
        "Create it inside of the function, on each rank.",
        kind="pickle",
    )


def _used(fn):
    try:
        variables = inspect.getclosurevars(fn)
    except TypeError:
        return []  # not a Python function
    return [*variables.nonlocals.items(), *variables.globals.items()]
