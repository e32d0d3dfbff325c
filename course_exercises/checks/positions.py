"""A position of the playground's board: what is placed on each rank, as the end of the page's address.

    p2m3v1-FB-cap2/F0F1B0/F0B0

p ranks, m micro-batches, v chunks of a rank (V where the line turns at its ends); F and B, or F, B and W; how
many passes a rank may have in flight; and what stands on each rank, in order. It runs in the browser, too: nothing else is needed.
"""

import re
from dataclasses import dataclass

from course_utils.lesson.schedules import KINDS, Op, Placement, Schedule, looped, v_shaped

_BOARD = re.compile(r"p([2-4])m([1-8])(v1|v2|V2)-(FBW?)-cap(\d\d?)")
_OPS = re.compile(r"([FBW])(\d)(?:\.(\d))?")


@dataclass(frozen=True)
class Position:
    """`kinds` is "FB" or "FBW"; `rows` has the placed ops of each rank."""

    ranks: int
    micro_batches: int
    chunks: int
    kinds: str
    cap: int
    rows: Schedule
    place: Placement = looped

    def __str__(self) -> str:
        return "/".join([self.board, *("".join(map(str, row)) for row in self.rows)]).rstrip("/")

    @property
    def board(self) -> str:
        """The part of the address that no move changes."""
        line = "V" if self.place is v_shaped else "v"
        sizes = f"p{self.ranks}m{self.micro_batches}{line}{self.chunks}"
        return f"{sizes}-{self.kinds}-cap{self.cap}"

    @property
    def sizes(self) -> tuple[int, int, int, Placement]:
        """Ranks, micro-batches, chunks and their placement, as `first_illegal_move` takes them."""
        return self.ranks, self.micro_batches, self.chunks, self.place

    @property
    def ops(self) -> list[Op]:
        """What each rank has to do, in an order in which one rank after the other can."""
        m, chunks = range(self.micro_batches), range(self.chunks)
        order = {kind: chunks[::-1] if kind == "B" else chunks for kind in self.kinds}
        return [
            Op(kind, i, chunk)
            for kind in KINDS
            if kind in order
            for chunk in order[kind]
            for i in m
        ]

    @property
    def costs(self) -> dict[str, float]:
        """The time of an op of each kind, in forward passes of a rank."""
        whole = {"F": 1, "B": 1, "W": 1} if "W" in self.kinds else {"F": 1, "B": 2}
        return {kind: cost / self.chunks for kind, cost in whole.items()}


def read(link: str) -> Position:
    """The position in an address, or at the end of one. Raises ValueError where there is none."""
    board, *rows = link.rpartition("#")[2].split("/")
    found = _BOARD.fullmatch(board)
    if not found or any(_OPS.sub("", row) for row in rows) or len(rows) > int(found[1]):
        raise ValueError(
            f"{link!r} is no position of the playground: copy the address of the page that shows it."
        )
    p, m, v, kinds, cap = found.groups()
    rows += [""] * (int(p) - len(rows))
    placed = [[Op(k, int(i), int(c or 0)) for k, i, c in _OPS.findall(row)] for row in rows]
    place = v_shaped if v[0] == "V" else looped
    return Position(int(p), int(m), int(v[1]), kinds, int(cap), placed, place)
