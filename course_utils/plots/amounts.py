"""Amounts: bytes by kind, and losses."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from course_utils.plots.style import WIDTH, ink_on, legend, look_of


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
            bar = ax.barh(row, count, left=left, height=0.62, **look_of(kind))
            shown.setdefault(kind, bar)
            if count > 0.11 * largest:
                ax.text(
                    left + count / 2,
                    row,
                    human_bytes(count),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=ink_on(kind),
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
