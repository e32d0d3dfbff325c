"""Model, Layout and Hardware out of what somebody typed: tp=8,pp=16 or 70B,layers=40."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any, get_type_hints

from course_planner import published
from course_planner.descriptions import Hardware, Layout, Model, require, sizes_of

YES_OR_NO = {"true": True, "false": False}


def model_of(text: str) -> Model:
    """A Model; ValueError, with a sentence, where `text` describes none."""
    return Model(**_record("--model", text, Model, published.LLAMA))


def hardware_of(text: str) -> Hardware:
    """A Hardware; ValueError, with a sentence, where `text` describes none."""
    return Hardware(**_record("--hardware", text, Hardware, published.GPUS))


def layout_of(text: str, ranks: int) -> Layout:
    """The Layout of `ranks` ranks; dp, where it is not there, is what the other sizes leave."""
    values = _record("--layout", text, Layout, {})
    if "dp" not in values:
        others = math.prod(max(values.get(name, 1), 1) for name in ("tp", "pp", "cp"))
        values["dp"] = max(ranks // others, 1)
    layout = Layout(**values)
    require(
        layout.gpus == ranks,
        f"--layout has {layout.gpus:,} ranks ({sizes_of(layout)}) and --ranks is {ranks:,}: change one of "
        "them, or leave dp out, which then takes what is left.",
    )
    return layout


def _record(option: str, text: str, kind: type, known: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `kind` that `text` gives: a known name first, where there are such, then
    key=value."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    values: dict[str, Any] = {}
    if words and "=" not in words[0] and known:
        require(
            words[0] in known,
            f"{option} does not know {words[0]!r}; it knows {', '.join(known)}. Describe another "
            f"one: {_needed(kind)}.",
        )
        values = asdict(known[words.pop(0)])
    types, given = get_type_hints(kind), set()
    for word in words:
        key, equals, value = word.partition("=")
        require(key in types, f"{option} has no {key!r}; it has {', '.join(types)}.")
        require(bool(equals and value), f"{option}: {key} needs a value, as in {key}=...")
        require(key not in given, f"{option} has {key} twice.")
        given.add(key)
        values[key] = _value(option, key, value, types[key])
    missing = [name for name in _required(kind) if name not in values]
    require(not missing, f"{option} lacks {', '.join(missing)}; it needs {_needed(kind)}.")
    return values


def _required(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.default is MISSING]


def _needed(kind: type) -> str:
    return ",".join(f"{name}=..." for name in _required(kind))


def _value(option: str, key: str, text: str, wanted: Any) -> Any:
    """`text` as what the field is: a number, yes or no, words."""
    if wanted is str:
        return text
    if wanted is bool:
        require(text in YES_OR_NO, f"{option}: {key} is true or false, not {text!r}.")
        return YES_OR_NO[text]
    if wanted == tuple[str, ...]:
        return tuple(text.split("/"))
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if wanted is float:
        require(math.isfinite(number), f"{option}: {key} is a number, not {text!r}.")
        return number
    require(number.is_integer(), f"{option}: {key} is a whole number, not {text!r}.")
    return int(number)
