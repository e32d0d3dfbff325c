"""Exercise 10.2, `zigzag_indices`: what it asks for, and how it is checked."""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch10.shared import zigzag

layout = Exercise(
    "10.2",
    "zigzag_indices",
    points=1,
    minutes=10,
    kind="first",
    parameters=("length", "ranks", "rank"),
    hints=[
        (
            "Write down the chunks 0 to 7 for four ranks. Which two does rank 0 have, which two rank 1? What do "
            "the numbers of each pair add up to?"
        ),
        (
            "There are 2 * ranks chunks of length / (2 * ranks) places each. Rank r has chunk r, and the chunk "
            "that is as far from the end as r is from the front."
        ),
        (
            "Check that the length divides. Cut `torch.arange(length)` into the chunks, take those with the "
            "numbers rank and 2 * ranks - 1 - rank, and join them in this order."
        ),
    ],
    misconceptions={
        "no-tensor": "Asked is a tensor of places: `torch.tensor` makes one of a list.",
        "blocks": "These are two neighbouring chunks, as one cuts from front to back. Under a causal mask the "
        "last rank would have most of the work.",
        "strided": "You deal single places out, one after the other. A zig-zag deals out chunks.",
        "chunk-numbers": "These are the numbers of the two chunks. Asked are the places of the tokens in them.",
        "not-joined": "The chunks are the rows of a table. Asked is one row of places: join them.",
        "head-only": "The chunk from the back is missing.",
        "tail-only": "The chunk from the front is missing.",
        "too-few-chunks": "You cut into as many chunks as there are ranks. Each rank gets two, so cut into twice as "
        "many; else the two halves of the ranks have the same places.",
        "tail-off-by-one": "The chunk from the back is one too early or too late: the last chunk has the number "
        "2 * ranks - 1, and it belongs to rank 0.",
        "tail-backwards": "The places of the chunk from the back run backwards. Only the order of chunks is "
        "mirrored: within a chunk tokens keep their order.",
        "tail-first": "The chunk from the back stands first. Asked is ascending order.",
        "other-rank": "These are the places of another rank.",
        "wrong-dtype": "Places are int64, as `torch.arange` of integers makes them.",
        "no-error": "A length that does not divide is accepted without a word, and places are lost, or chunks "
        "are unequal. Compare the remainder with zero and raise a ValueError.",
        "other-error": "A length that does not divide ends in another exception than a ValueError. An assert "
        "disappears under `python -O`, and a message from deep inside names the wrong cause.",
        "error-without-sizes": "The ValueError does not say what does not divide by what. Name the length and the "
        "number of chunks in its message.",
        "refuses-what-divides": "A length that divides into 2 * ranks chunks is refused.",
    },
    failures={"ValueError": "refuses-what-divides"},
)


def _check_places(answer, length: int, ranks: int, rank: int) -> None:
    got = answer(length, ranks, rank)
    expect_type(got, Tensor, likely="no-tensor" if isinstance(got, list) else None)
    every, size = torch.arange(length), length // (2 * ranks)
    chunks, own = every.chunk(2 * ranks), zigzag(length, ranks, rank)
    head, tail = own[:size], own[size:]
    wide = every.chunk(ranks)
    dealt = every.view(-1, 2 * ranks)  # there and back, one place at a time
    likely = {
        "not-joined": lambda got: got.ndim > 1 and same(got.flatten(), own),
        "chunk-numbers": size > 1 and torch.tensor([rank, 2 * ranks - 1 - rank]),
        "wrong-dtype": lambda got: got.dtype != torch.int64 and same(got.long(), own),
        "blocks": torch.cat(chunks[2 * rank : 2 * rank + 2]),
        "strided": lambda got: any(
            same(got, each)
            for each in (every[rank::ranks], dealt[:, [rank, 2 * ranks - 1 - rank]].flatten())
        ),
        "head-only": head,
        "tail-only": tail,
        "too-few-chunks": lambda got: same(
            got.sort().values, torch.cat([wide[rank], wide[ranks - 1 - rank]]).sort().values
        ),
        "tail-backwards": torch.cat([head, tail.flip(0)]),
        "tail-first": torch.cat([tail, head]),
        "other-rank": lambda got: any(same(got, zigzag(length, ranks, r)) for r in range(ranks)),
        "tail-off-by-one": lambda got: same(got[:size], head),
    }
    expect(got, own, what="the places", likely=likely)


@layout.requires("the first rank has the first chunk and the last one")
def the_first_rank_has_the_first_chunk(answer, draw):
    ranks = draw.choice([3, 4, 5])
    _check_places(answer, 2 * ranks * draw.integer(2, 5), ranks, 0)


@layout.requires("any rank of any number of ranks", failures={"exception": "tail-off-by-one"})
def any_rank_of_any_number_of_ranks(answer, draw):
    for ranks in draw.sample([2, 3, 4, 6], 2):
        length = 2 * ranks * draw.integer(2, 5)
        for rank in range(ranks):
            _check_places(answer, length, ranks, rank)


@layout.requires("one rank has everything, and a chunk may be one token")
def one_rank_has_everything(answer, draw):
    length = 2 * draw.integer(2, 6)
    expect(answer(length, 1, 0), torch.arange(length), what="the places")
    ranks = draw.integer(2, 5)
    _check_places(answer, 2 * ranks, ranks, draw.integer(0, ranks - 1))


@layout.requires("a length that does not divide is refused with both numbers")
def a_length_that_does_not_divide_is_refused(answer, draw):
    ranks = draw.choice([2, 3, 4])
    # one that divides by the ranks, and not by twice as many
    lengths = [ranks * (2 * draw.integer(2, 5) + 1), 2 * ranks * draw.integer(2, 5) + 1]
    for length in lengths:
        numbers = ({str(length), str(2 * ranks)}, {str(length), str(ranks)})
        _check_refused(lambda length=length: answer(length, ranks, 0), numbers)


def _check_refused(call: Callable, numbers: tuple[set[str], ...]) -> None:
    """Raises Wrong unless the call ends in a ValueError that names one of the sets of numbers."""
    expected = f"a ValueError that names {' and '.join(sorted(numbers[0], key=int))}"
    try:
        call()
    except ValueError as error:
        if not any(wanted <= set(re.findall(r"\d+", str(error))) for wanted in numbers):
            raise Wrong(
                "error-without-sizes", expected=expected, got=f"ValueError: {error}"
            ) from None
        return
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        raise Wrong("other-error", expected=expected, got=type(error).__name__) from None
    raise Wrong("no-error", expected=expected, got="no exception")
