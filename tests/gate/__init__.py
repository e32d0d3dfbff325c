"""Wrong answers that were written before their checks were read: `python -m tests.gate`.

They judge a check from outside. The library in `tests/wrong_answers` was written beside the checks.
"""

from importlib import import_module
from pathlib import Path

ANSWERS = {}  # by exercise: functions or classes, each with its mistake as docstring
for file in sorted(Path(__file__).parent.glob("ch*.py")):
    ANSWERS |= import_module(f"{__name__}.{file.stem}").ANSWERS
