"""Pipelines: what each stage does when, simulated or recorded."""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_utils.lesson import schedules
from course_utils.lesson.schedules import Op, Simulation
from course_utils.plots.style import COLORS, WIDTH, legend, look_of
from course_utils.trace import Record

_KINDS = {  # of an op: its name in the legend, its colour, and the colour that later chunks turn to
    "F": ("F: forward", COLORS["forward"], "white"),
    "B": ("B: backward", COLORS["backward"], "black"),
    "W": ("W: weights' part", COLORS["parameters"], "white"),
}
_OP = re.compile(r"([FBW])(\d+)(?:\.(\d+))?")

Pipelined = Simulation | Sequence[Record]


def gantt(panels: Pipelined | Mapping[str, Pipelined]) -> Figure:
    """Draws what each stage of a pipeline does when: a simulation, or the records of all ranks.

    {title: simulation or records} gives panels under each other, on one scale. In records, compute
    spans with names like "F3", "B3", "W3", or "F3.1" for chunk 1, are the ops. The numbers are
    micro-batches, left out where the boxes are too narrow. The unit of time is a forward pass of
    one micro-batch on one rank: what it takes on average, where ranks differ or were measured.
    """
    panels = panels if isinstance(panels, Mapping) else {"": panels}
    spans = {title: _op_spans(work) for title, work in panels.items()}
    rows = [1 + max(span.rank for span in ops) for ops in spans.values()]
    figure, axes = plt.subplots(
        len(panels),
        1,
        figsize=(
            WIDTH,
            1.0 + sum(0.36 * n + (0.4 if title else 0) for title, n in zip(panels, rows)),
        ),
        height_ratios=rows,
        sharex=True,
        squeeze=False,
    )
    end = max(span.end for ops in spans.values() for span in ops)
    shown: dict[str, Patch] = {}
    for ax, (title, ops) in zip(axes[:, 0], spans.items()):
        shown |= _gantt_lanes(ax, ops, end)
        shown["idle"] = shown.pop("idle")  # the last
        ax.set_title(title)
        ax.label_outer()
    legend(figure, shown)
    return figure


def gantt_lanes(ax: Axes, work: Pipelined) -> dict[str, Patch]:
    """Draws the lanes of one pipeline on axes of your own, as `gantt` does.

    Returns what `legend` needs.
    """
    spans = _op_spans(work)
    return _gantt_lanes(ax, spans, max(span.end for span in spans))


def _gantt_lanes(ax: Axes, spans: list[schedules.TimedOp], end: float) -> dict[str, Patch]:
    ranks, chunks = (1 + max(n) for n in zip(*((span.rank, span.op.chunk) for span in spans)))
    ax.set_xlim(0, end)
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set_xlabel("time (forward passes of a micro-batch)")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    points = ax.get_figure().get_figwidth() * 72 * ax.get_position().width / end
    for rank in range(ranks):
        lane = look_of("waiting") | {"linewidth": 0}
        ax.add_patch(Rectangle((0, rank - 0.43), max(s.end for s in spans), 0.86, **lane))
    shown = {}
    for kind, chunk in sorted({(s.op.kind, s.op.chunk) for s in spans}, key=_drawing_order):
        name, color, later = _KINDS[kind]
        color = _mixed(color, later, 0.85 * chunk / chunks)
        _op_boxes(ax, [s for s in spans if (s.op.kind, s.op.chunk) == (kind, chunk)], color, points)
        shown.setdefault(f"{kind}, chunk > 0" if chunk else name, Patch(facecolor=color))
    shown["idle"] = Patch(**look_of("waiting"))
    return shown


def _drawing_order(kind_and_chunk: tuple[str, int]) -> tuple[int, int]:
    return list(_KINDS).index(kind_and_chunk[0]), kind_and_chunk[1]


def _op_boxes(ax: Axes, spans: list[schedules.TimedOp], color: tuple, points: float) -> None:
    """Draws the ops of one kind and chunk, with their numbers if all the boxes have room for them.

    One collection for all boxes: a schedule has hundreds. `points` are there for a unit of time.
    """
    corners = [(s.start, s.end, s.rank - 0.43, s.rank + 0.43) for s in spans]
    boxes = [[(a, y), (b, y), (b, z), (a, z)] for a, b, y, z in corners]
    room = points * statistics.median(span.end - span.start for span in spans)
    edge = 0.6 if room > 4 else 0.0
    ax.add_collection(
        PolyCollection(boxes, facecolors=[color], edgecolors="white", linewidths=edge)
    )
    digits = max(len(str(span.op.micro_batch)) for span in spans)
    size = min(9, (room - 2.5) / (0.64 * digits))  # a digit is 0.64 times as wide as it is high
    if size < 5.5:
        return
    ink = "white" if _luminance(color) < 0.25 else COLORS["ink"]
    look = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": ink}
    for span in spans:
        text = str(span.op.micro_batch)
        if points * (span.end - span.start) > 0.64 * size * len(text) + 1:
            ax.text((span.start + span.end) / 2, span.rank, text, **look)


def _op_spans(work: Pipelined) -> list[schedules.TimedOp]:
    """The ops of a pipeline, from time 0, in units of a forward pass."""
    spans = list(work.spans) if isinstance(work, Simulation) else list(_recorded_ops(work))
    if not spans:
        raise ValueError('There are no ops here: gantt draws spans with names like "F3" and "B3".')
    start = min(span.start for span in spans)
    chunks = 1 + max(span.op.chunk for span in spans)
    forward = [span.end - span.start for span in spans if span.op.kind == "F"]
    unit = statistics.fmean(forward) * chunks
    return [
        s._replace(start=float(s.start - start) / unit, end=float(s.end - start) / unit)
        for s in spans
    ]


def _recorded_ops(records: Sequence[Record]) -> Iterator[schedules.TimedOp]:
    for record in records:
        for span in record.spans:
            if span.kind == "compute" and (name := _OP.fullmatch(span.name)):
                op = Op(name[1], int(name[2]), int(name[3] or 0))
                yield schedules.TimedOp(record.rank, op, span.start, span.end)


def _mixed(color: str, other: str, share: float) -> tuple[float, ...]:
    """A colour with a `share` of another one in it."""
    return tuple((1 - share) * a + share * b for a, b in zip(to_rgb(color), to_rgb(other)))


def _luminance(color: tuple[float, ...]) -> float:
    """WCAG 2.1, relative luminance: from 0, black, to 1, white; 2.2 stands for the exact curve."""
    return sum(w * part**2.2 for w, part in zip((0.2126, 0.7152, 0.0722), color))
