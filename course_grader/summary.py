"""What a class has not understood yet: for each exercise who passed, and the mistakes by frequency.

`--report monday` writes monday.md, a table to read, and monday.png, the same as a figure.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_exercises.checks import catalogue
from course_grader.marks import Grade

_MISTAKES = 5


@dataclass
class Summary:
    """An exercise: how many passed, failed and did not try; its mistakes by how many made them."""

    exercise: str
    name: str
    passed: int = 0
    failed: int = 0
    untried: int = 0
    mistakes: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of those who handed in the chapter, the share that passed."""
        return self.passed / max(1, self.passed + self.failed + self.untried)


def summaries(grades: Sequence[Grade]) -> list[Summary]:
    """One for each exercise, in order."""
    found: dict[str, Summary] = {}
    for mark in (mark for grade in grades for mark in grade.exercises):
        summary = found.setdefault(mark.exercise, Summary(mark.exercise, mark.name))
        if mark.status == "passed":
            summary.passed += 1
        elif mark.status in ("not attempted", "missing"):
            summary.untried += 1
        else:
            summary.failed += 1
            summary.mistakes.update({slug for _, _, slug in mark.lines if slug})
    return sorted(found.values(), key=lambda s: [int(part) for part in s.exercise.split(".")])


def write(grades: Sequence[Grade], path: Path) -> None:
    """Writes the table to path.md and the figure to path.png."""
    found = summaries(grades)
    path.with_suffix(".md").write_text(table(found), encoding="utf-8")
    if found:
        _draw(found, path.with_suffix(".png"))


def table(found: Sequence[Summary]) -> str:
    """Markdown: what to teach again comes first."""
    lines = [
        "| exercise | passed | failed | not tried | what went wrong |",
        "|---|---|---|---|---|",
    ]
    for s in sorted(found, key=lambda s: s.share):
        wrong = "; ".join(f"{n} x {_sentence(s, slug)}" for slug, n in _first(s.mistakes))
        row = (
            f"{s.exercise} `{s.name}`",
            f"{s.passed} ({s.share:.0%})",
            s.failed,
            s.untried,
            wrong,
        )
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"


def _first(mistakes):
    return sorted(mistakes.items(), key=lambda item: (-item[1], item[0]))[:_MISTAKES]


def _sentence(summary, slug):
    text = catalogue.find(summary.exercise).misconceptions.get(slug, "")
    return f"{slug}: {text}".replace("|", "\\|") if text else slug


def _draw(found, path):
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 1.2 + 0.35 * len(found)), layout="constrained")
    axes = figure.subplots()
    names = [f"{s.exercise} {s.name}" for s in found][::-1]
    left = [0] * len(found)
    kinds = (("passed", "#0072B2"), ("failed", "#D55E00"), ("untried", "#BBBBBB"))
    for kind, colour in kinds:
        counts = [getattr(s, kind) for s in found][::-1]
        axes.barh(
            names, counts, left=left, color=colour, label=kind.replace("untried", "not tried")
        )
        left = [a + b for a, b in zip(left, counts, strict=True)]
    axes.set_xlabel("submissions")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper center", ncols=len(kinds), frameon=False)  # beside the bars
    figure.savefig(path, dpi=150, metadata={"Software": None})
