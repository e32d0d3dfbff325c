"""Timelines: what each rank did when, from the records of a `Trace`."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_utils.plots.style import COLORS, WIDTH, ink_on, legend, look_of
from course_utils.trace import Record, Span, separate_waiting

_LANE, _SIDE = 0.62, 0.2  # heights of a rank's lane and of the communication beside it


def timeline(records: list[Record], title: str = "") -> Figure:
    """Draws one lane per rank: what it did when. See `timelines`."""
    return timelines({title: records})


def timelines(panels: Mapping[str, list[Record]], unit: str = "", seconds: float = 1.0) -> Figure:
    """Draws several timelines under each other, {title: records of all ranks}, on one scale.

    Communication in the background gets a narrow lane under its rank. Time that a rank spends in a
    collective before the last partner has come is drawn as waiting. The axis is in s, ms or µs, or
    in a `unit` of your own that is so many `seconds` long.
    """
    rows = [len(records) for records in panels.values()]
    end = max((s.end for rs in panels.values() for r in rs for s in r.spans), default=1.0)
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(WIDTH, 0.75 + sum(0.62 * n + 0.55 for n in rows)),
        height_ratios=rows,
        sharex=True,
        squeeze=False,
    )
    shown: dict[str, Patch] = {}
    for ax, (title, records) in zip(axes[:, 0], panels.items()):
        shown |= lanes(ax, records, end, unit=unit, seconds=seconds)
        ax.set_title(title)
        ax.label_outer()
    legend(figure, shown)
    return figure


def lanes(
    ax: Axes,
    records: list[Record],
    end: float,
    names: Sequence[str] | None = None,
    unit: str = "",
    seconds: float = 1.0,
) -> dict[str, Patch]:
    """Draws the lanes of one timeline, from 0 to `end`, on axes of your own; see `timelines`.

    `names` are the lanes' names, "rank 0" and so on without them. Returns what `legend` needs.
    """
    factor, name = (1 / seconds, unit) if unit else _time_unit(end)
    names = names or [f"rank {record.rank}" for record in records]
    sides = any(span.background for record in records for span in record.spans)
    shown: dict[str, Patch] = {}
    for row, record in enumerate(separate_waiting(records)):
        _lane(ax, row, record, factor, end * factor, sides, shown)
    ax.set_yticks(range(len(records)), names)
    ax.set_ylim(len(records) - 0.45, -0.55)
    ax.set_xlim(0, end * factor)
    ax.set_xlabel(f"time ({name})")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    return shown


def _lane(
    ax: Axes, row: int, record: Record, factor: float, end: float, sides: bool, shown: dict
) -> None:
    height = _LANE - _SIDE if sides else _LANE
    top = row - _LANE / 2
    ax.add_patch(Rectangle((0, top), end, height, facecolor=COLORS["idle"], edgecolor="none"))
    for span in record.spans:
        key = _key(span)
        start, width = span.start * factor, (span.end - span.start) * factor
        y, h = (top + height + 0.02, _SIDE) if span.background else (top, height)
        look = look_of(key)
        if width < 0.005 * end:  # a white edge would hide a bar of a few pixels
            look["edgecolor"] = "none"
        ax.add_patch(Rectangle((start, y), width, h, **look))
        shown.setdefault(key, Patch(**look_of(key)))
        if not span.background and span.kind == "compute":
            _label(ax, span.name, start, width, y + h / 2, end, key)


def _key(span: Span) -> str:
    return span.name if span.kind == "compute" else span.kind


def _label(ax: Axes, text: str, start: float, width: float, y: float, end: float, key: str) -> None:
    inches = ax.get_position().width * ax.figure.get_figwidth()
    characters = width / end * inches * 72 / 5.6  # at font size 9
    if len(text) + 1 > characters:
        return
    ax.text(start + width / 2, y, text, ha="center", va="center", fontsize=9, color=ink_on(key))


def _time_unit(seconds: float) -> tuple[float, str]:
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return factor, name
    return 1e6, "µs"
