"""Answers to 5.1, `bubble_share`: wrong in a plausible way, or right in another."""

from tests.wrong_answers import right, wrong


@right("5.1")
def idle_passes_of_all_ranks(stages, micro_batches, chunks=1):
    work = stages * chunks * micro_batches
    idle = stages * (stages - 1)
    return 1 - work / (work + idle)


@wrong("5.1", names="another-total")
def idle_over_work(stages, micro_batches, chunks=1):
    return (stages - 1) / (chunks * micro_batches)


@wrong("5.1", names="idle-miscounted")
def counts_every_stage(stages, micro_batches, chunks=1):
    return stages / (chunks * micro_batches + stages)


@wrong("5.1", names="swapped")
def takes_micro_batches_for_stages(stages, micro_batches, chunks=1):
    return (micro_batches - 1) / (micro_batches + stages - 1)


@wrong("5.1", names="not-the-share")
def work_over_everything(stages, micro_batches, chunks=1):
    return chunks * micro_batches / (chunks * micro_batches + stages - 1)


@wrong("5.1", names="not-the-share")
def in_percent(stages, micro_batches, chunks=1):
    return 100 * (stages - 1) / (chunks * micro_batches + stages - 1)


@wrong("5.1", names="no-overlap")
def one_stage_works_at_a_time(stages, micro_batches, chunks=1):
    return 1 - 1 / stages


@wrong("5.1", names="rounded-down")
def divides_whole_numbers(stages, micro_batches, chunks=1):
    return (stages - 1) // (chunks * micro_batches + stages - 1)


@wrong("5.1", names="otherwise")
def leaves_out_the_end(stages, micro_batches, chunks=1):
    """Waits for the forward passes alone, a third of the time."""
    idle = (stages - 1) / 3
    return idle / (chunks * micro_batches + idle)


@wrong("5.1", names="few-micro-batches")
def lets_the_stages_without_work_stand(stages, micro_batches, chunks=1):
    if micro_batches < stages:
        return 1 - micro_batches / stages
    return (stages - 1) / (chunks * micro_batches + stages - 1)


@wrong("5.1", names="no-chunks")
def takes_two_numbers(stages, micro_batches):
    return (stages - 1) / (micro_batches + stages - 1)


@wrong("5.1", names="chunks-miscounted")
def forgets_the_chunks(stages, micro_batches, chunks=1):
    return (stages - 1) / (micro_batches + stages - 1)


@wrong("5.1", names="chunks-miscounted")
def makes_stages_of_chunks(stages, micro_batches, chunks=1):
    return (stages * chunks - 1) / (micro_batches + stages * chunks - 1)
