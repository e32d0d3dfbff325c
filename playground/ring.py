"""The rules of the ring page, as JSON: pieces go to the next rank, and the bytes are counted.

Each of n ranks holds n pieces of its gradients. A piece goes to the next rank, which adds it to its
own, or keeps it in place of its own where it is the whole sum already.
"""

import json
import re
from typing import NamedTuple

from course_utils.comm.rings import bus_factor
from playground.guesses import guesses as _guesses

MEGABYTES = 12  # of each rank's gradients: what 2, 3 and 4 ranks divide
_LINK = re.compile(r"n([2-4])(?:/((?:\d\d)*))?")


class Ring(NamedTuple):
    """`held[rank][piece]` are the ranks whose numbers are in it; `came[rank][piece]` is the step in
    which it came; `sent[rank]` has the piece and the step of each message."""

    held: list[list[frozenset[int]]]
    came: list[list[int]]
    sent: list[list[tuple[int, int]]]


def view(link: str) -> str:
    """All that the page shows of the moves in an address: "n3/0011" sends piece 0 of rank 0, then 1 of 1."""
    ring, _ = _replayed(link)
    n = len(ring.held)
    whole = frozenset(range(n))
    most, least = max(map(len, ring.sent)), round(n * bus_factor("all_reduce", n))
    shown = {
        "ranks": [
            {
                "pieces": [sorted(each) for each in row],
                "refused": [why_not(ring, rank, piece) for piece in range(n)],
                "sent": len(ring.sent[rank]),
            }
            for rank, row in enumerate(ring.held)
        ],
        "megabytes": MEGABYTES / n,
        "most": most * MEGABYTES / n,
        "par": least * MEGABYTES / n,
        "steps": max((step for messages in ring.sent for _, step in messages), default=0),
        "stepsPar": least,
        "stuck": [piece for piece in range(n) if _is_stuck(ring, piece)],
        "over": all(each == whole for row in ring.held for each in row),
    }
    return json.dumps(shown)


def move(link: str, rank: int, piece: int) -> str:
    """The address after a piece is sent, or the same one where it cannot be, and what there is to say."""
    ring, moves = _replayed(link)
    if why := why_not(ring, rank, piece):
        return json.dumps({"link": link, "said": f"That cannot go: {why}."})
    said = _send(ring, rank, piece)
    digits = "".join(f"{r}{p}" for r, p in [*moves, (rank, piece)])
    return json.dumps({"link": f"n{len(ring.held)}/{digits}", "said": said})


def read(link: str) -> tuple[int, list[tuple[int, int]]]:
    """The ranks, and of each move its rank and its piece: as far as an address holds moves that can be."""
    ring, moves = _replayed(link)
    return len(ring.held), moves


def why_not(ring: Ring, rank: int, piece: int) -> str | None:
    """Why a rank may not send a piece; None if it may."""
    n = len(ring.held)
    to, whole = (rank + 1) % n, frozenset(range(n))
    mine, theirs = ring.held[rank][piece], ring.held[to][piece]
    if theirs == whole:
        return f"rank {to} has the whole sum of piece {piece} already"
    if mine != whole and (twice := sorted(mine & theirs)):
        return f"piece {piece} of rank {to} has the numbers of rank {twice[0]} already, and would count them twice"
    return None


def guesses(n: int) -> str:
    """What one may predict of the megabytes that a rank sends."""
    mistakes = [
        (MEGABYTES * (n - 1) / n, "That is half of the way: the sums have to go round, too."),
        (MEGABYTES, "As if one message were enough: the numbers go round, and then the sums."),
        (MEGABYTES * 2 * (n - 1), "That is the whole tensor in each step: a step sends one piece."),
        (
            2 * MEGABYTES,
            "As if all pieces went round twice: a rank need not send its own piece back to itself.",
        ),
        (MEGABYTES * (n - 1), "As if each rank sent all it has to each other rank."),
    ]
    return _guesses(MEGABYTES * bus_factor("all_reduce", n), mistakes)


def cell(link: str) -> str:
    """The cell of a notebook that sends these very pieces between real ranks."""
    n, moves = read(link)
    return CELL.replace("RANKS", str(n)).replace("MOVES", repr(moves))


CELL = """import torch
import torch.distributed as dist

from course_utils import hardware
from course_utils.launch import launch
from course_utils.trace import Trace


def ring(rank, n, moves):
    gradients = torch.full((3_000_000,), rank + 1.0, device=hardware.device())  # 12 MB
    pieces, inside = gradients.chunk(n), [[{r}] * n for r in range(n)]
    with Trace() as trace:
        for source, piece in moves:
            to, mine = (source + 1) % n, inside[source][piece]
            if rank == source:
                dist.send(pieces[piece], to)
            elif rank == to:
                came = torch.empty_like(pieces[piece])
                dist.recv(came, source)
                pieces[piece].copy_(came if len(mine) == n else came + pieces[piece])
            inside[to][piece] = inside[to][piece] | mine
    return (gradients == n * (n + 1) / 2).all().item(), trace.record().sent("send")


for rank, (right, sent) in enumerate(launch(ring, RANKS, RANKS, MOVES)):
    print(f"rank {rank} has the sum: {right}; it sent {sent / 1e6:g} MB")
"""


def _start(n):
    own = [[frozenset([rank])] * n for rank in range(n)]
    return Ring(own, [[0] * n for _ in range(n)], [[] for _ in range(n)])


def _replayed(link):
    """The ring after the moves of an address, and these."""
    found = _LINK.fullmatch(link)
    if not found:
        raise ValueError(f"{link!r} is no position of the ring.")
    n, digits = int(found[1]), found[2] or ""
    ring, moves = _start(n), []
    for rank, piece in zip(map(int, digits[::2]), map(int, digits[1::2])):
        if max(rank, piece) >= n or why_not(ring, rank, piece):
            break
        _send(ring, rank, piece)
        moves.append((rank, piece))
    return ring, moves


def _is_stuck(ring, piece):
    """Whether no rank may send a piece that some rank still lacks."""
    refused = all(why_not(ring, rank, piece) for rank in range(len(ring.held)))
    return refused and any(len(row[piece]) < len(ring.held) for row in ring.held)


def _send(ring, rank, piece):
    to = (rank + 1) % len(ring.held)
    mine, theirs = ring.held[rank][piece], ring.held[to][piece]
    now = 1 + max([ring.came[rank][piece], *(step for _, step in ring.sent[rank])])
    left = [step for other, step in ring.sent[to] if other == piece]  # what stood there went first
    now = max([now, *left])
    ring.sent[rank].append((piece, now))
    ring.came[to][piece] = now
    ring.held[to][piece] = mine | theirs
    if mine | theirs == mine:
        return f"Step {now}: rank {to} takes over the whole sum of piece {piece}."
    inside = sorted(mine | theirs)
    what = "whole sum" if len(inside) == len(ring.held) else f"sum of ranks {_listed(inside)}"
    return f"Step {now}: rank {to} adds piece {piece} to its own, which makes the {what}."


def _listed(ranks):
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
