"""Prints what launch says of the corpus, as Markdown: python -m tests.reports [--long] [words ...]

Words choose programs ("uneven", "pytorch#33148"); --long adds every message that is not right.
"""

import argparse
import io
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout

from course_utils.launch import launch
from tests.reports import REPORTS, Report

RULES = (None, "nccl")
WORKERS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.reports", description=__doc__.split("\n")[0]
    )
    parser.add_argument("words", nargs="*")
    parser.add_argument("--long", action="store_true")
    asked = parser.parse_args()
    chosen = [each for each in REPORTS if chosen_by(asked.words, each)]
    with ProcessPoolExecutor(WORKERS, initializer=warm_up) as pool:
        table = zip(chosen, pool.map(tried, map(str, chosen)), strict=True)
        show(table, asked.long)


def chosen_by(words: list[str], each: Report) -> bool:
    return not words or any(word in f"{each} {' '.join(each.sources)}" for word in words)


def warm_up() -> None:
    """The first launch of a process imports PyTorch, which is no program's time."""
    launch(abs, 2)


def tried(name: str) -> list[tuple[str, float, str]]:
    each = next(each for each in REPORTS if str(each) == name)
    with redirect_stdout(io.StringIO()) as nowhere, redirect_stderr(nowhere):  # what ranks print
        return [each.tried(rules) for rules in RULES]


def show(table, long: bool) -> None:
    right, tries, notes = Counter(), 0, []
    print("| report | program | plain | s | rules | s |\n|---|---|---|---|---|---|")
    for each, results in table:
        cells = [f"{wrong or 'right'} | {seconds:.1f}" for wrong, seconds, _ in results]
        print(f"| {', '.join(each.sources)} | `{each}` |", " | ".join(cells), "|", flush=True)
        tries += 1
        for rules, (wrong, _, said) in zip(RULES, results, strict=True):
            right[rules] += not wrong
            if wrong:
                notes.append(f"### {each}, {rules or 'plain'}: {wrong}\n\n```text\n{said}\n```")
    print(f"\nright: {right[None]} of {tries} plain, {right['nccl']} of {tries} under the rules")
    if long:
        print("\n" + "\n\n".join(notes))


if __name__ == "__main__":
    main()
