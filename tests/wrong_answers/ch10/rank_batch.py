"""Answers to 10.6, `rank_batch`: wrong in a plausible way, or right in another."""

import torch
from torch.nn.functional import pad

from tests.wrong_answers import right, wrong


def _row(length, rings, place):
    chunks = torch.arange(length).chunk(2 * rings)
    return torch.cat([chunks[place], chunks[-1 - place]])


def _places(ids, mesh, place, piece):
    rings, heads = mesh
    return _row(ids.shape[1], rings, place).chunk(heads)[piece]


def _labels(ids):
    return pad(ids[:, 1:], (0, 1), value=-100)


def _cut(ids, own):
    return ids[:, own], _labels(ids)[:, own], own


@right("10.6")
def cuts_by_places(ids, mesh, place, piece):
    return _cut(ids, _places(ids, mesh, place, piece))


@right("10.6")
def cuts_views(ids, mesh, place, piece):
    rings, heads = mesh
    length = ids.shape[1]
    size = length // (2 * rings)

    def own(x):
        x = x.reshape(len(x), 2 * rings, size)[:, [place, 2 * rings - 1 - place]].flatten(1)
        return x[:, piece * (length // (rings * heads)) :][:, : length // (rings * heads)]

    labels = torch.roll(ids, -1, dims=1)
    labels[:, -1] = -100
    return own(ids), own(labels), own(torch.arange(length)[None])[0]


@wrong("10.6", names="not-three")
def leaves_the_positions_out(ids, mesh, place, piece):
    return cuts_by_places(ids, mesh, place, piece)[:2]


@wrong("10.6", names="not-three")
def repeats_the_positions(ids, mesh, place, piece):
    tokens, labels, positions = cuts_by_places(ids, mesh, place, piece)
    return tokens, labels, positions.expand(len(ids), -1)


@wrong("10.6", names="single-ranks")
def as_the_lessons_ring(ids, mesh, place, piece):
    rings, heads = mesh
    return _cut(ids, _row(ids.shape[1], rings * heads, place * heads + piece))


@wrong("10.6", names="pieces-of-chunks")
def cuts_each_chunk(ids, mesh, place, piece):
    both = _row(ids.shape[1], mesh[0], place).chunk(2)
    return _cut(ids, torch.cat([chunk.chunk(mesh[1])[piece] for chunk in both]))


@wrong("10.6", names="mesh-turned")
def takes_heads_first(ids, mesh, place, piece):
    return cuts_by_places(ids, mesh[::-1], piece, place)


@wrong("10.6", names="no-zigzag")
def cuts_in_order(ids, mesh, place, piece):
    rings, heads = mesh
    return _cut(ids, torch.arange(ids.shape[1]).chunk(rings * heads)[place * heads + piece])


@wrong("10.6", names="not-shifted")
def leaves_the_shift_to_the_model(ids, mesh, place, piece):
    tokens, _, positions = cuts_by_places(ids, mesh, place, piece)
    return tokens, tokens, positions


@wrong("10.6", names="shifted-after-the-cut")
def shifts_its_own_tokens(ids, mesh, place, piece):
    tokens, _, positions = cuts_by_places(ids, mesh, place, piece)
    return tokens, _labels(tokens), positions


@wrong("10.6", names="wraps-round")
def rolls(ids, mesh, place, piece):
    own = _places(ids, mesh, place, piece)
    return ids[:, own], torch.roll(ids, -1, dims=1)[:, own], own


@wrong("10.6", names="last-label")
def ends_with_0(ids, mesh, place, piece):
    own = _places(ids, mesh, place, piece)
    return ids[:, own], pad(ids[:, 1:], (0, 1))[:, own], own


@wrong("10.6", names="local-positions")
def counts_from_0(ids, mesh, place, piece):
    tokens, labels, positions = cuts_by_places(ids, mesh, place, piece)
    return tokens, labels, torch.arange(len(positions))


@wrong("10.6", names="input-changed")
def shifts_in_place(ids, mesh, place, piece):
    own = _places(ids, mesh, place, piece)
    tokens = ids[:, own]
    ids[:, :-1] = ids[:, 1:].clone()
    ids[:, -1] = -100
    return tokens, ids[:, own], own


@wrong("10.6", names="shifted-after-the-cut")
def returns_a_token_less(ids, mesh, place, piece):
    tokens, _, positions = cuts_by_places(ids, mesh, place, piece)
    return tokens[:, :-1], tokens[:, 1:], positions[:-1]


@wrong("10.6", names="not-three")
def returns_the_labels_first(ids, mesh, place, piece):
    tokens, labels, positions = cuts_by_places(ids, mesh, place, piece)
    return labels, tokens, positions


@wrong("10.6", names="shifted-back")
def takes_the_token_before(ids, mesh, place, piece):
    own = _places(ids, mesh, place, piece)
    return ids[:, own], pad(ids[:, :-1], (1, 0), value=-100)[:, own], own


@wrong("10.6", names="shifted-after-the-cut")
def ends_where_the_last_rank_ends(ids, mesh, place, piece):
    own = _places(ids, mesh, place, piece)
    labels = torch.roll(ids, -1, dims=1)[:, own]
    if (place, piece) == (mesh[0] - 1, mesh[1] - 1):
        labels[:, -1] = -100
    return ids[:, own], labels, own
