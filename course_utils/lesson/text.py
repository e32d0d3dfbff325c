"""A story to train language models on, offline: characters as tokens.

`data/text/the_long_shed.txt` was written for this course (CC BY 4.0).
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# Beside the package, as in mnist.py, whose torchvision takes a second to import.
_STORY = Path(__file__).resolve().parents[2] / "data" / "text" / "the_long_shed.txt"


@cache
def text() -> str:
    """Returns the story, some 33,000 characters of plain ASCII."""
    return _STORY.read_text(encoding="ascii")


@cache
def vocabulary() -> list[str]:
    """Returns the 72 characters of the story, sorted; a token is an index of this list."""
    return sorted(set(text()))


def encode(text: str) -> Tensor:
    """Returns the tokens of `text`, int64 (len(text),).

    Raises ValueError for a character that the story does not have.
    """
    number = {character: token for token, character in enumerate(vocabulary())}
    unknown = sorted(set(text) - number.keys())
    if unknown:
        raise ValueError(f"The vocabulary has no {unknown[0]!r}; use characters of the story.")
    return torch.tensor([number[character] for character in text], dtype=torch.int64)


def windows(context: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets, both int64 (count, context), from random places of the story.

    A target is the token that follows its input. The same seed gives the same windows.
    """
    tokens = encode(text())
    if not 1 <= context < len(tokens):
        raise ValueError(f"context is {context}; it has to be from 1 to {len(tokens) - 1} tokens.")
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - context, (count,), generator=generator)
    cut = tokens[starts[:, None] + torch.arange(context + 1)]  # (count, context + 1)
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()
