"""Text as it is printed under a cell: so many columns wide, and no word broken."""

import textwrap

WIDTH = 96


def wrapped(sentence: str, first: str = "", rest: str | None = None) -> str:
    """The sentence in lines of WIDTH columns. The first begins with `first`, the others with `rest` (as
    the first); 40 columns are left beside a margin, however wide."""
    rest = first if rest is None else rest
    return textwrap.fill(
        sentence,
        max(WIDTH, len(first) + 40),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def clipped(line: str) -> str:
    """A line of code or of output, which stays one: what is more than WIDTH columns goes, visibly."""
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."
