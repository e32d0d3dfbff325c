"""Exercise 10.2, `zigzag_indices`: what it asks for, and how it is checked."""

import re

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch10.shared import zigzag

layout = Exercise(
    "10.2",
    "zigzag_indices",
    points=1,
    minutes=15,
    kind="first",
    parameters=("lengths", "ranks", "rank"),
    hints=[
        (
            "Begin with one document. Write down the chunks 0 to 7 for four ranks. Which two does rank 0 have, which two "
            "rank 1? What do the numbers of each pair add up to?"
        ),
        (
            "A document has 2 * ranks chunks of length / (2 * ranks) places each. Rank r has chunk r, and the chunk "
            "that is as far from the end as r is from the front. Where does the second document begin?"
        ),
        (
            "For each document: check that its length divides. Cut the places from its start to its end into the "
            "chunks, take those with the numbers rank and 2 * ranks - 1 - rank, and go on where it ends. Join all of them "
            "in this order."
        ),
    ],
    things="places",
    misconceptions={
        "not-places": "Return the places of all tokens in the rank's two chunks, one row of int64 numbers: not the numbers of "
        "the chunks, and no table with a row for each.",
        "cut-as-one": "You cut the sequence, as if it were one document. Cut each document by itself.",
        "from-its-start": "You count the places of each document from its own start. Add the lengths of the documents before "
        "it.",
        "other-cut": "You deal the tokens out in another way. Cut a document into 2 * ranks chunks of neighbouring tokens, "
        "two for each rank; rank r has the r-th from the front and the r-th from the back.",
        "one-chunk": "One of the rank's two chunks is missing. It has one from the front and one from the back.",
        "tail-off-by-one": "The chunk from the back is one too early or too late: the last chunk has the number "
        "2 * ranks - 1, and it belongs to rank 0.",
        "other-order": "You have the right places in another order. They ascend: the chunk from the front first, and the tokens "
        "of each chunk in their order, also of that from the back; one document after the other.",
    },
    failures={"ValueError": "other-error"},
)


def _check_places(answer, length: int, ranks: int, rank: int) -> None:
    """Of one document."""
    got = answer([length], ranks, rank)
    expect_type(got, Tensor, likely="not-a-tensor" if isinstance(got, list) else None)
    every, size = torch.arange(length), length // (2 * ranks)
    chunks, own = every.chunk(2 * ranks), zigzag(length, ranks, rank)
    pair = torch.tensor([rank, 2 * ranks - 1 - rank])
    wide = every.chunk(ranks)
    other_cuts = [
        torch.cat(chunks[2 * rank : 2 * rank + 2]),
        every[rank::ranks],
        every.view(-1, 2 * ranks)[:, pair].flatten(),  # there and back, one place at a time
        torch.cat([wide[rank], wide[ranks - 1 - rank]]).sort().values,
    ]
    likely = {
        "not-places": lambda got: (
            same(got.flatten().long(), own) or (size > 1 and same(got.long(), pair))
        ),
        "other-cut": lambda got: any(same(got.sort().values, cut) for cut in other_cuts),
        "one-chunk": lambda got: same(got, own[:size]) or same(got, own[size:]),
        "other-order": lambda got: same(got.sort().values, own),
        "other-rank": lambda got: any(same(got, zigzag(length, ranks, r)) for r in range(ranks)),
        "tail-off-by-one": lambda got: any(
            same(got, torch.cat([own[:size], chunks[(step - 1 - rank) % (2 * ranks)]]))
            for step in (-1, 1)
        ),
    }
    expect(got, own, what="the places", likely=likely)


@layout.requires("the first rank has the first chunk and the last one")
def the_first_rank_has_the_first_chunk(answer, draw):
    ranks = draw.choice([3, 4, 5])
    _check_places(answer, 2 * ranks * draw.integer(2, 5), ranks, 0)


@layout.requires("any rank of any number of ranks", failures={"IndexError": "tail-off-by-one"})
def any_rank_of_any_number_of_ranks(answer, draw):
    for ranks in draw.sample([2, 3, 4, 6], 2):
        length = 2 * ranks * draw.integer(2, 5)
        for rank in range(ranks):
            _check_places(answer, length, ranks, rank)


@layout.requires("one rank has everything, and a chunk may be one token")
def one_rank_has_everything(answer, draw):
    length = 2 * draw.integer(2, 6)
    expect(answer([length], 1, 0), torch.arange(length), what="the places")
    ranks = draw.integer(2, 5)
    _check_places(answer, 2 * ranks, ranks, draw.integer(0, ranks - 1))


@layout.requires("each of several documents is cut by itself", needs_earlier=True)
def each_of_several_documents_is_cut_by_itself(answer, draw):
    ranks = draw.integer(2, 4)
    lengths = [2 * ranks * chunk for chunk in draw.sample(range(1, 6), 3)]
    for rank in range(ranks):
        parts = [zigzag(length, ranks, rank) for length in lengths]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        own = torch.cat([start + part for start, part in zip(starts, parts, strict=True)])
        likely = {
            "cut-as-one": zigzag(sum(lengths), ranks, rank),
            "from-its-start": torch.cat(parts),
            "other-order": lambda got, own=own: same(got.sort().values, own),
        }
        got = answer(list(lengths), ranks, rank)
        what = f"the places of rank {rank} of {ranks}, lengths {lengths}"
        expect(got, own, what=what, likely=likely)


@layout.requires("a length that does not divide is refused with both numbers")
def a_length_that_does_not_divide_is_refused(answer, draw):
    ranks = draw.choice([2, 3, 4])
    # one that divides by the ranks, and not by twice as many
    lengths = [ranks * (2 * draw.integer(2, 5) + 1), 2 * ranks * draw.integer(2, 5) + 1]
    for length in lengths:  # the second of two documents
        kind, message = _refusal(answer, [2 * ranks, length], ranks)
        named = set(re.findall(r"\d+", message))
        if (
            kind != "ValueError"
            or str(length) not in named
            or not {str(ranks), str(2 * ranks)} & named
        ):
            expected = f"a ValueError that names {length} tokens and {2 * ranks} chunks"
            raise Wrong("other-error", expected=expected, got=f"{kind}: {message}".rstrip(": "))


def _refusal(answer, lengths: list[int], ranks: int) -> tuple[str, str]:
    """The name of the exception with which an answer refuses a length, and its message."""
    try:
        answer(lengths, ranks, 0)
    except NotImplementedError:
        raise
    except Exception as error:  # noqa: BLE001 - which one it is, is the question
        return type(error).__name__, str(error)
    return "no exception", ""
