"""Amounts: bytes by kind, and losses."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_utils.plots.style import LINES, NEUTRALS, WIDTH, ink_on, legend, look_of

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: float) -> str:
    """Returns a number of bytes as people read it: "155.3 KiB"."""
    power = _power(count)
    return f"{count / 1024**power:.{min(power, 1)}f} {UNITS[power]}"


def _power(count: float) -> int:
    """Of 1,024: that of the largest unit of which there is at least one."""
    return next((p for p in range(4) if abs(count) < 1024 ** (p + 1)), 4)


def memory(
    ledgers: Sequence[Mapping[str, int]], labels: Sequence[str], title: str = "Memory"
) -> Figure:
    """Draws one bar per ledger (bytes by kind, as `trace.memory_ledger` gives them).

    All numbers are in the unit of the largest bar. A kind whose number has no room in it has none.
    """
    figure, ax = plt.subplots(figsize=(WIDTH, 1.35 + 0.52 * len(ledgers)))
    largest = max(sum(ledger.values()) for ledger in ledgers)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(len(labels) - 0.5, -0.5)
    ax.set_xlim(0, largest * 1.16)
    ax.tick_params(axis="y", length=0)
    ax.set_xticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_title(title)
    shown, numbers = {}, []
    for row, ledger in enumerate(ledgers):
        left = 0
        for kind, count in ledger.items():
            if count == 0:
                continue
            bar = ax.barh(row, count, left=left, height=0.62, **look_of(kind))
            shown.setdefault(kind, bar)
            look = {"ha": "center", "va": "center", "fontsize": 9, "color": ink_on(kind)}
            numbers.append(ax.text(left + count / 2, row, _in_unit_of(largest, count), **look))
            left += count
        ax.text(left + 0.01 * largest, row, _in_unit_of(largest, left), va="center", weight="bold")
    legend(figure, shown)
    _without_those_that_do_not_fit(ax, numbers)
    return figure


def _in_unit_of(largest: float, count: float) -> str:
    """A number of bytes in the unit in which people read the largest one, to three of its digits."""
    power = _power(largest)
    decimals = 0 if power == 0 else 2 if largest < 10 * 1024**power else 1
    return f"{count / 1024**power:.{decimals}f} {UNITS[power]}"


def _without_those_that_do_not_fit(ax: Axes, numbers: Sequence[Text]) -> None:
    """Removes the numbers that are wider than their bars, of which there is one for each."""
    ax.figure.draw_without_rendering()  # the layout says how long the axis is
    for number, bar in zip(numbers, list(ax.patches), strict=True):
        if number.get_window_extent().width > 0.94 * bar.get_window_extent().width:
            number.remove()


def loss_curves(curves: Mapping[str, Sequence[float]], title: str = "Loss") -> Figure:
    """Draws {label: loss after each step}. Equal curves stay visible: the later ones are thinner and
    darker."""
    figure, ax = plt.subplots()
    for i, (label, values) in enumerate(curves.items()):
        above = len(curves) - 1 - i  # curves that are drawn on this one
        look = {
            "color": NEUTRALS[min(above, len(NEUTRALS) - 1)],
            "linestyle": LINES[i % len(LINES)]["linestyle"],
            "linewidth": 1.6 + 1.2 * above,
        }
        ax.plot(range(1, len(values) + 1), values, label=label, **look)
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.set_title(title)
    ax.grid(axis="y", color="#E5E5E5")
    ax.legend()
    return figure
