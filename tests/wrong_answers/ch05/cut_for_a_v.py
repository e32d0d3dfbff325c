"""Answers to 5.7, `cut_for_a_v`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


def _dealt(layers, begun):
    """Each layer goes to whoever has least to do; how many each gets."""
    busy, counts = list(begun), [0] * len(begun)
    for _ in range(layers):
        least = busy.index(min(busy))
        busy[least] += 1
        counts[least] += 1
    return counts


def _on_a_v(of_ranks, embedding, head):
    """The layers of each rank, as equal in its two stages as they can be."""
    ranks = len(of_ranks)
    counts = [0] * (2 * ranks)
    for rank, layers in enumerate(of_ranks):
        ends = (embedding, head) if rank == 0 else (0, 0)
        counts[rank], counts[-1 - rank] = _dealt(layers, ends)
    return counts


@right("5.7")
def deals_twice(layers, ranks, embedding, head):
    of_ranks = _dealt(layers, [embedding + head] + [0] * (ranks - 1))
    return _on_a_v(of_ranks, embedding, head)


@right("5.7")
def tries_each_number_on_rank_0(layers, ranks, embedding, head):
    def of_ranks(first):
        others, more = divmod(layers - first, max(1, ranks - 1))
        return [first, *(others + (rank < more) for rank in range(ranks - 1))]

    def slowest(first):
        own, *others = of_ranks(first)
        return max([own + embedding + head, *others])

    first = min(range(layers + 1), key=slowest) if ranks > 1 else layers
    return _on_a_v(of_ranks(first), embedding, head)


@wrong("5.7", names="not-counts")
def counts_by_rank(layers, ranks, embedding, head):
    return _dealt(layers, [embedding + head] + [0] * (ranks - 1))


@wrong("5.7", names="other-order")
def lists_rank_after_rank(layers, ranks, embedding, head):
    counts = deals_twice(layers, ranks, embedding, head)
    return [counts[stage] for rank in range(ranks) for stage in (rank, -1 - rank)]


@wrong("5.7", names="ends-forgotten")
def as_many_layers_in_each_stage(layers, ranks, embedding, head):
    return _on_a_v(_dealt(layers, [0] * ranks), embedding, head)


@wrong("5.7", names="one-end")
def forgets_the_head(layers, ranks, embedding, head):
    return deals_twice(layers, ranks, embedding, 0)


@wrong("5.7", names="one-end")
def forgets_the_embedding(layers, ranks, embedding, head):
    return deals_twice(layers, ranks, 0, head)


@wrong("5.7", names="looped")
def puts_the_head_on_the_last_rank(layers, ranks, embedding, head):
    begun = [embedding + head] if ranks == 1 else [embedding, *[0] * (ranks - 2), head]
    of_ranks = _dealt(layers, begun)
    halves = [_dealt(n, (0, 0)) for n in of_ranks]
    return [half[0] for half in halves] + [half[1] for half in halves]


@wrong("5.7", names="by-stage")
def makes_all_stages_alike(layers, ranks, embedding, head):
    return _dealt(layers, [embedding, *[0] * (2 * ranks - 2), head])


@wrong("5.7", names="slowest-rank")
def gives_the_rest_to_rank_0(layers, ranks, embedding, head):
    share = layers // ranks
    return _on_a_v([layers - share * (ranks - 1), *[share] * (ranks - 1)], embedding, head)


@wrong("5.7", names="uneven")
def halves_the_layers_of_rank_0(layers, ranks, embedding, head):
    of_ranks = _dealt(layers, [embedding + head] + [0] * (ranks - 1))
    return _on_a_v(of_ranks, 0, 0)


@wrong("5.7", names="other-order")
def goes_down_twice(layers, ranks, embedding, head):
    counts = deals_twice(layers, ranks, embedding, head)
    return counts[:ranks] + counts[ranks:][::-1]


@wrong("5.7", names="slowest-rank")
def rounds_the_ends_down(layers, ranks, embedding, head):
    return deals_twice(layers, ranks, int(embedding), int(head))


@wrong("5.7", names="uneven")
def swaps_the_ends(layers, ranks, embedding, head):
    return deals_twice(layers, ranks, head, embedding)
