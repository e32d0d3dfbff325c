"""Every figure that more than one chapter draws, in one style.

The style is applied on import. Colours mean the same everywhere. Saturated colours (Okabe and Ito's
palette) say *what*: a phase of training and the memory it leaves share one colour, so activations
look like the forward pass that made them, gradients like the backward pass, the optimizer's state
like the update. Pale colours (Tol's light palette) say *who*: the rank that data belongs to. Both
palettes are safe for colour-blind readers, and no figure says anything by colour alone.

Every function returns its Figure (the drawing kit draws on axes that `canvas` gives). The last line
of a cell is `plt.show()`.
"""

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch, Polygon, Rectangle

from course_utils import schedules
from course_utils.schedules import Op, Simulation
from course_utils.trace import Record, Span, separate_waiting

COLORS = {
    "forward": "#56B4E9",
    "activations": "#56B4E9",
    "backward": "#0072B2",
    "gradients": "#0072B2",
    "update": "#009E73",
    "optimizer": "#009E73",
    "parameters": "#CC79A7",
    "buffers": "#5F5F5F",
    "load": "#F0E442",
    "communication": "#E69F00",
    "waiting": "#D9D9D9",
    "idle": "#F5F5F5",
    "wrong": "#D55E00",
    "other": "#B9A38C",
    "ink": "#222222",
}
RANK_COLORS = [
    "#77AADD", "#EE8866", "#EEDD88", "#44BB99", "#FFAABB", "#99DDFF", "#BBCC33", "#AAAA00",
]  # fmt: skip
WIDTH = 8.0  # inches: the width of a notebook's column at 100 dots per inch

plt.rcParams.update(
    {
        "figure.figsize": (WIDTH, 3.6),
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "font.size": 11,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.edgecolor": COLORS["ink"],
        "axes.labelcolor": COLORS["ink"],
        "axes.titlecolor": COLORS["ink"],
        "text.color": COLORS["ink"],
        "xtick.color": COLORS["ink"],
        "ytick.color": COLORS["ink"],
        "legend.frameon": False,
        "legend.fontsize": 10,
        "hatch.linewidth": 0.6,
        "hatch.color": "#8C8C8C",
        "axes.prop_cycle": plt.cycler(
            color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222"]
        ),
    }
)


# ---- time ----------------------------------------------------------------------------------------

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


def legend(figure: Figure, shown: Mapping[str, Patch]) -> None:
    """Puts one legend under all axes of a figure, in as many columns as fit."""
    column = 0.6 + 0.075 * max(map(len, shown), default=0)  # inches
    columns = min(len(shown), int(figure.get_figwidth() / column))
    figure.legend(
        handles=list(shown.values()), labels=list(shown), loc="outside lower center", ncols=columns
    )


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
        look = _look(key)
        if width < 0.005 * end:  # a white edge would hide a bar of a few pixels
            look["edgecolor"] = "none"
        ax.add_patch(Rectangle((start, y), width, h, **look))
        shown.setdefault(key, Patch(**_look(key)))
        if not span.background and span.kind == "compute":
            _label(ax, span.name, start, width, y + h / 2, end, key)


def _key(span: Span) -> str:
    return span.name if span.kind == "compute" else span.kind


def _look(key: str) -> dict:
    look = {"facecolor": COLORS.get(key, COLORS["other"]), "edgecolor": "white", "linewidth": 0.6}
    return look | ({"hatch": "////"} if key == "waiting" else {})


def _label(ax: Axes, text: str, start: float, width: float, y: float, end: float, key: str) -> None:
    inches = ax.get_position().width * ax.figure.get_figwidth()
    characters = width / end * inches * 72 / 5.6  # at font size 9
    if len(text) + 1 > characters:
        return
    ax.text(start + width / 2, y, text, ha="center", va="center", fontsize=9, color=_ink(key))


def _ink(key: str) -> str:
    return (
        "white"
        if key in ("backward", "gradients", "update", "optimizer", "buffers")
        else COLORS["ink"]
    )


def _time_unit(seconds: float) -> tuple[float, str]:
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return factor, name
    return 1e6, "µs"


# ---- pipelines -----------------------------------------------------------------------------------

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


def _gantt_lanes(ax: Axes, spans: list[schedules.Span], end: float) -> dict[str, Patch]:
    ranks, chunks = (1 + max(n) for n in zip(*((span.rank, span.op.chunk) for span in spans)))
    ax.set_xlim(0, end)
    ax.set_ylim(ranks - 0.5, -0.5)
    ax.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    ax.set_xlabel("time (forward passes of a micro-batch)")
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    points = ax.get_figure().get_figwidth() * 72 * ax.get_position().width / end
    for rank in range(ranks):
        lane = {"facecolor": COLORS["idle"], "linewidth": 0}
        ax.add_patch(Rectangle((0, rank - 0.43), max(s.end for s in spans), 0.86, **lane))
    shown = {}
    for kind, chunk in sorted({(s.op.kind, s.op.chunk) for s in spans}, key=_drawing_order):
        name, color, later = _KINDS[kind]
        color = _mixed(color, later, 0.85 * chunk / chunks)
        _op_boxes(ax, [s for s in spans if (s.op.kind, s.op.chunk) == (kind, chunk)], color, points)
        shown.setdefault(f"{kind}, chunk > 0" if chunk else name, Patch(facecolor=color))
    shown["idle"] = Patch(facecolor=COLORS["idle"], edgecolor=COLORS["waiting"])
    return shown


def _drawing_order(kind_and_chunk: tuple[str, int]) -> tuple[int, int]:
    return list(_KINDS).index(kind_and_chunk[0]), kind_and_chunk[1]


def _op_boxes(ax: Axes, spans: list[schedules.Span], color: tuple, points: float) -> None:
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


def _op_spans(work: Pipelined) -> list[schedules.Span]:
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


def _recorded_ops(records: Sequence[Record]) -> Iterator[schedules.Span]:
    for record in records:
        for span in record.spans:
            if span.kind == "compute" and (name := _OP.fullmatch(span.name)):
                op = Op(name[1], int(name[2]), int(name[3] or 0))
                yield schedules.Span(record.rank, op, span.start, span.end)


def _mixed(color: str, other: str, share: float) -> tuple[float, ...]:
    """A colour with a `share` of another one in it."""
    return tuple((1 - share) * a + share * b for a, b in zip(to_rgb(color), to_rgb(other)))


def _luminance(color: tuple[float, ...]) -> float:
    """WCAG 2.1, relative luminance: from 0, black, to 1, white; 2.2 stands for the exact curve."""
    return sum(w * part**2.2 for w, part in zip((0.2126, 0.7152, 0.0722), color))


# ---- memory and loss -----------------------------------------------------------------------------


def human_bytes(count: float) -> str:
    """Returns a number of bytes as people read it: "155.3 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def memory(
    ledgers: Sequence[Mapping[str, int]], labels: Sequence[str], title: str = "Memory"
) -> Figure:
    """Draws one bar per ledger (bytes by kind, as `trace.memory_ledger` gives them)."""
    figure, ax = plt.subplots(figsize=(WIDTH, 1.35 + 0.52 * len(ledgers)))
    largest = max(sum(ledger.values()) for ledger in ledgers)
    shown = {}
    for row, ledger in enumerate(ledgers):
        left = 0
        for kind, count in ledger.items():
            if count == 0:
                continue
            bar = ax.barh(row, count, left=left, height=0.62, **_look(kind))
            shown.setdefault(kind, bar)
            if count > 0.11 * largest:
                ax.text(
                    left + count / 2,
                    row,
                    human_bytes(count),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=_ink(kind),
                )
            left += count
        ax.text(left + 0.01 * largest, row, human_bytes(left), va="center", weight="bold")
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set_xlim(0, largest * 1.16)
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_title(title)
    legend(figure, shown)
    return figure


def loss_curves(curves: Mapping[str, Sequence[float]], title: str = "Loss") -> Figure:
    """Draws {label: loss after each step}. Equal curves stay visible: the later ones are thinner."""
    figure, ax = plt.subplots()
    for i, (label, values) in enumerate(curves.items()):
        width = 1.6 + 1.2 * (len(curves) - 1 - i)
        ax.plot(range(1, len(values) + 1), values, label=label, linewidth=width)
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.set_title(title)
    ax.grid(axis="y", color="#E5E5E5")
    ax.legend()
    return figure


def compare(predicted: Mapping[str, object], measured: Mapping[str, object]) -> None:
    """Prints a small table: each quantity predicted and measured, and whether the two are equal."""
    wide = max(len(name) for name in predicted)
    print(f"{'':{wide}}  {'predicted':>12}  {'measured':>12}  equal")
    for name, value in predicted.items():
        got = measured[name]
        print(f"{name:{wide}}  {value!s:>12}  {got!s:>12}  {value == got}")


# ---- collectives ---------------------------------------------------------------------------------


def collective(
    name: str,
    before: Sequence[Sequence[str]] | None = None,
    after: Sequence[Sequence[str]] | None = None,
    ranks: int = 4,
) -> Figure:
    """Draws what a collective does: what each rank holds before and after.

    `before` and `after` hold a row of blocks per rank. A block is written "A0": the letter says
    whose data it is (A belongs to rank 0, B to rank 1), the digit which piece. "A0+B0" is a sum and
    has the colours of all its parts, "" is an empty place, "?" a place whose content is undefined.
    Without them the picture is the operation's usual one, for `ranks` ranks.
    """
    if before is None or after is None:
        before, after = _BLOCKS[name](ranks)
    columns = [max(len(row) for row in rows) for rows in (before, after)]
    size = min(1.2, 6.4 / sum(columns))  # of a block, so that the widest picture fits
    gap = 1.75
    left = 0.95
    right = left + size * columns[0] + gap
    height = 0.525 * len(before)
    figure, ax = canvas(WIDTH, 0.8 * (height + 0.45))
    for x, title, rows in ((left, "before", before), (right, "after", after)):
        ax.text(x, height + 0.06, title, va="bottom", fontsize=10)
        for rank, row in enumerate(rows):
            y = height - (rank + 1) * 0.525 + 0.08
            for i, block in enumerate(row):
                _block(ax, x + i * size, y, size - 0.05, 0.44, block)
    for rank in range(len(before)):
        ax.text(0, height - (rank + 0.5) * 0.525, f"rank {rank}", va="center", fontsize=10)
    arrow(ax, (right - gap + 0.1, height / 2), (right - 0.15, height / 2))
    middle = right - gap / 2 - 0.02
    ax.text(middle, height / 2 + 0.1, name, ha="center", va="bottom", weight="bold", fontsize=10)
    return figure


def _block(ax: Axes, x: float, y: float, width: float, height: float, block: str) -> None:
    parts = block.split("+") if block not in ("", "?") else []
    for i, part in enumerate(parts):
        color = RANK_COLORS[(ord(part[0]) - ord("A")) % len(RANK_COLORS)]
        stripe = width / len(parts)
        ax.add_patch(Rectangle((x + i * stripe, y), stripe, height, facecolor=color, linewidth=0))
    edge = {"edgecolor": COLORS["ink"] if parts else "#BBBBBB", "linewidth": 0.8}
    dashes = {} if parts else {"linestyle": (0, (3, 2))}
    ax.add_patch(Rectangle((x, y), width, height, fill=False, **edge, **dashes))
    text = block if len(block) <= 7 else "Σ" + parts[0][1:]
    size = 9 if len(text) <= 5 else 8
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size)


def _letter(rank: int) -> str:
    return chr(ord("A") + rank)


def _pieces(rank: int, n: int) -> list[str]:
    return [f"{_letter(rank)}{i}" for i in range(n)]


def _total(piece: int | str, n: int) -> str:
    return "+".join(f"{_letter(rank)}{piece}" for rank in range(n))


def _only(rank: int, row: list[str], n: int, empty: str = "") -> list[list[str]]:
    return [row if r == rank else [empty] * len(row) for r in range(n)]


_BLOCKS = {
    "broadcast": lambda n: (_only(0, ["A"], n), [["A"] for _ in range(n)]),
    "scatter": lambda n: (
        _only(0, _pieces(0, n), n),
        [[f"A{r}"] for r in range(n)],
    ),
    "gather": lambda n: (
        [[_letter(r)] for r in range(n)],
        _only(0, [_letter(r) for r in range(n)], n),
    ),
    "all_gather": lambda n: (
        [[_letter(r)] for r in range(n)],
        [[_letter(r) for r in range(n)] for _ in range(n)],
    ),
    "reduce": lambda n: (
        [[_letter(r)] for r in range(n)],
        _only(0, [_total("", n)], n, empty="?"),
    ),
    "all_reduce": lambda n: (
        [[_letter(r)] for r in range(n)],
        [[_total("", n)] for _ in range(n)],
    ),
    "reduce_scatter": lambda n: (
        [_pieces(r, n) for r in range(n)],
        [[_total(r, n)] for r in range(n)],
    ),
    "all_to_all": lambda n: (
        [_pieces(r, n) for r in range(n)],
        [[f"{_letter(s)}{r}" for s in range(n)] for r in range(n)],
    ),
}


# ---- the drawing kit -----------------------------------------------------------------------------


def canvas(width: float = WIDTH, height: float = 3.0) -> tuple[Figure, Axes]:
    """Returns an empty figure of `width` x `height` inches. Its x runs from 0 to 10, its y from 0
    to 10 * height / width: one unit is as long as it is high."""
    figure, ax = plt.subplots(figsize=(width, height))
    ax.set_xlim(0, 10)
    ax.set_ylim(0, 10 * height / width)
    ax.set_aspect("equal")
    ax.axis("off")
    return figure, ax


def building(
    ax: Axes,
    x: float,
    y: float,
    width: float = 1.6,
    height: float = 1.2,
    label: str = "",
    color: str = RANK_COLORS[0],
) -> None:
    """A factory building with its lower left corner at (x, y): a hall with a saw-tooth roof."""
    tooth, roof = width / 3, min(0.3, 0.3 * height)
    outline = [(x, y), (x, y + height - roof)]
    for i in range(3):
        outline += [(x + i * tooth, y + height), (x + (i + 1) * tooth, y + height - roof)]
    outline += [(x + width, y)]
    ax.add_patch(Polygon(outline, facecolor=color, edgecolor=COLORS["ink"], linewidth=1.2))
    ax.text(x + width / 2, y + (height - roof) / 2, label, ha="center", va="center", fontsize=10)


def head_office(ax: Axes, x: float, y: float, width: float = 1.1, label: str = "") -> None:
    """The head office: a tower with windows and a flag."""
    height = 1.5 * width
    wall = {"facecolor": "#E8E8E8", "edgecolor": COLORS["ink"], "linewidth": 1.2}
    ax.add_patch(Rectangle((x, y), width, height, **wall))
    for row in range(3):
        for column in range(3):
            corner = (x + width * (0.14 + 0.28 * column), y + height * (0.38 + 0.2 * row))
            ax.add_patch(Rectangle(corner, width * 0.16, height * 0.1, facecolor="white"))
    ax.plot([x + width / 2] * 2, [y + height, y + height + 0.45], color=COLORS["ink"], lw=1.2)
    flag = [(0, 0.45), (0.35, 0.36), (0, 0.25)]
    ax.add_patch(
        Polygon([(x + width / 2 + a, y + height + b) for a, b in flag], color=COLORS["ink"])
    )
    ax.text(x + width / 2, y + 0.16 * height, label, ha="center", va="center", fontsize=10)


def truck(
    ax: Axes, x: float, y: float, label: str = "", color: str = COLORS["communication"]
) -> None:
    """A truck that drives to the right, 0.9 long, its wheels standing on y."""
    ink = {"edgecolor": COLORS["ink"], "linewidth": 1.0}
    ax.add_patch(Rectangle((x, y + 0.12), 0.6, 0.4, facecolor=color, **ink))
    cab = [(0.62, 0.12), (0.62, 0.42), (0.78, 0.42), (0.9, 0.28), (0.9, 0.12)]
    ax.add_patch(Polygon([(x + a, y + b) for a, b in cab], facecolor="white", **ink))
    for wheel in (0.15, 0.75):
        ax.add_patch(Circle((x + wheel, y + 0.1), 0.1, facecolor=COLORS["ink"]))
    ax.text(x + 0.3, y + 0.32, label, ha="center", va="center", fontsize=9)


def pile(
    ax: Axes, x: float, y: float, boxes: Sequence[str], label: str = "", columns: int = 3
) -> None:
    """A pile of raw material: one box per colour in `boxes`, in rows from the ground."""
    for i, color in enumerate(boxes):
        corner = (x + 0.26 * (i % columns), y + 0.26 * (i // columns))
        ax.add_patch(
            Rectangle(corner, 0.24, 0.24, facecolor=color, edgecolor=COLORS["ink"], linewidth=0.8)
        )
    middle, top = x + 0.13 * columns, y + 0.26 * math.ceil(len(boxes) / columns)
    ax.text(middle, top + 0.06, label, ha="center", va="bottom", fontsize=9)


def blueprint(
    ax: Axes, x: float, y: float, label: str = "", part: tuple[float, float] = (0.0, 1.0)
) -> None:
    """A blueprint 0.9 wide. `part` of it, from and to, is drawn out; the rest is blank paper."""
    left, right = x + 0.9 * part[0], x + 0.9 * part[1]
    sheet = {"boxstyle": "round,pad=0.02", "facecolor": "white", "edgecolor": "#8C8C8C"}
    ax.add_patch(FancyBboxPatch((x, y), 0.9, 0.62, **sheet))
    ax.add_patch(Rectangle((left, y), right - left, 0.62, facecolor=COLORS["parameters"]))
    for i in range(1, 4):
        ax.plot([left, right], [y + 0.155 * i] * 2, color="white", linewidth=0.8)
    ax.text(x + 0.45, y - 0.08, label, ha="center", va="top", fontsize=9)


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str = COLORS["ink"],
    label: str = "",
    bend: float = 0.0,
) -> None:
    """An arrow with its label above the middle. `bend` curves it, to the left if positive."""
    ax.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=14,
            linewidth=1.8,
            color=color,
            shrinkA=0,
            shrinkB=0,
            connectionstyle=f"arc3,rad={-bend}",
        )
    )
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    ax.text(x, y + 0.1, label, ha="center", va="bottom", fontsize=9)


def star(ax: Axes, ranks: int) -> None:
    """Ranks around rank 0, and the messages of a sum that rank 0 collects and sends back."""
    places = _nodes(ax, [(0.0, 0.0), *_circle(ranks - 1)])
    for place in places[1:]:
        _between(ax, place, places[0], bend=0.12)
        _between(ax, places[0], place, bend=0.12)


def ring(ax: Axes, ranks: int) -> None:
    """Ranks in a circle, each sending to the next."""
    places = _nodes(ax, _circle(ranks))
    for i, place in enumerate(places):
        _between(ax, place, places[(i + 1) % ranks], bend=0.12)


def _circle(count: int) -> list[tuple[float, float]]:
    turns = [math.pi / 2 - 2 * math.pi * i / count for i in range(count)]
    return [(math.cos(turn), math.sin(turn)) for turn in turns]


def _nodes(ax: Axes, places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    ax.set_xlim(-1.35, 1.35)
    ax.set_ylim(-1.35, 1.35)
    ax.set_aspect("equal")
    ax.axis("off")
    for rank, place in enumerate(places):
        color = RANK_COLORS[rank % len(RANK_COLORS)]
        ax.add_patch(
            Circle(place, 0.2, facecolor=color, edgecolor=COLORS["ink"], linewidth=1.2, zorder=3)
        )
        ax.text(*place, str(rank), ha="center", va="center", zorder=4)
    return places


def _between(ax: Axes, a: tuple[float, float], b: tuple[float, float], bend: float) -> None:
    length = math.dist(a, b)
    step = ((b[0] - a[0]) / length * 0.24, (b[1] - a[1]) / length * 0.24)
    arrow(
        ax,
        (a[0] + step[0], a[1] + step[1]),
        (b[0] - step[0], b[1] - step[1]),
        color=COLORS["communication"],
        bend=bend,
    )
