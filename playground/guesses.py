"""What a visitor may predict: the truth, and what the likely mistakes give, each with its sentence."""

import json
from collections.abc import Iterable

RIGHT = "That is right."
WRONG = 4  # at most so many beside the truth


def guesses(right: float, mistakes: Iterable[tuple[float, str]]) -> str:
    """The values, in order of size, to two decimals, as JSON; the first mistakes that differ by five per cent."""
    told = {round(right, 2): RIGHT}
    truth = str(round(right, 2)).removesuffix(".0")  # as the pages write it
    for value, sentence in mistakes:
        differs = all(abs(value - other) > 0.05 * max(value, other) for other in told)
        if differs and value >= 0 and len(told) <= WRONG:
            told[round(value, 2)] = f"{sentence} It is {truth}."
    return json.dumps([{"value": value, "said": told[value]} for value in sorted(told)])
