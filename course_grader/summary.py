"""What a class has not understood yet: for each exercise who passed, and the mistakes by frequency.

report.md is to be read, report.png is its first table as a figure.
"""

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from course_exercises.checks import catalogue
from course_grader.marks import Grade
from course_grader.report import one_line
from course_grader.totals import Total

_ATTEMPT = re.compile(r"changes what the check|reaches for what|changed what its process says")
_MISTAKES = 5  # of an exercise in the table
_DRAWN = 12  # of a class in the figure
_KINDS = (("passed", "#0072B2"), ("failed", "#D55E00"), ("not tried", "#BBBBBB"))


@dataclass
class Summary:
    """An exercise: how many passed, failed and did not try; its mistakes by how many made them."""

    exercise: str
    name: str
    counts: Counter[str] = field(default_factory=Counter)
    mistakes: Counter[str] = field(default_factory=Counter)

    @property
    def share(self) -> float:
        """Of those who handed in the chapter, the share that passed."""
        return self.counts["passed"] / self.counts.total()


def summaries(grades: Sequence[Grade]) -> list[Summary]:
    """One for each exercise: what to teach again comes first."""
    found: dict[str, Summary] = {}
    marks = [mark for grade in grades for mark in grade.exercises if mark.status != "by hand"]
    for mark in marks:
        summary = found.setdefault(mark.exercise, Summary(mark.exercise, mark.name))
        if mark.status == "passed":
            summary.counts["passed"] += 1
        elif mark.status in ("not attempted", "missing"):
            summary.counts["not tried"] += 1
        else:
            summary.counts["failed"] += 1
            summary.mistakes.update({slug for _, _, slug in mark.lines if slug})
    ids = {s.exercise: [int(part) for part in s.exercise.split(".")] for s in found.values()}
    return sorted(found.values(), key=lambda s: (s.share, ids[s.exercise]))


def write(
    totals: Sequence[Total], nobodys: Sequence[str], alike: Sequence[str], folder: Path
) -> None:
    """Writes report.md and report.png."""
    found = summaries([one.grade for total in totals for one in total.counting if one.found])
    lines = [one_line(f"{t.student.name}: {remark}") for t in totals for remark in t.remarks()]
    attempts = [
        f"{total.student.name}: {mark.feedback}"
        for total in totals
        for one in total.handed_in
        for mark in one.grade.exercises
        if mark.status == "stopped" and _ATTEMPT.search(mark.feedback)
    ]
    parts = {
        "Read these: the code reaches for the check": _listed(attempts),
        "What to teach again": table(found),
        "Nobody's": _listed(nobodys),
        "Missing, late, refused, by hand": _listed(lines),
        "Equal answers but for names and layout: a reason to read them, never a verdict": _listed(
            alike
        ),
    }
    text = "\n".join(f"## {title}\n\n{part}" for title, part in parts.items() if part)
    (folder / "report.md").write_text(f"# Report\n\n{text}", encoding="utf-8", errors="replace")
    if found:
        _draw(found, folder / "report.png")


def _listed(lines):
    return "".join(f"* {_plain(one_line(line))}\n" for line in lines)


def _plain(text):
    """Markdown that shows a text as it is: files and folders are named by students."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("[", "\\[").replace("`", "\\`")


def table(found: Sequence[Summary]) -> str:
    """The exercises in Markdown."""
    lines = [
        "| exercise | passed | failed | not tried | what went wrong |",
        "|---|---|---|---|---|",
    ]
    for s in found:
        wrong = [f"{n} x {slug}: {_sentence(s, slug)}" for slug, n in _first(s.mistakes)]
        passed, failed, untried = (s.counts[kind] for kind, _ in _KINDS)
        row = (f"{s.exercise} `{s.name}`", f"{passed} ({s.share:.0%})", failed, untried)
        wrong = "; ".join(wrong[:_MISTAKES]).replace("|", "\\|").removesuffix(": ")
        lines.append("| " + " | ".join(map(str, (*row, wrong))) + " |")
    return "\n".join(lines) + "\n"


def _first(mistakes):
    return sorted(mistakes.items(), key=lambda item: (-item[1], item[0]))


def _sentence(summary, slug):
    return catalogue.find(summary.exercise).misconceptions.get(slug, "")


def _draw(found, path):
    """Who passed, the worst exercise first; below, the mistakes, the most frequent first."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    wrong = _first({(s.exercise, slug): n for s in found for slug, n in s.mistakes.items()})[
        :_DRAWN
    ]
    by_id = {s.exercise: s for s in found}
    heights = [1 + 0.35 * len(found), 0.6 + 0.45 * len(wrong)][: 2 if wrong else 1]
    figure = Figure(figsize=(9, sum(heights) + 0.4), layout="constrained")
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    left = [0] * len(found)
    names = [f"{s.exercise} {s.name}" for s in found]
    for kind, colour in _KINDS:
        counts = [s.counts[kind] for s in found]
        axes[0].barh(names, counts, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, counts, strict=True)]
    axes[0].set_title("Who passed: what to teach again comes first", loc="left")
    axes[0].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    if wrong:
        axes[1].barh(range(len(wrong)), [n for _, n in wrong], height=0.4, color="#D55E00")
        axes[1].set_yticks(range(len(wrong)), [exercise for (exercise, _), _ in wrong])
        axes[1].set_title("The mistakes: the most frequent comes first", loc="left")
        for i, ((exercise, slug), n) in enumerate(wrong):
            said = f"{slug}: {_sentence(by_id[exercise], slug)}".removesuffix(": ")
            said = textwrap.shorten(said, 78, placeholder=" ...")
            axes[1].text(0, i - 0.24, said, va="bottom", parse_math=False)
            axes[1].text(n, i, f" {n}", va="center")
    for each in axes:
        each.invert_yaxis()
        each.tick_params(left=False)
        each.xaxis.set_major_locator(MaxNLocator(integer=True))
        each.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("submissions")
    figure.savefig(path, dpi=150, metadata={"Software": None})
