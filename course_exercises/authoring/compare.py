"""Compares what came with what was expected, and says in one line where they first differ.

`compare` knows tensors, numbers, strings, lists and tuples, dicts, sets and everything with `==`.
`expect` turns a difference into `Wrong`, naming the mistake that would have given what came.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch

TOLERANCE = 1e-5
# What a grader does first with a value of an answer that shares a process with it.
looked_at: Callable[[Any], Any] = lambda got: got


class Wrong(Exception):
    """An answer that does not meet a requirement.

    `misconception` is the name of one of the exercise's misconceptions, or None where the mistake
    is not a known one. `expected` and `got` are shown to the learner; pass short strings, or
    values, which are shortened.
    """

    def __init__(
        self, misconception: str | None = None, *, expected: Any = None, got: Any = None
    ) -> None:
        super().__init__(misconception or "wrong")
        self.misconception = misconception
        self.expected = (
            expected if expected is None or isinstance(expected, str) else show(expected)
        )
        self.got = got if got is None or isinstance(got, str) else show(got)


@dataclass(frozen=True)
class Difference:
    """The first difference between two values: the two sides, and the place inside them."""

    expected: str
    got: str
    place: str = ""


def expect(
    got: Any,
    expected: Any,
    *,
    likely: Mapping[str, Any] | None = None,
    what: str = "",
    each: str = "item",
    tolerance: float = TOLERANCE,
) -> None:
    """Raises `Wrong` unless `got` equals `expected`.

    Floats may differ by `tolerance * (1 + |expected|)`. `likely` maps the name of a misconception
    to the value that this mistake gives, to a bool (was this mistake made?), or to a function
    that takes `got` and returns such a bool; the first that fits is named, so put the mistake
    that explains more before the one that explains less. `what` names the thing compared ("the
    gradient of fc1.weight"); `each` names the entries of an outermost list ("rank" -> "rank 1").
    """
    got = looked_at(got)
    difference = compare(got, expected, tolerance, each)
    if difference is None:
        return
    slug = _first_fitting(got, likely or {}, tolerance) or _nothing_came(got)
    place = ", ".join(part for part in (what, difference.place) if part)
    remark = relation(got, expected, tolerance) if slug is None else ""
    raise Wrong(
        slug,
        expected=difference.expected + (f"   ({place})" if place else ""),
        got=difference.got + (f"   ({remark})" if remark else ""),
    )


def expect_type(got: Any, kind: type | tuple[type, ...], *, likely: str | None = None) -> None:
    """Raises `Wrong` unless `got` is a `kind`; call it before you index or unpack an answer.
    `likely` names the mistake of every other type."""
    if not isinstance(got, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        names = " or ".join(_article(k.__name__) for k in kinds)
        raise Wrong(likely or _nothing_came(got), expected=names, got=show(got))


def compare(
    got: Any, expected: Any, tolerance: float = TOLERANCE, each: str = "item"
) -> Difference | None:
    """Returns the first difference between two values, or None where they are equal."""
    if isinstance(expected, torch.Tensor):
        return _compare_tensors(got, expected, tolerance)
    if isinstance(expected, Number):
        return _compare_numbers(got, expected, tolerance)
    if isinstance(expected, Mapping):
        return _compare_mappings(got, expected, tolerance)
    if isinstance(expected, AbstractSet):
        return _compare_sets(got, expected)
    if isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        return _compare_sequences(got, expected, tolerance, each)
    try:
        equal = bool(got == expected)
    except Exception:  # noqa: BLE001 - a learner's __eq__ may raise anything
        equal = False
    return None if equal else Difference(show(expected), show(got))


def same(got: Any, expected: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two values are equal, floats to within the tolerance of `expect`."""
    return compare(looked_at(got), expected, tolerance) is None


def any_of(*values: Any) -> Callable[[Any], bool]:
    """For `likely`: whether what came equals one of these values."""
    return lambda got: any(same(got, value) for value in values)


def tolerance_used(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """The share of its tolerance that each value uses, 1 at most where it is accepted.

    A value is judged by its own size, not by that of the largest in its tensor: beside a thousand, a small
    entry that is wrong would pass. So tasks are made of values near 1, where rounding errors are far smaller
    than the tolerance.
    """
    exact = torch.promote_types(expected.dtype, torch.float64)
    got, expected = got.to(exact), expected.to(exact)
    used = (got - expected).abs() / (tolerance * (1 + expected.abs()))
    alike = (got == expected) | (got.isnan() & expected.isnan())
    return used.masked_fill(alike, 0.0)


def _compare_tensors(got: Any, expected: torch.Tensor, tolerance: float) -> Difference | None:
    if not isinstance(got, torch.Tensor):
        return Difference(show(expected), show(got))
    if got.shape != expected.shape:
        return Difference(f"shape {tuple(expected.shape)}", f"shape {tuple(got.shape)}")
    if got.dtype != expected.dtype:
        return Difference(f"{expected.dtype}", f"{got.dtype}")
    got, expected = got.detach().cpu(), expected.detach().cpu()
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        wrong = ~(tolerance_used(got, expected, tolerance) <= 1)
    else:
        wrong = got != expected
    count = int(wrong.sum())
    if count == 0:
        return None
    index = tuple(wrong.nonzero()[0].tolist())
    left, right = _numbers(expected[index].item(), got[index].item())
    place = f"at [{', '.join(map(str, index))}]" if index else ""
    if wrong.numel() > 1:
        place += f"; {count} of {wrong.numel()} values differ"
    return Difference(left, right, place)


def _compare_numbers(got: Any, expected: Any, tolerance: float) -> Difference | None:
    if isinstance(got, torch.Tensor) and got.numel() == 1:
        got = got.item()
    if not isinstance(got, Number) or isinstance(expected, bool) != isinstance(got, bool):
        return Difference(show(expected), show(got))
    if isinstance(expected, int) and isinstance(got, int):
        equal = got == expected
    else:
        pair = torch.tensor([complex(got), complex(expected)], dtype=torch.complex128)
        equal = bool(tolerance_used(*pair, tolerance) <= 1)
    return None if equal else Difference(*_numbers(expected, got))


def _counted(sequence: Sequence) -> str:
    entries = "entry" if len(sequence) == 1 else "entries"
    return f"{len(sequence)} {entries}: {show(sequence)}"


def _compare_sequences(
    got: Any, expected: Sequence, tolerance: float, each: str
) -> Difference | None:
    if not isinstance(got, Sequence) or isinstance(got, (str, bytes)):
        return Difference(show(expected), show(got))
    if len(got) != len(expected):
        return Difference(_counted(expected), _counted(got))
    for i, (g, e) in enumerate(zip(got, expected, strict=True)):
        difference = compare(g, e, tolerance)
        if difference:
            return _inside(difference, f"{each} {i}")
    return None


def _compare_mappings(got: Any, expected: Mapping, tolerance: float) -> Difference | None:
    if not isinstance(got, Mapping):
        return Difference(show(expected), show(got))
    missing = [key for key in expected if key not in got]
    extra = [key for key in got if key not in expected]
    if missing or extra:
        return Difference(f"the keys {show(list(expected))}", _more_and_fewer(extra, missing))
    for key, value in expected.items():
        difference = compare(got[key], value, tolerance)
        if difference:
            return _inside(difference, f"{key!r}" if isinstance(key, str) else f"key {key}")
    return None


def _compare_sets(got: Any, expected: AbstractSet) -> Difference | None:
    if not isinstance(got, AbstractSet):
        return Difference(show(expected), show(got))
    if got == expected:
        return None
    missing, extra = expected - got, got - expected
    return Difference(show(expected), _more_and_fewer(extra, missing))


def _more_and_fewer(extra: Any, missing: Any) -> str:
    """Names what is there besides what is expected, and what is not there."""
    parts = [f"also {show(extra)}"] if extra else []
    parts += [f"without {show(missing)}"] if missing else []
    return ", ".join(parts)


def _inside(difference: Difference, outer: str) -> Difference:
    place = f"{outer}, {difference.place}" if difference.place else outer
    return Difference(difference.expected, difference.got, place)


def _first_fitting(got: Any, likely: Mapping[str, Any], tolerance: float) -> str | None:
    for slug, mistake in likely.items():
        try:
            if isinstance(mistake, bool):
                fits = mistake
            elif isinstance(mistake, Callable) and not isinstance(mistake, torch.nn.Module):
                fits = bool(mistake(got))
            else:
                fits = compare(got, mistake, tolerance) is None
        except Exception:  # noqa: BLE001 - an answer so odd that the question makes no sense
            fits = False
        if fits:
            return slug
    return None


def _nothing_came(got: Any) -> str | None:
    """The framework's own misconception where a function, or each rank's, returned None."""
    results = got if isinstance(got, (list, tuple)) and got else [got]
    return "returns-nothing" if all(result is None for result in results) else None


def relation(got: Any, expected: Any, tolerance: float = TOLERANCE) -> str:
    """Says how all values of `got` relate to those of `expected`, or "" where nothing is plain."""
    a, b = _flat(got), _flat(expected)
    if a is None or b is None or a.numel() == 0:
        return ""
    if not a.isfinite().all():
        return "not every value is finite"
    if a.shape != b.shape:
        return ""
    if (a == a[0]).all() and (b == b[0]).all():  # one number, or the same on every rank
        return _relation_of_numbers(a[0].item(), b[0].item())
    if b.abs().max() > 0 and a.abs().max() == 0:
        return "every value is zero"
    slack = tolerance * (1 + b.abs())
    nonzero = b.abs() > 100 * tolerance
    if nonzero.any():
        factor = (a[nonzero] / b[nonzero]).median().item()
        if abs(factor - 1) > 1e-3 and ((a - factor * b).abs() <= 2 * slack).all():
            return f"every value is {_factor(factor)} what is expected"
    moved = ((a - b).abs() > slack).any()
    if moved and ((a.sort().values - b.sort().values).abs() <= slack).all():
        regrouped = _lengths(got) != _lengths(expected)
        return f"the right values in {'other groups' if regrouped else 'another order'}"
    return ""


def _lengths(value: Any) -> list | None:
    """Those of a list and of all lists in it, the shape of a tensor; None of what is neither."""
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if not isinstance(value, Sequence):
        return None
    return [len(value), *map(_lengths, value)]


def _relation_of_numbers(a: float, b: float) -> str:
    """Of two numbers a factor tells something only if it is a small whole one."""
    for factor in (a / b, b / a) if a and b else ():
        whole = round(factor)
        if abs(factor - whole) < 1e-6 and (2 <= whole <= 16 or whole in (-1, 100, 1000)):
            return f"{_factor(a / b)} what is expected"
    return ""


def _factor(factor: float) -> str:
    if factor == -1 or abs(factor + 1) < 1e-3:
        return "minus"
    if 0 < factor < 0.99 and abs(1 / factor - round(1 / factor)) < 1e-3:
        return f"1/{round(1 / factor)} of"
    return f"{factor:.4g} times"


def _flat(value: Any) -> torch.Tensor | None:
    """All numbers of a tensor, a number, or a nest of lists and dicts of them, in order."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().reshape(-1).double() if not value.is_complex() else None
    if isinstance(value, (bool, str, bytes)) or value is None:
        return None
    if isinstance(value, (int, float)):
        return torch.tensor([float(value)], dtype=torch.float64)
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=str)]
    if not isinstance(value, Sequence):
        return None
    parts = [_flat(part) for part in value]
    if not parts or any(part is None for part in parts):
        return None
    return torch.cat(parts)


def show(value: Any, width: int = 90) -> str:
    """A value in at most about `width` characters: shapes and a few numbers, never a page."""
    return _shorten(_show(value), width)


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() <= 8 and value.dim() <= 1:
            return f"tensor({_show(value.tolist())})"
        kind = "" if value.dtype == torch.float32 else f", {value.dtype}".replace("torch.", "")
        return f"tensor of shape {tuple(value.shape)}{kind}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k!r}: {_show(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        opening, closing = "[]" if isinstance(value, list) else "()"
        return opening + ", ".join(map(_show, value)) + closing
    if isinstance(value, type) or callable(value) and hasattr(value, "__name__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__name__}"
    if isinstance(value, torch.nn.Module) or type(value).__repr__ is object.__repr__:
        return f"an object of class {type(value).__name__}"
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a learner's __repr__ may raise anything
        return f"an object of class {type(value).__name__}"


def _shorten(text: str, width: int) -> str:
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.split()))
    return text if len(text) <= width else f"{text[: width - 24]} ... {text[-18:]}"


def _numbers(expected: Any, got: Any) -> tuple[str, str]:
    """Two numbers that differ, in one notation, with as few digits as show the difference."""
    floats = any(isinstance(x, float) for x in (expected, got))
    plain = [
        floats and isinstance(x, (int, float)) and not isinstance(x, bool) for x in (expected, got)
    ]
    for digits in (4, 6, 9, 17):
        pair = tuple(
            f"{x:.{digits}g}" if as_float else repr(x)
            for x, as_float in zip((expected, got), plain, strict=True)
        )
        if pair[0] != pair[1]:
            break
    return pair


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
