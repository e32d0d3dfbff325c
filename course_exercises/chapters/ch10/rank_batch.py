"""Exercise 10.6, `rank_batch`: what it asks for, and how it is checked."""

import torch
from torch import Tensor

from course_exercises.authoring import Exercise, Wrong, expect, expect_type, same
from course_exercises.chapters.ch10.shared import zigzag

IGNORED = -100  # torch.nn.functional.cross_entropy, `ignore_index`

sharing = Exercise(
    "10.6",
    "rank_batch",
    points=2,
    minutes=25,
    kind="core",
    parameters=("ids", "mesh", "place", "piece"),
    hints=[
        (
            "Take 16 tokens on a mesh of 2 x 2, and write down which tokens each row has, in their order. Which half of them "
            "does piece 0 have? Which token comes after the last one of that half?"
        ),
        (
            "Make the labels before you cut: for the whole sequence, each token's successor. Then tokens, labels and positions "
            "are cut in the same way, by one list of places."
        ),
        (
            "The places of a row are chunk `place` and chunk 2 * rings - 1 - place, of 2 * rings; those of the rank are the "
            "`piece`-th of `heads` equal parts of that list. The last token of the sequence has the label -100."
        ),
    ],
    things="tokens",
    misconceptions={
        "not-three": "Return three tensors of int64 numbers: tokens and labels, of as many rows as `ids`, and the positions, "
        "one row.",
        "single-ranks": "You give each rank a place of its own in the zig-zag. A place belongs to a row of the mesh, whose "
        "ranks cut the row's tokens once more.",
        "pieces-of-chunks": "You cut each of the row's two chunks among its ranks. After the swap their tokens would lie in "
        "another order than the ring's mask takes them for: join the chunks first, and cut then.",
        "mesh-turned": "You have place and piece, or the two sizes of the mesh, the wrong way round: (ring, heads), as in "
        "the lesson's `init_device_mesh`.",
        "no-zigzag": "You deal the tokens out in their order. Then the ring's first rank is done early, and its last one "
        "works longest: a row has one chunk from the front and one from the back.",
        "not-shifted": "Your labels are the tokens themselves. Many models shift them inside, and cannot here: a rank "
        "does not have the token after its last one. The label of a token is its successor in the sequence.",
        "shifted-after-the-cut": "You shift the labels within a rank's tokens. At the end of a chunk the successor is on "
        "another rank: make the labels of the whole sequence first, then cut.",
        "wraps-round": "The last token of the sequence has the first one as its label, as after `roll`. Nothing comes after "
        "it: -100.",
        "last-label": "The last token of the sequence has another label than -100, which is what `cross_entropy` leaves out.",
        "local-positions": "You count the positions from the start of the rank's tokens, or of its chunks. A position "
        "is the place in the whole sequence: rotary embeddings are made of it.",
    },
)


Coordinates = list[tuple[int, int]]


def _places(length: int, mesh: tuple[int, int], place: int, piece: int) -> Tensor:
    return zigzag(length, mesh[0], place).chunk(mesh[1])[piece]


def _cuts(length: int, mesh: tuple[int, int], ranks: Coordinates) -> dict[str, list[list[Tensor]]]:
    """The places of all ranks, by mistake: each may be made in several ways."""
    (rings, heads), every, whole = mesh, torch.arange(length), mesh[0] * mesh[1]
    by_row = [i * heads + j for i, j in ranks]
    by_column = [j * rings + i for i, j in ranks]
    chunks = [(zigzag(length, rings, i).chunk(2), j) for i, j in ranks]
    cuts = {
        "single-ranks": [[zigzag(length, whole, r) for r in rs] for rs in (by_row, by_column)],
        "pieces-of-chunks": [[torch.cat([c.chunk(heads)[j] for c in both]) for both, j in chunks]],
        "no-zigzag": [[every.chunk(whole)[r] for r in rs] for rs in (by_row, by_column)],
        "mesh-turned": [[_places(length, (heads, rings), j, i) for i, j in ranks]],
    }
    if rings == heads:
        cuts["mesh-turned"].append([_places(length, mesh, j, i) for i, j in ranks])
    return cuts


def _one_rank(answer, ids: Tensor, *where) -> tuple[Tensor, Tensor, Tensor]:
    given = ids.clone()
    got = answer(given, *where)
    if not torch.equal(given, ids):
        raise Wrong("input-changed", expected="the same ids after the call", got="others")
    expect_type(got, (tuple, list), likely=None if got is None else "not-three")
    of_int64 = [isinstance(part, Tensor) and part.dtype == torch.int64 for part in got]
    if len(got) != 3 or not all(of_int64) or got[2].dim() != 1:
        raise Wrong("not-three", expected="tokens, labels and positions, of int64", got=got)
    return got


def _check_mesh(answer, draw, rings: int, heads: int) -> None:
    mesh, ranks = (rings, heads), [(i, j) for i in range(rings) for j in range(heads)]
    length = 2 * rings * heads * draw.integer(2, 4)
    ids = draw.integers(draw.integer(2, 3), length, low=0, high=999)
    got = [_one_rank(answer, ids, mesh, *rank) for rank in ranks]
    tokens, labels, positions = map(list, zip(*got, strict=True))
    own, on = [_places(length, mesh, *rank) for rank in ranks], f"on a mesh of {rings} x {heads}"
    cuts = {
        name: lambda got, each=each: any(same(got, [ids[:, o] for o in own]) for own in each)
        for name, each in _cuts(length, mesh, ranks).items()
    }
    expect(tokens, [ids[:, o] for o in own], what=f"the tokens {on}", each="rank", likely=cuts)
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    right = [after[:, o] for o in own]
    likely = {
        "not-shifted": tokens,
        "wraps-round": [ids.roll(-1, dims=1)[:, o] for o in own],
        "last-label": lambda got: all(same(g[r >= 0], r[r >= 0]) for g, r in zip(got, right)),
        "shifted-after-the-cut": lambda got: all(
            same(g[:, :-1], t[:, 1:]) for g, t in zip(got, tokens)
        ),
    }
    expect(labels, right, what=f"the labels {on}", each="rank", likely=likely)
    local = lambda got: all(((g[1:] - g[:-1]) == 1).sum() >= len(g) - 2 for g in got)
    expect(
        positions, own, what=f"the positions {on}", each="rank", likely={"local-positions": local}
    )


@sharing.requires("a ring of rows, of which each cuts its tokens once more")
def a_ring_of_rows(answer, draw):
    _check_mesh(answer, draw, 2, draw.integer(3, 4))
    _check_mesh(answer, draw, draw.integer(3, 4), 2)
    _check_mesh(answer, draw, 2, 2)


@sharing.requires("a ring alone, and heads alone")
def a_ring_alone_and_heads_alone(answer, draw):
    _check_mesh(answer, draw, draw.integer(2, 4), 1)
    _check_mesh(answer, draw, 1, draw.integer(2, 4))


@sharing.requires("one rank has all tokens")
def one_rank_has_all_tokens(answer, draw):
    _check_mesh(answer, draw, 1, 1)
