"""The corpus: programs after public bug reports, and what a good message says of each.

A program is as short as shows the mistake. What has to be said was written from the report and from what
PyTorch does, before launch was asked: the call, the guilty rank, the learner's lines (marked `# <- here`;
of one marked `# <- also` the number is enough), and the advice that the report's thread or the forums give.
"""

import inspect
import re
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass

from course_utils.launch import RankFailure, launch

LIMIT = 20.0  # seconds; a program whose cause is found needs a few
PASSES = None  # what is said of a program that is right
HERE, ALSO = "# <- here", "# <- also"
NEVER = ("when the time was up",)  # a cause was there to be named
NEVER_UNDER_RULES = (*NEVER, "ProcessGroupGloo", "unbound_buffer")  # NCCL has no such words

# Why launch does not say something, as far as that is known.
SWALLOWED = "" if sys.version_info >= (3, 12) else "sys.monitoring tells it from Python 3.12 on"

SAME = object()  # under the rules as without them
REPORTS: list["Report"] = []


@dataclass(frozen=True)
class Report:
    """A program for `nprocs` ranks, and the words that its message must have: of "a|b" one is enough.

    sources:  "owner/repository#number" or the address of a thread, for each report it stands for
    says:     by rules (None, "nccl"); PASSES where the program is right
    known:    by rules, why launch does not yet say it; "" where it does
    late:     nobody can know the cause before the time is up
    """

    program: Callable
    sources: tuple[str, ...]
    nprocs: int
    says: dict[str | None, tuple[str, ...] | None]
    known: dict[str | None, str]
    late: bool = False

    @property
    def theme(self) -> str:
        return self.program.__module__.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.theme}.{self.program.__name__}"

    def tried(self, rules: str | None) -> tuple[str, float, str]:
        """What is wrong with what launch says ("" if nothing), the seconds, and what it says."""
        begun = time.monotonic()
        said = self._said(rules)
        return self.wrong(said, rules), time.monotonic() - begun, said or "it passes"

    def _said(self, rules: str | None) -> str | None:
        how = {"rules": rules} if rules else {"backend": "gloo"}
        with tempfile.TemporaryDirectory() as folder, chdir(folder):  # for what programs write
            try:
                launch(self.program, self.nprocs, timeout=LIMIT, **how)
            except RankFailure as failure:
                return str(failure)
        return None

    def wrong(self, said: str | None, rules: str | None) -> str:
        """What is wrong with this message, None for a program that passed; "" if nothing."""
        wanted = self.says[rules]
        if wanted is PASSES or said is None:
            return "" if wanted is said else "is refused" if wanted is PASSES else "passes"
        said = said.replace(self.program.__name__, "")  # its words are not launch's
        text = _of_each_rank(" ".join(said.split())).casefold()
        lacks = [each for each in wanted if not any(w.casefold() in text for w in each.split("|"))]
        lacks += [f"line {n}" for n, code in self._lines() if not _quoted(n, code, text)]
        never = NEVER_UNDER_RULES if rules else NEVER
        has = [each for each in never if each.casefold() in text and not self.late]
        return "; ".join(
            ["lacks " + ", ".join(lacks).replace("|", " or ")] * bool(lacks)
            + [f"says {w}" for w in has]
        )

    def _lines(self) -> list[tuple[int, str]]:
        """Number and code of the learner's lines that must be named; "" where the number is enough."""
        lines, first = inspect.getsourcelines(self.program)
        code = [line.split("#")[0].strip() if HERE in line else "" for line in lines]
        marked = [HERE in line or ALSO in line for line in lines]
        return [(first + i, code[i]) for i in range(len(lines)) if marked[i]]


def _of_each_rank(text: str) -> str:
    """The same, and what it says of several ranks once more for each of them."""
    for ranks, rest in re.findall(r"\branks ((?:\d+(?:, | and )?)+)(.{0,60})", text):
        text += "".join(f" rank {rank} {rest.strip()}." for rank in re.findall(r"\d+", ranks))
    return text


def _quoted(number: int, code: str, text: str) -> bool:
    return code.casefold() in text and bool(re.search(rf"\b{number}\b", text))


def report(
    *sources: str,
    says,
    rules_says=SAME,
    nprocs: int = 2,
    known: str = "",
    known_rules: str = "",
    late: bool = False,
):
    """Enters a program; `rules_says` and `known_rules` are for launch(..., rules="nccl")."""

    def enter(program: Callable) -> Callable:
        words = {None: says, "nccl": says if rules_says is SAME else rules_says}
        why = {None: known, "nccl": known_rules}
        REPORTS.append(Report(program, sources, nprocs, words, why, late))
        return program

    return enter
