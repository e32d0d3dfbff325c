"""5.1, `bubble_share`: answers written from the stub alone."""


def over_the_work(stages, micro_batches, chunks=1):
    """The idle time as a share of the working time, not of the total."""
    return (stages - 1) / (chunks * micro_batches)


def chunks_forgotten(stages, micro_batches, chunks=1):
    """The interleaved schedule counts as 1F1B."""
    return (stages - 1) / (micro_batches + stages - 1)


def more_chunks_more_idle(stages, micro_batches, chunks=1):
    """Each chunk counts as a further stage."""
    all_stages = stages * chunks
    return (all_stages - 1) / (micro_batches + all_stages - 1)


def divides_the_share(stages, micro_batches, chunks=1):
    """The share of 1F1B, divided by the chunks: idle time shrinks, and so does the total."""
    return (stages - 1) / (micro_batches + stages - 1) / chunks


def all_stages_idle(stages, micro_batches, chunks=1):
    """Takes `stages` where it is `stages - 1`: a single stage is idle, too."""
    return stages / (chunks * micro_batches + stages)


def in_percent(stages, micro_batches, chunks=1):
    """A number between 0 and 100."""
    return 100 * (stages - 1) / (chunks * micro_batches + stages - 1)


ANSWERS = {
    "5.1": [
        over_the_work,
        chunks_forgotten,
        more_chunks_more_idle,
        divides_the_share,
        all_stages_idle,
        in_percent,
    ]
}
