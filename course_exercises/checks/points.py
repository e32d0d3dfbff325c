"""Points for each requirement, where an instructor wants them: a points.toml.

    "3.1" = [0.4, 0.4, 0.4, 0.4, 0.4]     # one number for each line of the check, in its order

An exercise that is not in the file stays all or nothing. The numbers add up to the exercise's
points. `check` names the requirements. The grader is told where the file is; `check` takes the one
beside the notebook.
"""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from course_exercises.checks import catalogue

Points = dict[str, list[float]]
BESIDE = Path("points.toml")  # of a notebook: a kernel works in the notebook's folder


def met(shares: Sequence[float], requirements: Iterable[bool | None]) -> float:
    """The points of the requirements that are met; None is one that was not looked at."""
    return float(sum(share for share, ok in zip(shares, requirements, strict=False) if ok is True))


def read(path: Path) -> Points:
    """Reads such a file. Raises ValueError with a sentence."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise ValueError(f"{path} is no TOML: {error}.") from None
    for exercise_id, shares in found.items():
        _must_fit(path, exercise_id, shares)
    return found


def _must_fit(path, exercise_id, shares):
    try:
        exercise = catalogue.find(exercise_id)
    except LookupError as error:
        raise ValueError(f"{path}: {error.args[0]}") from None
    wanted, numbers = len(exercise.rules), isinstance(shares, list)
    if not numbers or not all(type(share) in (int, float) and share >= 0 for share in shares):
        raise ValueError(f'{path}: "{exercise_id}" needs a list of numbers, such as [1, 0.5].')
    if len(shares) != wanted:
        raise ValueError(
            f"{path}: {exercise_id} has {wanted} requirements, and {len(shares)} numbers are given."
        )
    if abs(sum(shares) - exercise.points) > 1e-9:
        raise ValueError(
            f"{path}: the numbers of {exercise_id} add up to {sum(shares):g}, and the exercise has "
            f"{exercise.points} points."
        )
