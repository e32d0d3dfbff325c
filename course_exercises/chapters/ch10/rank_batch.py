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
        "not-three": "Return three tensors of int64 numbers, in this order: tokens and labels, of as many rows as `ids`, "
        "and the positions, one row.",
        "single-ranks": "You give each rank a place of its own in the zig-zag. A place belongs to a row of the mesh, whose "
        "ranks cut the row's tokens once more.",
        "pieces-of-chunks": "You cut each of the row's two chunks among its ranks. After the swap their tokens would lie in "
        "another order than the ring's mask takes them for: join the chunks first, and cut then.",
        "mesh-turned": "You have place and piece, or the two sizes of the mesh, the wrong way round: (ring, heads), as in "
        "section 3's `init_device_mesh`.",
        "no-zigzag": "You deal the tokens out in another way than section 3. Of 2 * ring chunks a row has one from the front "
        "and one from the back, in this order, so that all rows have as much to do under a causal mask.",
        "not-shifted": "Your labels are the tokens themselves. Many models shift them inside, and cannot here: a rank "
        "does not have the token after its last one. The label of a token is its successor in the sequence.",
        "shifted-back": "Your labels are the tokens before. The label of a token is its successor.",
        "wraps-round": "The last token of the sequence has the first one as its label, as after `roll`. Nothing comes after "
        "it: -100.",
        "last-label": "The last token of the sequence has another label than -100, which is what `cross_entropy` leaves out.",
        "shifted-after-the-cut": "Your labels are right between neighbours and wrong at an end, as where they are shifted "
        "after the cut. At the end of a chunk the successor is on another rank, and only the last token of the whole "
        "sequence has none: make all labels first, then cut.",
        "local-positions": "You count the positions of each rank from 0. A position is the place in the whole sequence: "
        "rotary embeddings are made of it.",
    },
)


Coordinates = list[tuple[int, int]]


def _places(length: int, mesh: tuple[int, int], place: int, piece: int) -> Tensor:
    return zigzag(length, mesh[0], place).chunk(mesh[1])[piece]


def _cuts(length: int, mesh: tuple[int, int], ranks: Coordinates) -> dict[str, list[list[Tensor]]]:
    """The places of all ranks, by mistake: each may be made in several ways."""
    (rings, heads), whole = mesh, mesh[0] * mesh[1]
    by_row = [i * heads + j for i, j in ranks]
    by_column = [j * rings + i for i, j in ranks]
    chunks = [(zigzag(length, rings, i).chunk(2), j) for i, j in ranks]
    cuts = {
        "single-ranks": [[zigzag(length, whole, r) for r in rs] for rs in (by_row, by_column)],
        "pieces-of-chunks": [[torch.cat([c.chunk(heads)[j] for c in both]) for both, j in chunks]],
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
    kinds = [
        f"{str(part.dtype).removeprefix('torch.')} {tuple(part.shape)}"
        if isinstance(part, Tensor)
        else type(part).__name__
        for part in got
    ]
    rows, t = len(ids), ids.shape[1] // (where[0][0] * where[0][1])
    right = [f"int64 ({rows}, {t})"] * 2 + [f"int64 ({t},)"]
    if len(kinds) != 3 or not all(kind.startswith("int64") for kind in kinds) or got[2].dim() != 1:
        raise Wrong("not-three", expected=", ".join(right), got=", ".join(kinds))
    return got


def _check_mesh(answer, draw, rings: int, heads: int) -> None:
    mesh, ranks = (rings, heads), [(i, j) for i in range(rings) for j in range(heads)]
    length = 2 * rings * heads * draw.integer(2, 4)
    ids = draw.integers(draw.integer(1, 3), length, low=0, high=999)
    ids[:, draw.integer(0, length - 2)] = ids[:, -1]  # its number does not make a token the last
    got = [_one_rank(answer, ids, mesh, *rank) for rank in ranks]
    tokens, labels, positions = map(list, zip(*got, strict=True))
    own, on = [_places(length, mesh, *rank) for rank in ranks], f"on a mesh of {rings} x {heads}"
    after = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], IGNORED)], dim=1)
    whole, right = [ids[:, o] for o in own], [after[:, o] for o in own]
    likely = {
        name: lambda got, each=each: any(same(got, [ids[:, o] for o in own]) for own in each)
        for name, each in _cuts(length, mesh, ranks).items()
    }
    likely["no-zigzag"] = lambda got: same(torch.cat(got, 1).sort(1)[0], ids.sort(1)[0])
    likely |= {"shifted-after-the-cut": [each[:, :-1] for each in whole], "not-three": right}
    expect(tokens, whole, what=f"the tokens {on}", each="rank", likely=likely)
    _check_labels(labels, right, ids, own, f"the labels {on}")
    from_0 = [torch.arange(len(o)) for o in own]
    chunks = [torch.arange(length).chunk(2 * rings)[0].repeat(2) for _ in own]
    from_0s = {"local-positions": lambda got: same(got, from_0) or same(got, chunks)}
    expect(positions, own, what=f"the positions {on}", each="rank", likely=from_0s)


def _check_labels(
    got: list[Tensor], right: list[Tensor], ids: Tensor, own: list[Tensor], what: str
) -> None:
    def back(got: list[Tensor]) -> bool:
        """Whether each label is the token before, where there is one."""
        pairs = zip(got, own, strict=True)
        return all(same(g[:, o > 0], ids[:, o[o > 0] - 1]) for g, o in pairs)

    def between_neighbours(got: list[Tensor]) -> bool:
        follows = [o.diff(append=o[:1]) == 1 for o in own]
        return all(same(g[:, f], r[:, f]) for g, r, f in zip(got, right, follows, strict=True))

    likely = {
        "not-shifted": [ids[:, o] for o in own],
        "shifted-back": back,
        "wraps-round": [ids.roll(-1, dims=1)[:, o] for o in own],
        "last-label": lambda got: all(same(g[r >= 0], r[r >= 0]) for g, r in zip(got, right)),
        "shifted-after-the-cut": between_neighbours,
    }
    expect(got, right, what=what, each="rank", likely=likely)


@sharing.requires("a ring of rows, of which each cuts its tokens once more")
def a_ring_of_rows(answer, draw):
    for mesh in draw.sample([(2, 3), (2, 4), (3, 2), (4, 2), (3, 3)], 2) + [(2, 3), (3, 2), (2, 2)]:
        _check_mesh(answer, draw, *mesh)


@sharing.requires("a ring alone, and heads alone")
def a_ring_alone_and_heads_alone(answer, draw):
    _check_mesh(answer, draw, draw.integer(2, 4), 1)
    _check_mesh(answer, draw, 1, draw.integer(2, 4))


@sharing.requires("one rank has all tokens")
def one_rank_has_all_tokens(answer, draw):
    _check_mesh(answer, draw, 1, 1)
