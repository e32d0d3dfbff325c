"""The table of *predict, then measure*: what was said beforehand, what the run gave, and the ratio."""

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from numbers import Real

from course_utils.hardware.columns import wrapped

_ROUNDED = 0.02  # what rounding may change, as a share: 1.5 is no prediction of 2


def compare(
    predicted: Mapping[str, object],
    measured: Mapping[str, object],
    likely: Mapping[str, Mapping[str, object]] | None = None,
) -> None:
    """Prints a row for each quantity: predicted, measured, and whether the two are equal.

    A prediction that was left open (`...`) shows what was measured. One with more decimals than
    what was measured is rounded to as many, if that changes it by at most 2 %. A wrong one is followed by how
    many times as much was measured, and by the sentence of `likely` ({sentence: {quantity: value}})
    whose value it has. A quantity that was not predicted is not shown. Where one was not measured, a
    sentence says so.
    """
    if missing := ", ".join(name for name in predicted if name not in measured):
        print(f"Not measured: {missing}. Run the cells between the prediction and this one.")
        return
    wide = max(len(name) for name in predicted)
    print(f"{'':{wide}}  {'predicted':>12}  {'measured':>12}  equal")
    for name, value in predicted.items():
        got = measured[name]
        if value is ...:
            print(f"{name:{wide}}  {'...':>12}  {got!s:>12}  no prediction")
            continue
        right = _equal(value, got)
        print(f"{name:{wide}}  {value!s:>12}  {got!s:>12}  {right}")
        if not right:
            for sentence in _about(name, value, got, likely or {}):
                print(wrapped(sentence, " " * (wide + 2), " " * (wide + 4)))


def _about(name: str, value: object, got: object, likely: Mapping) -> Iterator[str]:
    if isinstance(value, Real) and isinstance(got, Real) and value and got:
        times = f"{got / value:.4g} times what was predicted"
        apart = f"{abs(got - value):.4g} {'more' if got > value else 'less'} than was predicted"
        yield f"measured: {apart if times.startswith('1 ') else times}"
    for sentence, values in likely.items():
        if name in values and _equal(value, values[name]):
            yield sentence


def _equal(value: object, other: object) -> bool:
    if value == other or not (isinstance(value, float) and type(other) in (int, float)):
        return bool(value == other)
    if not abs(value - other) <= _ROUNDED * abs(other) < math.inf:
        return False
    return round(value, max(0, -Decimal(str(other)).as_tuple().exponent)) == other
