"""What somebody typed: a Model, a Layout, Hardware (tp=8,pp=16 or 70B,layers=40), steps in a file."""

import csv
import math
from collections.abc import Callable
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

from course_planner import catalogue
from course_planner.calibrating import Row
from course_planner.descriptions import Hardware, Layout, Model, one_of, require, sizes_of

SIZES = ("dp", "tp", "pp", "cp", "ep")
PLANNED = {"recompute": "selective"}  # of a layout to plan with: what flash attention keeps
YES_OR_NO = {"true": True, "false": False}


def model_of(text: str) -> Model:
    """A Model; ValueError, with a sentence, where `text` describes none."""
    return Model(**_record("--model", text, Model, catalogue.model_called))


def hardware_of(text: str) -> Hardware:
    """A Hardware; ValueError, with a sentence, where `text` describes none."""
    return Hardware(**_record("--hardware", text, Hardware, catalogue.hardware_called))


def with_precision(hardware: Hardware, name: str, precision: str) -> Hardware:
    """`hardware`, called `name`, with the peak of a precision; ValueError where it has no such."""
    one_of("--precision", precision, ("bf16", "fp8"))
    if precision == "bf16":
        return hardware
    require(catalogue.has_float8(name), f"{name} computes nothing in fp8: leave --precision out.")
    return catalogue.in_float8(hardware)


def layout_of(
    text: str, ranks: int | None = None, batch: int | None = None, **defaults: Any
) -> Layout:
    """The Layout that `text` describes, of `ranks` ranks and `batch` sequences in a step, where they are given.

    dp, where it is not there, is what the other sizes leave of `ranks`, and micro_batches what dp and
    micro_batch leave of `batch`. ValueError, with a sentence, where they do not fit.
    """
    values = defaults | _record("--layout", text, Layout)
    if "dp" not in values and ranks is not None:
        others = math.prod(max(values.get(name, 1), 1) for name in ("tp", "pp", "cp"))
        values["dp"] = max(ranks // others, 1)
    if "micro_batches" not in values and batch is not None:
        rows = max(values.get("dp", 1) * values.get("micro_batch", 1), 1)
        values["micro_batches"] = max(batch // rows, 1)
    layout = Layout(**values)
    require(
        ranks in (None, layout.gpus),
        f"--layout has {layout.gpus:,} ranks ({sizes_of(layout)}), and there are {ranks or 0:,}: change one of "
        "them, or leave dp out, which then takes what is left.",
    )
    require(
        batch in (None, layout.sequences()),
        f"--layout has {layout.sequences():,} sequences in a step (dp {layout.dp} x micro_batch "
        f"{layout.micro_batch} x micro_batches {layout.micro_batches}), and --batch is {batch or 0:,}: a batch "
        "is a multiple of dp x micro_batch.",
    )
    return layout


def allowed(only: str, without: str) -> Callable[[Layout], bool]:
    """Which layouts --only and --without leave: "tp=4/8,zero=3"; a size alone, "cp", is all above 1."""
    these, those = _values("--only", only), _values("--without", without)

    def leaves(layout: Layout) -> bool:
        inside = all(named(getattr(layout, key)) for key, named in these.items())
        return inside and not any(named(getattr(layout, key)) for key, named in those.items())

    return leaves


def _values(option: str, text: str) -> dict[str, Callable[[Any], bool]]:
    """For each field of a Layout that `text` names, whether a value is among those given."""
    found: dict[str, Callable[[Any], bool]] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        key, _, values = word.partition("=")
        require(key not in found, f"{option} has {key} twice: write {key}=1/2 for either.")
        if word in SIZES:
            found[key] = (1).__lt__
        else:
            each = [_record(option, f"{key}={value}", Layout) for value in values.split("/")]
            found[key] = [record[key] for record in each].__contains__
    return found


def rows_in(path: Path, model: Model, hardware: Hardware) -> list[Row]:
    """The measured steps of a CSV file, as --calibrate describes it. ValueError with the row that is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}.") from error
    rows = []
    for number, line in enumerate(lines, 2):
        try:
            missing = [name for name in ("layout", "seq", "seconds") if not line.get(name)]
            require(not missing, f"there is no {', no '.join(missing)}")
            row = Row(
                model_of(line["model"]) if line.get("model") else model,
                layout_of(line["layout"], **PLANNED),
                int(_value("the row", "seq", line["seq"], int)),
                _value("the row", "seconds", line["seconds"], float),
                hardware_of(line["hardware"]) if line.get("hardware") else hardware,
            )
            row.layout.check(row.model, row.seq)
            require(row.seconds > 0, "seconds are more than 0")
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        rows.append(row)
    return rows


def _record(
    option: str, text: str, kind: type, called: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """The fields of `kind` that `text` gives: first one that is `called` so, where names are known,
    then key=value."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    values: dict[str, Any] = {}
    if words and "=" not in words[0] and called:
        values = asdict(called(words.pop(0)))
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
