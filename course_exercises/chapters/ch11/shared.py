"""What the exercises of chapter 11 share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from course_exercises.authoring import Wrong
from course_exercises.authoring.ranks import SeenCall, Sent, come_late, following


@contextmanager
def follow_calls() -> Iterator[Sent]:
    """Follows the calls of an answer, on ranks that come one after the other."""
    come_late(dist.get_rank())
    with following() as sent:
        yield sent


def numbers_sent(sent: Sent) -> int:
    """How many numbers this rank has handed over; of a broadcast, only its root does."""

    def gets(call: SeenCall) -> bool:
        return call.kind == "recv" or (call.kind == "broadcast" and call.root != dist.get_rank())

    return sum(call.elements for call in sent.calls if not gets(call))


def check_numbers_sent(sent: list[int], at_most: int) -> None:
    for rank, numbers in enumerate(sent):
        if numbers > at_most:
            got = f"rank {rank} hands over {numbers}"
            raise Wrong("too-many-numbers", expected=f"at most {at_most} numbers", got=got)


@contextmanager
def blaming(slug: str, known: bool = False) -> Iterator[None]:
    """Names what goes wrong within the block; with `known`, also what has a name already."""
    try:
        yield
    except Wrong as wrong:
        if wrong.misconception and not known:
            raise
        raise Wrong(slug, expected=wrong.expected, got=wrong.got) from None
